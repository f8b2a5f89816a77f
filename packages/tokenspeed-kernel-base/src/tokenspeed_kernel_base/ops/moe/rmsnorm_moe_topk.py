"""Fused RMSNorm, router GEMM and top-k selection of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.explanation import bucket
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.gemm.mm import mm
from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk
from tokenspeed_kernel_base.ops.norm.rmsnorm import RESIDUAL_KINDS, check_residual, residual_traits, rmsnorm
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format


@operator(
    "moe",
    "rmsnorm_moe_topk",
    formats=("x", "router_weight"),
    traits={**moe_topk.operator.traits, "tokens": int, "hidden": int, **RESIDUAL_KINDS, "router_bias": bool},
    outs=("out", "weights_out", "ids_out", "residual_out"),
    in_place={"residual_out": ("x", "residual")},
    varying=("tokens",),
    parts=(rmsnorm, mm, moe_topk),
)
def rmsnorm_moe_topk(
    x: Tensor,
    norm_weight: Tensor,
    router_weight: Tensor,
    top_k: int,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    router_bias: Tensor | None = None,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling_factor: float = 1.0,
    out: Tensor | None = None,
    weights_out: Tensor | None = None,
    ids_out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """RMSNorm, router GEMM and top-k selection: returns the normalised tokens, routing weights and expert ids.

    The operator is a composition of three operators. `rmsnorm` first adds the residual, if there is one. `mm` applies the router's
    weight and bias, and rounds the logits to x's dtype. `moe_topk` selects the experts. A fused kernel rounds at the same points.
    The fused kernel selects the same experts, unless another order of summation changes a rounding that decides the selection.

    Args:
        x: float16, bfloat16, float32 or float64 ``[tokens, hidden]``.
        norm_weight: any float dtype ``[hidden]``.
        router_weight: x's dtype ``[hidden, experts]``. A weight stored as ``[experts, hidden]`` is passed as ``weight.t()``.
        top_k: experts to select.
        eps: added to the mean square, > 0.
        residual: ``[tokens, hidden]`` of x's dtype, or of float32 if x is float16 or bfloat16. Added to x before the normalisation.
        router_bias: x's dtype ``[experts]``, added to the GEMM's result.
        scoring: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``; this and the following parameters are as in `moe_topk`.
        renormalize: whether the weights of a token are divided by their sum.
        correction_bias: any float dtype ``[experts]``, added to scores for the selection only.
        num_groups: number of equal groups of experts; 1 for no groups.
        top_groups: number of groups that experts may come from.
        scaling_factor: multiplies the weights.
        out: receives the normalised tokens.
        weights_out: receives the weights.
        ids_out: receives the ids.
        residual_out: receives ``x + residual``; may be residual or x. Allowed only with a residual.

    Returns:
        The normalised tokens, like x; weights: float32 ``[tokens, top_k]``; ids: int32 ``[tokens, top_k]``, best first; with a
        residual also ``x + residual``, in the residual's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import rmsnorm_moe_topk
        >>> normed, weights, ids = rmsnorm_moe_topk(torch.tensor([[3.0, 4.0]]), torch.ones(2), torch.eye(2), top_k=1)
        >>> weights, ids
        (tensor([[1.]]), tensor([[1]], dtype=torch.int32))

    Safe in CUDA graphs.
    """
    normed: Any
    total: Any
    if residual is None:
        normed, total = rmsnorm(x, norm_weight, eps, out=out), None
    else:
        normed, total = rmsnorm(x, norm_weight, eps, residual=residual, out=out, residual_out=residual_out)
    logits = mm(normed, router_weight, bias=router_bias)
    weights, ids = moe_topk(
        logits,
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=correction_bias,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=scaling_factor,
        weights_out=weights_out,
        ids_out=ids_out,
    )
    return (normed, weights, ids) if total is None else (normed, weights, ids, total)


@rmsnorm_moe_topk.traits
def _(x: Tensor, residual: Tensor | None, router_weight: Tensor, router_bias: Tensor | None, **arguments: Any) -> dict[str, object]:
    logits = {"logits": x.new_empty(x.shape[0], router_weight.shape[1], device="meta")}
    return {
        **moe_topk.operator.run_hook("traits", {**arguments, **logits}),
        "tokens": bucket(x.shape[0]),
        "hidden": x.shape[1],
        **residual_traits(x, residual),
        "router_bias": router_bias is not None,
    }


@rmsnorm_moe_topk.intermediates
def _(x: Tensor) -> tuple[TensorFormat, ...]:
    return (dense_tensor_format(x.dtype),)  # the logits


@rmsnorm_moe_topk.check
def _(
    check: Checker,
    x: Tensor,
    norm_weight: Tensor,
    router_weight: Tensor,
    eps: float,
    residual: Tensor | None,
    router_bias: Tensor | None,
    **arguments: Any,
) -> None:
    check.tensor("x", x, "tokens hidden", FLOATS)
    check.tensor("norm_weight", norm_weight, "hidden", FLOATS)
    check.tensor("router_weight", router_weight, "hidden experts", x.dtype)
    check.tensor("router_bias", router_bias, "experts", x.dtype)
    check.require(eps > 0, "eps", "positive", eps)
    check_residual(check, residual, x)
    logits = torch.empty(x.shape[0], router_weight.shape[1], dtype=x.dtype, device="meta")
    moe_topk.operator.run_hook("check", {**arguments, "logits": logits}, check)


@rmsnorm_moe_topk.fake
def _(x: Tensor, top_k: int, residual: Tensor | None) -> tuple[Tensor, ...]:
    shape = (x.shape[0], top_k)
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    chosen = normed, x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)
    return chosen if residual is None else (*chosen, torch.empty_like(normed, dtype=residual.dtype))


@recipe
def _inputs(
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    residual: bool = True,
    residual_dtype: torch.dtype | None = None,
    bias: bool = True,
    correction: bool = False,
    **options: Any,
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "x": draw.normal(tokens, hidden, dtype=dtype),
            "norm_weight": 1 + draw.normal(hidden, scale=0.1, dtype=dtype),
            "router_weight": draw.normal(experts, hidden, dtype=dtype, scale=2 * hidden**-0.5).t(),
            "top_k": top_k,
            "residual": draw.normal(tokens, hidden, dtype=residual_dtype or dtype) if residual else None,
            "router_bias": draw.normal(experts, dtype=dtype) if bias else None,
            "correction_bias": draw.normal(experts, scale=0.1) if correction else None,
            **options,
        }

    return make


@rmsnorm_moe_topk.cases
def _() -> list[Case]:
    groups: dict[str, Any] = {"scoring": "sigmoid", "correction": True, "num_groups": 8, "top_groups": 4, "scaling_factor": 2.5}
    return [
        Case("odd sizes, float32", _inputs(3, 33, 7, 2, torch.float32)),
        Case("gpt-oss-120b decode 1", _inputs(1, 2880, 128, 4)),
        Case("gpt-oss-120b decode 4, no residual", _inputs(4, 2880, 128, 4, residual=False)),
        Case("gpt-oss-20b decode 16, float16", _inputs(16, 2880, 32, 4, torch.float16)),
        Case("groups, sigmoid and correction, float32", _inputs(5, 96, 64, 6, torch.float32, bias=False, **groups)),
        Case("a row shorter than a cache line", _inputs(2, 16, 8, 2)),
        Case(
            "float32 residual, square root of softplus", _inputs(3, 64, 16, 2, residual_dtype=torch.float32, scoring="sqrtsoftplus")
        ),
        Case("gpt-oss-120b experts, narrow, 40 tokens", _inputs(40, 264, 128, 4)),
        Case("no tokens", _inputs(0, 64, 8, 2)),
        *(Case(f"gpt-oss-120b decode {m}", _inputs(m, 2880, 128, 4), large=True) for m in (8, 16, 64)),
        Case("gpt-oss-120b prefill 4096", _inputs(4096, 2880, 128, 4), large=True),
    ]


@rmsnorm_moe_topk.cost
def _(
    x: Tensor, norm_weight: Tensor, router_weight: Tensor, top_k: int, residual: Tensor | None, router_bias: Tensor | None
) -> Cost:
    streams = 2 if residual is None else 4
    moved = streams * nbytes(x) + nbytes(norm_weight, router_weight, router_bias) + 8 * top_k * x.shape[0]
    return Cost(flops=4.0 * x.numel() + 2.0 * x.numel() * router_weight.shape[1], bytes=moved)
