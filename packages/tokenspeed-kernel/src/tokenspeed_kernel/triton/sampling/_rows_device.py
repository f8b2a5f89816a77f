"""Device code of `_rows`."""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

PARTS = tl.constexpr(16)
"""Into how many parts a range of keys is divided at once, to find the one that holds a key."""

_TAKEN = tl.constexpr(-(2**63))  # below any pair


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
def packed(key, token):
    """int64 that sort by key, and of equal keys the first token as the greatest: the key above 2^31 - 1 - token."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(pair):
    """int64 token of what is `packed`."""
    return 0x7FFFFFFF - (pair & 0x7FFFFFFF)


@triton.jit
def largest_pairs(pairs, K: tl.constexpr):
    """The K largest of `packed` pairs ``[N]``, largest first. K and N are powers of two, K at least 2: Triton 3.6 cannot do 1."""
    if _INTERPRETED:  # which takes seconds for a sorting network
        at = tl.arange(0, pairs.shape[0])
        place = tl.arange(0, K)
        largest = tl.zeros([K], pairs.dtype)
        for i in tl.static_range(K):
            pair = tl.max(pairs, axis=0)
            largest = tl.where(place == i, pair, largest)
            first = tl.min(tl.where(pairs == pair, at, pairs.shape[0]), axis=0)
            pairs = tl.where(at == first, _TAKEN, pairs)
        return largest
    return tl.topk(pairs, K)


@triton.jit
def larger_pairs(one, other):
    """The largest of two results of `largest_pairs`, as many as each has and as it gives them."""
    return largest_pairs(tl.reshape(tl.join(one, other), [2 * one.shape[0]]), one.shape[0])


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_key(x):
    """int32 ``[N]``: `sort_key` of the largest of each row of float32 ``[N, M]``, NaN above all numbers."""
    if _INTERPRETED:  # which takes seconds for a function of its own
        return tl.max(sort_key(x), axis=1)
    # Of the largest alone, as a key takes several instructions.
    return sort_key(tl.reduce(x, 1, _larger))


@triton.jit
def at_index(values, index):
    """The element of a one-dimensional tensor at an index that is not known when compiling."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), axis=0)


@triton.jit
def part_that_holds(low, high, reaching, wanted):
    """The part of the keys from low to high that holds the largest one which ``wanted`` keys reach.

    Args:
        low, high: int64; ``wanted`` keys reach low.
        reaching: int32 ``[PARTS]``, how many keys reach the beginning of each part, ``low + i * stride`` with
            ``stride = ((high - low) // PARTS) + 1``.
        wanted: at least 1.

    Returns:
        The part's least and greatest key, int64, and how many keys reach the least, int32.
    """
    part = tl.arange(0, PARTS)
    stride = ((high - low) // PARTS) + 1
    passed = tl.maximum(tl.sum(((reaching >= wanted) & (low + part * stride <= high)).to(tl.int32), axis=0) - 1, 0)
    number = tl.sum(tl.where(part == passed, reaching, 0), axis=0)
    return low + passed * stride, tl.minimum(high, low + (passed + 1) * stride - 1), number


@triton.jit
def threshold_of(keys, live, wanted, spare):
    """The largest key that at least ``wanted`` of the live keys reach, or a lower one that up to ``spare`` more reach; the least
    key where there are fewer. Returns it, int64, and how many reach it, int32. Keys that are not live are less than all others."""
    largest = tl.max(keys, axis=0)
    low = tl.min(tl.where(live, keys, largest), axis=0).to(tl.int64)
    high = largest.to(tl.int64)
    number = tl.sum(live.to(tl.int32), axis=0)
    while (low < high) & (number > wanted + spare):
        ends = tl.minimum(low + tl.arange(0, PARTS) * (((high - low) // PARTS) + 1), high).to(tl.int32)
        reaching = tl.sum((keys[None, :] >= ends[:, None]).to(tl.int32), axis=1)
        low, high, number = part_that_holds(low, high, reaching, wanted)
    return low, number
