"""Device code of paged-cache attention: a tile of query rows against a range of key blocks.

Blocks of keys and values are copied directly from global memory to LDS, in a pipeline of ``tile_shape.stages`` stages. The next
copy into a key buffer starts as soon as the block's scores are computed. The next copy into a value buffer starts after the PV
MFMAs. The softmax and the PV MFMAs overlap the copy of keys, and the next QK MFMAs overlap the copy of values. With enough waves
per CU, one stage therefore suffices.

With fp8 caches, q is split into fp8 planes (`planes_device`), so keys are not converted. fp8 values are converted to q's dtype in
registers, two at a time, after they are read from LDS. The key scale is folded into the softmax scale; the value scale multiplies
the output. fp8 blocks have 64 keys, which take as many bytes as 32 keys of 16 bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950.common.layouts_device import attention_layouts
from tokenspeed_kernel_amd.gfx950.common.mma_device import load_values, pv_mma
from tokenspeed_kernel_amd.gfx950.common.paging_device import (
    PagedCache,
    PagedRows,
    allocate_page_list,
    copy_block,
    find_pages,
    list_pages,
    page_span,
)
from tokenspeed_kernel_amd.gfx950.common.planes_device import as_planes, dot_products
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
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


@gluon.jit
def open_cache(operands, shape, strides, variant, layouts: gl.constexpr, tile_shape, sequence, kv_head, length):
    """Returns the `PagedCache` of one sequence and KV head, with LDS for ``tile_shape.stages`` blocks of keys and of values."""
    stored: gl.constexpr = operands.k_cache.dtype.element_ty
    vector: gl.constexpr = 128 // stored.primitive_bitwidth
    k_token, v_token = operands.k_token_vectors * vector, operands.v_token_vectors * vector
    if variant.same_strides:
        v_token = k_token
    return PagedCache(
        PagedRows(
            operands.k_cache + kv_head * strides.k_head,
            strides.k_page,
            k_token,
            gl.allocate_shared_memory(stored, [tile_shape.stages, tile_shape.block_n, shape.head_dim], layouts.keys),
            layouts.key_copy,
        ),
        PagedRows(
            operands.v_cache + kv_head * strides.v_head,
            strides.v_page,
            v_token,
            gl.allocate_shared_memory(stored, [tile_shape.stages, tile_shape.block_n, shape.v_head_dim], layouts.values),
            layouts.value_copy,
        ),
        operands.page_table + sequence.to(gl.int64) * operands.table_stride,
        allocate_page_list(),
        length,
        shape.page_size,
    )


@gluon.jit
def attend(operands, shape, strides, variant, tile_shape, tile, sequence, length, begin, end, ends_differ: gl.constexpr):
    """Computes attention of a tile to positions ``begin`` to ``end`` of a sequence of ``length`` tokens; the range may be empty.

    Args:
        operands, shape, strides, variant, tile_shape: the call's tensors, sizes, strides, options and tile, see `gluon.call`.
        tile: the rows, see `QueryTile`.
        begin: the first position, a multiple of the smaller of page size and block size (both in tokens).
        ends_differ: whether the last visible position differs between rows; otherwise all rows see every key before ``end`` (and
            inside the window).

    Returns:
        The softmax state, with row sums reduced across lanes (see `summed`).
    """
    stored: gl.constexpr = operands.k_cache.dtype.element_ty
    layouts: gl.constexpr = attention_layouts(16, gl.num_warps(), tile_shape.block_n, shape.head_dim, shape.v_head_dim, stored)
    cache = open_cache(operands, shape, strides, variant, layouts, tile_shape, sequence, tile.kv_head, length)
    q = load_queries(operands.q, tile, strides, shape.head_dim, layouts.queries)
    state = nothing_seen(tile_shape.m, shape.v_head_dim, layouts.mfma)
    visible = visible_positions(tile, length, variant.window_left, ends_differ, layouts.mfma)
    if (begin < end) & (tile.first_row < tile.q_len * tile.gqa_ratio):
        scale = scaled(operands.scale, operands.k_scale, tile.kv_head, strides.k_scale_head)
        planes = as_planes(q, stored, gl.SliceLayout(1, layouts.mfma))
        if planes.count > 1:
            scale *= planes.factor
        state = attend_blocks(planes, cache, begin, end, visible, Scaling(scale, operands.cap, variant.capped), tile_shape)
        acc = scaled(state.acc, operands.v_scale, tile.kv_head, strides.v_scale_head)
        state = SoftmaxState(acc, state.row_max, state.row_sum)
    return state


@gluon.jit
def attend_blocks(q, cache, begin, end, visible, scaling, tile_shape):
    """Computes attention of q's rows to the keys at positions ``begin`` to ``end``; the range is not empty. Returns the softmax
    state, with row sums reduced across lanes (see `summed`)."""
    block_n: gl.constexpr = tile_shape.block_n
    stages: gl.constexpr = tile_shape.stages
    span: gl.constexpr = page_span(cache.page_size, block_n)
    state = initial_state(tile_shape.m, cache.values.shared.shape[2], block_n, q.high.type.layout.parent)
    for first in range(begin, end, span):
        list_pages(cache, first)
        stop = gl.minimum(first + span, end)
        blocks = (stop - first + block_n - 1) // block_n
        for stage in gl.static_range(stages):
            # If there are fewer blocks than stages, the last block is copied again, because unused LDS could hold NaN.
            start = first + gl.minimum(stage, blocks - 1) * block_n
            page = find_pages(cache, first, start, cache.keys)
            copy_block(cache, cache.keys, stage, page, start, False)
            if cache.keys.copy != cache.values.copy:
                page = find_pages(cache, first, start, cache.values)
            copy_block(cache, cache.values, stage, page, start, True)
        fetching = gl.maximum(blocks - stages, 0)
        unmasked = 0
        if visible.ends_differ:
            unmasked = gl.minimum((visible.all_end - first) // block_n, fetching)
            unmasked = gl.maximum(unmasked, 0)
            for block in range(unmasked):
                state = attend_and_fetch(q, cache, first, block, end, state, visible, scaling, tile_shape, False)
        for block in range(unmasked, fetching):
            state = attend_and_fetch(q, cache, first, block, end, state, visible, scaling, tile_shape, visible.ends_differ)
        # Drain the pipeline: the copies of the last blocks are already issued. If there are fewer blocks than stages, the mask
        # hides the surplus copies.
        for stage in gl.static_range(stages):
            start = first + (fetching + stage) * block_n
            buffer = (fetching + stage) % stages
            copies.wait_group(2 * (stages - stage) - 1)
            scores = cap_scores(dot_products(q, cache.keys.shared.index(buffer)), scaling)
            scores = hide_unseen(scores, visible, start, stop, visible.ends_differ, True)
            weights, state = softmax_step(scores, state, scaling)
            copies.wait_group(2 * (stages - stage) - 2)
            acc = pv_mma(weights, load_values(q.high, cache.values.shared.index(buffer)), state.acc, q.dtype)
            state = SoftmaxState(acc, state.row_max, state.row_sum)
    return summed(state)


@gluon.jit
def attend_and_fetch(q, cache, first, block, end, state, visible, scaling, tile_shape, ENDS: gl.constexpr):
    """Executes one mainloop iteration: attention to one key block. When the block's LDS buffer has been read, prefetches the block
    ``tile_shape.stages`` ahead into the same buffer.

    Args:
        first: the position at which the list of pages in LDS begins.
        block: the block's index, counted from ``first``.
        ENDS: whether the last visible position of some row may be in this block.
    """
    start = first + block * tile_shape.block_n
    ahead = start + tile_shape.stages * tile_shape.block_n
    buffer = block % tile_shape.stages
    page = find_pages(cache, first, ahead, cache.keys)
    copies.wait_group(2 * tile_shape.stages - 1)
    scores = dot_products(q, cache.keys.shared.index(buffer))
    copy_block(cache, cache.keys, buffer, page, ahead, False)
    scores = hide_unseen(cap_scores(scores, scaling), visible, start, end, ENDS, False)
    weights, state = softmax_step(scores, state, scaling)
    copies.wait_group(2 * tile_shape.stages - 1)
    acc = pv_mma(weights, load_values(q.high, cache.values.shared.index(buffer)), state.acc, q.dtype)
    if cache.keys.copy != cache.values.copy:
        page = find_pages(cache, first, ahead, cache.values)
    copy_block(cache, cache.values, buffer, page, ahead, True)
    return SoftmaxState(acc, state.row_max, state.row_sum)
