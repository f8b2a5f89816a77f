"""Writing keys and values into the paged cache: a program takes a tile of heads (of whatever tokens) of both."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.kvcache._write import COPIED, as_storable, as_stored, cache_format, locate_slots
from tokenspeed_kernel.triton.quantization._encode import abilities, divide, division_steps, prepare_divisor


@dataclass(frozen=True)
class Tile:
    """What one program writes: this many heads of k and of v, each of a power of two of columns."""

    heads: int
    block: int
    warps: int


# H200, 65536 tokens of 8 heads of 64: bf16 moves 92% of what a copy does to slots in random order, 95% in rising order; larger
# tiles lose 2 to 4%. e4m3fn with scales moves 92%, with twice the warps or twice the heads 84%. 64 tokens take 1.5 us and 1.9.
_ELEMENTS, _WARPS = 1024, 2
# Heads that cannot be moved 16 bytes at a time take more registers an element; with fewer elements a thread nothing spills.
_UNALIGNED_WARPS = 4


@functools.cache
def tile_for(head_dim: int) -> Tile:
    """The tile for heads of this size."""
    block = triton.next_power_of_2(head_dim)
    # Of a very long head no more than 32 elements a thread.
    warps = max(_UNALIGNED_WARPS if head_dim % 8 else _WARPS, block // 1024)
    return Tile(max(1, _ELEMENTS // block), block, warps)


@triton.jit
def _divided(values, scale, head, SCALES: tl.constexpr, INTERPRETED: tl.constexpr, STEPS: tl.constexpr):
    """Values over their head's scale, float32. SCALES: how many there are, 0 for none."""
    if SCALES == 0:
        quotient = values
    else:
        loaded = tl.load(scale + (head if SCALES > 1 else tl.zeros_like(head)))
        factor, divisor, reciprocal = prepare_divisor(loaded, INTERPRETED)
        values = values.to(tl.float32)
        quotient = divide(values, factor, divisor, reciprocal, INTERPRETED, STEPS)
        # Quotients that overflow come out as NaN, as do infinite values; they are to saturate.
        quotient = tl.where(quotient != quotient, values * float("inf"), quotient)
    return quotient


@triton.jit(do_not_specialize=["tokens"])
def store_kv_cache_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_page_stride,
    k_slot_stride,
    k_cache_head_stride,
    k_cache_dim_stride,
    v_page_stride,
    v_slot_stride,
    v_cache_head_stride,
    v_cache_dim_stride,
    slot_mapping_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=token < tokens, other=-1)
    written = (slot >= 0) & (column < HEAD_DIM)
    keys = tl.load(k + token * k_token_stride + head * k_head_stride + column, mask=written)
    values = tl.load(v + token * v_token_stride + head * v_head_stride + column, mask=written)
    keys = as_stored(_divided(keys, k_scale, head, K_SCALES, INTERPRETED, STEPS), FORMAT, NATIVE)
    values = as_stored(_divided(values, v_scale, head, V_SCALES, INTERPRETED, STEPS), FORMAT, NATIVE)
    k_place = locate_slots(slot, PAGE_SIZE, k_page_stride, k_slot_stride) + head * k_cache_head_stride
    v_place = locate_slots(slot, PAGE_SIZE, v_page_stride, v_slot_stride) + head * v_cache_head_stride
    tl.store(k_cache + k_place + column * k_cache_dim_stride, keys, mask=written)
    tl.store(v_cache + v_place + column * v_cache_dim_stride, values, mask=written)


def store_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `tokenspeed_kernel.store_kv_cache`."""
    tokens, kv_heads, head_dim = k.shape
    if not k.numel() or not k_cache.numel():
        return
    form = cache_format(k.dtype, k_cache.dtype)
    native, interpreted, steps = False, False, 0
    if form != COPIED:
        able = abilities(k.device)
        native, interpreted, steps = able.native, able.interpreted, division_steps(k.dtype)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    if k_cache.element_size() == 1:
        k, v, k_cache, v_cache = as_storable(k), as_storable(v), as_storable(k_cache), as_storable(v_cache)
    tile = tile_for(head_dim)
    store_kv_cache_kernel[(-(-tokens * kv_heads // tile.heads),)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale if k_scale is None else k_scale.contiguous(),
        v_scale if v_scale is None else v_scale.contiguous(),
        tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride(),
        *v_cache.stride(),
        slot_mapping.stride(0),
        HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[1],
        FORMAT=form,
        K_SCALES=0 if k_scale is None else k_scale.numel(),
        V_SCALES=0 if v_scale is None else v_scale.numel(),
        NATIVE=native,
        INTERPRETED=interpreted,
        STEPS=steps,
        TILE=tile.heads,
        BLOCK=tile.block,
        num_warps=tile.warps,
    )
