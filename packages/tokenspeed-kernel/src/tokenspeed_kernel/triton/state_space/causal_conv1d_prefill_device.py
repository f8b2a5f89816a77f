"""Device code of `causal_conv1d_prefill`. A program slides over a block of tokens, with the last ``width - 1`` inputs of its
channels in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import sequence_of
from tokenspeed_kernel.triton.state_space._convolution_device import activated, bias_of, tap


class Rows(NamedTuple):
    """A program's channels of the tokens of one sequence.

    Fields:
        first: pointers to the channels of token 0 of all sequences.
        begin: the sequence's first token.
        end: the end of the program's block of tokens, relative to the sequence.
        stride: elements from one token to the next.
    """

    first: Any
    begin: Any
    end: Any
    stride: Any


class Taps(NamedTuple):
    """The convolution's weights and bias of the program's channels, float32.

    ``own`` is the weight of the current token, ``nearest`` of the token before it, and so on. ``second`` is used only if the width
    is above 2, ``third`` only if it is above 3.
    """

    own: Any
    nearest: Any
    second: Any
    third: Any
    bias: Any


@triton.jit
def _there(channel, holds, SHAPE: tl.constexpr):
    """Returns the mask of the valid channels; all false if the scalar condition ``holds`` is false."""
    return channel < tl.where(holds, SHAPE.channels, 0)


@triton.jit
def _input(x, token, channel, SHAPE: tl.constexpr):
    """Loads the input of one token (relative to the sequence) of `Rows`, float32; 0 at or beyond ``x.end``."""
    there = _there(channel, token < x.end, SHAPE)
    return tl.load(x.first + (x.begin + token) * x.stride, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _earlier(x, token, state, row_stride, started, channel, SHAPE: tl.constexpr):
    """Loads the input of a token before the program's block of tokens. An input before the sequence comes from the state."""
    there = _there(channel, token >= 0, SHAPE)
    value = tl.load(x.first + (x.begin + token) * x.stride, mask=there, other=0.0).to(tl.float32)
    there = _there(channel, started & (token < 0), SHAPE)
    return value + tl.load(state + (token + (SHAPE.width - 1)) * row_stride, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _write(out, token, new, first, second, third, taps, channel, SHAPE: tl.constexpr):
    """Computes and stores a token's output from its input ``new`` and the inputs before it; ``first`` is the most recent."""
    total = taps.bias
    if SHAPE.width > 3:
        total += third * taps.third
    if SHAPE.width > 2:
        total += second * taps.second
    result = activated(total + first * taps.nearest + new * taps.own, SHAPE)
    at = out.first + (out.begin + token) * out.stride
    tl.store(at, result.to(out.first.dtype.element_ty), mask=_there(channel, token < out.end, SHAPE))


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
    x_token, x_channel,
    slot_stride,
    row_stride,
    state_channel,
    state_slots_stride,
    initial_stride,
    out_token, out_channel,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Computes a block of TOKENS tokens of one sequence for BLOCK channels, token after token.

    Each input is loaded once. It stays in registers while the next tokens need it. The program of a sequence's first block also
    writes the state, because it alone reads the initial state.
    """
    row_stride = tl.cast(row_stride, tl.int64)
    PARTS: tl.constexpr = (SHAPE.channels + BLOCK - 1) // BLOCK
    number = tl.program_id(0) // PARTS
    sequence = sequence_of(number, cu_seqlens, batch, 1, TOKENS, AT_ONCE)
    begin = tl.load(cu_seqlens + sequence)
    length = tl.load(cu_seqlens + sequence + 1) - begin
    block = (number - begin // TOKENS - sequence) * TOKENS
    if (block < length) | (block == 0):
        slot = tl.load(state_slots + sequence * state_slots_stride)
        started = slot < slot
        if has_initial_state is not None:
            started = (tl.load(has_initial_state + sequence * initial_stride).to(tl.int32) != 0) & (slot >= 0)
        channel = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
        inside = channel < SHAPE.channels
        channels = channel.to(tl.int64)
        state = states + slot.to(tl.int64) * slot_stride + channels * state_channel
        end = tl.minimum(block + TOKENS, length)
        source = Rows(x + channels * x_channel, begin.to(tl.int64), end, x_token)
        target = Rows(out + channels * out_channel, begin.to(tl.int64), end, out_token)
        own = tap(weight, channel, inside, SHAPE.width - 1, SHAPE)
        nearest = tap(weight, channel, inside, SHAPE.width - 2, SHAPE)
        first = _earlier(source, block - 1, state, row_stride, started, channel, SHAPE)
        of_second, of_third, second, third = own, own, first, first  # not used by narrower convolutions
        if SHAPE.width > 2:
            of_second = tap(weight, channel, inside, SHAPE.width - 3, SHAPE)
            second = _earlier(source, block - 2, state, row_stride, started, channel, SHAPE)
        if SHAPE.width > 3:
            of_third = tap(weight, channel, inside, 0, SHAPE)
            third = _earlier(source, block - 3, state, row_stride, started, channel, SHAPE)
        taps = Taps(own, nearest, of_second, of_third, bias_of(bias, channel, inside))
        for token in range(block, end, 4):
            # Issue four loads before the stores. The compiler cannot prove that loads and stores do not alias, and would serialise
            # them.
            a = _input(source, token, channel, SHAPE)
            b = _input(source, token + 1, channel, SHAPE)
            c = _input(source, token + 2, channel, SHAPE)
            d = _input(source, token + 3, channel, SHAPE)
            _write(target, token, a, first, second, third, taps, channel, SHAPE)
            _write(target, token + 1, b, a, first, second, taps, channel, SHAPE)
            _write(target, token + 2, c, b, a, first, taps, channel, SHAPE)
            _write(target, token + 3, d, c, b, a, taps, channel, SHAPE)
            third = b
            second = c
            first = d

        if (block == 0) & (slot >= 0):
            tl.debug_barrier()  # orders the reads of all threads before the state is written
            # Row i of the new state is row i + length of the old state, or an input. Rows are written in ascending order, so every
            # row is read before it is overwritten.
            for i in tl.static_range(SHAPE.width - 1):
                token = length - (SHAPE.width - 1) + i
                last = tl.zeros(channel.shape, tl.float32)
                if token >= 0:
                    last += tl.load(source.first + (source.begin + token) * x_token, mask=inside, other=0.0).to(tl.float32)
                elif started:
                    last += tl.load(state + (length + i) * row_stride, mask=inside, other=0.0).to(tl.float32)
                tl.store(state + i * row_stride, last.to(states.dtype.element_ty), mask=inside)
