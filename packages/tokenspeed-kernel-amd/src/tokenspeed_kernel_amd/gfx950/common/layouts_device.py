"""Layouts for attention: MFMA operands in registers, keys and values in LDS, and the copies of keys and values to LDS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gluon.layouts_device import key_width, log2


@dataclass(frozen=True)
class Layouts:
    """The layouts for attention of a tile of query rows to one block of keys and values.

    Attributes:
        mfma: MFMA layout of the scores, [rows, keys], and of the output accumulators, [rows, v_head_dim].
        queries: operand layout of q for the QK MFMA, [rows, head_dim].
        keys, values: LDS layouts, [block_n, head_dim] and [block_n, v_head_dim].
        key_copy, value_copy: layouts of the copies of keys and values to LDS, that is, which elements each lane copies.
    """

    mfma: Any
    queries: Any
    keys: Any
    values: Any
    key_copy: Any
    value_copy: Any


@gluon.constexpr_function
def attention_layouts(mfma_rows, warps, block_n, head_dim, v_head_dim, dtype):
    """Returns the `Layouts` for MFMA instructions with ``mfma_rows`` rows (16 or 32), and for keys and values of dtype
    ``dtype``."""
    mfma = mfma_layout(mfma_rows, warps)
    keys = key_storage(mfma, block_n, head_dim, dtype)
    values = value_storage(mfma, block_n, v_head_dim, dtype)
    return Layouts(
        mfma=mfma,
        queries=gl.DotOperandLayout(0, mfma, key_width(dtype)),
        keys=keys,
        values=values,
        key_copy=copy_layout(keys, dtype, warps),
        value_copy=copy_layout(values, dtype, warps),
    )


@dataclass(frozen=True)
class LatentLayouts:
    """The layouts of a tile of 16 query rows and a block of latent keys, some of whose columns are the values.

    Attributes:
        mfma: MFMA layout of the scores, [rows, keys], and of the output accumulators, [rows, columns]. Waves divide keys and
            columns.
        queries, rope_queries: operand layouts of q for the QK MFMAs. The rotary part has its own layout. For fp8, the latent
            columns use the scaled MFMA, whose k is 128, but the rotary part has only 64 columns, so it uses the MFMA with k = 32.
            For 16 bits, both layouts are the same.
        latents, ropes: LDS layouts, [block_n, columns] and [block_n, rope].
        latent_copy, rope_copy: layouts of the copies to LDS.
    """

    mfma: Any
    queries: Any
    rope_queries: Any
    latents: Any
    ropes: Any
    latent_copy: Any
    rope_copy: Any


@gluon.constexpr_function
def latent_layouts(warps, block_n, columns, rope, dtype):
    """Returns the `LatentLayouts` for latents that are copied to LDS ``columns`` columns at a time."""
    rope_mfma = isa.mfma_layout([16, 16, 32], True, [1, warps])
    mfma = rope_mfma
    if dtype.primitive_bitwidth == 8:
        mfma = isa.mfma_layout([16, 16, 128], True, [1, warps])
        latents, ropes = byte_latent_storage(block_n, columns), byte_latent_storage(block_n, rope)
    else:
        latents, ropes = latent_storage(block_n, columns), key_storage(mfma, block_n, rope, dtype)
    return LatentLayouts(
        mfma=mfma,
        queries=gl.DotOperandLayout(0, mfma, key_width(dtype)),
        rope_queries=gl.DotOperandLayout(0, rope_mfma, key_width(dtype)),
        latents=latents,
        ropes=ropes,
        latent_copy=copy_layout(latents, dtype, warps),
        rope_copy=copy_layout(ropes, dtype, warps),
    )


@gluon.constexpr_function
def latent_storage(block_n, columns):
    """Returns an LDS layout of 16-bit latents [block_n, columns], without bank conflicts in row reads and in transposing reads.

    A wave copies 1 KB at once: a row of 512 columns, or two rows of 256 columns. With a padding of 32 bytes per KB, 8 consecutive
    KB begin in different banks. With 256 columns, the two rows of one KB are in the same banks. So the layout puts keys that are 32
    apart there: no read accesses both.
    """
    column_bits, row_bits = log2(columns), log2(block_n)
    inside = 9 - column_bits  # bits of rows within 1 KB
    rows = [*range(row_bits - inside, row_bits), *range(row_bits - inside)]
    bases = [[0, 1 << bit] for bit in range(column_bits)] + [[1 << bit, 0] for bit in rows]
    return gl.PaddedSharedLayout([[512, 16]], bases, [], [block_n, columns])


@gluon.constexpr_function
def byte_latent_storage(block_n, columns):
    """Returns an LDS layout of one-byte latents or rotary parts [128, columns]. `byte_storage` states which keys must be in
    different banks. With 64 columns, keys whose indices differ by 1 or 2 lie within 256 bytes. With 256 or 512 columns, one KB
    holds only keys that are 32 or 64 apart, which no read accesses together. All other keys that must be in different banks are in
    different KB, and the padding of each KB moves them to different banks.
    """
    assert block_n == 128
    rows = [1, 2, 32, 64, 16, 4, 8] if columns == 64 else [32, 64, 16, 1, 2, 4, 8] if columns == 256 else [64, 16, 1, 2, 4, 8, 32]
    bases = [[0, 1 << bit] for bit in range(log2(columns))] + [[row, 0] for row in rows]
    return gl.PaddedSharedLayout([[1024, 16]], bases, [], [block_n, columns])


@gluon.constexpr_function
def mfma_layout(mfma_rows, warps):
    """Returns the MFMA accumulator layout with rows divided among waves. A lane holds groups of four adjacent columns of one row.
    So most of a row max or row sum is computed within a lane."""
    return isa.mfma_layout([mfma_rows, mfma_rows, 512 // mfma_rows], True, [warps, 1])


@gluon.constexpr_function
def byte_storage(head_dim):
    """Returns an LDS layout of one-byte keys or values [64, head_dim], without bank conflicts in row reads and in transposing
    reads.

    Banks repeat every 256 bytes. Padding is possible only after each 1 KB, the amount that a wave copies at once. In a read of 16
    bytes per lane, keys whose indices differ by 1, 2 or 4 must be in different banks. In a transposing read, keys whose indices
    differ by 1, 2, 4 or 16 must be in different banks. As many of these key pairs as possible lie within 256 bytes of LDS. All
    other pairs lie a multiple of 1 KB apart, plus padding.
    """
    columns = [[0, 1 << bit] for bit in range(log2(head_dim))]
    rows = [1, 2, 8, 32, 16, 4] if head_dim == 64 else [1, 8, 32, 16, 4, 2]
    return gl.PaddedSharedLayout([[1024, 16]], columns + [[row, 0] for row in rows], [], [64, head_dim])


@gluon.constexpr_function
def key_storage(mfma, block_n, head_dim, dtype):
    """Returns an LDS layout of keys [block_n, head_dim], without bank conflicts in reads along head_dim."""
    if dtype.primitive_bitwidth == 8:
        return byte_storage(head_dim)
    # The helper of Triton returns the LDS layout of the MFMA operand, the transposed keys [head_dim, block_n]. Keys are stored row
    # by row, as in global memory, so the two axes are exchanged.
    operand = gl.DotOperandLayout(1, mfma, 8)
    transposed = isa.padded_shared_layout(operand, [head_dim, block_n], dtype, True)
    padding = [list(pair) for pair in transposed.interval_padding_pairs]
    return gl.PaddedSharedLayout(padding, [[n, d] for d, n in transposed.offset_bases], [], [block_n, head_dim])


@gluon.constexpr_function
def value_storage(mfma, block_n, v_head_dim, dtype):
    """Returns an LDS layout of values [block_n, v_head_dim], without bank conflicts in transposing reads."""
    if dtype.primitive_bitwidth == 8:
        return byte_storage(v_head_dim)
    operand = gl.DotOperandLayout(1, mfma, 4)
    return isa.padded_shared_layout(operand, [block_n, v_head_dim], dtype, False)


@gluon.constexpr_function
def copy_layout(storage, dtype, warps):
    """Returns the layout of a copy from global memory to an LDS block with layout ``storage``: each lane copies 16 bytes, and a
    wave writes 1 KB of contiguous LDS."""
    bases = [list(basis) for basis in storage.offset_bases]
    lane = log2(key_width(dtype))
    warp = lane + 6
    after = warp + log2(warps)
    return gl.DistributedLinearLayout(bases[:lane] + bases[after:], bases[lane:warp], bases[warp:after], [], list(storage.shape))
