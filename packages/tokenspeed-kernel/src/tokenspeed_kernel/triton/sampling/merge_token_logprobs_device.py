"""Device code of `merge_token_logprobs`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._online_softmax_device import LN_2, LOG2_E
from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, largest_pairs, packed, sort_key, token_of

_NO_PAIR = tl.constexpr(-0x8000000000000000)


@triton.jit
def _less(x, lse):
    # Returns ``x - lse``; -inf stays -inf, even if ``lse`` is -inf.
    return tl.where(x == float("-inf"), x, x - lse)


@triton.jit
def merge_token_logprobs_kernel(
    token_logits,
    token_logits_part_stride,
    token_logits_row_stride,
    top_logits,
    top_logits_part_stride,
    top_logits_row_stride,
    top_logits_k_stride,
    top_tokens,
    top_tokens_part_stride,
    top_tokens_row_stride,
    top_tokens_k_stride,
    lse,
    lse_part_stride,
    lse_row_stride,
    token_out,
    token_out_stride,
    top_out,
    top_out_row_stride,
    top_out_k_stride,
    top_tokens_out,
    top_tokens_out_row_stride,
    top_tokens_out_k_stride,
    lse_out,
    lse_out_stride,
    parts,
    top_k,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Merges the shards' results of one row: the LSE over the whole vocabulary, the log-probability of the given token, and the
    # ``top_k`` most probable tokens. The given token is in one shard; the other shards have -inf for it.
    start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS).to(tl.int64)
    own = tl.load(lse + part * lse_part_stride + row * lse_row_stride, mask=part < parts, other=float("-inf"))
    # Take the maximum of sort keys, so that NaN propagates.
    largest = from_sort_key(tl.max(sort_key(own), axis=0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = shift + tl.log2(tl.sum(tl.exp2((own - shift) * LOG2_E), axis=0)) * LN_2
    tl.store(lse_out + row * lse_out_stride, total)

    own = tl.load(
        token_logits + part * token_logits_part_stride + row * token_logits_row_stride, mask=part < parts, other=float("-inf")
    )
    tl.store(token_out + row * token_out_stride, _less(from_sort_key(tl.max(sort_key(own), axis=0)), total))

    if top_k > 0:
        top_logits += row * top_logits_row_stride
        top_tokens += row * top_tokens_row_stride
        entry = tl.arange(0, ENTRIES)
        held = entry < parts * top_k
        of_part, of_position = (entry // top_k).to(tl.int64), entry % top_k
        x = tl.load(top_logits + of_part * top_logits_part_stride + of_position * top_logits_k_stride, mask=held, other=0.0)
        token = tl.load(top_tokens + of_part * top_tokens_part_stride + of_position * top_tokens_k_stride, mask=held, other=0)
        pair = tl.where(held, packed(sort_key(x), token), _NO_PAIR)
        # Select only the top entries instead of sorting all. Only padding pairs are equal to one another, and they are last.
        pair = largest_pairs(pair, TOP_K_PADDED)
        position = tl.arange(0, TOP_K_PADDED)
        wanted = position < top_k
        best = _less(from_sort_key((pair >> 32).to(tl.int32)), total)
        tl.store(top_out + row * top_out_row_stride + position * top_out_k_stride, best, mask=wanted)
        at = top_tokens_out + row * top_tokens_out_row_stride + position * top_tokens_out_k_stride
        tl.store(at, token_of(pair).to(tl.int32), mask=wanted)
