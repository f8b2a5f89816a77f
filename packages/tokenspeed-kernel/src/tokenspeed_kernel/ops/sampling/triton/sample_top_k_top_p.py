"""Sampling without sorting rows: the few largest logits decide nearly always, and the exact sum of all weights.

What is drawn depends on three places in a row's order: the last token of top-k, the last of top-p, and the drawn one. Each is
the first at which a sum along the order, of tokens or of their weights, crosses a bound, and each bound needs the place before
it. Sums of integers are exact in any order of addition.

1. `_group_maxima` cuts a row into groups and takes the largest logit of each.
2. `_threshold` takes the k-th largest of those: at least k of the row's logits are at or above it, and seldom many more.
3. `_candidates` lists the tokens at or above it and, where top-k does not rule the rest out, sums the weights of all.
4. `_order` puts these in order, and `_choose` finds the three places, if all of them lie there.
5. The kernels of `_levels` serve the rows where they do not: flat distributions, mostly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.ops.sampling.triton._levels import collect, narrow, sum_levels
from tokenspeed_kernel.ops.sampling.triton._rows import Spans, from_sort_key, sort_key, spans_of
from tokenspeed_kernel.ops.sampling.triton._state import (
    CANDIDATES,
    FIRST,
    LARGEST,
    LEAST,
    PENDING,
    STATE,
    THRESHOLD,
    TOTAL,
)
from tokenspeed_kernel.ops.sampling.triton._weights import is_drawn, limit_of, scale_of, target_of, uniform, weigh
from tokenspeed_kernel.ops.triton_common import for_architecture

_PARTS = tl.constexpr(16)
_PART_BITS = tl.constexpr(4)
# The threshold is good enough if 2^-this too many maxima reach it.
_SLACK = tl.constexpr(3)
_NO_KEY = tl.constexpr(-0x80000000)
_NO_CANDIDATE = tl.constexpr(-0x8000000000000000)
_KEY_OF_INFINITY = tl.constexpr(0x7F800000)
_KEY_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class Tiles:
    """Sizes of blocks.

    Attributes:
        groups: of a row, at most; a power of two.
        group_block: tokens that `_group_maxima` takes at a time.
        threshold_warps: of `_threshold`.
        rank: the group maximum that is the threshold where top-k gives none; the largest top-k that candidates can serve.
        capacity: candidates of a row, a power of two, well above rank: groups may hold several.
        order_chunk, order_others: candidates that `_order` compares with each other at a time.
        list_block, list_warps: of `_candidates` and `collect`.
        lanes, unroll: of `sum_levels`: threads, and tokens that each has in flight.
        choose_warps: of `_choose`.
        narrow_lanes: threads of `narrow`.
    """

    groups: int = 2048
    group_block: int = 1024
    threshold_warps: int = 8
    rank: int = 1024
    capacity: int = 2048
    order_chunk: int = 32
    order_others: int = 128
    list_block: int = 512
    list_warps: int = 4
    list_stages: int = 1
    lanes: int = 128
    unroll: int = 4
    choose_warps: int = 8
    narrow_lanes: int = 512

    def groups_of(self, spans: Spans) -> int:
        """Groups a span, a power of two."""
        return max(1, min(self.groups // spans.block, self.group_block))


_TILES = {
    # Interpreted: few and large operations.
    "cpu": Tiles(order_chunk=1024, order_others=1024, list_block=2048, lanes=2048, narrow_lanes=2048, unroll=1),
    "any": Tiles(),
}

# Trailing bits of a float32 that are 0 in every number of the format.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _group_maxima(logits, row_stride, vocab_stride, vocab, maxima, spans, length, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """maxima: int32 [rows, spans, GROUPS], sort keys."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    end = tl.minimum(vocab, (span + 1) * length)
    best = tl.full([BLOCK], _NO_KEY, tl.int32)
    for start in range(span * length, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        live = ids < end
        x = tl.load(logits + row * row_stride + ids.to(tl.int64) * vocab_stride, mask=live, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.where(live, sort_key(x), _NO_KEY))
    best = tl.max(tl.reshape(best, [BLOCK // GROUPS, GROUPS]), axis=0)
    tl.store(maxima + (row * spans + span) * GROUPS + tl.arange(0, GROUPS), best)


@triton.jit
def _threshold(maxima, temperature, top_k, state, vocab, rank, groups, GROUPS: tl.constexpr):
    """Sets up a row's state."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    keys = tl.load(maxima + row * groups + group, mask=group < groups, other=_NO_KEY)
    largest = tl.max(keys, axis=0)
    k = tl.load(top_k + row)
    wanted = tl.where((k > 0) & (k < vocab) & (k < rank), k, rank)
    wanted = tl.where(is_drawn(tl.load(temperature + row), largest), wanted, 1)
    # A key that as many maxima reach as are wanted, or a few more; all do where there are fewer.
    low = tl.min(tl.where(group < groups, keys, largest), axis=0).to(tl.int64)
    high = largest.to(tl.int64)
    part = tl.arange(0, _PARTS)
    number = groups
    while (low < high) & (number > wanted + (wanted >> _SLACK)):
        stride = ((high - low) >> _PART_BITS) + 1
        ends = tl.minimum(low + part * stride, 0x7FFFFFFF).to(tl.int32)
        reaching = tl.sum((keys[None, :] >= ends[:, None]).to(tl.int32), axis=1)
        passed = tl.maximum(tl.sum((reaching >= wanted).to(tl.int32), axis=0) - 1, 0)
        number = tl.sum(tl.where(part == passed, reaching, 0), axis=0)
        high = tl.minimum(high, low + (passed + 1) * stride - 1)
        low = low + passed * stride

    field = tl.arange(0, STATE)
    initial = tl.where(field == LARGEST, largest, tl.where(field == LEAST, _KEY_OF_INFINITY, 0)).to(tl.int64)
    initial = tl.where(field == THRESHOLD, low, tl.where(field == FIRST, _NO_TOKEN, initial))
    tl.store(state + row * STATE + field, initial)


@triton.jit
def _candidates(
    logits,
    row_stride,
    vocab_stride,
    vocab,
    temperature,
    top_k,
    state,
    candidates,
    spans,
    length,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Lists the tokens at or above the threshold as int64 that sort like the row: sort key above 2^31 - 1 - token. They are listed
    in any order. Of a greedy row only the first token of the largest is kept."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    largest = tl.load(state + row * STATE + LARGEST).to(tl.int32)
    threshold = tl.load(state + row * STATE + THRESHOLD).to(tl.int32)
    warmth = tl.load(temperature + row)
    k = tl.load(top_k + row)
    draws = is_drawn(warmth, largest)
    sums = draws & ((k <= 0) | (k >= vocab))
    top = from_sort_key(largest).to(tl.float64)
    scale = scale_of(tl.where(draws, warmth, 1.0))
    end = tl.minimum(vocab, (span + 1) * length)
    total = tl.zeros([BLOCK], tl.int64)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    first = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    counter = state + row * STATE + CANDIDATES + tl.zeros([BLOCK], tl.int32)
    one = tl.full([BLOCK], 1, tl.int64)
    for start in tl.range(span * length, end, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        live = ids < end
        offsets = ids.to(tl.int64) * vocab_stride
        x = tl.load(logits + row * row_stride + offsets, mask=live, other=float("-inf")).to(tl.float32)
        if sums:
            # Beyond the end are weights of -inf, which are 0.
            total += weigh(x, top, scale)
        key = sort_key(x)
        found = live & (key >= threshold)
        if draws:
            least = tl.minimum(least, tl.where(x == float("-inf"), float("inf"), x))
            # Few ask for a place, so that it costs little to do so one by one.
            place = tl.atomic_add(counter, one, mask=found, sem="relaxed")
            packed = (key.to(tl.int64) << 32) | (ids ^ _NO_TOKEN).to(tl.int64)
            tl.store(candidates + row * CAPACITY + place, packed, mask=found & (place < CAPACITY))
        else:
            first = tl.minimum(first, tl.where(found, ids, _NO_TOKEN))
    if draws:
        tl.atomic_min(state + row * STATE + LEAST, sort_key(tl.min(least, axis=0)).to(tl.int64), sem="relaxed")
    else:
        tl.atomic_min(state + row * STATE + FIRST, tl.min(first, axis=0).to(tl.int64), sem="relaxed")
    if sums:
        tl.atomic_add(state + row * STATE + TOTAL, tl.sum(total, axis=0), sem="relaxed")


@triton.jit
def _order(candidates, ordered, state, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, OTHERS: tl.constexpr):
    """Puts candidates in order: each goes to the place whose number is how many others are above it."""
    row = (tl.program_id(0) // (CAPACITY // CHUNK)).to(tl.int64)
    first = tl.program_id(0) % (CAPACITY // CHUNK) * CHUNK
    number = tl.load(state + row * STATE + CANDIDATES).to(tl.int32)
    if (first < number) & (number <= CAPACITY):
        index = first + tl.arange(0, CHUNK)
        mine = tl.load(candidates + row * CAPACITY + index, mask=index < number, other=_NO_CANDIDATE)
        above = tl.zeros([CHUNK, OTHERS], tl.int32)
        for start in range(0, number, OTHERS):
            other = start + tl.arange(0, OTHERS)
            others = tl.load(candidates + row * CAPACITY + other, mask=other < number, other=_NO_CANDIDATE)
            above += (others[None, :] > mine[:, None]).to(tl.int32)
        tl.store(ordered + row * CAPACITY + tl.sum(above, axis=1), mine, mask=index < number)


@triton.jit
def _choose(
    temperature,
    top_k,
    top_p,
    seed,
    offset,
    state,
    ordered,
    out,
    out_stride,
    vocab,
    CAPACITY: tl.constexpr,
):
    """Writes a row's token if all places lie among its candidates, or marks it as pending."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(state + row * STATE + LARGEST).to(tl.int32)
    warmth = tl.load(temperature + row)
    token = tl.load(state + row * STATE + FIRST)
    known = ~is_drawn(warmth, largest)
    number = tl.load(state + row * STATE + CANDIDATES)
    if (~known) & (number <= CAPACITY):
        k = tl.load(top_k + row)
        k = tl.where((k > 0) & (k < vocab), k, 0)
        p = tl.load(top_p + row)
        u = uniform(tl.load(seed + row), tl.load(offset + row))
        index = tl.arange(0, CAPACITY)
        live = index < number
        packed = tl.load(ordered + row * CAPACITY + index, mask=live, other=0)
        weight = weigh(from_sort_key((packed >> 32).to(tl.int32)), from_sort_key(largest).to(tl.float64), scale_of(warmth))
        weight = tl.where(live, weight, 0)
        upto = tl.cumsum(weight, axis=0)
        listed = tl.sum(weight, axis=0)

        within_k = (k == 0) | (index < k)
        kept = tl.where(k == 0, tl.load(state + row * STATE + TOTAL), tl.sum(tl.where(within_k, weight, 0), axis=0))
        limit = limit_of(p, kept)
        within_p = (index == 0) | ((upto - weight).to(tl.float64) < limit)
        shortened = ~(p >= 1.0)
        known = (k <= number) & ((k > 0) | (~shortened) | (listed.to(tl.float64) >= limit))
        kept = tl.where(shortened, tl.sum(tl.where(within_k & within_p, weight, 0), axis=0), kept)
        target = target_of(u, kept)
        known &= listed > target
        drawn = tl.sum(tl.where(index == tl.sum((upto <= target).to(tl.int32), axis=0), packed, 0), axis=0)
        token = (drawn & _NO_TOKEN) ^ _NO_TOKEN
    if known:
        tl.store(out + row * out_stride, token)
    else:
        tl.store(state + row * STATE + PENDING, 1)


def sample_top_k_top_p(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """`tokenspeed_kernel.sample_top_k_top_p`: eight launches, the last three of which have nothing to do for most rows."""
    rows, vocab = logits.shape
    device = logits.device
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    temperature, top_k, top_p, seed, offset = (x.contiguous() for x in (temperature, top_k, top_p, seed, offset))
    spans, tiles = spans_of(logits), for_architecture(_TILES, device)
    groups = tiles.groups_of(spans)
    row = (logits, *logits.stride(), vocab)
    cut = (rows * spans.count,)
    maxima = torch.empty(rows, spans.count * groups, dtype=torch.int32, device=device)
    state = torch.empty(rows, STATE.value, dtype=torch.int64, device=device)
    candidates = torch.empty(rows, tiles.capacity, dtype=torch.int64, device=device)
    ordered = torch.empty_like(candidates)
    listed = torch.empty(rows, vocab, dtype=torch.int64, device=device)
    # Fused multiply-add would round other than the definition of weights does.
    exact = {"enable_fp_fusion": False}

    _group_maxima[cut](*row, maxima, spans.count, spans.length, BLOCK=tiles.group_block, GROUPS=groups)
    _threshold[(rows,)](
        maxima,
        temperature,
        top_k,
        state,
        vocab,
        min(tiles.rank, spans.count * groups),
        spans.count * groups,
        GROUPS=triton.next_power_of_2(spans.count * groups),
        num_warps=tiles.threshold_warps,
    )
    _candidates[cut](
        *row,
        temperature,
        top_k,
        state,
        candidates,
        spans.count,
        spans.length,
        CAPACITY=tiles.capacity,
        BLOCK=tiles.list_block,
        STAGES=tiles.list_stages,
        num_warps=tiles.list_warps,
        **exact,
    )
    _order[(rows * (tiles.capacity // tiles.order_chunk),)](
        candidates,
        ordered,
        state,
        CAPACITY=tiles.capacity,
        CHUNK=tiles.order_chunk,
        OTHERS=tiles.order_others,
        num_warps=tiles.order_others // 32,
    )
    _choose[(rows,)](
        temperature,
        top_k,
        top_p,
        seed,
        offset,
        state,
        ordered,
        out,
        out.stride(0),
        vocab,
        CAPACITY=tiles.capacity,
        num_warps=tiles.choose_warps,
        **exact,
    )
    sum_levels[cut](
        *row,
        temperature,
        state,
        spans.count,
        spans.length,
        LANES=tiles.lanes,
        UNROLL=tiles.unroll,
        num_warps=tiles.lanes // 32,
        **exact,
    )
    collect[cut](
        *row,
        temperature,
        top_k,
        top_p,
        seed,
        offset,
        state,
        listed,
        spans.count,
        spans.length,
        BLOCK=tiles.list_block,
        num_warps=tiles.list_warps,
        **exact,
    )
    narrow[(rows,)](
        logits,
        vocab,
        temperature,
        top_k,
        top_p,
        seed,
        offset,
        state,
        listed,
        out,
        out.stride(0),
        LANES=tiles.narrow_lanes,
        UNROLL=tiles.unroll,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=tiles.narrow_lanes // 32,
        **exact,
    )
    return out
