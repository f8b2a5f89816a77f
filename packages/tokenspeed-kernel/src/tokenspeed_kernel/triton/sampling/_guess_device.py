"""How a row's tokens are distributed, in bins of fifths of an octave (a power of 2 of weight), and what range of logits holds the
last token kept.

Each span counts its own tokens while it has them, in few bins, for a histogram takes the longer the more it has: fifths of an
octave below its largest logit, and four fifths further down. Fifths begin at the same logits in all spans of a row, so that the
counts of spans add up. What the tokens of a bin weigh is a guess, for each may lie anywhere in it; so a range reaches four standard
errors to either side. That it was wrong is noticed, costs time and changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import at_index, sort_key
from tokenspeed_kernel.triton.sampling._state import SPAN_BINS as _SPAN_BINS
from tokenspeed_kernel.triton.sampling._weights_device import WEIGHTLESS, floor_octaves, lowest_of
from tokenspeed_kernel_base.ops.sampling import weights as definition

# Of a span: fifths, then wide bins of four. The last bin holds all tokens that are below.
SPAN_BINS = tl.constexpr(_SPAN_BINS)
_FIFTHS = tl.constexpr(48)
# Of a row: fifths. The last bin holds all tokens that are below, or in the last one of their span.
BINS = tl.constexpr(128)
_LAST = tl.constexpr(127)
_PER_OCTAVE = tl.constexpr(5.0)
_WIDTH = tl.constexpr(0.2)
# The tokens of the last bin are taken to weigh no more than those of the bins from here on.
_NEXT_TO_LAST = tl.constexpr(117)
_HALF = tl.constexpr(0.5)
# Multiples of a bin's width up to here are rounded by adding the definition's number for that, which takes less than 2^22.
_MOST = tl.constexpr(4.0e6)
_ROUNDER = tl.constexpr(definition.ROUNDER)
_BITS_OF_ROUNDER = tl.constexpr(definition.BITS_OF_ROUNDER)
_LARGEST_SCALE = tl.constexpr(definition.LARGEST_SCALE)
# Logits of more widths are too coarse in float32 for bins.
_COARSE = tl.constexpr(1 << 20)
# By so many widths the end of a bin is moved, and by such a part of its distance from 0, so that no rounding takes a token out of a
# range.
_MARGIN = tl.constexpr(1e-3)
_RELATIVE_MARGIN = tl.constexpr(2.0**-22)
_LEAST_LOGIT = tl.constexpr(-3.0e38)
# Standard errors that a guessed range reaches to either side.
_ERRORS = tl.constexpr(4.0)
# ln(2) / (5 * sqrt(12)), the standard error of a weight that may be anywhere in its bin; all tokens of a bin may have one logit. Of
# a wide bin's tokens, which have more logits than one, it is taken to be twice as much.
_ERROR_OF_BIN = tl.constexpr(0.04)
_ERROR_OF_WIDE = tl.constexpr(0.08)
# What taking tokens to be in the middle of their bins does to the sums on either side of the cut, where it does not average out;
# and what sums of float32 round.
_BIAS_OF_BINS = tl.constexpr(4e-3)
_ROUNDED = tl.constexpr(2e-5)


@triton.jit
def is_counted(k, p, floor, warmth, vocab, few):
    """Whether a row's tokens are to be counted in bins: it may be drawn from, some are left out, and top-k keeps not just few."""
    restricted = (k > 0) & (k < vocab)
    left_out = restricted | (~(p >= 1.0))
    if floor is not None:
        left_out |= floor > 0
    return left_out & (~(restricted & (k <= few))) & (warmth > 0.0) & (warmth < float("inf"))


@triton.jit
def level_of(x, scale):
    """int32, logits as multiples of a bin's width, rounded."""
    y = x * tl.minimum(scale * _PER_OCTAVE, _LARGEST_SCALE)
    return (tl.minimum(tl.maximum(y, -_MOST), _MOST) + _ROUNDER).to(tl.int32, bitcast=True) - _BITS_OF_ROUNDER


