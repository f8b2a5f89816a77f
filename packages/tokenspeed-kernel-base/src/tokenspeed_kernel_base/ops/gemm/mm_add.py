"""GEMM with a residual addition."""

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


@operator(
    "gemm",
    "mm_add",
    formats=("a", "b"),
    traits={"m": int, "k": int, "n": int, "bias": bool},
    in_place={"out": ("residual",)},
    varying=("m",),
    parts=(mm,),
)
def mm_add(a: Tensor, b: Tensor, residual: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """GEMM with residual: ``a @ b + bias + residual``, a projection back into the residual stream.

    The operator is a composition of `mm` and an addition: ``a @ b + bias`` is rounded to a's dtype, then the sum is rounded. A
    fused kernel may round only once.

    Args:
        a: float16, bfloat16, float32 or float64 ``[m, k]``.
        b: a's dtype ``[k, n]``. A weight stored as ``[n, k]`` is passed as the view ``weight.t()``.
        residual: a's dtype ``[m, n]``.
        bias: a's dtype ``[n]``.
        out: receives the result; may be the residual.

    Returns:
        a's dtype ``[m, n]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import mm_add
        >>> mm_add(torch.tensor([[1.0, 2.0]]), torch.eye(2), residual=torch.tensor([[10.0, 20.0]]))
        tensor([[11., 22.]])

    Safe in CUDA graphs.
    """
    return torch.add(mm(a, b, bias=bias), residual, out=out)


@mm_add.traits
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> dict[str, object]:
    return {"m": bucket(a.shape[0]), "k": a.shape[1], "n": b.shape[1], "bias": bias is not None}


@mm_add.check
def _(check: Checker, a: Tensor, b: Tensor, residual: Tensor, bias: Tensor | None) -> None:
    check.tensor("a", a, "m k", FLOATS)
    check.tensor("b", b, "k n", a.dtype)
    check.tensor("residual", residual, "m n", a.dtype)
    check.tensor("bias", bias, "n", a.dtype)


@mm_add.fake
def _(residual: Tensor) -> Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


@recipe
def _inputs(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "a": draw.normal(m, k, dtype=dtype),
            "b": draw.normal(n, k, dtype=dtype, scale=k**-0.5).t(),
            "residual": draw.normal(m, n, dtype=dtype),
            "bias": draw.normal(n, dtype=dtype) if bias else None,
        }

    return make


@mm_add.cases
def _() -> list[Case]:
    return [
        Case("odd sizes, float32", _inputs(5, 33, 7, torch.float32)),
        Case("one token, no bias, float16", _inputs(1, 96, 80, torch.float16, bias=False)),
        Case("gpt-oss-120b o, narrow, decode 4", _inputs(4, 512, 288)),
        Case("no tokens", _inputs(0, 64, 48)),
        *(Case(f"gpt-oss-120b o, decode {m}", _inputs(m, 4096, 2880), large=True) for m in (1, 4, 16, 64)),
        Case("gpt-oss-120b o, prefill 4096", _inputs(4096, 4096, 2880), large=True),
    ]


@mm_add.cost
def _(a: Tensor, b: Tensor, residual: Tensor, bias: Tensor | None) -> Cost:
    return Cost(flops=2.0 * a.numel() * b.shape[1], bytes=nbytes(a, b, bias) + 2 * nbytes(residual))
