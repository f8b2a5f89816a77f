"""`moe_apply` with mxfp4 weights on Hopper.

Two implementations read weights in the layout of `mxfp4.layout`. `stream` is for few (token, slot) pairs per expert, where reading
weights is the bottleneck: one kernel for the whole layer. `grouped` is for many pairs: two grouped GEMMs, and kernels that sort the
pairs and sum over slots. For very many pairs, clusters of two CTAs share activations (`grouped.paired`).

A plan is valid for any number of tokens. So each call chooses the implementation by its number of pairs. This kernel is preferred
to the portable kernel. On an H200 it was faster at all measured numbers of tokens of GPT-OSS-120B, from 1 to 8192, with 16-bit
activations (`benchmarks/h200_moe.json`) and with fp8 activations (`benchmarks/h200_moe_fp8.json`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import LAYOUT
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.weights import prepare_weights, require_rounded
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import PARTS, inputs_for, is_paired
from tokenspeed_kernel_nvidia.sm90.moe.grouped.launch import moe_apply_many, moe_apply_rounded
from tokenspeed_kernel_nvidia.sm90.moe.grouped.paired import moe_apply_paired
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import MAX_EXPERTS, MAX_PAIRS, MAX_TOP_K, max_k
from tokenspeed_kernel_nvidia.sm90.moe.stream.launch import moe_apply_few

_NAME = "cutedsl_moe_apply_mxfp4"
ACCURACY = "up to a quarter of a row's elements err by at most 2^-21 of the row's amax, unless the plan needs exact activations"
_ROUNDED_ACCURACY = "fp8 MMAs keep about 14 bits of an accumulator, over at most 256 elements of k"
# The largest mean number of pairs per expert for `stream`. An entry of `stream` has at most 16 pairs, which share one read of an
# expert's weights.
_FEW = 16
# If `grouped` would use `PARTS` (split elements), `stream` is used only up to these smaller numbers of pairs: per expert, or in
# total. Microseconds of GPT-OSS-120B's layer on an H200, `stream` then `grouped`: 359 and 396 for 64 tokens (256 pairs, 2 per
# expert), 508 and 447 for 128, 501 and 453 for 256.
_FEW_BESIDE_SPLIT = 3
_FEW_IN_ALL = 384
# With fp8 activations, `stream` is used up to this mean number of pairs per expert. Microseconds of the same layer, `stream` then
# `grouped`: 335 and 375 for 64 tokens (2 pairs per expert), 410 and 410 for 128, 453 and 422 for 256.
_FEW_ROUNDED = 4


def is_streamed(dtype: str, pairs: int, experts: int, rounded: bool = False) -> bool:
    """Returns whether a call with this number of (token, slot) pairs uses `stream`. ``rounded``: whether activations are fp8."""
    most = min(MAX_PAIRS, (_FEW_ROUNDED if rounded else _FEW) * experts)
    if not rounded and inputs_for(dtype, pairs, experts) == (PARTS,):
        most = min(most, max(_FEW_BESIDE_SPLIT * experts, _FEW_IN_ALL))
    return pairs <= most


@functools.cache
def _require_supported(plan: MoEPlan) -> None:
    """Raises ValueError if the kernel does not support the sizes or the activation dtype of a plan. The registered traits are not
    enough, because they are not checked if the caller names the kernel.
    """
    limits = {"num_experts": MAX_EXPERTS, "top_k": MAX_TOP_K, "hidden_size": max_k(), "intermediate_size": max_k()}
    for name, most in limits.items():
        if getattr(plan, name) > most:
            raise ValueError(f"moe_apply: plan.{name} must be at most {most} for {_NAME}, got {getattr(plan, name)}")
    if plan.activation_dtype not in ("none", "fp8"):
        raise ValueError(f"moe_apply: plan.activation_dtype must be 'none' or 'fp8' for {_NAME}, got {plan.activation_dtype!r}")


def _suits_number_of_pairs(request: Any, config: Mapping[str, Any]) -> str | None:
    """Returns why a configuration is invalid for a request, or None if it is valid. `stream` is invalid for more pairs than one
    launch handles, because each of several launches would read all weights.
    """
    pairs = request.sizes["tokens"] * request.traits["top_k"]
    if config["grouped"]:
        return None
    if request.traits["exact_activations"]:
        return "`stream` splits activations into fp8 values, which may be inexact"
    return f"{pairs} pairs exceed the {MAX_PAIRS} of one launch" if pairs > MAX_PAIRS else None


def _registered(name: str, accuracy: str, **traits: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that registers `moe_apply` with a name, a note on accuracy, and further traits."""
    return register_kernel(
        "moe",
        "moe_apply",
        name=name,
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures={format_signature(x=dense_tensor_format(dtype), w13=mxfp4_format(), w2=mxfp4_format()) for dtype in DTYPES},
        traits={
            "weight_layout": LAYOUT,
            "processed_weights": True,
            "activation": "swiglu",
            "num_experts": at_most(MAX_EXPERTS),
            "top_k": at_most(MAX_TOP_K),
            "hidden_size": at_most(max_k()),
            "intermediate_size": at_most(max_k()),
            "bias": any,
            "w13_interleaved": any,
            "swiglu_limit": any,
            "swiglu_alpha_beta": any,
            "inexact_experts": any,  # inexact experts use 16-bit MMAs
            "wide_activations": any,
            "exact_activations": any,
            **traits,
        },
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
        accuracy=accuracy,
        weight_preprocessor=prepare_weights,
        tunables={"grouped": [False, True]},
        tunable_if=_suits_number_of_pairs,
    )


@_registered(_NAME, ACCURACY)
def moe_apply(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
    *,
    grouped: bool | None = None,
) -> Tensor:
    """Implements the operator `moe_apply`; for the arguments see there. Weights must be in the layout that `prepare_weights` makes.

    ``grouped``: True uses `grouped`, False `stream`; None chooses by the number of pairs. Exact activations always use `grouped`.

    Raises:
        ValueError: the kernel does not support a size or the activation dtype of the plan.
        TypeError: activations are fp8, and the weights are not `RoundedWeights`.
    """
    _require_supported(plan)
    rounded = plan.activation_dtype == "fp8"
    if rounded:
        require_rounded(weights)
    if plan.exact_activations and not rounded:  # `stream` splits activations into fp8 terms, which may be inexact
        grouped = True
    elif grouped is None:
        grouped = not is_streamed(DTYPES[x.dtype], topk_ids.numel(), plan.num_experts, rounded)
    launch: Callable[..., Tensor] = moe_apply_few
    if grouped:
        launch = moe_apply_rounded if rounded else moe_apply_many
        sizes = plan.num_experts, plan.hidden_size, plan.intermediate_size
        if is_paired(DTYPES[x.dtype], topk_ids.numel(), *sizes, rounded) and not (rounded and require_rounded(weights).inexact):
            launch = moe_apply_paired
    return launch(x, weights, topk_weights, topk_ids, plan, out)


_registered(_NAME + "_fp8", _ROUNDED_ACCURACY, fp8_activations={True})(moe_apply)
