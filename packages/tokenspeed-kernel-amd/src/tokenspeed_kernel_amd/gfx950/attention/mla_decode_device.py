"""Device code of MLA decode: a tile of query rows against one split of the latents, and the merge.

``mla_decode`` explains the tile, the MFMAs, the LDS and the splits. A workgroup takes these steps:

1. Find its sequence and its range of keys (`mla_decode_kernel`).
2. List the pages, or the chosen slots of sparse attention, in LDS (`list_keys`). Later address computations then read LDS, and do
   not wait for the loads of keys in flight, as loads from global memory would.
3. Load the rows of q, and redistribute them through an LDS buffer that holds no keys yet (`as_operands`). Every wave then holds all
   rows as MFMA operands.
4. Mainloop (`attend_listed`): copy blocks of keys from global memory directly to LDS, ``tile_shape.stages`` blocks ahead. For each
   block: QK MFMAs, mask, online softmax, PV MFMAs (`attend_block`).
5. Store the output, or a partial result in fp32. The last workgroup of a tile to arrive merges the partial results
   (`mla_merge_device`).

If two workgroups share a tile, each computes one *half* of the output's columns: these columns of the latents are its values. It
reads the *other* columns as keys only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.attention.mla_merge_device import merge, store_partial
from tokenspeed_kernel_amd.gfx950.common.layouts_device import latent_layouts
from tokenspeed_kernel_amd.gfx950.common.mma_device import load_keys
from tokenspeed_kernel_amd.gfx950.common.paging_device import (
    PAGES_AT_ONCE,
    PagedRows,
    allocate_page_list,
    copy_block,
    find_pages,
    list_pages,
    page_span,
)
from tokenspeed_kernel_amd.gfx950.common.planes_device import leading_bits, row_factors, scale_rows
from tokenspeed_kernel_amd.gfx950.common.split_device import last_to_arrive
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gluon.decode_device import ceil_div, find_split, visible_keys
from tokenspeed_kernel_amd.gluon.mask_device import hide_unseen
from tokenspeed_kernel_amd.gluon.softmax_device import (
    LN_2,
    Scaling,
    SoftmaxState,
    cap_scores,
    initial_state,
    larger,
    normalise,
    nothing_seen,
    softmax_step,
    summed,
)
from tokenspeed_kernel_amd.gluon.tiles_device import QueryTile, load_queries, new_tokens, store_rows, visible_positions

RANK = gl.constexpr(512)
ROPE = gl.constexpr(64)
XCDS = gl.constexpr(8)


@gluon.aggregate
class LatentCache:
    """The latents and rotary parts of one sequence; fields as in `paging_device.PagedCache`.

    Attributes:
        latents: the columns that are also the workgroup's values.
        others: the other columns of the latents, if a workgroup computes half of the output's columns; otherwise the same as
            ``latents``, and not used.
        ropes: the rotary parts.
        page_vectors: distance from one page to the next, in vectors of 16 bytes.
        page_size: slots per page; 1 in sparse attention, where every key has an entry of its own in ``listed``.
        chosen: in sparse attention, the number of slots of a page; ``table`` then has the chosen slots, not pages. Otherwise 0.
        token_vectors: distance from one slot of a page to the next, in vectors of 16 bytes.
    """

    latents: PagedRows
    others: PagedRows
    ropes: PagedRows
    table: gl.tensor
    listed: gl.shared_memory_descriptor
    length: gl.tensor
    page_vectors: gl.constexpr
    page_size: gl.constexpr
    halves: gl.constexpr
    chosen: gl.constexpr
    token_vectors: gl.tensor


@gluon.aggregate
class Queries:
    """A tile's rows of q. Each field has the columns of the `LatentCache` field of the same name."""

    latents: gl.tensor
    others: gl.tensor
    ropes: gl.tensor


@gluon.aggregate
class Operands:
    """A tile's rows of q as MFMA operands.

    Attributes:
        high: the rows, or their first fp8 plane.
        low: the second fp8 plane, which holds the rounding error of the first plane. With one plane, not used.
        factor: float32 [rows], by which dot products of two planes must be multiplied; with one plane, not used.
        planes: number of planes.
    """

    high: Queries
    low: Queries
    factor: gl.tensor
    planes: gl.constexpr


