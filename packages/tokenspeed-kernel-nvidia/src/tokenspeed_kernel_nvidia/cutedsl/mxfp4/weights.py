"""Prepares mxfp4 weights of an expert layer, and finds the experts whose weights float8_e5m2 represents exactly.

With fp8 activations, the MMAs can use weights as float8_e5m2: each e2m1 value times the ratio of its scale to the row's largest
scale. This operand is exact if a row's scales are at most `OCTAVES` powers of two apart; scales of all-zero blocks do not count.
Experts with any other row are *inexact*: they use 16-bit operands, which represent every value. This module finds the inexact
experts when weights are loaded. The weights' ``card`` lists them. The trait ``inexact_experts`` of a call excludes kernels that
have only fp8 MMAs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.traits import TraitKind
from tokenspeed_kernel_nvidia.cutedsl.mxfp4 import layout

# The smallest nonzero e2m1 value, 0.5, times a scale ratio of 2^-15 is 2^-16, the smallest positive float8_e5m2.
OCTAVES = 15


_NAMED = 16  # the maximum number of inexact experts that `RoundedWeights.card` lists


@dataclass
class RoundedWeights(MoEWeights, Resource):
    """Weights for fp8 activations, in the layout of `layout`.

    Attributes:
        exact: int32 ``[experts]``, 1 for experts whose weights float8_e5m2 represents exactly, otherwise 0.
        inexact_ids: the ids of the experts whose ``exact`` is 0, ascending.
    """

    exact: Tensor | None = None
    inexact_ids: tuple[int, ...] = ()
    key: Any = field(default=None, repr=False)
    trait_kinds: ClassVar[Mapping[str, TraitKind]] = {"inexact_experts": bool}

    @property
    def inexact(self) -> int:
        """The number of experts whose weights float8_e5m2 does not represent exactly."""
        return len(self.inexact_ids)

    @property
    def traits(self) -> Mapping[str, Any]:
        """``inexact_experts``: True if float8_e5m2 does not represent some experts' weights exactly."""
        return {"inexact_experts": bool(self.inexact_ids)}

    @property
    def card(self) -> str:
        """A sentence that says how many experts use fp8 MMAs, and lists those that use 16-bit MMAs."""
        count = 0 if self.exact is None else len(self.exact)
        if not self.inexact:
            return f"{count} experts: float8 MMAs use all weights exactly"
        named = ", ".join(map(str, self.inexact_ids[:_NAMED]))
        more = self.inexact - _NAMED
        which = f"{named} and {more} more" if more > 0 else named
        exact = f"{count} experts: float8 MMAs use the weights of {count - self.inexact} exactly"
        return f"{exact}; {self.inexact} with scales more than {OCTAVES} octaves apart in a row have 16-bit MMAs: {which}"

    def __str__(self) -> str:
        return self.card


def require_rounded(weights: MoEWeights) -> RoundedWeights:
    """Returns ``weights``, the weights of a call with fp8 activations. Raises TypeError if they are not `RoundedWeights`."""
    if not isinstance(weights, RoundedWeights):
        wanted = "what moe_apply.prepare makes for fp8 activations"
        raise TypeError(f"moe_apply: weights must be {wanted}, got {type(weights).__name__}")
    return weights


def exact_experts(*scales: Tensor | None) -> Tensor:
    """Returns int32 ``[experts]``: 1 for experts whose scales are at most `OCTAVES` powers of two apart in every row, otherwise 0.

    Args:
        scales: the scales of each projection, uint8 ``[experts, rows, k / 32]``.
    """
    result: Tensor | None = None
    for scale in scales:
        assert scale is not None  # checked by the operator
        near = (scale.amax(-1).int() - scale.amin(-1).int()).amax(-1) <= OCTAVES
        result = near if result is None else result & near
    assert result is not None
    return result.int()


def prepare_weights(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Like `layout.prepare_weights`. For fp8 activations, waits for the device and returns `RoundedWeights`."""
    if plan.activation_dtype != "fp8":
        return layout.prepare_weights(weights, plan)
    assert weights.w13_weight_scale is not None  # checked by the operator
    assert weights.w2_weight_scale is not None
    weights = replace(
        weights,
        w13_weight_scale=layout.scales_beside_zeros(weights.w13_weight, weights.w13_weight_scale),
        w2_weight_scale=layout.scales_beside_zeros(weights.w2_weight, weights.w2_weight_scale),
    )
    prepared = layout.prepare_weights(weights, plan)
    exact = exact_experts(weights.w13_weight_scale, weights.w2_weight_scale)
    known = [] if exact.device.type == "meta" else exact.tolist()  # weights without data count as exact
    inexact = tuple(expert for expert, is_exact in enumerate(known) if not is_exact)
    return RoundedWeights(
        prepared.w13_weight, None, None, prepared.w2_weight, None, None, prepared.layout, exact, inexact,
        (prepared.layout, len(inexact), len(exact)),
    )  # fmt: skip
