"""Decode: attention of the newest tokens of sequences to a paged cache, on Hopper.

Memory decides the speed, so every multiprocessor has to have work, and much of the cache on its way, from beginning to end. The
grid is fixed: CTAs for all key heads are a *group*, and there are as many groups as two CTAs a multiprocessor make. The tiles of
all sequences, one after another, are cut into as many equal ranges as there are groups, on the device, from cache_seqlens: a
captured graph stays right, and evenly loaded, when lengths change. One warp of a CTA loads tiles into a ring in shared memory by
TMA, four compute. Where a sequence goes on in other groups, each leaves a partial result, and the last one to do so merges them, in
a fixed order. Sequences of which little is visible, as in layers with a short window, are not divided: groups take turns.
With many of those, a warp has a key head of its own, and all its tiles: nothing is merged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia import _limits
from tokenspeed_kernel_nvidia._machine import multiprocessors
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.sm90.attention.launching import DTYPES, LOG2_E, launched, sinks_at
from tokenspeed_kernel_nvidia.sm90.attention.scratch import scratch_of

CONSUMERS = 4  # warps that compute; one more loads
SHARED_BYTES = 228 * 1024  # of a multiprocessor
OTHER_BYTES = 3072  # of a CTA, besides tiles and results: 1024 that the system takes, and 1024 to begin at a multiple of that
ROWS = (8, 16, 32, 64)  # query rows of a key head that programs are made for
PIECES = 16  # partial results of a sequence that are merged at once: what registers allow
WHOLE = 256  # keys of a sequence that are not worth dividing
LITTLE = 2048  # keys of all sequences together that are little work
MANY = 800  # key heads of all sequences of which little is visible: three for every two multiprocessors, four of them to a CTA
# What there is to do. Sequences are divided where little or much is visible of them all together, and not where they are short.
Work = Literal["little", "much", "short", "many short"]
SHORT = ("short", "many short")


@dataclass(frozen=True)
class Config:
    """A program.

    Attributes:
        dtype: of q, the caches and the output.
        head_dim: of keys and values.
        box: keys that one TMA instruction loads, all of one page.
        rows: query rows of a key head that there is room for: its query heads times the new tokens of a sequence.
        split: whether sequences are divided among groups.
        block: keys of a tile.
        resident: CTAs that share a multiprocessor.
        heads: key heads of a CTA: one, whose tiles its warps take in turn, or as many as there are warps.
    """

    dtype: str
    head_dim: int
    box: int
    rows: int
    split: bool
    block: int
    resident: int
    heads: int = 1

    @property
    def row_warps(self) -> int:
        """Warps that share the rows of a tile, each with all its keys: a warp's sums have 64 registers a thread at most."""
        return max(1, self.rows // (32 if self.head_dim == 64 else 16))

    @property
    def parts(self) -> int:
        """Warps with results of the same rows, from different tiles."""
        return CONSUMERS // self.releases

    @property
    def releases(self) -> int:
        """Warps that look at a tile."""
        return self.row_warps * self.heads

    @property
    def merge_floats(self) -> int:
        """Shared memory for what warps have found, where they share a key head."""
        if self.heads > 1:
            return 4  # nothing, but an array has a size, and this one's a multiple of 16 bytes
        return self.parts * self.rows * (self.head_dim + 8)

    @property
    def stage_numbers(self) -> int:
        """Keys and values of a tile, in numbers."""
        return 2 * self.heads * self.block * self.head_dim

    @property
    def stages(self) -> int:
        """Tiles on their way. A multiple of the parts, so that a warp meets every phase of the barriers that it waits for."""
        room = SHARED_BYTES // self.resident - OTHER_BYTES - 4 * self.merge_floats
        return room // (2 * self.stage_numbers) // self.parts * self.parts


def _tile(head_dim: int, rows: int, work: Work) -> tuple[int, int, int]:
    """Keys of a tile, CTAs of a multiprocessor, and key heads of a CTA.

    Figures are microseconds on an H200 of 64 query heads and 8 key heads of dimension 64, in pages of 64, in a CUDA graph with an
    ordinary kernel between calls. They compare: there were few calls in a graph, whose start is in them.
    """
    if work == "many short" and rows * head_dim <= 2048:  # what registers allow
        # Windows of 128, beside a key head a CTA: 128 sequences 14.4, 15.8; 512 43.2, 46.3; but 64 back to back 7.9, 6.9.
        return (32 if head_dim == 64 and rows <= 16 else 16), 2, CONSUMERS
    if head_dim == 128:
        return 32, 2, 1  # what registers allow
    if work in SHORT:
        return 16, 4 if rows == 8 else 2, 1  # 64 windows of 128: 9.4, with 32 keys 9.9
    if rows > 16:
        return 32, 2, 1  # what registers allow
    # 64 x 1K: 42.9, with 32 keys 46.4, with three CTAs 46.7; 16 x 8K: 74.6, 74.3, 74.3. 1 x 1K: with 16 keys 6.53, with 64 6.74.
    return 16 if work == "little" else 64, 2, 1


def every_config() -> list[Config]:
    """All that is served."""
    some = {
        (dtype, head_dim, min(block, page_size), rows, work not in SHORT, block, resident, heads): None
        for dtype in DTYPES.values()
        for head_dim in _limits.HEAD_DIMS
        for rows in ROWS
        for work in get_args(Work)
        for block, resident, heads in [_tile(head_dim, rows, work)]
        for page_size in _limits.PAGE_SIZES
    }
    return [Config(*fields) for fields in some]


@program(arch="sm_90a", configs=every_config)
def decode_program(config: Config) -> tuple[Any, list[Any]]:
    from tokenspeed_kernel_nvidia.sm90.attention import decode_device

    return decode_device.host(config), decode_device.fake_arguments(config)


@functools.cache
def _program_of(
    dtype: torch.dtype, head_dim: int, page_size: int, heads: int, kv_heads: int, q_len: int, work: Work, device: int
) -> tuple[Callable[..., Any], int, int]:
    """The program, groups, and floats of partial results."""
    rows = next(rows for rows in ROWS if rows >= heads // kv_heads * q_len)
    block, resident, of_cta = _tile(head_dim, rows, work)
    groups = max(1, resident * multiprocessors(device) * of_cta // kv_heads)
    config = Config(DTYPES[dtype], head_dim, min(block, page_size), rows, work not in SHORT, block, resident, of_cta)
    return decode_program(config), groups, 2 * groups * kv_heads * rows * (head_dim + 2)


def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens to a paged cache: launches on checked arguments.

    For where partial results go, see `scratch`. See `tokenspeed_kernel_nvidia.mha_decode_with_kvcache`.
    """
    tokens, heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    if tokens:
        if not pages:  # all sequences are empty, but a TMA wants something to describe
            k_cache = v_cache = k_cache.new_zeros(1, *k_cache.shape[1:])
        device, batch = q.get_device(), tokens // max_seqlen_q
        shown = max_seqlen_k if window_left < 0 else min(max_seqlen_k, window_left + max_seqlen_q)
        work: Work = "short"
        if shown > WHOLE:
            work = "little" if batch * shown < LITTLE else "much"
        elif window_left >= 0 and batch * kv_heads >= MANY and kv_heads % CONSUMERS == 0:
            work = "many short"
        launch, groups, floats = _program_of(q.dtype, head_dim, page_size, heads, kv_heads, max_seqlen_q, work, device)
        scratch = None  # kept until the launch
        partial_at = counters_at = 0
        if shown > WHOLE:
            scratch = scratch_of(device, torch._C._cuda_getCurrentRawStream(device), floats, groups * kv_heads)
            partial_at, counters_at = scratch.partial_at, scratch.counters_at
            if groups > PIECES * batch:  # a CTA a multiprocessor, rather than more to merge
                groups = max(PIECES * batch, groups // 2)
        elif groups > batch:
            groups = batch
        sinks, *its = sinks_at(sinks)
        scale = LOG2_E * (head_dim**-0.5 if softmax_scale is None else softmax_scale)
        lse_at = 0 if lse is None else lse.data_ptr()
        others = partial_at, counters_at, lse_at, *its, max_seqlen_q, max_seqlen_k, window_left, groups, scale
        out = launched(launch, q, k_cache, v_cache, out, (page_table, cache_seqlens), others)
    elif out is None:
        out = torch.empty_like(q)
    return out if lse is None else (out, lse)
