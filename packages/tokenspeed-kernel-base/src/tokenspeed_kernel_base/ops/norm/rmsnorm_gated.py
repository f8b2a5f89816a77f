"""Gated RMSNorm, which follows linear attention and state-space layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator

_ACTIVATIONS = ("silu", "sigmoid")


@operator(
    "norm",
    "rmsnorm_gated",
    formats=("x",),
    traits={"hidden": int, "activation": _ACTIVATIONS, "gate_first": bool},
    in_place={"out": ("x", "gate")},
    varying=("rows",),
)
def rmsnorm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    activation: str = "silu",
    norm_before_gate: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Gated RMSNorm: ``rmsnorm(x, weight, eps) * activation(gate)``, or ``rmsnorm(x * activation(gate), weight, eps)``.

    The norm runs over the last axis. Gated delta networks apply the first form to each head (Yang, Kautz & Hatamizadeh, 2024,
    arXiv:2412.06464; Qwen3-Next with ``silu``, Kimi Linear with ``sigmoid``). Mamba-2 uses the second form (Dao & Gu, 2024,
    arXiv:2405.21060). Arithmetic is float32 (float64 for float64 inputs); the result is rounded to x's dtype once.

    Args:
        x: float16, bfloat16, float32 or float64 ``[..., hidden]``.
        gate: a tensor with dtype and shape like x. May be a strided slice of a fused projection.
        weight: float16, bfloat16, float32 or float64 ``[hidden]``.
        eps: added to the mean square, > 0.
        activation: ``"silu"``, which is ``gate * sigmoid(gate)``, or ``"sigmoid"``.
        norm_before_gate: True for the first form, which normalises x before the gate; False for the second form.
        out: receives the result; may be x or the gate.

    Returns:
        Like x and contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import rmsnorm_gated
        >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 20.0]])
        >>> rmsnorm_gated(x, gate, torch.ones(2), eps=1e-9, activation="sigmoid")
        tensor([[0.4243, 1.1314]])
        >>> rmsnorm_gated(x, gate, torch.ones(2), eps=1e-9, activation="sigmoid", norm_before_gate=False)
        tensor([[0.4966, 1.3242]])

    Safe in CUDA graphs.
    """
    wide, gates = (a.double() if x.dtype == torch.float64 else a.float() for a in (x, gate))
    factor = gates.sigmoid() * (gates if activation == "silu" else 1.0)
    normed = wide if norm_before_gate else wide * factor
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (normed * factor if norm_before_gate else normed).to(x.dtype).contiguous()


@rmsnorm_gated.traits
def _(x: Tensor, activation: str, norm_before_gate: bool) -> dict[str, object]:
    return {"hidden": x.shape[-1], "activation": activation, "gate_first": not norm_before_gate}


@rmsnorm_gated.check
def _(check: Checker, x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> None:
    check.tensor("x", x, "... hidden", FLOATS)
    check.same_shape("gate", gate, "x", x)
    check.tensor("weight", weight, "hidden", FLOATS)
    check.require(eps > 0, "eps", "positive", eps)
    check.one_of("activation", activation, _ACTIVATIONS)


@rmsnorm_gated.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    *shape: int, dtype: torch.dtype = torch.bfloat16, fused: bool = False, **options: Any
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments. With ``fused``, the gate is a strided slice of a wider tensor."""

    def make(draw: Draw) -> dict[str, Any]:
        gate = draw.normal(shape[0], 2, *shape[1:], dtype=dtype)[:, 1] if fused else draw.normal(*shape, dtype=dtype)
        weight = 1 + draw.normal(shape[-1], scale=0.1, dtype=dtype)
        return {"x": draw.normal(*shape, dtype=dtype), "gate": gate, "weight": weight, **options}

    return make


@rmsnorm_gated.cases
def _() -> list[Case]:
    mamba: dict[str, Any] = {"norm_before_gate": False}
    return [
        Case("one row of 8, float32", _inputs(1, 8, dtype=torch.float32)),
        Case("qwen3-next, 3 tokens", _inputs(3, 32, 128, fused=True)),
        Case("sigmoid, odd hidden 77, float16", _inputs(5, 3, 77, dtype=torch.float16, activation="sigmoid")),
        Case("gate first, 2 rows of 4096", _inputs(2, 4096, fused=True, **mamba)),
        Case("gate first, sigmoid, float64", _inputs(3, 24, dtype=torch.float64, activation="sigmoid", **mamba)),
        Case("no rows", _inputs(0, 4, 128)),
        Case("qwen3-next decode 64", _inputs(64, 32, 128, fused=True), large=True),
        Case("qwen3-next prefill 8192", _inputs(8192, 32, 128, fused=True), large=True),
        Case("kimi linear prefill 8192", _inputs(8192, 32, 128, activation="sigmoid"), large=True),
        Case("gate first, 8192 rows of 4096", _inputs(8192, 4096, fused=True, **mamba), large=True),
    ]


@rmsnorm_gated.cost
def _(x: Tensor, weight: Tensor) -> Cost:
    return Cost(flops=8.0 * x.numel(), bytes=3.0 * nbytes(x) + nbytes(weight))
