"""Device code of `top_k_indices`.

The *threshold* is the least score that is chosen. All that follows is about the keys by which scores sort, `sort_key`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import PARTS, part_that_holds, sort_key, threshold_of

_NO_KEY = tl.constexpr(-0x80000000)  # less than that of any score
_HIDDEN = tl.constexpr(-0x7F800001)  # that of -inf
_LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys_at(scores, at, length, key_stride):
    """int32 keys of some scores of a row; `_NO_KEY` beyond its length."""
    x = tl.load(scores + at.to(tl.int64) * key_stride, mask=at < length, other=0.0).to(tl.float32)
    return tl.where(at < length, sort_key(x), _NO_KEY)


@triton.jit
def _bracket(scores, length, key_stride, top_k, SEARCH: tl.constexpr):
    """int64, a range of keys that very likely holds the threshold, and few others."""
    SAMPLE: tl.constexpr = SEARCH.sample
    stride = (length + SAMPLE - 1) // SAMPLE
    keys = _keys_at(scores, tl.arange(0, SAMPLE) * stride, length, key_stride)
    live = keys > _HIDDEN
    sampled = (length + stride - 1) // stride
    rank = top_k.to(tl.float32) * sampled.to(tl.float32) / length.to(tl.float32)
    # The rank of the threshold in a random sample is off by no more than its root, usually, and hardly ever by four times that.
    margin = 4.0 * tl.sqrt(rank) + 1.0
    upper = (rank - margin).to(tl.int32)
    lower = (rank + margin).to(tl.int32) + 1
    high = tl.full([], _LARGEST, tl.int64)
    low = tl.full([], _HIDDEN + 1, tl.int64)
    number = tl.sum(live.to(tl.int32), axis=0)
    if (upper >= 1) & (upper <= number):
        high, _ = threshold_of(keys, live, upper, 0)
    if lower <= number:
        low, _ = threshold_of(keys, live, lower, 0)
    return low, high


@triton.jit
def _collect(scores, length, key_stride, low, high, candidates, SEARCH: tl.constexpr):
    """Writes the keys from low to high to candidates, as many as there is room for.

    Returns:
        int32: how many keys are above high, how many from low to high, how many more than that of -inf.
    """
    BLOCK: tl.constexpr = SEARCH.block
    # Two counts in one number: a lane sees fewer than 2^15 keys.
    both = tl.zeros([BLOCK], tl.int32)
    inside = length * 0
    tl.debug_barrier()  # candidates of an earlier range may still be read
    for start in range(0, length, BLOCK):
        keys = _keys_at(scores, start + tl.arange(0, BLOCK), length, key_stride)
        both += (keys > high).to(tl.int32) << 16 | (keys > _HIDDEN).to(tl.int32)
        within = (keys >= low) & (keys <= high)
        place = inside + tl.cumsum(within.to(tl.int32), axis=0) - 1
        tl.store(candidates + place, keys, mask=within & (place < SEARCH.candidates))
        inside += tl.sum(within.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read what these have stored
    return tl.sum(both >> 16, axis=0), inside, tl.sum(both & 0xFFFF, axis=0)


@triton.jit
def _narrowed(scores, length, key_stride, low, high, top_k, SEARCH: tl.constexpr):
    """The part of a range of keys that holds the threshold, if the range does."""
    BLOCK: tl.constexpr = SEARCH.block // PARTS
    stride = ((high - low) // PARTS) + 1
    ends = tl.minimum(low + tl.arange(0, PARTS) * stride, high).to(tl.int32)
    reaching = tl.zeros([PARTS], tl.int32)
    for start in range(0, length, BLOCK):
        keys = _keys_at(scores, start + tl.arange(0, BLOCK), length, key_stride)
        reaching += tl.sum((keys[None, :] >= ends[:, None]).to(tl.int32), axis=1)
    low, high, _ = part_that_holds(low, high, reaching, top_k)
    return low, high


@triton.jit
def _write_chosen(scores, length, key_stride, threshold, ties, top_k, out, out_stride, SEARCH: tl.constexpr):
    """Writes the positions of keys above the threshold, and of the first ``ties`` ones equal to it; behind them -1."""
    BLOCK: tl.constexpr = SEARCH.block
    larger_before = length * 0
    equal_before = length * 0
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = _keys_at(scores, at, length, key_stride)
        larger = keys > threshold
        equal = keys == threshold
        # Both counts in one sum: neither reaches 2^16.
        both = (larger.to(tl.int32) << 16) | equal.to(tl.int32)
        before = tl.cumsum(both, axis=0) - both
        rank = equal_before + (before & 0xFFFF)
        place = larger_before + (before >> 16) + tl.minimum(rank, ties)
        tl.store(out + place * out_stride, at, mask=larger | (equal & (rank < ties)))
        total = tl.sum(both, axis=0)
        larger_before += total >> 16
        equal_before += total & 0xFFFF
    written = larger_before + tl.minimum(equal_before, ties)
    for start in range(0, top_k, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(out + place * out_stride, tl.full([BLOCK], -1, tl.int32), mask=(place >= written) & (place < top_k))


# Where the compiler knew that four scores can be loaded at once, it would exchange them between threads for the running sums, and
# spill up to 300 bytes a thread (Triton 3.6, sm_90).
@triton.jit(do_not_specialize=["row_stride", "key_stride", "out_row_stride", "out_stride", "keys", "top_k"])
def top_k_indices_kernel(
    scores,
    lengths,
    candidates,  # int32 [rows, SEARCH.candidates]
    out,
    row_stride,
    key_stride,
    out_row_stride,
    out_stride,
    keys,
    top_k,
    SEARCH: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    CANDIDATES: tl.constexpr = SEARCH.candidates
    scores += row * row_stride
    candidates += row * CANDIDATES
    length = keys
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), keys)
    # Where no more are shown than are wanted, all are chosen.
    threshold = tl.full([], _HIDDEN, tl.int64)
    ties = length * 0
    if length > top_k:
        low = threshold + 1
        high = tl.full([], _LARGEST, tl.int64)
        if length > CANDIDATES:
            low, high = _bracket(scores, length, key_stride, top_k, SEARCH)
        searching = length > 0
        while searching:
            above, inside, shown = _collect(scores, length, key_stride, low, high, candidates, SEARCH)
            if shown <= top_k:
                searching = length < 0
            elif above >= top_k:  # the bracket is too low
                low = high + 1
                high = tl.full([], _LARGEST, tl.int64)
            elif above + inside < top_k:  # the bracket is too high
                high = low - 1
                low = tl.full([], _HIDDEN + 1, tl.int64)
            elif (inside > CANDIDATES) & (low < high):
                low, high = _narrowed(scores, length, key_stride, low, high, top_k, SEARCH)
            else:
                searching = length < 0
                threshold = low
                ties = top_k - above
                if low < high:
                    lane = tl.arange(0, CANDIDATES)
                    found = tl.load(candidates + lane, mask=lane < inside, other=_NO_KEY)
                    threshold, _ = threshold_of(found, lane < inside, ties, 0)
                    ties -= tl.sum((found > threshold).to(tl.int32), axis=0)
    _write_chosen(scores, length, key_stride, threshold, ties, top_k, out + row * out_row_stride, out_stride, SEARCH)
