"""The gated activation of Llama-like feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator


@operator("activation", "silu_and_mul", formats=("x",), traits={"intermediate": int}, varying=("rows",))
def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns ``silu(gate) * up``, where ``gate`` is the first half of the last axis, ``up`` the second, and ``silu(g) = g *
    sigmoid(g)``.

    This is the activation of SwiGLU (Shazeer, 2020, arXiv:2002.05202), between the two GEMMs of a feed-forward layer. Arithmetic is
    float32 (float64 for float64 inputs); the result is rounded to x's dtype once. An infinite or NaN gate gives the result of the
    formula in IEEE arithmetic: ``silu(-inf)`` is NaN.

    Args:
        x: float16, bfloat16, float32 or float64 ``[..., 2 * d]``: gate, then up.
        out: ``[..., d]`` of x's dtype, receives the result; must not overlap x.

    Returns:
        ``[..., d]`` of x's dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument violates a requirement above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import silu_and_mul
        >>> silu_and_mul(torch.tensor([[0.0, 2.0, 5.0, 3.0]]))
        tensor([[0.0000, 5.2848]])

    Safe in CUDA graphs.
    """
    gate, up = (x.double() if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype).contiguous()


@silu_and_mul.traits
def _(x: Tensor) -> dict[str, object]:
    return {"intermediate": x.shape[-1] // 2}


@silu_and_mul.check
def _(check: Checker, x: Tensor) -> None:
    check.tensor("x", x, "... gate_and_up", FLOATS)
    check.require(check["gate_and_up"] % 2 == 0, "x", "of shape [..., 2 * d], even in the last axis", str(list(x.shape)))


@silu_and_mul.fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@recipe
def _inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"x": draw.normal(*shape, dtype=dtype, scale=2.0)}


@silu_and_mul.cases
def _() -> list[Case]:
    return [
        Case("one pair, float32", _inputs(2, dtype=torch.float32)),
        Case("llama-70b decode 8, one of 8 ranks", _inputs(8, 2 * 3584)),
        Case("odd d 1001, three axes, float16", _inputs(2, 3, 2 * 1001, dtype=torch.float16)),
        Case("every second row of a wider tensor", lambda draw: {"x": draw.normal(6, 2, 2 * 64)[:, 0]}),
        Case("no rows", _inputs(0, 2 * 128)),
        Case("64 rows of 2880", _inputs(64, 2 * 2880), large=True),
        Case("llama-70b prefill 8192", _inputs(8192, 2 * 28672), large=True),
    ]


@silu_and_mul.cost
def _(x: Tensor) -> Cost:
    return Cost(flops=2.5 * x.numel(), bytes=1.5 * nbytes(x))
