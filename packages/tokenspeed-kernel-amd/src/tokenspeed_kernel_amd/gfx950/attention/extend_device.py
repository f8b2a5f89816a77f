"""Device code of extend: attention of a tile of query rows to all their visible keys. ``extend`` explains the slots."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950.attention.paged_device import attend
from tokenspeed_kernel_amd.gluon.layouts_device import everywhere_layout
from tokenspeed_kernel_amd.gluon.tiles_device import QueryTile, new_tokens, store_output


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


@gluon.aggregate
class Location:
    """A tile of query rows that a workgroup computes; fields as in `QueryTile`.

    Attributes:
        sequence: index of the tile's sequence.
        rows: number of query rows of the sequence. A tile whose ``first_row`` is not less has no rows.
    """

    sequence: gl.tensor
    first_query: gl.tensor
    q_len: gl.tensor
    first_row: gl.tensor
    rows: gl.tensor


@gluon.jit
def find_tile(index, workgroups, operands, rows_of_token: gl.constexpr, m: gl.constexpr, slots: gl.constexpr):
    """Returns the `Location` of the tile with number ``index`` of ``workgroups``. Tiles are numbered by sequence and tile, or by
    slot if slots.shared.

    A sequence's last tiles come first, because they have the most keys. Sequences with at most slots.skipped new tokens have 0
    rows.
    """
    if slots.shared:
        number = workgroups - 1 - index
        sequence = owner_of(number, operands.cu_seqlens_q, operands.batch, rows_of_token, m, slots.lengths)
    else:
        tiles = workgroups // operands.batch
        number = tiles - 1 - index % tiles
        sequence = index // tiles
    first_query, q_len = new_tokens(operands.cu_seqlens_q, sequence, 0)
    if slots.shared:
        number -= first_query * rows_of_token // m + sequence
    rows = q_len * rows_of_token
    if slots.skipped > 0:
        rows = gl.where(q_len > slots.skipped, rows, 0)
    return Location(sequence, first_query, q_len, number * m, rows)


@gluon.jit
def visible_range(location, length, rows_of_token: gl.constexpr, m: gl.constexpr, variant: gl.constexpr, aligned: gl.constexpr):
    """Returns the first key position that any row of a tile sees, rounded down to a multiple of ``aligned``, and the position after
    the last. The sequence has ``length`` tokens."""
    begin = length * 0
    end = length
    before = length - location.q_len
    if variant.window_left >= 0:
        begin = gl.maximum(before + location.first_row // rows_of_token - variant.window_left, 0) // aligned * aligned
    if variant.is_causal:
        end = before + gl.minimum((location.first_row + m - 1) // rows_of_token + 1, location.q_len)
    return begin, end


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
    numbered by tile, see `find_tile`, and KV head. The KV head varies fastest.

    Args:
        operands, shape, strides, variant, tile_shape: the call's tensors, sizes, strides, options and tile, see `gluon.call`.
        slots: whether sequences share a grid of slots (one tile each), and which sequences are skipped, see
            `gfx950.attention.extend`.
    """
    m: gl.constexpr = tile_shape.m
    gqa_ratio: gl.constexpr = shape.gqa_ratio
    kv_head = gl.program_id(0) % shape.kv_heads
    index = gl.program_id(0) // shape.kv_heads
    at = find_tile(index, gl.num_programs(0) // shape.kv_heads, operands, gqa_ratio, m, slots)
    if at.first_row < at.rows:
        length = gl.minimum(gl.load(operands.cache_seqlens + at.sequence), operands.max_seqlen_k)
        aligned: gl.constexpr = min(shape.page_size, tile_shape.block_n)
        begin, end = visible_range(at, length, gqa_ratio, m, variant, aligned)
        tile = QueryTile(at.first_query, at.q_len, at.first_row, kv_head, gqa_ratio, m)
        state = attend(operands, shape, strides, variant, tile_shape, tile, at.sequence, length, begin, end, variant.is_causal)
        store_output(operands, shape, strides, variant, tile, state)
