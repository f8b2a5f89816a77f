"""A mixture-of-experts layer with a residual addition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, Recipe, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.moe.moe_apply import _inputs, moe_apply
from tokenspeed_kernel_base.ops.moe.plan import OPERAND_FORMATS, PLAN_KINDS, MoEPlan, intermediates_of, signature_of, traits_of
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat
from tokenspeed_kernel_base.spec import CANONICAL
from tokenspeed_kernel_base.variation import Variation


@operator(
    "moe",
    "moe_apply_add",
    formats=OPERAND_FORMATS,
    traits=PLAN_KINDS,
    reference_traits={"weight_layout": CANONICAL},
    fixed_traits=("weight_layout", "processed_weights"),
    in_place={"out": ("residual",)},
    varying=("tokens",),
    parts=(moe_apply,),
)
def moe_apply_add(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    residual: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Applies a mixture-of-experts layer and adds a residual: ``moe_apply(...) + residual``.

    The operator is a composition of `moe_apply` and an addition. The result of `moe_apply` is rounded to x's dtype. A fused kernel
    may round only once.

    Args:
        x: the plan's dtype ``[tokens, hidden]``.
        weights: the result of `moe_apply.prepare` for the plan.
        topk_weights: float32 ``[tokens, top_k]``.
        topk_ids: int32 ``[tokens, top_k]``, below ``plan.num_experts``; a negative id skips the slot.
        plan: the result of `moe_apply.plan`. A fused kernel must support the plan's ``weight_layout``.
        residual: x's dtype ``[tokens, hidden]``.
        out: receives the result; may be the residual.

    Returns:
        x's dtype ``[tokens, hidden]``.

    Raises:
        TypeError, ValueError: see `moe_apply`. Raised before anything is launched.
        NoKernelFoundError: no registered kernel supports the plan and the layout of the weights.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import MoEWeights, moe_apply, moe_apply_add, moe_topk
        >>> plan = moe_apply.plan(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6, dtype=torch.float32, device="cpu")
        >>> weights = MoEWeights(torch.randn(4, 12, 8), None, None, torch.randn(4, 8, 6), None, None)
        >>> weights = moe_apply.prepare(weights, plan)
        >>> topk_weights, topk_ids = moe_topk(torch.randn(3, 4), top_k=2)
        >>> moe_apply_add(torch.randn(3, 8), weights, topk_weights, topk_ids, plan, residual=torch.ones(3, 8)).shape
        torch.Size([3, 8])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads topk_ids on the host.
    """
    return torch.add(moe_apply(x, weights, topk_weights, topk_ids, plan), residual, out=out)


@moe_apply_add.formats
def _(plan: MoEPlan) -> FormatSignature:
    return signature_of(plan)


@moe_apply_add.intermediates
def _(plan: MoEPlan) -> tuple[TensorFormat, ...]:
    return intermediates_of(plan)


@moe_apply_add.traits
def _(plan: MoEPlan) -> dict[str, object]:
    return traits_of(plan)


@moe_apply_add.check
def _(check: Checker, residual: Tensor, **arguments: Any) -> None:
    moe_apply.operator.run_hook("check", arguments, check)
    check.tensor("residual", residual, "tokens hidden", arguments["x"].dtype)


@moe_apply_add.check_values(host=("topk_ids",))
def _(check: Checker, topk_ids: Tensor | None, plan: MoEPlan) -> None:
    moe_apply.operator.run_hook("check_values", {"topk_ids": topk_ids, "plan": plan}, check)


@moe_apply_add.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@recipe
def _inputs_and_residual(
    tokens: int, experts: int, top_k: int, hidden: int, intermediate: int, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments of `moe_apply`, and a residual."""
    layer = _inputs(tokens, experts, top_k, hidden, intermediate, **options)

    def make(draw: Draw) -> dict[str, Any]:
        arguments = layer(draw)
        return {**arguments, "residual": draw.normal(*arguments["x"].shape, dtype=arguments["x"].dtype)}

    return make


@moe_apply_add.cases
def _() -> list[Case]:
    wanted = ("float32, 4 experts", "dense bfloat16", "mxfp4, gpt-oss", "no tokens", "gpt-oss-120b decode")
    found = [case for case in moe_apply.operator.all_cases() if any(part in case.name for part in wanted)]
    recipes = ((case, case.make) for case in found)
    return [Case(c.name, _inputs_and_residual(**make.values), large=c.large) for c, make in recipes if isinstance(make, Recipe)]


@moe_apply_add.work
def _(topk_ids: Tensor, plan: MoEPlan) -> Any:
    return moe_apply.operator.run_hook("work", {"topk_ids": topk_ids, "plan": plan})


@moe_apply_add.vary
def _(variation: Variation, **arguments: Any) -> dict[str, Any]:
    return moe_apply.operator.varied(arguments, variation)


@moe_apply_add.cost
def _(residual: Tensor, **arguments: Any) -> Cost:
    cost = moe_apply.operator.run_hook("cost", arguments)
    return Cost(flops=cost.flops + residual.numel(), bytes=cost.bytes + nbytes(residual))
