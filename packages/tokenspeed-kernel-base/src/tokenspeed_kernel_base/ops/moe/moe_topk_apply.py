"""A mixture-of-experts layer that starts from the router's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, Recipe, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.moe.moe_apply import _inputs, drawn_as, moe_apply
from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk
from tokenspeed_kernel_base.ops.moe.plan import OPERAND_FORMATS, PLAN_KINDS, MoEPlan, intermediates_of, signature_of, traits_of
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.planning import Preparation
from tokenspeed_kernel_base.signature import FormatSignature, TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.spec import CANONICAL
from tokenspeed_kernel_base.variation import Variation, Want

_PLAN_TRAITS = ("num_experts", "top_k")  # traits of both moe_topk and moe_apply


@operator(
    "moe",
    "moe_topk_apply",
    formats={"logits": ("dense",), **OPERAND_FORMATS},
    traits={**moe_topk.operator.traits, **PLAN_KINDS},
    reference_traits={"weight_layout": CANONICAL},
    fixed_traits=("weight_layout", "processed_weights"),
    varying=("tokens",),
    planned="plan",
    layout="weight_layout",
    parts=(moe_topk, moe_apply),
)
def moe_topk_apply(
    x: Tensor,
    logits: Tensor,
    weights: MoEWeights,
    plan: MoEPlan,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Routes each token by the router's logits and applies the mixture-of-experts layer: `moe_topk`, then `moe_apply`.

    The operator is a composition of these two operators. A fused kernel selects the same experts, because the selection is exact.

    Args:
        x: the plan's dtype ``[tokens, hidden]``.
        logits: float16, bfloat16, float32 or float64 ``[tokens, plan.num_experts]``, the router's logits of all experts. Under
            expert parallelism call `moe_topk` and `moe_apply` instead.
        weights: the result of `moe_apply.prepare` for the plan.
        plan: the result of `moe_apply.plan`; ``plan.top_k`` experts are selected. A fused kernel must support the plan's
            ``weight_layout``.
        scoring: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``; this and the following parameters are as in `moe_topk`.
        renormalize: whether the weights of a token are divided by their sum.
        correction_bias: any float dtype ``[experts]``, added to scores for the selection only.
        num_groups: number of equal groups of experts; 1 for no groups.
        top_groups: number of groups that experts may come from.
        scaling_factor: multiplies the weights.
        out: receives the result; must not overlap x.

    Returns:
        ``[tokens, hidden]`` in x's dtype.

    Raises:
        TypeError, ValueError: see `moe_topk` and `moe_apply`. Raised before anything is launched.
        NoKernelFoundError: no registered kernel supports the plan and the layout of the weights.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import MoEWeights, moe_apply, moe_topk_apply
        >>> plan = moe_apply.plan(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6, dtype=torch.float32, device="cpu")
        >>> weights = MoEWeights(torch.randn(4, 12, 8), None, None, torch.randn(4, 8, 6), None, None)
        >>> weights = moe_apply.prepare(weights, plan)
        >>> moe_topk_apply(torch.randn(3, 8), torch.randn(3, 4), weights, plan).shape
        torch.Size([3, 8])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads the selected ids on the host.
    """
    topk_weights, topk_ids = moe_topk(
        logits,
        plan.top_k,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=correction_bias,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=scaling_factor,
    )
    return moe_apply(x, weights, topk_weights, topk_ids, plan, out=out)


@moe_topk_apply.formats
def _(logits: Tensor, plan: MoEPlan) -> FormatSignature:
    return FormatSignature((*signature_of(plan).roles, ("logits", dense_tensor_format(logits.dtype))))


@moe_topk_apply.intermediates
def _(plan: MoEPlan) -> tuple[TensorFormat, ...]:
    return intermediates_of(plan)


@moe_topk_apply.traits
def _(logits: Tensor, plan: MoEPlan, **arguments: Any) -> dict[str, object]:
    routing = moe_topk.operator.run_hook("traits", {**arguments, "logits": logits, "top_k": plan.top_k})
    return {**{name: value for name, value in routing.items() if name not in _PLAN_TRAITS}, **traits_of(plan)}


