"""Device code of `_mha_band`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention import _online_softmax_device as softmax
from tokenspeed_kernel.triton.attention._mha_call_device import columns_of, sequence_of


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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: not paged
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    Q_FP8: tl.constexpr,
    KV_FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One tile of one key head."""
    head = tl.program_id(0) % KV_HEADS
    slot = tl.program_id(0) // KV_HEADS
    sequence = sequence_of(slot, cu_seqlens, batch, GROUP, BLOCK_M, AT_ONCE)
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
    q_first = q + (start + first_position).to(tl.int64) * q_stride_t + head * GROUP * q_stride_h
    q_rows = q_first + (held_row // GROUP - first_position) * q_stride_t + held_row % GROUP * q_stride_h

    # Keys, by their positions after the oldest row's. Those that no row sees are not read, they may be NaN: the nearest one that
    # some row sees stands in.
    main = tl.arange(0, MAIN) - (MAIN - 1)
    tail = tl.arange(0, TAIL) + 1
    main_held = tl.maximum(main, -tl.minimum(oldest, window_left))
    tail_held = tl.minimum(tail, kv_len - 1 - oldest)
    k_head = k + head.to(tl.int64) * k_stride_h
    v_head = v + head.to(tl.int64) * v_stride_h
    if PAGE_SIZE:
        pages = page_table + sequence.to(tl.int64) * page_table_stride_b
        main_page = tl.load(pages + (oldest + main_held) // PAGE_SIZE * page_table_stride_p).to(tl.int64)
        tail_page = tl.load(pages + (oldest + tail_held) // PAGE_SIZE * page_table_stride_p).to(tl.int64)
        main_slot = (oldest + main_held) % PAGE_SIZE
        tail_slot = (oldest + tail_held) % PAGE_SIZE
        k_main = k_head + main_page * k_stride_p + main_slot * k_stride_t
        v_main = v_head + main_page * v_stride_p + main_slot * v_stride_t
        k_tail = k_head + tail_page * k_stride_p + tail_slot * k_stride_t
        v_tail = v_head + tail_page * v_stride_p + tail_slot * v_stride_t
    else:
        k_head += (start + oldest).to(tl.int64) * k_stride_t
        v_head += (start + oldest).to(tl.int64) * v_stride_t
        k_main = k_head + main_held * k_stride_t
        v_main = v_head + main_held * v_stride_t
        k_tail = k_head + tail_held * k_stride_t
        v_tail = v_head + tail_held * v_stride_t
    queries = columns_of(q_rows, d, q_stride_d, D_WIDTH, DTYPE, Q_FP8)
    keys = columns_of(k_main, d, k_stride_d, D_WIDTH, DTYPE, KV_FP8)
    later_keys = columns_of(k_tail, d, k_stride_d, D_WIDTH, DTYPE, KV_FP8)
    values = columns_of(v_main, w, v_stride_d, W_WIDTH, DTYPE, KV_FP8)
    later_values = columns_of(v_tail, w, v_stride_d, W_WIDTH, DTYPE, KV_FP8)

    if q_scale is not None:
        multiplier *= tl.load(q_scale + head * Q_SCALES)
    if k_scale is not None:
        multiplier *= tl.load(k_scale + head * K_SCALES)
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    later_products = tl.dot(queries, tl.trans(later_keys), input_precision="ieee")
    scores, factor = softmax.scored(products, multiplier, cap_log2, HAS_CAP)
    later_scores, _ = softmax.scored(later_products, multiplier, cap_log2, HAS_CAP)
    later_by = row // GROUP - first_position  # of positions, than the oldest row
    earliest = tl.maximum(later_by - window_left, -oldest)
    scores = tl.where(main[None, :] >= earliest[:, None], scores, -float("inf"))
    later_scores = tl.where(tail[None, :] <= later_by[:, None], later_scores, -float("inf"))
    largest = tl.maximum(tl.max(scores, 1), tl.max(later_scores, 1)) * factor
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + row % GROUP).to(tl.float32) * softmax.LOG2_E
        largest = tl.maximum(largest, sink)
    weights = tl.exp2(scores * factor - largest[:, None])
    later_weights = tl.exp2(later_scores * factor - largest[:, None])
    total = tl.sum(weights, 1) + tl.sum(later_weights, 1)  # a row sees itself at least
    if sinks is not None:
        total += tl.exp2(sink - largest)
    acc = tl.dot(weights.to(DTYPE), values, input_precision="ieee")
    acc = tl.dot(later_weights.to(DTYPE), later_values, acc, input_precision="ieee")
    out_factor = 1.0 / total
    if v_scale is not None:
        out_factor *= tl.load(v_scale + head * V_SCALES)

    out_first = out + (start + first_position).to(tl.int64) * out_stride_t + head * GROUP * out_stride_h
    out_rows = out_first + later_by * out_stride_t + row % GROUP * out_stride_h
    held = real[:, None] if W_WIDTH is None else real[:, None] & (w < V_HEAD_DIM)[None, :]
    x = (acc * out_factor[:, None]).to(out.dtype.element_ty)
    tl.store(out_rows[:, None] + w[None, :] * out_stride_d, x, mask=held)
    if lse is not None:
        at = (start + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
        tl.store(lse + at, softmax.log_sum_exp(largest, total), mask=real)
