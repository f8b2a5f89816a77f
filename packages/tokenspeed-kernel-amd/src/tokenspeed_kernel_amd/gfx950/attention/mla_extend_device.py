"""Device code of MLA extend: latent attention of a tile of query rows to all their visible keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950.attention.extend_device import find_tile, visible_range
from tokenspeed_kernel_amd.gfx950.attention.mla_decode_device import attend, store_output
from tokenspeed_kernel_amd.gluon.tiles_device import QueryTile


@gluon.jit
def mla_extend_kernel(operands, shape: gl.constexpr, variant: gl.constexpr, tile_shape: gl.constexpr, slots: gl.constexpr):
    """Computes the attention output of a tile of query rows (new tokens times heads). `extend_device.find_tile` numbers the
    workgroups.

    Args:
        operands, shape, variant, tile_shape: see `gfx950.attention.mla_decode`.
        slots: whether sequences share a grid of slots (one tile each), see `gfx950.attention.extend`.
    """
    m: gl.constexpr = tile_shape.m
    at = find_tile(gl.program_id(0), gl.num_programs(0), operands, shape.heads, m, slots)
    if at.first_row < at.rows:
        length = gl.minimum(gl.load(operands.cache_seqlens + at.sequence), operands.max_seqlen_k)
        begin, end = visible_range(at, length, shape.heads, m, variant, min(shape.page_size, tile_shape.block_n))
        zero = gl.to_tensor(0)
        tile = QueryTile(at.first_query, at.q_len, at.first_row, zero, shape.heads, m)
        state = attend(operands, shape, variant, tile_shape, tile, zero, at.sequence, length, begin, end, variant.is_causal)
        store_output(operands, shape, variant, tile, zero, state)
