"""Device code of extend: attention of a tile of query rows to all their visible keys. ``extend`` explains the slots."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950.attention.paged_device import attend, store_output
from tokenspeed_kernel_amd.gluon.layouts_device import everywhere_layout
from tokenspeed_kernel_amd.gluon.tiles_device import QueryTile, new_tokens


@gluon.jit
def owner_of(slot, cu_seqlens_q, batch, rows_of_token: gl.constexpr, m: gl.constexpr, lengths: gl.constexpr):
    """Returns the sequence that owns a slot: the last sequence whose first slot is at or before ``slot``.

    Args:
        rows_of_token: query heads per KV head.
        m: query rows per tile.
        lengths: how many values of cu_seqlens_q are loaded at once.
    """
    layout: gl.constexpr = everywhere_layout(lengths, gl.num_warps())
    begun = 0
    for first in range(0, batch, lengths):
        index = first + gl.arange(0, lengths, layout)
        begins = gl.load(cu_seqlens_q + gl.minimum(index, batch - 1))  # clamped instead of masked, so that loads have no branches
        begun += gl.sum(((index < batch) & (begins * rows_of_token // m + index <= slot)).to(gl.int32), 0)
    return begun - 1


@gluon.jit
def extend_kernel(
    operands,
    shape: gl.constexpr,
    strides: gl.constexpr,
    variant: gl.constexpr,
    tile_shape: gl.constexpr,
    slots: gl.constexpr,
):
    """Computes the attention output of a tile of query rows (new tokens times the query heads of one KV head). Workgroups are
    numbered by sequence, tile and KV head, or by slot and KV head if slots.shared. The KV head varies fastest.

    A sequence's last tiles run first, because they have the most keys. Sequences with at most slots.skipped new tokens are skipped.

    Args:
        operands, shape, strides, variant, tile_shape: the call's tensors, sizes, strides, options and tile, see `gluon.call`.
        slots: whether sequences share a grid of slots (one tile each), and which sequences are skipped, see
            `gfx950.attention.extend`.
    """
    m: gl.constexpr = tile_shape.m
    gqa_ratio: gl.constexpr = shape.gqa_ratio
    window_left: gl.constexpr = variant.window_left
    kv_head = gl.program_id(0) % shape.kv_heads
    index = gl.program_id(0) // shape.kv_heads
    workgroups = gl.num_programs(0) // shape.kv_heads
    if slots.shared:
        number = workgroups - 1 - index
        sequence = owner_of(number, operands.cu_seqlens_q, operands.batch, gqa_ratio, m, slots.lengths)
    else:
        tiles = workgroups // operands.batch
        number = tiles - 1 - index % tiles
        sequence = index // tiles
    first_query, q_len = new_tokens(operands.cu_seqlens_q, sequence, 0)
    if slots.shared:
        number -= first_query * gqa_ratio // m + sequence
    first_row = number * m
    rows = q_len * gqa_ratio
    if slots.skipped > 0:
        rows = gl.where(q_len > slots.skipped, rows, 0)
    if first_row < rows:
        length = gl.minimum(gl.load(operands.cache_seqlens + sequence), operands.max_seqlen_k)
        first_token = first_row // gqa_ratio
        begin = length * 0
        end = length
        if window_left >= 0:
            aligned: gl.constexpr = min(shape.page_size, tile_shape.block_n)
            begin = gl.maximum(length - q_len + first_token - window_left, 0) // aligned * aligned
        if variant.is_causal:
            end = length - q_len + gl.minimum((first_row + m - 1) // gqa_ratio + 1, q_len)
        tile = QueryTile(first_query, q_len, first_row, kv_head, gqa_ratio, m)
        state = attend(operands, shape, strides, variant, tile_shape, tile, sequence, length, begin, end, variant.is_causal)
        store_output(operands, shape, strides, variant, tile, state)
