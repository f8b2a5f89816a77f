"""Decode: attention of the newest tokens of sequences to a paged cache, on Hopper.

Memory decides the speed, so every multiprocessor has to have work, and much of the cache on its way, from beginning to end. The
grid is fixed: CTAs for all key heads are a *group*, and there are as many groups as two CTAs a multiprocessor make. The tiles of
all sequences, one after another, are cut into as many equal ranges as there are groups, on the device, from cache_seqlens: a
captured graph stays right, and evenly loaded, when lengths change. One warp of a CTA loads tiles into a ring in shared memory by
TMA, four compute. Where a sequence goes on in other groups, each leaves a partial result, and the last one to do so merges them, in
a fixed order. Sequences of which little is visible, as in layers with a short window, are not divided: groups take turns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia import _limits
from tokenspeed_kernel_nvidia._machine import multiprocessors
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import aligned, is_aligned
from tokenspeed_kernel_nvidia.sm90.attention.scratch import scratch_of

CONSUMERS = 4  # warps that compute; one more loads
SHARED_BYTES = 228 * 1024  # of a multiprocessor
OTHER_BYTES = 3072  # of a CTA, besides tiles and results: 1024 that the system takes, and 1024 to begin at a multiple of that
ROWS = (8, 16, 32, 64)  # query rows of a key head that programs are made for
PIECES = 16  # partial results of a sequence that are merged at once
FEW = 2048  # keys of all sequences together that are little work
MANY = 400  # key heads of all sequences: a CTA for four of them keeps three quarters of the multiprocessors busy
WHOLE = 256  # keys of a sequence that are not worth dividing
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
SINKS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
LOG2_E = math.log2(math.e)


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
            return 4
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


def _tiles(head_dim: int, rows: int, split: bool) -> list[tuple[int, int]]:
    """Keys of a tile and CTAs of a multiprocessor that there are programs for: for much work, and for little.

    Figures are microseconds on an H200 of 64 query heads and 8 key heads of dimension 64, in pages of 64. They compare: calls stood
    one after another in a CUDA graph and overlapped, and some of the keys may still have been cached.
    """
    if head_dim == 128:
        return [(32, 2)]  # what registers allow
    if not split:
        return [(16, 4 if rows == 8 else 2)]  # 64 windows of 128: 7.5, with 32 keys 7.9, with two CTAs 8.1
    if rows > 16:
        return [(32, 2)]  # what registers allow
    # 64 x 1K: 36.6, with 32 keys 39.8, with three CTAs 40.3. 16 x 8K: 70.0, 71.0, 70.9.
    # 1 x 1K: with 16 keys 6.49, with 64 6.53, with 32 7.12.
    return [(64, 2), (16, 2)]


def _tile_of_heads(head_dim: int, rows: int) -> tuple[int, int] | None:
    """The same of the program with a key head for each warp; None where a warp has no room for all rows."""
    if rows * head_dim > 2048:
        return None
    return (32, 2) if head_dim == 64 and rows <= 16 else (16, 2)  # what registers and shared memory allow


def every_config() -> list[Config]:
    """All that is served."""
    tiles = [
        (head_dim, rows, split, block, resident, 1)
        for head_dim in _limits.HEAD_DIMS
        for rows in ROWS
        for split in (True, False)
        for block, resident in _tiles(head_dim, rows, split)
    ]
    tiles += [
        (head_dim, rows, False, *tile, CONSUMERS)
        for head_dim in _limits.HEAD_DIMS
        for rows in ROWS
        if (tile := _tile_of_heads(head_dim, rows)) is not None
    ]
    return [
        Config(dtype, head_dim, box, rows, split, block, resident, heads)
        for dtype in DTYPES.values()
        for head_dim, rows, split, block, resident, heads in tiles
        for box in sorted({min(block, page_size) for page_size in _limits.PAGE_SIZES})
    ]


@program(arch="sm_90a", configs=every_config)
def decode_program(config: Config) -> tuple[Any, list[Any]]:
    from tokenspeed_kernel_nvidia.sm90.attention import decode_device

    return decode_device.host(config), decode_device.fake_arguments(config)


@functools.cache
def _program_of(
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    split: bool,
    few: bool,
    many: bool,
    device: int,
) -> tuple[Callable[..., Any], int, int, int, int]:
    """The program, groups, floats of partial results, query heads a key head, and the logarithm of page_size.

    Args:
        few: whether all sequences together have few keys.
        many: whether there are many sequences.
    """
    ratio = heads // kv_heads
    rows = next(rows for rows in ROWS if rows >= ratio * q_len)
    tiles = _tiles(head_dim, rows, split)
    block, resident = tiles[-1 if few else 0]
    each, of_heads = 1, _tile_of_heads(head_dim, rows)
    if many and not split and kv_heads % CONSUMERS == 0 and of_heads is not None:
        each, (block, resident) = CONSUMERS, of_heads
    groups = max(1, resident * multiprocessors(device) * each // kv_heads)
    config = Config(DTYPES[dtype], head_dim, min(block, page_size), rows, split, block, resident, each)
    floats = 2 * groups * kv_heads * rows * (head_dim + 2)
    return decode_program(config), groups, floats, ratio, page_size.bit_length() - 1


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
    # A few microseconds a call are all that is left beside a decoding step's other work, so little is asked of tensors.
    tokens, heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    device = q.device.index
    contiguous = q.is_contiguous()
    q_at = q.data_ptr()
    if (q_at | k_cache.data_ptr() | v_cache.data_ptr()) % 16 or not (
        contiguous and k_cache.is_contiguous() and v_cache.is_contiguous()
    ):
        q, k_cache, v_cache = aligned(q), aligned(k_cache), aligned(v_cache)
        contiguous = q.is_contiguous()
        q_at = q.data_ptr()
    if out is None and contiguous:
        written = torch.empty_like(q)
    elif out is None or not is_aligned(out):
        written = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        written = out
        contiguous = contiguous and out.is_contiguous()
    q_rows: tuple[int, ...] = (heads * head_dim, head_dim)
    out_rows = q_rows
    if not contiguous:
        q_rows, out_rows = q.stride()[:2], written.stride()[:2]
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if return_lse else None
    if tokens:
        if not pages:  # all sequences are empty, but a TMA wants something to describe
            k_cache = v_cache = q.new_zeros(1, *k_cache.shape[1:])
        batch = tokens // max_seqlen_q
        shown = max_seqlen_k if window_left < 0 else min(max_seqlen_k, window_left + max_seqlen_q)
        launch, groups, floats, ratio, page_shift = _program_of(
            q.dtype,
            head_dim,
            page_size,
            heads,
            kv_heads,
            max_seqlen_q,
            shown > WHOLE,
            batch * shown < FEW,
            batch * kv_heads >= MANY,
            device,
        )
        scratch = None  # kept until the launch
        partial_at = counters_at = 0
        if shown > WHOLE:
            scratch = scratch_of(device, torch._C._cuda_getCurrentRawStream(device), floats, groups * kv_heads)
            partial_at, counters_at = scratch.partial_at, scratch.counters_at
            if groups > PIECES * batch:  # a CTA a multiprocessor, rather than more to merge
                groups = max(PIECES * batch, groups // 2)
        elif groups > batch:
            groups = batch
        sinks_at = sinks_kind = 0
        if sinks is not None:
            sinks_kind = SINKS.get(sinks.dtype, 0)
            if not (sinks_kind and sinks.is_contiguous()):
                sinks, sinks_kind = sinks.float().contiguous(), SINKS[torch.float32]
            sinks_at = sinks.data_ptr()
        if not cache_seqlens.is_contiguous():
            cache_seqlens = cache_seqlens.contiguous()
        launch(
            k_cache, v_cache, q_at, *q_rows, written.data_ptr(), *out_rows, page_table.data_ptr(), *page_table.stride(),
            cache_seqlens.data_ptr(), batch, partial_at, counters_at, 0 if lse is None else lse.data_ptr(),
            sinks_at, sinks_kind, max_seqlen_q, ratio, max_seqlen_k, window_left, groups, page_shift,
            LOG2_E * (head_dim**-0.5 if softmax_scale is None else softmax_scale),
        )  # fmt: skip
    result = written if written is out or out is None else out.copy_(written)
    return result if lse is None else (result, lse)
