"""The cutoff search: finds the last token that top-k and top-p keep, in order of descending logit (the cutoff token).

The search reads either the copied tokens, among which the cutoff is expected, or the whole row. One program per row narrows the
range of sort keys that contains the cutoff. Each step splits the range into `_PARTS` parts and keeps one part, until one key is
left.
Once few tokens are in the range, their keys are copied. Later steps then read a short list. The last few keys are compared
pairwise.
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
# The number of tokens whose count and total weight always fit into one int64: a weight has 41 bits, and the count begins at bit 51.
_CHUNK = tl.constexpr(1024)


@triton.jit
def _keys(keys, vocab_stride, index, number):
    """Loads sort keys of tokens. ``keys`` points to a row's logits, to copied tokens (int64, see `copied`), or to sort keys
    (int32).

    Positions at or beyond ``number`` get the smallest sort key.
    """
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
    """Packs a copied token into an int64: the bits of its float32 logit in the upper half, its id in the lower half."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def logit_of(pair):
    """Returns the float32 logit of a `copied` token."""
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def number_of(pair):
    """Returns the int32 id of a `copied` token."""
    return pair.to(tl.int32)


@triton.jit
def _sums(keys, vocab_stride, number, ends, high, largest, scale, floor, LANES: tl.constexpr):
    """Returns, for each element of ``ends``, the number and the total weight of the tokens with keys from this element to ``high``.

    Both results are int64 [_PARTS].
    """
    counts = tl.zeros([_PARTS], tl.int64)
    weights = tl.zeros([_PARTS], tl.int64)
    for chunk in range(0, number, LANES * _CHUNK):
        added = tl.zeros([_PARTS, LANES], tl.int64)
        for start in range(chunk, tl.minimum(number, chunk + LANES * _CHUNK), LANES):
            key = _keys(keys, vocab_stride, start + tl.arange(0, LANES), number)
            key = tl.where(key <= high, key, _NO_KEY)
            # _NO_KEY decodes to NaN, but is below every element of `ends`, so its weight is never added.
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
    """Finds the cutoff key among at most FEW keys by comparing all pairs.

    Returns the cutoff's key, the number and the weight of the tokens above this key, and the number of tokens with this key.
    Comparing all pairs takes one step, whereas narrowing a range takes several dependent steps.
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
    """Copies the sort keys in [low, high] to ``to``. Returns their number, int32, and the smallest and the largest, int64."""
    copied = tl.zeros([], tl.int32)
    least = tl.full([LANES], 0x7FFFFFFF, tl.int32)
    greatest = tl.full([LANES], _NO_KEY, tl.int32)
    for start in range(0, number, LANES):
        key = _keys(keys, vocab_stride, start + tl.arange(0, LANES), number)
        wanted = (key >= low) & (key <= high)
        position = copied + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(to + position, key, mask=wanted)
        copied += tl.sum(wanted.to(tl.int32), axis=0)
        least = tl.minimum(least, tl.where(wanted, key, 0x7FFFFFFF))
        greatest = tl.maximum(greatest, tl.where(wanted, key, _NO_KEY))
    tl.debug_barrier()  # the stores must be visible to the program's other threads
    return copied, tl.min(least, axis=0).to(tl.int64), tl.max(greatest, axis=0).to(tl.int64)


@triton.jit
def _ties_needed(base, weight, ties, limit):
    """Returns the smallest n, from 1 to ``ties``, such that ``base + n * weight`` reaches the limit; ``ties`` if none does."""
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
    """Returns the id of the needed-th token, in id order, among the tokens whose sort key is ``key``. needed: int64, at least 1."""
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
def _narrow(
    counts, weights, ends, last, row, vocab_stride, short, left, is_short, low, high, above_count, above_weight,
    stage, k, limit, largest, scale, floor, LANES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Narrows the range of sort keys to its part number ``last``. Then copies the range's keys if they are few, or compares all
    pairs of the last few keys.

    Args:
        counts, weights: number and total weight of the tokens whose sort key is >= each element of ``ends``.
        left: the number of tokens that remain to be read, from ``short`` if ``is_short``, else from ``row``.

    Returns:
        ``(low, high, above_count, above_weight, inside, left, is_short)``: the new range, the number and weight of the tokens above
        it, the number of tokens in it, and the updated ``left`` and ``is_short``.
    """
    if last < _PARTS - 1:
        above_count = at_index(counts, last + 1)
        above_weight = at_index(weights, last + 1)
        high = tl.minimum(high, at_index(ends, last + 1) - 1)
    inside = at_index(counts, last) - above_count
    low = at_index(ends, last)
    if (low < high) & (is_short == 0) & (inside <= SHORT):
        # Tighten the range to existing keys. If all keys are equal, as is common for 16-bit logits, the search ends.
        left, low, high = _copy(row, vocab_stride, left, low, high, short, 2 * LANES)
        is_short += 1
    if (low < high) & (is_short != 0) & (inside <= FEW):
        few, low, high = _copy(short, 1, left, low, high, short + SHORT, LANES)
        low, above_count, above_weight, inside = _last_of_few(
            short + SHORT, few, stage, above_count, above_weight, k, limit, largest, scale, floor
        )
        high = low
    return low, high, above_count, above_weight, inside, left, is_short


