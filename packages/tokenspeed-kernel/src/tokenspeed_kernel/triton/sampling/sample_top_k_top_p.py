"""Sampling without sorting rows: the few largest logits decide nearly always, and the exact sum of all weights.

What is drawn depends on three places in a row's order: the last token of top-k, the last of top-p, and the drawn one. Each is
the first at which a sum along the order, of tokens or of their weights, crosses a bound, and each bound needs the place before
it. Sums of integers are exact in any order of addition.

1. `_group_maxima` cuts a row into groups and takes the largest logit of each.
2. `_threshold` takes the k-th largest of those: at least k of the row's logits are at or above it, and seldom many more.
3. `_candidates` lists the tokens at or above it and, where top-k does not rule the rest out, sums the weights of all.
4. `find_places` finds the three places, if all of them lie among the candidates.
5. Where they do not, which is seldom, `sum_levels` and `collect` list other tokens, in which it finds them then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.common import for_architecture
from tokenspeed_kernel.triton.sampling._levels import collect, sum_levels
from tokenspeed_kernel.triton.sampling._places import find_places
from tokenspeed_kernel.triton.sampling._rows import Spans, from_sort_key, sort_key, spans_of
from tokenspeed_kernel.triton.sampling._state import CANDIDATES, FIRST, LARGEST, LEAST, STATE, THRESHOLD, TOTAL
from tokenspeed_kernel.triton.sampling._weights import is_drawn, scale_of, weigh

_PARTS = tl.constexpr(16)
_PART_BITS = tl.constexpr(4)
# The threshold is good enough if 2^-this too many maxima reach it.
_SLACK = tl.constexpr(3)
_NO_KEY = tl.constexpr(-0x80000000)
_KEY_OF_INFINITY = tl.constexpr(0x7F800000)
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
        list_block, list_warps: of `_candidates` and `collect`. 64 rows of 201088 float32 with top-k 40, on an H200: 79 us in all;
            85 with blocks of 1024, 114 with 2048, 88 with 256.
        list_stages: of `_candidates`, to load ahead: 72 us in all rather than 76.
        lanes, unroll: of `sum_levels`: threads, and tokens that each has in flight.
        candidate_lanes, list_lanes: of `find_places` for candidates, of which there are few, and for longer lists.
        place_unroll: of `find_places`.
        warp: threads of a warp.
    """

    groups: int = 2048
    group_block: int = 1024
    threshold_warps: int = 8
    rank: int = 1280
    capacity: int = 4096
    list_block: int = 512
    list_warps: int = 4
    list_stages: int = 1
    lanes: int = 128
    unroll: int = 4
    candidate_lanes: int = 256
    list_lanes: int = 256
    place_unroll: int = 2
    warp: int = 32

    def groups_of(self, spans: Spans) -> int:
        """Groups a span, a power of two."""
        return max(1, min(self.groups // spans.block, self.group_block))


_TILES = {
    # Interpreted: few and large operations.
    "cpu": Tiles(list_block=2048, lanes=2048, unroll=1, candidate_lanes=512, list_lanes=2048, place_unroll=1, warp=128),
    "amd": Tiles(warp=64),
    "sm_90": Tiles(list_stages=2),
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
    """Lists the tokens at or above the threshold in any order, as int64: sort key above token. Of a greedy row only the first token
    of the largest is kept."""
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
            packed = (key.to(tl.int64) << 32) | ids.to(tl.int64)
            tl.store(candidates + row * CAPACITY + place, packed, mask=found & (place < CAPACITY))
        else:
            first = tl.minimum(first, tl.where(found, ids, _NO_TOKEN))
    if draws:
        tl.atomic_min(state + row * STATE + LEAST, sort_key(tl.min(least, axis=0)).to(tl.int64), sem="relaxed")
    else:
        tl.atomic_min(state + row * STATE + FIRST, tl.min(first, axis=0).to(tl.int64), sem="relaxed")
    if sums:
        tl.atomic_add(state + row * STATE + TOTAL, tl.sum(total, axis=0), sem="relaxed")


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
    request = tuple(x.contiguous() for x in (temperature, top_k, top_p, seed, offset))
    temperature, top_k = request[:2]
    spans, tiles = spans_of(logits), for_architecture(_TILES, device)
    groups = tiles.groups_of(spans)
    row = (logits, *logits.stride(), vocab)
    cut = (rows * spans.count,)
    maxima = torch.empty(rows, spans.count * groups, dtype=torch.int32, device=device)
    state = torch.empty(rows, STATE.value, dtype=torch.int64, device=device)
    candidates = torch.empty(rows, tiles.capacity, dtype=torch.int64, device=device)
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
    find_places[(rows,)](
        logits,
        vocab,
        *request,
        state,
        candidates,
        tiles.capacity,
        out,
        out.stride(0),
        FROM_LEVELS=False,
        LANES=tiles.candidate_lanes,
        UNROLL=tiles.place_unroll,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=tiles.candidate_lanes // tiles.warp,
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
        num_warps=tiles.lanes // tiles.warp,
        **exact,
    )
    collect[cut](
        *row,
        *request,
        state,
        listed,
        spans.count,
        spans.length,
        BLOCK=tiles.list_block,
        num_warps=tiles.list_warps,
        **exact,
    )
    find_places[(rows,)](
        logits,
        vocab,
        *request,
        state,
        listed,
        vocab,
        out,
        out.stride(0),
        FROM_LEVELS=True,
        LANES=tiles.list_lanes,
        UNROLL=tiles.place_unroll,
        UNUSED_BITS=_UNUSED_BITS[logits.dtype],
        num_warps=tiles.list_lanes // tiles.warp,
        **exact,
    )
    return out
