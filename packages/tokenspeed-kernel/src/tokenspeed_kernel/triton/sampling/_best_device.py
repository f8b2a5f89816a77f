"""Device code of `_best`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, packed, sort_key, token_of


@triton.jit
def _store_best(best, row, first_token, tokens, tokens_stride, values, values_stride):
    # Stores the token of a `packed` pair, plus ``first_token``, the first token of this shard; and its logit, unless ``values`` is
    # None.
    tl.store(tokens + row * tokens_stride, token_of(best) + first_token)
    if values is not None:
        tl.store(values + row * values_stride, from_sort_key((best >> 32).to(tl.int32)))


@triton.jit
def best_of_spans_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    best,
    first_token,
    tokens,
    tokens_stride,
    values,
    values_stride,
    spans,
    length,
    BLOCK: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Finds the token with the largest logit in one span of a row, and this logit.

    best: int64 [rows, spans], output: the spans' logits and tokens, `packed`. With FINAL, a row is one span, and the kernel writes
    ``tokens`` and ``values`` instead.
    """
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    end = tl.minimum(vocab, (span + 1) * length)
    best_key = tl.full([BLOCK], -0x80000000, tl.int32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(span * length, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        offsets = ids.to(tl.int64) * vocab_stride
        x = tl.load(logits + row * row_stride + offsets, mask=ids < end, other=float("-inf")).to(tl.float32)
        key = sort_key(x)
        better = key > best_key
        best_key = tl.where(better, key, best_key)
        best_id = tl.where(better, ids, best_id)
    # Positions beyond the end hold -inf, with ids above all real ids, so they are never the result.
    found = tl.max(packed(best_key, best_id), axis=0)
    if FINAL:
        _store_best(found, row, first_token, tokens, tokens_stride, values, values_stride)
    else:
        tl.store(best + row * spans + span, found)


@triton.jit
def best_of_rows_kernel(best, first_token, tokens, tokens_stride, values, values_stride, spans, SPANS: tl.constexpr):
    # Reduces the results of a row's spans, ``best``, to the row's token and logit. One program per row.
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    found = tl.max(tl.load(best + row * spans + span, mask=span < spans, other=-0x8000000000000000), axis=0)
    _store_best(found, row, first_token, tokens, tokens_stride, values, values_stride)
