"""Device code of `store_kv_cache`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.kvcache._write_device import as_stored, locate_slots
from tokenspeed_kernel.triton.quantization._encode_device import divide, prepare_divisor


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
