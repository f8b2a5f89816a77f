"""Device code of `_rows`."""

from __future__ import annotations

import triton
import triton.language as tl

_PARTS = tl.constexpr(16)
_PART_BITS = tl.constexpr(4)


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
def threshold_of(keys, live, wanted, spare):
    """The largest key that at least ``wanted`` of the live keys reach, or a lower one that up to ``spare`` more reach; the least
    key where there are fewer. Returns it, int64, and how many reach it, int32. Keys that are not live are less than all others."""
    largest = tl.max(keys, axis=0)
    low = tl.min(tl.where(live, keys, largest), axis=0).to(tl.int64)
    high = largest.to(tl.int64)
    number = tl.sum(live.to(tl.int32), axis=0)
    part = tl.arange(0, _PARTS)
    while (low < high) & (number > wanted + spare):
        stride = ((high - low) >> _PART_BITS) + 1
        ends = low + part * stride
        reaching = tl.sum((keys[None, :] >= tl.minimum(ends, high).to(tl.int32)[:, None]).to(tl.int32), axis=1)
        passed = tl.maximum(tl.sum(((reaching >= wanted) & (ends <= high)).to(tl.int32), axis=0) - 1, 0)
        number = tl.sum(tl.where(part == passed, reaching, 0), axis=0)
        high = tl.minimum(high, low + (passed + 1) * stride - 1)
        low = low + passed * stride
    return low, number
