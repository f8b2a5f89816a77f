"""Device code of `decoded`: GEMMs that dequantise their operands in registers.

Grid: [output tiles of all matrices of the batch, splits of k]. The MMAs are swap-AB: a tile computes ``b [BLOCK_N, BLOCK_K] @ a
[BLOCK_M, BLOCK_K].T``, so the accumulator is [BLOCK_N, BLOCK_M]. The weights are the first operand, which WGMMA accepts in
registers. So dequantised weights need no round trip through shared memory.

One-byte block scales (``MICRO``) multiply the elements before the MMA, which is exact, see `decoded`. Larger blocks multiply each
step's partial sum. Scales per line or per tensor multiply the accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import wait_for_products
from tokenspeed_kernel.triton.gemm._tiles_device import Operand, Output, scale_by_lines, scale_of_block, store_tile, tile_of
from tokenspeed_kernel.triton.quantization._encode_device import (
    decode_e2m1,
    decode_e8m0,
    decode_fp8,
    swizzled_in_tile,
    unpack_e2m1,
)


@triton.jit
def _decoded_lines(
    operand,
    line,
    inside,
    k0,
    K,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    MICRO: tl.constexpr,
    BLOCK: tl.constexpr,
    STORED: tl.constexpr,
    SWIZZLED: tl.constexpr,
    EVEN_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Loads ``[LINES, BLOCK_K]`` of an operand, from element k0 of each line on, and dequantises to dtype COMPUTE. Elements beyond
    K are 0.

    ``line``, ``inside``: the lines' indices, and which of the lines exist. ``MICRO``: each block of ``BLOCK`` elements along k
    has a one-byte scale, which is applied here.
    """
    if FORMAT == "e2m1":
        at = k0 // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        mask = inside if EVEN_K else inside & (at < K // 2)
        value = decode_e2m1(
            unpack_e2m1(tl.load(operand.data + line.to(tl.int64) * operand.line_stride + at * operand.k_stride, mask=mask, other=0))
        )
    else:
        at = k0 + tl.arange(0, BLOCK_K)[None, :]
        mask = inside if EVEN_K else inside & (at < K)
        loaded = tl.load(operand.data + line.to(tl.int64) * operand.line_stride + at * operand.k_stride, mask=mask, other=0)
        if FORMAT == "dense":
            value = loaded
        else:
            value = decode_fp8(loaded, FORMAT, NATIVE)
    if MICRO:
        block = k0 // BLOCK + tl.arange(0, BLOCK_K // BLOCK)[None, :]
        mask = inside if EVEN_K else inside & (block < K // BLOCK)
        if SWIZZLED:
            across = swizzled_in_tile(line, block) + block // 4 * operand.scale_k_stride
            byte = tl.load(operand.scale + (line // 128).to(tl.int64) * operand.scale_line_stride + across, mask=mask, other=0)
        else:
            along = operand.scale + line.to(tl.int64) * operand.scale_line_stride
            byte = tl.load(along + block * operand.scale_k_stride, mask=mask, other=0)
        scale = decode_e8m0(byte) if STORED == "e8m0" else decode_fp8(byte, "e4m3fn", NATIVE)
        value = tl.reshape(value, [LINES, BLOCK_K // BLOCK, BLOCK]) * scale[:, :, None]
        value = tl.reshape(value, [LINES, BLOCK_K])
    return value.to(COMPUTE)


@triton.jit
def _accumulate(acc, a, b, a_operand, b_operand, m, n, M, N, k0, FORMATS: tl.constexpr):
    """Returns ``acc + b @ a.T`` [BLOCK_N, BLOCK_M], for one step along k. Block scales multiply the step's partial sum."""
    A_STORED: tl.constexpr = FORMATS.a_scales
    B_STORED: tl.constexpr = FORMATS.b_scales
    COMPUTE: tl.constexpr = FORMATS.compute
    PRECISION: tl.constexpr = FORMATS.precision
    if FORMATS.a_scaling == "block" or FORMATS.b_scaling == "block":
        dots = tl.dot(b, tl.trans(a), input_precision=PRECISION)
        if FORMATS.a_scaling == "block":
            dots *= scale_of_block(a_operand, m[None, :], k0 // FORMATS.a_block, (m < M)[None, :], A_STORED)
        if FORMATS.b_scaling == "block":
            line = (n // FORMATS.b_lines)[:, None]
            dots *= scale_of_block(b_operand, line, k0 // FORMATS.b_block, (n < N)[:, None], B_STORED)
        acc += dots
    elif FORMATS.split_a:
        high = a.to(COMPUTE)
        low = (a.to(tl.float32) - high.to(tl.float32)).to(COMPUTE)
        acc = tl.dot(b, tl.trans(low), acc, input_precision=PRECISION)
        acc = tl.dot(b, tl.trans(high), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(b, tl.trans(a), acc, input_precision=PRECISION)
    return acc


@triton.jit
def decoded_mm_kernel(
    a_ptr,
    b_ptr,
    a_scale_ptr,
    b_scale_ptr,
    alpha_ptr,
    bias_ptr,
    out_ptr,
    M, N, K,
    stride_a_batch, stride_am, stride_ak,
    stride_b_batch, stride_bn, stride_bk,
    stride_as_batch, stride_asm, stride_ask,
    stride_bs_batch, stride_bsn, stride_bsk,
    stride_out_batch, stride_out_m, stride_out_n, stride_split: tl.int64,
    k_per_split,
    FORMATS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes one output tile of one matrix of the batch (grid axis 0), over one split of k (grid axis 1)."""
    A_FORMAT: tl.constexpr = FORMATS.a
    B_FORMAT: tl.constexpr = FORMATS.b
    A_SCALING: tl.constexpr = FORMATS.a_scaling
    B_SCALING: tl.constexpr = FORMATS.b_scaling
    A_MICRO: tl.constexpr = A_SCALING == "micro"
    B_MICRO: tl.constexpr = B_SCALING == "micro"
    # Triton 3.6 does not pass a constexpr's field to another function as a constexpr.
    A_STORED: tl.constexpr = FORMATS.a_scales
    B_STORED: tl.constexpr = FORMATS.b_scales
    A_BLOCK: tl.constexpr = FORMATS.a_block
    B_BLOCK: tl.constexpr = FORMATS.b_block
    A_SWIZZLED: tl.constexpr = FORMATS.a_swizzled
    B_SWIZZLED: tl.constexpr = FORMATS.b_swizzled
    SPLIT_A: tl.constexpr = FORMATS.split_a
    COMPUTE: tl.constexpr = FORMATS.compute
    A_COMPUTE: tl.constexpr = tl.float16 if SPLIT_A else COMPUTE
    NATIVE: tl.constexpr = FORMATS.native
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    EVEN_K: tl.constexpr = TILE.even_k
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch, split = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64), tl.program_id(1)
    tile_m, tile_n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, TILE.group)
    a_ptr += batch * stride_a_batch
    b_ptr += batch * stride_b_batch
    out_ptr += batch * stride_out_batch + split * stride_split
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if A_SCALING != "none":
        a_scale_ptr += batch * stride_as_batch
    if B_SCALING != "none":
        b_scale_ptr += batch * stride_bs_batch
    a_operand = Operand(a_ptr, stride_am, stride_ak, a_scale_ptr, stride_asm, stride_ask)
    b_operand = Operand(b_ptr, stride_bn, stride_bk, b_scale_ptr, stride_bsn, stride_bsk)
    out = Output(out_ptr, stride_out_m, stride_out_n, bias_ptr)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * k_per_split
    for k0 in range(first, tl.minimum(first + k_per_split, K), BLOCK_K):
        wait_for_products()
        b = _decoded_lines(
            b_operand, n[:, None], (n < N)[:, None], k0, K, BLOCK_N, BLOCK_K, B_FORMAT,
            B_MICRO, B_BLOCK, B_STORED, B_SWIZZLED, EVEN_K, COMPUTE, NATIVE,
        )  # fmt: skip
        a = _decoded_lines(
            a_operand, m[:, None], (m < M)[:, None], k0, K, BLOCK_M, BLOCK_K, A_FORMAT,
            A_MICRO, A_BLOCK, A_STORED, A_SWIZZLED, EVEN_K, A_COMPUTE, NATIVE,
        )  # fmt: skip
        acc = _accumulate(acc, a, b, a_operand, b_operand, m, n, M, N, k0, FORMATS)
    acc = scale_by_lines(acc, a_operand, m[None, :], (m < M)[None, :], A_SCALING)
    acc = scale_by_lines(acc, b_operand, n[:, None], (n < N)[:, None], B_SCALING)
    if alpha_ptr is not None:
        acc *= tl.load(alpha_ptr)
    store_tile(acc, out, m[None, :], n[:, None], M, N, FORMATS.interpreted)
