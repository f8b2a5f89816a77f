"""Slow path of the top-k search, for rows whose lists (see `top_k_indices_device`) do not determine the threshold.

One program searches a row. The *threshold* is the smallest chosen score. A sample of the row brackets the threshold, and few scores
lie in the bracket. The code compares int32 *sort keys*, which sort as the scores do, see `sort_key`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import sort_key

NO_KEY = tl.constexpr(-0x80000000)
"""A sort key below the sort key of any score."""

HIDDEN = tl.constexpr(-0x7F800001)
"""The sort key of -inf, a score that is never chosen."""

_LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def keys_at(scores, at, length, key_stride):
    """Loads scores of a row at positions ``at`` and returns their int32 sort keys; `NO_KEY` beyond the row's length."""
    x = tl.load(scores + at.to(tl.int64) * key_stride, mask=at < length, other=0.0).to(tl.float32)
    return tl.where(at < length, sort_key(x), NO_KEY)


@triton.jit
def _unsigned(key):
    """Converts an int32 sort key to a uint32 that sorts like it. The difference of two such values fits into uint32."""
    return (key.to(tl.int64) - NO_KEY).to(tl.uint32)


@triton.jit
def _as_key(number):
    """The inverse of `_unsigned`: returns the int32 sort key."""
    return number.to(tl.int32, bitcast=True) ^ NO_KEY