@triton.jit
def _search(
    row, vocab_stride, short, number, low_key, high_key, first, reach, base_count, base_weight, stage, k, limit,
    largest, scale, floor, LANES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Searches for the cutoff token of one stage (0: top-k, 1: top-p), see `find_cutoff`.

    ``first`` and ``reach`` split the range for the first step: part i begins at logit ``first + i * reach``.

    Returns whether the cutoff is in the range, whether the tokens above the range stay below the limit, the cutoff's key, the
    number and the weight of the tokens above this key, and the number of tokens with this key.
    """
    part = tl.arange(0, _PARTS)
    low = low_key
    high = high_key
    above_count = base_count
    above_weight = base_weight
    inside = low * 0
    # The first step splits the range of logits into equal parts; later steps split the range of sort keys.
    ends = tl.where(part == 0, low, sort_key((first + reach * part.to(tl.float64)).to(tl.float32)).to(tl.int64))
    ends = tl.minimum(tl.maximum(ends, low), high)
    # If the range is a guess, the tokens above the range may reach the limit already.
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
            # No part contains the cutoff: fewer than k tokens have a weight, or the guessed range was wrong.
            found = going * 0
            going = going * 0
        else:
            low, high, above_count, above_weight, inside, left, is_short = _narrow(
                counts, weights, ends, last, row, vocab_stride, short, left, is_short, low, high, above_count, above_weight,
                stage, k, limit, largest, scale, floor, LANES, SHORT,
            )  # fmt: skip
            going = (low < high).to(tl.int32)
            ends = tl.minimum(low + part * (((high - low) >> _PART_BITS) + 1), 0x7FFFFFFF)
    return found, before, low, above_count, above_weight, inside


@triton.jit
def find_cutoff(
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
    """Searches for the cutoff token.

    Args:
        row: pointer to the row's logits, or to `copied` tokens of the row.
        short: int32 [SHORT + FEW], a scratch buffer for copied sort keys.
        number: the number of logits that ``row`` points to.
        low_key, high_key: int64, the range of sort keys to search; both are keys of finite logits. ``row`` has all tokens in this
            range.
        base_count, base_weight: int64, number and weight of the tokens above the range, which are kept.
        total: the weight of all of the row's tokens.
        restricted, k, p: whether top-k is in effect, top-k, and top-p.
        largest, scale, floor: parameters of the row's weights, see `token_weights`.
        complete: whether tokens below low_key have weight 0. Then it does not matter which of them are kept.

    Returns:
        The cutoff token's sort key, int32; the last id kept among the tokens with this key, int32; and whether both are valid. Both
        are invalid if the cutoff lies outside the range. Exception: if the cutoff lies below the range and ``complete`` holds, the
        result is valid and keeps all tokens in the range.
    """
    cutoff_key = low_key
    # Adding zeros makes this a tensor: Triton specialises an argument of 1 to a constant.
    whole = tl.zeros([], tl.int32) + vocab
    cutoff_token = whole
    kept = total
    right = tl.full([], 1, tl.int32)
    first = from_sort_key(low_key.to(tl.int32)).to(tl.float64)
    reach = (from_sort_key(high_key.to(tl.int32)).to(tl.float64) - first) / _PARTS
    # Stage 0 finds the cutoff of top-k, stage 1 that of top-p.
    for stage in range(2):
        if (right != 0) & tl.where(stage == 0, restricted, ~(p >= 1.0)):
            limit = limit_of(p, kept)
            found, before, low, above_count, above_weight, inside = _search(
                row, vocab_stride, short, number, low_key, high_key, first, reach, base_count, base_weight, stage, k, limit,
                largest, scale, floor, LANES, SHORT,
            )  # fmt: skip
            if found != 0:
                weight = token_weights(from_sort_key(low.to(tl.int32)), largest, scale, floor)
                needed = k - above_count
                if stage == 1:
                    needed = _ties_needed(above_weight, weight, inside, limit)
                kept = above_weight + needed * weight
                cutoff_key = low
                cutoff_token = whole
                if needed < inside:
                    cutoff_token = _token_of_tie(row, vocab_stride, number, low.to(tl.int32), needed, vocab, LANES)
            else:
                right = tl.where(before & complete, right, 0)
    return cutoff_key.to(tl.int32), cutoff_token, right
