"""Device code of `_mha_tiles`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._fp8_device import widened
from tokenspeed_kernel.triton.attention._mha_call_device import columns_of
from tokenspeed_kernel.triton.attention._online_softmax_device import (
    Scaling,
    join_sink,
    log_sum_exp,
    no_keys_yet,
    reciprocal_of,
    scale_scores,
    softmax_step,
)
from tokenspeed_kernel.triton.common_device import sequence_of
from tokenspeed_kernel.triton.views_device import Cache, Pages, Rows, Scales, head_of, pages_of, row_of


class Queries(NamedTuple):
    """A tile's queries, their columns in two parts (``high`` is not read if there is one part), and their positions."""

    low: Any
    high: Any
    position: Any


class Source(NamedTuple):
    """Location of a tile's keys and values.

    Fields:
        keys, values: `Cache`; ``first`` points to the head's first row of the sequence, or of all pages.
        table, pages: `Pages`, and a pointer to the sequence's first page number.
        start, head: the sequence's first key, and the head; for descriptors.
    """

    keys: Any
    values: Any
    table: Any
    pages: Any
    start: Any
    head: Any


class Reach(NamedTuple):
    """Which keys a tile sees.

    Fields:
        low_block: the first key of block 0.
        low, kv_len: the first key that some row sees, and the length of the sequence.
        full_begin, full_end: the range of blocks that need no mask.
        window_left: keys before its own position that a row sees, if there is a window.
    """

    low_block: Any
    low: Any
    kv_len: Any
    full_begin: Any
    full_end: Any
    window_left: Any


