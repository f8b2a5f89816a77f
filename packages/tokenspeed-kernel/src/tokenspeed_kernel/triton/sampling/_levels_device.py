"""Candidates for rows whose first candidates did not decide: those of flat distributions, mostly.

`sum_levels` splits the range of logits that weigh something into `LEVELS` and sums tokens and weights down to each level's end;
`collect` then lists the tokens of those levels in which some place may lie. Rows that are not pending take no part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._state_device import (
    COUNT_SHIFT,
    LARGEST,
    LEAST,
    LEVELS,
    LISTED,
    ONE_TOKEN,
    PENDING,
    STATE,
    SUMS,
    WEIGHT_MASK,
)
from tokenspeed_kernel.triton.sampling._weights_device import (
    WEIGHTLESS,
    floor_of,
    limit_of,
    scale_of,
    target_of,
    token_weights,
    uniform,
)


@triton.jit
def level_end(step, state, scale, logits):
    """The logit at which level ``step`` (1 to LEVELS) ends, one that the format holds: equal parts of the range in which tokens
    weigh something. The last level takes all that is left. Level 0 stands for what is above the first."""
    largest_logit = from_sort_key(tl.load(state + LARGEST).to(tl.int32)).to(tl.float64)
    least = from_sort_key(tl.load(state + LEAST).to(tl.int32)).to(tl.float64)
    reach = tl.minimum(largest_logit - least, WEIGHTLESS / scale)
    ends = (largest_logit - reach * (step.to(tl.float64) / LEVELS)).to(tl.float32).to(logits.dtype.element_ty).to(tl.float32)
    return tl.where(step >= LEVELS, float("-inf"), tl.where(step <= 0, float("inf"), ends))


@triton.jit
def sum_levels_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    min_p,
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
        largest_logit = from_sort_key(tl.load(state + LARGEST).to(tl.int32)).to(tl.float64)
        scale = scale_of(tl.load(temperature + row))
        floor = floor_of(min_p, row)
        step = tl.arange(0, LEVELS)
        ends = level_end(step + 1, state, scale, logits)
        end = tl.minimum(vocab, (span + 1) * length)
        added = tl.zeros([LEVELS, LANES], tl.int64)
        for start in range(span * length, end, LANES * UNROLL):
            for part in tl.static_range(UNROLL):
                ids = start + part * LANES + tl.arange(0, LANES)
                live = ids < end
                offsets = ids.to(tl.int64) * vocab_stride
                x = tl.load(logits + row * row_stride + offsets, mask=live, other=float("-inf")).to(tl.float32)
                packed = tl.where(live, token_weights(x, largest_logit, scale, floor) | ONE_TOKEN, 0)
                added += tl.where(x[None, :] >= ends[:, None], packed[None, :], 0)
        tl.atomic_add(state + SUMS + step, tl.sum(added >> COUNT_SHIFT, axis=1), sem="relaxed")
        tl.atomic_add(state + SUMS + LEVELS + step, tl.sum(added & WEIGHT_MASK, axis=1), sem="relaxed")


@triton.jit
def at(values, step, index):
    """values[index], 0 for index -1."""
    return tl.sum(tl.where(step == index, values, 0), axis=0)


@triton.jit
def first(crossed):
    """The first place that has crossed a bound, of places that once crossed stay so."""
    return tl.sum(tl.where(crossed, 0, 1), axis=0)


@triton.jit
def collect_kernel(
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
    capacity,
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
        total = at(weights, step, LEVELS - 1)

        # Bounds are known to lie between two numbers, and so do the places: in levels from one to another.
        restricted = (k > 0) & (k < vocab)
        level = first(counts >= k)
        k_low = tl.where(restricted, level_end(level + 1, state, scale, logits), float("inf"))
        k_high = level_end(level, state, scale, logits)
        least_kept = tl.where(restricted, at(weights, step, level - 1), total)
        most_kept = tl.where(restricted, at(weights, step, level), total)

        shortened = ~(p >= 1.0)
        level = first(weights.to(tl.float64) >= limit_of(p, least_kept))
        last = first(weights.to(tl.float64) >= limit_of(p, most_kept))
        p_low = tl.where(shortened, level_end(last + 1, state, scale, logits), float("inf"))
        p_high = level_end(level, state, scale, logits)
        least_kept = tl.where(shortened, at(weights, step, level - 1), least_kept)
        most_kept = tl.where(shortened, at(weights, step, last), most_kept)

        level = first(weights > target_of(u, least_kept))
        last = tl.minimum(first(weights > target_of(u, most_kept)), LEVELS - 1)
        u_low = level_end(last + 1, state, scale, logits)
        u_high = level_end(level, state, scale, logits)

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
            tl.store(listed + row * capacity + place, packed, mask=wanted & live)
