"""The gated activation of GPT-OSS: SwiGLU with a slope of the sigmoid, a clamp, and a bias on the linear half (up)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator


@operator(
    "activation", "swiglu", formats=("x",), traits={"intermediate": int, "interleaved": bool, "limit": bool}, varying=("rows",)
)
def swiglu(
    x: Tensor,
    alpha: float = 1.702,
    limit: float | None = None,
    beta: float = 1.0,
    interleaved: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Returns ``(up + beta) * gate * sigmoid(alpha * gate)``. If a limit is given, gate and up are clamped first.

    The clamp is one-sided for the gate, ``min(gate, limit)``, and two-sided for up, ``min(max(up, -limit), limit)``. The activation
    of GPT-OSS experts has ``alpha=1.702``, ``beta=1``, ``limit=7`` and ``interleaved`` weights. At this alpha, ``gate *
    sigmoid(alpha * gate)`` approximates GELU (Hendrycks & Gimpel, 2016, arXiv:1606.08415). With ``alpha=1``, ``beta=0`` and no
    limit the operator equals `silu_and_mul`. Arithmetic is float32 (float64 for float64 inputs); the result is rounded to x's dtype
    once. NaN stays NaN, also through the clamp.

    Args:
        x: float16, bfloat16, float32 or float64 ``[..., 2 * d]``.
        alpha: slope of the sigmoid, finite.
        limit: bound of the clamp, > 0; None clamps nothing.
        beta: added to the clamped up, finite.
        interleaved: how gate and up share the last axis. False: gate in the first half, up in the second. True: gate at the
            even indices, up at the odd ones.
        out: ``[..., d]`` of x's dtype, receives the result; must not overlap x.

    Returns:
        ``[..., d]`` of x's dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument violates a requirement above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import swiglu
        >>> gate_and_up = torch.tensor([[0.5, 2.0, 9.0, -9.0]])
        >>> swiglu(gate_and_up, limit=7.0, interleaved=True)
        tensor([[  1.0512, -41.9997]])

    Safe in CUDA graphs.
    """
    wide = x.double() if x.dtype == torch.float64 else x.float()
    gate, up = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    result = (up + beta) * (gate * torch.sigmoid(alpha * gate))
    return result.to(x.dtype).contiguous()


@swiglu.traits
def _(x: Tensor, limit: float | None, interleaved: bool) -> dict[str, object]:
    return {"intermediate": x.shape[-1] // 2, "interleaved": interleaved, "limit": limit is not None}


@swiglu.check
def _(check: Checker, x: Tensor, alpha: float, limit: float | None, beta: float) -> None:
    check.tensor("x", x, "... gate_and_up", FLOATS)
    check.require(check["gate_and_up"] % 2 == 0, "x", "of shape [..., 2 * d], even in the last axis", str(list(x.shape)))
    check.require(math.isfinite(alpha), "alpha", "finite", alpha)
    check.require(math.isfinite(beta), "beta", "finite", beta)
    check.require(limit is None or limit > 0, "limit", "positive or None", limit)


@swiglu.fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@recipe
def _inputs(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    # A standard deviation of 4 makes the clamp at 7 matter.
    return lambda draw: {"x": draw.normal(*shape, dtype=dtype, scale=4.0), **options}


@swiglu.cases
def _() -> list[Case]:
    gpt_oss: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "beta": 1.0, "interleaved": True}
    return [
        Case("one pair, float32", _inputs(2, dtype=torch.float32)),
        Case("gpt-oss-120b decode 16, top-4", _inputs(16 * 4, 2 * 2880, **gpt_oss)),
        Case("halves, clamped, float32", _inputs(7, 2 * 96, dtype=torch.float32, limit=7.0)),
        Case("interleaved, not clamped, odd d 57, float16", _inputs(2, 3, 2 * 57, dtype=torch.float16, interleaved=True)),
        Case("alpha 1, beta 0", _inputs(5, 2 * 64, alpha=1.0, beta=0.0)),
        Case("no rows", _inputs(0, 2 * 128, **gpt_oss)),
        Case("gpt-oss-120b prefill 4096, top-4", _inputs(4096 * 4, 2 * 2880, **gpt_oss), large=True),
    ]


@swiglu.cost
def _(x: Tensor) -> Cost:
    return Cost(flops=4.0 * x.numel(), bytes=1.5 * nbytes(x))
