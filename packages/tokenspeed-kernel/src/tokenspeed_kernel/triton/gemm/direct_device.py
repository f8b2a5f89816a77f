"""Device code of `direct`: ``out = a @ b`` with operands that the tensor cores read as stored.

Grid: [output tiles of all matrices of the batch, splits of k]. With ``TILE.persistent``, axis 0 has fewer programs than tiles, and
a program loops over its tiles. The loop is flattened, so that the loads of the next tile overlap the epilogue of this one.

Both operands are read as *lines* along k: rows of a, columns of b. A tile is ``x [BLOCK_M, BLOCK_K] @ w [BLOCK_N, BLOCK_K].T``.
Line indices wrap around at the last line instead of being masked; the surplus rows and columns are not stored. Elements beyond K
are masked to 0 unless ``TILE.even_k``.

Scales per line or per tensor multiply the accumulator after the loop. Block scales multiply the partial sum of each step along k,
before it is added to the accumulator. ``TILE.partial`` also adds each step's partial sum in float32, because the tensor core's fp8
accumulator is narrower than float32, see `Config`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.gemm._tiles_device import Operand, Output, scale_by_lines, scale_of_block, store_tile, tile_of
from tokenspeed_kernel.triton.gemm.direct import SCALE_BLOCKS, SCALE_LINES

_SCALE_LINES, _SCALE_BLOCKS = tl.constexpr(SCALE_LINES), tl.constexpr(SCALE_BLOCKS)


@triton.jit
def _lines(
    operand,
    line0,
    lines,
    k0,
    K,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Loads ``[LINES, BLOCK_K]`` of an operand, from line ``line0`` and element k0 on.

    Lines beyond the operand's last line have arbitrary values, and their results are not stored. Elements beyond K are 0: a tensor
    descriptor pads with zeros, and pointers are masked.
    """
    if DESCRIPTOR:
        tile = operand.data.load([line0, k0])
    else:
        line = (line0 + tl.arange(0, LINES)) % lines
        at = k0 + tl.arange(0, BLOCK_K)
        pointers = operand.data + line.to(tl.int64)[:, None] * operand.line_stride + at[None, :] * operand.k_stride
        if EVEN_K:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(at < K)[None, :], other=0.0)
    return tile


