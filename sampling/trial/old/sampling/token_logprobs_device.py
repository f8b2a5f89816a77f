"""Device code of `token_logprobs`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._online_softmax_device import LN_2, LOG2_E
from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, packed, sort_key, threshold_of, token_of

_NO_KEY = tl.constexpr(-0x80000000)
_NO_PAIR = tl.constexpr(-0x8000000000000000)
# Less than any token's, more than that of a group without tokens.
_LEAST_PAIR = tl.constexpr(-0x7FFFFFFF00000000)
_LARGEST_SCALE = tl.constexpr(3.0e38)


@triton.jit
def _inverse_of(temperature, row):
    """1 / temperature, and 1 where there is none or it cannot be one."""
    inverse = tl.full([], 1.0, tl.float32)
    if temperature is not None:
        warmth = tl.load(temperature + row)
        warm = (warmth > 0.0) & (warmth < float("inf"))
        inverse = tl.where(warm, tl.minimum(1.0 / tl.where(warm, warmth, 1.0), _LARGEST_SCALE), 1.0)
    return inverse


@triton.jit
def _scale_of(inverse):
    """What differences of logits are multiplied by to be powers of 2; finite, so that a difference of 0 stays 0."""
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
    length,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    TOP: tl.constexpr,
):
    """Of a span the largest logit and the sum of exponentials of what the others are less than it, and the best of its groups.

    parts: float32 [rows, spans, 2]. maxima: int64 [rows, spans, BLOCK // RUN], `packed`; a group consists of one run of RUN tokens
    in each block of a span.
    """
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    ids = span * length + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = ids < vocab
    x = tl.load(logits + row * row_stride + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
    key = tl.where(live, sort_key(x), _NO_KEY)
    best = tl.max(key, axis=0)
    largest = from_sort_key(tl.max(best, axis=0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.sum(tl.exp2((x - shift) * _scale_of(_inverse_of(temperature, row))), axis=0), axis=0)
    tl.store(parts + (row * spans + span) * 2, largest)
    tl.store(parts + (row * spans + span) * 2 + 1, total)
    if TOP:
        GROUPS: tl.constexpr = BLOCK // RUN
        pair = tl.max(packed(key, ids), axis=0)
        pair = tl.max(tl.reshape(pair, [GROUPS, RUN]), axis=1)
        tl.store(maxima + (row * spans + span) * GROUPS + tl.arange(0, GROUPS), pair)


@triton.jit
def _given(x, largest, inverse, lse, log_total, NORMALIZE: tl.constexpr):
    """What is given for logits x."""
    given = x * inverse
    if NORMALIZE:
        # Not less lse: that would round large logits.
        known = (x - largest) * inverse - log_total
        given = tl.where(x == float("-inf"), x, tl.where(lse == lse, known, float("nan")))
    return given


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
    capacity,
    token_out,
    token_stride,
    top_out,
    top_row_stride,
    top_place_stride,
    top_tokens_out,
    top_tokens_row_stride,
    top_tokens_place_stride,
    lse_out,
    lse_stride,
    top_k,
    first_token,
    spans,
    length,
    groups,
    most_groups,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    TOP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SPANS: tl.constexpr,
    LANES: tl.constexpr,
):
    """scratch: int64 [rows, capacity]: most_groups groups, then tokens."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    inverse = _inverse_of(temperature, row)
    span = tl.arange(0, SPANS)
    own_largest = tl.load(parts + (row * spans + span) * 2, mask=span < spans, other=float("-inf"))
    totals = tl.load(parts + (row * spans + span) * 2 + 1, mask=span < spans, other=0.0)
    # By keys, as NaN must come out.
    largest = from_sort_key(tl.max(sort_key(own_largest), axis=0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    # A span of -inf has nothing to add, whatever the scale.
    nearness = tl.where(own_largest == float("-inf"), 0.0, tl.exp2((own_largest - shift) * _scale_of(inverse)))
    log_total = tl.log2(tl.sum(totals * nearness, axis=0)) * LN_2
    lse = shift * inverse + log_total
    lse = tl.where(largest < float("inf"), lse, float("nan"))
    tl.store(lse_out + row * lse_stride, lse)

    token = tl.load(tokens + row * tokens_stride).to(tl.int64) - first_token
    inside = (token >= 0) & (token < vocab)
    x = tl.load(logits + tl.where(inside, token, 0) * vocab_stride).to(tl.float32)
    given = tl.where(inside, _given(x, largest, inverse, lse, log_total, NORMALIZE), float("-inf"))
    tl.store(token_out + row * token_stride, given)

    if TOP:
        maxima += row * groups
        scratch += row * capacity
        listed = scratch + most_groups
        lane = tl.arange(0, LANES)
        pairs = tl.full([LANES], _NO_PAIR, tl.int64)
        for start in range(0, groups, LANES):
            pairs = tl.maximum(pairs, tl.load(maxima + start + lane, mask=start + lane < groups, other=_NO_PAIR))
        keys = (pairs >> 32).to(tl.int32)
        live = keys != _NO_KEY
        threshold, number = threshold_of(keys, live, top_k, 0)
        reached = threshold << 32
        if number < top_k:
            # Every group is needed whole.
            reached = tl.full([], _LEAST_PAIR, tl.int64)
        if number > top_k:
            # Some are equal to the threshold: of these, those of the first tokens.
            tied = live & (keys == threshold)
            above = tl.sum((live & (keys > threshold)).to(tl.int32), axis=0)
            nearest, _ = threshold_of(tl.where(tied, (pairs & 0x7FFFFFFF).to(tl.int32), -1), tied, top_k - above, 0)
            reached += nearest

        reaching = tl.zeros([], tl.int32)
        for start in range(0, groups, LANES):
            best = tl.load(maxima + start + lane, mask=start + lane < groups, other=_NO_PAIR)
            reaches = best >= reached
            at = reaching + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
            tl.store(scratch + at, (start + lane).to(tl.int64), mask=reaches)
            reaching += tl.sum(reaches.to(tl.int32), axis=0)
        tl.debug_barrier()  # other threads read what these have stored

        SIZE: tl.constexpr = BLOCKS * RUN
        GROUPS: tl.constexpr = BLOCK // RUN
        count = tl.zeros([], tl.int32)
        for start in range(0, reaching * SIZE, LANES):
            index = start + lane
            group = tl.load(scratch + index // SIZE, mask=index < reaching * SIZE, other=0).to(tl.int32)
            member = index % SIZE
            ids = (group // GROUPS) * length + (member // RUN) * BLOCK + (group % GROUPS) * RUN + member % RUN
            within = (index < reaching * SIZE) & (ids < vocab)
            member_x = tl.load(logits + ids.to(tl.int64) * vocab_stride, mask=within, other=float("-inf")).to(tl.float32)
            member_pair = packed(sort_key(member_x), ids)
            found = within & (member_pair >= reached)
            at = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
            tl.store(listed + at, member_pair, mask=found)
            count += tl.sum(found.to(tl.int32), axis=0)
        tl.debug_barrier()

        # Comparing with all others gives every token's place: no sorting.
        for start in range(0, count, LANES):
            pair = tl.load(listed + start + lane, mask=start + lane < count, other=_NO_PAIR)
            place = tl.zeros([LANES], tl.int32)
            for other in range(count):
                place += (tl.load(listed + other) > pair).to(tl.int32)
            wanted = (start + lane < count) & (place < top_k)
            top = _given(from_sort_key((pair >> 32).to(tl.int32)), largest, inverse, lse, log_total, NORMALIZE)
            tl.store(top_out + row * top_row_stride + place * top_place_stride, top, mask=wanted)
            top_token = (token_of(pair) + first_token).to(tl.int32)
            tl.store(top_tokens_out + row * top_tokens_row_stride + place * top_tokens_place_stride, top_token, mask=wanted)
