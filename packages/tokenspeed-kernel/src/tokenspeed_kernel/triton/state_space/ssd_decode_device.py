"""Device code of `ssd_decode`: ``S = exp(dt * A) * S + dt * x B^T``, ``y = S C``, token after token, in float32.

Grid: [requests, (tile of rows, head)]. The rows of a state do not interact, so programs need no communication. The kernel is
memory-bound: it reads and writes each state once, so it uses no MMAs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.state_space._recurrence_device import skipped_and_gated, step_sizes, steps_of


@triton.jit(do_not_specialize=["tokens"])
def ssd_decode_kernel(
    x,
    dt,
    A,
    B,
    C,
    states,
    state_slots,
    D,
    z,
    dt_bias,
    output_slots,
    out,
    tokens,
    dt_min,
    dt_max,
    x_batch, x_token, x_head, x_dim,
    dt_batch, dt_token, dt_head,
    B_batch, B_token, B_group, B_dim,
    C_batch, C_token, C_group, C_dim,
    slot_stride,
    state_head, state_row, state_column,
    state_slots_stride,
    z_batch, z_token, z_head, z_dim,
    output_batch, output_token,
    out_batch, out_token, out_head, out_dim,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Updates ROWS rows of the state of one request and one head, and computes these rows of the output.

    No other program accesses these rows of the state.
    """
    request = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) % SHAPE.heads).to(tl.int64)
    group = head // SHAPE.group
    row = tl.program_id(1) // SHAPE.heads * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    rows_there, columns_there = row < SHAPE.head_dim, column < SHAPE.state_dim
    there = rows_there[:, None] & columns_there[None, :]
    at = states + head * state_head + row[:, None].to(tl.int64) * state_row + column[None, :] * state_column
    slot = tl.load(state_slots + request * state_slots_stride).to(tl.int64)
    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    if slot >= 0:
        state += tl.load(at + slot * slot_stride, mask=there, other=0.0).to(tl.float32)
    tl.debug_barrier()  # orders the reads of all threads before the state is written
    steps = steps_of(A, dt_bias, head, dt_min, dt_max)
    x_at = x + request * x_batch + head * x_head + row * x_dim
    dt_at = dt + request * dt_batch + head * dt_head
    B_at = B + request * B_batch + group * B_group + column * B_dim
    C_at = C + request * C_batch + group * C_group + column * C_dim
    out_at = out + request * out_batch + head * out_head + row * out_dim
    for t in tl.range(tokens, disable_licm=True):
        token = tl.cast(t, tl.int64)
        step = step_sizes(tl.load(dt_at + token * dt_token).to(tl.float32), steps, SHAPE)
        new = tl.load(x_at + token * x_token, mask=rows_there, other=0.0).to(tl.float32)
        b = tl.load(B_at + token * B_token, mask=columns_there, other=0.0).to(tl.float32)
        c = tl.load(C_at + token * C_token, mask=columns_there, other=0.0).to(tl.float32)
        state = state * tl.exp(step * steps.A) + (step * new)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1)
        gate = None
        if z is not None:
            gate_at = z + request * z_batch + token * z_token + head * z_head + row * z_dim
            gate = tl.load(gate_at, mask=rows_there, other=0.0).to(tl.float32)
        result = skipped_and_gated(y, new, D, head, gate)
        tl.store(out_at + token * out_token, result.to(out.dtype.element_ty), mask=rows_there)
        if output_slots is not None:
            target = tl.load(output_slots + request * output_batch + token * output_token).to(tl.int64)
            if target >= 0:
                tl.store(at + target * slot_stride, state.to(states.dtype.element_ty), mask=there)
    if output_slots is None:  # noqa: SIM102 (this is known at compile time)
        if slot >= 0:
            tl.store(at + slot * slot_stride, state.to(states.dtype.element_ty), mask=there)
