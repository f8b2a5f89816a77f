"""Drawing from tokens that are listed, and drawing from a whole row."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key, token_of
from tokenspeed_kernel.triton.sampling._state_device import COUNT_SHIFT, ONE_TOKEN, WEIGHT_MASK
from tokenspeed_kernel.triton.sampling._weights_device import limit_of, target_of, token_weights

_NO_PAIR = tl.constexpr(-0x8000000000000000)
_LARGEST_PAIR = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
# Of a listed token that may be drawn: the token above its weight, which has at most 41 bits; a vocabulary has at most 2^22 tokens.
_WEIGHT_BITS = tl.constexpr(41)
_WEIGHT_MASK = tl.constexpr((1 << 41) - 1)


@triton.jit
def draw_listed(listed, drawable, number, least, keeps, p, u, largest, scale, floor, TOKENS: tl.constexpr, PAIRED: tl.constexpr):
    """Draws from a row's listed tokens. Returns the token, int64; whether they decide it; the last token kept, `packed`; and the
    weight of all tokens kept, int64.

    They do if the last token kept is the same whatever the tokens that are not listed weigh. Tokens are compared pair by pair, for
    each one's rank and the weight of those before it: no sorting, and few steps that wait for each other.

    Args:
        listed: pointer to int64 ``packed`` tokens: all from the largest logit down to some logit, in any order.
        drawable: pointer to int64 [TOKENS], is written to.
        number: how many are listed, at most TOKENS.
        least: the most that a token weighs that is not listed.
        keeps: how many tokens top-k keeps, at most the vocabulary; int64.
        p, u: top-p, and the random number; without one no token is drawn.
        largest, scale, floor: see `token_weights`.
        PAIRED: how many tokens all the others are compared to at a time.
    """
    own = tl.arange(0, TOKENS)
    live = own < number
    pair = tl.load(listed + own, mask=live, other=_NO_PAIR)
    x = from_sort_key((pair >> 32).to(tl.int32))
    weight = token_weights(tl.where(live, x, float("-inf")), largest, scale, floor)
    sums = tl.zeros([TOKENS, PAIRED], tl.int64)
    for begin in range(0, number, PAIRED):
        other = begin + tl.arange(0, PAIRED)
        theirs = tl.load(listed + other, mask=other < number, other=_NO_PAIR)
        both = token_weights(from_sort_key((theirs >> 32).to(tl.int32)), largest, scale, floor) | ONE_TOKEN
        sums += tl.where(theirs[None, :] > pair[:, None], both[None, :], 0)
    before = tl.sum(sums, axis=1)
    kept = live & ((before >> COUNT_SHIFT) < keeps)
    before = (before & WEIGHT_MASK).to(tl.float64)
    known = tl.sum(tl.where(kept, weight, 0), axis=0)
    most = known + tl.maximum(keeps - number, 0) * least
    # Top-p's limit lies between these two.
    least_limit = tl.where(p >= 1.0, float("inf"), limit_of(p, known))
    most_limit = tl.where(p >= 1.0, float("inf"), limit_of(p, most))
    reached = kept & (before < least_limit)
    also = kept & (before < most_limit)
    same = tl.sum(reached.to(tl.int32), axis=0) == tl.sum(also.to(tl.int32), axis=0)
    decides = same & ((known.to(tl.float64) >= most_limit) | (most == known))

    weight = tl.where(reached, weight, 0)
    total = tl.sum(weight, axis=0)
    last = tl.min(tl.where(reached, pair, _LARGEST_PAIR), axis=0)
    found = tl.full([], _NO_TOKEN, tl.int64)
    if u is not None:
        token = token_of(pair).to(tl.int64)
        tl.store(drawable + own, (token << _WEIGHT_BITS) | weight, mask=live)
        tl.debug_barrier()  # all threads read what these have stored
        sums = tl.zeros([TOKENS, PAIRED], tl.int64)
        for begin in range(0, number, PAIRED):
            other = begin + tl.arange(0, PAIRED)
            theirs = tl.load(drawable + other, mask=other < number, other=0)
            sums += tl.where((theirs >> _WEIGHT_BITS)[None, :] <= token[:, None], (theirs & _WEIGHT_MASK)[None, :], 0)
        drawn = reached & (tl.sum(sums, axis=1) > target_of(u, total))
        found = tl.min(tl.where(drawn, token, _NO_TOKEN), axis=0)
    return found, decides, last, total


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
