"""Sampling from rows whose candidates did not decide, by narrowing a range of logits down.

1. `sum_levels` splits the range of logits that weigh something into `LEVELS` and sums tokens and weights down to each level.
2. `collect` lists the tokens of those levels in which some place may lie.
3. `narrow`, one program a row, narrows each place down to one logit, `LEVELS` parts at a time, and the drawn one to its token.

Rows that are not pending take no part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.ops.sampling.triton._rows import from_sort_key, sort_key
from tokenspeed_kernel.ops.sampling.triton._state import LARGEST, LEAST, LEVELS, LISTED, PENDING, STATE, SUMS
from tokenspeed_kernel.ops.sampling.triton._weights import WEIGHTLESS, limit_of, scale_of, target_of, uniform, weigh

# Count and weight are summed in one int64, the count above this many bits. A weight has 41 bits, so that 2^10 of them fit below.
_COUNT_SHIFT = tl.constexpr(51)
_ONE_TOKEN = tl.constexpr(1 << 51)
# What `collect` would list for -inf and token 0.
_NO_TOKEN = tl.constexpr(-0x7F80000100000000)
_NO_KEY = tl.constexpr(-0x80000000)
_LEVEL_BITS = tl.constexpr(4)
_WEIGHT_MASK = tl.constexpr((1 << 51) - 1)


@triton.jit
def _levels(step, state, scale, logits):
    """The logit at which level ``step`` (1 to LEVELS) ends, one that the format holds: equal parts of the range in which tokens
    weigh something. The last level takes all that is left. Level 0 stands for what is above the first."""
    top = from_sort_key(tl.load(state + LARGEST).to(tl.int32)).to(tl.float64)
    least = from_sort_key(tl.load(state + LEAST).to(tl.int32)).to(tl.float64)
    reach = tl.minimum(top - least, WEIGHTLESS / scale)
    ends = (top - reach * (step.to(tl.float64) / LEVELS)).to(tl.float32).to(logits.dtype.element_ty).to(tl.float32)
    return tl.where(step >= LEVELS, float("-inf"), tl.where(step <= 0, float("inf"), ends))


@triton.jit
def sum_levels(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    state,
    spans,
    length,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Adds to a row's sums how many tokens are at or above each level's end, and their weight."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    state += row * STATE
    if tl.load(state + PENDING) != 0:
        top = from_sort_key(tl.load(state + LARGEST).to(tl.int32)).to(tl.float64)
        scale = scale_of(tl.load(temperature + row))
        step = tl.arange(0, LEVELS)
        ends = _levels(step + 1, state, scale, logits)
        end = tl.minimum(vocab, (span + 1) * length)
        added = tl.zeros([LEVELS, LANES], tl.int64)
        for start in range(span * length, end, LANES * UNROLL):
            for part in tl.static_range(UNROLL):
                ids = start + part * LANES + tl.arange(0, LANES)
                live = ids < end
                offsets = ids.to(tl.int64) * vocab_stride
                x = tl.load(logits + row * row_stride + offsets, mask=live, other=float("-inf")).to(tl.float32)
                packed = tl.where(live, weigh(x, top, scale) | _ONE_TOKEN, 0)
                added += tl.where(x[None, :] >= ends[:, None], packed[None, :], 0)
        tl.atomic_add(state + SUMS + step, tl.sum(added >> _COUNT_SHIFT, axis=1), sem="relaxed")
        tl.atomic_add(state + SUMS + LEVELS + step, tl.sum(added & _WEIGHT_MASK, axis=1), sem="relaxed")


@triton.jit
def _at(values, step, index):
    """values[index], 0 for index -1."""
    return tl.sum(tl.where(step == index, values, 0), axis=0)


@triton.jit
def _first(crossed):
    """The first place that has crossed a bound, of places that once crossed stay so."""
    return tl.sum(tl.where(crossed, 0, 1), axis=0)


@triton.jit
def collect(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    top_k,
    top_p,
    seed,
    offset,
    state,
    listed,
    spans,
    length,
    BLOCK: tl.constexpr,
):
    """Lists the tokens of all levels that any place may lie in, in any order, as int64: sort key above token."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    state += row * STATE
    if tl.load(state + PENDING) != 0:
        scale = scale_of(tl.load(temperature + row))
        step = tl.arange(0, LEVELS)
        counts = tl.load(state + SUMS + step)
        weights = tl.load(state + SUMS + LEVELS + step)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        u = uniform(tl.load(seed + row), tl.load(offset + row))
        total = _at(weights, step, LEVELS - 1)

        # Bounds are known to lie between two numbers, and so do the places: in levels from one to another.
        restricted = (k > 0) & (k < vocab)
        level = _first(counts >= k)
        k_low = tl.where(restricted, _levels(level + 1, state, scale, logits), float("inf"))
        k_high = _levels(level, state, scale, logits)
        least_kept = tl.where(restricted, _at(weights, step, level - 1), total)
        most_kept = tl.where(restricted, _at(weights, step, level), total)

        shortened = ~(p >= 1.0)
        level = _first(weights.to(tl.float64) >= limit_of(p, least_kept))
        last = _first(weights.to(tl.float64) >= limit_of(p, most_kept))
        p_low = tl.where(shortened, _levels(last + 1, state, scale, logits), float("inf"))
        p_high = _levels(level, state, scale, logits)
        least_kept = tl.where(shortened, _at(weights, step, level - 1), least_kept)
        most_kept = tl.where(shortened, _at(weights, step, last), most_kept)

        level = _first(weights > target_of(u, least_kept))
        last = tl.minimum(_first(weights > target_of(u, most_kept)), LEVELS - 1)
        u_low = _levels(last + 1, state, scale, logits)
        u_high = _levels(level, state, scale, logits)

        counter = state + LISTED + tl.zeros([BLOCK], tl.int32)
        one = tl.full([BLOCK], 1, tl.int64)
        end = tl.minimum(vocab, (span + 1) * length)
        for start in range(span * length, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            live = ids < end
            offsets = ids.to(tl.int64) * vocab_stride
            x = tl.load(logits + row * row_stride + offsets, mask=live, other=float("-inf")).to(tl.float32)
            wanted = ((x >= k_low) & (x < k_high)) | ((x >= p_low) & (x < p_high)) | ((x >= u_low) & (x < u_high))
            place = tl.atomic_add(counter, one, mask=wanted & live, sem="relaxed")
            packed = (sort_key(x).to(tl.int64) << 32) | ids.to(tl.int64)
            tl.store(listed + row * vocab + place, packed, mask=wanted & live)


@triton.jit
def _short_key(x, UNUSED_BITS: tl.constexpr):
    """A sort key without the bits that are 0 in all numbers of the logits' format."""
    return sort_key(x) >> UNUSED_BITS


@triton.jit
def _from_short_key(key, UNUSED_BITS: tl.constexpr):
    """float32 of a short key. In those of negative numbers all bits are inverted, the lost ones too."""
    inverted = tl.where(key < 0, (1 << UNUSED_BITS) - 1, 0)
    return from_sort_key((key << UNUSED_BITS).to(tl.int32) | inverted.to(tl.int32))


@triton.jit
def _crossed(stage, count, weight, bound_count, limit, target):
    """Whether a place is at or before the end of these sums. Stages count tokens, reach a limit, go beyond a target, count ties."""
    by_count = count >= bound_count
    by_weight = tl.where(stage == 1, weight.to(tl.float64) >= limit, weight > target)
    return tl.where((stage == 0) | (stage == 3), by_count, by_weight)


@triton.jit
def _ties_needed(stage, base, weight, limit, target):
    """How many tokens of one weight on top of base cross a bound by weight; at least 1."""
    low = base * 0 + 1
    high = low << 22
    while low < high:
        middle = (low + high) >> 1
        if _crossed(stage, middle, base + middle * weight, middle, limit, target):
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def narrow(
    logits,
    vocab,
    temperature,
    top_k,
    top_p,
    seed,
    offset,
    state,
    listed,
    out,
    out_stride,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    """Finds a row's token."""
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    if tl.load(state + PENDING) != 0:
        largest = from_sort_key(tl.load(state + LARGEST).to(tl.int32))
        top = largest.to(tl.float64)
        scale = scale_of(tl.load(temperature + row))
        step = tl.arange(0, LEVELS)
        level_counts = tl.load(state + SUMS + step)
        level_weights = tl.load(state + SUMS + LEVELS + step)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        u = uniform(tl.load(seed + row), tl.load(offset + row))
        number = tl.load(state + LISTED).to(tl.int32)

        # What is kept so far weighs this much.
        kept = _at(level_weights, step, LEVELS - 1)
        bound_count = k.to(tl.int64)
        limit = limit_of(p, kept)
        target = target_of(u, kept)
        drawn_key = tl.full([], 0, tl.int64)
        token = tl.full([], 0, tl.int64)

        # The last token of top-k, the last of top-p, the drawn logit, and of the tokens that have it the drawn one.
        for stage in range(4):
            wanted = (stage >= 2) | ((stage == 0) & (k > 0) & (k < vocab)) | ((stage == 1) & ~(p >= 1.0))
            if wanted:
                level = _first(_crossed(stage, level_counts, level_weights, bound_count, limit, target))
                low = _short_key(_levels(level + 1, state, scale, logits), UNUSED_BITS).to(tl.int64)
                high = _short_key(_levels(level, state, scale, logits), UNUSED_BITS).to(tl.int64) - 1
                high = tl.minimum(high, _short_key(largest, UNUSED_BITS).to(tl.int64))
                base_count = _at(level_counts, step, level - 1)
                base_weight = _at(level_weights, step, level - 1)
                if stage == 3:
                    low = low * 0
                    high = low + vocab - 1
                    base_count = low * 0
                    base_weight = low * 0
                # Keys from low to high hold the place; base is the sum above high.
                while low < high:
                    stride = ((high - low) >> _LEVEL_BITS) + 1
                    ends = (low + step * stride).to(tl.int32)
                    lane_counts = tl.zeros([LEVELS, LANES], tl.int32)
                    lane_weights = tl.zeros([LEVELS, LANES], tl.int64)
                    for start in range(0, number, LANES * UNROLL):
                        for part in tl.static_range(UNROLL):
                            index = start + part * LANES + tl.arange(0, LANES)
                            packed = tl.load(listed + row * vocab + index, mask=index < number, other=_NO_TOKEN)
                            long_key = (packed >> 32).to(tl.int32)
                            key = long_key >> UNUSED_BITS
                            weight = weigh(from_sort_key(long_key), top, scale)
                            if stage == 3:
                                key = tl.where(key == drawn_key, vocab - 1 - packed.to(tl.int32), -1)
                            key = tl.where((key <= high) & (index < number), key, _NO_KEY)
                            inside = key[None, :] >= ends[:, None]
                            lane_counts += inside.to(tl.int32)
                            lane_weights += tl.where(inside, weight[None, :], 0)
                    added = tl.sum(lane_counts, axis=1).to(tl.int64)
                    added_weight = tl.sum(lane_weights, axis=1)
                    added += base_count
                    added_weight += base_weight
                    # The first part always holds it: all of its end's sums cross.
                    part = tl.sum(_crossed(stage, added, added_weight, bound_count, limit, target).to(tl.int32), axis=0) - 1
                    if part < LEVELS - 1:
                        base_count = _at(added, step, part + 1)
                        base_weight = _at(added_weight, step, part + 1)
                    high = tl.minimum(high, low + (part + 1) * stride - 1)
                    low = low + part * stride
                if stage == 3:
                    token = vocab - 1 - low
                else:
                    weight = weigh(_from_short_key(low, UNUSED_BITS), top, scale)
                    if stage == 0:
                        kept = base_weight + (bound_count - base_count) * weight
                        limit = limit_of(p, kept)
                    else:
                        ties = _ties_needed(stage, base_weight, weight, limit, target)
                        if stage == 1:
                            kept = base_weight + ties * weight
                        else:
                            drawn_key = low
                            bound_count = ties
                    target = target_of(u, kept)
        tl.store(out + row * out_stride, token)
