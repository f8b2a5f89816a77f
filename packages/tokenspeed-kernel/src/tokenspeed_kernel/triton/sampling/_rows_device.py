"""Device code of `_rows`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_key(x):
    """int32 that sort like float32 x: NaN above all numbers, and both zeros equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def from_sort_key(key):
    """float32 of a key; not of NaN's."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(best):
    """int64 token of what `row_extremes_kernel` keeps."""
    return 0x7FFFFFFF - (best & 0x7FFFFFFF)


@triton.jit
def row_extremes_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    best,
    least,
    out,
    out_stride,
    spans,
    length,
    BLOCK: tl.constexpr,
    WITH_LEAST: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Of each span the largest logit with its token, and the least logit above -inf.

    best: int64 [rows, spans], the sort key in the upper half and 2^31 - 1 - token in the lower: of equal logits the first token is
    the best. least: float32 [rows, spans], inf where there is none. With FINAL a row is one span, and its token goes to out.
    """
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    end = tl.minimum(vocab, (span + 1) * length)
    best_key = tl.full([BLOCK], -0x80000000, tl.int32)
    best_id = tl.zeros([BLOCK], tl.int32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(span * length, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        offsets = ids.to(tl.int64) * vocab_stride
        x = tl.load(logits + row * row_stride + offsets, mask=ids < end, other=float("-inf")).to(tl.float32)
        key = sort_key(x)
        better = key > best_key
        best_key = tl.where(better, key, best_key)
        best_id = tl.where(better, ids, best_id)
        if WITH_LEAST:
            lowest = tl.minimum(lowest, tl.where(x == float("-inf"), float("inf"), x))
    # Beyond the end -inf stands with a higher id than any real one, so that it never wins.
    found = tl.max((best_key.to(tl.int64) << 32) | (0x7FFFFFFF - best_id).to(tl.int64), axis=0)
    if FINAL:
        tl.store(out + row * out_stride, token_of(found))
    else:
        tl.store(best + row * spans + span, found)
    if WITH_LEAST:
        tl.store(least + row * spans + span, tl.min(lowest, axis=0))


@triton.jit
def best_of_row(best, row, spans, SPANS: tl.constexpr):
    """The best of a row's spans."""
    span = tl.arange(0, SPANS)
    return tl.max(tl.load(best + row * spans + span, mask=span < spans, other=-0x8000000000000000), axis=0)