@triton.jit
def _third(low, high, i):
    """Returns the first value of third ``i`` (0 to 2) of the uint32 range from low to high, at most high. Returns high if ``i`` is
    3."""
    return low + tl.minimum(i * ((high - low) // 3 + 1), high - low)


@triton.jit
def _reaching_thirds(keys, low, high):
    """Splits the range from low to high into thirds, and counts the sort keys that are at least the start of a third.

    Returns the counts for the second third and for the last third, int32. There must be fewer than 2^15 keys.
    """
    # Both counts are packed into one int32, so that one reduction sums both.
    reaching = (keys >= _as_key(_third(low, high, 1))).to(tl.int32)
    reaching += tl.where(keys >= _as_key(_third(low, high, 2)), 1 << 16, 0)
    total = tl.sum(reaching, axis=0)
    return total & 0xFFFF, total >> 16


@triton.jit
def _third_that_holds(low, high, second, last, wanted):
    """Performs one ternary-search step for the largest value v such that at least ``wanted`` keys are >= v.

    Returns the third of the range from low to high that contains v: the third's low and high, and its index 0 to 2. ``second`` and
    ``last`` are the numbers of keys >= the start of the second and of the last third.
    """
    held = (second >= wanted).to(tl.uint32) + (last >= wanted).to(tl.uint32)
    end = tl.where(held == 2, high, tl.maximum(_third(low, high, held + 1) - 1, low))
    return _third(low, high, held), end, held


@triton.jit
def wanted_key(keys, low, wanted, spare):
    """Returns the largest value v such that at least ``wanted`` of the sort keys are >= v.

    May return a lower value if at most ``wanted + spare`` keys are >= that value. This function is a ternary search. The sampling
    kernels' `threshold_of` instead compares each key with all parts of the range at once, which would take too many registers here.

    Args:
        keys: int32, fewer than 2^15.
        low: int64, a value such that at least ``wanted`` keys are >= it.

    Returns:
        int64.
    """
    first = _unsigned(low)
    end = _unsigned(tl.max(keys, axis=0))
    count = tl.sum((keys >= low).to(tl.int32), axis=0)
    while (first < end) & (count > wanted + spare):
        second, last = _reaching_thirds(keys, first, end)
        first, end, held = _third_that_holds(first, end, second, last, wanted)
        count = tl.where(held == 0, count, tl.where(held == 1, second, last))
    return _as_key(first).to(tl.int64)


@triton.jit
def _bracket(scores, length, key_stride, top_k, SEARCH: tl.constexpr):
    """Returns a range of sort keys ``(low, high)``, int64. The range very likely contains the threshold and few other keys of the
    row."""
    SAMPLE: tl.constexpr = SEARCH.sample
    stride = (length + SAMPLE - 1) // SAMPLE
    keys = keys_at(scores, tl.arange(0, SAMPLE) * stride, length, key_stride)
    live = keys > HIDDEN
    sampled = (length + stride - 1) // stride
    rank = top_k.to(tl.float32) * sampled.to(tl.float32) / length.to(tl.float32)
    # The standard deviation of the threshold's rank in a random sample is about the root of the rank. The margin is four standard
    # deviations.
    margin = 4.0 * tl.sqrt(rank) + 1.0
    upper = (rank - margin).to(tl.int32)
    lower = (rank + margin).to(tl.int32) + 1
    high = tl.full([], _LARGEST, tl.int64)
    low = tl.full([], HIDDEN + 1, tl.int64)
    number = tl.sum(live.to(tl.int32), axis=0)
    if (upper >= 1) & (upper <= number):
        high = wanted_key(keys, low, upper, 0)
    if lower <= number:
        low = wanted_key(keys, low, lower, 0)
    return low, high


@triton.jit
def _collect(scores, length, key_stride, low, high, candidates, SEARCH: tl.constexpr):
    """Writes the row's sort keys from low to high to ``candidates``, as many as fit.

    Returns:
        Three int32 counts of the row's sort keys: above high, from low to high, and above the sort key of -inf.
    """
    BLOCK: tl.constexpr = SEARCH.lanes // 4
    # Two counts are packed into one int32: a lane sees fewer than 2^15 keys.
    both = tl.zeros([BLOCK], tl.int32)
    inside = length * 0
    tl.debug_barrier()  # other threads may still be reading the candidates of the preceding range
    for start in range(0, length, BLOCK):
        keys = keys_at(scores, start + tl.arange(0, BLOCK), length, key_stride)
        both += (keys > high).to(tl.int32) << 16 | (keys > HIDDEN).to(tl.int32)
        within = (keys >= low) & (keys <= high)
        location = inside + tl.cumsum(within.to(tl.int32), axis=0) - 1
        tl.store(candidates + location, keys.to(tl.int64), mask=within & (location < SEARCH.lanes))
        inside += tl.sum(within.to(tl.int32), axis=0)
    tl.debug_barrier()  # make the stores visible to the other threads
    return tl.sum(both >> 16, axis=0), inside, tl.sum(both & 0xFFFF, axis=0)


@triton.jit
def _narrowed(scores, length, key_stride, low, high, top_k, SEARCH: tl.constexpr):
    """Performs one ternary-search step over the whole row. Returns the third of the range from low to high that contains the
    threshold.

    The range must contain the threshold.
    """
    BLOCK: tl.constexpr = SEARCH.lanes // 4
    second = length * 0
    last = length * 0
    for start in range(0, length, BLOCK):
        keys = keys_at(scores, start + tl.arange(0, BLOCK), length, key_stride)
        of_block = _reaching_thirds(keys, _unsigned(low), _unsigned(high))
        second += of_block[0]
        last += of_block[1]
    first, end, _ = _third_that_holds(_unsigned(low), _unsigned(high), second, last, top_k)
    return _as_key(first).to(tl.int64), _as_key(end).to(tl.int64)


@triton.jit
def search_row(scores, length, key_stride, top_k, candidates, SEARCH: tl.constexpr):
    """Finds the threshold of a row: the smallest of its ``top_k`` largest scores.

    Args:
        candidates: int64 ``[SEARCH.lanes]``, overwritten.

    Returns:
        ``(threshold, ties)``. ``threshold`` is the threshold's sort key, int64, or the sort key of -inf if at most ``top_k`` scores
        are above -inf. ``ties`` is the number of chosen scores that equal the threshold, int32.
    """
    CANDIDATES: tl.constexpr = SEARCH.lanes
    threshold = tl.full([], HIDDEN, tl.int64)
    ties = length * 0
    low = threshold + 1
    high = tl.full([], _LARGEST, tl.int64)
    searching = length > top_k
    if searching & (length > CANDIDATES):
        low, high = _bracket(scores, length, key_stride, top_k, SEARCH)
    while searching:
        above, inside, shown = _collect(scores, length, key_stride, low, high, candidates, SEARCH)
        if shown <= top_k:
            searching = length < 0
        elif above >= top_k:  # the bracket is too low
            low = high + 1
            high = tl.full([], _LARGEST, tl.int64)
        elif above + inside < top_k:  # the bracket is too high
            high = low - 1
            low = tl.full([], HIDDEN + 1, tl.int64)
        elif (inside > CANDIDATES) & (low < high):
            low, high = _narrowed(scores, length, key_stride, low, high, top_k, SEARCH)
        else:
            searching = length < 0
            ties = top_k - above
            threshold = low
            if low < high:
                lane = tl.arange(0, CANDIDATES)
                found = tl.load(candidates + lane, mask=lane < inside, other=NO_KEY).to(tl.int32)
                threshold = wanted_key(found, low, ties, 0)
                ties -= tl.sum((found > threshold).to(tl.int32), axis=0)
    return threshold, ties
