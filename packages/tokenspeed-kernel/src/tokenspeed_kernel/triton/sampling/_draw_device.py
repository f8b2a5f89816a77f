"""Drawing from tokens that are listed, and drawing from a whole row."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key, token_of
from tokenspeed_kernel.triton.sampling._weights_device import limit_of, target_of, token_weights

_NO_PAIR = tl.constexpr(-0x8000000000000000)
# By token: the token above its weight, which has at most 41 bits; a vocabulary has at most 2^22 tokens.
_WEIGHT_BITS = tl.constexpr(41)
_WEIGHT_MASK = tl.constexpr((1 << 41) - 1)
_LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def draw_listed(listed, number, least, keeps, p, u, largest, scale, floor, TOKENS: tl.constexpr):
    """Draws from a row's listed tokens. Returns the token, int64, and whether they decide it.

    They do if the last token kept is the same whatever the tokens that are not listed weigh.

    Args:
        listed: pointer to int64 ``packed`` tokens: all from the largest logit down to some logit, in any order.
        number: how many there are, at most TOKENS.
        least: the most that a token weighs that is not listed.
        keeps: how many tokens top-k keeps, at most the vocabulary; int64.
        p, u: top-p, and the random number.
        largest, scale, floor: see `token_weights`.
    """
    own = tl.arange(0, TOKENS)
    live = own < number
    pairs = tl.sort(tl.load(listed + own, mask=live, other=_NO_PAIR), descending=True)
    x = from_sort_key((pairs >> 32).to(tl.int32))
    weight = token_weights(tl.where(live, x, float("-inf")), largest, scale, floor)
    kept = live & (own < keeps)
    weight = tl.where(kept, weight, 0)
    after = tl.cumsum(weight, axis=0)
    known = tl.sum(weight, axis=0)
    most = known + tl.maximum(keeps - number, 0) * least
    # Top-p's limit lies between these two.
    before = (after - weight).to(tl.float64)
    least_limit = tl.where(p >= 1.0, float("inf"), limit_of(p, known))
    most_limit = tl.where(p >= 1.0, float("inf"), limit_of(p, most))
    reached = kept & ((before < least_limit) | (own == 0))
    also = kept & ((before < most_limit) | (own == 0))
    same = tl.sum(reached.to(tl.int32), axis=0) == tl.sum(also.to(tl.int32), axis=0)
    decides = same & ((known.to(tl.float64) >= most_limit) | (most == known))

    by_token = tl.sort(tl.where(reached, (token_of(pairs) << _WEIGHT_BITS) | weight, _LAST))
    weight = tl.where(by_token < _LAST, by_token & _WEIGHT_MASK, 0)
    after = tl.cumsum(weight, axis=0)
    drawn = tl.sum((after <= target_of(u, tl.sum(weight, axis=0))).to(tl.int32), axis=0)
    return tl.sum(tl.where(own == drawn, by_token >> _WEIGHT_BITS, 0), axis=0), decides


@triton.jit
def kept_weights(logits, vocab_stride, vocab, ids, largest, scale, floor, cut_key, cut_token):
    """Returns the int64 weights of a row's tokens; 0 of those beyond the cut, which is the last token kept, and beyond the row."""
    x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(is_kept(sort_key(x), ids, cut_key, cut_token) & (ids < vocab), token_weights(x, largest, scale, floor), 0)


@triton.jit
def is_kept(key, token, cut_key, cut_token):
    """Whether tokens come no later than the last one kept."""
    return (key > cut_key) | ((key == cut_key) & (token <= cut_token))


@triton.jit
def draw_from_row(
    logits,
    vocab_stride,
    vocab,
    totals,
    units,
    u,
    largest,
    scale,
    floor,
    cut_key,
    cut_token,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Returns the token, int64. totals: int64 [units], what the kept tokens of each UNIT tokens weigh."""
    unit = tl.arange(0, UNITS)
    weights = tl.load(totals + unit, mask=unit < units, other=0)
    after = tl.cumsum(weights, axis=0)
    target = target_of(u, tl.sum(weights, axis=0))
    chosen = tl.sum((after <= target).to(tl.int32), axis=0)
    before = tl.sum(tl.where(unit == chosen, after - weights, 0), axis=0)
    first = chosen * UNIT
    weights = kept_weights(logits, vocab_stride, vocab, first + tl.arange(0, UNIT), largest, scale, floor, cut_key, cut_token)
    return (first + tl.sum((before + tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)).to(tl.int64)
