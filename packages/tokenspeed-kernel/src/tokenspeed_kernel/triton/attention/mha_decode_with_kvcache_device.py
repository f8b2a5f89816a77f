"""Device code of `mha_decode_with_kvcache`: paged decode attention with split-KV.

Grid: one axis of (work item, KV head, tile of query rows), the tile varying fastest. A work item is a range of key blocks of one
sequence. With split-KV, each program finds its work item from the sequence lengths, and returns if there is none.

Tile: the query rows of one KV head, that is, all query heads of its GQA group for all new tokens, padded to the 16 rows that a
`tl.dot` needs at least. Each key is therefore loaded once for all of them. Several KV heads with few rows share one tile, see
`decode_kernel`.

Mainloop, for each block of N keys: load N keys and N values through the page table, QK MMA, mask, online softmax in float32, PV MMA
with probabilities rounded to the MMA operands' dtype. Triton pipelines the loads over ``TILE.stages`` stages. The kernel is
memory-bound, so the tile and the stages are chosen for bytes in flight, not for the MMAs.

fp8 caches are converted to the operands' dtype in registers, if possible two columns at a time (``FORMATS.pairs``, see
`_fp8_pairs`). Scales of q and k multiply the scores, and the scale of v multiplies the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._fp8_device import widened
from tokenspeed_kernel.triton.attention._fp8_pairs_device import even_and_odd
from tokenspeed_kernel.triton.attention._online_softmax_device import (
    Scaling,
    join_sink,
    log2_sum_exp,
    log_sum_exp,
    no_keys_yet,
    reciprocal_of,
    scale_scores,
    softmax_step,
)
from tokenspeed_kernel.triton.attention._split_kv_device import (
    Lengths,
    SizeLimits,
    blocks_of,
    blocks_per_work_item,
    eligible_length,
    find_work_item,
    first_block,
    work_items_of,
)
from tokenspeed_kernel.triton.attention._trees_device import continued, placed
from tokenspeed_kernel.triton.views_device import Cache, Pages, Rows, Scales, head_of, pages_of, row_of


@triton.jit
def _to_float16_range(queries, queries_odd, DTYPE: tl.constexpr):
    """Divides the program's queries by one power of two, so that they fit float16's range. Returns ``(queries, queries_odd,
    power)``.

    fp8 caches are converted to float16, but bfloat16 queries may exceed its range. The power of two moves the largest element to
    [2^14, 2^15), unless the exponent is clamped. The division is exact, except for elements that become subnormal.
    """
    largest = tl.maximum(tl.max(tl.abs(queries.to(tl.float32))), tl.max(tl.abs(queries_odd.to(tl.float32))))
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127 - 14
    exponent = tl.minimum(tl.maximum(exponent, -100), 112)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    power = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (queries.to(tl.float32) * down).to(DTYPE), (queries_odd.to(tl.float32) * down).to(DTYPE), power


@triton.jit
def _load_columns(pointers, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows of the key or value cache. Columns from WIDTH on are 0."""
    if BLOCK == WIDTH:
        rows = tl.load(pointers)
    else:
        rows = tl.load(pointers, mask=(column < WIDTH)[None, :], other=0.0)
    return rows


@triton.jit
def _qk_mma(queries, queries_odd, keys, DTYPE: tl.constexpr, FP8: tl.constexpr, PAIRS: tl.constexpr):
    """Returns ``queries @ keys.T``, float32. With PAIRS, a key element packs two fp8 values: an even and an odd column."""
    if PAIRS:
        keys_even, keys_odd = even_and_odd(tl.trans(keys), DTYPE, FP8)
        dots = tl.dot(queries, keys_even, input_precision="ieee")
        dots = tl.dot(queries_odd, keys_odd, dots, input_precision="ieee")
    else:
        dots = tl.dot(queries, widened(tl.trans(keys), DTYPE, FP8), input_precision="ieee")
    return dots


