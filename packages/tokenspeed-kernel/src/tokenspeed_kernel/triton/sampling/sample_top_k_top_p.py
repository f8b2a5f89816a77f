"""Sampling without sorting rows: the few largest logits decide nearly always, and the exact sum of all weights.

What is drawn depends on three places in a row's order: the last token of top-k, the last of top-p, and the drawn one. Each is
the first at which a sum along the order, of tokens or of their weights, crosses a bound, and each bound needs the place before
it. Sums of integers are exact in any order of addition.

1. `group_maxima_kernel` cuts a row into groups and takes the largest logit of each.
2. `decide_kernel` takes the k-th largest of those as the threshold: at least k of the row's logits are at or above it, and seldom
   many more. It reads the groups that reach the threshold, and compares their tokens pair by pair. Greedy rows and rows restricted
   by top-k or min-p to some hundred tokens are decided by that, after reading the logits once. The rest is for other rows.
3. `candidates_kernel` lists the tokens at or above it and, where top-k does not rule the rest out, sums the weights of all.
4. `find_places_kernel` finds the three places, if all of them lie among the candidates.
5. Where they do not, which is seldom, `sum_levels_kernel` and `collect_kernel` list other tokens, in which it finds them then.

Rows of 201088 float32 with top-k 40 and top-p 0.95, on an H200 with cold caches: one takes 34 us, 16 take 40, 64 take 54, 256 take
118, where `argmax` takes 8, 11, 24 and 69. Without `decide_kernel` they took 42, 60, 96 and 236. Of the 54, 17 are the first
kernel's and 20 the second's; the six that have nothing to do take 12.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, dense, for_architecture
from tokenspeed_kernel.triton.sampling._rows import groups_of, spans_of
from tokenspeed_kernel.triton.sampling._state import STATE
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")
levels_device = DeviceModule("tokenspeed_kernel.triton.sampling._levels_device")
places_device = DeviceModule("tokenspeed_kernel.triton.sampling._places_device")


class Tiles(NamedTuple):
    """Sizes of blocks.

    Attributes:
        group_warps: of `group_maxima_kernel`.
        lanes_decided, decide_warps: of `decide_kernel`: into how many the groups' maxima are merged before the search; threads.
        tokens: that `decide_kernel` compares pair by pair, at most; paired: of them at a time.
        rank: the group maximum that is the threshold where top-k gives none; the largest top-k that candidates can serve.
        capacity: candidates of a row, a power of two, well above rank: groups may hold several.
        list_block, list_warps: of `candidates_kernel` and `collect_kernel`. When `candidates_kernel` served 64 rows of 201088
            float32 with top-k 40, on an H200: 79 us in all; 85 with blocks of 1024, 114 with 2048, 88 with 256.
        list_stages: of `candidates_kernel`, to load ahead: 72 us then rather than 76.
        lanes, unroll: of `sum_levels_kernel`: threads, and tokens that each has in flight.
        candidate_lanes, list_lanes: of `find_places_kernel` for candidates, of which there are few, and for longer lists.
        place_unroll: of `find_places_kernel`.
        warp: threads of a warp.
    """

    group_warps: int = 8
    lanes_decided: int = 2048
    decide_warps: int = 8
    tokens: int = 512
    paired: int = 16
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


_TILES = {
    # Interpreted: few and large operations.
    "cpu": Tiles(list_block=2048, lanes=2048, unroll=1, candidate_lanes=512, list_lanes=2048, place_unroll=1, warp=128),
    "amd": Tiles(warp=64),
    "sm_90": Tiles(list_stages=2),
    "any": Tiles(),
}

# Trailing bits of a float32 that are 0 in every number of the format.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@register_kernel(
    "sampling",
    "sample_top_k_top_p",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("logits", "dense", FLOATS),
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def sample_top_k_top_p(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    offset: Tensor,
    min_p: Tensor | None = None,
    out_dtype: torch.dtype = torch.int64,
    out: Tensor | None = None,
) -> Tensor:
    """`tokenspeed_kernel.sample_top_k_top_p`: eight launches, the last six of which have nothing to do for most rows."""
    rows, vocab = logits.shape
    device = logits.device
    if out is None:
        out = torch.empty(rows, dtype=out_dtype, device=device)
    if rows == 0:
        return out
    temperature, top_k, top_p, seed, offset = (x.contiguous() for x in (temperature, top_k, top_p, seed, offset))
    restriction = (temperature, top_k, top_p, seed, offset)
    min_p = dense(min_p)
    request = (*restriction, min_p)
    spans, tiles = spans_of(logits), for_architecture(_TILES, device)
    groups = groups_of(logits)
    row = (logits, *logits.stride(), vocab)
    cut = (rows * spans.count,)
    maxima = torch.empty(rows, groups.count, dtype=torch.int32, device=device)
    state = torch.empty(rows, STATE, dtype=torch.int64, device=device)
    candidates = torch.empty(rows, tiles.capacity, dtype=torch.int64, device=device)
    # At least as many as groups, tokens and weights of `decide_kernel`.
    room = max(vocab, groups.count + 2 * tiles.tokens)
    listed = torch.empty(rows, room, dtype=torch.int64, device=device)
    # Fused multiply-add would round other than the definition of weights does.
    exact = {"enable_fp_fusion": False}

    grouping = {"BLOCK": groups.block, "BLOCKS": groups.blocks, "RUN": groups.run}
    device_code.group_maxima_kernel[(rows * groups.spans,)](
        *row, maxima, groups.spans, groups.length, num_warps=tiles.group_warps, **grouping
    )
    device_code.decide_kernel[(rows,)](
        *row,
        maxima,
        *request,
        state,
        listed,
        room,
        out,
        out.stride(0),
        tiles.rank,
        groups.count,
        groups.length,
        LANES=tiles.lanes_decided,
        TOKENS=tiles.tokens,
        PAIRED=tiles.paired,
        num_warps=tiles.decide_warps,
        **grouping,
        **exact,
    )
    device_code.candidates_kernel[cut](
        *row,
        temperature,
        top_k,
        min_p,
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
    places_device.find_places_kernel[(rows,)](
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
    for finer in (False, True):
        levels_device.sum_levels_kernel[cut](
            *row,
            *request,
            state,
            spans.count,
            spans.length,
            LANES=tiles.lanes,
            UNROLL=tiles.unroll,
            FINER=finer,
            num_warps=tiles.lanes // tiles.warp,
            **exact,
        )
    levels_device.collect_kernel[cut](
        *row,
        *restriction,
        state,
        listed,
        room,
        spans.count,
        spans.length,
        BLOCK=tiles.list_block,
        num_warps=tiles.list_warps,
        **exact,
    )
    places_device.find_places_kernel[(rows,)](
        logits,
        vocab,
        *request,
        state,
        listed,
        room,
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
