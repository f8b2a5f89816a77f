"""Guessing where the last token kept lies, so that few tokens have to be looked at for the exact answer.

The largest logit of every group of a row is known: these tokens stand for themselves, so that what weighs most is not left to
chance. Of every n-th group all tokens are read, and each that is not its group's largest stands for n; but not where the groups'
largest are so few that hardly any other token is among them: there it would stand for what is not. A wrong guess is noticed and
costs time, but changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._weights_device import WEIGHTLESS

_NO_KEY = tl.constexpr(-0x80000000)
# Standard errors that the range reaches to either side, and a part of the sum of all for what sums of float32 round.
_ERRORS = tl.constexpr(4.0)
_ROUNDED = tl.constexpr(1e-4)
_ERRORS_OF_FEW = tl.constexpr(2.0)
# How many times what one token stands for may be missing of those that weigh no less than the last one kept.
_UNSEEN = tl.constexpr(2.0)
# A range of octaves is cut into _ENDS + 1 parts so many times.
_STEPS = tl.constexpr(6)
_ENDS = tl.constexpr(4)
_LEAST_LOGIT = tl.constexpr(-3.0e38)


@triton.jit
def octaves_of(key, live, largest, scale):
    """float32, how many powers of 2 a token weighs less than the largest; at most `WEIGHTLESS`."""
    octaves = (largest - from_sort_key(tl.where(live, key, sort_key(largest)))) * scale
    return tl.where(live & (octaves < WEIGHTLESS), octaves, WEIGHTLESS)


@triton.jit
def ids_of_groups(index, group, length, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RUN: tl.constexpr):
    """int32, the tokens of groups: the index-th of all, where `group` is the group that holds it."""
    member = index % (BLOCKS * RUN)
    RUNS: tl.constexpr = BLOCK // RUN
    return (group // RUNS) * length + (member // RUN) * BLOCK + (group % RUNS) * RUN + member % RUN


@triton.jit
def _sums_down_to(ends, octaves, known, read_octaves, read_weight):
    """float32, what tokens weigh down to each end: one reduction for all ends."""
    sums = tl.sum(tl.where(octaves[None, :] <= ends[:, None], known[None, :], 0.0), axis=1)
    return sums + tl.sum(tl.where(read_octaves[None, :] <= ends[:, None], read_weight[None, :], 0.0), axis=1)


@triton.jit
def guess_range(
    logits,
    vocab_stride,
    vocab,
    maxima,
    few_key,
    groups,
    length,
    restricted,
    k,
    p,
    largest_key,
    scale,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Returns the first and the last sort key, int64, between which the last token kept is expected.

    With both top-k and top-p the range reaches up to the largest logit: top-p needs the weight of all that top-k keeps.

    Args:
        maxima: int32 [GROUPS], the sort keys of the groups' largest logits; the least beyond their number.
        few_key: the sort key from which on they are few.
        groups, length: how many groups there are, and tokens of a span.
        restricted: whether top-k keeps less than all tokens; k of them.
        p: top-p.
        largest_key, scale: of the row.
        SAMPLE: how many tokens to read.
    """
    largest = from_sort_key(largest_key)
    SIZE: tl.constexpr = BLOCKS * RUN
    step = (groups * SIZE + SAMPLE - 1) // SAMPLE
    share = step.to(tl.float32)
    group = tl.arange(0, GROUPS)
    octaves = octaves_of(maxima, maxima != _NO_KEY, largest, scale)
    index = tl.arange(0, SAMPLE)
    read = (index // SIZE) * step
    ids = ids_of_groups(index, read, length, BLOCK, BLOCKS, RUN)
    live = (read < groups) & (ids < vocab)
    x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
    read_octaves = octaves_of(sort_key(x), live, largest, scale)

    # What is summed down to the last token: weights, or tokens.
    weight = tl.where(octaves < WEIGHTLESS, 1.0, 0.0)
    read_weight = tl.where(read_octaves < WEIGHTLESS, 1.0, 0.0)
    if not restricted:
        weight *= tl.exp2(-octaves)
        read_weight *= tl.exp2(-read_octaves)
    # The largest of a group that was read counts once, not for others.
    was_read = group % step == 0
    few = maxima >= few_key
    read_few = sort_key(x) >= few_key
    read_weight *= tl.where(read_few, 1.0, share)
    counted = tl.where(was_read, weight * tl.where(few, 1.0, share), 0.0)
    known = weight - counted
    total = tl.sum(known, axis=0) + tl.sum(read_weight, axis=0)
    part = tl.where(restricted | (~(p > 0.0)), 0.0, tl.minimum(p, 1.0))
    wanted = tl.where(restricted, k.to(tl.float32), part * total)

    low = share * 0.0
    high = low + WEIGHTLESS
    for _ in range(_STEPS):
        width = (high - low) / (_ENDS + 1)
        sums = _sums_down_to(low + width * (tl.arange(0, _ENDS) + 1), octaves, known, read_octaves, read_weight)
        low += width * tl.sum((sums < wanted).to(tl.int32), axis=0)
        high = low + width
    # The sum down to the cut, less p times the sum of all: each token that was read adds its own variance.
    deviation = tl.where(read_few, 0.0, read_weight) * tl.where(read_octaves <= high, 1.0 - part, part)
    variance = tl.sum(deviation * deviation, axis=0)
    deviation = tl.where(few, 0.0, counted) * tl.where(octaves <= high, 1.0 - part, part)
    variance = tl.maximum(variance - tl.sum(deviation * deviation, axis=0), 0.0) * (1.0 - 1.0 / share)
    error = _ERRORS * tl.sqrt(variance) + _ROUNDED * total
    # Of few tokens that are above the cut but not their groups' largest the sample has none. About so many are to be expected:
    reaching = tl.sum((octaves <= high).to(tl.float32), axis=0)
    hidden = reaching * reaching / (2.0 * groups)
    hidden = tl.minimum(hidden + _ERRORS * tl.sqrt(hidden), _UNSEEN * (share - 1.0))
    error += hidden * tl.where(restricted, 1.0, tl.exp2(-high))
    # The i-th largest token is hidden behind a larger one of its group with a probability of i to the number of groups, and there
    # are no more than sum / weight of at least some weight: that bounds the variance of what is hidden where tokens are few.
    few_weight = tl.sum(tl.where(few, weight, 0.0) * tl.where(octaves <= high, 1.0 - part, part), axis=0)
    error += tl.where(share > 1.0, _ERRORS_OF_FEW, 0.0) * few_weight / tl.sqrt(groups.to(tl.float32))

    # The last token of what is more by the error, and the first of what is less by it.
    last_low = low
    last_high = share * 0.0 + WEIGHTLESS
    first_low = share * 0.0
    first_high = high
    end = tl.arange(0, 2 * _ENDS)
    for _ in range(_STEPS):
        last_width = (last_high - last_low) / (_ENDS + 1)
        first_width = (first_high - first_low) / (_ENDS + 1)
        ends = tl.where(end < _ENDS, last_low + last_width * (end + 1), first_low + first_width * (end - _ENDS + 1))
        sums = _sums_down_to(ends, octaves, known, read_octaves, read_weight)
        less = (sums < tl.where(end < _ENDS, wanted + error, wanted - error)).to(tl.int32)
        last_low += last_width * tl.sum(tl.where(end < _ENDS, less, 0), axis=0)
        last_high = last_low + last_width
        first_low += first_width * tl.sum(tl.where(end < _ENDS, 0, less), axis=0)
        first_high = first_low + first_width
    octave = 1.0 / scale.to(tl.float64)
    low_key = sort_key(tl.maximum(largest.to(tl.float64) - last_high.to(tl.float64) * octave, _LEAST_LOGIT).to(tl.float32))
    high_key = sort_key(tl.maximum(largest.to(tl.float64) - first_low.to(tl.float64) * octave, _LEAST_LOGIT).to(tl.float32))
    high_key = tl.where((first_low <= 0.0) | (restricted & (~(p >= 1.0))), largest_key, high_key)
    return low_key.to(tl.int64), high_key.to(tl.int64)