@triton.jit
def _pv_mma(weights, values, acc, acc_odd, decay, DTYPE: tl.constexpr, FP8: tl.constexpr, PAIRS: tl.constexpr):
    """Returns ``acc * decay + weights @ values``.

    With PAIRS, a value element packs two fp8 values, and even and odd columns have separate accumulators.
    """
    weights = weights.to(DTYPE)
    if PAIRS:
        values_even, values_odd = even_and_odd(values, DTYPE, FP8)
        acc = tl.dot(weights, values_even, acc * decay[:, None], input_precision="ieee")
        acc_odd = tl.dot(weights, values_odd, acc_odd * decay[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weights, widened(values, DTYPE, FP8), acc * decay[:, None], input_precision="ieee")
    return acc, acc_odd


class WorkItem(NamedTuple):
    """The range of a sequence's keys that a program attends to.

    Fields:
        begin, end: the range of key blocks, end exclusive.
        low, length: the first key that some query of the sequence sees, and the number of the sequence's keys.
        work_items: number of work items of the sequence; if it is 1, the program's result is final.
    """

    begin: Any
    end: Any
    low: Any
    length: Any
    work_items: Any


class QueryRows(NamedTuple):
    """The query rows of a program: row ``r`` of a KV head is query head ``r % group`` of the sequence's new token ``r // group``.

    Fields:
        head, own: the program's first KV head, and each row's KV head relative to that head.
        row, real: each row's index within its KV head, and whether the row exists.
        token, q_head: the index of each row's token in q, and its query head.
        position, last: each query's position in the sequence, and the last key of the prefix that the query sees whole.
        first_new: the position of the sequence's first new token.
        nodes: bit mask of the new tokens that each query sees; used only with draft trees.
    """

    head: Any
    own: Any
    row: Any
    real: Any
    token: Any
    q_head: Any
    position: Any
    last: Any
    first_new: Any
    nodes: Any


class Queries(NamedTuple):
    """Queries [M, D] in the MMA operands' dtype.

    Fields:
        even, odd: the even and odd columns if an fp8 cache is read in pairs of values; otherwise ``even`` has all columns, and
            ``odd`` is not read.
        scaling: the `Scaling` of dot products.
        row_scale: float32 [M], a further factor of each row's dot products; read only if packed heads have scales of their own.
    """

    even: Any
    odd: Any
    scaling: Any
    row_scale: Any


class Accumulator(NamedTuple):
    """The accumulator of ``weights @ values``, [M, W]. ``odd``, the odd columns, is read only if an fp8 cache is read in pairs
    of values.
    """

    even: Any
    odd: Any


@triton.constexpr_function
def _scaled_by_row(shape, tile):
    """Whether the rows of a program may have different scales of q or k, because they belong to several KV heads."""
    return tile.packed > 1 and (shape.q_scales > 0 or shape.k_scales > 0)


@triton.jit
def _work_item_of(number, max_blocks, sequence, q_len, lengths, WALK: tl.constexpr, SPLIT: tl.constexpr):
    """Returns the `WorkItem` with index ``number`` within its sequence. The sizes of a sequence's work items differ by at most one
    block.
    """
    length = eligible_length(lengths, sequence, WALK)
    first = first_block(length, lengths.window_left, WALK)
    blocks = blocks_of(length, lengths.window_left, WALK)
    work_items = 1
    begin, end = first, first + blocks
    if SPLIT:
        work_items = work_items_of(blocks, max_blocks)
        each, more = blocks // work_items, blocks % work_items
        begin = first + number * each + tl.minimum(number, more)
        end = begin + each + (number < more).to(tl.int32)
    low = first * 0
    if WALK.windowed:
        low = tl.maximum(length - q_len - lengths.window_left, 0)
    return WorkItem(begin, end, low, length, work_items)


@triton.jit
def _query_rows(
    tile, head, first_token, q_len, item, lengths, tree_mask, SHAPE: tl.constexpr, WALK: tl.constexpr, TILE: tl.constexpr
):
    """Returns the `QueryRows` of tile number ``tile``, of the packed KV heads from ``head`` on."""
    GROUP: tl.constexpr = SHAPE.group
    ROWS: tl.constexpr = GROUP * WALK.q_len
    row = tile * TILE.block_m + tl.arange(0, TILE.block_m)
    real = row < TILE.packed * ROWS
    own = row // ROWS
    row = row % ROWS
    if lengths.cu_seqlens_q is not None:
        real &= row < q_len * GROUP
    token = first_token + row // GROUP
    q_head = (head + own) * GROUP + row % GROUP
    first_new = item.length - q_len
    position = first_new + row // GROUP
    last = position
    nodes = token
    if tree_mask is not None:
        nodes = tl.load(tree_mask + token, mask=real, other=0)
        position, last = placed(nodes, position, first_new)
    return QueryRows(head, own, row, real, token, q_head, position, last, first_new, nodes)


@triton.jit
def _load_queries(q_rows, scales, multiplier, cap_log2, rows, SHAPE: tl.constexpr, FORMATS: tl.constexpr, TILE: tl.constexpr):
    """Loads the queries of a program. If several KV heads are packed, a query is 0 in the columns of the other heads."""
    DTYPE: tl.constexpr = FORMATS.dtype
    Q_FP8: tl.constexpr = FORMATS.q_fp8
    PAIRS: tl.constexpr = FORMATS.pairs
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    EACH: tl.constexpr = 2 if PAIRS else 1
    d = tl.arange(0, TILE.block_d)
    if TILE.packed > 1:
        wanted = rows.real[:, None] & ((d * EACH // HEAD_DIM)[None, :] == rows.own[:, None])
    else:
        wanted = rows.real[:, None] & (d < HEAD_DIM // EACH)[None, :]
    q_at = row_of(q_rows, rows.token[:, None], rows.q_head[:, None]) + (d * EACH % HEAD_DIM)[None, :] * q_rows.dim_stride
    even = tl.load(q_at, mask=wanted, other=0.0)
    odd = even
    if PAIRS:
        odd = tl.load(q_at + q_rows.dim_stride, mask=wanted, other=0.0)
    if FORMATS.rescaled:
        even, odd, power = _to_float16_range(even, odd, DTYPE)
        multiplier *= power
    else:
        even = widened(even, DTYPE, Q_FP8)
        odd = widened(odd, DTYPE, Q_FP8)
    BLOCK_M: tl.constexpr = TILE.block_m
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    multiplier, row_scale = _scaled(multiplier, row_scale, scales.q, SHAPE.q_scales, rows, _scaled_by_row(SHAPE, TILE))
    multiplier, row_scale = _scaled(multiplier, row_scale, scales.k, SHAPE.k_scales, rows, _scaled_by_row(SHAPE, TILE))
    return Queries(even, odd, Scaling(multiplier, cap_log2), row_scale)


@triton.jit
def _scaled(multiplier, row_scale, scale, STRIDE: tl.constexpr, rows, BY_ROW: tl.constexpr):
    """Applies the scale of q or k. Returns ``(multiplier, row_scale)``.

    With BY_ROW, the scale of each row's KV head multiplies ``row_scale``. Otherwise the one head's scale multiplies ``multiplier``.
    """
    if scale is not None:
        if BY_ROW:
            row_scale *= tl.load(scale + (rows.head + rows.own) * STRIDE, mask=rows.real, other=1.0)
        else:
            multiplier *= tl.load(scale + rows.head * STRIDE)
    return multiplier, row_scale


@triton.jit
def _load_block(
    block,
    k_head,
    v_head,
    keys,
    values,
    pages,
    page_stride,
    item,
    lengths,
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    WALK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loads a block of keys and values as stored. Returns ``(k, v)``.

    A key that no query sees may be NaN, so the nearest visible key is read in its place.
    """
    PAIRS: tl.constexpr = FORMATS.pairs
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    BLOCK_N: tl.constexpr = TILE.block_n
    EACH: tl.constexpr = 2 if PAIRS else 1  # cache values per loaded element
    d = tl.arange(0, TILE.block_d)
    w = tl.arange(0, TILE.block_w)
    held = tl.maximum(tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), item.length - 1), item.low)
    slot = held % PAGE_SIZE
    if PAGE_SIZE % BLOCK_N == 0:
        seen = block
        if WALK.windowed and lengths.cu_seqlens_q is not None:
            # Work items begin where the window of `Walk.q_len` new tokens begins. If a sequence has fewer new tokens, its window
            # begins later, and the first page of the work item may have been freed.
            seen = tl.maximum(block, item.low // BLOCK_N)
        page = tl.load(pages + seen // (PAGE_SIZE // BLOCK_N) * page_stride)
    else:
        page = tl.load(pages + held // PAGE_SIZE * page_stride)
    if TILE.far:
        page = page.to(tl.int64)
    k_row = page * keys.page_stride + slot * keys.slot_stride
    if TILE.alike:
        v_row = k_row
    else:
        v_row = page * values.page_stride + slot * values.slot_stride
    k_at = k_head + (k_row[:, None] + (d * keys.dim_stride)[None, :])
    v_at = v_head + (v_row[:, None] + (w * values.dim_stride)[None, :])
    k = _load_columns(k_at, d, TILE.packed * SHAPE.head_dim // EACH, TILE.block_d)
    v = _load_columns(v_at, w, TILE.packed * SHAPE.v_head_dim // EACH, TILE.block_w)
    return k, v


@triton.jit
def _visible(key, rows, item, window_left, tree_mask, WALK: tl.constexpr):
    """Returns the mask of a block of keys: which keys each query row sees, [M, N], or [1, N] if all rows see the same keys."""
    if WALK.q_len == 1:
        visible = key < item.length
        if WALK.windowed:
            visible &= key >= item.low
        visible = visible[None, :]
    else:
        visible = key[None, :] <= rows.last[:, None]
        if WALK.windowed:
            visible &= key[None, :] >= rows.position[:, None] - window_left
        if tree_mask is not None:
            visible |= continued(rows.nodes, key, rows.first_new, item.length)
    return visible


@triton.jit
def _attend(
    queries,
    rows,
    keys,
    values,
    table,
    sequence,
    item,
    lengths,
    tree_mask,
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    WALK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Runs the mainloop: computes the attention over the key blocks of a work item. Returns the softmax state and the
    `Accumulator`."""
    DTYPE: tl.constexpr = FORMATS.dtype
    KV_FP8: tl.constexpr = FORMATS.kv_fp8
    PAIRS: tl.constexpr = FORMATS.pairs
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_W: tl.constexpr = TILE.block_w
    pages = pages_of(table, sequence)
    k_head = head_of(keys, rows.head)
    v_head = head_of(values, rows.head)
    state = no_keys_yet(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    acc_odd = acc
    for block in tl.range(item.begin, item.end, num_stages=TILE.stages):
        k, v = _load_block(
            block, k_head, v_head, keys, values, pages, table.page_stride, item, lengths, SHAPE, FORMATS, WALK, TILE
        )  # fmt: skip
        dots = _qk_mma(queries.even, queries.odd, k, DTYPE, KV_FP8, PAIRS)
        if _scaled_by_row(SHAPE, TILE):
            dots *= queries.row_scale[:, None]
        visible = _visible(block * TILE.block_n + tl.arange(0, TILE.block_n), rows, item, lengths.window_left, tree_mask, WALK)
        scores, factor = scale_scores(dots, queries.scaling, SHAPE.has_cap)
        weights, decay, state = softmax_step(state, tl.where(visible, scores, -float("inf")), factor)
        acc, acc_odd = _pv_mma(weights, v, acc, acc_odd, decay, DTYPE, KV_FP8, PAIRS)
    return state, Accumulator(acc, acc_odd)


@triton.jit
def _columns_of(acc, v_scale, rows, SHAPE: tl.constexpr, FORMATS: tl.constexpr, TILE: tl.constexpr):
    """Returns ``(acc, w, stored)``: the accumulator [M, W] times the scale of v, and each column's index within its head.

    ``stored`` is the mask of the elements to store: a row stores only its own head's columns.
    """
    PAIRS: tl.constexpr = FORMATS.pairs
    w = tl.arange(0, TILE.block_w)
    sums = acc.even
    if PAIRS:
        sums = tl.interleave(acc.even, acc.odd)
        w = tl.arange(0, 2 * TILE.block_w)
    if v_scale is not None:
        sums *= tl.load(v_scale + (rows.head + rows.own) * SHAPE.v_scales, mask=rows.real, other=1.0)[:, None]
    stored = rows.real[:, None] & ((w // SHAPE.v_head_dim)[None, :] == rows.own[:, None])
    return sums, w % SHAPE.v_head_dim, stored


@triton.jit
def _store_partial(partial, partial_lse, work_item, state, acc, w, stored, rows, SHAPE: tl.constexpr, WALK: tl.constexpr):
    """Stores a work item's partial attention output (float32), and its LSE in base 2, for the split-KV merge."""
    at_row = (work_item.to(tl.int64) * SHAPE.heads + rows.head + rows.own) * (SHAPE.group * WALK.q_len) + rows.row
    tl.store(partial_lse + at_row, log2_sum_exp(state), mask=rows.real)
    acc *= reciprocal_of(state.row_sum)[:, None]
    tl.store(partial + at_row[:, None] * SHAPE.v_head_dim + w[None, :], acc, mask=stored)


@triton.jit
def _store(out_rows, lse, sinks, state, acc, w, stored, rows, SHAPE: tl.constexpr):
    """Stores the final attention output, and the rows' LSE unless ``lse`` is None."""
    if sinks is not None:
        decay, state = join_sink(state, tl.load(sinks + rows.q_head, mask=rows.real, other=0.0))
        acc *= decay[:, None]
    acc *= reciprocal_of(state.row_sum)[:, None]
    out_at = row_of(out_rows, rows.token[:, None], rows.q_head[:, None]) + w[None, :] * out_rows.dim_stride
    tl.store(out_at, acc.to(out_rows.first.dtype.element_ty), mask=stored)
    if lse is not None:
        tl.store(lse + rows.token * (SHAPE.heads * SHAPE.group) + rows.q_head, log_sum_exp(state), mask=rows.real)


@triton.jit(
    do_not_specialize=["page_table_stride_b", "batch", "capacity", "window_left", "least", "wave", "waves_work_items", "long"]
)
def decode_kernel(
    q,  # [batch * q_len, heads * group, head_dim]
    k_cache,  # [pages, page_size, heads, head_dim]
    v_cache,  # [pages, page_size, heads, v_head_dim]
    page_table,  # [batch, max_pages]
    cache_seqlens,
    cu_seqlens_q,  # None if every sequence has q_len new tokens; otherwise sequences with more, or with none, are skipped
    sinks,
    tree_mask,  # int64 [tokens], or None
    q_scale,
    k_scale,
    v_scale,
    out,
    lse,
    partial,
    partial_lse,
    q_stride_t, q_stride_h, q_stride_d,
    k_stride_p, k_stride_t, k_stride_h, k_stride_d,
    v_stride_p, v_stride_t, v_stride_h, v_stride_d,
    page_table_stride_b, page_table_stride_p,
    out_stride_t, out_stride_h, out_stride_d,
    batch, capacity, window_left,
    multiplier, cap_log2,
    least, wave, waves_work_items, long,  # see `SizeLimits`
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    WALK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes the attention of a tile of query rows, of one KV head or of several, over the keys of one work item.

    If KV heads have few query rows each, TILE.packed of them become one wide head. A query is 0 in the columns of other heads, and
    only its own head's columns of the result are stored. The wide head needs no larger tile than one head, because tiles have a
    minimum number of rows. Its memory accesses are longer, and so more efficient. But an infinite key of one head makes the results
    of the program's other heads NaN as well.
    """
    GROUP: tl.constexpr = SHAPE.group
    PROGRAMS: tl.constexpr = SHAPE.heads // TILE.packed
    TILES: tl.constexpr = (GROUP * WALK.q_len + TILE.block_m - 1) // TILE.block_m
    q_rows = Rows(q, q_stride_t, q_stride_h, q_stride_d)
    out_rows = Rows(out, out_stride_t, out_stride_h, out_stride_d)
    keys = Cache(k_cache, k_stride_p, k_stride_t, k_stride_h, k_stride_d)
    values = Cache(v_cache, v_stride_p, v_stride_t, v_stride_h, v_stride_d)
    table = Pages(page_table, page_table_stride_b, page_table_stride_p)
    scales = Scales(q_scale, k_scale, v_scale)
    lengths = Lengths(cache_seqlens, cu_seqlens_q, batch, capacity, window_left)
    if TILE.early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Programs of all heads of the same tokens are adjacent in the grid, because the keys of these heads are adjacent in memory.
    work_item = tl.program_id(0) // (PROGRAMS * TILES)
    head = tl.program_id(0) // TILES % PROGRAMS * TILE.packed
    tile = tl.program_id(0) % TILES
    sequence = work_item
    first_work_item = work_item
    max_blocks = 0
    if TILE.split:
        max_blocks = blocks_per_work_item(lengths, SizeLimits(least, wave, waves_work_items, long), WALK)
        sequence, first_work_item = find_work_item(work_item, max_blocks, lengths, WALK)
        if sequence >= batch:
            return
    first_token = sequence.to(tl.int64) * WALK.q_len
    q_len = WALK.q_len
    if cu_seqlens_q is not None:
        first_token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        q_len = (tl.load(cu_seqlens_q + sequence + 1) - first_token).to(tl.int32)
        if q_len > WALK.q_len:
            return
        if TILES > 1:  # noqa: SIM102 (this is known at compile time; heads are not packed then)
            if tile * TILE.block_m >= q_len * GROUP:
                return
    item = _work_item_of(work_item - first_work_item, max_blocks, sequence, q_len, lengths, WALK, TILE.split)
    rows = _query_rows(tile, head, first_token, q_len, item, lengths, tree_mask, SHAPE, WALK, TILE)
    queries = _load_queries(q_rows, scales, multiplier, cap_log2, rows, SHAPE, FORMATS, TILE)
    state, acc = _attend(queries, rows, keys, values, table, sequence, item, lengths, tree_mask, SHAPE, FORMATS, WALK, TILE)
    acc, w, stored = _columns_of(acc, scales.v, rows, SHAPE, FORMATS, TILE)
    if TILE.split and item.work_items > 1:
        _store_partial(partial, partial_lse, work_item, state, acc, w, stored, rows, SHAPE, WALK)
        return
    _store(out_rows, lse, sinks, state, acc, w, stored, rows, SHAPE)
