"""Device code of `mha_decode_with_kvcache`."""

from __future__ import annotations

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
    """Divides queries by a power of two that brings them into float16's range. Returns the queries and the power of two."""
    largest = tl.maximum(tl.max(tl.abs(queries.to(tl.float32))), tl.max(tl.abs(queries_odd.to(tl.float32))))
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127 - 14
    exponent = tl.minimum(tl.maximum(exponent, -100), 112)
    down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    power = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (queries.to(tl.float32) * down).to(DTYPE), (queries_odd.to(tl.float32) * down).to(DTYPE), power


@triton.jit
def _load_columns(pointers, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows of a cache. Columns from WIDTH on are 0."""
    if BLOCK == WIDTH:
        rows = tl.load(pointers)
    else:
        rows = tl.load(pointers, mask=(column < WIDTH)[None, :], other=0)
    return rows


@triton.jit
def _qk_mma(queries, queries_odd, keys, DTYPE: tl.constexpr, FP8: tl.constexpr, PAIRS: tl.constexpr):
    """``queries @ keys.T``, float32."""
    if PAIRS:
        keys_even, keys_odd = even_and_odd(tl.trans(keys), DTYPE, FP8)
        dots = tl.dot(queries, keys_even, input_precision="ieee")
        dots = tl.dot(queries_odd, keys_odd, dots, input_precision="ieee")
    else:
        dots = tl.dot(queries, widened(tl.trans(keys), DTYPE, FP8), input_precision="ieee")
    return dots


@triton.jit
def _pv_mma(weights, values, acc, acc_odd, decay, DTYPE: tl.constexpr, FP8: tl.constexpr, PAIRS: tl.constexpr):
    """``acc * decay + weights @ values``, with separate accumulators for even and odd columns if the cache is read in pairs."""
    weights = weights.to(DTYPE)
    if PAIRS:
        values_even, values_odd = even_and_odd(values, DTYPE, FP8)
        acc = tl.dot(weights, values_even, acc * decay[:, None], input_precision="ieee")
        acc_odd = tl.dot(weights, values_odd, acc_odd * decay[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weights, widened(values, DTYPE, FP8), acc * decay[:, None], input_precision="ieee")
    return acc, acc_odd


@triton.jit(
    do_not_specialize=["page_table_stride_b", "batch", "capacity", "window_left", "least", "wave", "waves_work_items", "long"]
)
def decode_kernel(
    q,  # [batch * q_len, heads * group, head_dim]
    k_cache,  # [pages, page_size, heads, head_dim]
    v_cache,  # [pages, page_size, heads, v_head_dim]
    page_table,  # [batch, max_pages]
    cache_seqlens,
    cu_seqlens_q,  # None where every sequence has q_len new tokens; else sequences with no or more new tokens are skipped
    sinks,
    tree_mask,  # int64 [tokens], or None
    q_scale,
    k_scale,
    v_scale,
    out,
    lse,
    partial,
    partial_lse,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    k_stride_p,
    k_stride_t,
    k_stride_h,
    k_stride_d,
    v_stride_p,
    v_stride_t,
    v_stride_h,
    v_stride_d,
    page_table_stride_b,
    page_table_stride_p,
    out_stride_t,
    out_stride_h,
    out_stride_d,
    batch,
    capacity,
    window_left,
    multiplier,
    cap_log2,
    least,
    wave,
    waves_work_items,
    long,
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    WALK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program of a work item: a tile of the query rows of one KV head (or of several), over the work item's range of keys.

    If heads have few rows, ``packed`` of them become one wide head. A query is 0 in the columns of other heads, and only its own
    head's columns of the result are kept. The tile is no larger than for one head, and memory accesses are longer. An infinite key
    of one head therefore also makes the results of the other heads of its program NaN.
    """
    GROUP: tl.constexpr = SHAPE.group
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    V_HEAD_DIM: tl.constexpr = SHAPE.v_head_dim
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    DTYPE: tl.constexpr = FORMATS.dtype
    FP8: tl.constexpr = FORMATS.kv_fp8
    Q_FP8: tl.constexpr = FORMATS.q_fp8
    PAIRS: tl.constexpr = FORMATS.pairs
    Q_LEN: tl.constexpr = WALK.q_len
    WINDOWED: tl.constexpr = WALK.windowed
    PACKED: tl.constexpr = TILE.packed
    SPLIT: tl.constexpr = TILE.split
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_W: tl.constexpr = TILE.block_w
    ROWS: tl.constexpr = GROUP * Q_LEN
    EACH: tl.constexpr = 2 if PAIRS else 1  # values per element of the cache as it is read
    COLUMNS: tl.constexpr = PACKED * HEAD_DIM // EACH
    V_COLUMNS: tl.constexpr = PACKED * V_HEAD_DIM // EACH
    PROGRAMS: tl.constexpr = SHAPE.heads // PACKED
    TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
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
    # Programs of all heads of the same tokens are adjacent in the grid, because their keys are adjacent in memory.
    work_item = tl.program_id(0) // (PROGRAMS * TILES)
    head = tl.program_id(0) // TILES % PROGRAMS * PACKED
    tile = tl.program_id(0) % TILES
    sequence = work_item
    first_work_item = work_item
    if SPLIT:
        max_blocks = blocks_per_work_item(lengths, SizeLimits(least, wave, waves_work_items, long), WALK)
        sequence, first_work_item = find_work_item(work_item, max_blocks, lengths, WALK)
        if sequence >= batch:
            return
    first_token = sequence.to(tl.int64) * Q_LEN
    q_len = Q_LEN
    if cu_seqlens_q is not None:
        first_token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        q_len = (tl.load(cu_seqlens_q + sequence + 1) - first_token).to(tl.int32)
        if q_len > Q_LEN:
            return
        if TILES > 1:  # noqa: SIM102 (this is known at compile time; heads are not packed then)
            if tile * BLOCK_M >= q_len * GROUP:
                return
    length = eligible_length(lengths, sequence, WALK)
    first = first_block(length, window_left, WALK)
    blocks = blocks_of(length, window_left, WALK)
    work_items = 1
    begin, end = first, first + blocks
    if SPLIT:  # work items of a sequence differ by at most one block
        work_items = work_items_of(blocks, max_blocks)
        each, more, at = blocks // work_items, blocks % work_items, work_item - first_work_item
        begin = first + at * each + tl.minimum(at, more)
        end = begin + each + (at < more).to(tl.int32)

    # Queries.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < PACKED * ROWS
    own = row // ROWS  # the row's head among the packed heads
    row = row % ROWS
    if cu_seqlens_q is not None:
        real &= row < q_len * GROUP
    token = first_token + row // GROUP
    q_head = (head + own) * GROUP + row % GROUP
    position = length - q_len + row // GROUP
    last = position  # the last key up to which a query sees all keys
    if tree_mask is not None:
        nodes = tl.load(tree_mask + token, mask=real, other=0)
        position, last = placed(nodes, position, length - q_len)
    d = tl.arange(0, TILE.block_d)
    w = tl.arange(0, BLOCK_W)
    if PACKED > 1:
        wanted = real[:, None] & ((d * EACH // HEAD_DIM)[None, :] == own[:, None])
    else:
        wanted = real[:, None] & (d < COLUMNS)[None, :]
    q_at = row_of(q_rows, token[:, None], q_head[:, None]) + (d * EACH % HEAD_DIM)[None, :] * q_rows.dim_stride
    queries = tl.load(q_at, mask=wanted, other=0.0)
    queries_odd = queries
    if PAIRS:
        queries_odd = tl.load(q_at + q_rows.dim_stride, mask=wanted, other=0.0)
    if FORMATS.rescaled:
        queries, queries_odd, power = _to_float16_range(queries, queries_odd, DTYPE)
        multiplier *= power
    else:
        queries = widened(queries, DTYPE, Q_FP8)
        queries_odd = widened(queries_odd, DTYPE, Q_FP8)
    # Packed heads have their own scales, which are applied per row.
    EACH_SCALED: tl.constexpr = PACKED > 1 and (SHAPE.q_scales > 0 or SHAPE.k_scales > 0)
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if scales.q is not None:
        if EACH_SCALED:
            row_scale *= tl.load(scales.q + (head + own) * SHAPE.q_scales, mask=real, other=1.0)
        else:
            multiplier *= tl.load(scales.q + head * SHAPE.q_scales)
    if scales.k is not None:
        if EACH_SCALED:
            row_scale *= tl.load(scales.k + (head + own) * SHAPE.k_scales, mask=real, other=1.0)
        else:
            multiplier *= tl.load(scales.k + head * SHAPE.k_scales)
    scaling = Scaling(multiplier, cap_log2)

    # Keys and values.
    pages = pages_of(table, sequence)
    k_head = head_of(keys, head)
    v_head = head_of(values, head)
    low = first * 0
    if WINDOWED:
        low = tl.maximum(length - q_len - window_left, 0)
    n = tl.arange(0, BLOCK_N)
    state = no_keys_yet(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    acc_odd = acc
    for block in tl.range(begin, end, num_stages=TILE.stages):
        # A key that no query sees may be NaN and is not read: the nearest visible key is read instead.
        key = block * BLOCK_N + n
        held = tl.maximum(tl.minimum(key, length - 1), low)
        slot = held % PAGE_SIZE
        if PAGE_SIZE % BLOCK_N == 0:
            seen = block
            if WINDOWED and cu_seqlens_q is not None:
                # Work items begin at the window of Q_LEN new tokens. With fewer new tokens, the first page may have been freed.
                seen = tl.maximum(block, low // BLOCK_N)
            page = tl.load(pages + seen // (PAGE_SIZE // BLOCK_N) * table.page_stride)
        else:
            page = tl.load(pages + held // PAGE_SIZE * table.page_stride)
        if TILE.far:
            page = page.to(tl.int64)
        k_row = page * keys.page_stride + slot * keys.slot_stride
        if TILE.alike:
            v_row = k_row
        else:
            v_row = page * values.page_stride + slot * values.slot_stride
        k_at = k_head + (k_row[:, None] + (d * keys.dim_stride)[None, :])
        v_at = v_head + (v_row[:, None] + (w * values.dim_stride)[None, :])
        k = _load_columns(k_at, d, COLUMNS, TILE.block_d)
        v = _load_columns(v_at, w, V_COLUMNS, BLOCK_W)

        dots = _qk_mma(queries, queries_odd, k, DTYPE, FP8, PAIRS)
        if EACH_SCALED:
            dots *= row_scale[:, None]
        if Q_LEN == 1:
            visible = key < length
            if WINDOWED:
                visible &= key >= low
            visible = visible[None, :]
        else:
            visible = key[None, :] <= last[:, None]
            if WINDOWED:
                visible &= key[None, :] >= position[:, None] - window_left
            if tree_mask is not None:
                visible |= continued(nodes, key, length - q_len, length)
        scores, factor = scale_scores(dots, scaling, SHAPE.has_cap)
        weights, decay, state = softmax_step(state, tl.where(visible, scores, -float("inf")), factor)
        acc, acc_odd = _pv_mma(weights, v, acc, acc_odd, decay, DTYPE, FP8, PAIRS)

    # Store the final result, or the partial result of the work item.
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
        w = tl.arange(0, 2 * BLOCK_W)
    if scales.v is not None:
        acc *= tl.load(scales.v + (head + own) * SHAPE.v_scales, mask=real, other=1.0)[:, None]
    stored = real[:, None] & ((w // V_HEAD_DIM)[None, :] == own[:, None])
    w = w % V_HEAD_DIM
    if SPLIT and work_items > 1:
        at_row = (work_item.to(tl.int64) * SHAPE.heads + head + own) * ROWS + row
        tl.store(partial_lse + at_row, log2_sum_exp(state), mask=real)
        acc *= reciprocal_of(state.row_sum)[:, None]
        tl.store(partial + at_row[:, None] * V_HEAD_DIM + w[None, :], acc, mask=stored)
        return
    if sinks is not None:
        decay, state = join_sink(state, tl.load(sinks + q_head, mask=real, other=0.0))
        acc *= decay[:, None]
    acc *= reciprocal_of(state.row_sum)[:, None]
    out_at = row_of(out_rows, token[:, None], q_head[:, None]) + w[None, :] * out_rows.dim_stride
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=stored)
    if lse is not None:
        tl.store(lse + token * (SHAPE.heads * GROUP) + q_head, log_sum_exp(state), mask=real)
