"""Device code of `token_logprobs`, in two launches.

* `logit_parts_kernel`: grid (row, span). Reads all logits once. For each span it writes the largest logit, the sum of exponentials
  relative to this logit, and the maxima of groups of neighbouring tokens.
* `token_logprobs_kernel`: grid (row). Merges the spans' results to the row's LSE. For the most probable tokens it finds a threshold
  that at least ``top_k`` group maxima reach, and reads only the groups that reach it.

A maximum of floats would drop NaN. So maxima are taken of int32 sort keys, in which NaN is the largest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._online_softmax_device import LN_2, LOG2_E
from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.sampling._rows_device import (
    from_sort_key,
    larger_pairs,
    largest_key,
    largest_pairs,
    packed,
    sort_key,
    threshold_of,
    token_of,
)

_NO_KEY = tl.constexpr(-0x80000000)
_NO_PAIR = tl.constexpr(-0x8000000000000000)
_LARGEST_SCALE = tl.constexpr(3.0e38)


@triton.jit
def _inverse_of(temperature, row):
    """Returns 1 / temperature of a row; 1 without a temperature, or if the temperature is not positive and finite."""
    inverse = tl.full([], 1.0, tl.float32)
    if temperature is not None:
        warmth = tl.load(temperature + row)
        warm = (warmth > 0.0) & (warmth < float("inf"))
        inverse = tl.where(warm, tl.minimum(1.0 / tl.where(warm, warmth, 1.0), _LARGEST_SCALE), 1.0)
    return inverse


@triton.jit
def _scale_of(inverse):
    """Returns the factor that converts a difference of logits to a base-2 exponent. The factor is finite, so that a difference of 0
    stays 0.
    """
    return tl.minimum(inverse * LOG2_E, _LARGEST_SCALE)


@triton.jit
def logit_parts_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    parts,
    maxima,
    spans,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes the largest logit of one span of a row, the sum of exponentials relative to it, and the maxima of the span's groups.

    parts: float32 [rows, spans, 2], output: the largest logit and the sum. maxima: int32 [rows, spans, SPAN // GROUP], output: sort
    keys. A group is GROUP neighbouring tokens.
    """
    start(EARLY)
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    ids = span * SPAN + tl.arange(0, SPAN)
    x = tl.load(logits + row * row_stride + ids.to(tl.int64) * vocab_stride, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    best = largest_key(tl.reshape(x, [SPAN // GROUP, GROUP]))
    largest = from_sort_key(tl.max(best, axis=0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2((x - shift) * _scale_of(_inverse_of(temperature, row))), axis=0)
    tl.store(parts + (row * spans + span) * 2, largest)
    tl.store(parts + (row * spans + span) * 2 + 1, total)
    if TOP:
        tl.store(maxima + (row * spans + span) * (SPAN // GROUP) + tl.arange(0, SPAN // GROUP), best)


@triton.jit
def _given(x, largest, inverse, lse, log_total, NORMALIZE: tl.constexpr):
    """Returns the output for logits x: scaled by the inverse temperature, and with NORMALIZE as log-probabilities."""
    given = x * inverse
    if NORMALIZE:
        # Subtract the largest logit first: for large logits, lse has lost precision to rounding.
        known = (x - largest) * inverse - log_total
        given = tl.where(x == float("-inf"), x, tl.where(lse == lse, known, float("nan")))
    return given


@triton.jit
def _merged(parts, row, spans, inverse, SPANS: tl.constexpr):
    """Merges the results of a row's spans. Returns the row's largest logit, the log of the sum of exponentials relative to this
    logit, and the LSE.
    """
    span = tl.arange(0, SPANS)
    own_largest = tl.load(parts + (row * spans + span) * 2, mask=span < spans, other=float("-inf"))
    totals = tl.load(parts + (row * spans + span) * 2 + 1, mask=span < spans, other=0.0)
    # Take the maximum of sort keys, so that NaN propagates.
    largest = from_sort_key(tl.max(sort_key(own_largest), axis=0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    # A span whose logits are all -inf adds nothing, whatever the scale.
    nearness = tl.where(own_largest == float("-inf"), 0.0, tl.exp2((own_largest - shift) * _scale_of(inverse)))
    log_total = tl.log2(tl.sum(totals * nearness, axis=0)) * LN_2
    lse = shift * inverse + log_total
    return largest, log_total, tl.where(largest < float("inf"), lse, float("nan"))


@triton.jit
def _threshold_of_groups(maxima, count, top_k, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Returns a sort key such that at least top_k group maxima are >= this key (the threshold).

    To shorten the search, the group maxima are folded into LANES keys, each the largest of several groups. At least top_k of
    these keys are >= the threshold, so at least top_k groups are.
    """
    fold = tl.arange(0, CHUNK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    keys = tl.full([LANES], _NO_KEY, tl.int32)
    for begin in range(0, count, CHUNK):
        keys = tl.maximum(keys, tl.max(tl.load(maxima + begin + fold, mask=begin + fold < count, other=_NO_KEY), axis=0))
    threshold, _ = threshold_of(keys, keys != _NO_KEY, top_k, 0)
    return threshold


@triton.jit
def _groups_reaching(maxima, count, threshold, listed, ties, top_k, CHUNK: tl.constexpr):
    """Lists the groups of tokens whose maximum is above the threshold, and the first top_k groups whose maximum equals the
    threshold.

    Returns the number of groups above the threshold, and the number of groups equal to the threshold.
    """
    above, tied = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, count, CHUNK):
        group = begin + tl.arange(0, CHUNK)
        key = tl.load(maxima + group, mask=group < count, other=_NO_KEY)
        is_above, is_tied = key > threshold, (key == threshold) & (group < count)
        # Both counts are packed into one int32, because each is at most CHUNK.
        ones = is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16)
        ends = tl.cumsum(ones, axis=0) - ones
        tl.store(listed + above + (ends & 0xFFFF), group, mask=is_above)
        at = tied + (ends >> 16)
        tl.store(ties + at, group, mask=is_tied & (at < top_k))
        here = tl.sum(ones, axis=0)
        above += here & 0xFFFF
        tied += here >> 16
    return above, tied


@triton.jit
def _best_of_groups(
    logits, vocab_stride, vocab, listed, ties, above, reaching, begin, GROUP: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr
):
    """Returns the K tokens with the largest logits among TILE tokens of the listed groups, from token ``begin`` of these groups on.

    The tokens are `packed`, the largest first, and padded with the smallest pair.
    """
    index = begin + tl.arange(0, TILE)
    entry = index // GROUP
    group = tl.load(listed + entry, mask=entry < above, other=0)
    group = tl.where(entry < above, group, tl.load(ties + (entry - above), mask=(entry >= above) & (entry < reaching), other=0))
    ids = group * GROUP + index % GROUP
    within = (entry < reaching) & (ids < vocab)
    x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=within, other=float("-inf")).to(tl.float32)
    return largest_pairs(tl.where(within, packed(sort_key(x), ids), _NO_PAIR), K)


@triton.jit
def token_logprobs_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    tokens,
    tokens_stride,
    temperature,
    parts,
    maxima,
    scratch,
    most_groups,
    token_out,
    token_stride,
    top_out,
    top_row_stride,
    top_k_stride,
    top_tokens_out,
    top_tokens_row_stride,
    top_tokens_k_stride,
    lse_out,
    lse_stride,
    top_k,
    first_token,
    spans,
    count,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SPANS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Merges the results of a row's spans to the row's LSE, and computes the log-probabilities of its given token and of its most
    probable tokens.

    ``count``: groups per row. scratch: int32 [rows, most_groups + top_k]: groups above the threshold, then groups equal to it.
    """
    start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    inverse = _inverse_of(temperature, row)
    largest, log_total, lse = _merged(parts, row, spans, inverse, SPANS)
    tl.store(lse_out + row * lse_stride, lse)

    token = tl.load(tokens + row * tokens_stride).to(tl.int64) - first_token
    inside = (token >= 0) & (token < vocab)
    x = tl.load(logits + tl.where(inside, token, 0) * vocab_stride).to(tl.float32)
    given = tl.where(inside, _given(x, largest, inverse, lse, log_total, NORMALIZE), float("-inf"))
    tl.store(token_out + row * token_stride, given)

    if TOP:
        maxima += row * spans * (SPAN // GROUP)
        listed = scratch + row * (most_groups + top_k)
        ties = listed + most_groups
        threshold = _threshold_of_groups(maxima, count, top_k, LANES, CHUNK)
        above, tied = _groups_reaching(maxima, count, threshold.to(tl.int32), listed, ties, top_k, CHUNK)
        # Each group whose maximum equals the threshold contains a token with exactly this logit. So of the tokens with this
        # logit, those with the lowest ids are in the first of these groups.
        reaching = above + tl.minimum(tied, tl.maximum(top_k - above, 0))
        tl.debug_barrier()  # the stores must be visible to the program's other threads

        best = _best_of_groups(logits, vocab_stride, vocab, listed, ties, above, reaching, 0, GROUP, TILE, K)
        for begin in range(TILE, reaching * GROUP, TILE):
            more = _best_of_groups(logits, vocab_stride, vocab, listed, ties, above, reaching, begin, GROUP, TILE, K)
            best = larger_pairs(best, more)
        position = tl.arange(0, K)
        wanted = position < top_k
        top = _given(from_sort_key((best >> 32).to(tl.int32)), largest, inverse, lse, log_total, NORMALIZE)
        tl.store(top_out + row * top_row_stride + position * top_k_stride, top, mask=wanted)
        top_token = (token_of(best) + first_token).to(tl.int32)
        tl.store(top_tokens_out + row * top_tokens_row_stride + position * top_tokens_k_stride, top_token, mask=wanted)
