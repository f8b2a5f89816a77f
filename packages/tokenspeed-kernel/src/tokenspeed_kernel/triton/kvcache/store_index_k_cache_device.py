"""Device code of `store_index_k_cache`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.kvcache._write_device import slot_of
from tokenspeed_kernel.triton.quantization._encode_device import divide, encode_fp8, largest, prepare_divisor
from tokenspeed_kernel.triton.quantization.quantize_fp8_device import scale_of
from tokenspeed_kernel.triton.views_device import Cache

_LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit(do_not_specialize=["tokens"])
def store_index_k_cache_kernel(
    k,
    k_cache,
    k_scale_cache,
    slot_mapping,
    tokens,
    k_stride_t,
    k_stride_d,
    page_stride,
    slot_stride,
    dim_stride,
    scale_page_stride,
    scale_slot_stride,
    slot_mapping_stride,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    ENCODING: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantises the indexer's keys of TOKENS tokens to fp8, and stores them and their scales in the cache."""
    FORMAT: tl.constexpr = ENCODING.format
    NATIVE: tl.constexpr = ENCODING.native
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)[None, :]
    slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=token < tokens, other=-1)
    there = (slot >= 0)[:, None] & (column < HEAD_DIM)
    x = tl.load(k + token[:, None] * k_stride_t + column * k_stride_d, mask=there, other=0.0).to(tl.float32)
    scale = scale_of(largest(x, 1), _LARGEST_E4M3)
    if POWER_OF_2:  # round up to a power of two; the scale is a normal float32
        rounded = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale != scale, scale, rounded)
    factor, divisor, reciprocal = prepare_divisor(scale, ENCODING.interpreted)
    quotient = divide(x, factor[:, None], divisor[:, None], reciprocal[:, None], ENCODING.interpreted, ENCODING.steps)
    keys = Cache(k_cache, page_stride, slot_stride, 0, dim_stride)
    scales = Cache(k_scale_cache, scale_page_stride, scale_slot_stride, 0, 0)
    to = slot_of(keys, slot, 0, PAGE_SIZE)[:, None] + column * dim_stride
    tl.store(to, encode_fp8(quotient, FORMAT, NATIVE), mask=there)
    tl.store(slot_of(scales, slot, 0, PAGE_SIZE), scale, mask=slot >= 0)
