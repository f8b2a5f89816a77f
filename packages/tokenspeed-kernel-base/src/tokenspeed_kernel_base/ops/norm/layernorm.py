"""Layer normalisation, with an optional preceding residual addition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.norm.rmsnorm import RESIDUAL_KINDS, check_residual, empty_outputs, residual_traits


@operator(
    "norm",
    "layernorm",
    formats=("x",),
    traits={"hidden": int, **RESIDUAL_KINDS},
    outs=("out", "residual_out"),
    in_place={"out": ("x", "residual"), "residual_out": ("x", "residual")},
    varying=("rows",),
)
def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalisation over the last axis: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    The variance is the mean squared deviation of the row (Ba, Kiros & Hinton, 2016, arXiv:1607.06450). With a residual, ``s = x +
    residual`` is normalised instead. s is also returned, as the next layer's residual. s is first rounded to the residual's dtype,
    and the rounded s is normalised, so that both results are consistent. Arithmetic is float32 (float64 for float64 inputs); the
    result is rounded to x's dtype once.

    Args:
        x: float16, bfloat16, float32 or float64 ``[..., hidden]``.
        weight: float16, bfloat16, float32 or float64 ``[hidden]``, or None for 1.
        bias: float16, bfloat16, float32 or float64 ``[hidden]``, or None for 0.
        eps: added to the variance, > 0.
        residual: x's shape ``[..., hidden]`` and dtype, or float32 if x is float16 or bfloat16.
        out: receives the result; may be x or residual, but not the same tensor as ``residual_out``.
        residual_out: receives the sum; may be residual or x, but not the same tensor as ``out``. Allowed only with a residual.

    Returns:
        The normalised tensor, like x and contiguous; with a residual, ``(normalised, sum)``, the sum in the residual's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import layernorm
        >>> layernorm(torch.tensor([[1.0, 2.0, 3.0]]), bias=torch.tensor([0.0, 1.0, 0.0]))
        tensor([[-1.2247,  1.0000,  1.2247]])

    Safe in CUDA graphs.
    """
    total = x if residual is None else (x + residual).contiguous()
    wide = total.double() if x.dtype == torch.float64 else total.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(wide.dtype)
    if bias is not None:
        normed = normed + bias.to(wide.dtype)
    normed = normed.to(x.dtype).contiguous()
    return normed if residual is None else (normed, total)


@layernorm.traits
def _(x: Tensor, residual: Tensor | None) -> dict[str, object]:
    return {"hidden": x.shape[-1], **residual_traits(x, residual)}


@layernorm.check
def _(check: Checker, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None) -> None:
    check.tensor("x", x, "... hidden", FLOATS)
    check.tensor("weight", weight, "hidden", FLOATS)
    check.tensor("bias", bias, "hidden", FLOATS)
    check.require(eps > 0, "eps", "positive", eps)
    check_residual(check, residual, x)


@layernorm.fake
def _(x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    return empty_outputs(x, residual)


@recipe
def _inputs(
    *shape: int,
    dtype: torch.dtype = torch.bfloat16,
    parameters: str = "weight and bias",
    mean: float = 0.0,
    residual_dtype: torch.dtype | None = None,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments. ``parameters`` says which of weight and bias to pass. ``mean`` is the mean of x."""

    def make(draw: Draw) -> dict[str, Any]:
        return {
            "x": draw.normal(*shape, dtype=dtype) + mean,
            "weight": 1 + draw.normal(shape[-1], scale=0.1, dtype=dtype) if "weight" in parameters else None,
            "bias": draw.normal(shape[-1], scale=0.1, dtype=dtype) if "bias" in parameters else None,
            "residual": draw.normal(*shape, dtype=residual_dtype) if residual_dtype else None,
        }

    return make


@layernorm.cases
def _() -> list[Case]:
    bf16, f32 = torch.bfloat16, torch.float32
    return [
        Case("one row of 8, float32", _inputs(1, 8, dtype=f32)),
        Case("siglip 64 patches of 1152", _inputs(64, 1152)),
        Case("index keys of 128", _inputs(64, 128)),
        Case("weight alone, with residual", _inputs(5, 300, parameters="weight", residual_dtype=bf16)),
        Case("neither weight nor bias, odd hidden 1001, float16", _inputs(3, 5, 1001, dtype=torch.float16, parameters="none")),
        Case("mean 10, float32", _inputs(4, 512, dtype=f32, mean=10.0)),
        Case("float32 residual", _inputs(5, 300, residual_dtype=f32)),
        Case("very long rows, with residual, float32", _inputs(2, 33000, dtype=f32, residual_dtype=f32)),
        Case("very long rows, float16", _inputs(2, 33000, dtype=torch.float16)),
        Case("no rows", _inputs(0, 1152)),
        Case("siglip 65536 patches of 1152", _inputs(65536, 1152), large=True),
        Case("command-r prefill 16384, with residual", _inputs(16384, 8192, parameters="weight", residual_dtype=bf16), large=True),
    ]


@layernorm.cost
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Cost:
    streams = 2 if residual is None else 4
    return Cost(flops=6.0 * x.numel(), bytes=streams * nbytes(x) + sum(nbytes(a) for a in (weight, bias) if a is not None))
