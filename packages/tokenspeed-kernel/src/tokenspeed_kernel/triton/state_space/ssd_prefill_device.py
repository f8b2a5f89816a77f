"""Device code of `ssd_prefill`: the state-space recurrence ``S = exp(dt * A) * S + dt * x B^T``, ``y = S C``, chunk by chunk.

Grid of both kernels: one axis of (segment, tile of a head's rows). A program keeps TILE.rows rows of the state [head_dim,
state_dim] in registers, in float32. For each chunk of tokens it computes, with MMAs:

* the outputs within the chunk: ``(C B^T, causal, times decays) @ x``;
* the outputs from earlier tokens: ``C @ S^T``, times the decays since the chunk's begin;
* the state after the chunk: ``S`` times the chunk's decay, plus ``(x, times the decays until the chunk's end)^T @ B``.

Decays between two tokens are exponentials of differences of running sums of log decays. `_decays` explains how these differences
stay precise. Step sizes enter the exponents as logarithms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import DTYPES, sequence_of, wait_for_products
from tokenspeed_kernel.triton.state_space._recurrence_device import skipped_and_gated, step_sizes, steps_of
from tokenspeed_kernel.triton.views_device import Rows

__all__ = ["DTYPES", "ssd_prefill_kernel", "ssd_segments_kernel"]


class Segment(NamedTuple):
    """A segment of a sequence, which one program processes.

    Fields:
        sequence: the index of the sequence.
        token: the sequence's first token.
        index: the segment's index within the sequence.
        begin, end: the segment's range of positions in the sequence, end exclusive.
        last: whether the sequence ends with this segment. An empty segment may follow.
        there: whether the sequence has this segment. Every sequence has at least one.
    """

    sequence: Any
    token: Any
    index: Any
    begin: Any
    end: Any
    last: Any
    there: Any


class Part(NamedTuple):
    """A program's tile of a head's state: TILE.rows rows and all columns.

    Fields:
        head: the index of the head.
        row, column: indices of the tile's rows and columns.
        rows, columns: masks of valid rows and columns.
    """

    head: Any
    row: Any
    column: Any
    rows: Any
    columns: Any


@triton.jit
def _segment_of(number, cu_seqlens, batch, size, AT_ONCE: tl.constexpr):
    """Returns segment ``number``, counted over all sequences. ``size``: tokens per segment."""
    sequence = sequence_of(number, cu_seqlens, batch, 1, size, AT_ONCE)
    token = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - token
    index = number - token // size - sequence
    begin = index * size
    end = tl.minimum(begin + size, length)
    return Segment(sequence, token.to(tl.int64), index, begin, end, end == length, (begin < length) | (index == 0))


@triton.jit
def _part_of(block, SHAPE: tl.constexpr, TILE: tl.constexpr):
    # Returns the `Part` of the state with index ``block``. Heads vary fastest, so programs of neighbouring heads, which share B and
    # C, are adjacent in the grid.
    row = block // SHAPE.heads * TILE.rows + tl.arange(0, TILE.rows)
    column = tl.arange(0, TILE.columns)
    return Part(block % SHAPE.heads, row, column, row < SHAPE.head_dim, column < SHAPE.state_dim)


@triton.jit
def _in_cache(states, part, slot, slot_stride, head_stride, row_stride, column_stride):
    """Returns pointers to a program's tile of a state in a slot of the cache."""
    first = states + slot.to(tl.int64) * slot_stride + part.head.to(tl.int64) * head_stride
    return first + part.row[:, None].to(tl.int64) * row_stride + part.column[None, :] * column_stride


@triton.jit
def _left_by(left, number, part, SHAPE: tl.constexpr):
    """Returns pointers to a program's tile of a segment's contribution in ``left``, ``[segments, heads, head_dim, state_dim]``."""
    first = left + (number.to(tl.int64) * SHAPE.heads + part.head) * (SHAPE.head_dim * SHAPE.state_dim)
    return first + part.row[:, None] * SHAPE.state_dim + part.column[None, :]


