"""Device code of `sample_top_k_top_p`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, packed, sort_key, threshold_of, token_of
from tokenspeed_kernel.triton.sampling._state_device import CANDIDATES, DECIDED, LARGEST, LEAST, STATE, THRESHOLD, TOTAL
from tokenspeed_kernel.triton.sampling._weights_device import (
    floor_of,
    is_drawn,
    limit_of,
    scale_of,
    target_of,
    token_weights,
    uniform,
)

# The threshold is good enough if 2^-this too many maxima reach it.
_SLACK = tl.constexpr(3)
_NO_KEY = tl.constexpr(-0x80000000)
_KEY_OF_INFINITY = tl.constexpr(0x7F800000)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_NO_PAIR = tl.constexpr(-0x8000000000000000)


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
):
    """maxima: int32 [rows, spans, BLOCK // RUN], sort keys. A group consists of one run of RUN tokens in each block of a span."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    best = tl.full([BLOCK], _NO_KEY, tl.int32)
    # Unrolled, so that all loads are in flight at once.
    for block in tl.static_range(BLOCKS):
        ids = span * length + block * BLOCK + tl.arange(0, BLOCK)
        live = ids < vocab
        x = tl.load(logits + row * row_stride + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.where(live, sort_key(x), _NO_KEY))
    GROUPS: tl.constexpr = BLOCK // RUN
    best = tl.max(tl.reshape(best, [GROUPS, RUN]), axis=1)
    tl.store(maxima + (row * spans + span) * GROUPS + tl.arange(0, GROUPS), best)


@triton.jit
def decide_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    maxima,
    temperature,
    top_k,
    top_p,
    seed,
    offset,
    min_p,
    state,
    scratch,
    capacity,
    out,
    out_stride,
    rank,
    groups,
    length,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Sets up a row's state, and writes the token of a row that is greedy or is restricted to few tokens.

    Only groups whose largest logit reaches the threshold are read. scratch: int64 [rows, capacity], at least as many as groups and
    2 * TOKENS: the groups, then tokens and their weights.
    """
    row = tl.program_id(0).to(tl.int64)
    maxima += row * groups
    scratch += row * capacity
    logits += row * row_stride
    lane = tl.arange(0, LANES)
    keys = tl.full([LANES], _NO_KEY, tl.int32)
    for start in range(0, groups, LANES):
        keys = tl.maximum(keys, tl.load(maxima + start + lane, mask=start + lane < groups, other=_NO_KEY))
    largest = tl.max(keys, axis=0)
    k = tl.load(top_k + row)
    warmth = tl.load(temperature + row)
    draws = is_drawn(warmth, largest)
    restricted = (k > 0) & (k < vocab)
    floor = floor_of(min_p, row)
    wanted = tl.where(restricted & (k < rank), k, rank)
    if min_p is not None:
        # Most rows that min-p restricts keep fewer.
        wanted = tl.where((floor > 0) & (wanted > TOKENS // 4), TOKENS // 4, wanted)
    wanted = tl.where(draws, wanted, 1)
    # The search ends once few maxima reach the threshold; a greedy row's has to be the largest logit itself.
    threshold, _ = threshold_of(keys, lane < groups, wanted, wanted >> _SLACK)
    threshold = tl.where(draws, threshold, largest.to(tl.int64))

    decided = tl.where(draws, 0, 1)
    token = tl.full([], _NO_TOKEN, tl.int32)
    # As many groups of a few more tokens would not fit the list of tokens.
    if (~draws) | (wanted <= TOKENS // 2):
        reaching = tl.zeros([], tl.int32)
        for start in range(0, groups, LANES):
            here = tl.load(maxima + start + lane, mask=start + lane < groups, other=_NO_KEY)
            reaches = (here >= threshold) & (start + lane < groups)
            place = reaching + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
            tl.store(scratch + capacity - groups + place, (start + lane).to(tl.int64), mask=reaches)
            reaching += tl.sum(reaches.to(tl.int32), axis=0)
        tl.debug_barrier()

        GROUP: tl.constexpr = BLOCKS * RUN
        GROUPS: tl.constexpr = BLOCK // RUN
        count = tl.zeros([], tl.int32)
        first = tl.full([LANES], _NO_TOKEN, tl.int32)
        for start in range(0, reaching * GROUP, LANES):
            index = start + lane
            group = tl.load(scratch + capacity - groups + index // GROUP, mask=index < reaching * GROUP, other=0).to(tl.int32)
            member = index % GROUP
            ids = (group // GROUPS) * length + (member // RUN) * BLOCK + (group % GROUPS) * RUN + member % RUN
            live = (index < reaching * GROUP) & (ids < vocab)
            x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
            key = sort_key(x)
            found = live & (key >= threshold)
            first = tl.minimum(first, tl.where(found, ids, _NO_TOKEN))
            if draws:
                place = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
                tl.store(scratch + place, packed(key, ids), mask=found & (place < TOKENS))
                count += tl.sum(found.to(tl.int32), axis=0)
        token = tl.min(first, axis=0)

        if draws & (count <= TOKENS):
            tl.debug_barrier()
            largest_logit = from_sort_key(largest).to(tl.float64)
            scale = scale_of(warmth)
            # Tokens below the threshold weigh nothing if, give or take the rounding, one at the threshold is below min-p's floor.
            at_threshold = token_weights(from_sort_key(threshold.to(tl.int32)), largest_logit, scale, 0)
            complete = (restricted & (count >= k)) | (at_threshold + 2 < floor)
            if complete:
                own = tl.arange(0, TOKENS)
                pair = tl.load(scratch + own, mask=own < count, other=_NO_PAIR)
                x = from_sort_key((pair >> 32).to(tl.int32))
                weight = token_weights(tl.where(own < count, x, float("-inf")), largest_logit, scale, floor)
                tl.store(scratch + TOKENS + own, weight)
                tl.debug_barrier()
                # Comparing all pairs gives every token's rank and the weight before it: no sorting.
                above_count = tl.zeros([TOKENS, PAIRED], tl.int32)
                above_weight = tl.zeros([TOKENS, PAIRED], tl.int64)
                for start in range(0, count, PAIRED):
                    other = start + tl.arange(0, PAIRED)
                    other_pair = tl.load(scratch + other, mask=other < count, other=_NO_PAIR)
                    other_weight = tl.load(scratch + TOKENS + other, mask=other < count, other=0)
                    above = other_pair[None, :] > pair[:, None]
                    above_count += above.to(tl.int32)
                    above_weight += tl.where(above, other_weight[None, :], 0)
                position = tl.sum(above_count, axis=1)
                before = tl.sum(above_weight, axis=1)
                p = tl.load(top_p + row)
                kept = (own < count) & ((position < k) | (~restricted))
                total = tl.sum(tl.where(kept, weight, 0), axis=0)
                limit = tl.where(p >= 1.0, float("inf"), limit_of(p, total))
                kept = kept & ((before.to(tl.float64) < limit) | (position == 0))
                total = tl.sum(tl.where(kept, weight, 0), axis=0)
                target = target_of(uniform(tl.load(seed + row), tl.load(offset + row)), total)
                drawn = kept & (before <= target) & (before + weight > target)
                token = tl.sum(tl.where(drawn, token_of(pair), 0), axis=0).to(tl.int32)
                decided = tl.full([], 1, tl.int32)
    if decided != 0:
        tl.store(out + row * out_stride, token)

    field = tl.arange(0, STATE)
    initial = tl.where(field == LARGEST, largest, tl.where(field == LEAST, _KEY_OF_INFINITY, 0)).to(tl.int64)
    initial = tl.where(field == THRESHOLD, threshold, tl.where(field == DECIDED, decided, initial))
    tl.store(state + row * STATE + field, initial)


# A vocabulary of one token would become a constant, for which Triton 3.9 makes code that the gfx950 emulator refuses: it writes
# registers before the result of an atomic operation has come into them.
@triton.jit(do_not_specialize=["vocab"])
def candidates_kernel(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    top_k,
    min_p,
    state,
    candidates,
    spans,
    length,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Lists the tokens at or above the threshold in any order, as int64: sort key above token. Decided rows take no part."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    if tl.load(state + row * STATE + DECIDED) == 0:
        largest_logit = from_sort_key(tl.load(state + row * STATE + LARGEST).to(tl.int32)).to(tl.float64)
        threshold = tl.load(state + row * STATE + THRESHOLD).to(tl.int32)
        k = tl.load(top_k + row)
        sums = (k <= 0) | (k >= vocab)
        scale = scale_of(tl.load(temperature + row))
        floor = floor_of(min_p, row)
        end = tl.minimum(vocab, (span + 1) * length)
        total = tl.zeros([BLOCK], tl.int64)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        counter = state + row * STATE + CANDIDATES + tl.zeros([BLOCK], tl.int32)
        one = tl.full([BLOCK], 1, tl.int64)
        for start in tl.range(span * length, end, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            live = ids < end
            offsets = ids.to(tl.int64) * vocab_stride
            x = tl.load(logits + row * row_stride + offsets, mask=live, other=float("-inf")).to(tl.float32)
            if sums:
                # Beyond the end are weights of -inf, which are 0.
                total += token_weights(x, largest_logit, scale, floor)
            key = sort_key(x)
            found = live & (key >= threshold)
            least = tl.minimum(least, tl.where(x == float("-inf"), float("inf"), x))
            # Few ask for a place, so that it costs little to do so one by one.
            place = tl.atomic_add(counter, one, mask=found, sem="relaxed")
            listed = (key.to(tl.int64) << 32) | ids.to(tl.int64)
            tl.store(candidates + row * CAPACITY + place, listed, mask=found & (place < CAPACITY))
        tl.atomic_min(state + row * STATE + LEAST, sort_key(tl.min(least, axis=0)).to(tl.int64), sem="relaxed")
        if sums:
            tl.atomic_add(state + row * STATE + TOTAL, tl.sum(total, axis=0), sem="relaxed")