@triton.jit
def _walk(
    state,
    acc,
    begin,
    end,
    queries,
    source,
    k_rows,  # descriptor of keys [tokens or slots, heads * columns], for the first D_LOW columns of a head; or None
    k_rows_high,  # for the next D_HIGH columns
    v_rows,  # descriptor of values
    reach,
    scaling,
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    MASK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # "never"; "always"; or "edges": blocks before full_begin and from full_end on
    STAGES: tl.constexpr,
):
    """Attention over blocks ``begin`` to ``end``. Block i begins with key ``low_block + i * block_n``."""
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    V_HEAD_DIM: tl.constexpr = SHAPE.v_head_dim
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    DTYPE: tl.constexpr = FORMATS.dtype
    KV_FP8: tl.constexpr = FORMATS.kv_fp8
    BLOCK_N: tl.constexpr = TILE.block_n
    D_LOW: tl.constexpr = TILE.d_low
    D_HIGH: tl.constexpr = TILE.d_high
    BLOCK_W: tl.constexpr = TILE.block_w
    keys, values, table, pages, start, head = source
    low_block, low, kv_len, full_begin, full_end, window_left = reach
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_LOW)
    w = tl.arange(0, BLOCK_W)
    if D_HIGH:
        d_high = D_LOW + tl.arange(0, D_HIGH)
    D_LOW_WIDTH: tl.constexpr = None if D_LOW <= HEAD_DIM else HEAD_DIM
    D_WIDTH: tl.constexpr = None if D_LOW + D_HIGH == HEAD_DIM else HEAD_DIM
    W_WIDTH: tl.constexpr = None if BLOCK_W == V_HEAD_DIM else V_HEAD_DIM
    DESCRIBED: tl.constexpr = k_rows is not None
    SCATTERED: tl.constexpr = PAGE_SIZE != 0 and PAGE_SIZE % BLOCK_N != 0

    for block in tl.range(begin, end, num_stages=STAGES):
        first = low_block + block * BLOCK_N
        # A key that no row sees may be NaN and is not read: the nearest visible key is read instead.
        if MASKED == "never":
            held = n
        else:
            held = tl.maximum(tl.minimum(first + n, kv_len - 1), low) - first
        if SCATTERED:
            page = tl.load(pages + (first + held) // PAGE_SIZE * table.page_stride).to(tl.int64)
            slot = (first + held) % PAGE_SIZE
            k_at = keys.first + page * keys.page_stride + slot * keys.slot_stride
            v_at = values.first + page * values.page_stride + slot * values.slot_stride
        elif PAGE_SIZE:
            page = tl.load(pages + first // PAGE_SIZE * table.page_stride).to(tl.int64)
            first_slot = page.to(tl.int32) * PAGE_SIZE + first % PAGE_SIZE
            k_at = keys.first + page * keys.page_stride + first % PAGE_SIZE * keys.slot_stride + held * keys.slot_stride
            v_at = values.first + page * values.page_stride + first % PAGE_SIZE * values.slot_stride + held * values.slot_stride
        else:
            first_slot = start + first
            k_at = keys.first + first.to(tl.int64) * keys.slot_stride + held * keys.slot_stride
            v_at = values.first + first.to(tl.int64) * values.slot_stride + held * values.slot_stride

        if DESCRIBED:
            k = widened(k_rows.load([first_slot, head * HEAD_DIM]), DTYPE, KV_FP8)
        else:
            k = columns_of(k_at, d, keys.dim_stride, D_LOW_WIDTH, DTYPE, KV_FP8)
        dots = tl.dot(queries.low, tl.trans(k), input_precision="ieee")
        if D_HIGH:
            if DESCRIBED:
                k = widened(k_rows_high.load([first_slot, head * HEAD_DIM + D_LOW]), DTYPE, KV_FP8)
            else:
                k = columns_of(k_at, d_high, keys.dim_stride, D_WIDTH, DTYPE, KV_FP8)
            dots = tl.dot(queries.high, tl.trans(k), dots, input_precision="ieee")

        scores, factor = scale_scores(dots, scaling, SHAPE.has_cap)
        if MASKED != "never":  # noqa: SIM102 (this is known at compile time)
            if MASKED == "always" or (block < full_begin) | (block >= full_end):
                visible = (first + n < kv_len)[None, :]
                if MASK.causal:
                    visible &= first + n[None, :] <= queries.position[:, None]
                if MASK.windowed:
                    visible &= first + n[None, :] >= queries.position[:, None] - window_left
                scores = tl.where(visible, scores, -float("inf"))
        weights, decay, state = softmax_step(state, scores, factor)
        weights = weights.to(DTYPE)

        if DESCRIBED:
            v = widened(v_rows.load([first_slot, head * V_HEAD_DIM]), DTYPE, KV_FP8)
            if MASKED != "never":
                v = tl.where(((first + n >= low) & (first + n < kv_len))[:, None], v, 0.0)
        else:
            v = columns_of(v_at, w, values.dim_stride, W_WIDTH, DTYPE, KV_FP8)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return state, acc


@triton.jit
def tiles_kernel(
    q,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    k,  # [tokens, KV_HEADS, HEAD_DIM], or [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM] where there are pages
    v,
    out,
    lse,  # float32 [tokens, KV_HEADS * GROUP] or None
    cu_seqlens,  # of the queries
    kv_seqlens,  # paged: lengths; else cu_seqlens of the keys, or None where they equal those of the queries
    page_table,
    sinks,
    q_scale,
    k_scale,
    v_scale,
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
    out_stride_t,
    out_stride_h,
    out_stride_d,
    page_table_stride_b,
    page_table_stride_p,
    batch,
    capacity,
    window_left,
    multiplier,
    cap_log2,
    k_rows,  # descriptor of k as [tokens or pages * PAGE_SIZE, KV_HEADS * HEAD_DIM], of the first D_LOW columns of a head; or None
    k_rows_high,  # for the next D_HIGH columns
    v_rows,
    slots,
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    MASK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of query rows of one KV head."""
    KV_HEADS: tl.constexpr = SHAPE.heads
    GROUP: tl.constexpr = SHAPE.group
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    CAUSAL: tl.constexpr = MASK.causal
    WINDOWED: tl.constexpr = MASK.windowed
    DTYPE: tl.constexpr = FORMATS.dtype
    Q_FP8: tl.constexpr = FORMATS.q_fp8
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    D_LOW: tl.constexpr = TILE.d_low
    D_HIGH: tl.constexpr = TILE.d_high
    BLOCK_W: tl.constexpr = TILE.block_w
    q_rows = Rows(q, q_stride_t, q_stride_h, q_stride_d)
    out_rows = Rows(out, out_stride_t, out_stride_h, out_stride_d)
    keys = Cache(k, k_stride_p, k_stride_t, k_stride_h, k_stride_d)
    values = Cache(v, v_stride_p, v_stride_t, v_stride_h, v_stride_d)
    table = Pages(page_table, page_table_stride_b, page_table_stride_p)
    scales = Scales(q_scale, k_scale, v_scale)
    # Later tiles see more keys, and are scheduled first for load balancing.
    if TILE.heads_first:
        head = tl.program_id(0) % KV_HEADS
        slot = slots - 1 - tl.program_id(0) // KV_HEADS
    else:
        head = tl.program_id(0) // slots
        slot = slots - 1 - tl.program_id(0) % slots
    sequence = sequence_of(slot, cu_seqlens, batch, GROUP, BLOCK_M, TILE.at_once)
    start = tl.load(cu_seqlens + sequence)
    q_len = tl.load(cu_seqlens + sequence + 1) - start
    first_row = (slot - sequence - start * GROUP // BLOCK_M) * BLOCK_M
    if first_row >= q_len * GROUP:
        return
    if TILE.shortest > 1:  # noqa: SIM102 (this is known at compile time)
        if q_len < TILE.shortest:
            return
    kv_start = start
    if PAGE_SIZE:
        kv_len = tl.minimum(tl.load(kv_seqlens + sequence), capacity)
    elif kv_seqlens is not None:
        kv_start = tl.load(kv_seqlens + sequence)
        kv_len = tl.load(kv_seqlens + sequence + 1) - kv_start
    else:
        kv_len = q_len
    ahead = kv_len - q_len  # the position of the first query

    # Queries.
    row = first_row + tl.arange(0, BLOCK_M)
    real = row < q_len * GROUP
    token = (start + row // GROUP).to(tl.int64)
    q_head = head * GROUP + row % GROUP
    position = ahead + row // GROUP
    q_at = row_of(q_rows, token[:, None], q_head[:, None])
    d = tl.arange(0, D_LOW)
    q_low = tl.load(q_at + d[None, :] * q_rows.dim_stride, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    q_low = widened(q_low, DTYPE, Q_FP8)
    if D_HIGH:
        d_high = D_LOW + tl.arange(0, D_HIGH)
        q_high = tl.load(q_at + d_high[None, :] * q_rows.dim_stride, mask=real[:, None] & (d_high < HEAD_DIM)[None, :], other=0.0)
        queries = Queries(q_low, widened(q_high, DTYPE, Q_FP8), position)
    else:
        queries = Queries(q_low, q_low, position)
    if scales.q is not None:
        multiplier *= tl.load(scales.q + head * SHAPE.q_scales)
    if scales.k is not None:
        multiplier *= tl.load(scales.k + head * SHAPE.k_scales)
    scaling = Scaling(multiplier, cap_log2)

    # Some row sees keys low to high; every row sees keys full_low to full_high.
    oldest = ahead + first_row // GROUP
    newest = ahead + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    low = 0
    full_low = 0
    high = kv_len
    full_high = kv_len
    if CAUSAL:
        high = tl.minimum(kv_len, newest + 1)
        full_high = tl.minimum(kv_len, oldest + 1)
    if WINDOWED:
        low = tl.maximum(oldest - window_left, 0)
        full_low = tl.maximum(newest - window_left, 0)
        low_block = low // BLOCK_N * BLOCK_N if PAGE_SIZE else low
    else:
        low_block = 0
    blocks = tl.maximum(high - low_block + BLOCK_N - 1, 0) // BLOCK_N
    full_begin = tl.minimum((full_low - low_block + BLOCK_N - 1) // BLOCK_N, blocks)
    full_end = tl.maximum(tl.minimum(tl.maximum(full_high - low_block, 0) // BLOCK_N, blocks), full_begin)

    state = no_keys_yet(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    k_head = head_of(keys, head)
    v_head = head_of(values, head)
    pages = cu_seqlens  # placeholder: not read without pages
    if PAGE_SIZE:
        pages = pages_of(table, sequence)
    else:
        k_head += kv_start.to(tl.int64) * k_stride_t
        v_head += kv_start.to(tl.int64) * v_stride_t
    keys = Cache(k_head, k_stride_p, k_stride_t, k_stride_h, k_stride_d)
    values = Cache(v_head, v_stride_p, v_stride_t, v_stride_h, v_stride_d)
    source = Source(keys, values, table, pages, kv_start, head)
    reach = Reach(low_block, low, kv_len, full_begin, full_end, window_left)
    what = (queries, source, k_rows, k_rows_high, v_rows, reach, scaling)
    if TILE.edges == "apart":  # the softmax allows any order
        if WINDOWED:
            state, acc = _walk(state, acc, 0, full_begin, *what, SHAPE, FORMATS, MASK, TILE, "always", TILE.edge_stages)
        if TILE.edges_first:
            state, acc = _walk(state, acc, full_end, blocks, *what, SHAPE, FORMATS, MASK, TILE, "always", TILE.edge_stages)
        state, acc = _walk(state, acc, full_begin, full_end, *what, SHAPE, FORMATS, MASK, TILE, "never", TILE.stages)
        if not TILE.edges_first:
            state, acc = _walk(state, acc, full_end, blocks, *what, SHAPE, FORMATS, MASK, TILE, "always", TILE.edge_stages)
    else:
        state, acc = _walk(state, acc, 0, blocks, *what, SHAPE, FORMATS, MASK, TILE, "edges", TILE.stages)

    if sinks is not None:
        decay, state = join_sink(state, tl.load(sinks + q_head, mask=real, other=0.0))
        factor = decay * reciprocal_of(state.row_sum)
    else:
        factor = reciprocal_of(state.row_sum)
    if scales.v is not None:
        factor *= tl.load(scales.v + head * SHAPE.v_scales)
    w = tl.arange(0, BLOCK_W)
    tl.store(
        row_of(out_rows, token[:, None], q_head[:, None]) + w[None, :] * out_rows.dim_stride,
        (acc * factor[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (w < SHAPE.v_head_dim)[None, :],
    )
    if lse is not None:
        tl.store(lse + token * (KV_HEADS * GROUP) + q_head, log_sum_exp(state), mask=real)
