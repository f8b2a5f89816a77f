"""Code that the state-space recurrences of prefill and decode share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.ops.activation.softplus import softplus
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.traits import TraitKind

Maker = Callable[[Draw], dict[str, Any]]
"""A function that draws a case's arguments."""


def step_sizes(
    dt: Tensor, A: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_min: float, dt_max: float, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the step size of each head and the decay factor of its state, each ``[..., heads]``."""
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    if dt_softplus:
        step = softplus(step)
    step = step.clamp(dt_min, dt_max)
    return step, torch.exp(step * A.to(wide))


def advance(state: Tensor, x: Tensor, step: Tensor, decay: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Advances n sequences by one token each; all tensors have the same dtype.

    Args:
        state: ``[n, heads, head_dim, state_dim]``.
        x: ``[n, heads, head_dim]``.
        step, decay: ``[n, heads]``.
        B, C: ``[n, groups, state_dim]``.

    Returns:
        The next state, and the output ``[n, heads, head_dim]``.
    """
    heads_of_group = state.shape[1] // B.shape[1]
    B, C = (matrix.repeat_interleave(heads_of_group, dim=1).unsqueeze(2) for matrix in (B, C))
    state = state * decay[..., None, None] + (step.unsqueeze(-1) * x).unsqueeze(-1) * B
    return state, (state * C).sum(-1)


def finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Adds the skip connection, applies the gate, and rounds to x's dtype. y is float32 or float64 ``[..., heads, head_dim]``."""
    if D is not None:
        y = y + D.to(y.dtype).unsqueeze(-1) * x.to(y.dtype)
    if z is not None:
        y = y * torch.nn.functional.silu(z.to(y.dtype))
    return y.to(x.dtype).contiguous()


def check_recurrence(
    check: Checker,
    leading: str,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_min: float,
    dt_max: float,
) -> None:
    """Checks all arguments except slots. ``leading`` names the axes that tensors with tokens have before their heads."""
    check.tensor("x", x, f"{leading} heads head_dim", FLOATS)
    check.tensor("dt", dt, f"{leading} heads", {x.dtype, torch.float32})
    check.tensor("A", A, "heads", FLOATS)
    check.tensor("B", B, f"{leading} groups state_dim", x.dtype)
    check.divides("groups", "heads")
    check.tensor("C", C, f"{leading} groups state_dim", x.dtype)
    check.tensor("states", states, "slots heads head_dim state_dim", {x.dtype, torch.float32})
    check.tensor("D", D, "heads", FLOATS)
    check.tensor("z", z, f"{leading} heads head_dim", x.dtype)
    check.tensor("dt_bias", dt_bias, "heads", FLOATS)
    check.require(dt_min >= 0, "dt_min", "0 or more", dt_min)
    check.require(dt_min <= dt_max, "dt_max", f"at least dt_min = {dt_min}", dt_max)


RECURRENCE_KINDS: dict[str, TraitKind] = {
    "heads": int, "head_dim": int, "groups": int, "state_dim": int, "D": bool, "z": bool, "dt_bias": bool,
}  # fmt: skip


def recurrence_traits(x: Tensor, B: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None) -> dict[str, object]:
    return {
        "heads": x.shape[-2],
        "head_dim": x.shape[-1],
        "groups": B.shape[-2],
        "state_dim": B.shape[-1],
        "D": D is not None,
        "z": z is not None,
        "dt_bias": dt_bias is not None,
    }


def recurrence_flops(x: Tensor, B: Tensor) -> float:
    """Returns the FLOPs of the recurrence: decay of the state, outer product of x and B added to it, dot products with C."""
    return 5.0 * x.numel() * B.shape[-1]


def intermediates_of(x: Tensor) -> tuple[TensorFormat, ...]:
    """Returns the formats of the three intermediates that kernels round to x's dtype for MMAs: the state, the token weights, and
    the decayed inputs.
    """
    return (dense_tensor_format(x.dtype),) * 3


def draw_recurrence(
    draw: Draw,
    leading: tuple[int, ...],
    heads: int,
    head_dim: int,
    state_dim: int,
    groups: int,
    dtype: torch.dtype,
    full: bool,
) -> dict[str, Any]:
    """Draws operands like those of trained models: mostly steps from 0.001 to 0.1, A from -16 to -1.

    With ``full``, also draws D, z and dt_bias, and uses softplus and clamping. Otherwise dt holds the final step sizes, in float32.
    """
    made: dict[str, Any] = {
        "x": draw.normal(*leading, heads, head_dim, dtype=dtype),
        "A": -draw.uniform(heads, low=1.0, high=16.0),
        "B": draw.normal(*leading, groups, state_dim, dtype=dtype),
        "C": draw.normal(*leading, groups, state_dim, dtype=dtype, scale=state_dim**-0.5),
    }
    if not full:
        return {**made, "dt": draw.uniform(*leading, heads, low=0.001, high=0.1)}
    return {
        **made,
        "dt": draw.normal(*leading, heads, dtype=dtype),
        "D": draw.normal(heads, dtype=dtype),
        "z": draw.normal(*leading, heads, head_dim, dtype=dtype),
        "dt_bias": draw.uniform(heads, low=-6.0, high=-2.0, dtype=dtype),
        "dt_softplus": True,
        "dt_min": 0.002,
        "dt_max": 0.2,
    }
