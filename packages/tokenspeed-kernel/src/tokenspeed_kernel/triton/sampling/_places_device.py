"""Finding the three places in a row's order, and with them its token, in a list of tokens.

Each place is the first at which a sum along the order crosses a bound. One program a row narrows the range of sort keys that holds
it, `LEVELS` parts at a time, to one logit; and among the tokens that have the drawn logit it finds the drawn one in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._levels_device import at, ends_and_sums, first, level_end
from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._state_device import (
    CANDIDATES,
    COUNT_SHIFT,
    DECIDED,
    LARGEST,
    LEVEL_BITS,
    LEVELS,
    LISTED,
    ONE_TOKEN,
    PENDING,
    STATE,
    THRESHOLD,
    TOTAL,
    WEIGHT_MASK,
)
from tokenspeed_kernel.triton.sampling._weights_device import (
    floor_of,
    limit_of,
    scale_of,
    target_of,
    token_weights,
    uniform,
)

# What a list would hold for -inf and token 0.
_NO_TOKEN = tl.constexpr(-0x7F80000100000000)
_NO_KEY = tl.constexpr(-0x80000000)
# Tokens that a lane may sum before counts overflow into weights: 2^(COUNT_SHIFT - 41).
_CHUNK = tl.constexpr(1024)
# Tokens that a lane of `_copy_between` takes at a time: few scans across lanes.
_COPIED = tl.constexpr(8)
# A list is copied once its range holds less than 2^-this of it: each pass reads the whole list, and those of flat distributions are
# long. For the rows of which `_levels_device` speaks, before there were finer levels, the last kernel took 65 instead of 104 us for
# one and 282 instead of 588 for 16.
_COPY_SHIFT = tl.constexpr(2)


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
def _listed_keys(packed, live, stage, drawn_key, high, vocab, UNUSED_BITS: tl.constexpr):
    """int32 keys up to high: of logits or, in stage 3, of tokens with the drawn logit, where the first token has the greatest."""
    key = (packed >> 32).to(tl.int32) >> UNUSED_BITS
    key = tl.where(stage == 3, tl.where(key == drawn_key, vocab - 1 - packed.to(tl.int32), -1), key)
    return tl.where(live & (key <= high), key, _NO_KEY)


@triton.jit
def _sums_down_to(
    ends,
    listed,
    number,
    stage,
    drawn_key,
    high,
    vocab,
    largest_logit,
    scale,
    floor,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    """int64 [LEVELS] counts and weights of the tokens with keys from each end up to high."""
    counts = tl.zeros([LEVELS], tl.int64)
    weights = tl.zeros([LEVELS], tl.int64)
    for chunk in range(0, number, LANES * _CHUNK):
        added = tl.zeros([LEVELS, LANES], tl.int64)
        for start in range(chunk, tl.minimum(number, chunk + LANES * _CHUNK), LANES * UNROLL):
            for part in tl.static_range(UNROLL):
                index = start + part * LANES + tl.arange(0, LANES)
                packed = tl.load(listed + index, mask=index < number, other=_NO_TOKEN)
                key = _listed_keys(packed, index < number, stage, drawn_key, high, vocab, UNUSED_BITS)
                both = token_weights(from_sort_key((packed >> 32).to(tl.int32)), largest_logit, scale, floor) | ONE_TOKEN
                added += tl.where(key[None, :] >= ends[:, None], both[None, :], 0)
        counts += tl.sum(added >> COUNT_SHIFT, axis=1)
        weights += tl.sum(added & WEIGHT_MASK, axis=1)
    return counts, weights


@triton.jit
def _greatest_key(listed, number, stage, drawn_key, high, vocab, LANES: tl.constexpr, UNUSED_BITS: tl.constexpr):
    """int64, the greatest of keys up to high."""
    greatest = tl.full([LANES], _NO_KEY, tl.int32)
    for start in range(0, number, LANES):
        index = start + tl.arange(0, LANES)
        packed = tl.load(listed + index, mask=index < number, other=_NO_TOKEN)
        key = _listed_keys(packed, index < number, stage, drawn_key, high, vocab, UNUSED_BITS)
        greatest = tl.maximum(greatest, key)
    return tl.max(greatest, axis=0).to(tl.int64)


@triton.jit
def _copy_between(listed, number, low, high, target, LANES: tl.constexpr, UNUSED_BITS: tl.constexpr):
    """Copies the tokens whose keys are from low to high. Returns how many there are, int32."""
    copied = number * 0
    for start in range(0, number, LANES * _COPIED):
        index = start + tl.arange(0, LANES * _COPIED)
        packed = tl.load(listed + index, mask=index < number, other=_NO_TOKEN)
        key = (packed >> 32).to(tl.int32) >> UNUSED_BITS
        wanted = (index < number) & (key >= low) & (key <= high)
        place = copied + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(target + place, packed, mask=wanted)
        copied += tl.sum(wanted.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read what these have stored
    return copied


@triton.jit
def _crossed(stage, count, weight, bound_count, limit, target):
    """Whether a place is at or before the end of these sums. Stages count tokens, reach a limit, go beyond a target, count ties."""
    by_count = count >= bound_count
    by_weight = tl.where(stage == 1, weight.to(tl.float64) >= limit, weight > target)
    return tl.where((stage == 0) | (stage == 3), by_count, by_weight)


@triton.jit
def _ties_needed(stage, base, weight, ties, limit, target):
    """How many of the tokens of one weight, on top of base, cross a bound by weight; at least 1."""
    low = ties * 0 + 1
    high = ties
    while low < high:
        middle = (low + high) >> 1
        if _crossed(stage, middle, base + middle * weight, middle, limit, target):
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def find_places_kernel(
    logits,
    vocab,
    temperature,
    top_k,
    top_p,
    seed,
    offset,
    min_p,
    state,
    listed,
    capacity,
    out,
    out_stride,
    FROM_LEVELS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):
    """Writes a row's token.

    listed: int64 [rows, capacity], sort key above token, in any order. Without FROM_LEVELS it holds the candidates, all tokens from
    the largest to the threshold; a row whose places are not all among them becomes pending. With FROM_LEVELS it holds the tokens of
    those levels that `collect` chose, and pending rows are served; what lies behind them in a row is written to.
    """
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    listed += row * capacity
    largest_key = tl.load(state + LARGEST).to(tl.int32)
    largest = from_sort_key(largest_key)
    warmth = tl.load(temperature + row)
    token = tl.full([], 0, tl.int64)
    if FROM_LEVELS:
        number = tl.load(state + LISTED).to(tl.int32)
        draws = tl.load(state + PENDING) != 0
        known = draws
    else:
        number = tl.load(state + CANDIDATES).to(tl.int32)
        draws = tl.load(state + DECIDED) == 0
        known = draws & (number <= capacity)
    if draws & known:
        largest_logit = largest.to(tl.float64)
        scale = scale_of(warmth)
        floor = floor_of(min_p, row)
        step = tl.arange(0, LEVELS)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        u = uniform(tl.load(seed + row), tl.load(offset + row))
        restricted = (k > 0) & (k < vocab)
        drawn_key = tl.full([], 0, tl.int64)

        # kept: what is kept so far weighs this much.
        if FROM_LEVELS:
            ends_of_levels, level_counts, level_weights = ends_and_sums(state, vocab, k, p, u, scale)
            kept = at(level_weights, step, LEVELS - 1)
        else:
            lowest_key = (tl.load(state + THRESHOLD) >> UNUSED_BITS).to(tl.int64)
            level_counts, level_weights = _sums_down_to(
                step * 0 + lowest_key.to(tl.int32),
                listed,
                number,
                0,
                drawn_key,
                largest_key,
                vocab,
                largest_logit,
                scale,
                floor,
                LANES,
                UNROLL,
                UNUSED_BITS,
            )
            kept = tl.load(state + TOTAL)
        bound_count = k.to(tl.int64)
        limit = limit_of(p, kept)
        target = target_of(u, kept)
        ties = bound_count
        # What is looked at: the list or, behind it, those of its tokens that may still hold the place.
        current = listed
        length = number

        # The last token of top-k, the last of top-p, the drawn logit, and of the tokens that have it the drawn one.
        for stage in range(4):
            wanted = (stage >= 2) | ((stage == 0) & restricted) | ((stage == 1) & ~(p >= 1.0))
            crossed = _crossed(stage, level_counts, level_weights, bound_count, limit, target)
            known = known & ((~wanted) | (stage == 3) | (tl.sum(crossed.to(tl.int32), axis=0) > 0))
            if wanted & known:
                if stage < 3:
                    current = listed
                    length = number
                high = _short_key(largest, UNUSED_BITS).to(tl.int64)
                if FROM_LEVELS:
                    level = first(crossed)
                    low = _short_key(level_end(level + 1, ends_of_levels, logits), UNUSED_BITS).to(tl.int64)
                    high = tl.minimum(high, _short_key(level_end(level, ends_of_levels, logits), UNUSED_BITS).to(tl.int64) - 1)
                    base_count = at(level_counts, step, level - 1)
                    base_weight = at(level_weights, step, level - 1)
                    inside = at(level_counts, step, level) - base_count
                else:
                    low = lowest_key
                    base_count = low * 0
                    base_weight = low * 0
                    inside = low * 0 + number
                if stage == 3:
                    low = low * 0
                    high = low + vocab - 1
                    base_count = low * 0
                    base_weight = low * 0
                    inside = ties
                # Keys from low to high hold the place, and so many tokens; base is the sum above high.
                while (low < high) & (inside > 1):
                    stride = ((high - low) >> LEVEL_BITS) + 1
                    ends = (low + step * stride).to(tl.int32)
                    counts, weights = _sums_down_to(
                        ends,
                        current,
                        length,
                        stage,
                        drawn_key,
                        high,
                        vocab,
                        largest_logit,
                        scale,
                        floor,
                        LANES,
                        UNROLL,
                        UNUSED_BITS,
                    )
                    counts += base_count
                    weights += base_weight
                    # The first part always holds it: all of its end's sums cross.
                    part = tl.sum(_crossed(stage, counts, weights, bound_count, limit, target).to(tl.int32), axis=0) - 1
                    if part < LEVELS - 1:
                        base_count = at(counts, step, part + 1)
                        base_weight = at(weights, step, part + 1)
                    inside = at(counts, step, part) - base_count
                    high = tl.minimum(high, low + (part + 1) * stride - 1)
                    low = low + part * stride
                    if FROM_LEVELS:
                        few = (inside < (length >> _COPY_SHIFT)) & (number + inside <= capacity)
                        if few & (stage < 3) & (length == number):
                            length = _copy_between(listed, number, low, high, listed + number, LANES, UNUSED_BITS)
                            current = listed + number
                if low < high:
                    low = _greatest_key(current, length, stage, drawn_key, high, vocab, LANES, UNUSED_BITS)
                if stage == 3:
                    token = vocab - 1 - low
                else:
                    weight = token_weights(_from_short_key(low, UNUSED_BITS), largest_logit, scale, floor)
                    if stage == 0:
                        kept = base_weight + (bound_count - base_count) * weight
                        limit = limit_of(p, kept)
                    else:
                        needed = _ties_needed(stage, base_weight, weight, inside, limit, target)
                        if stage == 1:
                            kept = base_weight + needed * weight
                        else:
                            drawn_key = low
                            bound_count = needed
                            ties = inside
                    target = target_of(u, kept)
    if known:
        tl.store(out + row * out_stride, token)
    elif draws:
        tl.store(state + PENDING, 1)
