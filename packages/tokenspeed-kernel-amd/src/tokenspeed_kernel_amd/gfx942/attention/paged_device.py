"""Device code of paged-cache attention: a tile of query rows against a range of key blocks.

A workgroup is one wave. Keys and values never enter LDS: each lane loads from global memory what its MFMA operands need. The loads
of the next block, and of the page numbers of the block after it, are in flight while a block is computed.

A lane needs 8 adjacent elements (16 bytes) of a key, so keys are loaded in the layout of the operand. A lane also needs one column
of four adjacent values. It loads four to eight adjacent columns of them instead, and permutes registers (`permuted_columns`). The
columns of the accumulators are then permuted too, until `in_order`.

fp8 keys and values are converted to q's dtype in registers. The key scale is folded into the softmax scale; the value scale
multiplies the output.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx942 import instructions_device as isa
from tokenspeed_kernel_amd.gfx942.common.mma_device import in_order, permuted_columns, pv_mma, qk_mma
from tokenspeed_kernel_amd.gluon.layouts_device import key_width, log2
from tokenspeed_kernel_amd.gluon.mask_device import hide_unseen
from tokenspeed_kernel_amd.gluon.softmax_device import (
    Scaling,
    SoftmaxState,
    cap_scores,
    initial_state,
    nothing_seen,
    softmax_step,
    summed,
)
from tokenspeed_kernel_amd.gluon.tiles_device import load_queries, scaled, visible_positions


@gluon.aggregate
class PagedRows:
    """The paged keys, or the paged values, of one KV head.

    Attributes:
        base: pointer to page 0 of this KV head in the cache.
        page_stride, token_stride: distance in elements from one page to the next, and from one slot of a page to the next.
        width: elements of a row.
    """

    base: gl.tensor
    page_stride: gl.constexpr
    token_stride: gl.tensor
    width: gl.constexpr


@gluon.aggregate
class PagedCache:
    """The keys and values of one sequence and one KV head.

    Attributes:
        keys, values: the paged keys and the paged values.
        table: pointer to the sequence's row of the page table.
        page_size: token slots per page.
        last: the last position that is read. Later positions of a block load this position instead: slots without a token may hold
            NaN.
        keys_layout, values_layout: layouts of loaded keys, [head_dim, block_n], and of loaded values, [block_n, v_head_dim].
    """

    keys: PagedRows
    values: PagedRows
    table: gl.tensor
    page_size: gl.constexpr
    last: gl.tensor
    keys_layout: gl.constexpr
    values_layout: gl.constexpr


@gluon.aggregate
class Pages:
    """The pages of a block's keys and values, by the positions that the lane loads."""

    of_keys: gl.tensor
    of_values: gl.tensor


@gluon.aggregate
class Block:
    """A block's keys, [head_dim, block_n], and values, [block_n, v_head_dim], as they are loaded."""

    keys: gl.tensor
    values: gl.tensor