@triton.jit
def _block_scales(
    a_operand,
    b_operand,
    m,
    n,
    n0,
    M,
    N,
    block,
    BLOCK_N: tl.constexpr,
    A_SCALING: tl.constexpr,
    A_STORED: tl.constexpr,
    B_STORED: tl.constexpr,
    B_LINES: tl.constexpr,
):
    """Loads the scales of a and b for block number ``block`` along k.

    a's scales are ``[BLOCK_M, 1]``, or 1.0 if a has no block scales. b's scales are ``[1, BLOCK_N]``, or a scalar if the whole tile
    shares one.
    """
    if B_LINES % BLOCK_N == 0:
        b_scale = scale_of_block(b_operand, n0 // B_LINES, block, n0 < N, B_STORED)
    else:
        b_scale = scale_of_block(b_operand, n // B_LINES, block, n < N, B_STORED)
    if A_SCALING == "block":
        a_scale = scale_of_block(a_operand, m, block, m < M, A_STORED)
    else:
        a_scale = 1.0
    return a_scale, b_scale


@triton.jit
def _accumulate(acc, x, w, a_operand, b_operand, m, n, n0, M, N, k0, SCALING: tl.constexpr, TILE: tl.constexpr):
    """Returns ``acc + x @ w.T``, for one step along k. Block scales multiply the step's partial sum."""
    # Triton 3.6 does not pass a constexpr's field to another function as a constexpr.
    A_SCALING: tl.constexpr = SCALING.a
    A_STORED: tl.constexpr = SCALING.a_stored
    B_STORED: tl.constexpr = SCALING.b_stored
    B_LINES: tl.constexpr = SCALING.b_lines
    BLOCK_N: tl.constexpr = TILE.n
    if SCALING.b == "block":
        # Load the scales before the dot, so that the loads overlap the MMA.
        a_scales, b_scales = _block_scales(
            a_operand, b_operand, m, n, n0, M, N, k0 // SCALING.block, BLOCK_N, A_SCALING, A_STORED, B_STORED, B_LINES
        )
        dots = tl.dot(x, tl.trans(w))
        if A_SCALING == "block":
            acc += dots * (a_scales * b_scales)
        else:
            acc += dots * b_scales
    elif TILE.partial:
        acc += tl.dot(x, tl.trans(w))
    else:
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def direct_mm_kernel(
    a,
    b,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    M, N, K, batches,
    stride_a_batch, stride_am, stride_ak,
    stride_b_batch, stride_bn, stride_bk,
    stride_as_batch, stride_asm, stride_ask,
    stride_bs_batch, stride_bsn, stride_bsk,
    stride_out_batch, stride_out_m, stride_out_n, stride_split: tl.int64,
    k_per_split,
    SCALING: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes output tiles (grid axis 0) of the matrices of the batch, over one split of k (grid axis 1).

    a and b are pointers or tensor descriptors. A split covers ``k_per_split`` elements of k. With several splits, split ``i``
    stores its partial sums at ``out_ptr + i * stride_split``, and `sum_splits` adds them.
    """
    A_SCALING: tl.constexpr = SCALING.a
    B_SCALING: tl.constexpr = SCALING.b
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    DESCRIPTORS: tl.constexpr = TILE.descriptors
    PERSISTENT: tl.constexpr = TILE.persistent
    EVEN_K: tl.constexpr = TILE.even_k
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    split = tl.program_id(1)
    first = split * k_per_split
    last = tl.minimum(first + k_per_split, K)
    if PERSISTENT:
        step = tl.num_programs(0)
    else:
        step = tiles * batches
    for index in tl.range(tl.program_id(0), tiles * batches, step, flatten=PERSISTENT):
        batch = (index // tiles).to(tl.int64)
        tile_m, tile_n = tile_of(index % tiles, tiles_m, tiles_n, TILE.group)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        m = (m0 + tl.arange(0, BLOCK_M))[:, None]
        n = (n0 + tl.arange(0, BLOCK_N))[None, :]
        if DESCRIPTORS:
            a_from, b_from = a, b
        else:
            a_from, b_from = a + batch * stride_a_batch, b + batch * stride_b_batch
        a_scale, b_scale = a_scale_ptr, b_scale_ptr
        if A_SCALING != "none":
            a_scale += batch * stride_as_batch
        if B_SCALING != "none":
            b_scale += batch * stride_bs_batch
        a_operand = Operand(a_from, stride_am, stride_ak, a_scale, stride_asm, stride_ask)
        b_operand = Operand(b_from, stride_bn, stride_bk, b_scale, stride_bsn, stride_bsk)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if B_SCALING == "block":
            tl.static_assert(SCALING.block % BLOCK_K == 0)
        for k0 in range(first, last, BLOCK_K):
            x = _lines(a_operand, m0, M, k0, K, BLOCK_M, BLOCK_K, DESCRIPTORS, EVEN_K)
            w = _lines(b_operand, n0, N, k0, K, BLOCK_N, BLOCK_K, DESCRIPTORS, EVEN_K)
            acc = _accumulate(acc, x, w, a_operand, b_operand, m, n, n0, M, N, k0, SCALING, TILE)
        acc = scale_by_lines(acc, a_operand, m, m < M, A_SCALING)
        acc = scale_by_lines(acc, b_operand, n, n < N, B_SCALING)
        target = out_ptr + batch * stride_out_batch + split * stride_split
        store_tile(acc, Output(target, stride_out_m, stride_out_n, bias_ptr), m, n, M, N, TILE.interpreted)


@triton.jit
def float_scales_kernel(scale_ptr, out_ptr, lines, blocks, stride_batch, stride_line, stride_block, STORED: tl.constexpr):
    """Converts block scales to float32 ``[batch, blocks, lines]``, one tile per program."""
    across = tl.cdiv(lines, _SCALE_LINES)
    tiles = across * tl.cdiv(blocks, _SCALE_BLOCKS)
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    line = (tile % across * _SCALE_LINES + tl.arange(0, _SCALE_LINES))[None, :]
    block = (tile // across * _SCALE_BLOCKS + tl.arange(0, _SCALE_BLOCKS))[:, None]
    inside = (line < lines) & (block < blocks)
    operand = Operand(None, None, None, scale_ptr + batch * stride_batch, stride_line, stride_block)
    scale = scale_of_block(operand, line, block, inside, STORED)
    tl.store(out_ptr + (batch * blocks + block) * lines + line, scale, mask=inside)
