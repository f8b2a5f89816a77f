"""Device code of `sample_top_k_top_p`, whose docstring explains the four launches.

* `group_maxima_kernel`: grid (row, span). Reads all logits once.
* `decide_kernel`: grid (row). Reads the group maxima and the logits of a few groups.
* `weigh_kernel`: grid (row, chunks). Reads all logits of undecided rows.
* `finish_kernel`: grid (row). Reads the copied tokens and the chunks' totals of undecided rows.

The launches communicate through the row's *state*, int64 fields that `_state_device` names. Logits are compared as int32 sort keys,
which sort as the logits do. A token's weight is an integer, so sums do not depend on the order of addition.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.sampling._cutoff_device import FEW, copied, find_cutoff, logit_of, number_of
from tokenspeed_kernel.triton.sampling._draw_device import draw_from_row, draw_listed, is_kept, kept_weights
from tokenspeed_kernel.triton.sampling._guess_device import BINS, bins_to_list, end_of, group_counts, ids_of_groups, range_of_cutoff
from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, packed, sort_key, threshold_of
from tokenspeed_kernel.triton.sampling._state_device import COPIED, DECIDED, HIGH, KEPT, LARGEST, LAST, LOW, STATE
from tokenspeed_kernel.triton.sampling._weights_device import (
    floor_of,
    is_drawn,
    lowest_of,
    most_below,
    scale_of,
    token_weights,
    uniform,
)

# The threshold search stops once at most k + k / 2^_SLACK group maxima are >= the threshold.
_SLACK = tl.constexpr(3)
# Tokens are listed until the unlisted tokens weigh at most this fraction of the listed tokens' weight. `bins_to_list` decides this
# from the histogram.
_NEGLIGIBLE = tl.constexpr(2e-3)
# Such a list contains at least this fraction of the row's total weight, with a margin for the rounding to bins.
_OUTWEIGHING = tl.constexpr(0.99)
# Two counts are summed in one int32. One count occupies the bits from this bit on.
_UPPER_BITS = tl.constexpr(16)
_UPPER = tl.constexpr(1 << 16)
_NO_KEY = tl.constexpr(-0x80000000)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def group_maxima_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    maxima,
    spans,
    length,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finds the largest logit of each group of tokens. A group consists of one run of RUN tokens in each block of a span.

    maxima: int32 [rows, spans, BLOCK // RUN], output: the sort keys of the groups' largest logits.
    """
    start(EARLY)
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    best = tl.full([BLOCK], _NO_KEY, tl.int32)
    # Unrolled, so that all loads are in flight together.
    for block in tl.static_range(BLOCKS):
        ids = span * length + block * BLOCK + tl.arange(0, BLOCK)
        live = ids < vocab
        x = tl.load(logits + row * row_stride + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.where(live, sort_key(x), _NO_KEY))
    GROUPS: tl.constexpr = BLOCK // RUN
    best = tl.max(tl.reshape(best, [GROUPS, RUN]), axis=1)
    tl.store(maxima + (row * spans + span) * GROUPS + tl.arange(0, GROUPS), best)


