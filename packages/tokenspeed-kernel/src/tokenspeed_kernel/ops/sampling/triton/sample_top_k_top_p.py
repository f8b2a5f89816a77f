"""Sampling without sorting rows: the few largest logits decide nearly always, and the exact sum of all weights.

What is drawn depends on three places in a row's order: the last token of top-k, the last of top-p, and the drawn one. Each is
the first at which a sum along the order, of tokens or of their weights, crosses a bound, and each bound needs the place before
it. Sums of integers are exact in any order of addition.

1. `_group_maxima` cuts a row into groups and takes the largest logit of each.
2. `_threshold` takes the k-th largest of those: at least k of the row's logits are at or above it, and seldom many more.
3. `_candidates` lists the tokens at or above it and, where top-k does not rule the rest out, sums the weights of all.
4. `_choose` sorts the candidates and finds the three places, if all of them lie there.
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

_PARTS = tl.constexpr(16)
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
        few: candidates that are sorted faster; a power of two.
        lanes, unroll: of `_candidates` and `sum_levels`: threads, and tokens that each has in flight.
        choose_warps: of `_choose`.
        narrow_block, narrow_warps: of `narrow`.
    """

    groups: int = 2048
    group_block: int = 1024
    threshold_warps: int = 8
    rank: int = 512
    capacity: int = 1024
    few: int = 128
    lanes: int = 128
    unroll: int = 4
    choose_warps: int = 8
    narrow_block: int = 1024
    narrow_warps: int = 8

    def groups_of(self, spans: Spans) -> int:
        """Groups a span, a power of two."""
        return max(1, min(self.groups // spans.block, self.group_block))


# Trailing bits of a float32 that are 0 in every number of the format.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _group_maxima(
    logits, row_stride, vocab_stride, vocab, maxima, spans, SPAN: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr
):
    """maxima: int32 [rows, spans, GROUPS], sort keys."""
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    end = tl.minimum(vocab, (span + 1) * SPAN)
    best = tl.full([BLOCK], _NO_KEY, tl.int32)
    for start in range(span * SPAN, end, BLOCK):
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
    # The largest key that as many maxima reach as are wanted; all do where there are fewer.
    low = tl.full([], _NO_KEY, tl.int64)
    high = largest.to(tl.int64)
    part = tl.arange(0, _PARTS)
    while low < high:
        stride = (high - low) // _PARTS + 1
        ends = tl.minimum(low + part * stride, 0x7FFFFFFF).to(tl.int32)
        reaching = tl.sum((keys[None, :] >= ends[:, None]).to(tl.int32), axis=1)
        passed = tl.maximum(tl.sum((reaching >= wanted).to(tl.int32), axis=0) - 1, 0)
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
    SPAN: tl.constexpr,
    CAPACITY: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Lists the tokens at or above the threshold, in any order, as int64: sort key above 2^31 - 1 - token, so that they sort like the
    row. Of a greedy row only the first token of the largest is kept."""
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
    end = tl.minimum(vocab, (span + 1) * SPAN)
    total = tl.zeros([LANES], tl.int64)
    least = tl.full([LANES], float("inf"), tl.float32)
    first = tl.full([LANES], _NO_TOKEN, tl.int32)
    counter = state + row * STATE + CANDIDATES + tl.zeros([LANES], tl.int32)
    one = tl.full([LANES], 1, tl.int64)
    for start in range(span * SPAN, end, LANES * UNROLL):
        for part in tl.static_range(UNROLL):
            ids = start + part * LANES + tl.arange(0, LANES)
            live = ids < end
            offsets = ids.to(tl.int64) * vocab_stride
            x = tl.load(logits + row * row_stride + offsets, mask=live, other=float("-inf")).to(tl.float32)
            key = sort_key(x)
            found = live & (key >= threshold)
            if draws:
                # Nobody else asks for a place, most of the time.
                place = tl.atomic_add(counter, one, mask=found, sem="relaxed")
                packed = (key.to(tl.int64) << 32) | (ids ^ _NO_TOKEN).to(tl.int64)
                tl.store(candidates + row * CAPACITY + place, packed, mask=found & (place < CAPACITY))
                least = tl.minimum(least, tl.where(x == float("-inf"), float("inf"), x))
            else:
                first = tl.minimum(first, tl.where(found, ids, _NO_TOKEN))
            if sums:
                # Beyond the end are weights of -inf, which are 0.
                total += weigh(x, top, scale)
    if draws:
        tl.atomic_min(state + row * STATE + LEAST, sort_key(tl.min(least, axis=0)).to(tl.int64), sem="relaxed")
    else:
        tl.atomic_min(state + row * STATE + FIRST, tl.min(first, axis=0).to(tl.int64), sem="relaxed")
    if sums:
        tl.atomic_add(state + row * STATE + TOTAL, tl.sum(total, axis=0), sem="relaxed")


@triton.jit
def _place(candidates, row, number, total, k, p, u, top, scale, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """The drawn token, and whether all places lie among the candidates. total: what top-k keeps, if k does not say; k: 0 for all."""
    index = tl.arange(0, BLOCK)
    packed = tl.load(candidates + row * CAPACITY + index, mask=index < number, other=_NO_CANDIDATE)
    packed = tl.sort(packed, descending=True)
    key = tl.where(index < number, packed >> 32, 0).to(tl.int32)
    weight = tl.where(index < number, weigh(from_sort_key(key), top, scale), 0)
    upto = tl.cumsum(weight, axis=0)
    listed = tl.sum(weight, axis=0)

    within_k = (k == 0) | (index < k)
    kept = tl.where(k == 0, total, tl.sum(tl.where(within_k, weight, 0), axis=0))
    limit = limit_of(p, kept)
    within_p = (index == 0) | ((upto - weight).to(tl.float64) < limit)
    shortened = ~(p >= 1.0)
    known = (k <= number) & ((k > 0) | (~shortened) | (listed.to(tl.float64) >= limit))
    kept = tl.where(shortened, tl.sum(tl.where(within_k & within_p, weight, 0), axis=0), kept)
    target = target_of(u, kept)
    known &= listed > target
    place = tl.sum((upto <= target).to(tl.int32), axis=0)
    drawn = tl.sum(tl.where(index == place, packed, 0), axis=0)
    return (drawn & _NO_TOKEN) ^ _NO_TOKEN, known


@triton.jit
def _choose(
    temperature,
    top_k,
    top_p,
    seed,
    offset,
    state,
    candidates,
    out,
    out_stride,
    vocab,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
):
    """Writes a row's token, or marks it as pending."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(state + row * STATE + LARGEST).to(tl.int32)
    warmth = tl.load(temperature + row)
    if is_drawn(warmth, largest):
        number = tl.load(state + row * STATE + CANDIDATES)
        total = tl.load(state + row * STATE + TOTAL)
        k = tl.load(top_k + row)
        k = tl.where((k > 0) & (k < vocab), k, 0)
        p = tl.load(top_p + row)
        u = uniform(tl.load(seed + row), tl.load(offset + row))
        top = from_sort_key(largest).to(tl.float64)
        scale = scale_of(warmth)
        token = number * 0
        known = number < 0
        if number <= FEW:
            token, known = _place(candidates, row, number, total, k, p, u, top, scale, CAPACITY, FEW)
        elif number <= CAPACITY:
            token, known = _place(candidates, row, number, total, k, p, u, top, scale, CAPACITY, CAPACITY)
        if known:
            tl.store(out + row * out_stride, token)
        else:
            tl.store(state + row * STATE + PENDING, 1)
    else:
        tl.store(out + row * out_stride, tl.load(state + row * STATE + FIRST))


def sample_top_k_top_p(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """`tokenspeed_kernel.sample_top_k_top_p`: seven launches, the last three of which have nothing to do for most rows."""
    rows, vocab = logits.shape
    device = logits.device
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    temperature, top_k, top_p, seed, offset = (x.contiguous() for x in (temperature, top_k, top_p, seed, offset))
    spans, tiles = spans_of(logits), Tiles()
    groups = tiles.groups_of(spans)
    row = (logits, *logits.stride(), vocab)
    cut = (rows * spans.count,)
    maxima = torch.empty(rows, spans.count * groups, dtype=torch.int32, device=device)
    state = torch.empty(rows, STATE.value, dtype=torch.int64, device=device)
    candidates = torch.empty(rows, tiles.capacity, dtype=torch.int64, device=device)
    listed = torch.empty(rows, vocab, dtype=torch.int32, device=device)
    # Fused multiply-add would round other than the definition of weights does.
    exact = {"enable_fp_fusion": False}

    _group_maxima[cut](*row, maxima, spans.count, SPAN=spans.length, BLOCK=tiles.group_block, GROUPS=groups)
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
        SPAN=spans.length,
        CAPACITY=tiles.capacity,
        LANES=tiles.lanes,
        UNROLL=tiles.unroll,
        num_warps=tiles.lanes // 32,
        **exact,
    )
    _choose[(rows,)](
        temperature,
        top_k,
        top_p,
        seed,
        offset,
        state,
        candidates,
        out,
        out.stride(0),
        vocab,
        CAPACITY=tiles.capacity,
        FEW=tiles.few,
        num_warps=tiles.choose_warps,
        **exact,
    )
    sum_levels[cut](
        *row,
        temperature,
        state,
        spans.count,
        SPAN=spans.length,
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
        SPAN=spans.length,
        LANES=tiles.lanes,
        UNROLL=tiles.unroll,
        num_warps=tiles.lanes // 32,
        **exact,
    )
    narrow[(rows,)](
        *row,
        temperature,
        top_k,
        top_p,
        seed,
        offset,
        state,
        listed,
        out,
        out.stride(0),
        BLOCK=tiles.narrow_block,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=tiles.narrow_warps,
        **exact,
    )
    return out
