"""Device code of `_mha_tiles`: attention of many queries per sequence, over contiguous or paged keys.

Grid: one axis of (slot, KV head). A slot is a tile of M packed query rows of one sequence, found by `tile_of`; surplus slots return
at once. If the keys and values of all heads are few enough for L2 (``TILE.heads_first``), the head varies fastest, otherwise the
tile.

Masks: the blocks of N keys that a tile sees are of two kinds. *Full* blocks are seen whole by every row and need no mask. *Edge*
blocks contain the causal diagonal, the window's start, or the end of the sequence. ``TILE.edges`` selects one loop with a branch,
or separate loops, whose full blocks then run without any mask arithmetic.

Numerics: dot products, softmax and accumulator are float32. The probabilities are rounded to the MMA operands' dtype for PV. fp8
operands are converted in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._fp8_device import widened
from tokenspeed_kernel.triton.attention._mha_call_device import columns_of, scaling_of, tile_of
from tokenspeed_kernel.triton.attention._online_softmax_device import (
    join_sink,
    log_sum_exp,
    no_keys_yet,
    reciprocal_of,
    scale_scores,
    softmax_step,
)
from tokenspeed_kernel.triton.views_device import Cache, Pages, Rows, Scales, head_of, pages_of, row_of


class Queries(NamedTuple):
    """A tile's queries, and each row's position in the sequence.

    The head dimension may be split into ``low`` and ``high``, see `split_width`. Without a split, ``high`` is not read.
    """

    low: Any
    high: Any
    position: Any


class QueryRows(NamedTuple):
    """The query rows of a tile. Row ``r`` of a sequence is query head ``r % group`` of the sequence's query ``r // group``.

    Fields:
        real: which of the tile's rows exist in the sequence.
        token, q_head: the index of each row's token in q, and its query head.
        position: each row's position in the sequence.
    """

    real: Any
    token: Any
    q_head: Any
    position: Any


class Source(NamedTuple):
    """The location of the keys and values that a tile reads.

    Fields:
        k, v: the keys and values as a `Cache`. Their ``first`` points to the KV head's first key or value: of page 0 if paged, else
        of the sequence.
        table, pages: `Pages`, and a pointer to the sequence's first page number.
        start, head: the index of the sequence's first key, and the KV head; used only with tensor descriptors.
    """

    k: Any
    v: Any
    table: Any
    pages: Any
    start: Any
    head: Any


class Reach(NamedTuple):
    """The range of keys that at least one row of a tile sees.

    Fields:
        low_block: the first key of block 0.
        low, kv_len: the first key that some row sees, and the sequence's number of keys.
        full_begin, full_end: the range of blocks that every row sees whole, so that they need no mask; end exclusive.
        window_left: how many keys before its own position a row sees, if there is a window.
    """

    low_block: Any
    low: Any
    kv_len: Any
    full_begin: Any
    full_end: Any
    window_left: Any


@triton.jit
def _query_rows(first_row, start, q_len, kv_len, head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the `QueryRows` of the tile that begins at row ``first_row`` of a sequence."""
    row = first_row + tl.arange(0, BLOCK_M)
    token = (start + row // GROUP).to(tl.int64)
    return QueryRows(row < q_len * GROUP, token, head * GROUP + row % GROUP, kv_len - q_len + row // GROUP)


@triton.jit
def _load_queries(q_rows, rows, SHAPE: tl.constexpr, FORMATS: tl.constexpr, TILE: tl.constexpr):
    """Loads the queries of a tile in the MMA operands' dtype."""
    DTYPE: tl.constexpr = FORMATS.dtype
    Q_FP8: tl.constexpr = FORMATS.q_fp8
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    real = rows.real[:, None]
    q_at = row_of(q_rows, rows.token[:, None], rows.q_head[:, None])
    d = tl.arange(0, TILE.d_low)
    low = tl.load(q_at + d[None, :] * q_rows.dim_stride, mask=real & (d < HEAD_DIM)[None, :], other=0.0)
    low = widened(low, DTYPE, Q_FP8)
    high = low
    if TILE.d_high:
        d_high = TILE.d_low + tl.arange(0, TILE.d_high)
        high = tl.load(q_at + d_high[None, :] * q_rows.dim_stride, mask=real & (d_high < HEAD_DIM)[None, :], other=0.0)
        high = widened(high, DTYPE, Q_FP8)
    return Queries(low, high, rows.position)


@triton.jit
def _reach_of(first_row, q_len, kv_len, window_left, SHAPE: tl.constexpr, MASK: tl.constexpr, TILE: tl.constexpr):
    """Returns ``(reach, blocks)``: the `Reach` of the tile that begins at ``first_row``, and how many blocks of keys it reads."""
    GROUP: tl.constexpr = SHAPE.group
    BLOCK_N: tl.constexpr = TILE.block_n
    ahead = kv_len - q_len  # the position of the first query
    oldest = ahead + first_row // GROUP
    newest = ahead + tl.minimum((first_row + TILE.block_m - 1) // GROUP, q_len - 1)
    # Each key from low to high is seen by some row of the tile; each key from full_low to full_high by every row. Ends exclusive.
    low = 0
    full_low = 0
    high = kv_len
    full_high = kv_len
    if MASK.causal:
        high = tl.minimum(kv_len, newest + 1)
        full_high = tl.minimum(kv_len, oldest + 1)
    if MASK.windowed:
        low = tl.maximum(oldest - window_left, 0)
        full_low = tl.maximum(newest - window_left, 0)
        low_block = low // BLOCK_N * BLOCK_N if SHAPE.page_size else low
    else:
        low_block = 0
    blocks = tl.maximum(high - low_block + BLOCK_N - 1, 0) // BLOCK_N
    full_begin = tl.minimum((full_low - low_block + BLOCK_N - 1) // BLOCK_N, blocks)
    full_end = tl.maximum(tl.minimum(tl.maximum(full_high - low_block, 0) // BLOCK_N, blocks), full_begin)
    return Reach(low_block, low, kv_len, full_begin, full_end, window_left), blocks


@triton.jit
def _first_rows(keys, values, kv_start, head, PAGE_SIZE: tl.constexpr):
    """Returns pointers to the first key and the first value of a KV head: of page 0 if paged, else of the sequence."""
    k_head = head_of(keys, head)
    v_head = head_of(values, head)
    if PAGE_SIZE == 0:
        k_head += kv_start.to(tl.int64) * keys.slot_stride
        v_head += kv_start.to(tl.int64) * values.slot_stride
    return k_head, v_head


@triton.jit
def _key_rows(first, held, source, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns ``(k_at, v_at, row)``: pointers to the keys and values of a block, and the block's first row in the descriptors.

    Args:
        first: the position of the block's first key.
        held: the keys to read, as offsets from ``first``.
    """
    keys, values, table, pages, start, _ = source
    row = first  # not read if a block may span several pages, because no descriptors are used then
    if PAGE_SIZE != 0 and PAGE_SIZE % BLOCK_N != 0:
        page = tl.load(pages + (first + held) // PAGE_SIZE * table.page_stride).to(tl.int64)
        slot = (first + held) % PAGE_SIZE
        k_at = keys.first + page * keys.page_stride + slot * keys.slot_stride
        v_at = values.first + page * values.page_stride + slot * values.slot_stride
    elif PAGE_SIZE:
        page = tl.load(pages + first // PAGE_SIZE * table.page_stride).to(tl.int64)
        row = page.to(tl.int32) * PAGE_SIZE + first % PAGE_SIZE
        k_at = keys.first + page * keys.page_stride + first % PAGE_SIZE * keys.slot_stride + held * keys.slot_stride
        v_at = values.first + page * values.page_stride + first % PAGE_SIZE * values.slot_stride + held * values.slot_stride
    else:
        row = start + first
        k_at = keys.first + first.to(tl.int64) * keys.slot_stride + held * keys.slot_stride
        v_at = values.first + first.to(tl.int64) * values.slot_stride + held * values.slot_stride
    return k_at, v_at, row


@triton.jit
def _qk_mma(queries, k_at, row, source, k_rows, k_rows_high, SHAPE: tl.constexpr, FORMATS: tl.constexpr, TILE: tl.constexpr):
    """Loads a block of keys, with tensor descriptors if there are any. Returns the dot products of queries and keys [M, N]."""
    DTYPE: tl.constexpr = FORMATS.dtype
    KV_FP8: tl.constexpr = FORMATS.kv_fp8
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    D_LOW: tl.constexpr = TILE.d_low
    D_HIGH: tl.constexpr = TILE.d_high
    if k_rows is not None:
        k = widened(k_rows.load([row, source.head * HEAD_DIM]), DTYPE, KV_FP8)
    else:
        WIDTH: tl.constexpr = None if D_LOW <= HEAD_DIM else HEAD_DIM
        k = columns_of(k_at, tl.arange(0, D_LOW), source.k.dim_stride, WIDTH, DTYPE, KV_FP8)
    dots = tl.dot(queries.low, tl.trans(k), input_precision="ieee")
    if D_HIGH:
        if k_rows is not None:
            k = widened(k_rows_high.load([row, source.head * HEAD_DIM + D_LOW]), DTYPE, KV_FP8)
        else:
            WIDTH_HIGH: tl.constexpr = None if D_LOW + D_HIGH == HEAD_DIM else HEAD_DIM
            d_high = D_LOW + tl.arange(0, D_HIGH)
            k = columns_of(k_at, d_high, source.k.dim_stride, WIDTH_HIGH, DTYPE, KV_FP8)
        dots = tl.dot(queries.high, tl.trans(k), dots, input_precision="ieee")
    return dots


@triton.jit
def _load_values(
    v_at, row, source, v_rows, key, reach, SHAPE: tl.constexpr, FORMATS: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """Loads a block of values.

    With a descriptor, the values of keys that no row sees are set to 0, because they may be NaN.
    """
    DTYPE: tl.constexpr = FORMATS.dtype
    KV_FP8: tl.constexpr = FORMATS.kv_fp8
    if v_rows is not None:
        v = widened(v_rows.load([row, source.head * SHAPE.v_head_dim]), DTYPE, KV_FP8)
        if MASKED != "never":
            v = tl.where(((key >= reach.low) & (key < reach.kv_len))[:, None], v, 0.0)
    else:
        WIDTH: tl.constexpr = None if TILE.block_w == SHAPE.v_head_dim else SHAPE.v_head_dim
        v = columns_of(v_at, tl.arange(0, TILE.block_w), source.v.dim_stride, WIDTH, DTYPE, KV_FP8)
    return v


@triton.jit
def _masked(scores, first, n, position, reach, MASK: tl.constexpr):
    """Masks the scores of a block of keys that begins at key ``first``: -inf where a row does not see a key."""
    visible = (first + n < reach.kv_len)[None, :]
    if MASK.causal:
        visible &= first + n[None, :] <= position[:, None]
    if MASK.windowed:
        visible &= first + n[None, :] >= position[:, None] - reach.window_left
    return tl.where(visible, scores, -float("inf"))


@triton.jit
def _walk(
    state,
    acc,
    begin,
    end,
    queries,
    source,
    k_rows,  # descriptor of keys [tokens or slots, heads * columns], for the first D_LOW columns of a head; or None
    k_rows_high,  # descriptor of the next D_HIGH columns of a head
    v_rows,  # descriptor of values
    reach,
    scaling,
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    MASK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # which blocks to mask: "never", "always", or "edges" (before full_begin, and from full_end on)
    STAGES: tl.constexpr,
):
    """Computes the attention of a tile over blocks ``begin`` to ``end`` (exclusive) of keys. Returns the updated ``(state, acc)``.

    Block i begins at key ``low_block + i * block_n``.
    """
    DTYPE: tl.constexpr = FORMATS.dtype
    BLOCK_N: tl.constexpr = TILE.block_n
    n = tl.arange(0, BLOCK_N)
    for block in tl.range(begin, end, num_stages=STAGES):
        first = reach.low_block + block * BLOCK_N
        # A key that no row sees may be NaN, so the nearest visible key is read in its place.
        if MASKED == "never":
            held = n
        else:
            held = tl.maximum(tl.minimum(first + n, reach.kv_len - 1), reach.low) - first
        k_at, v_at, row = _key_rows(first, held, source, SHAPE.page_size, BLOCK_N)
        dots = _qk_mma(queries, k_at, row, source, k_rows, k_rows_high, SHAPE, FORMATS, TILE)
        scores, factor = scale_scores(dots, scaling, SHAPE.has_cap)
        if MASKED != "never":  # noqa: SIM102 (this is known at compile time)
            if MASKED == "always" or (block < reach.full_begin) | (block >= reach.full_end):
                scores = _masked(scores, first, n, queries.position, reach, MASK)
        weights, decay, state = softmax_step(state, scores, factor)
        v = _load_values(v_at, row, source, v_rows, first + n, reach, SHAPE, FORMATS, TILE, MASKED)
        acc = tl.dot(weights.to(DTYPE), v, acc * decay[:, None], input_precision="ieee")
    return state, acc


@triton.jit
def _attend(blocks, reach, what, SHAPE: tl.constexpr, FORMATS: tl.constexpr, MASK: tl.constexpr, TILE: tl.constexpr):
    """Computes the attention over all blocks of keys that a tile sees. Only edge blocks, which some row does not see whole, are
    masked.

    Returns the state of the softmax and the accumulator.

    ``what``: the arguments of `_walk` from ``queries`` to ``scaling``.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_W: tl.constexpr = TILE.block_w
    state = no_keys_yet(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    full_begin, full_end = reach.full_begin, reach.full_end
    if TILE.edges == "apart":  # edge blocks in loops of their own; the online softmax allows any order of blocks
        if MASK.windowed:
            state, acc = _walk(state, acc, 0, full_begin, *what, SHAPE, FORMATS, MASK, TILE, "always", TILE.edge_stages)
        if TILE.edges_first:
            state, acc = _walk(state, acc, full_end, blocks, *what, SHAPE, FORMATS, MASK, TILE, "always", TILE.edge_stages)
        state, acc = _walk(state, acc, full_begin, full_end, *what, SHAPE, FORMATS, MASK, TILE, "never", TILE.stages)
        if not TILE.edges_first:
            state, acc = _walk(state, acc, full_end, blocks, *what, SHAPE, FORMATS, MASK, TILE, "always", TILE.edge_stages)
    else:
        state, acc = _walk(state, acc, 0, blocks, *what, SHAPE, FORMATS, MASK, TILE, "edges", TILE.stages)
    return state, acc


@triton.jit
def _store(out_rows, lse, sinks, v_scale, state, acc, rows, head, SHAPE: tl.constexpr, BLOCK_W: tl.constexpr):
    """Stores the attention output of a tile, and the rows' LSE unless ``lse`` is None."""
    if sinks is not None:
        decay, state = join_sink(state, tl.load(sinks + rows.q_head, mask=rows.real, other=0.0))
        factor = decay * reciprocal_of(state.row_sum)
    else:
        factor = reciprocal_of(state.row_sum)
    if v_scale is not None:
        factor *= tl.load(v_scale + head * SHAPE.v_scales)
    w = tl.arange(0, BLOCK_W)
    tl.store(
        row_of(out_rows, rows.token[:, None], rows.q_head[:, None]) + w[None, :] * out_rows.dim_stride,
        (acc * factor[:, None]).to(out_rows.first.dtype.element_ty),
        mask=rows.real[:, None] & (w < SHAPE.v_head_dim)[None, :],
    )
    if lse is not None:
        tl.store(lse + rows.token * (SHAPE.heads * SHAPE.group) + rows.q_head, log_sum_exp(state), mask=rows.real)


@triton.jit(do_not_specialize=["page_table_stride_b", "batch", "slots"])
def tiles_kernel(
    q,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    k,  # [tokens, KV_HEADS, HEAD_DIM], or [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM] if paged
    v,
    out,
    lse,  # float32 [tokens, KV_HEADS * GROUP] or None
    cu_seqlens,  # offsets of the queries
    kv_seqlens,  # paged: lengths; otherwise the keys' cu_seqlens, or None if equal to the queries' cu_seqlens
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
    k_rows,  # descriptor of k as [tokens or pages * PAGE_SIZE, KV_HEADS * HEAD_DIM], of the first D_LOW columns of a head; or None
    k_rows_high, # descriptor of the next D_HIGH columns of a head
    v_rows, # descriptor of v, or None
    slots, # number of tiles of query rows, over all sequences
    SHAPE: tl.constexpr,
    FORMATS: tl.constexpr,
    MASK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes the attention of one tile of query rows of one KV head."""
    KV_HEADS: tl.constexpr = SHAPE.heads
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
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
    sequence, start, q_len, first_row = tile_of(slot, cu_seqlens, batch, SHAPE.group, TILE.block_m, TILE.at_once)
    if first_row >= q_len * SHAPE.group:
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
    rows = _query_rows(first_row, start, q_len, kv_len, head, SHAPE.group, TILE.block_m)
    queries = _load_queries(q_rows, rows, SHAPE, FORMATS, TILE)
    scaling = scaling_of(multiplier, cap_log2, scales, head, SHAPE)
    reach, blocks = _reach_of(first_row, q_len, kv_len, window_left, SHAPE, MASK, TILE)
    k_first, v_first = _first_rows(keys, values, kv_start, head, PAGE_SIZE)
    keys = Cache(k_first, k_stride_p, k_stride_t, k_stride_h, k_stride_d)
    values = Cache(v_first, v_stride_p, v_stride_t, v_stride_h, v_stride_d)
    pages = pages_of(table, sequence) if PAGE_SIZE else None
    source = Source(keys, values, table, pages, kv_start, head)
    what = (queries, source, k_rows, k_rows_high, v_rows, reach, scaling)
    state, acc = _attend(blocks, reach, what, SHAPE, FORMATS, MASK, TILE)
    _store(out_rows, lse, sinks, scales.v, state, acc, rows, head, SHAPE, TILE.block_w)