@gluon.constexpr_function
def values_layout(block_n, v_head_dim):
    """Returns the layout in which a wave loads values, [block_n, v_head_dim]: a lane loads v_head_dim / 16 adjacent columns of four
    adjacent keys, see `permuted_columns`."""
    columns = log2(v_head_dim) - 4
    registers = [[0, 1 << bit] for bit in range(columns)] + [[1, 0], [2, 0]] + [[1 << bit, 0] for bit in range(4, log2(block_n))]
    lanes = [[0, 1 << bit] for bit in range(columns, columns + 4)] + [[4, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [block_n, v_head_dim])


@gluon.jit
def find_pages(cache, start, block_n: gl.constexpr):
    """Starts the loads of the page numbers of the block that begins at position ``start``. If a page holds whole blocks, there is
    one number."""
    if block_n <= cache.page_size:
        page = gl.load(cache.table + (gl.minimum(start, cache.last) >> log2(cache.page_size)))
        pages = Pages(page, page)
    else:
        key = start + gl.arange(0, block_n, gl.SliceLayout(0, cache.keys_layout))
        # The four adjacent keys of a lane are in one page, whose number is loaded once.
        value = start + (gl.arange(0, block_n, gl.SliceLayout(1, cache.values_layout)) & ~3)
        pages = Pages(
            gl.load(cache.table + (gl.minimum(key, cache.last) >> log2(cache.page_size))),
            gl.load(cache.table + (gl.minimum(value, cache.last) >> log2(cache.page_size))),
        )
    return pages


@gluon.jit
def load_rows(cache, rows, pages, start, block_n: gl.constexpr, row_layout: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Starts the loads of a block's rows: keys, [width, block_n], if ``TRANSPOSED``; otherwise values, [block_n, width]."""
    parent: gl.constexpr = row_layout.parent
    row = gl.arange(0, block_n, row_layout)
    element = gl.arange(0, rows.width, gl.SliceLayout(1 - row_layout.dim, parent))
    if block_n <= cache.page_size:
        base = rows.base + pages.to(gl.int64) * rows.page_stride + (start & (cache.page_size - 1)) * rows.token_stride
        slot = gl.minimum(row, cache.last - start) * rows.token_stride
        offsets = slot[None, :] + element[:, None] if TRANSPOSED else slot[:, None] + element[None, :]
        loaded = isa.buffer_load(base, offsets)
    else:
        position = gl.minimum(start + row, cache.last)
        slot = pages.to(gl.int64) * rows.page_stride + (position & (cache.page_size - 1)) * rows.token_stride
        loaded = gl.load(rows.base + (slot[None, :] + element[:, None] if TRANSPOSED else slot[:, None] + element[None, :]))
    return loaded


@gluon.jit
def load_block(cache, pages, start, block_n: gl.constexpr):
    """Starts the loads of the block that begins at position ``start``. Rows after ``cache.last`` hold copies of that row."""
    return Block(
        load_rows(cache, cache.keys, pages.of_keys, start, block_n, gl.SliceLayout(0, cache.keys_layout), True),
        load_rows(cache, cache.values, pages.of_values, start, block_n, gl.SliceLayout(1, cache.values_layout), False),
    )


@gluon.jit
def attend(operands, shape, strides, variant, tile_shape, tile, sequence, length, begin, end, ends_differ: gl.constexpr):
    """Computes attention of a tile to positions ``begin`` to ``end`` of a sequence of ``length`` tokens; the range may be empty.

    Args:
        operands, shape, strides, variant, tile_shape: the call's tensors, sizes, strides, options and tile, see `gluon.call`.
            ``tile_shape.stages`` is ignored.
        tile: the rows, see `QueryTile`.
        begin: the first position, a multiple of the smaller of page size and block size (both in tokens).
        ends_differ: whether the last visible position differs between rows; otherwise all rows see every key before ``end`` (and
            inside the window).

    Returns:
        The softmax state, with row sums reduced across lanes (see `summed`).
    """
    stored: gl.constexpr = operands.k_cache.dtype.element_ty
    width: gl.constexpr = key_width(stored)
    mfma: gl.constexpr = isa.mfma_layout(16, 1)
    q = load_queries(operands.q, tile, strides, shape.head_dim, gl.DotOperandLayout(0, mfma, width))
    state = nothing_seen(tile_shape.m, shape.v_head_dim, mfma)
    visible = visible_positions(tile, length, variant.window_left, ends_differ, mfma)
    if (begin < end) & (tile.first_row < tile.q_len * tile.gqa_ratio):
        k_token, v_token = operands.k_token_vectors * width, operands.v_token_vectors * width
        cache = PagedCache(
            PagedRows(operands.k_cache + tile.kv_head * strides.k_head, strides.k_page, k_token, shape.head_dim),
            PagedRows(operands.v_cache + tile.kv_head * strides.v_head, strides.v_page, v_token, shape.v_head_dim),
            operands.page_table + sequence.to(gl.int64) * operands.table_stride,
            shape.page_size,
            end - 1,
            gl.DotOperandLayout(1, mfma, width),
            values_layout(tile_shape.block_n, shape.v_head_dim),
        )
        scale = scaled(operands.scale, operands.k_scale, tile.kv_head, strides.k_scale_head)
        scaling = Scaling(scale, operands.cap, variant.capped)
        state = attend_blocks(q, cache, begin, end, visible, scaling, tile_shape)
        acc = scaled(state.acc, operands.v_scale, tile.kv_head, strides.v_scale_head)
        state = SoftmaxState(acc, state.row_max, state.row_sum)
    return in_order(state)


@gluon.jit
def attend_blocks(q, cache, begin, end, visible, scaling, tile_shape):
    """Computes attention of q's rows to the keys at positions ``begin`` to ``end``; the range is not empty. Returns the softmax
    state, with row sums reduced across lanes (see `summed`)."""
    block_n: gl.constexpr = tile_shape.block_n
    mfma: gl.constexpr = q.type.layout.parent
    state = initial_state(tile_shape.m, cache.values.width, block_n, mfma)
    block = load_block(cache, find_pages(cache, begin, block_n), begin, block_n)
    pages = find_pages(cache, begin + block_n, block_n)
    last = begin + (end - 1 - begin) // block_n * block_n
    for start in range(begin, last, block_n):
        following = load_block(cache, pages, start + block_n, block_n)
        pages = find_pages(cache, start + 2 * block_n, block_n)
        state = attend_block(q, block, start, end, state, visible, scaling, False)
        block = following
    return summed(attend_block(q, block, last, end, state, visible, scaling, True))


@gluon.jit
def attend_block(q, block, start, end, state, visible, scaling, LAST: gl.constexpr):
    """Updates the softmax state with the block that begins at position ``start``. ``LAST``: whether ``end`` may be in the block."""
    scores = cap_scores(qk_mma(q, block.keys), scaling)
    scores = hide_unseen(scores, visible, start, end, visible.ends_differ, LAST)
    weights, state = softmax_step(scores, state, scaling)
    operand: gl.constexpr = gl.DotOperandLayout(1, q.type.layout.parent, 4)
    values = gl.convert_layout(permuted_columns(block.values.to(q.dtype)), operand, assert_trivial=True)
    acc = pv_mma(weights, values, state.acc, q.dtype)
    return SoftmaxState(acc, state.row_max, state.row_sum)
