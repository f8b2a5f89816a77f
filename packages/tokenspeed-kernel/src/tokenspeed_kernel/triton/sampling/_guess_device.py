"""Guessing from a sample of a row where the last token kept lies, so that few tokens have to be looked at for the exact answer.

The largest tokens are known, and stand for themselves; of the others every n-th run of neighbours is read, and each token stands
for n. A wrong guess is noticed and costs time, but changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._weights_device import WEIGHTLESS

# Neighbours that are read together: 32 bytes of float32.
_RUN = tl.constexpr(8)
# Standard errors that the range reaches to either side, and a part of the sum of all for what bins round.
_ERRORS = tl.constexpr(4.0)
_ROUNDED = tl.constexpr(1e-3)
_NO_PAIR = tl.constexpr(-0x8000000000000000)


@triton.jit
def _bin_of(x, largest, scale, BINS: tl.constexpr):
    """int32, the first bin for the largest logit, the last one for all that weigh nothing."""
    octaves = tl.minimum((largest - x) * scale, WEIGHTLESS)
    return tl.minimum((octaves * (BINS / WEIGHTLESS)).to(tl.int32), BINS - 1)


@triton.jit
def guess_range(
    logits,
    vocab_stride,
    vocab,
    listed,
    number,
    restricted,
    k,
    p,
    largest_key,
    scale,
    LISTED: tl.constexpr,
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
):
    """Returns the first and the last sort key, int64, between which the last token kept is expected.

    With both top-k and top-p the range reaches up to the largest logit: top-p needs the weight of all that top-k keeps.

    Args:
        listed: pointer to int64 `packed` tokens: all from the largest logit down to some logit, in any order.
        number: how many there are, at most LISTED; 0 if there is no list.
        restricted: whether top-k keeps less than all tokens; k of them.
        p: top-p.
        largest_key, scale: of the row.
        SAMPLE, BINS: how many tokens to read, and into how many equal parts of the range of logits they are counted.
    """
    largest = from_sort_key(largest_key)
    own = tl.arange(0, LISTED)
    live = own < number
    first_key = (tl.load(listed + own, mask=live, other=_NO_PAIR) >> 32).to(tl.int32)
    least_listed = tl.min(tl.where(live, first_key, 0x7FFFFFFF), axis=0)
    first_bin = tl.where(live, _bin_of(tl.where(live, from_sort_key(first_key), largest), largest, scale, BINS), BINS - 1)

    index = tl.arange(0, SAMPLE)
    step = tl.maximum(vocab // (SAMPLE // _RUN), _RUN)
    ids = (index // _RUN) * step + index % _RUN
    x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    live = (ids < vocab) & (sort_key(x) < least_listed)
    sample_bin = tl.where(live, _bin_of(x, largest, scale, BINS), BINS - 1)
    # How many tokens each stands for.
    share = step.to(tl.float32) / _RUN

    bin = tl.arange(0, BINS)
    counts = tl.histogram(sample_bin, BINS).to(tl.float32)
    tokens = tl.histogram(first_bin, BINS).to(tl.float32) + counts * share
    if restricted:
        sums = tl.cumsum(tokens, axis=0)
        wanted = k.to(tl.float32)
        error = _ERRORS * tl.sqrt(tl.maximum(k - number, 0).to(tl.float32) * share) + share
    else:
        weight = tl.exp2((bin.to(tl.float32) + 0.5) * (-WEIGHTLESS / BINS))
        weight = tl.where(bin < BINS - 1, weight, 0.0)
        sums = tl.cumsum(tokens * weight, axis=0)
        total = tl.sum(tokens * weight, axis=0)
        wanted = p * total
        # What is summed above the cut, less p times the sum of all: each token that was read adds its own variance.
        deviation = weight * share * tl.where(sums <= wanted, 1.0 - p, p)
        variance = tl.sum(counts * deviation * deviation, axis=0) * (1.0 - 1.0 / share)
        error = _ERRORS * tl.sqrt(variance) + _ROUNDED * total
    # A bin more to either side, as edges are rounded.
    lower = tl.sum((sums < wanted + error).to(tl.int32), axis=0) + 2
    upper = tl.sum((sums < wanted - error).to(tl.int32), axis=0) - 1
    octave = (WEIGHTLESS / BINS) / scale.to(tl.float64)
    low = sort_key((largest.to(tl.float64) - tl.minimum(lower, BINS).to(tl.float64) * octave).to(tl.float32))
    high = sort_key((largest.to(tl.float64) - upper.to(tl.float64) * octave).to(tl.float32))
    # Finite ones only.
    low = tl.maximum(low, sort_key(largest * 0.0 - 3.0e38))
    high = tl.where((upper <= 0) | (restricted & (~(p >= 1.0))), largest_key, high)
    return low.to(tl.int64), high.to(tl.int64)