@triton.jit
def _bin_of_span(distance):
    """The bin of tokens so many fifths below the top level."""
    return tl.minimum(tl.minimum(distance, (distance >> 2) + (_FIFTHS - _FIFTHS // 4)), SPAN_BINS - 1)


@triton.jit
def count_span(x, top, scale):
    """int32 [SPAN_BINS], how many logits are in each bin below the top level, which is that of the largest. -inf counts in the
    last."""
    return tl.histogram(tl.reshape(_bin_of_span(top - level_of(x, scale)), [x.numel]), SPAN_BINS)


@triton.jit
def add_counts(counts, tops, spans, vocab, SPANS: tl.constexpr, TOGETHER: tl.constexpr):
    """Returns how many of a row's tokens are in each bin, and how many of these are known by wide bins, float32 [BINS], and its top
    level, int32.

    Args:
        counts: pointer to the spans' `count_span`, int32 [spans, SPAN_BINS]. Tokens of a wide bin are taken to be spread evenly.
        tops: pointer to int32 [spans], their top levels.
        vocab: how many tokens there are.
        TOGETHER: spans to add at a time.
    """
    span = tl.arange(0, SPANS)
    # All levels are larger.
    top = tl.max(tl.load(tops + span, mask=span < spans, other=-0x800000), axis=0)
    bin = tl.arange(0, BINS)
    exact = tl.zeros([BINS], tl.int32)
    wide = tl.zeros([BINS], tl.int32)
    for begin in range(0, spans, TOGETHER):
        some = begin + tl.arange(0, TOGETHER)
        own = tl.load(tops + some, mask=some < spans, other=-0x800000)
        distance = bin[None, :] - (top - own)[:, None]
        of_span = _bin_of_span(distance)
        there = (some < spans)[:, None] & (distance >= 0) & (of_span < SPAN_BINS - 1) & (bin < _LAST)[None, :]
        found = tl.load(counts + some[:, None] * SPAN_BINS + of_span, mask=there, other=0)
        exact += tl.sum(tl.where(distance < _FIFTHS, found, 0), axis=0)
        wide += tl.sum(tl.where(distance < _FIFTHS, 0, found), axis=0)
    spread = wide.to(tl.float32) * 0.25
    total = exact.to(tl.float32) + spread
    return tl.where(bin == _LAST, vocab - tl.sum(total, axis=0), total), spread, top


@triton.jit
def is_coarse(top):
    """Whether logits are too far from 0 for bins to tell anything."""
    return (top >= _COARSE) | (top <= -_COARSE)


@triton.jit
def weights_of_bins(top, largest, scale, floor):
    """float32 [BINS], what a token in the middle of each bin weighs; the largest weighs 1, and one of the last bin nothing."""
    bin = tl.arange(0, BINS).to(tl.float32)
    # By so much the largest logit is above the middle of its bin.
    above = (largest.to(tl.float64) * scale.to(tl.float64) * _PER_OCTAVE - top.to(tl.float64)).to(tl.float32)
    octaves = tl.where(bin == 0.0, (above + _HALF) * _HALF, bin + above) * _WIDTH
    reach = WEIGHTLESS + 0.0
    if floor is not None:
        reach = floor_octaves(floor) + _WIDTH
    return tl.where((bin < _LAST) & (octaves < reach), tl.exp2(-octaves), 0.0)


@triton.jit
def end_of(bins, top, scale, side):
    """int64, the sort key at which the first so many bins end, moved by a margin to a side, -1 or 1; it is finite."""
    level = top.to(tl.float64)
    level = level - bins.to(tl.float64) + _HALF + side * (_MARGIN + tl.abs(level) * _RELATIVE_MARGIN)
    x = tl.minimum(tl.maximum(level / (scale.to(tl.float64) * _PER_OCTAVE), _LEAST_LOGIT), -_LEAST_LOGIT)
    return sort_key(x.to(tl.float32)).to(tl.int64)


@triton.jit
def bins_to_list(counts, weights, most, negligible):
    """Returns the number of bins whose tokens outweigh all others by far, so that they are likely to decide the row, and whether
    they have at most so many tokens."""
    sums = tl.cumsum(counts * weights, axis=0)
    total = tl.max(sums, axis=0)
    needed = tl.sum((total - sums > negligible * sums).to(tl.int32), axis=0) + 1
    tokens = tl.sum(tl.where(tl.arange(0, BINS) < needed, counts, 0.0), axis=0)
    return needed, (needed < BINS) & (tokens <= most)


@triton.jit
def ids_of_groups(index, group, length, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RUN: tl.constexpr):
    """int32, the tokens of groups: the index-th of all, where `group` is the group that holds it."""
    member = index % (BLOCKS * RUN)
    RUNS: tl.constexpr = BLOCK // RUN
    return (group // RUNS) * length + (member // RUN) * BLOCK + (group % RUNS) * RUN + member % RUN


@triton.jit
def range_of_cut(counts, spread, weights, top, restricted, k, p, largest_key, largest, scale):
    """Returns the first and the last sort key, int64, between which the last token kept is.

    With both top-k and top-p the range reaches up to the largest logit: top-p needs the weight of all that top-k keeps.

    Args:
        counts, spread, top: of the row, see `add_counts`.
        weights: its `weights_of_bins`.
        restricted: whether top-k keeps less than all tokens; k of them.
        p: top-p.
        largest_key, largest, scale: of the row.
    """
    bin = tl.arange(0, BINS)
    each = tl.where(restricted, (bin < _LAST).to(tl.float32), weights)
    of_bin = counts * each
    sums = tl.cumsum(of_bin, axis=0)
    total = tl.max(sums, axis=0)
    part = tl.where(p > 0.0, tl.minimum(p, 1.0), 0.0)
    wanted = tl.where(restricted, k.to(tl.float32), part * total)
    cut = tl.sum((sums < wanted).to(tl.int32), axis=0)
    # The sum down to the cut, less p times the sum of all: each bin adds its own variance.
    side = tl.where(bin <= cut, 1.0 - part, part) * each
    deviation = (_ERROR_OF_BIN * counts + (_ERROR_OF_WIDE - _ERROR_OF_BIN) * spread) * side
    error = _ERRORS * tl.sqrt(tl.sum(deviation * deviation, axis=0)) + (_BIAS_OF_BINS * part * (1.0 - part) + _ROUNDED) * total
    error += part * tl.sum(tl.where(bin >= _NEXT_TO_LAST, of_bin, 0.0), axis=0)
    # Top-k counts: of a wide bin's tokens, none or all may be in one of its bins.
    error = tl.where(restricted, 4.0 * at_index(spread, tl.minimum(cut, _LAST)), error)
    # The last bin of what is more by the error, and the first of what is less by it.
    low_bins = tl.sum((sums < wanted + error).to(tl.int32), axis=0) + 1
    high_bins = tl.sum((sums < wanted - error).to(tl.int32), axis=0)
    # Tokens that weigh nothing are left out: many may be -inf, and so is what is read beyond the end of a row.
    low_key = sort_key(lowest_of(largest, scale).to(tl.float32)).to(tl.int64)
    low_key = tl.where(low_bins > _LAST, low_key, tl.maximum(end_of(low_bins, top, scale, -1.0), low_key))
    high_key = largest_key.to(tl.int64)
    if (high_bins > 0) & (high_bins < BINS) & (~(restricted & (~(p >= 1.0)))):
        high_key = tl.minimum(end_of(high_bins, top, scale, 1.0), high_key)
    return low_key, high_key
