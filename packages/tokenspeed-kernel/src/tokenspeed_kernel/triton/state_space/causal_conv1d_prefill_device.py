"""Device code of `causal_conv1d_prefill`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import sequence_of
from tokenspeed_kernel.triton.state_space._convolution_device import activated, bias_of, tap


@triton.jit(do_not_specialize=["batch"])
def causal_conv1d_prefill_kernel(
    x,
    weight,
    bias,
    cu_seqlens,
    states,
    state_slots,
    has_initial_state,
    out,
    batch,
    x_token,
    x_channel,
    slot_stride,
    row_stride,
    state_channel,
    state_slots_stride,
    initial_stride,
    out_token,
    out_channel,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A block of tokens of one sequence, and some channels. The program of a sequence's first block also writes its state, for it
    is the only one that reads the state from which the sequence starts."""
    WIDTH: tl.constexpr = SHAPE.width
    sequence = sequence_of(tl.program_id(1), cu_seqlens, batch, 1, TOKENS, AT_ONCE)
    begin = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - begin
    first = (tl.program_id(1) - begin // TOKENS - sequence) * TOKENS
    if (first < length) | (first == 0):
        slot = tl.load(state_slots + sequence * state_slots_stride)
        initial_slot = -1
        if has_initial_state is not None:
            initial_slot = tl.where(tl.load(has_initial_state + sequence * initial_stride).to(tl.int32) != 0, slot, -1)
        channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = channel < SHAPE.channels
        channels = channel.to(tl.int64)
        state = states + slot.to(tl.int64) * slot_stride + channels * state_channel
        x_at = x + begin.to(tl.int64) * x_token + channels * x_channel
        out_at = out + begin.to(tl.int64) * out_token + channels * out_channel
        place = first + tl.arange(0, TOKENS)[:, None]
        there = inside & (place < length)

        total = tl.zeros((TOKENS, BLOCK), tl.float32) + bias_of(bias, channel, inside)
        for i in tl.static_range(WIDTH):
            source = place + (i - (WIDTH - 1))
            value = tl.load(x_at + source.to(tl.int64) * x_token, mask=there & (source >= 0), other=0.0).to(tl.float32)
            if has_initial_state is not None and i < WIDTH - 1:  # noqa: SIM102 (this is known at compile time)
                if (initial_slot >= 0) & (first == 0):
                    kept = state + (source + (WIDTH - 1)) * row_stride
                    value += tl.load(kept, mask=there & (source < 0), other=0.0).to(tl.float32)
            total += value * tap(weight, channel, inside, i, SHAPE)
        result = activated(total, SHAPE).to(out.dtype.element_ty)
        tl.store(out_at + place.to(tl.int64) * out_token, result, mask=there)

        if (first == 0) & (slot >= 0):
            tl.debug_barrier()  # threads that write the state may be others than those that have read it
            # Row i becomes row i + length of the old state, or an input. In rising order none is read after it was written.
            for i in tl.static_range(WIDTH - 1):
                token = length - (WIDTH - 1) + i
                last = tl.zeros(channel.shape, tl.float32)
                if token >= 0:
                    last += tl.load(x_at + token.to(tl.int64) * x_token, mask=inside, other=0.0).to(tl.float32)
                elif initial_slot >= 0:
                    last += tl.load(state + (length + i) * row_stride, mask=inside, other=0.0).to(tl.float32)
                tl.store(state + i * row_stride, last.to(states.dtype.element_ty), mask=inside)