@triton.jit
def _initial(states, at, sequence, state_slots, slots_stride, has_initial_state, initial_stride, part):
    """Loads a program's tile of a sequence's initial state; 0 if the sequence has none. ``at``: pointers to the tile in its
    slot.
    """
    state = tl.zeros(at.shape, tl.float32)
    if has_initial_state is not None:
        started = tl.load(has_initial_state + sequence * initial_stride).to(tl.int32) != 0
        if started & (tl.load(state_slots + sequence * slots_stride) >= 0):
            state += tl.load(at, mask=part.rows[:, None] & part.columns[None, :], other=0.0).to(tl.float32)
    return state


@triton.jit
def _rows_of(rows, token, head, column, inside, columns_there, DTYPE: tl.constexpr):
    """Loads a chunk of tokens of one head of `Rows`, from ``token`` on, as an MMA operand of dtype DTYPE; 0 outside."""
    first = rows.first + head.to(tl.int64) * rows.head_stride
    at = (token + tl.arange(0, inside.shape[0]))[:, None] * rows.token_stride + column[None, :].to(tl.int64) * rows.dim_stride
    return tl.load(first + at, mask=inside[:, None] & columns_there[None, :], other=0.0).to(DTYPE)


class Decays(NamedTuple):
    """The log decays of a chunk's tokens.

    Fields:
        whole, part: the running sums of log decays up to each token: the sum of integer parts, and the sum of fractional parts.
        weight: ``part`` minus the logarithm of the token's step size.
        total_whole, total_part: both sums over the whole chunk.
    """

    whole: Any
    part: Any
    weight: Any
    total_whole: Any
    total_part: Any


@triton.jit
def _decays(dt, dt_token, dt_head, token, inside, part, steps, SHAPE: tl.constexpr):
    """Computes the `Decays` of a chunk.

    Token j has the factor ``exp((whole[i] - whole[j]) + (part[i] - weight[j]))`` in the result of token i. Tokens beyond the end
    have step 0.

    The difference of two large sums would lose small decays, so the integer and fractional parts of the logarithms are summed
    separately. The logarithms are clamped to at least -104, because the exponential of anything lower is 0 in float32. So the
    sums of integer parts are exact, and the sums of fractional parts stay below the number of tokens.

    The step sizes themselves are not returned. In an MMA's layout, the compiler would load and compute the step sizes again for
    each column. That would take registers that are needed elsewhere.
    """
    at = dt + part.head.to(tl.int64) * dt_head + (token + tl.arange(0, inside.shape[0])) * dt_token
    step = step_sizes(tl.load(at, mask=inside, other=0.0).to(tl.float32), steps, SHAPE)
    step = tl.where(inside, step, 0.0)
    logs = step * steps.A
    logs = tl.where(logs < -104.0, -104.0, logs)  # a maximum would not keep NaN
    integers = tl.ceil(logs)
    fractions = logs - integers
    whole, fraction = tl.cumsum(integers, 0), tl.cumsum(fractions, 0)
    least: tl.constexpr = 1.2e-38  # replaces a step of 0, so that its logarithm is finite
    weight = fraction - tl.log(tl.where(step < least, least, step))
    return Decays(whole, fraction, weight, tl.sum(integers), tl.sum(fractions))


@triton.jit
def _advanced(state, x, b, decays, DTYPE: tl.constexpr):
    """Returns the state after a chunk: the decayed old state plus each token's decayed contribution."""
    since = (decays.total_whole - decays.whole) + (decays.total_part - decays.weight)
    decayed = (x.to(tl.float32) * tl.exp(since)[:, None]).to(DTYPE)
    return tl.dot(tl.trans(decayed), b, state * tl.exp(decays.total_whole + decays.total_part), input_precision="ieee")


