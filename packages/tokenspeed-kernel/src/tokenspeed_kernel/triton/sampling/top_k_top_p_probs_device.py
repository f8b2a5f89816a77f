"""Device code of `top_k_top_p_probs`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, packed, sort_key
from tokenspeed_kernel.triton.sampling._state_device import KEPT, LARGEST, LAST, STATE
from tokenspeed_kernel.triton.sampling._weights_device import floor_of, scale_of, token_weights


@triton.jit
def write_probs_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    min_p,
    state,
    out,
    out_row_stride,
    out_vocab_stride,
    spans,
    length,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes the probabilities of the tokens of one span of a row."""
    start(EARLY)
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    state += row * STATE
    largest = from_sort_key(tl.load(state + LARGEST).to(tl.int32))
    last = tl.load(state + LAST)
    kept = tl.load(state + KEPT)
    inverse = 1.0 / tl.maximum(kept, 1).to(tl.float64)
    scale = scale_of(tl.load(temperature + row))
    floor = floor_of(min_p, row)
    end = tl.minimum(vocab, (span + 1) * length)
    for begin in range(span * length, end, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        position = ids.to(tl.int64)
        x = tl.load(logits + row * row_stride + position * vocab_stride, mask=ids < end, other=float("-inf")).to(tl.float32)
        # A greedy row keeps one token, with probability 1. Its weight is not computed, because its logit may be NaN or infinite.
        p = tl.where(kept > 0, token_weights(x, largest, scale, floor).to(tl.float64) * inverse, 1.0)
        p = tl.where(packed(sort_key(x), ids) >= last, p, 0.0)
        tl.store(out + row * out_row_stride + position * out_vocab_stride, p.to(tl.float32), mask=ids < end)
