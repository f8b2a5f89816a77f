"""Candidates for rows whose first candidates did not decide: those of flat distributions, mostly.

`sum_levels` splits the range of logits that weigh something into `LEVELS` and sums tokens and weights down to each level's end.
Where only the drawn token is looked for, it does the same with the one level that holds it. `collect` then lists the tokens of
those levels in which some place may lie. Rows that are not pending take no part.

H200, rows of 201088 normal random logits in bfloat16, temperature 1, no top-k and no top-p, a draw in all: one row 70 us, 16 rows
162 us. Without finer levels, and with lists read whole in every pass, they took 142 and about 715.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._state_device import (
    COUNT_SHIFT,
    FINER_SUMS,
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


class Ends(NamedTuple):
    """Where levels end: level n (1 to LEVELS - 1) at ``top - n * step``, float64. The last one takes all that is left."""

    top: Any
    step: Any


@triton.jit
def level_end(level, ends, logits):
    """The logit at which a level ends, one that the format holds. Level 0 stands for what is above the first."""
    end = (ends.top - ends.step * level.to(tl.float64)).to(tl.float32).to(logits.dtype.element_ty).to(tl.float32)
    return tl.where(level >= LEVELS, float("-inf"), tl.where(level <= 0, float("inf"), end))


@triton.jit
def at(values, step, index):
    """values[index], 0 for index -1."""
    return tl.sum(tl.where(step == index, values, 0), axis=0)


@triton.jit
def first(crossed):
    """The first place that has crossed a bound, of places that once crossed stay so."""
    return tl.sum(tl.where(crossed, 0, 1), axis=0)


@triton.jit
def coarse_ends(state, scale):
    """Equal parts of the range in which tokens weigh something."""
    largest_logit = from_sort_key(tl.load(state + LARGEST).to(tl.int32)).to(tl.float64)
    least = from_sort_key(tl.load(state + LEAST).to(tl.int32)).to(tl.float64)
    return Ends(largest_logit, tl.minimum(largest_logit - least, WEIGHTLESS / scale) / LEVELS)


@triton.jit
def is_fine(vocab, k, p):
    """Whether a row gets finer levels: one that top-k and top-p leave whole, so that the drawn token is all that is looked for."""
    return ((k <= 0) | (k >= vocab)) & (p >= 1.0)


@triton.jit
def fine_ends(state, coarse, u):
    """Equal parts of the level that holds the drawn token, between a first level above it and a last one below."""
    step = tl.arange(0, LEVELS)
    weights = tl.load(state + SUMS + LEVELS + step)
    level = first(weights > target_of(u, at(weights, step, LEVELS - 1)))
    part = coarse.step / (LEVELS - 2)
    return Ends(coarse.top - coarse.step * level.to(tl.float64) + part, part)


@triton.jit
def ends_and_sums(state, vocab, k, p, u, scale):
    """The levels that a row's lists are made of, and their sums of tokens and of weights."""
    step = tl.arange(0, LEVELS)
    coarse = coarse_ends(state, scale)
    fine = fine_ends(state, coarse, u)
    is_finer = is_fine(vocab, k, p)
    sums = state + tl.where(is_finer, FINER_SUMS, SUMS)
    ends = Ends(tl.where(is_finer, fine.top, coarse.top), tl.where(is_finer, fine.step, coarse.step))
    return ends, tl.load(sums + step), tl.load(sums + LEVELS + step)


@triton.jit
def sum_levels_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    top_k,
    top_p,
    seed,
    offset,
    min_p,
    state,
    spans,
    length,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    FINER: tl.constexpr,
):
    """Adds to a row's sums how many tokens are at or above each level's end, and their weight."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    state += row * STATE
    wanted = tl.load(state + PENDING) != 0
    if FINER:
        wanted = wanted & is_fine(vocab, tl.load(top_k + row), tl.load(top_p + row))
    if wanted:
        largest_logit = from_sort_key(tl.load(state + LARGEST).to(tl.int32)).to(tl.float64)
        scale = scale_of(tl.load(temperature + row))
        floor = floor_of(min_p, row)
        step = tl.arange(0, LEVELS)
        ends = coarse_ends(state, scale)
        sums = state + SUMS
        if FINER:
            ends = fine_ends(state, ends, uniform(tl.load(seed + row), tl.load(offset + row)))
            sums = state + FINER_SUMS
        last = level_end(step + 1, ends, logits)
        end = tl.minimum(vocab, (span + 1) * length)
        added = tl.zeros([LEVELS, LANES], tl.int64)
        for start in range(span * length, end, LANES * UNROLL):
            for part in tl.static_range(UNROLL):
                ids = start + part * LANES + tl.arange(0, LANES)
                live = ids < end
                offsets = ids.to(tl.int64) * vocab_stride
                x = tl.load(logits + row * row_stride + offsets, mask=live, other=float("-inf")).to(tl.float32)
                packed = tl.where(live, token_weights(x, largest_logit, scale, floor) | ONE_TOKEN, 0)
                added += tl.where(x[None, :] >= last[:, None], packed[None, :], 0)
        tl.atomic_add(sums + step, tl.sum(added >> COUNT_SHIFT, axis=1), sem="relaxed")
        tl.atomic_add(sums + LEVELS + step, tl.sum(added & WEIGHT_MASK, axis=1), sem="relaxed")


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
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        u = uniform(tl.load(seed + row), tl.load(offset + row))
        ends, counts, weights = ends_and_sums(state, vocab, k, p, u, scale)
        total = at(weights, step, LEVELS - 1)

        # Bounds are known to lie between two numbers, and so do the places: in levels from one to another.
        restricted = (k > 0) & (k < vocab)
        level = first(counts >= k)
        k_low = tl.where(restricted, level_end(level + 1, ends, logits), float("inf"))
        k_high = level_end(level, ends, logits)
        least_kept = tl.where(restricted, at(weights, step, level - 1), total)
        most_kept = tl.where(restricted, at(weights, step, level), total)

        shortened = ~(p >= 1.0)
        level = first(weights.to(tl.float64) >= limit_of(p, least_kept))
        last = first(weights.to(tl.float64) >= limit_of(p, most_kept))
        p_low = tl.where(shortened, level_end(last + 1, ends, logits), float("inf"))
        p_high = level_end(level, ends, logits)
        least_kept = tl.where(shortened, at(weights, step, level - 1), least_kept)
        most_kept = tl.where(shortened, at(weights, step, last), most_kept)

        level = first(weights > target_of(u, least_kept))
        last = tl.minimum(first(weights > target_of(u, most_kept)), LEVELS - 1)
        u_low = level_end(last + 1, ends, logits)
        u_high = level_end(level, ends, logits)

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
