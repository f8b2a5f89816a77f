"""Causal attention in a narrow window: all keys that a tile of packed rows sees at once, so that the softmax takes one step.

A tile of few positions sees the window of its first position, MAIN keys that end with that position, and the positions after it, at
most TAIL. Only the former are masked at their window's start, only the latter on the diagonal. A program goes through TILES
neighbouring tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from tokenspeed_kernel.ops.attention.triton import _online_softmax as softmax
from tokenspeed_kernel.ops.attention.triton._fp8 import widened
from tokenspeed_kernel.ops.attention.triton._mha_call import Call, columns_of, sequence_of
from tokenspeed_kernel.ops.attention.triton._mha_tiles import descriptor, whole_rows


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
    registers: int | None = None
    descriptors: bool = False


def band_widths(block_m: int, group: int, window_left: int) -> tuple[int, int]:
    """``(MAIN, TAIL)`` of `attend_band`."""
    later = (block_m - 1) // group + (block_m % group != 0)  # positions of a tile after its first
    return max(16, triton.next_power_of_2(window_left + 1)), max(16, triton.next_power_of_2(later))


@triton.jit
def _softmax_of(
    queries,
    keys,
    later_keys,
    values,
    later_values,
    row,
    oldest,
    ahead,
    sinks,
    head,
    window_left,
    multiplier,
    cap_log2,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``(acc, largest, total)`` of a tile: the values are yet to be divided by total."""
    later_by = row // GROUP + (ahead - oldest)  # of positions, than the oldest
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    later_products = tl.dot(queries, tl.trans(later_keys), input_precision="ieee")
    scores, factor = softmax.scored(products, multiplier, cap_log2, HAS_CAP)
    later_scores, _ = softmax.scored(later_products, multiplier, cap_log2, HAS_CAP)
    # Relative to the oldest position.
    earliest = tl.maximum(later_by - window_left, -oldest)
    scores = tl.where((tl.arange(0, MAIN) - (MAIN - 1))[None, :] >= earliest[:, None], scores, -float("inf"))
    later_scores = tl.where((tl.arange(0, TAIL) + 1)[None, :] <= later_by[:, None], later_scores, -float("inf"))
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
    return acc, largest, total  # a row sees itself at least: total is not 0


