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
    """The layouts for MFMA instructions with ``mfma_rows`` rows (16 or 32), and for keys and values of dtype ``dtype``."""
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


@gluon.constexpr_function
def mfma_layout(mfma_rows, warps):
    """The MFMA accumulator layout with rows divided among waves. A lane holds groups of four adjacent columns of one row. So most
    of a row max or row sum is computed within a lane."""
    return isa.mfma_layout([mfma_rows, mfma_rows, 512 // mfma_rows], True, [warps, 1])


@gluon.constexpr_function
def byte_storage(head_dim):
    """LDS layout of one-byte keys or values [64, head_dim], without bank conflicts in row reads and in transposing reads.

    Banks repeat every 256 bytes. Padding is possible only after each 1 KB, the amount that a wave copies at once. In a read of 16
    bytes per lane, keys whose indices differ by 1, 2 or 4 must be in different banks. In a transposing read, this holds for index
    differences of 1, 2, 4 and 16. As many of these key pairs as possible lie within 256 bytes of LDS. All other pairs lie a
    multiple of 1 KB apart, plus padding.
    """
    columns = [[0, 1 << bit] for bit in range(log2(head_dim))]
    rows = [1, 2, 8, 32, 16, 4] if head_dim == 64 else [1, 8, 32, 16, 4, 2]
    return gl.PaddedSharedLayout([[1024, 16]], columns + [[row, 0] for row in rows], [], [64, head_dim])


@gluon.constexpr_function
def key_storage(mfma, block_n, head_dim, dtype):
    """LDS layout of keys [block_n, head_dim], without bank conflicts in reads along head_dim."""
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
    """LDS layout of values [block_n, v_head_dim], without bank conflicts in transposing reads."""
    if dtype.primitive_bitwidth == 8:
        return byte_storage(v_head_dim)
    operand = gl.DotOperandLayout(1, mfma, 4)
    return isa.padded_shared_layout(operand, [block_n, v_head_dim], dtype, False)


@gluon.constexpr_function
def copy_layout(storage, dtype, warps):
    """The layout of a copy from global memory to an LDS block with layout ``storage``: each lane copies 16 bytes, and a wave writes
    1 KB of contiguous LDS."""
    bases = [list(basis) for basis in storage.offset_bases]
    lane = log2(key_width(dtype))
    warp = lane + 6
    after = warp + log2(warps)
    return gl.DistributedLinearLayout(bases[:lane] + bases[after:], bases[lane:warp], bases[warp:after], [], list(storage.shape))
