"""Estimates the distribution of a row's logits, and from it the range of logits that contains the cutoff token.

The bins of the histogram are ranges of octaves. A token's octaves are log2 of the row's largest weight divided by the token's
weight. The maximum of every group of a row is known, which gives a lower bound of each bin's count. If the lower bounds alone put
enough tokens into a range, that range is certain. Otherwise a sample of whole groups estimates the number of other tokens, and the
range is a guess with a margin of four standard errors. A wrong guess is detected and repaired: it costs time, but changes no
result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import at_index, from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._weights_device import WEIGHTLESS, floor_octaves

_NO_KEY = tl.constexpr(-0x80000000)
BINS = tl.constexpr(256)
# The last bin holds the tokens of weight 0.
_LAST = tl.constexpr(255)
_WIDTH = tl.constexpr(WEIGHTLESS.value / 255)
# Bin n spans n - 1/2 to n + 1/2 widths, so the largest token is in the middle of its bin. Range ends are moved down by a thousandth
# of a width, so that rounding of octaves moves no token out of the range.
_HALF = tl.constexpr(0.5)
_MARGIN = tl.constexpr(1e-3)
_LEAST_LOGIT = tl.constexpr(-3.0e38)
# Half the width of a guessed range, in standard errors; and the multiplier of the error term for the few largest tokens.
_ERRORS = tl.constexpr(4.0)
_ERRORS_OF_FEW = tl.constexpr(2.0)
# Weights are taken from the middle of a token's bin. _ERROR_OF_BIN is the relative standard error of such a weight. _BIAS_OF_BINS
# is the part of the error that does not average out in sums on either side of the cutoff. _ROUNDED is the relative rounding error
# of the float32 sums.
_ERROR_OF_BIN = tl.constexpr(0.04)
_BIAS_OF_BINS = tl.constexpr(4e-3)
_ROUNDED = tl.constexpr(2e-5)
# The largest 1/_FEW of the group maxima count as "few". Nearly all tokens of this size are group maxima.
_FEW = tl.constexpr(16)
# If tokens are at random positions, about groups / 512 of the groups / 16 largest tokens are not their group's maximum. If the
# sample has more than _OTHERS_AMONG_FEW such tokens, the positions are not random. The sample reads one of 25 tokens of a row of
# 200,000.
_OTHERS_AMONG_FEW = tl.constexpr(8.0)
# Bounds the number of tokens above the cutoff that the sample has missed, in multiples of the number of tokens that one sampled
# token represents.
_UNSEEN = tl.constexpr(2.0)


@triton.jit
def bins_of(key, live, largest, scale):
    """Returns the int32 histogram bins of tokens, given their sort keys."""
    octaves = (largest - from_sort_key(tl.where(live, key, sort_key(largest)))) * scale
    return tl.where(live & (octaves < WEIGHTLESS), octaves * (1.0 / _WIDTH) + _HALF, _LAST).to(tl.int32)


@triton.jit
def weights_of_bins(floor):
    """Returns float32 [BINS]: the weight of a token in the middle of each bin, relative to the largest token."""
    middle = tl.arange(0, BINS).to(tl.float32) * _WIDTH
    reach = WEIGHTLESS + 0.0
    if floor is not None:
        reach = floor_octaves(floor) + _WIDTH
    return tl.where((tl.arange(0, BINS) < _LAST) & (middle < reach), tl.exp2(-middle), 0.0)


@triton.jit
def end_of(bins, largest, scale):
    """Returns the int64 sort key of the lower end of the first ``bins`` bins. The lower end is a finite logit."""
    octaves = (bins.to(tl.float64) - _HALF + _MARGIN) * _WIDTH
    x = tl.maximum(largest.to(tl.float64) - octaves / scale.to(tl.float64), _LEAST_LOGIT)
    return sort_key(x.to(tl.float32)).to(tl.int64)


@triton.jit
def group_counts(maxima, largest, scale):
    """Returns int32 [BINS]: the histogram of the group maxima. maxima: int32 sort keys; _NO_KEY marks padding."""
    live = maxima != _NO_KEY
    return tl.histogram(bins_of(maxima, live, largest, scale), BINS, mask=live)


@triton.jit
def bins_to_list(counts, vocab, most, negligible, floor):
    """Returns how many bins, from the first one on, to list. Their tokens are likely to decide the row.

    The listed bins outweigh all other tokens: an upper bound of the other tokens' weight is at most ``negligible`` times the listed
    weight. Also returns whether at most ``most`` groups have tokens in these bins.
    """
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
    """Returns the int32 ids of the tokens at ``index`` in the concatenation of all groups. ``group``: the index of each token's
    group.
    """
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
    """Returns int32 [BINS]: the histogram of the tokens of every ``step``-th group, without each group's largest token."""
    SIZE: tl.constexpr = BLOCKS * RUN
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, SAMPLE, LANES):
        index = begin + tl.arange(0, LANES)
        read = (index // SIZE) * step
        ids = ids_of_groups(index, read, length, BLOCK, BLOCKS, RUN)
        live = (read < groups) & (ids < vocab)
        x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
        counts += tl.histogram(bins_of(sort_key(x), live, largest, scale), BINS, mask=live)
    # Subtract the maxima of the sampled groups; the tile is padded to at least one element per thread.
    READ: tl.constexpr = SAMPLE // SIZE if SAMPLE > 512 * SIZE else 512
    read = tl.arange(0, READ) * step
    live = (tl.arange(0, READ) * SIZE < SAMPLE) & (read < groups)
    key = tl.load(maxima + read, mask=live, other=_NO_KEY)
    live = live & (key != _NO_KEY)
    return counts - tl.histogram(bins_of(key, live, largest, scale), BINS, mask=live)


@triton.jit
def _error_of(weight, counts, others, reaching, few, cutoff, part, share, total, groups, restricted):
    """Returns `_ERRORS` standard errors of (weight down to the cutoff) - p * (total weight).

    Args:
        weight, counts, others: float32 or int32 [BINS]. The weight of each bin's tokens, the number of its group maxima, and of its
            other sampled tokens.
        reaching, few: `range_of_cutoff`'s count of group maxima down to a bin, and whether that count is small.
        part, share, total: p, the number of tokens that one sampled token represents, and the total weight.
    """
    side = tl.where(tl.arange(0, BINS) <= cutoff, 1.0 - part, part)
    # Every sampled token adds its own variance.
    deviation = tl.where(few, 0.0, share * weight * side)
    variance = tl.sum(others * deviation * deviation, axis=0) * (1.0 - 1.0 / share)
    deviation = tl.where(restricted, 0.0, _ERROR_OF_BIN * weight * side)
    variance += tl.sum(counts.to(tl.float32) * deviation * deviation, axis=0)
    error = _ERRORS * tl.sqrt(variance) + (_BIAS_OF_BINS * part * (1.0 - part) + _ROUNDED) * total
    # The sample may miss tokens above the cutoff that are no group maxima. The expected number of these is `hidden`.
    above = at_index(reaching, cutoff).to(tl.float32)
    hidden = above * above / (2.0 * groups)
    hidden = tl.minimum(hidden + _ERRORS * tl.sqrt(hidden), _UNSEEN * (share - 1.0))
    error += hidden * at_index(weight, cutoff)
    # The i-th largest token shares its group with a larger token with probability i / groups. At most sum / w tokens have weight w
    # or more. These two facts bound the variance of the total weight of those few largest tokens that have a larger token in their
    # group.
    few_weight = tl.sum(tl.where(few, counts.to(tl.float32) * weight * side, 0.0), axis=0)
    error += tl.where(share > 1.0, _ERRORS_OF_FEW, 0.0) * few_weight / tl.sqrt(groups.to(tl.float32))
    return error


@triton.jit
def range_of_cutoff(
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
    """Returns the smallest and the largest sort key, int64, of the range that should hold the cutoff token.

    With both top-k and top-p, the range extends up to the largest logit, because top-p needs the weight of all tokens that top-k
    keeps.

    Args:
        maxima: int32 [groups], the sort keys of the group maxima.
        counts: the result of `group_counts` for ``maxima``: the histogram of the group maxima.
        groups, length: number of groups, and tokens per span.
        restricted, k: whether top-k keeps fewer than all tokens, and top-k.
        p: the row's top-p, the probability that the kept tokens reach together.
        rank: for top-p alone, the range starts at the largest logit if the cutoff is likely within this many group maxima.
        largest_key, scale, floor: the row's largest sort key, and the scale and floor of its weights, see `token_weights`.
        SAMPLE, LANES: tokens to sample, and tokens per loop step.
    """
    bin = tl.arange(0, BINS)
    largest = from_sort_key(largest_key)
    reaching = tl.cumsum(counts, axis=0)
    # The number of bins that certainly hold k (or rank) tokens.
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
        # Nearly all tokens as large as the few largest group maxima are group maxima. So a sampled token of this size represents
        # only itself.
        among_few = tl.sum(tl.where(reaching <= groups // _FEW, others, 0.0), axis=0)
        # If a row's large logits are at neighbouring positions, many of the largest tokens are not group maxima. Then no bin counts
        # as few.
        few = reaching <= tl.where(among_few <= _OTHERS_AMONG_FEW, groups // _FEW, 0)
        weight = tl.where(restricted, (bin < _LAST).to(tl.float32), weights_of_bins(floor))
        sums = tl.cumsum(weight * (counts.to(tl.float32) + tl.where(few, 1.0, share) * others), axis=0)
        total = tl.max(sums, axis=0)
        part = tl.where(restricted | (~(p > 0.0)), 0.0, tl.minimum(p, 1.0))
        wanted = tl.where(restricted, k.to(tl.float32), part * total)
        cutoff = tl.minimum(tl.sum((sums < wanted).to(tl.int32), axis=0), _LAST - 1)
        error = _error_of(weight, counts, others, reaching, few, cutoff, part, share, total, groups, restricted)
        # Widen the range by the error: it ends at the bin for the target plus the error, and starts at the bin for the target minus
        # the error.
        low_bins = tl.minimum(tl.sum((sums < wanted + error).to(tl.int32), axis=0) + 1, _LAST)
        high_bins = tl.minimum(tl.sum((sums < wanted - error).to(tl.int32), axis=0), _LAST - 1)
        if (~restricted) & (low_bins <= certain):
            low_bins = certain
            high_bins = certain * 0
        high_bins = tl.where(restricted & (~(p >= 1.0)), 0, high_bins)
    high_key = tl.where(high_bins > 0, end_of(high_bins, largest, scale), largest_key.to(tl.int64))
    return end_of(low_bins, largest, scale), high_key
