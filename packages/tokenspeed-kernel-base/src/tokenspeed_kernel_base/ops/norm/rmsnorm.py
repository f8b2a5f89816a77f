"""RMSNorm, with an optional preceding residual addition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, HALVES, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.traits import TraitKind


def rms_normalise(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Computes RMSNorm in float32 (float64 for float64 inputs), and rounds the result to ``dtype`` once. All operators of this
    family use this function."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return normed.to(dtype).contiguous()


RESIDUAL_KINDS: dict[str, TraitKind] = {"residual": bool, "wide_residual": bool}


def residual_traits(x: Tensor, residual: Tensor | None) -> dict[str, object]:
    """Returns the traits that operators have if they add a residual before they normalise.

    A float32 residual for 16-bit x is a separate feature, ``wide_residual``."""
    return {"residual": residual is not None, "wide_residual": residual is not None and residual.dtype != x.dtype}


def check_residual(check: Checker, residual: Tensor | None, x: Tensor) -> None:
    """Raises TypeError or ValueError unless the residual has x's shape, and x's dtype or (if x is a 16-bit float) float32."""
    wide = {torch.float32} if x.dtype in HALVES else set()
    check.same_shape("residual", residual, "x", x, {x.dtype, *wide})


def empty_outputs(x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """Returns uninitialised outputs: the normalised tensor and, with a residual, the sum."""
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    return normed if residual is None else (normed, torch.empty_like(normed, dtype=residual.dtype))


@operator(
    "norm",
    "rmsnorm",
    formats=("x",),
    traits={"hidden": int, **RESIDUAL_KINDS},
    outs=("out", "residual_out"),
    in_place={"out": ("x", "residual"), "residual_out": ("x", "residual")},
    varying=("rows",),
)
def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm: ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang & Sennrich, 2019, arXiv:1910.07467).

    With a residual, ``s = x + residual`` is normalised instead. s is also returned, as the next layer's residual. s is first
    rounded to the residual's dtype, and the rounded s is normalised, so that both results are consistent. Arithmetic is float32
    (float64 for float64 inputs); the result is rounded to x's dtype once, after the multiplication by weight.

    Args:
        x: float16, bfloat16, float32 or float64 ``[..., hidden]``.
        weight: float16, bfloat16, float32 or float64 ``[hidden]``.
        eps: added to the mean square, > 0.
        residual: x's shape ``[..., hidden]`` and dtype, or float32 if x is float16 or bfloat16.
        out: receives the result; may be x or residual, but not the same tensor as ``residual_out``.
        residual_out: receives the sum; may be residual or x, but not the same tensor as ``out``. Allowed only with a residual.

    Returns:
        The normalised tensor, like x and contiguous; with a residual, ``(normalised, sum)``, the sum in the residual's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import rmsnorm
        >>> rmsnorm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=1e-9)
        tensor([[0.8485, 1.1314]])

    Safe in CUDA graphs.
    """
    if residual is None:
        return rms_normalise(x, weight, eps, x.dtype)
    total = (x + residual).contiguous()
    return rms_normalise(total, weight, eps, x.dtype), total


@rmsnorm.traits
def _(x: Tensor, residual: Tensor | None) -> dict[str, object]:
    return {"hidden": x.shape[-1], **residual_traits(x, residual)}


@rmsnorm.check
def _(check: Checker, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> None:
    check.tensor("x", x, "... hidden", FLOATS)
    check.tensor("weight", weight, "hidden", FLOATS)
    check.require(eps > 0, "eps", "positive", eps)
    check_residual(check, residual, x)


@rmsnorm.fake
def _(x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    return empty_outputs(x, residual)


@recipe
def _inputs(
    *shape: int, dtype: torch.dtype = torch.bfloat16, residual: bool = False, residual_dtype: torch.dtype | None = None
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "x": draw.normal(*shape, dtype=dtype),
            "weight": 1 + draw.normal(shape[-1], scale=0.1, dtype=dtype),
            "residual": draw.normal(*shape, dtype=residual_dtype or dtype) if residual else None,
        }

    return make


@rmsnorm.cases
def _() -> list[Case]:
    return [
        Case("one row of 8, float32", _inputs(1, 8, dtype=torch.float32)),
        Case("gpt-oss-120b decode 64", _inputs(64, 2880)),
        Case("gpt-oss-120b decode 64 with residual", _inputs(64, 2880, residual=True)),
        Case("odd hidden 1001, float16", _inputs(3, 5, 1001, dtype=torch.float16)),
        Case("very long rows, with residual, float32", _inputs(2, 33000, dtype=torch.float32, residual=True)),
        Case("float32 residual", _inputs(5, 300, residual=True, residual_dtype=torch.float32)),
        Case(
            "very long rows, float32 residual, float16",
            _inputs(2, 33000, dtype=torch.float16, residual=True, residual_dtype=torch.float32),
        ),
        Case("no rows", _inputs(0, 2880)),
        Case("gpt-oss-120b prefill 16384", _inputs(16384, 2880), large=True),
        Case("gpt-oss-120b prefill 16384 with residual", _inputs(16384, 2880, residual=True), large=True),
    ]


@rmsnorm.cost
def _(x: Tensor, weight: Tensor, residual: Tensor | None) -> Cost:
    streams = 2 if residual is None else 4
    return Cost(flops=4.0 * x.numel(), bytes=streams * nbytes(x) + nbytes(weight))
