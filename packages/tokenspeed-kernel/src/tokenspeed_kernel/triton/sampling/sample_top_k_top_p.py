"""Samples without sorting rows. In most rows, the largest logits determine the result. In other rows, the logits around the cutoff
token determine it.

Top-k and top-p keep the tokens down to the cutoff token, in order of descending logit. One of the kept tokens is drawn, by running
sums of integer weights in the order of token ids. Integer sums are exact in any order of addition.

1. `group_maxima_kernel` splits a row into groups and finds the largest logit of each.
2. `decide_kernel` lists the tokens of the groups whose maximum is >= a threshold, and compares them pairwise. The threshold selects
   about k groups, or enough groups to make the weight of all other tokens negligible. The list decides greedy rows, rows with top-k
   up to some hundred tokens, and rows whose unlisted tokens weigh too little to matter. The logits of such rows are read only once.
   For the remaining rows with top-k or top-p, the kernel finds a range of logits that holds the cutoff token. The range is certain
   if the group maxima show that enough tokens are in the range or above it. Otherwise a sample of whole groups estimates the range,
   with a margin of four standard errors.
3. `weigh_kernel` reads the undecided rows. The kernel sums the weights of each chunk of `Tiles.chunk` tokens, and copies the tokens
   in the range.
4. `finish_kernel` finds the cutoff token among the copied tokens, or, rarely, in the whole row. The kernel then sums the kept
   weight of each chunk, finds the chunk that contains the token to draw, and then the token.

64 rows of 201088 float32 on an H200 with a cold L2: top-k 40 with top-p 0.95 takes 39 us, and rows without limits take 40 us. Top-p
0.9 takes 109 us at temperature 1 and 143 us at temperature 2. With twice as many sampled tokens, these two cases took 121 and 149
us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    FLOATS,
    TRITON,
    cdiv,
    dense,
    for_architecture,
    launch_options,
    may_overlap,
    next_power_of_2,
    sm_count_of,
)
from tokenspeed_kernel.triton.sampling._rows import groups_of
from tokenspeed_kernel.triton.sampling._state import FEW, STATE
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Tiles(NamedTuple):
    """Tile sizes and warps of the sampling kernels.

    Attributes:
        group_warps: warps of `group_maxima_kernel`.
        lanes: the number of keys into which `decide_kernel` folds the group maxima before the threshold search.
        decide_warps: warps of `decide_kernel`.
        few, tokens: powers of two. `decide_kernel` compares the tokens of its list pairwise, if the list has at most ``few`` or
            else at most ``tokens`` tokens. A longer list does not decide the row's result.
        pairs: pairs of tokens that `decide_kernel` compares per step.
        rank: for top-p, the range of the cutoff token starts at the largest logit if the cutoff token is likely among this many
            group maxima.
        sample, read: tokens that `decide_kernel` samples to guess the range of the cutoff token, and tokens per step.
        chunk: tokens per chunk, for which `weigh_kernel` sums weights.
        weigh_warps, weigh_programs: warps of a program of `weigh_kernel`, and programs per SM/CU.
        finish_warps: warps of `finish_kernel`.
        cutoff_lanes: tokens per step of the cutoff search in `finish_kernel`.
        short: the largest number of sort keys that the cutoff search copies to a short list.
        some, slots: how many chunks, and how many copied tokens of each chunk, `finish_kernel` sums per step.
    """

    group_warps: int = 8
    lanes: int = 2048
    decide_warps: int = 16
    few: int = 128
    tokens: int = 512
    pairs: int = 4096
    rank: int = 1280
    sample: int = 8192
    read: int = 4096
    chunk: int = 2048
    weigh_warps: int = 4
    weigh_programs: int = 5
    finish_warps: int = 8
    cutoff_lanes: int = 1024
    short: int = 4096
    some: int = 64
    slots: int = 64


_TILES = {
    # For the interpreter: few large operations. Lists are short, so that small test cases include rows that no list decides.
    "cpu": Tiles(few=32, tokens=64, rank=96, sample=512, read=512, short=256),
    # A program has at most 1024 threads, and a wave has 64.
    "amd": Tiles(decide_warps=8),
    "any": Tiles(),
}
# The largest number of chunks per program of `weigh_kernel`.
_MOST_TOGETHER = 20


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
    min_p: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.sample_top_k_top_p`. Takes four launches. The last two launches skip decided rows,
    which are most rows."""
    if out is None:
        out = torch.empty(len(logits), dtype=out_dtype, device=logits.device)
    if len(logits):
        decide_rows(logits, temperature, top_k, top_p, min_p, Drawing(seed.contiguous(), offset.contiguous(), out))
    return out


