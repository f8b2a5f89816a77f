"""How a row's tokens are distributed, in bins of octaves (powers of 2 below the largest weight), and what range of logits holds the
last token kept.

The largest logit of every group of a row is known, so that bins hold at least so many tokens: where that alone tells that enough
tokens are in a range, the range is certain. Where it does not, a sample of whole groups tells how many others there are. Then the
range is a guess, at four standard errors; that it was wrong is noticed, costs time and changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import at_index, from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._weights_device import WEIGHTLESS, floor_octaves

_NO_KEY = tl.constexpr(-0x80000000)
BINS = tl.constexpr(256)
# The last bin holds the tokens that weigh nothing.
_LAST = tl.constexpr(255)
_WIDTH = tl.constexpr(WEIGHTLESS.value / 255)
# Bin n reaches from n - 1/2 to n + 1/2 widths, so that the largest token is in the middle of its bin. Ends are moved down by a
# thousandth, so that no rounding of octaves takes a token out of its bin.
_HALF = tl.constexpr(0.5)
_MARGIN = tl.constexpr(1e-3)
_LEAST_LOGIT = tl.constexpr(-3.0e38)
# Standard errors that a guessed range reaches to either side.
_ERRORS = tl.constexpr(4.0)
_ERRORS_OF_FEW = tl.constexpr(2.0)
# What taking a token to be in the middle of its bin makes of its weight, as a standard error; what the same does to the sums on
# either side of the cut, where it does not average out; and what sums of float32 round.
_ERROR_OF_BIN = tl.constexpr(0.04)
_BIAS_OF_BINS = tl.constexpr(4e-3)
_ROUNDED = tl.constexpr(2e-5)
# How many parts of the groups' largest logits there are, the first of which are few.
_FEW = tl.constexpr(16)
# Of groups / 16 tokens that lie as they come, groups / 512 are hidden behind larger ones of their groups; of these so many may be
# read: one of twelve is, of a row of 200 000.
_OTHERS_AMONG_FEW = tl.constexpr(8.0)
# How many times what one token stands for may be missing of those that weigh no less than the last one kept.
_UNSEEN = tl.constexpr(2.0)


@triton.jit
def bins_of(key, live, largest, scale):
    """int32, the bins of tokens by their sort keys."""
    octaves = (largest - from_sort_key(tl.where(live, key, sort_key(largest)))) * scale
    return tl.where(live & (octaves < WEIGHTLESS), octaves * (1.0 / _WIDTH) + _HALF, _LAST).to(tl.int32)


@triton.jit
def weights_of_bins(floor):
    """float32 [BINS], what a token in the middle of each bin weighs; the largest weighs 1."""
    middle = tl.arange(0, BINS).to(tl.float32) * _WIDTH
    reach = WEIGHTLESS + 0.0
    if floor is not None:
        reach = floor_octaves(floor) + _WIDTH
    return tl.where((tl.arange(0, BINS) < _LAST) & (middle < reach), tl.exp2(-middle), 0.0)


@triton.jit
def end_of(bins, largest, scale):
    """int64, the sort key down to which tokens are in the first so many bins; it is finite."""
    octaves = (bins.to(tl.float64) - _HALF + _MARGIN) * _WIDTH
    x = tl.maximum(largest.to(tl.float64) - octaves / scale.to(tl.float64), _LEAST_LOGIT)
    return sort_key(x.to(tl.float32)).to(tl.int64)


@triton.jit
def group_counts(maxima, largest, scale):
    """int32 [BINS], how many groups have their largest logit in each bin. maxima: int32, sort keys; the least stand for none."""
    live = maxima != _NO_KEY
    return tl.histogram(bins_of(maxima, live, largest, scale), BINS, mask=live)


@triton.jit
def bins_to_list(counts, vocab, most, negligible, floor):
    """Returns the number of bins whose tokens outweigh all others by far, so that they are likely to decide the row, and whether
    there are few enough of them: at most so many groups have any."""
    weights = weights_of_bins(floor)
    sums = tl.cumsum(counts.to(tl.float32) * weights, axis=0)
    end = (tl.arange(0, BINS).to(tl.float32) + _HALF) * _WIDTH
    after = tl.exp2(-end)
    if floor is not None:
        after = tl.where(end < floor_octaves(floor) + _WIDTH, after, 0.0)
    needed = tl.sum((vocab * after > negligible * sums).to(tl.int32), axis=0) + 1
    groups = tl.sum(tl.where(tl.arange(0, BINS) < needed, counts, 0), axis=0)
    return needed, (needed < BINS) & (groups <= most)


@triton.jit
def ids_of_groups(index, group, length, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RUN: tl.constexpr):
    """int32, the tokens of groups: the index-th of all, where `group` is the group that holds it."""
    member = index % (BLOCKS * RUN)
    RUNS: tl.constexpr = BLOCK // RUN
    return (group // RUNS) * length + (member // RUN) * BLOCK + (group % RUNS) * RUN + member % RUN


@triton.jit
def _count_sample(
    logits,
    vocab_stride,
    vocab,
    maxima,
    groups,
    length,
    largest,
    scale,
    step,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    SAMPLE: tl.constexpr,
    LANES: tl.constexpr,
):
    """int32 [BINS], how many tokens each bin has of every step-th group, without one that is the largest of its group."""
    SIZE: tl.constexpr = BLOCKS * RUN
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, SAMPLE, LANES):
        index = begin + tl.arange(0, LANES)
        read = (index // SIZE) * step
        ids = ids_of_groups(index, read, length, BLOCK, BLOCKS, RUN)
        live = (read < groups) & (ids < vocab)
        x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
        counts += tl.histogram(bins_of(sort_key(x), live, largest, scale), BINS, mask=live)
    # One for each thread.
    READ: tl.constexpr = SAMPLE // SIZE if SAMPLE > 512 * SIZE else 512
    read = tl.arange(0, READ) * step
    live = (tl.arange(0, READ) * SIZE < SAMPLE) & (read < groups)
    key = tl.load(maxima + read, mask=live, other=_NO_KEY)
    live = live & (key != _NO_KEY)
    return counts - tl.histogram(bins_of(key, live, largest, scale), BINS, mask=live)


@triton.jit
def range_of_cut(
    logits,
    vocab_stride,
    vocab,
    maxima,
    counts,
    groups,
    length,
    restricted,
    k,
    p,
    rank,
    largest_key,
    scale,
    floor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    SAMPLE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Returns the first and the last sort key, int64, between which the last token kept is.

    With both top-k and top-p the range reaches up to the largest logit: top-p needs the weight of all that top-k keeps.

    Args:
        maxima: int32 [groups], the sort keys of the groups' largest logits.
        counts: their `group_counts`.
        groups, length: how many groups there are, and tokens of a span.
        restricted: whether top-k keeps less than all tokens; k of them.
        p: top-p.
        rank: up to how many groups' largest logits are looked at from the first on, where top-p's last token is likely to be there.
        largest_key, scale, floor: of the row.
        SAMPLE: how many tokens to read; LANES: at a time.
    """
    bin = tl.arange(0, BINS)
    largest = from_sort_key(largest_key)
    reaching = tl.cumsum(counts, axis=0)
    # So many bins hold at least k, or rank, tokens.
    certain = tl.sum((reaching < tl.where(restricted, k, rank)).to(tl.int32), axis=0) + 1
    certain = tl.minimum(certain, _LAST)
    low_bins = certain
    high_bins = certain * 0
    if (~restricted) | (k > groups // 2):
        SIZE: tl.constexpr = BLOCKS * RUN
        step = (groups * SIZE + SAMPLE - 1) // SAMPLE
        share = step.to(tl.float32)
        others = _count_sample(
            logits, vocab_stride, vocab, maxima, groups, length, largest, scale, step, BLOCK, BLOCKS, RUN, SAMPLE, LANES
        ).to(tl.float32)  # fmt: skip
        # Where the groups' largest are so few that hardly any other token is among them, one that was read stands for itself.
        among_few = tl.sum(tl.where(reaching <= groups // _FEW, others, 0.0), axis=0)
        # That does not hold for rows whose large logits are neighbours.
        few = reaching <= tl.where(among_few <= _OTHERS_AMONG_FEW, groups // _FEW, 0)
        weight = tl.where(restricted, (bin < _LAST).to(tl.float32), weights_of_bins(floor))
        sums = tl.cumsum(weight * (counts.to(tl.float32) + tl.where(few, 1.0, share) * others), axis=0)
        total = tl.max(sums, axis=0)
        part = tl.where(restricted | (~(p > 0.0)), 0.0, tl.minimum(p, 1.0))
        wanted = tl.where(restricted, k.to(tl.float32), part * total)
        cut = tl.minimum(tl.sum((sums < wanted).to(tl.int32), axis=0), _LAST - 1)
        # The sum down to the cut, less p times the sum of all: each token that was read adds its own variance.
        side = tl.where(bin <= cut, 1.0 - part, part)
        deviation = tl.where(few, 0.0, share * weight * side)
        variance = tl.sum(others * deviation * deviation, axis=0) * (1.0 - 1.0 / share)
        deviation = tl.where(restricted, 0.0, _ERROR_OF_BIN * weight * side)
        variance += tl.sum(counts.to(tl.float32) * deviation * deviation, axis=0)
        error = _ERRORS * tl.sqrt(variance) + (_BIAS_OF_BINS * part * (1.0 - part) + _ROUNDED) * total
        # Of few tokens that are above the cut but not their groups' largest the sample has none. About so many are to be expected:
        above = at_index(reaching, cut).to(tl.float32)
        hidden = above * above / (2.0 * groups)
        hidden = tl.minimum(hidden + _ERRORS * tl.sqrt(hidden), _UNSEEN * (share - 1.0))
        error += hidden * at_index(weight, cut)
        # The i-th largest token is hidden behind a larger one of its group with a probability of i to the number of groups, and
        # there are no more than sum / weight of at least some weight: that bounds the variance of what is hidden where tokens are
        # few.
        few_weight = tl.sum(tl.where(few, counts.to(tl.float32) * weight * side, 0.0), axis=0)
        error += tl.where(share > 1.0, _ERRORS_OF_FEW, 0.0) * few_weight / tl.sqrt(groups.to(tl.float32))
        # The last bin of what is more by the error, and the first of what is less by it.
        low_bins = tl.minimum(tl.sum((sums < wanted + error).to(tl.int32), axis=0) + 1, _LAST)
        high_bins = tl.minimum(tl.sum((sums < wanted - error).to(tl.int32), axis=0), _LAST - 1)
        if (~restricted) & (low_bins <= certain):
            low_bins = certain
            high_bins = certain * 0
        high_bins = tl.where(restricted & (~(p >= 1.0)), 0, high_bins)
    high_key = tl.where(high_bins > 0, end_of(high_bins, largest, scale), largest_key.to(tl.int64))
    return end_of(low_bins, largest, scale), high_key
