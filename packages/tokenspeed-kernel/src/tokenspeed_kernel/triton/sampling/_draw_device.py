"""Draws a token from a list of a row's largest tokens, or from a whole row."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key, token_of
from tokenspeed_kernel.triton.sampling._state_device import COUNT_SHIFT, ONE_TOKEN, WEIGHT_MASK
from tokenspeed_kernel.triton.sampling._weights_device import limit_of, target_of, token_weights

_NO_PAIR = tl.constexpr(-0x8000000000000000)
_LARGEST_PAIR = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
# A drawable token is packed into an int64: its id above its weight. The weight has at most 41 bits, and the id at most 22 bits.
_DRAWN_WEIGHT_BITS = tl.constexpr(41)
_WEIGHT_MASK = tl.constexpr((1 << 41) - 1)


@triton.jit
def draw_listed(listed, drawable, number, least, keeps, p, u, largest, scale, floor, TOKENS: tl.constexpr, PAIRED: tl.constexpr):
    """Draws a token from the list of a row's largest tokens, if the list determines the result.

    The list decides the row if every possible weight of the unlisted tokens gives the same cutoff token. Comparing all pairs of
    tokens gives each token's rank and the weight of the tokens before it. This needs no sorting and few dependent steps.

    Args:
        listed: pointer to int64 ``packed`` tokens: all tokens with logits at or above some logit, in any order.
        drawable: pointer to int64 [TOKENS], scratch memory.
        number: number of listed tokens, at most TOKENS.
        least: an upper bound of the weight of an unlisted token.
        keeps: number of tokens that top-k keeps, at most the vocabulary; int64.
        p, u: top-p, and the random number; if u is None no token is drawn.
        largest, scale, floor: the row's largest logit, and the scale and floor of its weights, see `token_weights`.
        PAIRED: the number of tokens that one step compares with all listed tokens.

    Returns:
        The token, int64; whether the list decides the row; the cutoff token, `packed`; and the weight of all tokens kept, int64.
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
    # Bounds of top-p's limit.
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
        tl.store(drawable + own, (token << _DRAWN_WEIGHT_BITS) | weight, mask=live)
        tl.debug_barrier()  # the stores must be visible to all threads of the program
        sums = tl.zeros([TOKENS, PAIRED], tl.int64)
        for begin in range(0, number, PAIRED):
            other = begin + tl.arange(0, PAIRED)
            theirs = tl.load(drawable + other, mask=other < number, other=0)
            sums += tl.where((theirs >> _DRAWN_WEIGHT_BITS)[None, :] <= token[:, None], (theirs & _WEIGHT_MASK)[None, :], 0)
        drawn = reached & (tl.sum(sums, axis=1) > target_of(u, total))
        found = tl.min(tl.where(drawn, token, _NO_TOKEN), axis=0)
    return found, decides, last, total


@triton.jit
def kept_weights(logits, vocab_stride, vocab, ids, largest, scale, floor, cutoff_key, cutoff_token):
    """Returns the int64 weights of a row's tokens: 0 for tokens after the cutoff token and for positions beyond the row."""
    x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(is_kept(sort_key(x), ids, cutoff_key, cutoff_token) & (ids < vocab), token_weights(x, largest, scale, floor), 0)


@triton.jit
def is_kept(key, token, cutoff_key, cutoff_token):
    """Whether top-k and top-p keep a token: it is the cutoff token, or precedes it by descending logit, then ascending id."""
    return (key > cutoff_key) | ((key == cutoff_key) & (token <= cutoff_token))


@triton.jit
def draw_from_row(
    logits,
    vocab_stride,
    vocab,
    totals,
    chunks,
    u,
    largest,
    scale,
    floor,
    cutoff_key,
    cutoff_token,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draws a token (int64) from a whole row. totals: int64 [chunks], the weight of the kept tokens of each chunk of CHUNK
    tokens.
    """
    chunk = tl.arange(0, CHUNKS)
    weights = tl.load(totals + chunk, mask=chunk < chunks, other=0)
    after = tl.cumsum(weights, axis=0)
    target = target_of(u, tl.sum(weights, axis=0))
    chosen = tl.sum((after <= target).to(tl.int32), axis=0)
    before = tl.sum(tl.where(chunk == chosen, after - weights, 0), axis=0)
    first = chosen * CHUNK
    weights = kept_weights(
        logits, vocab_stride, vocab, first + tl.arange(0, CHUNK), largest, scale, floor, cutoff_key, cutoff_token
    )
    return (first + tl.sum((before + tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)).to(tl.int64)
