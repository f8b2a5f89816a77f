"""Device code of `top_k_indices`.

The *threshold* is the smallest chosen score. *Ties* are scores equal to the threshold; they are chosen in order of position. The
code compares int32 *sort keys*, which sort as the scores do, see `sort_key`. A row is split into *spans*, and each span has a
*list* of its large scores. A list entry is an int64: the bits of the float32 score in the upper half, its position in the row in
the lower half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._top_k_search_device import HIDDEN, NO_KEY, keys_at, search_row, wanted_key
from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key

COUNTS = tl.constexpr(3)
"""Number of int32 values stored with a list: the number of scores above a sort key, the number equal to it, and the sort key."""

_INFINITE = tl.constexpr(0x7F800000)  # the sort key of inf
_FEW_ALIKE = tl.constexpr(2)  # if more scores of a sample than this equal the bound, ties are counted separately


@triton.jit
def _length_of(lengths, row, keys):
    """Returns the number of valid scores of a row: its entry of ``lengths``, clamped to 0 to ``keys``; ``keys`` without lengths."""
    length = keys
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + row), 0), keys)
    return length


@triton.jit
def _bound(scores, length, key_stride, top_k, SEARCH: tl.constexpr):
    """Computes a lower bound of the sort keys to list. Very likely, at least top_k scores of the row are >= the bound, and few
    more.

    For a row of at most SEARCH.lanes scores, all scores above -inf are >= the bound. The row is split into many equal parts, and
    the sample takes one score of each part, at a pseudo-random position. So a regular pattern in the row does not bias the sample.

    Returns:
        The bound's sort key, int32, at most that of infinity; and whether more than _FEW_ALIKE scores of the sample equal the
        bound.
    """
    SAMPLE: tl.constexpr = SEARCH.sample
    key = length * 0 + HIDDEN + 1
    alike = length * 0
    if length > SEARCH.lanes:
        part = (length + SAMPLE - 1) // SAMPLE
        lane = tl.arange(0, SAMPLE)
        mixed = lane * 0x5851F42D
        chance = (((mixed ^ (mixed >> 15)) * 0x2C9277B5) >> 16) & 0xFFFF
        at = lane * part + ((chance.to(tl.int64) * part) >> 16).to(tl.int32)
        keys = keys_at(scores, at, length, key_stride)
        rank = top_k.to(tl.float32) / part.to(tl.float32)
        margin = SEARCH.deviations * tl.sqrt(rank)
        wanted = (rank + margin).to(tl.int32) + 2
        if wanted <= tl.sum((keys > HIDDEN).to(tl.int32), axis=0):
            key = wanted_key(keys, key.to(tl.int64), wanted, (margin * 0.125).to(tl.int32)).to(tl.int32)
            key = tl.minimum(key, _INFINITE)
            alike = tl.sum((keys == key).to(tl.int32), axis=0)
    return key, alike > _FEW_ALIKE


@triton.jit
def _scores_at(scores, first, length, key_stride, SEARCH: tl.constexpr, WHOLE: tl.constexpr):
    """Loads a block of a row's scores, float32 ``[SEARCH.block / SEARCH.run, SEARCH.run]``; -inf beyond ``length``.

    Also returns the scores' positions in the row.

    A thread holds a run of scores, so that threads exchange only sums of runs. ``WHOLE``: the whole block is within the length.
    """
    RUN: tl.constexpr = SEARCH.run
    at = first + tl.arange(0, SEARCH.block // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    if WHOLE:
        x = tl.load(scores + at.to(tl.int64) * key_stride)
    else:
        x = tl.load(scores + at.to(tl.int64) * key_stride, mask=at < length, other=-float("inf"))
    return x.to(tl.float32), at


@triton.jit
def _sums_before(numbers):
    """Returns the exclusive prefix sum of a 2-D tile in row-major order, and the tile's total."""
    of_runs = tl.sum(numbers, axis=1)
    return (tl.cumsum(of_runs, axis=0) - of_runs)[:, None] + tl.cumsum(numbers, axis=1) - numbers, tl.sum(of_runs, axis=0)


