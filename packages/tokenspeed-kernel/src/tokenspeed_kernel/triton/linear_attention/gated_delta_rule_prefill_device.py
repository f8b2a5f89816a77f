"""Device code of the second step of `gated_delta_rule_prefill`, which computes states and outputs, chunk after chunk.

Grid: one axis of (sequence, value head, TILE.v columns of the state), the columns varying fastest. The columns of a state do not
interact, so programs need no communication. A program keeps its columns [K, TILE.v] in registers, in float32, over the whole
sequence. Chunks depend on each other, so parallelism comes only from sequences, heads and columns.

A chunk takes five MMAs, whose formulas and names are in `_chunks_device`: keys @ S, ``(I + A)^-1 beta`` @ errors, queries @ S,
``scale P`` @ U, and the update keys^T @ U. Row factors (decays, L2 norms) multiply the float32 results rather than the operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import wait_for_products


@triton.jit
def _initial_state(at, slot, has_initial_state, sequence, channel, column_inside, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Loads a program's tile of a sequence's initial state; 0 if the sequence has none."""
    K: tl.constexpr = TILE.k
    V: tl.constexpr = TILE.v
    state = tl.zeros([K, V], tl.float32)
    if SHAPE.initial:
        started = tl.where(slot >= 0, tl.load(has_initial_state + sequence).to(tl.int32), 0)
        held = (channel < started * SHAPE.k_dim)[:, None] & column_inside[None, :]
        state = tl.load(at, mask=held, other=0.0).to(tl.float32)
    return state


@triton.jit
def _chunk_result(state, keys, queries, values, solution, weights, in_factor, read_factor, TILE: tl.constexpr):
    """Returns the values that a chunk writes to the state at each token's key, and the chunk's outputs.

    ``state``: the state before the chunk.
    """
    rounded = state.to(TILE.dtype)
    recalled = tl.dot(keys.to(TILE.dtype), rounded, input_precision=TILE.precision)
    errors = values.to(tl.float32) - recalled * in_factor[:, None]
    written = tl.dot(solution, errors.to(TILE.dtype), input_precision=TILE.precision)
    result = tl.dot(queries.to(TILE.dtype), rounded, input_precision=TILE.precision) * read_factor[:, None]
    return written, tl.dot(weights, written.to(TILE.dtype), result, input_precision=TILE.precision)


@triton.jit(do_not_specialize=["tokens"])
def chunk_states_kernel(
    keys_in, queries_in, keys_out,
    v,
    solve,
    scores,
    factors,
    decays,
    states,
    cu_seqlens,
    state_slots,
    has_initial_state,
    out,
    tokens,
    k_token, k_head,
    q_token, q_head,
    keys_out_token, keys_out_head,
    v_token, v_head,
    slot_stride,
    state_head, state_row, state_column,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Updates TILE.v columns of one sequence's state of one value head, chunk after chunk, and computes the outputs' columns.

    Args:
        keys_in, queries_in: the keys and queries that are multiplied by the state before a chunk, without their row factors.
        keys_out: the keys that are multiplied by the chunk's values to update the state, without their row factors.
        solve, scores: for each token, its row of the chunk's matrices ``(I + A)^-1 * beta`` and ``scale * P``; see
            `_chunks_device`.
        factors: float32 row factors of keys_in, queries_in and keys_out, in this order.
        decays: the state's decay over a whole chunk, one per channel or one for all channels.
    """
    PARTS: tl.constexpr = (SHAPE.v_dim + TILE.v - 1) // TILE.v
    v_heads: tl.constexpr = SHAPE.v_heads
    number = tl.program_id(0) // PARTS
    head, sequence = (number % v_heads).to(tl.int64), number // v_heads
    source = head // SHAPE.group
    channel, token = tl.arange(0, TILE.k), tl.arange(0, TILE.chunk)
    column = tl.program_id(0) % PARTS * TILE.v + tl.arange(0, TILE.v)
    channel_inside, column_inside = channel < SHAPE.k_dim, column < SHAPE.v_dim
    first = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    slot = tl.load(state_slots + sequence)
    at_state = states + slot.to(tl.int64) * slot_stride + head * state_head
    at_state += channel[:, None] * state_row + column[None, :] * state_column
    state = _initial_state(at_state, slot, has_initial_state, sequence, channel, column_inside, SHAPE, TILE)
    size = tokens.to(tl.int64) * v_heads
    chunk = first // TILE.chunk + sequence
    for start in range(first, end, TILE.chunk):
        wait_for_products()
        row = (start + token).to(tl.int64)
        inside = start + token < end
        there = inside[:, None] & (channel < SHAPE.width)[None, :]
        at_row = row * v_heads + head
        at_matrix = at_row[:, None] * TILE.chunk + token[None, :]
        keys = tl.load(keys_in + row[:, None] * k_token + source * k_head + channel[None, :], mask=there, other=0.0)
        queries = tl.load(queries_in + row[:, None] * q_token + source * q_head + channel[None, :], mask=there, other=0.0)
        value_inside = inside[:, None] & column_inside[None, :]
        values = tl.load(v + row[:, None] * v_token + head * v_head + column[None, :], mask=value_inside, other=0.0)
        solution = tl.load(solve + at_matrix, mask=inside[:, None], other=0.0)
        weights = tl.load(scores + at_matrix, mask=inside[:, None], other=0.0)
        in_factor = tl.load(factors + at_row, mask=inside, other=0.0)
        read_factor = tl.load(factors + size + at_row, mask=inside, other=0.0)
        out_factor = tl.load(factors + 2 * size + at_row, mask=inside, other=0.0)
        written, result = _chunk_result(state, keys, queries, values, solution, weights, in_factor, read_factor, TILE)
        if SHAPE.per_channel:
            lasting = tl.load(
                decays + (chunk.to(tl.int64) * v_heads + head) * SHAPE.k_dim + channel, mask=channel_inside, other=0.0
            )
            state *= lasting[:, None]
            at_keys = row[:, None] * keys_out_token + source * keys_out_head + channel[None, :]
            keys = tl.load(keys_out + at_keys, mask=there, other=0.0)
        else:
            state *= tl.load(decays + chunk.to(tl.int64) * v_heads + head)
        scaled = (written * out_factor[:, None]).to(TILE.dtype)
        state = tl.dot(tl.trans(keys.to(TILE.dtype)), scaled, state, input_precision=TILE.precision)
        tl.store(out + at_row[:, None] * SHAPE.v_dim + column[None, :], result.to(out.dtype.element_ty), mask=value_inside)
        chunk += 1
    held = (channel < tl.where(slot >= 0, SHAPE.k_dim, 0))[:, None] & column_inside[None, :]
    tl.store(at_state, state.to(states.dtype.element_ty), mask=held)