@triton.jit
def _threshold_of(maxima, keys, largest_key, scale, floor, k, vocab, draws, lists, small, TOKENS: tl.constexpr):
    """Returns ``(threshold, counts, lists)``. Tokens whose sort key is >= the threshold are to be listed, if ``lists``. ``lists``
    is false if too many tokens would be listed.

    Args:
        maxima: sort keys of all group maxima. ``keys``: fewer sort keys, each the largest of several groups.
        draws: whether the row's token is drawn at random, and is not the greedy one.
        lists: whether the row's result may come from a list of its largest tokens.
        small: whether k is so small that the group maxima alone give a threshold. Otherwise ``counts`` is the histogram of the
            group maxima.
    """
    threshold = largest_key.to(tl.int64)  # the threshold of a greedy row
    counts = tl.zeros([BINS], tl.int32)
    if draws & lists:
        if small:
            threshold, _ = threshold_of(keys, keys != _NO_KEY, k, k >> _SLACK)
        else:
            largest = from_sort_key(largest_key)
            counts = group_counts(maxima, largest, scale)
            bins, lists = bins_to_list(counts, vocab, TOKENS * 5 // 8, _NEGLIGIBLE, floor)
            threshold = end_of(bins, largest, scale)
    return threshold, counts, lists


@triton.jit
def _list_groups(maxima, threshold, groups, listed, GROUPS: tl.constexpr):
    """Writes to ``listed`` the indices of the groups of tokens whose largest sort key is >= the threshold. Returns the number of
    these groups."""
    group = tl.arange(0, GROUPS)
    reaches = (maxima >= threshold) & (group < groups)
    tl.store(listed + tl.cumsum(reaches.to(tl.int32), axis=0) - 1, group.to(tl.int64), mask=reaches)
    reaching = tl.sum(reaches.to(tl.int32), axis=0)
    tl.debug_barrier()  # the stores must be visible to the program's other threads
    return reaching


@triton.jit
def _list_tokens(
    logits, vocab_stride, vocab, threshold, listed, reaching, length, draws, scratch,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RUN: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Lists, in ``scratch``, the first TOKENS tokens of the listed groups whose sort key is >= the threshold.

    Returns ``(count, first)``: the number of such tokens, which may exceed TOKENS, and for a greedy row the smallest ids that
    each lane has found. For a greedy row the function lists nothing.
    """
    SIZE: tl.constexpr = BLOCKS * RUN
    lane = tl.arange(0, LANES)
    count = tl.zeros([], tl.int32)
    first = tl.full([LANES], _NO_TOKEN, tl.int32)
    for begin in range(0, reaching * SIZE, LANES):
        index = begin + lane
        chosen = tl.load(listed + index // SIZE, mask=index < reaching * SIZE, other=0).to(tl.int32)
        ids = ids_of_groups(index, chosen, length, BLOCK, BLOCKS, RUN)
        live = (index < reaching * SIZE) & (ids < vocab)
        x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
        key = sort_key(x)
        found = live & (key >= threshold)
        if draws:
            position = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
            tl.store(scratch + position, packed(key, ids), mask=found & (position < TOKENS))
            count += tl.sum(found.to(tl.int32), axis=0)
        else:
            first = tl.minimum(first, tl.where(found, ids, _NO_TOKEN))
    return count, first


@triton.jit
def _draw_from_list(
    scratch, count, least, keeps, p, u, largest, scale, floor, FEW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr
):
    """Calls `draw_listed` with the smaller tile size that holds ``count`` tokens: FEW or TOKENS.

    In ``scratch``, the listed tokens precede the drawable tokens.
    """
    drawable = scratch + TOKENS
    if count <= FEW:
        token, decides, last, kept = draw_listed(
            scratch, drawable, count, least, keeps, p, u, largest, scale, floor, FEW, PAIRS // FEW
        )
    else:
        token, decides, last, kept = draw_listed(
            scratch, drawable, count, least, keeps, p, u, largest, scale, floor, TOKENS, PAIRS // TOKENS
        )
    return token, decides, last, kept


@triton.jit
def _decide(
    logits, vocab_stride, vocab, maxima, threshold, groups, length, draws, restricted, k, p, largest_key, scale, floor,
    row, seed, offset, scratch, out,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RUN: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,
    FEW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Lists the tokens whose sort key is >= the threshold. If these tokens suffice to choose the row's token, returns the chosen
    token.

    Returns the token, whether the row is decided, and the values for the fields LAST and KEPT of the row's state.
    """
    largest = from_sort_key(largest_key)
    token = tl.full([], _NO_TOKEN, tl.int64)
    decided = tl.where(draws, 0, 1)
    last, kept = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    listed = scratch + TOKENS
    reaching = _list_groups(maxima, threshold, groups, listed, GROUPS)
    count, first = _list_tokens(
        logits, vocab_stride, vocab, threshold, listed, reaching, length, draws, scratch, BLOCK, BLOCKS, RUN, LANES, TOKENS
    )
    if draws:
        tl.debug_barrier()
        if count <= TOKENS:
            least = most_below(threshold.to(tl.int32), largest, scale, floor)
            keeps = tl.where(restricted, k, vocab).to(tl.int64)
            u = None
            if out is not None:
                u = uniform(tl.load(seed + row), tl.load(offset + row))
            token, decides, last, kept = _draw_from_list(
                scratch, count, least, keeps, p, u, largest, scale, floor, FEW, TOKENS, PAIRS
            )
            decided = decides.to(tl.int32)
    else:
        token = tl.min(first, axis=0).to(tl.int64)
        last = packed(largest_key, tl.min(first, axis=0))
    return token, decided, last, kept


@triton.jit
def _store_state(state, largest_key, decided, low, high, last, kept, RESULT: tl.constexpr):
    """Stores the initial state of a row. With RESULT, the state includes ``last`` and ``kept``."""
    field = tl.arange(0, STATE)
    initial = tl.where(field == LARGEST, largest_key, tl.where(field == DECIDED, decided, 0)).to(tl.int64)
    initial = tl.where(field == LOW, low, tl.where(field == HIGH, high, initial))
    if RESULT:
        initial = tl.where(field == LAST, last, tl.where(field == KEPT, kept, initial))
    tl.store(state + field, initial)


@triton.jit
def decide_kernel(
    logits,
    row_stride, vocab_stride, vocab,
    maxima,
    temperature,
    top_k, top_p,
    seed, offset,
    min_p,
    state,
    scratch,
    out, out_stride,
    rank,
    groups,
    length,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, RUN: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr,
    FEW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
    SAMPLE: tl.constexpr, READ: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Initialises a row's state. Finishes greedy rows, and rows whose result follows from their largest logits.

    For a decided row the kernel writes the token; without ``out``, the cutoff token and the kept weight. The kernel reads only the
    logits of groups whose maximum is >= the threshold. For an undecided row with top-k or top-p, `range_of_cutoff` estimates the
    range of the cutoff token.

    scratch: int64 [rows, TOKENS + max(TOKENS, GROUPS)]: listed tokens, then the groups or the drawable tokens. PAIRS: pairs of
    tokens compared per step.
    """
    start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    scratch += row * (TOKENS + (TOKENS if TOKENS > GROUPS else GROUPS))
    logits += row * row_stride
    group = tl.arange(0, GROUPS)
    largest_of_group = maxima + row * groups
    maxima = tl.load(largest_of_group + group, mask=group < groups, other=_NO_KEY)
    # Replace the maxima of several groups by the largest of them, so that the search reads fewer keys.
    keys = tl.max(tl.reshape(maxima, [GROUPS // LANES, LANES]), axis=0)
    largest_key = tl.max(keys, axis=0)
    largest = from_sort_key(largest_key)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    warmth = tl.load(temperature + row)
    draws = is_drawn(warmth, largest_key)
    restricted = (k > 0) & (k < vocab)
    floor = floor_of(min_p, row)
    limited = restricted | (~(p >= 1.0))
    small = restricted & (k <= TOKENS // 2)
    lists = limited
    if min_p is not None:
        lists |= floor > 0
    scale = scale_of(warmth)
    threshold, counts, lists = _threshold_of(maxima, keys, largest_key, scale, floor, k, vocab, draws, lists, small, TOKENS)

    decided = tl.where(draws, 0, 1)
    token = tl.full([], _NO_TOKEN, tl.int64)
    low, high = tl.full([], 0, tl.int64), tl.full([], -1, tl.int64)
    last, kept = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if (~draws) | lists:
        token, decided, last, kept = _decide(
            logits, vocab_stride, vocab, maxima, threshold, groups, length, draws, restricted, k, p, largest_key, scale, floor,
            row, seed, offset, scratch, out, BLOCK, BLOCKS, RUN, GROUPS, LANES, FEW, TOKENS, PAIRS,
        )  # fmt: skip
    if (decided == 0) & limited:
        # The listed tokens outweigh all others so far that top-p's cutoff token is listed, whatever the others weigh.
        if small | (lists & (~restricted) & (p <= _OUTWEIGHING)):
            # Exclude tokens of weight 0: many may be -inf, and reads beyond the end of a row yield -inf as well.
            low = tl.maximum(threshold, sort_key(lowest_of(largest, scale).to(tl.float32)).to(tl.int64))
            high = largest_key.to(tl.int64)
        else:
            low, high = range_of_cutoff(
                logits, vocab_stride, vocab, largest_of_group, counts, groups, length, restricted, k, p, rank, largest_key, scale,
                floor, BLOCK, BLOCKS, RUN, SAMPLE, READ,
            )  # fmt: skip
    if out is not None:  # noqa: SIM102 (this is known at compile time)
        if decided != 0:
            tl.store(out + row * out_stride, token)
    _store_state(state + row * STATE, largest_key, decided, low, high, last, kept, out is None)


# ``vocab`` is not specialised: for a constant vocabulary of 1, Triton 3.9 generates wrong code. That code overwrites registers
# before an atomic's result has arrived in them. The gfx950 emulator rejects this code.
@triton.jit(do_not_specialize=["vocab", "together"])
def weigh_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    min_p,
    state,
    totals,
    above,
    segments,
    pairs,
    chunks,
    together,
    programs,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sums the weights of each chunk of CHUNK tokens, and copies the tokens in the expected range of the cutoff token.

    Decided rows are skipped. A program processes ``together`` consecutive chunks of a row.

    totals: int64 [rows, chunks], the total weight of each chunk. above: int64 [rows, chunks], the weight of each chunk's tokens
    above the range.
    segments: int32 [rows, chunks, 3]: the start of a chunk's copied tokens, their number, and the number of tokens above the range.
    pairs: int64 [rows, vocab], the `copied` tokens. ALIGNED: whether rows begin and end at multiples of 16 tokens.
    """
    start(EARLY)
    row = (tl.program_id(0) // programs).to(tl.int64)
    begin = (tl.program_id(0) % programs) * together
    state += row * STATE
    if tl.load(state + DECIDED) == 0:
        largest = from_sort_key(tl.load(state + LARGEST).to(tl.int32))
        low = tl.load(state + LOW).to(tl.int32)
        high = tl.load(state + HIGH).to(tl.int32)
        scale = scale_of(tl.load(temperature + row))
        floor = floor_of(min_p, row)
        logits += row * row_stride
        if ALIGNED:
            # This changes no value, but tells the compiler that a mask is the same for all neighbouring tokens that a
            # thread loads. So the compiler vectorises loads.
            vocab = vocab // 16 * 16
        # Each row of the tile holds WIDE neighbouring tokens of one thread. So counting within a row needs no other thread.
        WIDE: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
        lane = tl.arange(0, CHUNK // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        # Positions beyond the end hold -inf and so have weight 0.
        ids = begin * CHUNK + lane
        following = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=ids < vocab, other=float("-inf"))
        for chunk in range(begin, tl.minimum(begin + together, chunks)):
            x = following.to(tl.float32)
            ids = chunk * CHUNK + lane
            # Prefetch the next chunk while the weights of this chunk are computed.
            after = ids + CHUNK
            following = tl.load(logits + after.to(tl.int64) * vocab_stride, mask=after < vocab, other=float("-inf"))
            weight = token_weights(x, largest, scale, floor)
            tl.store(totals + row * chunks + chunk, tl.sum(tl.sum(weight, axis=1), axis=0))
            if low <= high:
                # Logits can be compared directly: a row with NaN has been decided already, and the range has finite ends.
                upper = x > from_sort_key(high)
                found = (x >= from_sort_key(low)) & (~upper)
                counted = tl.where(found, 1, tl.where(upper, _UPPER, 0))
                of_thread = tl.sum(counted, axis=1)
                counts = tl.sum(of_thread, axis=0)
                number = counts & (_UPPER - 1)
                first = tl.atomic_add(state + COPIED, number.to(tl.int64), sem="relaxed").to(tl.int32)
                segment = segments + (row * chunks + chunk) * 3
                tl.store(segment, first)
                tl.store(segment + 1, number)
                tl.store(segment + 2, counts >> _UPPER_BITS)
                tl.store(above + row * chunks + chunk, tl.sum(tl.sum(tl.where(upper, weight, 0), axis=1), axis=0))
                before = tl.cumsum(of_thread, axis=0) - of_thread
                position = ((before[:, None] + tl.cumsum(counted, axis=1)) & (_UPPER - 1)) - 1
                tl.store(pairs + row * vocab + first + position, copied(x, ids), mask=found)


@triton.jit
def _sum_kept_copies(
    pairs, segments, above, totals, chunks, largest, scale, floor, cutoff_key, cutoff_token, SOME: tl.constexpr, SLOTS: tl.constexpr
):
    """Stores to ``totals`` the kept weight of each chunk: the weight of its tokens above the range and of its kept copied
    tokens.
    """
    for begin in range(0, chunks, SOME):
        some = begin + tl.arange(0, SOME)
        inside = some < chunks
        first = tl.load(segments + some * 3, mask=inside, other=0)
        copies = tl.load(segments + some * 3 + 1, mask=inside, other=0)
        kept = tl.load(above + some, mask=inside, other=0)
        most = tl.max(copies, axis=0)
        for slot in range(0, most, SLOTS):
            index = slot + tl.arange(0, SLOTS)
            mine = index[None, :] < copies[:, None]
            pair = tl.load(pairs + first[:, None] + index[None, :], mask=mine, other=0)
            x = logit_of(pair)
            weight = token_weights(x, largest, scale, floor)
            is_in = mine & is_kept(sort_key(x), number_of(pair), cutoff_key, cutoff_token)
            kept += tl.sum(tl.where(is_in, weight, 0), axis=1)
        tl.store(totals + some, kept, mask=inside)


@triton.jit
def _sum_kept(logits, vocab_stride, vocab, totals, chunks, largest, scale, floor, cutoff_key, cutoff_token, CHUNK: tl.constexpr):
    """Stores to ``totals`` the kept weight of each chunk, computed from all logits of the row."""
    for one in range(chunks):
        ids = one * CHUNK + tl.arange(0, CHUNK)
        weight = kept_weights(logits, vocab_stride, vocab, ids, largest, scale, floor, cutoff_key, cutoff_token)
        tl.store(totals + one, tl.sum(weight, axis=0))


@triton.jit
def _cutoff_of(
    logits, vocab_stride, vocab, state, totals, above, segments, pairs, short, chunks, restricted, k, p,
    largest_key, scale, floor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr, SOME: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Finds a row's cutoff token, and replaces each chunk's weight by its kept weight. Returns the token's sort key and id."""
    largest = from_sort_key(largest_key)
    cutoff_key = tl.full([], _NO_KEY, tl.int32)
    cutoff_token = tl.zeros([], tl.int32)
    low = tl.load(state + LOW)
    high = tl.load(state + HIGH)
    chunk = tl.arange(0, CHUNKS)
    live = chunk < chunks
    total = tl.sum(tl.load(totals + chunk, mask=live, other=0), axis=0)
    number = tl.load(state + COPIED).to(tl.int32)
    lowest_key = sort_key(lowest_of(largest, scale).to(tl.float32)).to(tl.int64)
    right = tl.zeros([], tl.int32)
    if low <= high:
        base_weight = tl.sum(tl.load(above + chunk, mask=live, other=0), axis=0)
        base_count = tl.sum(tl.load(segments + chunk * 3 + 2, mask=live, other=0).to(tl.int64), axis=0)
        cutoff_key, cutoff_token, right = find_cutoff(
            pairs, 1, vocab, short, number, low, high, base_count, base_weight, total, restricted, k, p, largest,
            scale, floor, low <= lowest_key, LANES, SHORT,
        )  # fmt: skip
    if right != 0:
        _sum_kept_copies(pairs, segments, above, totals, chunks, largest, scale, floor, cutoff_key, cutoff_token, SOME, SLOTS)
    else:
        none = total * 0
        whole = tl.zeros([], tl.int32) + vocab
        cutoff_key, cutoff_token, right = find_cutoff(
            logits, vocab_stride, vocab, short, whole, lowest_key, largest_key.to(tl.int64), none, none, total,
            restricted, k, p, largest, scale, floor, restricted | True, LANES, SHORT,
        )  # fmt: skip
        _sum_kept(logits, vocab_stride, vocab, totals, chunks, largest, scale, floor, cutoff_key, cutoff_token, CHUNK)
    tl.debug_barrier()  # the stores must be visible to all threads of the program
    return cutoff_key, cutoff_token


# Values that depend on the row length are not specialised. So fewer variants are compiled.
@triton.jit(do_not_specialize=["vocab", "chunks"])
def finish_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    top_k,
    top_p,
    seed,
    offset,
    min_p,
    state,
    totals,
    above,
    segments,
    pairs,
    short,
    out,
    out_stride,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    SHORT: tl.constexpr,
    SOME: tl.constexpr,
    SLOTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finishes undecided rows: writes the drawn token, or without ``out`` the cutoff token and the kept weight.

    With top-k or top-p, the cutoff token is searched for among the copied tokens. If the guess was wrong, no copied token is the
    cutoff token, and the whole row is searched. Then the kept weight of each chunk of CHUNK tokens is summed, and the token is
    drawn.

    short: int32 [rows, SHORT + FEW], scratch of `find_cutoff`. SOME, SLOTS: how many chunks' copied tokens are summed together, and
    how many copied tokens of each chunk per step.
    """
    start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    if tl.load(state + DECIDED) == 0:
        logits += row * row_stride
        totals += row * chunks
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        restricted = (k > 0) & (k < vocab)
        largest_key = tl.load(state + LARGEST).to(tl.int32)
        largest = from_sort_key(largest_key)
        scale = scale_of(tl.load(temperature + row))
        floor = floor_of(min_p, row)
        cutoff_key = tl.full([], _NO_KEY, tl.int32)
        cutoff_token = tl.zeros([], tl.int32)
        if restricted | (~(p >= 1.0)):
            cutoff_key, cutoff_token = _cutoff_of(
                logits, vocab_stride, vocab, state, totals, above + row * chunks, segments + row * chunks * 3, pairs + row * vocab,
                short + row * (SHORT + FEW), chunks, restricted, k, p, largest_key, scale, floor,
                CHUNK, CHUNKS, LANES, SHORT, SOME, SLOTS,
            )  # fmt: skip
        if out is not None:
            u = uniform(tl.load(seed + row), tl.load(offset + row))
            token = draw_from_row(
                logits, vocab_stride, vocab, totals, chunks, u, largest, scale, floor, cutoff_key, cutoff_token, CHUNK, CHUNKS
            )
            tl.store(out + row * out_stride, token)
        else:
            each = tl.arange(0, CHUNKS)
            tl.store(state + LAST, packed(cutoff_key, cutoff_token))
            tl.store(state + KEPT, tl.sum(tl.load(totals + each, mask=each < chunks, other=0), axis=0))