@triton.jit
def _state_before(left, decays, number, segment, part, SHAPE: tl.constexpr):
    """Returns the state before a segment: the initial state, decayed, plus the contributions of the segments before it."""
    there = part.rows[:, None] & part.columns[None, :]
    first = number - segment.index
    state = tl.load(_left_by(left, first, part, SHAPE), mask=there, other=0.0)
    for i in range(segment.index):
        before = first + i + 1
        decay = tl.load(decays + before.to(tl.int64) * SHAPE.heads + part.head)
        state = state * tl.exp(decay) + tl.load(_left_by(left, before, part, SHAPE), mask=there, other=0.0)
    return state


@triton.jit
def _chunk_result(state, x, b, c, decays, in_chunk, DTYPE: tl.constexpr):
    """Returns the outputs of a chunk: (causal scores C B^T with decays) @ x, plus the decayed C @ state.

    ``state``: the state before the chunk.
    """
    since = decays.whole[:, None] - decays.whole[None, :] + (decays.part[:, None] - decays.weight[None, :])
    since = tl.where(in_chunk[:, None] >= in_chunk[None, :], since, -float("inf"))
    scores = tl.dot(c, tl.trans(b), input_precision="ieee")
    scores = (scores * tl.exp(since)).to(DTYPE)
    y = tl.dot(c, tl.trans(state.to(DTYPE)), input_precision="ieee") * tl.exp(decays.whole + decays.part)[:, None]
    return tl.dot(scores, x, y, input_precision="ieee")


