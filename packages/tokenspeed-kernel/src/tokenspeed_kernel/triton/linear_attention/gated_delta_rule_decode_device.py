"""Device code of `gated_delta_rule_decode`: the gated delta rule token by token, in float32.

For each token, with decay d, key k, query q, value v and strength b: ``S = d * S``, ``u = b * (v - k S)``, ``S += k^T u``,
``o = scale * q S``. The columns of a state do not interact, so a program updates TILE.v columns of one state without communication.
The kernel is memory-bound: it reads and writes each state once, so it uses no MMAs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.linear_attention._gates_device import log_decay, strength


@triton.jit
def gated_delta_rule_decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    states,
    state_slots,
    output_slots,
    A_log,
    dt_bias,
    out,
    scale,
    tokens,
    q_batch, q_token, q_head,
    k_batch, k_token, k_head,
    v_batch, v_token, v_head,
    g_batch, g_token, g_head, g_channel,
    beta_batch, beta_token, beta_head,
    slot_stride,
    state_head, state_row, state_column,
    output_slots_batch,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Updates TILE.v columns of the state of one request and one value head, token by token, and computes the outputs' columns."""
    start(EARLY)
    PARTS: tl.constexpr = (SHAPE.v_dim + TILE.v - 1) // TILE.v
    part_of_state = tl.program_id(0) // PARTS
    head = (part_of_state % SHAPE.v_heads).to(tl.int64)
    batch = (part_of_state // SHAPE.v_heads).to(tl.int64)
    source = head // SHAPE.group
    channel = tl.arange(0, TILE.k)
    column = tl.program_id(0) % PARTS * TILE.v + tl.arange(0, TILE.v)
    channel_inside, column_inside = channel < SHAPE.k_dim, column < SHAPE.v_dim
    at = head * state_head + channel[:, None] * state_row + column[None, :] * state_column
    slot = tl.load(state_slots + batch)
    first = states + slot.to(tl.int64) * slot_stride
    held = (channel < tl.where(slot >= 0, SHAPE.k_dim, 0))[:, None] & column_inside[None, :]
    state = tl.load(first + at, mask=held, other=0.0).to(tl.float32)
    bias = 0.0
    if SHAPE.gates == 2 and SHAPE.per_channel:
        bias = tl.load(dt_bias + head * SHAPE.k_dim + channel, mask=channel_inside, other=0.0).to(tl.float32)
    elif SHAPE.gates == 2:
        bias = tl.load(dt_bias + head).to(tl.float32)
    for t in range(tokens):
        token = tl.cast(t, tl.int64)
        keys = tl.load(k + batch * k_batch + token * k_token + source * k_head + channel, mask=channel_inside, other=0.0)
        keys = keys.to(tl.float32)
        queries = tl.load(q + batch * q_batch + token * q_token + source * q_head + channel, mask=channel_inside, other=0.0)
        queries = queries.to(tl.float32)
        values = tl.load(v + batch * v_batch + token * v_token + head * v_head + column, mask=column_inside, other=0.0)
        gate = g + batch * g_batch + token * g_token + head * g_head
        part = strength(tl.load(beta + batch * beta_batch + token * beta_token + head * beta_head).to(tl.float32), SHAPE.gates)
        if SHAPE.l2norm:
            keys *= tl.rsqrt(tl.sum(keys * keys, axis=0) + SHAPE.eps)
            queries *= tl.rsqrt(tl.sum(queries * queries, axis=0) + SHAPE.eps)
        if SHAPE.per_channel:
            raw = tl.load(gate + channel * g_channel, mask=channel_inside, other=0.0).to(tl.float32)
            state *= tl.exp(log_decay(raw, bias, A_log, head, SHAPE.gates))[:, None]
        else:
            state *= tl.exp(log_decay(tl.load(gate).to(tl.float32), bias, A_log, head, SHAPE.gates))
        # Both reductions read the state before the update, so they are independent: (S + k u) q = S q + u (k q).
        recalled = tl.sum(state * keys[:, None], axis=0)
        read = tl.sum(state * queries[:, None], axis=0)
        update = (values.to(tl.float32) - recalled) * part
        state += keys[:, None] * update[None, :]
        result = (read + update * tl.sum(keys * queries, axis=0)) * scale
        row = (batch * tokens + token) * SHAPE.v_heads + head
        tl.store(out + row * SHAPE.v_dim + column, result.to(out.dtype.element_ty), mask=column_inside)
        if SHAPE.outputs:
            slot = tl.load(output_slots + batch * output_slots_batch + token)
            target = states + slot.to(tl.int64) * slot_stride
            kept = (channel < tl.where(slot >= 0, SHAPE.k_dim, 0))[:, None] & column_inside[None, :]
            tl.store(target + at, state.to(states.dtype.element_ty), mask=kept)
    if not SHAPE.outputs:
        tl.store(first + at, state.to(states.dtype.element_ty), mask=held)
