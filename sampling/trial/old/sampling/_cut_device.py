"""Looking for the last token kept: among the tokens that were copied because it is expected there, or in a whole row.

One program a row narrows the range of sort keys that holds the token, `_PARTS` parts at a time, to one logit. Once few tokens are
in the range their keys are copied, so that what is narrowed next is short; the last few are compared pair by pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling import _state
from tokenspeed_kernel.triton.sampling._rows_device import at_index, from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._state_device import COUNT_SHIFT, ONE_TOKEN, WEIGHT_MASK
from tokenspeed_kernel.triton.sampling._weights_device import limit_of, token_weights

_PARTS = tl.constexpr(8)
_PART_BITS = tl.constexpr(3)
FEW = tl.constexpr(_state.FEW)
_PAIRED = tl.constexpr(32)
_NO_KEY = tl.constexpr(-0x80000000)
# Tokens whose count and weight fit into one int64.
_CHUNK = tl.constexpr(1024)


@triton.jit
def _keys(keys, vocab_stride, index, number):
    """Sort keys of a row's logits, of copied tokens (int64, see `copied`), or what are sort keys (int32); the least beyond their
    number."""
    live = index < number
    if keys.dtype.element_ty == tl.int32:
        key = tl.load(keys + index, mask=live, other=_NO_KEY)
    else:
        if keys.dtype.element_ty == tl.int64:
            x = logit_of(tl.load(keys + index, mask=live, other=0))
        else:
            x = tl.load(keys + index.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
        key = tl.where(live, sort_key(x), _NO_KEY)
    return key


@triton.jit
def copied(x, token):
    """int64 of a copied token: the bits of its float32 logit above its number."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def logit_of(pair):
    """float32 logit of what is `copied`."""
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def number_of(pair):
    """int32 token of what is `copied`."""
    return pair.to(tl.int32)


@triton.jit
def _sums(keys, vocab_stride, number, ends, high, largest, scale, floor, LANES: tl.constexpr):
    """int64 [_PARTS] counts and weights of the tokens with keys from each end up to high."""
    counts = tl.zeros([_PARTS], tl.int64)
    weights = tl.zeros([_PARTS], tl.int64)
    for chunk in range(0, number, LANES * _CHUNK):
        added = tl.zeros([_PARTS, LANES], tl.int64)
        for start in range(chunk, tl.minimum(number, chunk + LANES * _CHUNK), LANES):
            key = _keys(keys, vocab_stride, start + tl.arange(0, LANES), number)
            key = tl.where(key <= high, key, _NO_KEY)
            # What stands for no key is a NaN, but reaches no end.
            both = token_weights(from_sort_key(key), largest, scale, floor) | ONE_TOKEN
            added += tl.where(key[None, :] >= ends[:, None], both[None, :], 0)
        if number <= _CHUNK:
            both = tl.sum(added, axis=1)
            counts += both >> COUNT_SHIFT
            weights += both & WEIGHT_MASK
        else:
            counts += tl.sum(added >> COUNT_SHIFT, axis=1)
            weights += tl.sum(added & WEIGHT_MASK, axis=1)
    return counts, weights


@triton.jit
def _last_of_few(keys, number, stage, above_count, above_weight, k, limit, largest, scale, floor):
    """Returns the key of the last token kept of at most FEW, how many tokens are above it, what they weigh, and how many have it.

    Comparing all pairs takes one step, where narrowing a range takes several that wait for each other.
    """
    own = tl.arange(0, FEW)
    live = own < number
    key = tl.load(keys + own, mask=live, other=_NO_KEY)
    both = tl.where(live, token_weights(from_sort_key(key), largest, scale, floor) | ONE_TOKEN, 0)
    added = tl.zeros([FEW, _PAIRED], tl.int64)
    for begin in range(0, number, _PAIRED):
        other = begin + tl.arange(0, _PAIRED)
        theirs = tl.load(keys + other, mask=other < number, other=_NO_KEY)
        also = tl.where(other < number, token_weights(from_sort_key(theirs), largest, scale, floor) | ONE_TOKEN, 0)
        added += tl.where(theirs[None, :] >= key[:, None], also[None, :], 0)
    sums = tl.sum(added, axis=1)
    count = above_count + (sums >> COUNT_SHIFT)
    weight = above_weight + (sums & WEIGHT_MASK)
    crossed = live & tl.where(stage == 0, count >= k, weight.to(tl.float64) >= limit)
    last = tl.max(tl.where(crossed, key, _NO_KEY), axis=0)
    above = tl.sum(tl.where(key > last, both, 0), axis=0)
    inside = tl.sum((live & (key == last)).to(tl.int64), axis=0)
    return last.to(tl.int64), above_count + (above >> COUNT_SHIFT), above_weight + (above & WEIGHT_MASK), inside


