"""Sort keys, packed (key, token) pairs, and threshold searches for all sampling kernels."""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

PARTS = tl.constexpr(16)
"""The number of parts into which one step of a threshold search splits a range of sort keys."""

_REMOVED = tl.constexpr(-(2**63))  # below any pair


@triton.jit
def sort_key(x):
    """Maps float32 to int32 sort keys, which have the same order as the values. NaN is the largest, and both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def from_sort_key(key):
    """Inverts `sort_key`. The sort key of NaN yields a NaN, whose bits may differ from the original's."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(key, token):
    """Packs a sort key and a token id into an int64. The packed values sort by key, then by descending id: among tied tokens, the
    lowest id has the largest value.

    The upper half is the key, the lower half is 2^31 - 1 - token.
    """
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(pair):
    """Returns the int64 token id of a `packed` pair."""
    return 0x7FFFFFFF - (pair & 0x7FFFFFFF)


@triton.jit
def largest_pairs(pairs, K: tl.constexpr):
    """Returns the K largest of `packed` pairs ``[N]``, largest first. K and N are powers of two; K >= 2, as Triton 3.6 requires."""
    if _INTERPRETED:  # the interpreter takes seconds for a sorting network
        at = tl.arange(0, pairs.shape[0])
        position = tl.arange(0, K)
        largest = tl.zeros([K], pairs.dtype)
        for i in tl.static_range(K):
            pair = tl.max(pairs, axis=0)
            largest = tl.where(position == i, pair, largest)
            first = tl.min(tl.where(pairs == pair, at, pairs.shape[0]), axis=0)
            pairs = tl.where(at == first, _REMOVED, pairs)
        return largest
    return tl.topk(pairs, K)


@triton.jit
def larger_pairs(one, other):
    """Merges two results of `largest_pairs` of equal length. Returns the largest pairs of the two results together, in the same
    number and order.
    """
    return largest_pairs(tl.reshape(tl.join(one, other), [2 * one.shape[0]]), one.shape[0])


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_key(x):
    """Returns int32 ``[N]``: `sort_key` of the maximum of each row of float32 ``[N, M]``, where NaN is the largest."""
    if _INTERPRETED:  # the interpreter takes seconds for a reduction with a custom combine function
        return tl.max(sort_key(x), axis=1)
    # Reduce first, then convert only the maxima: a key takes several instructions.
    return sort_key(tl.reduce(x, 1, _larger))


@triton.jit
def at_index(values, index):
    """Returns the element of a one-dimensional tensor at a runtime index."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), axis=0)


@triton.jit
def part_that_holds(low, high, reaching, wanted):
    """Performs one step of a threshold search: selects the part of [low, high] that contains the threshold.

    The threshold is the largest value such that at least ``wanted`` sort keys are >= it.

    Args:
        low, high: int64; at least ``wanted`` keys are >= low.
        reaching: int32 ``[PARTS]``, the number of keys >= the start of each part, ``low + i * stride`` with
            ``stride = ((high - low) // PARTS) + 1``.
        wanted: the number of keys that must be >= the threshold, at least 1.

    Returns:
        The part's smallest and largest key, int64, and the number of keys >= the smallest, int32.
    """
    part = tl.arange(0, PARTS)
    stride = ((high - low) // PARTS) + 1
    passed = tl.maximum(tl.sum(((reaching >= wanted) & (low + part * stride <= high)).to(tl.int32), axis=0) - 1, 0)
    number = tl.sum(tl.where(part == passed, reaching, 0), axis=0)
    return low + passed * stride, tl.minimum(high, low + (passed + 1) * stride - 1), number


@triton.jit
def threshold_of(keys, live, wanted, spare):
    """Finds a threshold: at least ``wanted`` and, if possible, at most ``wanted + spare`` live sort keys are >= it.

    With fewer than ``wanted`` live keys, the threshold is the smallest live key. With ties, it is the largest value such that at
    least ``wanted`` keys are >= it. Keys that are not live must be smaller than all live keys.

    Returns:
        The threshold, int64, and the number of keys >= it, int32.
    """
    largest = tl.max(keys, axis=0)
    low = tl.min(tl.where(live, keys, largest), axis=0).to(tl.int64)
    high = largest.to(tl.int64)
    number = tl.sum(live.to(tl.int32), axis=0)
    while (low < high) & (number > wanted + spare):
        ends = tl.minimum(low + tl.arange(0, PARTS) * (((high - low) // PARTS) + 1), high).to(tl.int32)
        reaching = tl.sum((keys[None, :] >= ends[:, None]).to(tl.int32), axis=1)
        low, high, number = part_that_holds(low, high, reaching, wanted)
    return low, number