@moe_topk_apply.check
def _(check: Checker, x: Tensor, logits: Tensor, weights: MoEWeights, plan: MoEPlan, **arguments: Any) -> None:
    check.tensor("logits", logits, "tokens experts", FLOATS)
    if check["experts"] != plan.num_experts:
        check.fail("logits", f"of shape [tokens, plan.num_experts] = [tokens, {plan.num_experts}]", list(logits.shape))
    moe_topk.operator.run_hook("check", {**arguments, "logits": logits, "top_k": plan.top_k}, check)
    chosen = {
        "topk_weights": logits.new_empty(len(logits), plan.top_k, dtype=torch.float32),
        "topk_ids": logits.new_empty(len(logits), plan.top_k, dtype=torch.int32),
    }
    moe_apply.operator.run_hook("check", {"x": x, "weights": weights, "plan": plan, **chosen}, check)


@moe_topk_apply.prepare
def _(preparation: Preparation, weights: Any, plan: MoEPlan) -> MoEWeights:
    prepared: MoEWeights = moe_apply.operator.run_hook("prepare", {"weights": weights, "plan": plan}, preparation)
    return prepared


@moe_topk_apply.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@recipe
def _inputs_and_logits(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    *,
    logits_dtype: torch.dtype = torch.bfloat16,
    routing: dict[str, Any] | None = None,
    corrected: bool = False,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments of `moe_apply`, and router logits of dtype ``logits_dtype``. ``routing`` holds options of `moe_topk`.
    ``corrected``: whether to draw a correction bias."""
    layer = _inputs(tokens, experts, top_k, hidden, intermediate, **options)

    def make(draw: Draw) -> dict[str, Any]:
        arguments = {name: value for name, value in layer(draw).items() if not name.startswith("topk_")}
        # These logits spread the routing weights over the slots, as in the cases of `moe_apply`. So errors of narrow activations
        # average over slots.
        made = {**arguments, "logits": draw.normal(tokens, experts, dtype=logits_dtype), **(routing or {})}
        return {**made, "correction_bias": draw.normal(experts)} if corrected else made

    return make


@moe_topk_apply.cases
def _() -> list[Case]:
    wanted = ("float32, 4 experts", "dense bfloat16", "one token", "mxfp4, ", "no tokens", "gpt-oss-120b decode")
    found = [case for case in moe_apply.operator.all_cases() if any(part in case.name for part in wanted)]
    recipes = [(case, case.make) for case in found]
    cases = [Case(c.name, _inputs_and_logits(**make.values), large=c.large) for c, make in recipes if isinstance(make, Recipe)]
    mxfp4: dict[str, Any] = {"weight_format": "mxfp4", "activation_dtype": "fp8"}
    groups = {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scaling_factor": 2.5}
    return [
        *cases,
        Case("mxfp4, float32 logits, 300 experts", _inputs_and_logits(3, 300, 6, 32, 32, logits_dtype=torch.float32, **mxfp4)),
        Case(
            "mxfp4, float16 logits, scaled, not renormalised",
            _inputs_and_logits(
                9, 8, 3, 32, 64, logits_dtype=torch.float16, routing={"renormalize": False, "scaling_factor": 2.0}, **mxfp4
            ),
        ),
        Case(
            "mxfp4 in all, two of 16 experts",
            _inputs_and_logits(6, 16, 2, 64, 96, weight_format="mxfp4", activation_dtype="mxfp4"),
        ),
        Case("mxfp4, groups", _inputs_and_logits(5, 16, 6, 64, 32, routing=groups, **mxfp4)),
        Case("mxfp4, groups, a correction bias", _inputs_and_logits(4, 16, 6, 64, 32, routing=groups, corrected=True, **mxfp4)),
    ]


@moe_topk_apply.vary
def _(variation: Variation, x: Tensor, logits: Tensor, plan: MoEPlan) -> dict[str, Any]:
    if variation.want is not Want.CAPTURED:
        return {}
    sizes, options = drawn_as(plan)
    return _inputs_and_logits(len(x), *sizes, logits_dtype=logits.dtype, **options)(variation.draw)


@moe_topk_apply.cost
def _(x: Tensor, logits: Tensor, weights: MoEWeights, plan: MoEPlan) -> Cost:
    # Assumes uniform routing: the logits are not evaluated.
    hit = plan.num_experts * (1 - (1 - plan.top_k / plan.num_experts) ** len(x))
    tensors = (getattr(weights, f"{w}_weight{part}") for w in ("w13", "w2") for part in ("", "_scale", "_bias"))
    flops = 6.0 * len(x) * plan.top_k * plan.hidden_size * plan.intermediate_size
    return Cost(flops=flops, bytes=nbytes(*tensors) * hit / plan.num_experts + 2 * nbytes(x) + nbytes(logits))
