"""Device code of prefill on CDNA4. `gluon.prefill` explains how work is divided, `gluon.prefill_device` has the loops.

This module provides the `Machine`: keys and values are copied from global memory directly to LDS, 16 bytes per lane, into one of
two buffers (*sides*). While one side is computed, the copy to the other side is in flight. Keys are read from LDS as rows, values
with transposing reads, so that neither is rearranged in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950.common.layouts_device import attention_layouts
from tokenspeed_kernel_amd.gfx950.common.mma_device import load_keys, pv_mma, qk_mma
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gluon.prefill_device import VECTOR, Machine, allocate_rows, attend_tiles
from tokenspeed_kernel_amd.gluon.softmax_device import Scaling, in_some_row


@gluon.jit
def fetch(keys, values, side, block):
    """Starts the copy of a block of keys and values to half ``side`` (0 or 1) of the LDS double buffers. See `Machine`."""
    copies.buffer_load_to_shared(keys.shared.index(side), block.keys, keys.offsets)
    copies.buffer_load_to_shared(values.shared.index(side), block.values, values.offsets)
    copies.commit_group()
    return gl.to_tensor(0)  # the copies have no registers


@gluon.jit
def land(keys, values, side, flight):
    """Waits for the copies in flight. See `Machine`."""
    copies.wait_group(0)


@gluon.jit
def qk(q, keys, side):
    return qk_mma(q, load_keys(q, keys.shared.index(side)))


@gluon.jit
def pv(weights, values, side, acc, dtype: gl.constexpr):
    v = copies.load_shared_relaxed(values.shared.index(side), gl.DotOperandLayout(1, acc.type.layout, 4))
    return pv_mma(weights, v, acc, dtype)


@gluon.jit
def in_order(state):
    return state


@gluon.jit(do_not_specialize=["batch", "window_left"])
def mha_prefill_gfx950(
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
    dtype: gl.constexpr = operands.q.dtype.element_ty
    layouts: gl.constexpr = attention_layouts(32, gl.num_warps(), block_n, shape.head_dim, shape.v_head_dim, dtype)
    keys = allocate_rows(dtype, [2, block_n, shape.head_dim], layouts.keys, layouts.key_copy, strides.k_token * VECTOR)
    values = allocate_rows(dtype, [2, block_n, shape.v_head_dim], layouts.values, layouts.value_copy, strides.v_token * VECTOR)
    machine = Machine(fetch, land, qk, pv, in_order)
    scaling = Scaling(scale, cap, variant.capped)
    repeat = attend_tiles(
        machine, operands, batch, keys, values, strides, scaling, window_left, shape, variant, tile_shape, layouts.queries,
        -1, "stays",
    )  # fmt: skip
    repeat = in_some_row(repeat)
    if repeat != 0:
        copies.wait_group(0)
        attend_tiles(
            machine, operands, batch, keys, values, strides, scaling, window_left, shape, variant, tile_shape, layouts.queries,
            repeat, "moves",
        )  # fmt: skip