@triton.jit
def _write(
    x,
    largest,
    total,
    row,
    first_position,
    out_sequence,
    lse_sequence,
    rows,
    w,
    out_stride_t,
    out_stride_h,
    out_stride_d,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    W_WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    out_rows = out_sequence + first_position.to(tl.int64) * out_stride_t
    out_rows += (row // GROUP - first_position) * out_stride_t + row % GROUP * out_stride_h
    at = out_rows[:, None] + w[None, :] * out_stride_d
    x = x.to(out_sequence.dtype.element_ty)
    if W_WIDTH is not None:
        tl.store(at, x, mask=(row < rows)[:, None] & (w < W_WIDTH)[None, :])
    elif MASKED:
        tl.store(at, x, mask=(row < rows)[:, None])
    else:
        tl.store(at, x)
    if lse_sequence is not None:
        at = (row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + row % GROUP
        tl.store(lse_sequence + at, softmax.log_sum_exp(largest, total), mask=row < rows)


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
    k_main_rows,  # descriptors of k as [tokens, KV_HEADS * HEAD_DIM], MAIN or TAIL rows of a head at once; or None
    v_main_rows,
    k_tail_rows,
    v_tail_rows,
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
    EDGE_STAGES: tl.constexpr,
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

    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    D_WIDTH: tl.constexpr = None if BLOCK_D == HEAD_DIM else HEAD_DIM
    W_WIDTH: tl.constexpr = None if BLOCK_W == V_HEAD_DIM else V_HEAD_DIM
    q_sequence = q + start.to(tl.int64) * q_stride_t + head * GROUP * q_stride_h
    out_sequence = out + start.to(tl.int64) * out_stride_t + head * GROUP * out_stride_h
    lse_sequence = lse
    if lse is not None:
        lse_sequence = lse + start.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP
    tiles = tl.minimum(TILES, (rows - begin_row + BLOCK_M - 1) // BLOCK_M)
    if k_main_rows is not None:
        inside = (begin_row // GROUP >= MAIN - 1) & ((begin_row + TILES * BLOCK_M) // GROUP + TAIL < q_len)
    else:
        inside = tiles < 0
    if k_main_rows is not None and inside:  # all rows and all keys are the sequence's own
        for tile in tl.range(0, TILES, num_stages=STAGES):
            first_row = begin_row + tile * BLOCK_M
            oldest = first_row // GROUP
            row = first_row + tl.arange(0, BLOCK_M)
            q_rows = q_sequence + oldest.to(tl.int64) * q_stride_t
            q_rows += (row // GROUP - oldest) * q_stride_t + row % GROUP * q_stride_h
            queries = columns_of(q_rows, d, q_stride_d, D_WIDTH, DTYPE, Q_FP8)
            keys = widened(k_main_rows.load([start + oldest - (MAIN - 1), head * HEAD_DIM]), DTYPE, KV_FP8)
            later_keys = widened(k_tail_rows.load([start + oldest + 1, head * HEAD_DIM]), DTYPE, KV_FP8)
            values = widened(v_main_rows.load([start + oldest - (MAIN - 1), head * V_HEAD_DIM]), DTYPE, KV_FP8)
            later_values = widened(v_tail_rows.load([start + oldest + 1, head * V_HEAD_DIM]), DTYPE, KV_FP8)
            acc, largest, total = _softmax_of(
                queries,
                keys,
                later_keys,
                values,
                later_values,
                row,
                oldest,
                0,
                sinks,
                head,
                window_left,
                multiplier,
                cap_log2,
                GROUP,
                MAIN,
                TAIL,
                HAS_CAP,
                DTYPE,
            )
            _write(
                acc * (out_factor / total)[:, None],
                largest,
                total,
                row,
                oldest,
                out_sequence,
                lse_sequence,
                rows,
                w,
                out_stride_t,
                out_stride_h,
                out_stride_d,
                KV_HEADS,
                GROUP,
                W_WIDTH,
                False,
            )
    else:
        for tile in tl.range(0, tiles, num_stages=EDGE_STAGES):
            first_row = begin_row + tile * BLOCK_M
            first_position = first_row // GROUP
            oldest = ahead + first_position
            row = first_row + tl.arange(0, BLOCK_M)
            held_row = tl.minimum(row, rows - 1)
            q_rows = q_sequence + first_position.to(tl.int64) * q_stride_t
            q_rows += (held_row // GROUP - first_position) * q_stride_t + held_row % GROUP * q_stride_h
            # Keys that no row sees are not read, they may be NaN: the nearest one that some row sees stands in.
            main = tl.maximum(oldest - (MAIN - 1) + tl.arange(0, MAIN), tl.maximum(oldest - window_left, 0))
            tail = tl.minimum(oldest + 1 + tl.arange(0, TAIL), kv_len - 1)
            if PAGE_SIZE:
                main_page = tl.load(pages + main // PAGE_SIZE * page_table_stride_p).to(tl.int64)
                tail_page = tl.load(pages + tail // PAGE_SIZE * page_table_stride_p).to(tl.int64)
                k_main = k_head + main_page * k_stride_p + main % PAGE_SIZE * k_stride_t
                v_main = v_head + main_page * v_stride_p + main % PAGE_SIZE * v_stride_t
                k_tail = k_head + tail_page * k_stride_p + tail % PAGE_SIZE * k_stride_t
                v_tail = v_head + tail_page * v_stride_p + tail % PAGE_SIZE * v_stride_t
            else:
                k_oldest = k_head + oldest.to(tl.int64) * k_stride_t
                v_oldest = v_head + oldest.to(tl.int64) * v_stride_t
                k_main = k_oldest + (main - oldest) * k_stride_t
                v_main = v_oldest + (main - oldest) * v_stride_t
                k_tail = k_oldest + (tail - oldest) * k_stride_t
                v_tail = v_oldest + (tail - oldest) * v_stride_t
            queries = columns_of(q_rows, d, q_stride_d, D_WIDTH, DTYPE, Q_FP8)
            keys = columns_of(k_main, d, k_stride_d, D_WIDTH, DTYPE, KV_FP8)
            later_keys = columns_of(k_tail, d, k_stride_d, D_WIDTH, DTYPE, KV_FP8)
            values = columns_of(v_main, w, v_stride_d, W_WIDTH, DTYPE, KV_FP8)
            later_values = columns_of(v_tail, w, v_stride_d, W_WIDTH, DTYPE, KV_FP8)
            acc, largest, total = _softmax_of(
                queries,
                keys,
                later_keys,
                values,
                later_values,
                row,
                oldest,
                ahead,
                sinks,
                head,
                window_left,
                multiplier,
                cap_log2,
                GROUP,
                MAIN,
                TAIL,
                HAS_CAP,
                DTYPE,
            )
            _write(
                acc * (out_factor / total)[:, None],
                largest,
                total,
                row,
                first_position,
                out_sequence,
                lse_sequence,
                rows,
                w,
                out_stride_t,
                out_stride_h,
                out_stride_d,
                KV_HEADS,
                GROUP,
                W_WIDTH,
                True,
            )


def attend(band: Band, call: Call) -> None:
    """Launches `attend_band`."""
    slots = call.slots(band.block_m * band.tiles)
    if slots == 0:
        return
    main, tail = band_widths(band.block_m, call.group, call.window_left)
    operands = call.operands()
    described = band.descriptors and call.page_size == 0 and whole_rows(call.k) and whole_rows(call.v)
    attend_band[(slots * call.kv_heads,)](
        *operands,
        *(descriptor(x, size) if described else None for size in (main, tail) for x in operands[1:3]),
        **call.constants(),
        BLOCK_M=band.block_m,
        MAIN=main,
        TAIL=tail,
        BLOCK_D=max(16, triton.next_power_of_2(call.q.shape[2])),
        BLOCK_W=max(16, triton.next_power_of_2(call.v.shape[-1])),
        TILES=band.tiles,
        STAGES=band.num_stages,
        EDGE_STAGES=1,
        num_warps=band.num_warps,
        num_stages=band.num_stages,
        **({} if band.registers is None else {"maxnreg": band.registers}),
    )
