"""Device code of `causal_conv1d_decode`. A program holds the last ``width - 1`` inputs of its channels in registers: ``first`` is
the newest, then ``second`` and ``third``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.state_space._convolution_device import activated, bias_of, tap


@triton.jit
def _keep(states, slot, slot_stride, row_stride, at, inside, first, second, third, SHAPE: tl.constexpr):
    """Stores a request's state, the last ``width - 1`` inputs. ``first`` is the newest input, ``third`` the oldest."""
    row = states + slot * slot_stride + at
    there = inside & (slot >= 0)
    element = states.dtype.element_ty
    tl.store(row + (SHAPE.width - 2) * row_stride, first.to(element), mask=there)
    if SHAPE.width > 2:
        tl.store(row + (SHAPE.width - 3) * row_stride, second.to(element), mask=there)
    if SHAPE.width > 3:
        tl.store(row, third.to(element), mask=there)


@triton.jit(do_not_specialize=["batch", "tokens"])
def causal_conv1d_decode_kernel(
    x,
    weight,
    bias,
    states,
    state_slots,
    output_slots,
    out,
    batch,
    tokens,
    x_batch,
    x_token,
    x_channel,
    slot_stride,
    row_stride,
    state_channel,
    state_slots_stride,
    output_batch,
    output_token,
    out_batch,
    out_token,
    out_channel,
    SHAPE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes BLOCK channels of REQUESTS requests. No other program accesses these channels of these requests' states."""
    start(EARLY)
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    width_inside = channel < SHAPE.channels
    inside = (request < batch) & width_inside
    slot = tl.load(state_slots + request * state_slots_stride, mask=request < batch, other=-1).to(tl.int64)
    request = request.to(tl.int64)
    state_at = channel.to(tl.int64) * state_channel
    row_stride = tl.cast(row_stride, tl.int64)
    read = states + slot * slot_stride + state_at
    there = inside & (slot >= 0)
    # The inputs before the request's first new token; `first` is the most recent.
    first = tl.load(read + (SHAPE.width - 2) * row_stride, mask=there, other=0.0).to(tl.float32)
    second, third = first, first  # not used by narrower convolutions
    if SHAPE.width > 2:
        second = tl.load(read + (SHAPE.width - 3) * row_stride, mask=there, other=0.0).to(tl.float32)
    if SHAPE.width > 3:
        third = tl.load(read, mask=there, other=0.0).to(tl.float32)
    tl.debug_barrier()  # orders the reads of all threads before the state is written
    own = tap(weight, channel, width_inside, SHAPE.width - 1, SHAPE)
    before = tap(weight, channel, width_inside, SHAPE.width - 2, SHAPE)
    if SHAPE.width > 2:
        before_2 = tap(weight, channel, width_inside, SHAPE.width - 3, SHAPE)
    if SHAPE.width > 3:
        before_3 = tap(weight, channel, width_inside, 0, SHAPE)
    constant = bias_of(bias, channel, width_inside)
    x_at = x + request * x_batch + channel.to(tl.int64) * x_channel
    out_at = out + request * out_batch + channel.to(tl.int64) * out_channel
    for t in range(tokens):
        token = tl.cast(t, tl.int64)
        new = tl.load(x_at + token * x_token, mask=inside, other=0.0).to(tl.float32)
        total = constant
        if SHAPE.width > 3:
            total += third * before_3
        if SHAPE.width > 2:
            total += second * before_2
        total = total + first * before + new * own
        tl.store(out_at + token * out_token, activated(total, SHAPE).to(out.dtype.element_ty), mask=inside)
        third = second
        second = first
        first = new
        if output_slots is not None:
            at = output_slots + request * output_batch + token * output_token
            target = tl.load(at, mask=request < batch, other=-1).to(tl.int64)
            _keep(states, target, slot_stride, row_stride, state_at, inside, first, second, third, SHAPE)
    if output_slots is None:
        _keep(states, slot, slot_stride, row_stride, state_at, inside, first, second, third, SHAPE)