class Drawing(NamedTuple):
    """The inputs and the output of drawing tokens: each row's seed and offset of the random generator, and the drawn tokens."""

    seed: Tensor
    offset: Tensor
    out: Tensor


def decide_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None, drawing: Drawing | None = None
) -> Tensor:
    """Draws a token for each row of logits. Without ``drawing``, finds the cutoff token and the total weight of the kept tokens
    of each row instead.

    Args:
        logits: the logits; at least one row.
        temperature, top_k, top_p, min_p: see `tokenspeed_kernel.sample_top_k_top_p`.
        drawing: the random generator's seeds and offsets, and the output for the drawn tokens; or None.

    Returns:
        int64 ``[rows, STATE]`` with the fields of `_state_device`. The fields LAST and KEPT are written only without ``drawing``.
    """
    rows, vocab = logits.shape
    device = logits.device
    temperature, top_k, top_p = temperature.contiguous(), top_k.contiguous(), top_p.contiguous()
    min_p = dense(min_p)
    seed, offset, out = drawing or (None, None, None)
    out_stride = 0 if out is None else out.stride(0)
    groups, tiles = groups_of(logits), for_architecture(_TILES, device)
    most_groups, chunks = next_power_of_2(groups.count), cdiv(vocab, tiles.chunk)
    maxima, state, scratch, totals, above, segments, pairs, short = (
        torch.empty(rows, *shape, dtype=dtype, device=device)
        for dtype, shape in (
            (torch.int32, (groups.count,)),
            (torch.int64, (STATE,)),
            (torch.int64, (tiles.tokens + max(tiles.tokens, most_groups),)),
            (torch.int64, (chunks,)),
            (torch.int64, (chunks,)),
            (torch.int32, (chunks, 3)),
            (torch.int64, (vocab,)),
            (torch.int32, (tiles.short + FEW,)),
        )
    )
    row = (logits, *logits.stride(), vocab)
    request = (temperature, top_k, top_p, seed, offset, min_p)
    copied = (state, totals, above, segments, pairs)
    early = may_overlap(device)
    options = {"EARLY": early, **launch_options(early)}
    # The definition of weights rounds after every multiplication, so fused multiply-adds would give other weights.
    exact = {"enable_fp_fusion": False, **options}

    grouping = {"BLOCK": groups.block, "BLOCKS": groups.blocks, "RUN": groups.run}
    device_code.group_maxima_kernel[(rows * groups.spans,)](
        *row, maxima, groups.spans, groups.length, num_warps=tiles.group_warps, **grouping, **options
    )
    device_code.decide_kernel[(rows,)](
        *row,
        maxima,
        *request,
        state,
        scratch,
        out,
        out_stride,
        tiles.rank,
        groups.count,
        groups.length,
        GROUPS=most_groups,
        LANES=min(tiles.lanes, most_groups),
        FEW=tiles.few,
        TOKENS=tiles.tokens,
        PAIRS=tiles.pairs,
        SAMPLE=tiles.sample,
        READ=tiles.read,
        num_warps=tiles.decide_warps,
        **grouping,
        **exact,
    )
    # Launch about one wave of programs, because each program first loads its row's state. With many rows, launch more programs with
    # at most _MOST_TOGETHER chunks each, to keep the tail short.
    together = min(cdiv(chunks, max(sm_count_of(device) * tiles.weigh_programs // rows, 1)), _MOST_TOGETHER)
    programs = cdiv(chunks, together)
    device_code.weigh_kernel[(rows * programs,)](
        *row,
        temperature,
        min_p,
        *copied,
        chunks,
        together,
        programs,
        CHUNK=tiles.chunk,
        ALIGNED=vocab % 16 == 0,
        num_warps=tiles.weigh_warps,
        **exact,
    )
    device_code.finish_kernel[(rows,)](
        *row,
        *request,
        *copied,
        short,
        out,
        out_stride,
        chunks,
        CHUNK=tiles.chunk,
        CHUNKS=next_power_of_2(chunks),
        LANES=tiles.cutoff_lanes,
        SHORT=tiles.short,
        SOME=tiles.some,
        SLOTS=tiles.slots,
        num_warps=tiles.finish_warps,
        **exact,
    )
    return state
