"""Full causal attention for Hopper: of whole sequences whose keys lie in a row, and of new tokens to a paged cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia._machine import multiprocessors
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import aligned, deliver, to_write

_LOG2E = math.log2(math.e)
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Config:
    """What changes the code.

    Attributes:
        dtype: of q, k, v and the output.
        head_dim: 64 or 128.
        group: query heads a key head. The heads of a group are rows of the same tile, which reads their keys once.
        page_size: tokens of a page; 0 where the keys of a sequence lie in a row.
        causal: whether a query sees no later keys.
        sinks: the dtype of the sinks.
        dynamic: whether tiles are handed out by an atomic counter, or in turn.
        ordered: whether warpgroups take turns at the tensor cores.
        narrow: whether a tile's last block is half as wide where nobody sees its second half.
        by_fma: of how many exponentials one is computed without the unit for special functions; 0 for none.
        skip: how far, as a power of 2, weights may exceed 1 before the output is rescaled.
    """

    dtype: str
    head_dim: int
    group: int
    page_size: int = 0
    causal: bool = True
    sinks: str = "float32"
    dynamic: bool = True
    ordered: bool = True
    narrow: bool = True
    by_fma: int = 0
    late: bool = False
    section: int = 24
    pdl: bool = False
    skip: float = 8.0

    @property
    def block_m(self) -> int:
        return 192 if self.head_dim == 64 else 128

    @property
    def block_n(self) -> int:
        return 128

    @property
    def positions(self) -> int:
        """Query positions of a tile. A group that does not divide the rows leaves some unused."""
        return self.block_m // self.group

    @property
    def stages(self) -> int:
        return 4 if self.head_dim == 64 else 2

    @property
    def consumer_registers(self) -> int:
        return 160 if self.head_dim == 64 else 232

    @property
    def producer_registers(self) -> int:
        return 32 if self.head_dim == 64 else 40


def every_config() -> list[Config]:
    return [
        Config(dtype, head_dim, group, page_size)
        for dtype in ("bfloat16", "float16")
        for head_dim in (64, 128)
        for group in (1, 4, 8)
        for page_size in (0, *PAGE_SIZES)
    ]


@program(arch="sm_90a", configs=every_config)
def prefill_program(config: Config) -> tuple[Any, Sequence[Any]]:
    from . import prefill_device

    return prefill_device.host(config), prefill_device.fake_arguments(config)


@functools.cache
def _config(dtype: torch.dtype, head_dim: int, group: int, page_size: int, causal: bool, sinks: torch.dtype) -> Config:
    return Config(_NAMES[dtype], head_dim, group, page_size, causal, _NAMES[sinks])


# -- memory that outlives a call -----------------------------------------------------------------------------------------------


class _Scratch:
    """Of a device: the counters by which launches hand out tiles, and what stands in for absent arguments.

    A launch leaves its counter at zero. Launches that may run side by side need a counter each: every stream has one, and every
    launch that a graph captures, because graphs may be replayed on any stream.
    """

    COUNTERS = 16384

    def __init__(self, device: torch.device):
        self.device = device
        self.arena = torch.zeros(self.COUNTERS, 2, dtype=torch.int32, device=device)
        self.no_sinks: dict[int, Tensor] = {}
        self.no_lse: dict[int, Tensor] = {}
        self._of_stream: dict[int, Tensor] = {}
        self._used = 0
        # Once in a process: streams that were not waited for must not see memory before it is zero.
        torch.cuda.current_stream(device).synchronize()

    def counter(self) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            return self._next()
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self._of_stream.get(stream)
        if found is None:
            found = self._of_stream[stream] = self._next()
        return found

    def _next(self) -> Tensor:
        if self._used == self.COUNTERS:
            return torch.zeros(2, dtype=torch.int32, device=self.device)
        self._used += 1
        return self.arena[self._used - 1]


_scratches: dict[int, _Scratch] = {}


def _scratch_of(device: torch.device, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """A counter at zero, sinks that weigh nothing, and an lse that nobody reads."""
    scratch = _scratches.get(device.index)
    if scratch is None:
        if torch.cuda.is_current_stream_capturing():
            # Filled by the graph itself, at every replay.
            counter = torch.zeros(2, dtype=torch.int32, device=device)
            return counter, _no_sinks(heads, device), torch.empty(1, heads, device=device)
        scratch = _scratches[device.index] = _Scratch(device)
    no_sinks = scratch.no_sinks.get(heads)
    if no_sinks is None:
        no_sinks = _no_sinks(heads, device)
        if torch.cuda.is_current_stream_capturing():
            return scratch.counter(), no_sinks, torch.empty(1, heads, device=device)
        torch.cuda.current_stream(device).synchronize()
        scratch.no_sinks[heads] = no_sinks
        scratch.no_lse[heads] = torch.empty(1, heads, device=device)
    return scratch.counter(), no_sinks, scratch.no_lse[heads]


def _no_sinks(heads: int, device: torch.device) -> Tensor:
    return torch.full((heads,), -math.inf, device=device)


# -- launchers -----------------------------------------------------------------------------------------------------------------


def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Launches full causal attention of whole sequences. Arguments are checked, and there is no window and no logit_cap."""
    return _launch(q, k, v, cu_seqlens, None, None, True, sinks, return_lse, softmax_scale, out)


def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
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
    """Launches attention of new tokens to a paged cache. Arguments are checked, and there is no window, logit_cap or scale."""
    if k_cache.shape[0] == 0:  # nobody sees a key, but bulk copies are of some page
        k_cache, v_cache = k_cache.new_zeros(1, *k_cache.shape[1:]), v_cache.new_zeros(1, *v_cache.shape[1:])
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    if page_table.shape[1] == 0:
        page_table = page_table.new_zeros(page_table.shape[0], 1)
    return _launch(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, is_causal, sinks, return_lse, softmax_scale, out)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor | None,
    page_table: Tensor | None,
    causal: bool,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    written = to_write(out, q, (tokens, heads, head_dim))
    counter, no_sinks, no_lse = _scratch_of(q.device, heads)
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else no_lse
    if sinks is None:
        sinks = no_sinks
    elif sinks.dtype not in _NAMES:
        sinks = sinks.float()
    if tokens:
        config = _config(q.dtype, head_dim, group, 0 if page_table is None else k.shape[1], causal, sinks.dtype)
        tiles = (-(-tokens // config.positions) + starts.shape[0] - 1) * kv_heads
        prefill_program(config)(
            aligned(q),
            aligned(k),
            aligned(v),
            written,
            lse,
            sinks.contiguous(),
            starts.contiguous(),
            None if lengths is None else lengths.contiguous(),
            page_table,
            counter,
            (softmax_scale or head_dim**-0.5) * _LOG2E,
            int(return_lse),
            min(tiles, multiprocessors(q.device.index)),
        )
    result = deliver(written, out)
    return (result, lse) if return_lse else result
