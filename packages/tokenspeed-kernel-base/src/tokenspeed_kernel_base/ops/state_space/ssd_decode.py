"""The state-space recurrence of Mamba2 for the new tokens of each request (decode)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.state_space._recurrence import (
    RECURRENCE_KINDS,
    Maker,
    advance,
    check_recurrence,
    draw_recurrence,
    finish,
    recurrence_flops,
    recurrence_traits,
    step_sizes,
)
from tokenspeed_kernel_base.ops.state_space.slots import (
    check_decode_slots,
    check_values_slots,
    draw_slots,
    padding_of,
    read_states,
    states_moved,
    vary_decode,
    write_states,
)
from tokenspeed_kernel_base.ops.state_space.ssd_prefill import GRANITE_4, NEMOTRON_H, NEMOTRON_NANO
from tokenspeed_kernel_base.variation import Variation


@operator(
    "state_space",
    "ssd_decode",
    formats=("x", "dt", "states"),
    traits={**RECURRENCE_KINDS, "tokens": int, "output_slots": bool},
    mutates=("states",),
    varying=("batch",),
    capacity=("slots",),
)
def ssd_decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    state_slots: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    output_slots: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the selective state update of Mamba2 for one or several new tokens of each request, with states in a cache.

    The states are those that `ssd_prefill` stores. The docstring of `ssd_prefill` defines the recurrence (Dao & Gu, 2024,
    arXiv:2405.21060).

    The page "Calling operators" states the rules for slots under "States of recurrent layers". With output_slots, the state after
    each token is kept, so no state must be recomputed when draft tokens are rejected.

    From the first to the last token of the call, the recurrence and its state are float32 (float64 for a float64 x). The result is
    rounded to x's dtype once. States are rounded to the cache's dtype when they are written.

    Args:
        x: float16, bfloat16, float32 or float64 ``[batch, tokens, heads, head_dim]``, at least one token. May be strided, like
            all tensors here.
        dt: x's dtype or float32 ``[batch, tokens, heads]``, the step sizes before bias, softplus and clamping.
        A: float16, bfloat16, float32 or float64 ``[heads]``, negative.
        B: x's dtype ``[batch, tokens, groups, state_dim]``; groups divides heads.
        C: like B.
        states: x's dtype or float32 ``[slots, heads, head_dim, state_dim]``. Written to. May be strided.
        state_slots: int32 ``[batch]``, each less than ``slots``, the length of states: the slot from which each request's state is
            read. If output_slots is None, the new state is written to the same slot. A negative slot reads zeros.
        D: float16, bfloat16, float32 or float64 ``[heads]``, the weight of the skip connection.
        z: the gate, with dtype and shape like x. None if the gate is applied by the norm after the layer.
        dt_bias: float16, bfloat16, float32 or float64 ``[heads]``.
        dt_softplus: whether step sizes are ``log(1 + exp(dt + dt_bias))``.
        dt_min: lower bound of the step sizes, >= 0.
        dt_max: upper bound of the step sizes, at least dt_min.
        output_slots: int32 ``[batch, tokens]``, each less than ``slots``: the slot to which the state after each token is written.
            A state whose slot is negative is not written. None: only the state after the last token is written, to the request's
            slot in state_slots. Written slots must be distinct, and no other request may read them.
        out: receives the result. It must not overlap x or z.

    Returns:
        The result ``[batch, tokens, heads, head_dim]`` in x's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written. Values of slots are checked
            only if they lie in host memory.

    Example:
        A state of one element; each token halves it. Slot 1 gets the state after the first token, slot 2 the state after both. Slot
        0 is unchanged.

        >>> import torch
        >>> from tokenspeed_kernel import ssd_decode
        >>> x, ones = torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1)
        >>> states, A = torch.tensor([8.0, 0.0, 0.0]).view(3, 1, 1, 1), torch.tensor([0.5]).log()
        >>> slots, output_slots = torch.zeros(1, dtype=torch.int32), torch.tensor([[1, 2]], dtype=torch.int32)
        >>> ssd_decode(x, torch.ones(1, 2, 1), A, ones, ones, states, slots, output_slots=output_slots).flatten()
        tensor([4., 2.])
        >>> states.flatten()
        tensor([8., 4., 2.])

    Safe in CUDA graphs.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    state = read_states(states, state_slots).to(wide)
    step, decay = step_sizes(dt, A, dt_bias, dt_softplus, dt_min, dt_max, wide)
    results, kept = [], []
    for t in range(x.shape[1]):
        state, y = advance(state, x[:, t].to(wide), step[:, t], decay[:, t], B[:, t].to(wide), C[:, t].to(wide))
        results.append(y)
        kept.append(state)
    if output_slots is None:
        write_states(states, state_slots, state)
    else:
        write_states(states, output_slots.flatten(), torch.stack(kept, dim=1).flatten(0, 1))
    return finish(torch.stack(results, dim=1), x, D, z)


@ssd_decode.traits
def _(
    x: Tensor, B: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, output_slots: Tensor | None
) -> dict[str, object]:
    return {**recurrence_traits(x, B, D, z, dt_bias), "tokens": x.shape[1], "output_slots": output_slots is not None}


@ssd_decode.check
def _(
    check: Checker,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    state_slots: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_min: float,
    dt_max: float,
    output_slots: Tensor | None,
) -> None:
    check_recurrence(check, "batch tokens", x, dt, A, B, C, states, D, z, dt_bias, dt_min, dt_max)
    check_decode_slots(check, "x", x, state_slots, output_slots)


@ssd_decode.check_values(host=("state_slots", "output_slots"))
def _(check: Checker, states: Tensor, state_slots: Tensor | None, output_slots: Tensor | None) -> None:
    check_values_slots(check, states, state_slots, output_slots)


@ssd_decode.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    batch: int,
    heads: int,
    head_dim: int,
    state_dim: int,
    groups: int = 1,
    tokens: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    states_dtype: torch.dtype = torch.float32,
    full: bool = True,
    kept: bool = False,
    padding: int = 0,
    slots: int | None = None,
) -> Maker:
    """Draws the arguments. ``full``: as in `draw_recurrence`. With ``kept``, output_slots are passed. ``padding``: the number of
    requests, at the end of the batch, that have no slot.
    """

    def make(draw: Draw) -> dict[str, Any]:
        held = batch * (tokens + 1 if kept else 1) + 2 if slots is None else slots
        return {
            **draw_recurrence(draw, (batch, tokens), heads, head_dim, state_dim, groups, dtype, full),
            "states": draw.normal(held, heads, head_dim, state_dim, dtype=states_dtype),
            **draw_slots(draw, batch, held, tokens if kept else None, padding),
        }

    return make


@ssd_decode.cases
def _() -> list[Case]:
    bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    return [
        Case("one request, float32", _inputs(1, 1, 4, 4, dtype=f32, full=False)),
        Case("padded by 2, two groups", _inputs(5, 4, 16, 32, 2, padding=2)),
        Case("float64, states of 3 tokens kept", _inputs(3, 2, 3, 5, tokens=3, dtype=f64, states_dtype=f64, kept=True)),
        Case("float16 and its states, head_dim 20, state_dim 24, 2 tokens", _inputs(3, 3, 20, 24, 3, 2, f16, f16)),
        Case(
            "nothing but x, dt, A, B, C, bfloat16 states, 3 tokens", _inputs(2, 2, 64, 16, tokens=3, states_dtype=bf16, full=False)
        ),
        Case("nemotron-h, states of 4 draft tokens kept, padded by 1", _inputs(3, 2, 64, 128, 2, 4, kept=True, padding=1)),
        Case("no slots", _inputs(2, 2, 8, 8, slots=0, padding=2, dtype=f32)),
        Case("no requests", _inputs(0, 2, 8, 8)),
        *(Case(f"nemotron-h {batch}", _inputs(batch, *NEMOTRON_H), large=True) for batch in (1, 16, 64, 256)),
        Case("nemotron-h 64, states of 4 draft tokens kept", _inputs(64, *NEMOTRON_H, 4, kept=True), large=True),
        Case("nemotron-nano 64, no options", _inputs(64, *NEMOTRON_NANO, full=False), large=True),
        Case("granite-4 128, bfloat16 states", _inputs(128, *GRANITE_4, states_dtype=bf16), large=True),
    ]


@ssd_decode.vary
def _(variation: Variation, states: Tensor, state_slots: Tensor, output_slots: Tensor | None) -> dict[str, Any]:
    return vary_decode(variation, states, state_slots, output_slots)


ssd_decode.work(padding_of)


@ssd_decode.cost
def _(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, states: Tensor, state_slots: Tensor, z: Tensor | None, output_slots: Tensor | None
) -> Cost:
    moved = states_moved(states, state_slots, output_slots)
    return Cost(flops=recurrence_flops(x, B), bytes=2.0 * nbytes(x) + nbytes(dt, B, C, z, state_slots, output_slots) + moved)