@triton.jit
def _copy(keys, vocab_stride, number, low, high, to, LANES: tl.constexpr):
    """Copies the keys from low to high. Returns how many there are, int32, and the least and the greatest of them, int64."""
    copied = tl.zeros([], tl.int32)
    least = tl.full([LANES], 0x7FFFFFFF, tl.int32)
    greatest = tl.full([LANES], _NO_KEY, tl.int32)
    for start in range(0, number, LANES):
        key = _keys(keys, vocab_stride, start + tl.arange(0, LANES), number)
        wanted = (key >= low) & (key <= high)
        place = copied + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(to + place, key, mask=wanted)
        copied += tl.sum(wanted.to(tl.int32), axis=0)
        least = tl.minimum(least, tl.where(wanted, key, 0x7FFFFFFF))
        greatest = tl.maximum(greatest, tl.where(wanted, key, _NO_KEY))
    tl.debug_barrier()  # other threads read what these have stored
    return copied, tl.min(least, axis=0).to(tl.int64), tl.max(greatest, axis=0).to(tl.int64)


@triton.jit
def _ties_needed(base, weight, ties, limit):
    """How many tokens of one weight, on top of base, reach a limit; at least 1."""
    low = ties * 0 + 1
    high = ties
    while low < high:
        middle = (low + high) >> 1
        if (base + middle * weight).to(tl.float64) >= limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _token_of_tie(keys, vocab_stride, number, key, needed, vocab, LANES: tl.constexpr):
    """The needed-th token of those with a key; needed: int64, at least 1."""
    part = tl.arange(0, _PARTS)
    low = tl.zeros([], tl.int32)
    high = low + vocab - 1
    while low < high:
        ends = tl.minimum(low + (part + 1) * (((high - low) >> _PART_BITS) + 1) - 1, high)
        counts = tl.zeros([_PARTS], tl.int32)
        for start in range(0, number, LANES):
            index = start + tl.arange(0, LANES)
            same = (_keys(keys, vocab_stride, index, number) == key) & (index < number)
            token = index
            if keys.dtype.element_ty == tl.int64:
                token = number_of(tl.load(keys + index, mask=same, other=0))
            token = tl.where(same, token, 0x7FFFFFFF)
            counts += tl.sum((token[None, :] <= ends[:, None]).to(tl.int32), axis=1)
        first = tl.sum((counts < needed).to(tl.int32), axis=0)
        if first > 0:
            low = at_index(ends, first - 1) + 1
        high = at_index(ends, first)
    return low