@triton.jit(do_not_specialize=["batch", "size"])
def ssd_segments_kernel(
    x,
    dt,
    A,
    B,
    dt_bias,
    cu_seqlens,
    states,
    state_slots,
    has_initial_state,
    left,
    decays,
    batch, size,
    dt_min, dt_max,
    x_token, x_head, x_dim,
    dt_token, dt_head,
    B_token, B_group, B_dim,
    slot_stride,
    state_head, state_row, state_column,
    slots_stride,
    initial_stride,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Writes each segment's contribution to the state into ``left`` at the index of the next segment, and the logarithm of the
    segment's decay into ``decays``, float32 [segments, heads], at the same index.

    ``left`` at the index of a sequence's first segment gets the initial state. The next launch reads the initial state from there,
    because it overwrites the slot.
    """
    BLOCKS: tl.constexpr = SHAPE.heads * ((SHAPE.head_dim + TILE.rows - 1) // TILE.rows)
    number, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    segment = _segment_of(number, cu_seqlens, batch, size, AT_ONCE)
    part = _part_of(block, SHAPE, TILE)
    there = part.rows[:, None] & part.columns[None, :]
    if segment.index == 0:
        slot = tl.load(state_slots + segment.sequence * slots_stride)
        at = _in_cache(states, part, slot, slot_stride, state_head, state_row, state_column)
        state = _initial(states, at, segment.sequence, state_slots, slots_stride, has_initial_state, initial_stride, part)
        tl.store(_left_by(left, number, part, SHAPE), state, mask=there)
    if (segment.there == 0) | segment.last:
        return
    steps = steps_of(A, dt_bias, part.head, dt_min, dt_max)
    x_rows = Rows(x, x_token, x_head, x_dim)
    B_rows = Rows(B, B_token, B_group, B_dim)
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    added = tl.zeros((ROWS, COLUMNS), tl.float32)
    decay = 0.0
    for begin in range(segment.begin, segment.end, TILE.chunk):
        wait_for_products()
        inside, token = begin + tl.arange(0, TILE.chunk) < segment.end, segment.token + begin
        of_chunk = _decays(dt, dt_token, dt_head, token, inside, part, steps, SHAPE)
        values = _rows_of(x_rows, token, part.head, part.row, inside, part.rows, DTYPE)
        b = _rows_of(B_rows, token, part.head // SHAPE.group, part.column, inside, part.columns, DTYPE)
        added = _advanced(added, values, b, of_chunk, DTYPE)
        decay += of_chunk.total_whole + of_chunk.total_part
    tl.store(_left_by(left, number + 1, part, SHAPE), added, mask=there)
    if block < SHAPE.heads:
        tl.store(decays + (number + 1).to(tl.int64) * SHAPE.heads + part.head, decay)


@triton.jit(do_not_specialize=["batch", "size"])
def ssd_prefill_kernel(
    x,
    dt,
    A,
    B,
    dt_bias,
    cu_seqlens,
    states,
    state_slots,
    has_initial_state,
    left,
    decays,
    batch, size,
    dt_min, dt_max,
    x_token, x_head, x_dim,
    dt_token, dt_head,
    B_token, B_group, B_dim,
    slot_stride,
    state_head, state_row, state_column,
    slots_stride,
    initial_stride,
    C,
    D,
    z,
    out,
    C_token, C_group, C_dim,
    z_token, z_head, z_dim,
    out_token, out_head, out_dim,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Computes the outputs of TILE.rows channels of one head for one segment. The last segment also stores the state."""
    BLOCKS: tl.constexpr = SHAPE.heads * ((SHAPE.head_dim + TILE.rows - 1) // TILE.rows)
    number = tl.program_id(0) // BLOCKS
    segment = _segment_of(number, cu_seqlens, batch, size, AT_ONCE)
    if segment.there == 0:
        return
    part = _part_of(tl.program_id(0) % BLOCKS, SHAPE, TILE)
    there = part.rows[:, None] & part.columns[None, :]
    if left is None:
        slot = tl.load(state_slots + segment.sequence * slots_stride)
        at = _in_cache(states, part, slot, slot_stride, state_head, state_row, state_column)
        state = _initial(states, at, segment.sequence, state_slots, slots_stride, has_initial_state, initial_stride, part)
    else:
        state = _state_before(left, decays, number, segment, part, SHAPE)
    steps = steps_of(A, dt_bias, part.head, dt_min, dt_max)
    x_rows = Rows(x, x_token, x_head, x_dim)
    B_rows = Rows(B, B_token, B_group, B_dim)
    C_rows = Rows(C, C_token, C_group, C_dim)
    z_rows = Rows(z, z_token, z_head, z_dim)
    in_chunk = tl.arange(0, TILE.chunk)
    group = part.head // SHAPE.group
    # Loop-invariant code motion is off: the invariants are mostly addresses and masks. They do not fit in the registers, and
    # recomputing them is cheap.
    for begin in tl.range(segment.begin, segment.end, TILE.chunk, disable_licm=True):
        wait_for_products()
        inside, token = begin + in_chunk < segment.end, segment.token + begin
        of_chunk = _decays(dt, dt_token, dt_head, token, inside, part, steps, SHAPE)
        b = _rows_of(B_rows, token, group, part.column, inside, part.columns, DTYPE)
        c = _rows_of(C_rows, token, group, part.column, inside, part.columns, DTYPE)
        values = _rows_of(x_rows, token, part.head, part.row, inside, part.rows, DTYPE)
        y = _chunk_result(state, values, b, c, of_chunk, in_chunk, DTYPE)
        gate = None
        if z is not None:
            gate = _rows_of(z_rows, token, part.head, part.row, inside, part.rows, DTYPE).to(tl.float32)
        result = skipped_and_gated(y, values.to(tl.float32), D, part.head, gate).to(out.dtype.element_ty)
        out_at = out + part.head.to(tl.int64) * out_head
        out_at += (token + in_chunk)[:, None] * out_token + part.row[None, :].to(tl.int64) * out_dim
        tl.store(out_at, result, mask=inside[:, None] & part.rows[None, :])
        state = _advanced(state, values, b, of_chunk, DTYPE)
    # Load the slot again and recompute the pointers here. If kept from before the loop, they would occupy 32 registers of each
    # thread throughout the loop.
    slot = tl.load(state_slots + segment.sequence * slots_stride)
    at = _in_cache(states, part, slot, slot_stride, state_head, state_row, state_column)
    if segment.last & (slot >= 0):
        tl.debug_barrier()  # orders the reads of all threads before the state is written
        tl.store(at, state.to(states.dtype.element_ty), mask=there)
