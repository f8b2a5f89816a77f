"""Guessing where the last token kept lies, so that few tokens have to be looked at for the exact answer.

The largest logit of every group of a row is known: these tokens stand for themselves, so that what weighs most is not left to
chance. Of every n-th group all tokens are read, and each that is not its group's largest stands for n. A wrong guess is noticed and
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
# How many times what one token stands for may be missing of those that weigh no less than the last one kept.
_UNSEEN = tl.constexpr(2.0)
# Halvings of the range of octaves.
_STEPS = tl.constexpr(13)
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
def guess_range(
    logits,
    vocab_stride,
    vocab,
    maxima,
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
    read_weight = tl.where(read_octaves < WEIGHTLESS, share, 0.0)
    if not restricted:
        weight *= tl.exp2(-octaves)
        read_weight *= tl.exp2(-read_octaves)
    # The largest of a group that was read counts once, not for others.
    was_read = group % step == 0
    known = tl.where(was_read, weight * (1.0 - share), weight)
    total = tl.sum(known, axis=0) + tl.sum(read_weight, axis=0)
    part = tl.where(restricted | (~(p > 0.0)), 0.0, tl.minimum(p, 1.0))
    wanted = tl.where(restricted, k.to(tl.float32), part * total)

    low = share * 0.0
    high = low + WEIGHTLESS
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        sums = tl.sum(tl.where(octaves <= middle, known, 0.0), axis=0)
        sums += tl.sum(tl.where(read_octaves <= middle, read_weight, 0.0), axis=0)
        low = tl.where(sums < wanted, middle, low)
        high = tl.where(sums < wanted, high, middle)
    # The sum down to the cut, less p times the sum of all: each token that was read adds its own variance.
    deviation = read_weight * tl.where(read_octaves <= high, 1.0 - part, part)
    variance = tl.sum(deviation * deviation, axis=0)
    deviation = tl.where(was_read, weight * share, 0.0) * tl.where(octaves <= high, 1.0 - part, part)
    variance = tl.maximum(variance - tl.sum(deviation * deviation, axis=0), 0.0) * (1.0 - 1.0 / share)
    error = _ERRORS * tl.sqrt(variance) + _ROUNDED * total
    # Of few tokens that are above the cut but not their groups' largest the sample has none. About so many are to be expected:
    reaching = tl.sum((octaves <= high).to(tl.float32), axis=0)
    hidden = reaching * reaching / (2.0 * groups)
    hidden = tl.minimum(hidden + _ERRORS * tl.sqrt(hidden), _UNSEEN * (share - 1.0))
    error += hidden * tl.where(restricted, 1.0, tl.exp2(-high))

    # The last token of what is more by the error, and the first of what is less by it.
    last_low = low
    last_high = share * 0.0 + WEIGHTLESS
    first_low = share * 0.0
    first_high = high
    for _ in range(_STEPS):
        last = 0.5 * (last_low + last_high)
        first = 0.5 * (first_low + first_high)
        sums = tl.sum(tl.where(octaves <= last, known, 0.0), axis=0)
        sums += tl.sum(tl.where(read_octaves <= last, read_weight, 0.0), axis=0)
        less = tl.sum(tl.where(octaves <= first, known, 0.0), axis=0)
        less += tl.sum(tl.where(read_octaves <= first, read_weight, 0.0), axis=0)
        last_low = tl.where(sums < wanted + error, last, last_low)
        last_high = tl.where(sums < wanted + error, last_high, last)
        first_low = tl.where(less < wanted - error, first, first_low)
        first_high = tl.where(less < wanted - error, first_high, first)
    octave = 1.0 / scale.to(tl.float64)
    low_key = sort_key(tl.maximum(largest.to(tl.float64) - last_high.to(tl.float64) * octave, _LEAST_LOGIT).to(tl.float32))
    high_key = sort_key(tl.maximum(largest.to(tl.float64) - first_low.to(tl.float64) * octave, _LEAST_LOGIT).to(tl.float32))
    high_key = tl.where((first_low <= 0.0) | (restricted & (~(p >= 1.0))), largest_key, high_key)
    return low_key.to(tl.int64), high_key.to(tl.int64)
