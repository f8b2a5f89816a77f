"""Device code of `_mha_band`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._mha_call_device import columns_of
from tokenspeed_kernel.triton.attention._online_softmax_device import LOG2_E, Scaling, Softmax, log_sum_exp, scale_scores
from tokenspeed_kernel.triton.common_device import sequence_of
from tokenspeed_kernel.triton.views_device import Cache, Pages, Rows, Scales, head_of, pages_of


@triton.jit
def band_kernel(
    q,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    k,  # [tokens, KV_HEADS, HEAD_DIM], or [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM] where there are pages
    v,
    out,
    lse,  # float32 [tokens, KV_HEADS * GROUP] or None
    cu_seqlens,  # of the queries
    cache_seqlens,
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
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of query rows of one KV head."""
    KV_HEADS: tl.constexpr = SHAPE.heads
    GROUP: tl.constexpr = SHAPE.group
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    V_HEAD_DIM: tl.constexpr = SHAPE.v_head_dim
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    DTYPE: tl.constexpr = FORMATS.dtype
    Q_FP8: tl.constexpr = FORMATS.q_fp8
    KV_FP8: tl.constexpr = FORMATS.kv_fp8
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = TILE.block_d
    BLOCK_W: tl.constexpr = TILE.block_w
    q_rows = Rows(q, q_stride_t, q_stride_h, q_stride_d)
    out_rows = Rows(out, out_stride_t, out_stride_h, out_stride_d)
    keys = Cache(k, k_stride_p, k_stride_t, k_stride_h, k_stride_d)
    values = Cache(v, v_stride_p, v_stride_t, v_stride_h, v_stride_d)
    table = Pages(page_table, page_table_stride_b, page_table_stride_p)
    scales = Scales(q_scale, k_scale, v_scale)
    head = tl.program_id(0) % KV_HEADS
    slot = tl.program_id(0) // KV_HEADS
    sequence = sequence_of(slot, cu_seqlens, batch, GROUP, BLOCK_M, TILE.at_once)
    start = tl.load(cu_seqlens + sequence)
    q_len = tl.load(cu_seqlens + sequence + 1) - start
    first_row = (slot - sequence - start * GROUP // BLOCK_M) * BLOCK_M
    rows = q_len * GROUP
    if first_row >= rows:
        return
    if PAGE_SIZE:
        kv_len = tl.minimum(tl.load(cache_seqlens + sequence), capacity)
    else:
        kv_len = q_len
    first_position = first_row // GROUP
    oldest = kv_len - q_len + first_position

    # Queries.
    row = first_row + tl.arange(0, BLOCK_M)
    real = row < rows
    held_row = tl.minimum(row, rows - 1)
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    D_WIDTH: tl.constexpr = None if BLOCK_D == HEAD_DIM else HEAD_DIM
    W_WIDTH: tl.constexpr = None if BLOCK_W == V_HEAD_DIM else V_HEAD_DIM
    # Offsets from the tile's first position fit into 32 bits.
    q_first = q + (start + first_position).to(tl.int64) * q_rows.token_stride + head * GROUP * q_rows.head_stride
    q_at = q_first + (held_row // GROUP - first_position) * q_rows.token_stride + held_row % GROUP * q_rows.head_stride

    # Key positions relative to the oldest row. A key that no row sees may be NaN and is not read: the nearest visible key is read
    # instead.
    main = tl.arange(0, TILE.main) - (TILE.main - 1)
    tail = tl.arange(0, TILE.tail) + 1
    main_held = tl.maximum(main, -tl.minimum(oldest, window_left))
    tail_held = tl.minimum(tail, kv_len - 1 - oldest)
    k_head = head_of(keys, head)
    v_head = head_of(values, head)
    if PAGE_SIZE:
        pages = pages_of(table, sequence)
        main_page = tl.load(pages + (oldest + main_held) // PAGE_SIZE * table.page_stride).to(tl.int64)
        tail_page = tl.load(pages + (oldest + tail_held) // PAGE_SIZE * table.page_stride).to(tl.int64)
        main_slot = (oldest + main_held) % PAGE_SIZE
        tail_slot = (oldest + tail_held) % PAGE_SIZE
        k_main = k_head + main_page * keys.page_stride + main_slot * keys.slot_stride
        v_main = v_head + main_page * values.page_stride + main_slot * values.slot_stride
        k_tail = k_head + tail_page * keys.page_stride + tail_slot * keys.slot_stride
        v_tail = v_head + tail_page * values.page_stride + tail_slot * values.slot_stride
    else:
        k_head += (start + oldest).to(tl.int64) * keys.slot_stride
        v_head += (start + oldest).to(tl.int64) * values.slot_stride
        k_main = k_head + main_held * keys.slot_stride
        v_main = v_head + main_held * values.slot_stride
        k_tail = k_head + tail_held * keys.slot_stride
        v_tail = v_head + tail_held * values.slot_stride
    queries = columns_of(q_at, d, q_rows.dim_stride, D_WIDTH, DTYPE, Q_FP8)
    main_keys = columns_of(k_main, d, keys.dim_stride, D_WIDTH, DTYPE, KV_FP8)
    tail_keys = columns_of(k_tail, d, keys.dim_stride, D_WIDTH, DTYPE, KV_FP8)
    main_values = columns_of(v_main, w, values.dim_stride, W_WIDTH, DTYPE, KV_FP8)
    tail_values = columns_of(v_tail, w, values.dim_stride, W_WIDTH, DTYPE, KV_FP8)

    # Softmax in one step.
    if scales.q is not None:
        multiplier *= tl.load(scales.q + head * SHAPE.q_scales)
    if scales.k is not None:
        multiplier *= tl.load(scales.k + head * SHAPE.k_scales)
    scaling = Scaling(multiplier, cap_log2)
    main_dots = tl.dot(queries, tl.trans(main_keys), input_precision="ieee")
    tail_dots = tl.dot(queries, tl.trans(tail_keys), input_precision="ieee")
    main_scores, factor = scale_scores(main_dots, scaling, SHAPE.has_cap)
    tail_scores, _ = scale_scores(tail_dots, scaling, SHAPE.has_cap)
    later_by = row // GROUP - first_position  # positions after the oldest row
    earliest = tl.maximum(later_by - window_left, -oldest)
    main_scores = tl.where(main[None, :] >= earliest[:, None], main_scores, -float("inf"))
    tail_scores = tl.where(tail[None, :] <= later_by[:, None], tail_scores, -float("inf"))
    row_max = tl.maximum(tl.max(main_scores, 1), tl.max(tail_scores, 1)) * factor
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + row % GROUP).to(tl.float32) * LOG2_E
        row_max = tl.maximum(row_max, sink)
    main_weights = tl.exp2(main_scores * factor - row_max[:, None])
    tail_weights = tl.exp2(tail_scores * factor - row_max[:, None])
    row_sum = tl.sum(main_weights, 1) + tl.sum(tail_weights, 1)  # not 0, because every row sees its own position
    if sinks is not None:
        row_sum += tl.exp2(sink - row_max)
    acc = tl.dot(main_weights.to(DTYPE), main_values, input_precision="ieee")
    acc = tl.dot(tail_weights.to(DTYPE), tail_values, acc, input_precision="ieee")
    out_factor = 1.0 / row_sum
    if scales.v is not None:
        out_factor *= tl.load(scales.v + head * SHAPE.v_scales)

    out_first = out + (start + first_position).to(tl.int64) * out_rows.token_stride + head * GROUP * out_rows.head_stride
    out_at = out_first + later_by * out_rows.token_stride + row % GROUP * out_rows.head_stride
    stored = real[:, None] if W_WIDTH is None else real[:, None] & (w < V_HEAD_DIM)[None, :]
    x = (acc * out_factor[:, None]).to(out.dtype.element_ty)
    tl.store(out_at[:, None] + w[None, :] * out_rows.dim_stride, x, mask=stored)
    if lse is not None:
        at = (start + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        tl.store(lse + at, log_sum_exp(Softmax(row_max, row_sum)), mask=real)
