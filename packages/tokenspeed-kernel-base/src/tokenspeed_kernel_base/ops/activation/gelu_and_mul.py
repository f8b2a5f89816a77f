"""The gated activation of feed-forward layers with GELU, such as Gemma's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator

_APPROXIMATIONS = ("none", "tanh")


@operator("activation", "gelu_and_mul", formats=("x",), traits={"intermediate": int, "tanh": bool}, varying=("rows",))
def gelu_and_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """Returns ``gelu(gate) * up``, where ``gate`` is the first half of the last axis and ``up`` the second.

    GELU is ``g / 2 * (1 + erf(g / sqrt(2)))`` (Hendrycks & Gimpel, 2016, arXiv:1606.08415), or its approximation
    ``g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3)))``. This is the activation of GEGLU (Shazeer, 2020, arXiv:2002.05202).
    Arithmetic is float32 (float64 for float64 inputs); the result is rounded to x's dtype once. A gate of -inf gives NaN, because
    ``-inf * 0`` is NaN.

    Args:
        x: float16, bfloat16, float32 or float64 ``[..., 2 * d]``: gate, then up.
        approximate: ``"none"`` for the error function, ``"tanh"`` for the approximation.
        out: ``[..., d]`` of x's dtype, receives the result; must not overlap x.

    Returns:
        ``[..., d]`` of x's dtype, contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import gelu_and_mul
        >>> gelu_and_mul(torch.tensor([[0.0, 2.0, 5.0, 3.0]]))
        tensor([[0.0000, 5.8635]])
        >>> gelu_and_mul(torch.tensor([[0.0, 2.0, 5.0, 3.0]]), approximate="tanh")
        tensor([[0.0000, 5.8638]])

    Safe in CUDA graphs.
    """
    gate, up = (x.double() if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
    if approximate == "tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 * z).
        below = torch.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3))
    else:
        below = torch.special.ndtr(gate)
    return (gate * below * up).to(x.dtype).contiguous()


@gelu_and_mul.traits
def _(x: Tensor, approximate: str) -> dict[str, object]:
    return {"intermediate": x.shape[-1] // 2, "tanh": approximate == "tanh"}


@gelu_and_mul.check
def _(check: Checker, x: Tensor, approximate: str) -> None:
    check.tensor("x", x, "... gate_and_up", FLOATS)
    check.require(check["gate_and_up"] % 2 == 0, "x", "of shape [..., 2 * d], even in the last axis", str(list(x.shape)))
    check.one_of("approximate", approximate, _APPROXIMATIONS)


@gelu_and_mul.fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@recipe
def _inputs(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"x": draw.normal(*shape, dtype=dtype, scale=2.0), **options}


@gelu_and_mul.cases
def _() -> list[Case]:
    tanh: dict[str, Any] = {"approximate": "tanh"}
    return [
        Case("one pair, float32", _inputs(2, dtype=torch.float32)),
        Case("gemma-3-27b decode 4, one of 8 ranks", _inputs(4, 2 * 2688, **tanh)),
        Case("odd d 1001, three axes, float16", _inputs(2, 3, 2 * 1001, dtype=torch.float16)),
        Case("every second row of a wider tensor", lambda draw: {"x": draw.normal(6, 2, 2 * 64)[:, 0], **tanh}),
        Case("no rows", _inputs(0, 2 * 128)),
        Case("gemma-3-27b prefill 8192", _inputs(8192, 2 * 21504, **tanh), large=True),
    ]


@gelu_and_mul.cost
def _(x: Tensor) -> Cost:
    return Cost(flops=5.0 * x.numel(), bytes=1.5 * nbytes(x))
