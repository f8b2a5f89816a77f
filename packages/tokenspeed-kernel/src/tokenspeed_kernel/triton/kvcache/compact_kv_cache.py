"""Moves accepted draft tokens to consecutive positions in the paged cache. A program moves a range of columns of all nodes of a
sequence.

The kernel loads all nodes before it stores any node, because the destination slot of one node can be the source slot of another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, FP8, TRITON, cdiv, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

# Elements per program and per thread.
_ELEMENTS, _A_THREAD = 4096, 32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Shape(NamedTuple):
    """Sizes of the caches: tokens in a page, columns of one head (``dim``), and columns of all heads (``width``).

    Fields that begin with ``v_`` are sizes of the value cache, the others of the key cache. ``v_width`` is 0 if there is no value
    cache.
    """

    page_size: int
    dim: int
    width: int
    v_dim: int
    v_width: int


@register_kernel(
    "kvcache",
    "compact_kv_cache",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("k_cache", "dense", (*FLOATS, torch.float64, *FP8, torch.uint8)),
    traits={"values": any, "nodes": at_most(1024)},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def compact_kv_cache(
    k_cache: Tensor, v_cache: Tensor | None, page_table: Tensor, cache_seqlens: Tensor, path: Tensor, counts: Tensor
) -> None:
    """Implements the operator `tokenspeed_kernel.compact_kv_cache`, which documents the arguments."""
    batch, nodes = path.shape
    k, v = _as_heads(k_cache), None if v_cache is None else _as_heads(v_cache)
    width, v_width = k.shape[2:].numel(), 0 if v is None else v.shape[2:].numel()
    block_n = next_power_of_2(nodes)
    block_c = max(16, _ELEMENTS // block_n)
    programs = cdiv(width, block_c) + cdiv(v_width, block_c)
    if not batch or not programs or not k.shape[0]:
        return
    device_code.compact_kernel[(batch, programs)](
        k,
        v,
        page_table,
        cache_seqlens,
        path,
        counts,
        *k.stride(),
        *(k.stride() if v is None else v.stride()),
        *page_table.stride(),
        cache_seqlens.stride(0),
        *path.stride(),
        counts.stride(0),
        nodes,
        SHAPE=Shape(k.shape[1], k.shape[3], width, 1 if v is None else v.shape[3], v_width),
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        num_warps=max(1, min(8, block_n * block_c // (32 * _A_THREAD))),
    )


def _as_heads(cache: Tensor) -> Tensor:
    """Views a cache as ``[pages, page_size, heads, dim]`` of integers as wide as its elements, because the kernel only moves
    bits.
    """
    cache = cache.view(_INTEGERS[cache.element_size()])
    return cache.unsqueeze(2) if cache.dim() == 3 else cache
