"""Causal attention in a narrow window: all keys that a tile of queries sees at once, so that the softmax takes one step.

Rows are packed as in `_mha_tiles`. A tile of few positions sees the window of its first position, MAIN keys that end with that position,
and the positions after it, at most TAIL. Only the first are masked at their window's start, only the last on the diagonal. A program
goes through TILES neighbouring tiles, and loads one's queries and keys while it computes the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.ops.attention.triton import _online_softmax as softmax
from tokenspeed_kernel.ops.attention.triton._fp8 import fp8_operand, widened
from tokenspeed_kernel.ops.attention.triton._mha_tiles import (
    Paging,
    product_dtype,
    rows_of_columns,
    scale_stride,
    sequence_of,
    sequences_at_once,
)


@dataclass(frozen=True)
class Band:
    """How programs walk along the diagonal.

    Attributes:
        block_m: rows of a tile, positions times query heads of a key head.
        tiles: of a program.
        num_warps, num_stages: of a program, and tiles on the way.
    """

    block_m: int
    tiles: int
    num_warps: int
    num_stages: int


def band_widths(block_m: int, group: int, window_left: int) -> tuple[int, int]:
    """``(MAIN, TAIL)`` of `attend_band`."""
    later = (block_m - 1) // group + (block_m % group != 0)  # positions of a tile after its first
    return max(16, triton.next_power_of_2(window_left + 1)), max(16, triton.next_power_of_2(later))


@triton.jit
def attend_band(
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
    TILES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """TILES tiles of queries of one key head."""
    head = tl.program_id(0) % KV_HEADS
    slot = tl.program_id(0) // KV_HEADS
    sequence = sequence_of(slot, cu_seqlens, batch, GROUP, BLOCK_M * TILES, AT_ONCE)
    start = tl.load(cu_seqlens + sequence)
    q_len = tl.load(cu_seqlens + sequence + 1) - start
    begin_row = (slot - sequence - start * GROUP // (BLOCK_M * TILES)) * (BLOCK_M * TILES)
    rows = q_len * GROUP
    if begin_row >= rows:
        return
    k_head = k + head.to(tl.int64) * k_stride_h
    v_head = v + head.to(tl.int64) * v_stride_h
    pages = page_table
    if PAGE_SIZE:
        kv_len = tl.minimum(tl.load(cache_seqlens + sequence), capacity)
        pages = page_table + sequence.to(tl.int64) * page_table_stride_b
    else:
        kv_len = q_len
        k_head += start.to(tl.int64) * k_stride_t
        v_head += start.to(tl.int64) * v_stride_t
    ahead = kv_len - q_len
    if q_scale is not None:
        multiplier *= tl.load(q_scale + head * Q_SCALES)
    if k_scale is not None:
        multiplier *= tl.load(k_scale + head * K_SCALES)
    out_factor = 1.0
    if v_scale is not None:
        out_factor = tl.load(v_scale + head * V_SCALES)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    D_WIDTH: tl.constexpr = None if BLOCK_D == HEAD_DIM else HEAD_DIM
    W_WIDTH: tl.constexpr = None if BLOCK_W == V_HEAD_DIM else V_HEAD_DIM
    q_sequence = q + start.to(tl.int64) * q_stride_t + head * GROUP * q_stride_h
    out_sequence = out + start.to(tl.int64) * out_stride_t + head * GROUP * out_stride_h
    tiles = tl.minimum(TILES, (rows - begin_row + BLOCK_M - 1) // BLOCK_M)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        first_row = begin_row + tile * BLOCK_M
        row = first_row + m
        held_row = tl.minimum(row, rows - 1)
        position = ahead + row // GROUP
        oldest = ahead + first_row // GROUP
        # Keys that no row sees are not read, they may be NaN: the nearest one that some row sees stands in.
        main = oldest - (MAIN - 1) + tl.arange(0, MAIN)
        tail = oldest + 1 + tl.arange(0, TAIL)
        low = tl.maximum(oldest - window_left, 0)
        main_held = tl.maximum(main, low)
        tail_held = tl.minimum(tail, kv_len - 1)
        q_rows = q_sequence + (held_row // GROUP).to(tl.int64) * q_stride_t + held_row % GROUP * q_stride_h
        if PAGE_SIZE:
            main_page = tl.load(pages + main_held // PAGE_SIZE * page_table_stride_p).to(tl.int64)
            tail_page = tl.load(pages + tail_held // PAGE_SIZE * page_table_stride_p).to(tl.int64)
            k_main = k_head + main_page * k_stride_p + main_held % PAGE_SIZE * k_stride_t
            v_main = v_head + main_page * v_stride_p + main_held % PAGE_SIZE * v_stride_t
            k_tail = k_head + tail_page * k_stride_p + tail_held % PAGE_SIZE * k_stride_t
            v_tail = v_head + tail_page * v_stride_p + tail_held % PAGE_SIZE * v_stride_t
        else:
            k_main = k_head + main_held.to(tl.int64) * k_stride_t
            v_main = v_head + main_held.to(tl.int64) * v_stride_t
            k_tail = k_head + tail_held.to(tl.int64) * k_stride_t
            v_tail = v_head + tail_held.to(tl.int64) * v_stride_t
        queries = rows_of_columns(q_rows, d, q_stride_d, D_WIDTH, DTYPE, Q_FP8)
        keys = rows_of_columns(k_main, d, k_stride_d, D_WIDTH, DTYPE, KV_FP8)
        later_keys = rows_of_columns(k_tail, d, k_stride_d, D_WIDTH, DTYPE, KV_FP8)
        values = rows_of_columns(v_main, w, v_stride_d, W_WIDTH, DTYPE, KV_FP8)
        later_values = rows_of_columns(v_tail, w, v_stride_d, W_WIDTH, DTYPE, KV_FP8)

        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        later_products = tl.dot(queries, tl.trans(later_keys), input_precision="ieee")
        scores, factor = softmax.scored(products, multiplier, cap_log2, HAS_CAP)
        later_scores, _ = softmax.scored(later_products, multiplier, cap_log2, HAS_CAP)
        earliest = tl.maximum(position - window_left, 0)
        scores = tl.where(main[None, :] >= earliest[:, None], scores, -float("inf"))
        later_scores = tl.where(tail[None, :] <= position[:, None], later_scores, -float("inf"))
        largest = tl.maximum(tl.max(scores, 1), tl.max(later_scores, 1)) * factor
        if sinks is not None:
            sink = tl.load(sinks + head * GROUP + row % GROUP).to(tl.float32) * softmax.LOG2_E
            largest = tl.maximum(largest, sink)
        weights = tl.exp2(scores * factor - largest[:, None])
        later_weights = tl.exp2(later_scores * factor - largest[:, None])
        total = tl.sum(weights, 1) + tl.sum(later_weights, 1)
        if sinks is not None:
            total += tl.exp2(sink - largest)
        acc = tl.dot(weights.to(DTYPE), values, input_precision="ieee")
        acc = tl.dot(later_weights.to(DTYPE), later_values, acc, input_precision="ieee")
        acc = acc * (out_factor / total)[:, None]  # a row sees itself at least

        real = row < rows
        out_rows = out_sequence + (row // GROUP).to(tl.int64) * out_stride_t + row % GROUP * out_stride_h
        held = real[:, None] if W_WIDTH is None else real[:, None] & (w < V_HEAD_DIM)[None, :]
        tl.store(out_rows[:, None] + w[None, :] * out_stride_d, acc.to(out.dtype.element_ty), mask=held)
        if lse is not None:
            at = (start + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
            tl.store(lse + at, softmax.log_sum_exp(largest, total), mask=real)


def attend(
    band: Band,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    cu_seqlens: Tensor,
    softmax_scale: float,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    paging: Paging | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Launches `attend_band`. The arguments are the operators'."""
    tokens, heads, head_dim = q.shape
    kv_heads, v_head_dim = v.shape[-2:]
    batch = cu_seqlens.numel() - 1
    if tokens == 0 or batch == 0:
        return
    group = heads // kv_heads
    dtype = product_dtype(q)
    (q, q_fp8), (k, k_fp8), (v, _) = fp8_operand(q), fp8_operand(k), fp8_operand(v)
    main, tail = band_widths(band.block_m, group, window_left)
    multiplier, cap_log2 = softmax.score_factors(softmax_scale, logit_cap)
    page_table, cache_seqlens = (paging.page_table, paging.cache_seqlens) if paging else (None, None)
    page_size = k.shape[1] if paging else 0
    attend_band[((tokens * group // (band.block_m * band.tiles) + batch) * kv_heads,)](
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        cache_seqlens,
        page_table,
        sinks,
        q_scale,
        k_scale,
        v_scale,
        *q.stride(),
        *(k.stride() if paging else (0, *k.stride())),
        *(v.stride() if paging else (0, *v.stride())),
        *out.stride(),
        *(page_table.stride() if paging else (0, 0)),
        batch,
        page_table.shape[1] * page_size if paging else 0,
        window_left,
        multiplier,
        cap_log2,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        PAGE_SIZE=page_size,
        Q_SCALES=scale_stride(q_scale),
        K_SCALES=scale_stride(k_scale),
        V_SCALES=scale_stride(v_scale),
        HAS_CAP=logit_cap > 0,
        DTYPE=dtype,
        Q_FP8=q_fp8,
        KV_FP8=k_fp8,
        BLOCK_M=band.block_m,
        MAIN=main,
        TAIL=tail,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_W=max(16, triton.next_power_of_2(v_head_dim)),
        TILES=band.tiles,
        AT_ONCE=sequences_at_once(batch),
        STAGES=band.num_stages,
        num_warps=band.num_warps,
        num_stages=band.num_stages,
    )
