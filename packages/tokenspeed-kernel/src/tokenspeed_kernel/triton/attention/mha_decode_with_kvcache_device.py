"""Device code of `mha_decode_with_kvcache`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention import _online_softmax_device as softmax
from tokenspeed_kernel.triton.attention._fp8_device import widened
from tokenspeed_kernel.triton.attention._fp8_pairs_device import even_and_odd
from tokenspeed_kernel.triton.attention._split_kv_device import (
    blocks_a_unit,
    blocks_of,
    find_unit,
    first_block,
    served_length,
    units_of,
)


@triton.jit(do_not_specialize=["page_table_stride_b", "batch", "capacity", "window_left", "least", "wave", "waves_units", "long"])
def decode_kernel(
    q,  # [batch * Q_LEN, HEADS * GROUP, HEAD_DIM]
    k_cache,  # [pages, PAGE_SIZE, HEADS, HEAD_DIM]
    v_cache,  # [pages, PAGE_SIZE, HEADS, V_HEAD_DIM]
    page_table,  # [batch, max_pages]
    cache_seqlens,
    cu_seqlens_q,  # None where every sequence has Q_LEN new tokens; else sequences with none, or more, are passed over
    sinks,
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
    waves_units,
    long,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    DTYPE: tl.constexpr,
    RESCALED: tl.constexpr,
    Q_FP8: tl.constexpr,
    FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    PACKED: tl.constexpr,
    ALIKE: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One unit: a tile of the query rows of a key head (or of several), and a share of the keys of their sequence.

    Where heads have few rows, PACKED of them are one head of keys as wide as all: a query is 0 in the columns of other heads, and
    of its values' sum only the columns of its own head are kept. The tile would have been as large, and memory is read in longer
    pieces. (So an infinite key of one head also spoils those that share its program.)
    """
    ROWS: tl.constexpr = GROUP * Q_LEN
    EACH: tl.constexpr = 2 if PAIRS else 1  # numbers in an element of the cache as it is read
    COLUMNS: tl.constexpr = PACKED * HEAD_DIM // EACH
    V_COLUMNS: tl.constexpr = PACKED * V_HEAD_DIM // EACH
    PROGRAMS: tl.constexpr = HEADS // PACKED
    TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Programs of all heads of the same keys lie side by side: their keys are neighbours in memory.
    unit = tl.program_id(0) // (PROGRAMS * TILES)
    head = tl.program_id(0) // TILES % PROGRAMS * PACKED
    tile = tl.program_id(0) % TILES
    sequence = unit
    first_unit = unit
    if SPLIT:
        share = blocks_a_unit(
            cache_seqlens, cu_seqlens_q, batch, capacity, Q_LEN, window_left, least, wave, waves_units, long, WINDOWED, BLOCK_N,
            AT_ONCE,
        )  # fmt: skip
        sequence, first_unit = find_unit(
            unit, share, cache_seqlens, cu_seqlens_q, batch, capacity, Q_LEN, window_left, WINDOWED, BLOCK_N, AT_ONCE
        )
        if sequence >= batch:
            return
    first_token = sequence.to(tl.int64) * Q_LEN
    q_len = Q_LEN
    if cu_seqlens_q is not None:
        first_token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        q_len = (tl.load(cu_seqlens_q + sequence + 1) - first_token).to(tl.int32)
        if q_len > Q_LEN:
            return
    length = served_length(cache_seqlens, cu_seqlens_q, sequence, capacity, Q_LEN)
    first = first_block(length, Q_LEN, window_left, WINDOWED, BLOCK_N)
    blocks = blocks_of(length, Q_LEN, window_left, WINDOWED, BLOCK_N)
    units = 1
    begin, end = first, first + blocks
    if SPLIT:  # shares of a sequence differ by one block at most
        units = units_of(blocks, share)
        each, more, at = blocks // units, blocks % units, unit - first_unit
        begin = first + at * each + tl.minimum(at, more)
        end = begin + each + (at < more).to(tl.int32)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < PACKED * ROWS
    own = row // ROWS  # which of the heads
    row = row % ROWS
    if cu_seqlens_q is not None:
        real &= row < q_len * GROUP
    token = first_token + row // GROUP
    q_head = (head + own) * GROUP + row % GROUP
    position = length - q_len + row // GROUP
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    if PACKED > 1:
        asked = real[:, None] & ((d * EACH // HEAD_DIM)[None, :] == own[:, None])
    else:
        asked = real[:, None] & (d < COLUMNS)[None, :]
    q_at = q + token[:, None] * q_stride_t + q_head[:, None] * q_stride_h + (d * EACH % HEAD_DIM)[None, :] * q_stride_d
    queries = tl.load(q_at, mask=asked, other=0.0)
    queries_odd = queries
    if PAIRS:
        queries_odd = tl.load(q_at + q_stride_d, mask=asked, other=0.0)
    if RESCALED:  # to float16's range, by a power of 2 that the scores are given back
        top = tl.maximum(tl.max(tl.abs(queries.to(tl.float32))), tl.max(tl.abs(queries_odd.to(tl.float32))))
        exponent = ((top.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127 - 14
        exponent = tl.minimum(tl.maximum(exponent, -100), 112)
        down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        queries = (queries.to(tl.float32) * down).to(DTYPE)
        queries_odd = (queries_odd.to(tl.float32) * down).to(DTYPE)
        multiplier *= ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    else:
        queries = widened(queries, DTYPE, Q_FP8)
        queries_odd = widened(queries_odd, DTYPE, Q_FP8)
    EACH_SCALED: tl.constexpr = PACKED > 1 and (Q_SCALES > 0 or K_SCALES > 0)
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if q_scale is not None:
        if EACH_SCALED:
            row_scale *= tl.load(q_scale + (head + own) * Q_SCALES, mask=real, other=1.0)
        else:
            multiplier *= tl.load(q_scale + head * Q_SCALES)
    if k_scale is not None:
        if EACH_SCALED:
            row_scale *= tl.load(k_scale + (head + own) * K_SCALES, mask=real, other=1.0)
        else:
            multiplier *= tl.load(k_scale + head * K_SCALES)

    pages = page_table + sequence.to(tl.int64) * page_table_stride_b
    k_head = k_cache + head.to(tl.int64) * k_stride_h
    v_head = v_cache + head.to(tl.int64) * v_stride_h
    low = first * 0
    if WINDOWED:
        low = tl.maximum(length - Q_LEN - window_left, 0)
    n = tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    acc_odd = acc
    for block in tl.range(begin, end, num_stages=STAGES):
        # Keys that no query sees are not read, as they may be NaN: the nearest one that some query sees stands in.
        key = block * BLOCK_N + n
        held = tl.maximum(tl.minimum(key, length - 1), low)
        slot = held % PAGE_SIZE
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(pages + block // (PAGE_SIZE // BLOCK_N) * page_table_stride_p)
        else:
            page = tl.load(pages + held // PAGE_SIZE * page_table_stride_p)
        if FAR:
            page = page.to(tl.int64)
        k_row = page * k_stride_p + slot * k_stride_t
        if ALIKE:
            v_row = k_row
        else:
            v_row = page * v_stride_p + slot * v_stride_t
        k_at = k_head + (k_row[:, None] + (d * k_stride_d)[None, :])
        v_at = v_head + (v_row[:, None] + (w * v_stride_d)[None, :])
        if BLOCK_D == COLUMNS:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(d < COLUMNS)[None, :], other=0)
        if BLOCK_W == V_COLUMNS:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(w < V_COLUMNS)[None, :], other=0)
        if PAIRS:
            k_even, k_odd = even_and_odd(tl.trans(k), DTYPE, FP8)
            products = tl.dot(queries, k_even, input_precision="ieee")
            products = tl.dot(queries_odd, k_odd, products, input_precision="ieee")
        else:
            products = tl.dot(queries, widened(tl.trans(k), DTYPE, FP8), input_precision="ieee")
        if EACH_SCALED:
            products *= row_scale[:, None]
        if Q_LEN == 1:
            visible = key < length
            if WINDOWED:
                visible &= key >= low
            visible = visible[None, :]
        else:
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible &= key[None, :] >= position[:, None] - window_left
        weights, decay, largest, total = softmax.step(largest, total, products, multiplier, cap_log2, visible, HAS_CAP, True)
        weights = weights.to(DTYPE)
        if PAIRS:
            v_even, v_odd = even_and_odd(v, DTYPE, FP8)
            acc = tl.dot(weights, v_even, acc * decay[:, None], input_precision="ieee")
            acc_odd = tl.dot(weights, v_odd, acc_odd * decay[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights, widened(v, DTYPE, FP8), acc * decay[:, None], input_precision="ieee")

    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
        w = tl.arange(0, 2 * BLOCK_W)
    if v_scale is not None:
        acc *= tl.load(v_scale + (head + own) * V_SCALES, mask=real, other=1.0)[:, None]
    held_w = real[:, None] & ((w // V_HEAD_DIM)[None, :] == own[:, None])
    w = w % V_HEAD_DIM
    if SPLIT and units > 1:
        at_row = (unit.to(tl.int64) * HEADS + head + own) * ROWS + row
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        tl.store(partial_lse + at_row, shift + tl.log2(total), mask=real)
        acc *= softmax.reciprocal_of(total)[:, None]
        tl.store(partial + at_row[:, None] * V_HEAD_DIM + w[None, :], acc, mask=held_w)
        return
    if sinks is not None:
        sink = tl.load(sinks + q_head, mask=real, other=0.0)
        decay, largest, total = softmax.join_sink(largest, total, sink)
        acc *= decay[:, None]
    acc *= softmax.reciprocal_of(total)[:, None]
    out_at = out + token[:, None] * out_stride_t + q_head[:, None] * out_stride_h + w[None, :] * out_stride_d
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=held_w)
    if lse is not None:
        tl.store(lse + token * (HEADS * GROUP) + q_head, softmax.log_sum_exp(largest, total), mask=real)
