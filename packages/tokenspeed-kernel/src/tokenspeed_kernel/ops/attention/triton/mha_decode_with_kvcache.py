"""Attention of the newest tokens to a paged cache.

All query heads of a key head, and all new tokens of a sequence, are the rows of one tile, so that a key is read once. Memory decides
the speed: a program is a warp or a few, several share a multiprocessor, and each keeps some blocks of keys and values on the way.
Long sequences are split over programs, see `_split_kv`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.checks import FP8
from tokenspeed_kernel.ops.attention._softmax import empty_outputs, softmax_scale_of
from tokenspeed_kernel.ops.attention.triton import _online_softmax as softmax
from tokenspeed_kernel.ops.attention.triton._split_kv import blocks_a_unit, blocks_of, find_unit, first_block, merge_units
from tokenspeed_kernel.ops.attention.triton._split_kv import plan_units, units_of
from tokenspeed_kernel.ops.triton_common import for_architecture, multiprocessors


@dataclass(frozen=True)
class Config:
    """How a program walks its keys.

    Attributes:
        block_n: keys at once.
        num_warps, num_stages: of a program, and blocks of keys on the way.
        resident: programs that share a multiprocessor.
        waves: how often the device is filled with programs where there is much work.
        long: keys of a program that are enough for its start and end not to matter.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    resident: int = 4
    waves: int = 3
    long: int = 1024


@triton.jit
def _widened(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Elements of a cache in the dtype of the products, to which every fp8 number is exact."""
    if FP8 == "e4m3 in bits":  # an e4m3's exponent and mantissa, moved, are a float16 that is 2^-8 times too small
        bits = x.to(tl.uint16)
        moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        value = moved.to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)
    elif FP8 == "e5m2 in bits":  # the upper half of a float16
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def _decode(
    q,  # [batch * Q_LEN, HEADS * GROUP, HEAD_DIM]
    k_cache,  # [pages, PAGE_SIZE, HEADS, HEAD_DIM]
    v_cache,  # [pages, PAGE_SIZE, HEADS, V_HEAD_DIM]
    page_table,  # [batch, max_pages]
    cache_seqlens,
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
    Q_FP8: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One unit: a tile of the query rows of a key head, and a share of the keys of their sequence."""
    ROWS: tl.constexpr = GROUP * Q_LEN
    TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    INT8: tl.constexpr = 1
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Programs of all heads of the same keys lie side by side: their keys are neighbours in memory.
    unit = tl.program_id(0) // (HEADS * TILES)
    head = tl.program_id(0) // TILES % HEADS
    tile = tl.program_id(0) % TILES
    sequence = unit
    first_unit = unit
    if SPLIT:
        share = blocks_a_unit(
            cache_seqlens, batch, capacity, Q_LEN, window_left, wave, waves_units, long, WINDOWED, BLOCK_N, AT_ONCE
        )
        sequence, first_unit = find_unit(
            unit, share, cache_seqlens, batch, capacity, Q_LEN, window_left, WINDOWED, BLOCK_N, AT_ONCE
        )
        if sequence >= batch:
            return
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + sequence), 0), capacity)
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
    real = row < ROWS
    token = sequence.to(tl.int64) * Q_LEN + row // GROUP
    q_head = head * GROUP + row % GROUP
    position = length - Q_LEN + row // GROUP
    d = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    q_at = q + token[:, None] * q_stride_t + q_head[:, None] * q_stride_h + d[None, :] * q_stride_d
    queries = tl.load(q_at, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0)
    if FP8 is None:
        queries = queries.to(DTYPE)
    else:
        # Keys become float16, which holds every fp8 number. A row of queries is scaled to float16's range by a power of 2.
        wide = _widened(queries, tl.float32, Q_FP8)
        top = tl.max(tl.abs(wide), 1)
        exponent = ((top.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        exponent = tl.minimum(tl.maximum(exponent, -100), 126)
        down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        queries = (wide * down[:, None]).to(DTYPE)
        up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
        multiplier = multiplier
    if q_scale is not None:
        multiplier *= tl.load(q_scale + head * Q_SCALES)
    if k_scale is not None:
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
    for block in tl.range(begin, end, num_stages=STAGES):
        # Keys that no query sees are not read, as they may be NaN: the nearest one that some query sees stands in.
        key = block * BLOCK_N + n
        held = tl.maximum(tl.minimum(key, length - 1), low)
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(pages + block // (PAGE_SIZE // BLOCK_N) * page_table_stride_p).to(tl.int64)
            k_from = k_head + page * k_stride_p
            v_from = v_head + page * v_stride_p
            slot = held % PAGE_SIZE
            k_at = k_from + (slot[None, :] * k_stride_t + d[:, None] * k_stride_d)
            v_at = v_from + (slot[:, None] * v_stride_t + w[None, :] * v_stride_d)
        else:
            page = tl.load(pages + held // PAGE_SIZE * page_table_stride_p).to(tl.int64)
            slot = held % PAGE_SIZE
            k_at = k_head + (page * k_stride_p + slot * k_stride_t)[None, :] + d[:, None] * k_stride_d
            v_at = v_head + (page * v_stride_p + slot * v_stride_t)[:, None] + w[None, :] * v_stride_d
        if BLOCK_D == HEAD_DIM:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(d < HEAD_DIM)[:, None], other=0)
        if BLOCK_W == V_HEAD_DIM:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(w < V_HEAD_DIM)[None, :], other=0)
        products = tl.dot(queries, _widened(k, DTYPE, FP8), input_precision="ieee")
        if FP8 is not None:
            products *= up[:, None]
        if Q_LEN == 1:
            visible = key < length
            if WINDOWED:
                visible &= key >= low
            visible = visible[None, :]
        else:
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible &= key[None, :] >= position[:, None] - window_left
        weights, decay, largest, total = softmax.step(
            largest, total, products, multiplier, cap_log2, visible, HAS_CAP, True
        )
        acc = tl.dot(weights.to(DTYPE), _widened(v, DTYPE, FP8), acc * decay[:, None], input_precision="ieee")

    if v_scale is not None:
        acc *= tl.load(v_scale + head * V_SCALES)
    held_w = real[:, None] & (w < V_HEAD_DIM)[None, :]
    if SPLIT:
        if units > 1:
            at_row = (unit.to(tl.int64) * HEADS + head) * ROWS + row
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