@gluon.jit
def open_rows(operands, begin, columns: gl.constexpr, storage: gl.constexpr, copy: gl.constexpr, tile_shape):
    """Returns the `PagedRows` of ``columns`` columns of the keys, beginning with column ``begin``, and allocates their LDS
    buffers."""
    stored: gl.constexpr = operands.kv_cache.dtype.element_ty
    vector: gl.constexpr = 128 // stored.primitive_bitwidth
    shared = gl.allocate_shared_memory(stored, [tile_shape.stages, tile_shape.block_n, columns], storage)
    return PagedRows(operands.kv_cache + begin, vector, operands.token_vectors * vector, shared, copy)


@gluon.constexpr_function
def slots_at_once(m):
    """Returns the number of chosen slots of sparse attention that are listed in LDS at once: as many as fit beside a tile of m
    rows."""
    return 1024 if m == 16 else 512


@gluon.jit
def open_cache(operands, shape, layouts: gl.constexpr, tile_shape, half, sequence, length):
    """Returns the `LatentCache` of one sequence, and allocates its LDS buffers."""
    vector: gl.constexpr = 128 // operands.kv_cache.dtype.element_ty.primitive_bitwidth
    columns: gl.constexpr = RANK // shape.halves
    latents = open_rows(operands, half * columns, columns, layouts.latents, layouts.latent_copy, tile_shape)
    others = latents
    if shape.halves == 2:
        others = open_rows(operands, (1 - half) * columns, columns, layouts.latents, layouts.latent_copy, tile_shape)
    return LatentCache(
        latents,
        others,
        open_rows(operands, RANK, ROPE, layouts.ropes, layouts.rope_copy, tile_shape),
        operands.page_table + sequence.to(gl.int64) * operands.table_stride,
        allocate_page_list(gl.int64, slots_at_once(tile_shape.m) if shape.sparse else PAGES_AT_ONCE),
        length,
        shape.page // vector,
        1 if shape.sparse else shape.page_size,
        shape.halves,
        shape.page_size if shape.sparse else 0,
        gl.to_tensor(operands.token_vectors),
    )


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def list_slots(cache, first, end):
    """Lists the addresses of the chosen slots at positions ``first`` to ``end`` of ``cache.table``, as many as the list has
    room for, without those that are negative. Returns the position after the last listed key, if the keys begin at ``first``.
    Further entries of the list repeat a chosen slot; if there is none, the slot 0."""
    slots: gl.constexpr = cache.listed.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([slots // (64 * gl.num_warps())], [64], [gl.num_warps()], [0])
    index = gl.arange(0, slots, layout)
    slot = gl.load(cache.table + first + index, mask=index < end - first, other=-1)
    kept = (slot >= 0).to(gl.int32)
    until = gl.associative_scan(kept, 0, add)
    count = gl.sum(kept, 0)
    slot = gl.where(slot >= 0, slot, gl.maximum(gl.max(slot, 0), 0))
    offset = (slot // cache.chosen).to(gl.int64) * cache.page_vectors + (slot % cache.chosen).to(gl.int64) * cache.token_vectors
    cache.listed.scatter(offset, gl.where(kept != 0, until - 1, count + index - until), 0)
    return first + count


@gluon.jit
def list_keys(cache, first, end):
    """Lists the pages, or the chosen slots, from position ``first`` on in LDS. Returns a position: the keys before it are
    listed."""
    if cache.chosen:
        stop = list_slots(cache, first, end)
    else:
        list_pages(cache, first, cache.page_vectors)
        stop = gl.minimum(first + page_span(cache.page_size, cache.latents.shared.shape[1]), end)
    return stop


@gluon.constexpr_function
def row_layout(columns, warps):
    """Returns the register layout of rows of q, [rows, columns]. The number of columns does not change which rows a lane holds."""
    return gl.BlockedLayout([1, columns // 32], [2, 32], [warps, 1], [1, 0])


@gluon.jit
def load_rows(q, tile, shape, columns: gl.constexpr):
    """Loads ``columns`` columns of a tile's rows of q. Each element is loaded by one lane of the workgroup."""
    return load_queries(q, tile, shape, columns, row_layout(columns, gl.num_warps()))


@gluon.jit
def load_tile(operands, shape, tile, half):
    """Loads a tile's rows of q as `Queries`, in the layout of `load_rows`."""
    columns: gl.constexpr = RANK // shape.halves
    latents = load_rows(operands.q + half * columns, tile, shape, columns)
    others = latents
    if shape.halves == 2:
        others = load_rows(operands.q + (1 - half) * columns, tile, shape, columns)
    return Queries(latents, others, load_rows(operands.q + RANK, tile, shape, ROPE))


@gluon.jit
def staging(rows, m: gl.constexpr, PLANE: gl.constexpr):
    """Returns LDS for a plane of m rows of q: a slice of the last key buffer, which is not in use yet."""
    return rows.shared.index(rows.shared.shape[0] - 1).slice(PLANE * m, m, 0)


@gluon.jit
def store_queries(q, cache, PLANE: gl.constexpr):
    """Stores the queries of `load_tile` to LDS."""
    m: gl.constexpr = q.latents.shape[0]
    staging(cache.latents, m, PLANE).store(q.latents)
    if cache.halves == 2:
        staging(cache.others, m, PLANE).store(q.others)
    staging(cache.ropes, m, PLANE).store(q.ropes)


@gluon.jit
def load_operands(cache, layouts: gl.constexpr, m: gl.constexpr, PLANE: gl.constexpr):
    """Loads the queries of a plane from LDS as MFMA operands. Every wave holds all queries."""
    latents = staging(cache.latents, m, PLANE).load(layouts.queries)
    others = latents
    if cache.halves == 2:
        others = staging(cache.others, m, PLANE).load(layouts.queries)
    return Queries(latents, others, staging(cache.ropes, m, PLANE).load(layouts.rope_queries))


@gluon.jit
def magnitudes(q, layout: gl.constexpr):
    """Returns the largest magnitude among the elements of a row that a lane holds, for each row and each of its 32 lanes: float32
    [rows, 32]."""
    largest = gl.reduce(gl.abs(q.to(gl.float32)).reshape([q.shape[0], 32, q.shape[1] // 32]), 2, larger)
    return gl.convert_layout(largest, layout, assert_trivial=True)


@gluon.jit
def split_in_planes(q, factor):
    """Splits ``q * factor`` into two fp8 planes, whose sum has 8 significant bits like bfloat16."""
    high, error = leading_bits(scale_rows(q, factor))
    return high, error.to(gl.float8e4nv)


@gluon.jit
def as_operands(q, cache, layouts: gl.constexpr):
    """Returns the queries of `load_tile` as MFMA operands. With an fp8 cache, 16-bit queries become two fp8 planes."""
    m: gl.constexpr = q.latents.shape[0]
    row: gl.constexpr = gl.SliceLayout(1, layouts.mfma)
    if q.latents.dtype == cache.latents.shared.dtype:
        store_queries(q, cache, 0)
        high = load_operands(cache, layouts, m, 0)
        operands = Operands(high, high, gl.full([m], 1.0, gl.float32, row), 1)
    else:
        lanes: gl.constexpr = row_layout(32, gl.num_warps())
        largest = larger(magnitudes(q.latents, lanes), magnitudes(q.ropes, lanes))
        if cache.halves == 2:
            largest = larger(largest, magnitudes(q.others, lanes))
        factor, back = row_factors(gl.reduce(largest, 1, larger))
        latents, low_latents = split_in_planes(q.latents, factor)
        ropes, low_ropes = split_in_planes(q.ropes, factor)
        others = latents
        low_others = low_latents
        if cache.halves == 2:
            others, low_others = split_in_planes(q.others, factor)
        store_queries(Queries(latents, others, ropes), cache, 0)
        store_queries(Queries(low_latents, low_others, low_ropes), cache, 1)
        back = gl.convert_layout(back, row)
        operands = Operands(load_operands(cache, layouts, m, 0), load_operands(cache, layouts, m, 1), back, 2)
    return operands


@gluon.aggregate
class NextBlock:
    """The block of keys that is copied to LDS next: its first position, and the page of each key, see `find_pages`."""

    start: gl.tensor
    latent_pages: gl.tensor
    rope_pages: gl.tensor


@gluon.jit
def find_block(cache, first, start):
    """Returns the `NextBlock` that begins at position ``start``. The list of pages begins at position ``first``."""
    latent_pages = find_pages(cache, first, start, cache.latents)
    return NextBlock(gl.to_tensor(start), latent_pages, find_pages(cache, first, start, cache.ropes))


@gluon.jit
def copy_keys_only(cache, block, stage):
    """Starts the copy to LDS of a block's columns that are not values."""
    if cache.halves == 2:
        copy_block(cache, cache.others, stage, block.latent_pages, block.start, False)
    copy_block(cache, cache.ropes, stage, block.rope_pages, block.start, False)


@gluon.jit
def copy_values(cache, block, stage):
    """Starts the copy to LDS of a block's columns that are also values."""
    # Slots without a token may hold NaN, and a weight of 0 times NaN is NaN. So reads of these slots are avoided.
    copy_block(cache, cache.latents, stage, block.latent_pages, block.start, True)


@gluon.jit
def copy_keys(cache, first, start, stage):
    """Starts the copy of the block of keys at position ``start`` to LDS. The list of pages begins at ``first``."""
    block = find_block(cache, first, start)
    copy_keys_only(cache, block, stage)
    copy_values(cache, block, stage)


@gluon.jit
def mma(a, b, acc):
    """Returns acc + a @ b. fp8 operands with a k of 128 use the scaled MFMA, without scales."""
    if a.type.layout.parent.instr_shape[2] == 128:
        acc = isa.mfma_scaled(a, None, "e4m3", b, None, "e4m3", acc)
    else:
        acc = isa.mfma(a, b, acc)
    return acc


@gluon.jit
def add_dots(dots, q, low, rows, buffer, PLANES: gl.constexpr):
    """Adds the dot products of some columns of q and of the keys in an LDS buffer to ``dots``, and returns the sum."""
    keys = load_keys(q, rows.shared.index(buffer))
    dots = mma(q, keys, dots)
    if PLANES == 2:
        dots = mma(low, keys, dots)
    return dots


@gluon.jit
def qk_mma(q, cache, buffer):
    """Returns the dot products of q and the keys in an LDS buffer, without the factor of `Operands`."""
    layout: gl.constexpr = q.high.latents.type.layout.parent
    rope_layout: gl.constexpr = q.high.ropes.type.layout.parent
    dots = gl.zeros([q.high.latents.shape[0], cache.latents.shared.shape[1]], gl.float32, rope_layout)
    dots = add_dots(dots, q.high.ropes, q.low.ropes, cache.ropes, buffer, q.planes)
    dots = gl.convert_layout(dots, layout, assert_trivial=True)
    if cache.halves == 2:
        dots = add_dots(dots, q.high.others, q.low.others, cache.others, buffer, q.planes)
    return add_dots(dots, q.high.latents, q.low.latents, cache.latents, buffer, q.planes)


@gluon.jit
def attend_block(q, cache, buffer, start, end, state, visible, scaling, following, ENDS: gl.constexpr, LAST: gl.constexpr):
    """Updates the softmax state with the block of keys in an LDS buffer, which begins at position ``start``.

    Args:
        following: the block to copy to this buffer as soon as it has been read; None if there is none.
    """
    layout: gl.constexpr = q.high.latents.type.layout.parent
    dtype: gl.constexpr = q.high.latents.dtype
    fp8: gl.constexpr = dtype.primitive_bitwidth == 8
    k_width: gl.constexpr = 16 if fp8 else 4
    scores = hide_unseen(cap_scores(qk_mma(q, cache, buffer), scaling), visible, start, end, ENDS, LAST)
    weights, state = softmax_step(scores, state, scaling, 8 if fp8 else 0)
    if following is not None:
        copy_keys_only(cache, following, buffer)
    p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, layout, k_width))
    v = copies.load_shared_relaxed(cache.latents.shared.index(buffer), gl.DotOperandLayout(1, layout, k_width))
    acc = mma(p, v, state.acc)
    if following is not None:
        copy_values(cache, following, buffer)
    return SoftmaxState(acc, state.row_max, state.row_sum)


@gluon.jit
def attend_and_fetch(q, cache, first, block, end, state, visible, scaling, copied: gl.constexpr, tile_shape, ENDS: gl.constexpr):
    """Executes one mainloop iteration: attention to the block with index ``block``, counted from position ``first``, and the copy
    of the block ``tile_shape.stages`` later. ``copied``: groups of copies per block."""
    stages: gl.constexpr = tile_shape.stages
    start = first + block * tile_shape.block_n
    following = find_block(cache, first, start + stages * tile_shape.block_n)
    copies.wait_group(copied * (stages - 1))
    return attend_block(q, cache, block % stages, start, end, state, visible, scaling, following, ENDS, False)


@gluon.jit
def attend_blocks(operands, shape, tile, layouts: gl.constexpr, half, cache, begin, end, visible, scaling, tile_shape):
    """Computes attention of a tile to positions ``begin`` to ``end``, a range that is not empty. Returns the softmax state. Its
    row sums are already reduced across lanes (see `summed`)."""
    block_n: gl.constexpr = tile_shape.block_n
    span: gl.constexpr = page_span(cache.page_size, block_n, cache.listed.shape[0])
    stop = list_keys(cache, begin, end)  # before q: loads return in order, and the copies of keys wait for the list
    q = load_tile(operands, shape, tile, half)
    copy_keys(cache, begin, begin, 0)
    q = as_operands(q, cache, layouts)
    scale = scaling.scale
    if q.planes == 2:
        scale *= q.factor
    scaling = Scaling(scale, scaling.cap, scaling.capped)
    state = initial_state(tile_shape.m, RANK // shape.halves, block_n, layouts.mfma)
    for first in range(begin, end, span):
        if first > begin:
            stop = list_keys(cache, first, end)
            copy_keys(cache, first, first, 0)
        if cache.chosen:
            if stop > first:
                state = attend_listed(q, cache, first, stop, end, state, visible, scaling, tile_shape)
            else:
                copies.wait_group(0)
        else:
            state = attend_listed(q, cache, first, stop, end, state, visible, scaling, tile_shape)
    return summed(state)


@gluon.jit
def attend_listed(q, cache, first, stop, end, state, visible, scaling, tile_shape):
    """Updates the softmax state with the keys from position ``first`` to ``stop``, which are listed in LDS. The copy of the first
    block is in flight."""
    block_n: gl.constexpr = tile_shape.block_n
    stages: gl.constexpr = tile_shape.stages
    # Groups of copies per block: rotary parts, values and, if two workgroups share a tile, the other workgroup's values.
    copied: gl.constexpr = 1 + cache.halves
    blocks = (stop - first + block_n - 1) // block_n
    for stage in gl.static_range(1, stages):
        # If there are fewer blocks than stages, the last block is copied again, because unused LDS could hold NaN.
        copy_keys(cache, first, first + gl.minimum(stage, blocks - 1) * block_n, stage)
    fetching = gl.maximum(blocks - stages, 0)
    unmasked = 0
    if visible.ends_differ:
        unmasked = gl.maximum(gl.minimum((visible.all_end - first) // block_n, fetching), 0)
        for block in range(unmasked):
            state = attend_and_fetch(q, cache, first, block, end, state, visible, scaling, copied, tile_shape, False)
    for block in range(unmasked, fetching):
        state = attend_and_fetch(q, cache, first, block, end, state, visible, scaling, copied, tile_shape, visible.ends_differ)
    # Drain the pipeline. If there are fewer blocks than stages, the mask hides the surplus blocks.
    for stage in gl.static_range(stages):
        start = first + (fetching + stage) * block_n
        copies.wait_group(copied * (stages - 1 - stage))
        buffer = (fetching + stage) % stages
        state = attend_block(q, cache, buffer, start, stop, state, visible, scaling, None, visible.ends_differ, True)
    return state


@gluon.jit
def attend(operands, shape, variant, tile_shape, tile, half, sequence, length, begin, end, ends_differ: gl.constexpr):
    """Computes attention of a tile to positions ``begin`` to ``end`` of a sequence of ``length`` tokens. The range may be empty.
    Returns the softmax state."""
    stored: gl.constexpr = operands.kv_cache.dtype.element_ty
    columns: gl.constexpr = RANK // shape.halves
    layouts: gl.constexpr = latent_layouts(gl.num_warps(), tile_shape.block_n, columns, ROPE, stored)
    cache = open_cache(operands, shape, layouts, tile_shape, half, sequence, length)
    state = nothing_seen(tile_shape.m, columns, layouts.mfma)
    visible = visible_positions(tile, length, variant.window_left, ends_differ, layouts.mfma)
    if (begin < end) & (tile.first_row < tile.q_len * tile.gqa_ratio):
        scale = operands.scale
        if operands.q_scale is not None:
            scale *= gl.load(operands.q_scale)
        if operands.kv_scale is not None:
            kv_scale = gl.load(operands.kv_scale)
            scale *= kv_scale
        scaling = Scaling(scale, operands.cap, variant.capped)
        state = attend_blocks(operands, shape, tile, layouts, half, cache, begin, end, visible, scaling, tile_shape)
        if operands.kv_scale is not None:
            state = SoftmaxState(state.acc * kv_scale, state.row_max, state.row_sum)
    return state


@gluon.jit
def store_output(operands, shape, variant, tile, half, state):
    """Normalises a tile's rows, and writes the output and the LSE."""
    result, log_sum = normalise(state, None)
    columns: gl.constexpr = state.acc.shape[1]
    store_rows(operands.out + half * columns, result, tile, tile.first_query, shape.out_token, shape.out_head)
    if variant.lse and half == 0:
        store_rows(operands.lse, log_sum * LN_2, tile, tile.first_query, shape.heads, 1)


@gluon.jit
def mla_decode_kernel(
    operands,
    partial,
    shape: gl.constexpr,
    variant: gl.constexpr,
    tile_shape: gl.constexpr,
    plan: gl.constexpr,
):
    """Computes attention of a tile of query rows to the keys of one split, for all columns of the output or for half of them.

    Consecutive workgroups run on different XCDs. The workgroups of a split run on one XCD, whose L2 holds their keys.

    `gfx950.attention.mla_decode` describes the arguments.
    """
    block_n: gl.constexpr = tile_shape.block_n
    m: gl.constexpr = tile_shape.m
    tiles: gl.constexpr = shape.halves * ((plan.q_len * shape.heads + m - 1) // m)
    split = gl.program_id(0) // (XCDS * tiles) * XCDS + gl.program_id(0) % XCDS
    number = gl.program_id(0) // XCDS % tiles
    half = number % shape.halves
    sequence, first_split, split_blocks, length = find_split(split, operands, plan)
    first_query, new = new_tokens(operands.cu_seqlens_q, gl.minimum(sequence, operands.batch - 1), plan.q_len)
    if (sequence < operands.batch) & (new > 0):
        begin, count = visible_keys(length, plan)
        blocks = ceil_div(count, block_n)
        first_block = 0
        after_block = blocks
        if plan.split_kv:
            first_block = (split - first_split) * split_blocks
            after_block = gl.minimum(first_block + split_blocks, blocks)
        start = begin + first_block * block_n
        if plan.window_left >= 0 and operands.cu_seqlens_q is not None:
            # `visible_keys` assumes plan.q_len new tokens. If a sequence has fewer, its first split begins too early, and may
            # include a page that was freed.
            start = gl.maximum(start, gl.maximum(length - new - plan.window_left, 0) // plan.aligned * plan.aligned)
        tile = QueryTile(
            gl.to_tensor(first_query), gl.to_tensor(new), number // shape.halves * m, gl.to_tensor(0), shape.heads, m
        )  # fmt: skip
        state = attend(
            operands, shape, variant, tile_shape, tile, half, sequence, length,
            start, gl.minimum(begin + after_block * block_n, length), variant.is_causal and plan.q_len > 1,
        )  # fmt: skip
        if plan.split_kv and blocks > split_blocks:
            first_part = 2 * (first_split - sequence) * tiles + number
            store_partial(partial, first_part + (split - first_split) * tiles, state)
            splits = ceil_div(blocks, split_blocks)
            arrived = partial.arrived + sequence * tiles + number
            if last_to_arrive(arrived, splits):
                state = merge(partial, state, first_part, splits, tiles, 8)
                store_output(operands, shape, variant, tile, half, state)
                gl.store(arrived, 0)  # last, because nothing waits for it
        else:
            store_output(operands, shape, variant, tile, half, state)
