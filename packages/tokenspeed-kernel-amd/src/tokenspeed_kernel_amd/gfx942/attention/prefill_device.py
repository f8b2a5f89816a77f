"""Device code of prefill on CDNA3. `gluon.prefill` explains how work is divided, `gluon.prefill_device` has the loops.

This module provides the `Machine`. CDNA3 can neither copy 16 bytes per lane from global memory directly to LDS, nor transpose while
it reads LDS. So the next block is in flight in registers (`Flight`), and is stored to the one LDS buffer after all waves have
finished the current block. Values are transposed in registers before they are stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx942 import instructions_device as isa
from tokenspeed_kernel_amd.gfx942.common.mma_device import in_order, permuted_columns, pv_mma, qk_mma
from tokenspeed_kernel_amd.gluon.layouts_device import log2
from tokenspeed_kernel_amd.gluon.prefill_device import VECTOR, Machine, allocate_rows, attend_tiles
from tokenspeed_kernel_amd.gluon.softmax_device import Scaling, in_some_row


@gluon.aggregate
class Flight:
    """The keys, [block_n, head_dim], and values, [block_n, v_head_dim], of a block whose loads from global memory are in flight."""

    keys: gl.tensor
    values: gl.tensor


@gluon.constexpr_function
def rows_layout(block_n, columns, keys, warps):
    """Returns the layout in which a workgroup loads rows, [block_n, columns] of 16 bits: a lane loads ``keys`` adjacent rows, and
    as many adjacent columns as its share of the block has."""
    width = log2(block_n * columns // (64 * warps * keys))
    deep = log2(keys)
    columns_of_lanes = log2(columns) - width
    registers = [[0, 1 << bit] for bit in range(width)] + [[1 << bit, 0] for bit in range(deep)]
    lanes = [[0, 1 << bit] for bit in range(width, log2(columns))]
    rows = [[1 << bit, 0] for bit in range(deep, log2(block_n))]
    lanes += rows[: 6 - columns_of_lanes]
    return gl.DistributedLinearLayout(registers, lanes, rows[6 - columns_of_lanes :], [], [block_n, columns])


@gluon.constexpr_function
def padded_layout(rows, columns, padding):
    """Returns an LDS layout of [rows, columns], with ``padding`` elements after each row."""
    return gl.PaddedSharedLayout.with_identity_for([[columns, padding]], [rows, columns], [1, 0])


@gluon.jit
def fetch(keys, values, side, block):
    """Starts the loads of a block of keys and values to registers. See `Machine`."""
    return Flight(isa.buffer_load(block.keys, keys.offsets), isa.buffer_load(block.values, values.offsets))


@gluon.jit
def land(keys, values, side, flight):
    """Stores the block of ``flight`` to LDS, values transposed: [v_head_dim, block_n]. See `Machine`."""
    keys.shared.index(0).store(flight.keys)
    values.shared.index(0).store(permuted_columns(flight.values).permute([1, 0]))


@gluon.jit
def qk(q, keys, side):
    k = keys.shared.index(0).permute([1, 0]).load(gl.DotOperandLayout(1, q.type.layout.parent, 8))
    return qk_mma(q, k)


@gluon.jit
def pv(weights, values, side, acc, dtype: gl.constexpr):
    v = values.shared.index(0).permute([1, 0]).load(gl.DotOperandLayout(1, acc.type.layout, 4))
    return pv_mma(weights, v, acc, dtype)


@gluon.jit(do_not_specialize=["batch", "window_left"])
def mha_prefill_gfx942(
    operands,
    batch,
    strides,
    scale,
    cap,
    window_left,
    shape: gl.constexpr,
    variant: gl.constexpr,
    tile_shape: gl.constexpr,
):
    """Computes prefill as a persistent kernel: a workgroup computes tiles of its XCD's heads until none is left.

    `gluon.prefill` describes the arguments.
    """
    block_n: gl.constexpr = tile_shape.block_n
    warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = operands.q.dtype.element_ty
    key_rows: gl.constexpr = rows_layout(block_n, shape.head_dim, block_n * shape.head_dim // (512 * warps), warps)
    value_rows: gl.constexpr = rows_layout(block_n, shape.v_head_dim, 4, warps)
    # A read of keys takes 16 bytes per lane, and a read of values 8. With these paddings, the rows that a phase reads begin in
    # different banks.
    key_storage: gl.constexpr = padded_layout(block_n, shape.head_dim, 8)
    value_storage: gl.constexpr = padded_layout(shape.v_head_dim, block_n, 4)
    queries: gl.constexpr = gl.DotOperandLayout(0, isa.mfma_layout(32, warps), 8)
    keys = allocate_rows(dtype, [1, block_n, shape.head_dim], key_storage, key_rows, strides.k_token * VECTOR)
    values = allocate_rows(dtype, [1, shape.v_head_dim, block_n], value_storage, value_rows, strides.v_token * VECTOR)
    machine = Machine(fetch, land, qk, pv, in_order)
    scaling = Scaling(scale, cap, variant.capped)
    repeat = attend_tiles(
        machine, operands, batch, keys, values, strides, scaling, window_left, shape, variant, tile_shape, queries, -1, "stays"
    )  # fmt: skip
    repeat = in_some_row(repeat)
    if repeat != 0:
        attend_tiles(
            machine, operands, batch, keys, values, strides, scaling, window_left, shape, variant, tile_shape, queries,
            repeat, "moves",
        )  # fmt: skip
