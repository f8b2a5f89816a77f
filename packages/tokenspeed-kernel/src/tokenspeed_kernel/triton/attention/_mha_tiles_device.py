"""Device code of `_mha_tiles`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention import _online_softmax_device as softmax
from tokenspeed_kernel.triton.attention._fp8_device import widened
from tokenspeed_kernel.triton.attention._mha_call_device import columns_of, sequence_of


@triton.jit
def _walk(
    state,  # (largest, total, acc)
    begin,
    end,
    tile,  # what all walks of a program share: the tuples that are taken apart below
    k_rows,
    k_rows_high,
    v_rows,
    KIND: tl.constexpr,
    SIZES: tl.constexpr,
    MASKED: tl.constexpr,  # "never"; "always"; or "edges": blocks before full_begin and from full_end on
    STAGES: tl.constexpr,
):
    """Attention to blocks begin to end, of which block i begins with key ``low_block + i * BLOCK_N``."""
    queries, position, source, strides, reach, scaling = tile
    q_low, q_high = queries
    k_head, v_head, pages, start, head = source
    k_stride_p, k_stride_t, k_stride_d, v_stride_p, v_stride_t, v_stride_d, page_table_stride_p = strides
    low_block, low, kv_len, full_begin, full_end, window_left = reach
    multiplier, cap_log2 = scaling
    PAGE_SIZE: tl.constexpr = KIND[0]
    CAUSAL: tl.constexpr = KIND[1]
    WINDOWED: tl.constexpr = KIND[2]
    HAS_CAP: tl.constexpr = KIND[3]
    DTYPE: tl.constexpr = KIND[4]
    KV_FP8: tl.constexpr = KIND[5]
    BLOCK_N: tl.constexpr = SIZES[0]
    HEAD_DIM: tl.constexpr = SIZES[1]
    D_LOW: tl.constexpr = SIZES[2]
    D_HIGH: tl.constexpr = SIZES[3]
    V_HEAD_DIM: tl.constexpr = SIZES[4]
    BLOCK_W: tl.constexpr = SIZES[5]
    largest, total, acc = state
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
        # Where the block is. Keys that no row sees are not read, they may be NaN: the nearest one that some row sees stands in.
        if MASKED == "never":
            held = n
        else:
            held = tl.maximum(tl.minimum(first + n, kv_len - 1), low) - first
        if SCATTERED:
            page = tl.load(pages + (first + held) // PAGE_SIZE * page_table_stride_p).to(tl.int64)
            slot = (first + held) % PAGE_SIZE
            k_at = k_head + page * k_stride_p + slot * k_stride_t
            v_at = v_head + page * v_stride_p + slot * v_stride_t
        elif PAGE_SIZE:
            page = tl.load(pages + first // PAGE_SIZE * page_table_stride_p).to(tl.int64)
            first_slot = page.to(tl.int32) * PAGE_SIZE + first % PAGE_SIZE
            k_at = k_head + page * k_stride_p + first % PAGE_SIZE * k_stride_t + held * k_stride_t
            v_at = v_head + page * v_stride_p + first % PAGE_SIZE * v_stride_t + held * v_stride_t
        else:
            first_slot = start + first
            k_at = k_head + first.to(tl.int64) * k_stride_t + held * k_stride_t
            v_at = v_head + first.to(tl.int64) * v_stride_t + held * v_stride_t

        if DESCRIBED:
            k = widened(k_rows.load([first_slot, head * HEAD_DIM]), DTYPE, KV_FP8)
        else:
            k = columns_of(k_at, d, k_stride_d, D_LOW_WIDTH, DTYPE, KV_FP8)
        products = tl.dot(q_low, tl.trans(k), input_precision="ieee")
        if D_HIGH:
            if DESCRIBED:
                k = widened(k_rows_high.load([first_slot, head * HEAD_DIM + D_LOW]), DTYPE, KV_FP8)
            else:
                k = columns_of(k_at, d_high, k_stride_d, D_WIDTH, DTYPE, KV_FP8)
            products = tl.dot(q_high, tl.trans(k), products, input_precision="ieee")

        scores, factor = softmax.scored(products, multiplier, cap_log2, HAS_CAP)
        if MASKED != "never":  # noqa: SIM102 (this is known at compile time)
            if MASKED == "always" or (block < full_begin) | (block >= full_end):
                visible = (first + n < kv_len)[None, :]
                if CAUSAL:
                    visible &= first + n[None, :] <= position[:, None]
                if WINDOWED:
                    visible &= first + n[None, :] >= position[:, None] - window_left
                scores = tl.where(visible, scores, -float("inf"))
        weights, decay, largest, total = softmax.step_scored(largest, total, scores, factor)

        weights = weights.to(DTYPE)
        if DESCRIBED:
            v = widened(v_rows.load([first_slot, head * V_HEAD_DIM]), DTYPE, KV_FP8)
            if MASKED != "never":
                v = tl.where(((first + n >= low) & (first + n < kv_len))[:, None], v, 0.0)
        else:
            v = columns_of(v_at, w, v_stride_d, W_WIDTH, DTYPE, KV_FP8)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
    return largest, total, acc


@triton.jit
def tiles_kernel(
    q,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    k,  # [tokens, KV_HEADS, HEAD_DIM], or [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM] where there are pages
    v,
    out,
    lse,  # float32 [tokens, KV_HEADS * GROUP] or None
    cu_seqlens,  # of the queries
    cache_seqlens,  # where PAGED
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
    k_rows_high,  # the D_HIGH columns after those
    v_rows,
    slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: not paged
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    Q_FP8: tl.constexpr,
    KV_FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D_LOW: tl.constexpr,  # a head is D_LOW columns and D_HIGH more, powers of two; D_HIGH may be 0
    D_HIGH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    EDGES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    EDGES_FIRST: tl.constexpr,
    SHORTEST: tl.constexpr,  # sequences of fewer queries are passed over
):
    """One tile of queries of one key head."""
    # The last tiles see the most keys, and go first.
    if HEADS_FIRST:
        head = tl.program_id(0) % KV_HEADS
        slot = slots - 1 - tl.program_id(0) // KV_HEADS
    else:
        head = tl.program_id(0) // slots
        slot = slots - 1 - tl.program_id(0) % slots
    sequence = sequence_of(slot, cu_seqlens, batch, GROUP, BLOCK_M, AT_ONCE)
    start = tl.load(cu_seqlens + sequence)
    q_len = tl.load(cu_seqlens + sequence + 1) - start
    first_row = (slot - sequence - start * GROUP // BLOCK_M) * BLOCK_M
    if first_row >= q_len * GROUP:
        return
    if SHORTEST > 1:  # noqa: SIM102 (this is known at compile time)
        if q_len < SHORTEST:
            return
    if PAGE_SIZE:
        kv_len = tl.minimum(tl.load(cache_seqlens + sequence), capacity)
    else:
        kv_len = q_len
    ahead = kv_len - q_len  # the position of the first query

    # Queries.
    row = first_row + tl.arange(0, BLOCK_M)
    real = row < q_len * GROUP
    token = (start + row // GROUP).to(tl.int64)
    q_head = head * GROUP + row % GROUP
    position = ahead + row // GROUP
    q_rows = q + token[:, None] * q_stride_t + q_head[:, None] * q_stride_h
    d = tl.arange(0, D_LOW)
    q_low = tl.load(q_rows + d[None, :] * q_stride_d, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    q_low = widened(q_low, DTYPE, Q_FP8)
    if D_HIGH:
        d_high = D_LOW + tl.arange(0, D_HIGH)
        q_high = tl.load(q_rows + d_high[None, :] * q_stride_d, mask=real[:, None] & (d_high < HEAD_DIM)[None, :], other=0.0)
        queries = (q_low, widened(q_high, DTYPE, Q_FP8))
    else:
        queries = (q_low, q_low)  # no second part
    if q_scale is not None:
        multiplier *= tl.load(q_scale + head * Q_SCALES)
    if k_scale is not None:
        multiplier *= tl.load(k_scale + head * K_SCALES)

    # Keys that some row sees are low to high; those that every row sees are full_low to full_high.
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

    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)

    k_head = k + head.to(tl.int64) * k_stride_h
    v_head = v + head.to(tl.int64) * v_stride_h
    pages = cu_seqlens  # none
    if PAGE_SIZE:
        pages = page_table + sequence.to(tl.int64) * page_table_stride_b
    else:
        k_head += start.to(tl.int64) * k_stride_t
        v_head += start.to(tl.int64) * v_stride_t
    source = (k_head, v_head, pages, start, head)
    strides = (k_stride_p, k_stride_t, k_stride_d, v_stride_p, v_stride_t, v_stride_d, page_table_stride_p)
    reach = (low_block, low, kv_len, full_begin, full_end, window_left)
    tile = (queries, position, source, strides, reach, (multiplier, cap_log2))
    KIND: tl.constexpr = (PAGE_SIZE, CAUSAL, WINDOWED, HAS_CAP, DTYPE, KV_FP8)
    SIZES: tl.constexpr = (BLOCK_N, HEAD_DIM, D_LOW, D_HIGH, V_HEAD_DIM, BLOCK_W)
    state = (largest, total, acc)
    if EDGES == "apart":  # any order will do
        if WINDOWED:
            state = _walk(state, 0, full_begin, tile, k_rows, k_rows_high, v_rows, KIND, SIZES, "always", EDGE_STAGES)
        if EDGES_FIRST:
            state = _walk(state, full_end, blocks, tile, k_rows, k_rows_high, v_rows, KIND, SIZES, "always", EDGE_STAGES)
        state = _walk(state, full_begin, full_end, tile, k_rows, k_rows_high, v_rows, KIND, SIZES, "never", STAGES)
        if not EDGES_FIRST:
            state = _walk(state, full_end, blocks, tile, k_rows, k_rows_high, v_rows, KIND, SIZES, "always", EDGE_STAGES)
    else:
        state = _walk(state, 0, blocks, tile, k_rows, k_rows_high, v_rows, KIND, SIZES, "edges", STAGES)
    largest, total, acc = state

    if sinks is not None:
        sink = tl.load(sinks + q_head, mask=real, other=0.0)
        decay, largest, total = softmax.join_sink(largest, total, sink)
        factor = decay * softmax.reciprocal_of(total)
    else:
        factor = softmax.reciprocal_of(total)
    if v_scale is not None:
        factor *= tl.load(v_scale + head * V_SCALES)
    w = tl.arange(0, BLOCK_W)
    out_rows = out + token[:, None] * out_stride_t + q_head[:, None] * out_stride_h
    tl.store(
        out_rows + w[None, :] * out_stride_d,
        (acc * factor[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (w < V_HEAD_DIM)[None, :],
    )
    if lse is not None:
        tl.store(lse + token * (KV_HEADS * GROUP) + q_head, softmax.log_sum_exp(largest, total), mask=real)