@triton.jit
def _store_entries(entries, location, x, at, listed):
    tl.store(entries + location, (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at.to(tl.int64), mask=listed)


@triton.jit
def _list_block(scores, first, length, key_stride, bound, listed, entries, SEARCH: tl.constexpr, WHOLE: tl.constexpr):
    """Appends the scores of a block that are >= ``bound`` (float32), or NaN, to the list. Returns the new number of listed
    scores.
    """
    x, at = _scores_at(scores, first, length, key_stride, SEARCH, WHOLE)
    reaching = (x >= bound) | (x != x)
    before, number = _sums_before(reaching.to(tl.int32))
    location = listed + before
    _store_entries(entries, location, x, at, reaching & (location < SEARCH.segment))
    return listed + number


@triton.jit
def _list_span(scores, length, key_stride, top_k, span, entries, counts, SEARCH: tl.constexpr):
    """Lists, in order of position, the scores of a span whose sort key is above ``key``, and up to top_k scores whose sort key
    equals ``key``.

    ``key`` is the sort key of the bound, see `_bound`. If at most _FEW_ALIKE scores of the sample equal the bound, ``key`` is one
    less. Then all scores >= the bound are listed, and scores equal to ``key`` are neither listed nor counted.

    Args:
        entries: int64 ``[SEARCH.segment]``. Entries that do not fit are only counted.
        counts: int32 ``[COUNTS]``, written: the number of scores above ``key``, the number equal to ``key``, and ``key``.
    """
    BLOCK: tl.constexpr = SEARCH.block
    key, alike = _bound(scores, length, key_stride, top_k, SEARCH)
    bound = from_sort_key(key)
    each = (length + SEARCH.spans - 1) // SEARCH.spans
    each = (each + BLOCK - 1) // BLOCK * BLOCK
    begin = span * each
    end = tl.minimum(begin + each, length)
    above = length * 0
    equal = length * 0
    if alike:
        for first in range(begin, end, BLOCK):
            x, at = _scores_at(scores, first, length, key_stride, SEARCH, False)
            larger = (x > bound) | (x != x)
            ties = x == bound
            # Both counts are packed into one int32, because each is below 2^15.
            before, total = _sums_before((larger.to(tl.int32) << 16) | ties.to(tl.int32))
            rank = equal + (before & 0xFFFF)
            location = above + (before >> 16) + tl.minimum(rank, top_k)
            _store_entries(entries, location, x, at, (larger | (ties & (rank < top_k))) & (location < SEARCH.segment))
            above += total >> 16
            equal += total & 0xFFFF
    else:
        key -= 1
        last = begin + tl.maximum(end - begin, 0) // BLOCK * BLOCK
        for first in tl.range(begin, last, BLOCK, num_stages=SEARCH.stages):
            above = _list_block(scores, first, length, key_stride, bound, above, entries, SEARCH, True)
        if last < end:
            above = _list_block(scores, last, length, key_stride, bound, above, entries, SEARCH, False)
    tl.store(counts, above)
    tl.store(counts + 1, equal)
    tl.store(counts + 2, key)


@triton.jit
def _entries_at(entries, counts, lane, listed, top_k, SEARCH: tl.constexpr):
    """Loads entries ``lane`` of a row's lists, indexed as if they were one list.

    Returns the entries' sort keys and their scores' positions in the row, both int32. The key is `NO_KEY` beyond the last entry.
    """
    location = lane
    begin = listed * 0
    for _ in range(SEARCH.spans - 1):
        number = tl.load(counts) + tl.minimum(tl.load(counts + 1), top_k)
        begin += number
        location += tl.where(lane >= begin, SEARCH.segment - number, 0)
        counts += COUNTS
    entry = tl.load(entries + location, mask=lane < listed, other=0)
    x = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(lane < listed, sort_key(x), NO_KEY), (entry & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _write_chosen(keys, at, threshold, ties, larger_before, equal_before, out, out_stride):
    """Writes to ``out`` the positions of keys above the threshold, and of the first ``ties`` keys equal to the threshold.

    Returns the running counts of both kinds, over all calls for the row.
    """
    larger = keys > threshold
    equal = keys == threshold
    # Both counts are packed into one int32, because each is below 2^15.
    both = (larger.to(tl.int32) << 16) | equal.to(tl.int32)
    before = tl.cumsum(both, axis=0) - both
    rank = equal_before + (before & 0xFFFF)
    location = larger_before + (before >> 16) + tl.minimum(rank, ties)
    tl.store(out + location * out_stride, at, mask=larger | (equal & (rank < ties)))
    total = tl.sum(both, axis=0)
    return larger_before + (total >> 16), equal_before + (total & 0xFFFF)


@triton.jit(do_not_specialize=["keys", "top_k"])
def list_scores_kernel(
    scores,
    lengths,
    entries,  # int64 [rows, SEARCH.spans, SEARCH.segment]
    counts,  # int32 [rows, SEARCH.spans, COUNTS]
    row_stride,
    key_stride,
    keys,
    top_k,
    SEARCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Lists the large scores of one span of a row, see `_list_span`."""
    start(EARLY)
    row = (tl.program_id(0) // SEARCH.spans).to(tl.int64)
    entries += tl.program_id(0).to(tl.int64) * SEARCH.segment
    counts += tl.program_id(0) * COUNTS
    length = _length_of(lengths, row, keys)
    _list_span(scores + row * row_stride, length, key_stride, top_k, tl.program_id(0) % SEARCH.spans, entries, counts, SEARCH)


@triton.jit(do_not_specialize=["keys", "top_k"])
def top_k_indices_kernel(
    scores,
    lengths,
    entries,
    counts,
    out,
    row_stride,
    key_stride,
    entries_stride,
    out_row_stride,
    out_stride,
    keys,
    top_k,
    SEARCH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finds the top-k positions of one row.

    The scores come from the lists of `list_scores_kernel` (SPANS > 1), from a list that this program makes (SPANS = 1), or from the
    row itself (SPANS = 0).
    """
    start(EARLY)
    LANES: tl.constexpr = SEARCH.lanes
    FEWER: tl.constexpr = SEARCH.lanes // 4  # for loops where registers matter more than speed
    SPANS: tl.constexpr = SEARCH.spans
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    few = tl.arange(0, FEWER)
    scores += row * row_stride
    entries += row * entries_stride
    out += row * out_row_stride
    length = _length_of(lengths, row, keys)
    if SPANS == 0:
        listed = length
        least = length * 0 + HIDDEN
        above = length * 0
        equal = length * 0
        whole = length <= LANES
    else:
        counts += row * (SPANS * COUNTS)
        if SPANS == 1:
            _list_span(scores, length, key_stride, top_k, 0, entries, counts, SEARCH)
            tl.debug_barrier()  # make the stores visible to the other threads
        span = tl.arange(0, SPANS)
        above_each = tl.load(counts + span * COUNTS)
        equal_each = tl.load(counts + span * COUNTS + 1)
        least = tl.load(counts + 2)
        listed = tl.sum(above_each + tl.minimum(equal_each, top_k), axis=0)
        above = tl.sum(above_each, axis=0)
        equal = tl.sum(equal_each, axis=0)
        # `least` is the sort key that the lists share. If fewer than top_k scores are above it, no list overflows: a list has fewer
        # than top_k such scores, and at most top_k scores equal to it.
        whole = ((above < top_k) & ((above + equal >= top_k) | (least <= HIDDEN + 1))) | ((above >= top_k) & (listed <= LANES))

    larger = length * 0
    if whole:
        if SPANS == 0:
            found = keys_at(scores, lane, length, key_stride)
            at = lane
            above = tl.sum((found > least).to(tl.int32), axis=0)
        else:
            found, at = _entries_at(entries, counts, lane, listed, top_k, SEARCH)
        threshold = least.to(tl.int64)
        ties = tl.minimum(equal, tl.maximum(top_k - above, 0))
        if above > top_k:
            threshold = wanted_key(found, threshold + 1, top_k, 0)
            ties = top_k - tl.sum((found > threshold).to(tl.int32), axis=0)
        larger, equal = _write_chosen(found, at, threshold, ties, larger, larger, out, out_stride)
        for first in range(LANES, listed, FEWER):
            rest, rest_at = _entries_at(entries, counts, first + few, listed, top_k, SEARCH)
            larger, equal = _write_chosen(rest, rest_at, threshold, ties, larger, equal, out, out_stride)
    else:
        threshold, ties = search_row(scores, length, key_stride, top_k, entries, SEARCH)
        equal = length * 0
        for first in range(0, length, FEWER):
            rest = keys_at(scores, first + few, length, key_stride)
            larger, equal = _write_chosen(rest, first + few, threshold, ties, larger, equal, out, out_stride)
    written = larger + tl.minimum(equal, ties)
    for first in range(0, top_k, FEWER):
        location = first + few
        tl.store(out + location * out_stride, tl.full([FEWER], -1, tl.int32), mask=(location >= written) & (location < top_k))
