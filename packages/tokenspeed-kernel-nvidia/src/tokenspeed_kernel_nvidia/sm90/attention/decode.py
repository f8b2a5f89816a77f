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
from tokenspeed_kernel_nvidia._rows import aligned, deliver, to_write
from tokenspeed_kernel_nvidia.sm90.attention.scratch import scratch_of

CONSUMERS = 4  # warps that compute; one more loads
SHARED_BYTES = 228 * 1024  # of a multiprocessor
OTHER_BYTES = 3072  # of a CTA, besides tiles and results: 1024 that the system takes, and 1024 to begin at a multiple of that
ROWS = (8, 16, 32, 64)  # query rows of a key head that programs are made for
FEW = 2048  # keys of all sequences together that are little work
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
    """

    dtype: str
    head_dim: int
    box: int
    rows: int
    split: bool
    block: int
    resident: int

    @property
    def row_warps(self) -> int:
        """Warps that share the rows of a tile, each with all its keys: a warp's sums have 64 registers a thread at most."""
        return max(1, self.rows // (32 if self.head_dim == 64 else 16))

    @property
    def parts(self) -> int:
        """Warps with results of the same rows, from different tiles."""
        return CONSUMERS // self.row_warps

    @property
    def merge_floats(self) -> int:
        """Shared memory for what warps have found."""
        return self.parts * self.rows * (self.head_dim + 8)

    @property
    def stages(self) -> int:
        """Tiles on their way. A multiple of the parts, so that a warp meets every phase of the barriers that it waits for."""
        room = SHARED_BYTES // self.resident - OTHER_BYTES - 4 * self.merge_floats
        return room // (4 * self.block * self.head_dim) // self.parts * self.parts


def _tiles(head_dim: int, rows: int) -> list[tuple[int, int]]:
    """Keys of a tile and CTAs of a multiprocessor that there are programs for: for much work, and for little."""
    if head_dim == 128 or rows > 16:
        return [(32, 2)]
    return [(64, 2), (32, 2)]


def every_config() -> list[Config]:
    """All that is served."""
    return [
        Config(dtype, head_dim, box, rows, split, block, resident)
        for dtype in DTYPES.values()
        for head_dim in _limits.HEAD_DIMS
        for rows in ROWS
        for split in (True, False)
        for block, resident in _tiles(head_dim, rows)
        for box in sorted({min(block, page_size) for page_size in _limits.PAGE_SIZES})
    ]


@program(arch="sm_90a", configs=every_config)
def decode_program(config: Config) -> tuple[Any, list[Any]]:
    from tokenspeed_kernel_nvidia.sm90.attention import decode_device

    return decode_device.host(config), decode_device.fake_arguments(config)


@functools.cache
def _program_of(
    dtype: torch.dtype, head_dim: int, page_size: int, heads: int, kv_heads: int, q_len: int, split: bool, few: bool, device: int
) -> tuple[Callable[..., Any], int, int]:
    """The program, how many groups there are, and how many floats partial results take."""
    rows = next(rows for rows in ROWS if rows >= heads // kv_heads * q_len)
    tiles = _tiles(head_dim, rows)
    block, resident = tiles[-1 if few else 0]
    groups = max(1, resident * multiprocessors(device) // kv_heads)
    config = Config(DTYPES[dtype], head_dim, min(block, page_size), rows, split, block, resident)
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

    Partial results go to memory that is kept for each stream (`scratch`). See `tokenspeed_kernel_nvidia.mha_decode_with_kvcache`.
    """
    device = q.device
    tokens, heads, head_dim = q.shape
    written = to_write(out, q, q.shape)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=device) if return_lse else None
    batch, max_pages = page_table.shape
    if tokens:
        pages, page_size, kv_heads, _ = k_cache.shape
        if not pages:  # all sequences are empty, but a TMA wants something to describe
            k_cache = v_cache = q.new_zeros(1, *k_cache.shape[1:])
        capacity = min(max_seqlen_k, max_pages * page_size)
        shown = capacity if window_left < 0 else min(capacity, window_left + max_seqlen_q)
        launch, groups, floats = _program_of(
            q.dtype, head_dim, page_size, heads, kv_heads, max_seqlen_q, shown > WHOLE, batch * shown < FEW, device.index
        )
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        scratch = scratch_of(device, stream, floats, batch * kv_heads)
        if sinks is not None:
            sinks = (sinks if sinks.dtype in SINKS else sinks.float()).contiguous()
        launch(
            aligned(q), aligned(k_cache), aligned(v_cache), page_table, cache_seqlens.contiguous(), written,
            scratch.partial_at, scratch.counters_at, 0 if lse is None else lse.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
            0 if sinks is None else SINKS[sinks.dtype], max_seqlen_q, capacity, window_left, groups, page_size.bit_length() - 1,
            LOG2_E * (head_dim**-0.5 if softmax_scale is None else softmax_scale),
        )  # fmt: skip
    result = deliver(written, out)
    return result if lse is None else (result, lse)
