"""Device code of `_mha_band`: attention in a narrow window, without a loop over keys.

Grid: one axis of (slot, KV head), the head varying fastest. A program loads one tile of query rows, MAIN keys and values up to the
oldest row's position, and TAIL keys and values after it. So the softmax is a plain softmax over ``MAIN + TAIL`` scores in float32,
and nothing is rescaled. Positions are relative to the oldest row of the tile: MAIN keys are at ``-(MAIN - 1)`` to 0, TAIL keys at 1
to TAIL.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._mha_call_device import columns_of, scaling_of, tile_of
from tokenspeed_kernel.triton.attention._online_softmax_device import LOG2_E, Softmax, log_sum_exp, scale_scores
from tokenspeed_kernel.triton.views_device import Cache, Pages, Rows, Scales, head_of, pages_of


class Tile(NamedTuple):
    """A tile of query rows of a KV head. Row ``r`` of a sequence is query head ``r % group`` of the sequence's query ``r //
    group``.

    Fields:
        row, rows: the indices of the tile's rows in the sequence, and the number of the sequence's rows.
        start, head: the index of the sequence's first token in q, and the KV head.
        first: the query that the tile's first row belongs to, relative to the sequence's first query.
        oldest: the position of the tile's first row in the sequence.
        later_by: each row's position, relative to ``oldest``.
    """

    row: Any
    rows: Any
    start: Any
    head: Any
    first: Any
    oldest: Any
    later_by: Any


class Band(NamedTuple):
    """The keys that a tile sees, in two blocks: keys up to the position of the tile's oldest row (main), and later keys (tail).

    Fields:
        main, tail: the keys' positions, relative to the position of the oldest row.
        main_held, tail_held: the keys that are read in place of ``main`` and ``tail``. A key that no row sees may be NaN, so the
            nearest visible key is read in its place.
    """

    main: Any
    tail: Any
    main_held: Any
    tail_held: Any


@triton.jit
def _tile_of(first_row, start, q_len, kv_len, head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the `Tile` that begins at row ``first_row`` of a sequence."""
    first = first_row // GROUP
    row = first_row + tl.arange(0, BLOCK_M)
    return Tile(row, q_len * GROUP, start, head, first, kv_len - q_len + first, row // GROUP - first)


@triton.jit
def _band_of(tile, kv_len, window_left, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Returns the `Band` of keys that ``tile`` sees."""
    main = tl.arange(0, MAIN) - (MAIN - 1)
    tail = tl.arange(0, TAIL) + 1
    return Band(main, tail, tl.maximum(main, -tl.minimum(tile.oldest, window_left)), tl.minimum(tail, kv_len - 1 - tile.oldest))


@triton.jit
def _query_rows(q_rows, tile, GROUP: tl.constexpr):
    """Returns pointers to the queries of a tile's rows. Offsets from the tile's first query fit into 32 bits."""
    held = tl.minimum(tile.row, tile.rows - 1)
    first = q_rows.first + (tile.start + tile.first).to(tl.int64) * q_rows.token_stride + tile.head * GROUP * q_rows.head_stride
    return first + (held // GROUP - tile.first) * q_rows.token_stride + held % GROUP * q_rows.head_stride


@triton.jit
def _cache_rows(cache, tile, band, table, sequence, PAGE_SIZE: tl.constexpr):
    """Returns ``(main, tail)``: pointers to the keys (or values) of the tile's main and tail blocks."""
    first = head_of(cache, tile.head)
    if PAGE_SIZE:
        pages = pages_of(table, sequence)
        main_page = tl.load(pages + (tile.oldest + band.main_held) // PAGE_SIZE * table.page_stride).to(tl.int64)
        tail_page = tl.load(pages + (tile.oldest + band.tail_held) // PAGE_SIZE * table.page_stride).to(tl.int64)
        main = first + main_page * cache.page_stride + (tile.oldest + band.main_held) % PAGE_SIZE * cache.slot_stride
        tail = first + tail_page * cache.page_stride + (tile.oldest + band.tail_held) % PAGE_SIZE * cache.slot_stride
    else:
        first += (tile.start + tile.oldest).to(tl.int64) * cache.slot_stride
        main = first + band.main_held * cache.slot_stride
        tail = first + band.tail_held * cache.slot_stride
    return main, tail


@triton.jit
def _weights(main_dots, tail_dots, tile, band, scaling, sinks, window_left, GROUP: tl.constexpr, HAS_CAP: tl.constexpr):
    """Computes the softmax over both blocks at once. Returns ``(main_weights, tail_weights, state)``.

    The weights are the unnormalised probabilities of the keys; ``state`` is the `Softmax` state of the rows.
    """
    main_scores, factor = scale_scores(main_dots, scaling, HAS_CAP)
    tail_scores, _ = scale_scores(tail_dots, scaling, HAS_CAP)
    earliest = tl.maximum(tile.later_by - window_left, -tile.oldest)
    main_scores = tl.where(band.main[None, :] >= earliest[:, None], main_scores, -float("inf"))
    tail_scores = tl.where(band.tail[None, :] <= tile.later_by[:, None], tail_scores, -float("inf"))
    row_max = tl.maximum(tl.max(main_scores, 1), tl.max(tail_scores, 1)) * factor
    if sinks is not None:
        sink = tl.load(sinks + tile.head * GROUP + tile.row % GROUP).to(tl.float32) * LOG2_E
        row_max = tl.maximum(row_max, sink)
    main_weights = tl.exp2(main_scores * factor - row_max[:, None])
    tail_weights = tl.exp2(tail_scores * factor - row_max[:, None])
    row_sum = tl.sum(main_weights, 1) + tl.sum(tail_weights, 1)  # not 0, because every row sees its own position
    if sinks is not None:
        row_sum += tl.exp2(sink - row_max)
    return main_weights, tail_weights, Softmax(row_max, row_sum)


@triton.jit
def _store(out_rows, lse, v_scale, state, acc, tile, SHAPE: tl.constexpr, BLOCK_W: tl.constexpr):
    """Stores the attention output of a tile, and the rows' LSE unless ``lse`` is None."""
    GROUP: tl.constexpr = SHAPE.group
    factor = 1.0 / state.row_sum
    if v_scale is not None:
        factor *= tl.load(v_scale + tile.head * SHAPE.v_scales)
    real = tile.row < tile.rows
    w = tl.arange(0, BLOCK_W)
    first = (
        out_rows.first + (tile.start + tile.first).to(tl.int64) * out_rows.token_stride + tile.head * GROUP * out_rows.head_stride
    )
    out_at = first + tile.later_by * out_rows.token_stride + tile.row % GROUP * out_rows.head_stride
    V_HEAD_DIM: tl.constexpr = SHAPE.v_head_dim
    stored = real[:, None] if BLOCK_W == V_HEAD_DIM else real[:, None] & (w < V_HEAD_DIM)[None, :]
    x = (acc * factor[:, None]).to(out_rows.first.dtype.element_ty)
    tl.store(out_at[:, None] + w[None, :] * out_rows.dim_stride, x, mask=stored)
    if lse is not None:
        at = (tile.start + tile.row // GROUP).to(tl.int64) * (SHAPE.heads * GROUP) + tile.head * GROUP + tile.row % GROUP
        tl.store(lse + at, log_sum_exp(state), mask=real)


@triton.jit(do_not_specialize=["page_table_stride_b", "batch"])
def band_kernel(
    q,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    k,  # [tokens, KV_HEADS, HEAD_DIM], or [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM] if paged
    v,
    out,
    lse,  # float32 [tokens, KV_HEADS * GROUP] or None
    cu_seqlens,  # offsets of the queries
    cache_seqlens,
    page_table,
    sinks,
    q_scale,
    k_scale,
    v_scale,
    q_stride_t, q_stride_h, q_stride_d,
    k_stride_p, k_stride_t, k_stride_h, k_stride_d,
    v_stride_p, v_stride_t, v_stride_h, v_stride_d,
    out_stride_t, out_stride_h, out_stride_d,
    page_table_stride_b, page_table_stride_p,
    batch,
    capacity,
    window_left,
    multiplier,
    cap_log2,
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes the attention of one tile of query rows of one KV head over its MAIN and TAIL keys. Writes ``out`` and, unless it is
    None, ``lse`` (natural logarithm)."""
    GROUP: tl.constexpr = SHAPE.group
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    DTYPE: tl.constexpr = FORMATS.dtype
    KV_FP8: tl.constexpr = FORMATS.kv_fp8
    D_WIDTH: tl.constexpr = None if TILE.block_d == SHAPE.head_dim else SHAPE.head_dim
    W_WIDTH: tl.constexpr = None if TILE.block_w == SHAPE.v_head_dim else SHAPE.v_head_dim
    q_rows = Rows(q, q_stride_t, q_stride_h, q_stride_d)
    out_rows = Rows(out, out_stride_t, out_stride_h, out_stride_d)
    keys = Cache(k, k_stride_p, k_stride_t, k_stride_h, k_stride_d)
    values = Cache(v, v_stride_p, v_stride_t, v_stride_h, v_stride_d)
    table = Pages(page_table, page_table_stride_b, page_table_stride_p)
    scales = Scales(q_scale, k_scale, v_scale)
    head = tl.program_id(0) % SHAPE.heads
    slot = tl.program_id(0) // SHAPE.heads
    sequence, start, q_len, first_row = tile_of(slot, cu_seqlens, batch, GROUP, TILE.block_m, TILE.at_once)
    if first_row >= q_len * GROUP:
        return
    if PAGE_SIZE:
        kv_len = tl.minimum(tl.load(cache_seqlens + sequence), capacity)
    else:
        kv_len = q_len
    tile = _tile_of(first_row, start, q_len, kv_len, head, GROUP, TILE.block_m)
    band = _band_of(tile, kv_len, window_left, TILE.main, TILE.tail)

    # All loads of keys, values and queries are independent, so all are in flight at once.
    d = tl.arange(0, TILE.block_d)
    w = tl.arange(0, TILE.block_w)
    k_main, k_tail = _cache_rows(keys, tile, band, table, sequence, PAGE_SIZE)
    v_main, v_tail = _cache_rows(values, tile, band, table, sequence, PAGE_SIZE)
    queries = columns_of(_query_rows(q_rows, tile, GROUP), d, q_rows.dim_stride, D_WIDTH, DTYPE, FORMATS.q_fp8)
    main_keys = columns_of(k_main, d, keys.dim_stride, D_WIDTH, DTYPE, KV_FP8)
    tail_keys = columns_of(k_tail, d, keys.dim_stride, D_WIDTH, DTYPE, KV_FP8)
    main_values = columns_of(v_main, w, values.dim_stride, W_WIDTH, DTYPE, KV_FP8)
    tail_values = columns_of(v_tail, w, values.dim_stride, W_WIDTH, DTYPE, KV_FP8)

    scaling = scaling_of(multiplier, cap_log2, scales, head, SHAPE)
    main_dots = tl.dot(queries, tl.trans(main_keys), input_precision="ieee")
    tail_dots = tl.dot(queries, tl.trans(tail_keys), input_precision="ieee")
    main_weights, tail_weights, state = _weights(
        main_dots, tail_dots, tile, band, scaling, sinks, window_left, GROUP, SHAPE.has_cap
    )
    acc = tl.dot(main_weights.to(DTYPE), main_values, input_precision="ieee")
    acc = tl.dot(tail_weights.to(DTYPE), tail_values, acc, input_precision="ieee")
    _store(out_rows, lse, scales.v, state, acc, tile, SHAPE, TILE.block_w)
