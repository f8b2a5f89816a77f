"""Device code of `sample_top_k_top_p`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._state_device import CANDIDATES, FIRST, LARGEST, LEAST, STATE, THRESHOLD, TOTAL
from tokenspeed_kernel.triton.sampling._weights_device import floor_of, is_drawn, scale_of, token_weights

_PARTS = tl.constexpr(16)
_PART_BITS = tl.constexpr(4)
# The threshold is good enough if 2^-this too many maxima reach it.
_SLACK = tl.constexpr(3)
_NO_KEY = tl.constexpr(-0x80000000)
_KEY_OF_INFINITY = tl.constexpr(0x7F800000)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def group_maxima_kernel(logits, row_stride, vocab_stride, vocab, maxima, spans, length, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """maxima: int32 [rows, spans, GROUPS], sort keys."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    end = tl.minimum(vocab, (span + 1) * length)
    best = tl.full([BLOCK], _NO_KEY, tl.int32)
    for start in range(span * length, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        live = ids < end
        x = tl.load(logits + row * row_stride + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.where(live, sort_key(x), _NO_KEY))
    best = tl.max(tl.reshape(best, [BLOCK // GROUPS, GROUPS]), axis=0)
    tl.store(maxima + (row * spans + span) * GROUPS + tl.arange(0, GROUPS), best)


@triton.jit
def threshold_kernel(maxima, temperature, top_k, state, vocab, rank, groups, GROUPS: tl.constexpr):
    """Sets up a row's state."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    keys = tl.load(maxima + row * groups + group, mask=group < groups, other=_NO_KEY)
    largest = tl.max(keys, axis=0)
    k = tl.load(top_k + row)
    wanted = tl.where((k > 0) & (k < vocab) & (k < rank), k, rank)
    wanted = tl.where(is_drawn(tl.load(temperature + row), largest), wanted, 1)
    # Search for the largest threshold that at least `wanted` of the maxima reach, and only a few more than that. Where there are
    # fewer maxima than wanted, the threshold is the least of them.
    low = tl.min(tl.where(group < groups, keys, largest), axis=0).to(tl.int64)
    high = largest.to(tl.int64)
    part = tl.arange(0, _PARTS)
    number = groups
    while (low < high) & (number > wanted + (wanted >> _SLACK)):
        stride = ((high - low) >> _PART_BITS) + 1
        ends = tl.minimum(low + part * stride, 0x7FFFFFFF).to(tl.int32)
        reaching = tl.sum((keys[None, :] >= ends[:, None]).to(tl.int32), axis=1)
        passed = tl.maximum(tl.sum((reaching >= wanted).to(tl.int32), axis=0) - 1, 0)
        number = tl.sum(tl.where(part == passed, reaching, 0), axis=0)
        high = tl.minimum(high, low + (passed + 1) * stride - 1)
        low = low + passed * stride

    field = tl.arange(0, STATE)
    initial = tl.where(field == LARGEST, largest, tl.where(field == LEAST, _KEY_OF_INFINITY, 0)).to(tl.int64)
    initial = tl.where(field == THRESHOLD, low, tl.where(field == FIRST, _NO_TOKEN, initial))
    tl.store(state + row * STATE + field, initial)


@triton.jit
def candidates_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    top_k,
    min_p,
    state,
    candidates,
    spans,
    length,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Lists the tokens at or above the threshold in any order, as int64: sort key above token. Of a greedy row only the first token
    of the largest is kept."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    largest = tl.load(state + row * STATE + LARGEST).to(tl.int32)
    threshold = tl.load(state + row * STATE + THRESHOLD).to(tl.int32)
    warmth = tl.load(temperature + row)
    k = tl.load(top_k + row)
    draws = is_drawn(warmth, largest)
    sums = draws & ((k <= 0) | (k >= vocab))
    largest_logit = from_sort_key(largest).to(tl.float64)
    scale = scale_of(tl.where(draws, warmth, 1.0))
    floor = floor_of(min_p, row)
    end = tl.minimum(vocab, (span + 1) * length)
    total = tl.zeros([BLOCK], tl.int64)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    first = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    counter = state + row * STATE + CANDIDATES + tl.zeros([BLOCK], tl.int32)
    one = tl.full([BLOCK], 1, tl.int64)
    for start in tl.range(span * length, end, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        live = ids < end
        offsets = ids.to(tl.int64) * vocab_stride
        x = tl.load(logits + row * row_stride + offsets, mask=live, other=float("-inf")).to(tl.float32)
        if sums:
            # Beyond the end are weights of -inf, which are 0.
            total += token_weights(x, largest_logit, scale, floor)
        key = sort_key(x)
        found = live & (key >= threshold)
        if draws:
            least = tl.minimum(least, tl.where(x == float("-inf"), float("inf"), x))
            # Few ask for a place, so that it costs little to do so one by one.
            place = tl.atomic_add(counter, one, mask=found, sem="relaxed")
            packed = (key.to(tl.int64) << 32) | ids.to(tl.int64)
            tl.store(candidates + row * CAPACITY + place, packed, mask=found & (place < CAPACITY))
        else:
            first = tl.minimum(first, tl.where(found, ids, _NO_TOKEN))
    if draws:
        tl.atomic_min(state + row * STATE + LEAST, sort_key(tl.min(least, axis=0)).to(tl.int64), sem="relaxed")
    else:
        tl.atomic_min(state + row * STATE + FIRST, tl.min(first, axis=0).to(tl.int64), sem="relaxed")
    if sums:
        tl.atomic_add(state + row * STATE + TOTAL, tl.sum(total, axis=0), sem="relaxed")
