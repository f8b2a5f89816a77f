"""The state-space recurrence of Mamba2 over whole sequences (prefill)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.attention._checks import check_offsets, check_values_offsets
from tokenspeed_kernel_base.ops.state_space._recurrence import (
    RECURRENCE_KINDS,
    Maker,
    advance,
    check_recurrence,
    draw_recurrence,
    finish,
    intermediates_of,
    recurrence_flops,
    recurrence_traits,
    step_sizes,
)
from tokenspeed_kernel_base.ops.state_space.slots import (
    check_prefill_slots,
    check_values_slots,
    draw_prefill,
    prefill_read,
    prefill_states_moved,
    read_initial_states,
    vary_prefill,
    write_states,
)
from tokenspeed_kernel_base.variation import Variation


@operator(
    "state_space",
    "ssd_prefill",
    formats=("x", "dt", "states"),
    traits={**RECURRENCE_KINDS, "has_initial_state": bool},
    mutates=("states",),
    varying=("tokens", "batch"),
    capacity=("slots",),
)
def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    state_slots: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    has_initial_state: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the state-space recurrence of Mamba2 (SSD) over packed sequences, between the layer's convolution and its norm.

    The operator computes the state-space duality (SSD) layer of Dao & Gu, 2024, arXiv:2405.21060.

    Each head has a state h ``[head_dim, state_dim]``. For head i in group ``g = i // (heads // groups)``, token t updates the
    state to ``h = exp(s * A[i]) * h + s * x[t, i] B[t, g]^T`` and outputs
    ``y[t, i] = (h C[t, g] + D[i] * x[t, i]) * silu(z[t, i])``, where
    ``s = min(max(softplus(dt[t, i] + dt_bias[i]), dt_min), dt_max)``. Omitted optional arguments drop out of these formulas. The
    page "Calling operators" states the rules for slots under "States of recurrent layers".

    The recurrence is float32 (float64 for a float64 x), and its result is rounded to x's dtype once. States are rounded to the
    cache's dtype when they are written. Kernels process chunks of tokens with MMAs. For these MMAs, kernels round states, token
    weights and decayed inputs to x's dtype.

    Args:
        x: float16, bfloat16, float32 or float64 ``[tokens, heads, head_dim]``. May be strided, like all tensors here, for example
            a slice of a convolution's result.
        dt: x's dtype or float32 ``[tokens, heads]``, the step sizes before bias, softplus and clamping.
        A: float16, bfloat16, float32 or float64 ``[heads]``, negative.
        B: x's dtype ``[tokens, groups, state_dim]``; groups divides heads.
        C: like B.
        cu_seqlens: int32 ``[batch + 1]``, the offsets at which sequences begin, then the number of tokens. Non-decreasing, from 0
            to tokens.
        states: x's dtype or float32 ``[slots, heads, head_dim, state_dim]``. Written to. May be strided.
        state_slots: int32 ``[batch]``, each less than ``slots``, the length of states: the slot to which each sequence's final
            state is written. If has_initial_state is True for a sequence, its initial state is read from the same slot. A sequence
            with a negative slot starts from zeros, and its state is not written. Slots that are not negative must be distinct.
        D: float16, bfloat16, float32 or float64 ``[heads]``, the weight of the skip connection.
        z: the gate, with dtype and shape like x. None if the gate is applied by the norm after the layer.
        dt_bias: float16, bfloat16, float32 or float64 ``[heads]``.
        dt_softplus: whether step sizes are ``log(1 + exp(dt + dt_bias))``.
        dt_min: lower bound of the step sizes, >= 0.
        dt_max: upper bound of the step sizes, at least dt_min.
        has_initial_state: bool ``[batch]``, True for sequences that start from the state in their slot; None means that no sequence
            does.
        out: receives the result. It must not overlap x or z.

    Returns:
        The result ``[tokens, heads, head_dim]`` in x's dtype.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written. Values of cu_seqlens and
            state_slots are checked only if they lie in host memory.

    Example:
        A state of one element; each token halves it.

        >>> import torch
        >>> from tokenspeed_kernel import ssd_prefill
        >>> x, ones, cu_seqlens = torch.tensor([8.0, 0.0, 0.0]).view(3, 1, 1), torch.ones(3, 1, 1), torch.tensor([0, 3])
        >>> states, A = torch.zeros(1, 1, 1, 1), torch.tensor([0.5]).log()
        >>> slots = torch.zeros(1, dtype=torch.int32)
        >>> ssd_prefill(x, torch.ones(3, 1), A, ones, ones, cu_seqlens.int(), states, slots).flatten()
        tensor([8., 4., 2.])
        >>> states.flatten()
        tensor([2.])

    Safe in CUDA graphs, except with backends tagged ``waits`` and with the reference, which reads cu_seqlens on the host.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    state = read_initial_states(states, state_slots, has_initial_state).to(wide)
    step, decay = step_sizes(dt, A, dt_bias, dt_softplus, dt_min, dt_max, wide)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().tolist()
    for position in range(max(lengths, default=0)):
        there = torch.tensor([b for b, length in enumerate(lengths) if length > position], device=x.device)
        token = starts[there] + position
        operands = x[token].to(wide), step[token], decay[token], B[token].to(wide), C[token].to(wide)
        state[there], y[token] = advance(state[there], *operands)
    write_states(states, state_slots, state)
    return finish(y, x, D, z)


@ssd_prefill.traits
def _(
    x: Tensor, B: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, has_initial_state: Tensor | None
) -> dict[str, object]:
    return {**recurrence_traits(x, B, D, z, dt_bias), "has_initial_state": has_initial_state is not None}


ssd_prefill.intermediates(intermediates_of)


@ssd_prefill.check
def _(
    check: Checker,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    state_slots: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_min: float,
    dt_max: float,
    has_initial_state: Tensor | None,
) -> None:
    check_recurrence(check, "tokens", x, dt, A, B, C, states, D, z, dt_bias, dt_min, dt_max)
    check_offsets(check, "cu_seqlens", cu_seqlens)
    check_prefill_slots(check, cu_seqlens, state_slots, has_initial_state)


@ssd_prefill.check_values(host=("cu_seqlens", "state_slots"))
def _(check: Checker, x: Tensor, cu_seqlens: Tensor | None, states: Tensor, state_slots: Tensor | None) -> None:
    check_values_offsets(check, "cu_seqlens", cu_seqlens, x.shape[0], "x")
    check_values_slots(check, states, state_slots)


@ssd_prefill.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    lengths: Sequence[int],
    heads: int,
    head_dim: int,
    state_dim: int,
    groups: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    states_dtype: torch.dtype = torch.float32,
    full: bool = True,
    initial: bool | None = True,
    padding: int = 0,
    slots: int | None = None,
) -> Maker:
    """Draws arguments with sequences of these lengths. ``full`` is as in `draw_recurrence`; ``initial`` and ``padding`` are as in
    `draw_prefill`."""

    def make(draw: Draw) -> dict[str, Any]:
        held = len(lengths) + 2 if slots is None else slots
        return {
            **draw_recurrence(draw, (sum(lengths),), heads, head_dim, state_dim, groups, dtype, full),
            "states": draw.normal(held, heads, head_dim, state_dim, dtype=states_dtype),
            **draw_prefill(draw, lengths, held, initial, padding),
        }

    return make


# Heads, head_dim, state_dim, groups.
NEMOTRON_H = (128, 64, 128, 8)
GRANITE_4 = (128, 64, 128, 1)  # heads, head_dim, state_dim, groups of Granite 4.0 H Small and of Bamba-9B
NEMOTRON_NANO = (128, 80, 128, 8)


@ssd_prefill.cases
def _() -> list[Case]:
    f16, f32, f64 = torch.float16, torch.float32, torch.float64
    return [
        Case("one token, float32", _inputs([1], 1, 4, 4, dtype=f32, full=False, initial=None)),
        Case("lengths 0 to 70 across chunks, padded by 1", _inputs([33, 0, 70, 1, 5], 4, 16, 32, 2, padding=1)),
        Case("float32, lengths 31 to 33", _inputs([31, 32, 33], 2, 8, 16, dtype=f32)),
        Case("float64", _inputs([6, 2], 2, 3, 5, dtype=f64, states_dtype=f64)),
        Case("float64, float32 states, no options", _inputs([3, 4], 2, 3, 4, 2, f64, full=False)),
        Case("float16 and its states, head_dim 20, state_dim 24", _inputs([65, 64, 3], 3, 20, 24, 3, f16, f16)),
        Case("nothing but x, dt, A, B, C", _inputs([40, 90], 4, 32, 16, full=False, initial=None)),
        Case("one sequence of many chunks, two heads", _inputs([520], 2, 16, 16, states_dtype=torch.bfloat16)),
        Case("nemotron-h, two groups of heads, 1 to 66 tokens", _inputs([66, 1, 30], 4, 64, 128, 2)),
        Case("empty sequences only", _inputs([0, 0], 2, 8, 8)),
        Case("no slots", _inputs([5, 2], 2, 8, 8, slots=0, padding=2, dtype=f32)),
        Case("no sequences", _inputs([], 2, 8, 8)),
        Case("nemotron-h 1 x 8192", _inputs([8192], *NEMOTRON_H), large=True),
        Case("nemotron-h 8 x 1024", _inputs([1024] * 8, *NEMOTRON_H), large=True),
        Case("nemotron-h 37 to 4000 tokens", _inputs([37, 4000, 515, 1234, 2], *NEMOTRON_H, full=False), large=True),
        Case("nemotron-h of 8 ranks, 1 x 8192", _inputs([8192], 16, 64, 128, 1), large=True),
        Case("nemotron-nano 4 x 2048", _inputs([2048] * 4, *NEMOTRON_NANO), large=True),
        Case("granite-4 2 x 4096, bfloat16 states", _inputs([4096] * 2, *GRANITE_4, states_dtype=torch.bfloat16), large=True),
    ]


@ssd_prefill.vary
def _(
    variation: Variation, x: Tensor, cu_seqlens: Tensor, states: Tensor, state_slots: Tensor, has_initial_state: Tensor | None
) -> dict[str, Any]:
    return vary_prefill(variation, len(x), cu_seqlens, states, state_slots, has_initial_state)


ssd_prefill.work(prefill_read)


@ssd_prefill.cost
def _(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    state_slots: Tensor,
    z: Tensor | None,
    has_initial_state: Tensor | None,
) -> Cost:
    moved = prefill_states_moved(states, state_slots, has_initial_state)
    return Cost(flops=recurrence_flops(x, B), bytes=2.0 * nbytes(x) + nbytes(dt, B, C, z, cu_seqlens, state_slots) + moved)