@triton.jit
def find_cut(
    row,
    vocab_stride,
    vocab,
    short,
    number,
    low_key,
    high_key,
    base_count,
    base_weight,
    total,
    restricted,
    k,
    p,
    largest,
    scale,
    floor,
    complete,
    LANES: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Looks for the last token kept.

    Args:
        row: pointer to the row's logits, or to tokens that were `copied`.
        short: int32 [SHORT + FEW], is written to.
        number: how many of them there are.
        low_key, high_key: int64, the first and the last key that the token may have, of finite logits; all tokens between them are
            among them.
        base_count, base_weight: int64, the tokens above, which are kept.
        total: the weight of all of the row's tokens.
        restricted, k, p: what is asked for.
        largest, scale, floor: of the row, see `token_weights`.
        complete: whether tokens below the first key weigh nothing, so that it does not matter which of them are kept.

    Returns:
        The token's sort key; of those with that key the last token kept; both int32; and whether they are right. They are not if
        the token does not lie between the two keys; if what is listed is complete, it then weighs nothing, and all are kept.
    """
    part = tl.arange(0, _PARTS)
    cut_key = low_key
    # Sums, so that a size of 1 is no constant.
    whole = tl.zeros([], tl.int32) + vocab
    cut_token = whole
    kept = total
    right = tl.full([], 1, tl.int32)
    first = from_sort_key(low_key.to(tl.int32)).to(tl.float64)
    reach = (from_sort_key(high_key.to(tl.int32)).to(tl.float64) - first) / _PARTS
    # The last token of top-k, then that of top-p.
    for stage in range(2):
        if (right != 0) & tl.where(stage == 0, restricted, ~(p >= 1.0)):
            limit = limit_of(p, kept)
            low = low_key
            high = high_key
            above_count = base_count
            above_weight = base_weight
            inside = low * 0
            # First equal parts of the range of logits, then of the range of keys.
            ends = tl.where(part == 0, low, sort_key((first + reach * part.to(tl.float64)).to(tl.float32)).to(tl.int64))
            ends = tl.minimum(tl.maximum(ends, low), high)
            # The tokens above may reach the limit by themselves, where the range is a guess.
            before = tl.where(stage == 0, above_count < k, above_weight.to(tl.float64) < limit)
            found = before.to(tl.int32)
            going = found
            left = number
            is_short = going * 0
            while going != 0:
                if is_short != 0:
                    counts, weights = _sums(short, 1, left, ends.to(tl.int32), high, largest, scale, floor, LANES // 4)
                else:
                    counts, weights = _sums(row, vocab_stride, left, ends.to(tl.int32), high, largest, scale, floor, LANES)
                counts += above_count
                weights += above_weight
                crossed = tl.where(stage == 0, counts >= k, weights.to(tl.float64) >= limit)
                last = tl.sum(crossed.to(tl.int32), axis=0) - 1
                if last < 0:
                    # There are fewer than k tokens that weigh something, or the guess was wrong.
                    found = going * 0
                    going = going * 0
                else:
                    if last < _PARTS - 1:
                        above_count = at_index(counts, last + 1)
                        above_weight = at_index(weights, last + 1)
                        high = tl.minimum(high, at_index(ends, last + 1) - 1)
                    inside = at_index(counts, last) - above_count
                    low = at_index(ends, last)
                    if (low < high) & (is_short == 0) & (inside <= SHORT):
                        # Ends that are keys: where all are the same, as they often are in few bits, that is the one.
                        left, low, high = _copy(row, vocab_stride, left, low, high, short, 2 * LANES)
                        is_short += 1
                    if (low < high) & (is_short != 0) & (inside <= FEW):
                        few, low, high = _copy(short, 1, left, low, high, short + SHORT, LANES)
                        low, above_count, above_weight, inside = _last_of_few(
                            short + SHORT, few, stage, above_count, above_weight, k, limit, largest, scale, floor
                        )
                        high = low
                    going = (low < high).to(tl.int32)
                    ends = tl.minimum(low + part * (((high - low) >> _PART_BITS) + 1), 0x7FFFFFFF)
            if found != 0:
                weight = token_weights(from_sort_key(low.to(tl.int32)), largest, scale, floor)
                needed = k - above_count
                if stage == 1:
                    needed = _ties_needed(above_weight, weight, inside, limit)
                kept = above_weight + needed * weight
                cut_key = low
                cut_token = whole
                if needed < inside:
                    cut_token = _token_of_tie(row, vocab_stride, number, low.to(tl.int32), needed, vocab, LANES)
            else:
                right = tl.where(before & complete, right, 0)
    return cut_key.to(tl.int32), cut_token, right
