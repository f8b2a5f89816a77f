"""Device code of `_mla_latent`: one kernel for dense, windowed, tree-masked and sparse MLA over a paged cache of latents.

Grid: ``program_id(0) // tiles`` is a sequence, or a work item of the split-KV schedule; ``program_id(0) % tiles`` is one of its
tiles of query rows.

Tile: M query rows and all C padded latent columns. The float32 accumulator [M, C] stays in registers for the whole mainloop: 64 x
512 elements take 128 KB, half of an SM's register file on Hopper. So `_mla_schedule` assumes one program per SM/CU.

Mainloop, for each block of N keys:

1. Compute the addresses from the page numbers, which the previous iteration has loaded.
2. Load the latents [N, C] and the rotary parts [N, R], and convert them to the MMA operands' dtype.
3. QK: add the dot products of the latents and of the rotary parts, [M, N].
4. Mask the scores, and do one step of the online softmax in float32.
5. PV: the same latents are the values. The probabilities are rounded to the operands' dtype first.

With `TILE.transposed` (swap-AB), QK computes [N, M] and the accumulator is [C, M]. The wide dimension is then the M dimension of
the MMA, so that few query rows waste less of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._fp8_device import widened
from tokenspeed_kernel.triton.attention._online_softmax_device import (
    Scaling,
    Softmax,
    finite_or_zero,
    log2_sum_exp,
    log_sum_exp,
    no_keys_yet,
    reciprocal_of,
    scale_scores,
    softmax_step,
)
from tokenspeed_kernel.triton.attention._trees_device import continued, placed
from tokenspeed_kernel.triton.views_device import Pages, Rows, pages_of, row_of


@triton.jit
def _scores(q, k, acc, TRANSPOSED: tl.constexpr):
    """Returns ``q @ k.T + acc`` [M, N], or with TRANSPOSED its transpose [N, M]."""
    if TRANSPOSED:
        dots = tl.dot(k, tl.trans(q), tl.zeros([k.shape[0], q.shape[0]], tl.float32) + acc, input_precision="ieee")
    else:
        dots = tl.dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32) + acc, input_precision="ieee")
    return dots


@triton.jit
def _softmax_step_in_parts(state, scores, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Like `softmax_step`, but keeps PARTS partial row sums per row, each over a range of columns: ``row_sum`` is [M, PARTS].

    So no step reduces a row sum across warps.
    """
    row_max = tl.maximum(state.row_max, tl.max(scores, 1) * factor)
    shift = finite_or_zero(row_max)
    weights = tl.exp2(scores * factor - shift[:, None])
    decay = tl.exp2(state.row_max - shift)
    # Broadcast `decay` to the layout of the partial row sums.
    decayed = tl.reshape(tl.broadcast_to(decay[:, None], [BLOCK_M, BLOCK_N]), [BLOCK_M, PARTS, BLOCK_N // PARTS])
    row_sum = state.row_sum * tl.max(decayed, 2) + tl.sum(tl.reshape(weights, [BLOCK_M, PARTS, BLOCK_N // PARTS]), 2)
    return weights, decay, Softmax(row_max, row_sum)


@triton.jit
def _scaled(latent, scale, DTYPE: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr):
    """Dequantises latents: [N, C] times their scales [N, C / GROUP], rounded to the MMA operands' dtype."""
    N: tl.constexpr = latent.shape[0]
    C: tl.constexpr = latent.shape[1]
    groups = tl.reshape(widened(latent, tl.float32, FP8), [N, C // GROUP, GROUP])
    return tl.reshape((groups * scale[:, :, None]).to(DTYPE), [N, C])


class Tile(NamedTuple):
    """The query rows of a tile: row ``r`` of a sequence is head ``r % heads`` of the sequence's new token ``r // heads``.

    Fields:
        row, real: the indices of the rows in the sequence, and which of the rows exist.
        token, head: the index of each row's token in q, and its head.
        position, last: each query's position in the sequence, and the last key of the prefix that the query sees whole.
        nodes: bit mask of the new tokens that each query sees; used only with draft trees.
    """

    row: Any
    real: Any
    token: Any
    head: Any
    position: Any
    last: Any
    nodes: Any


class Reach(NamedTuple):
    """The range of a sequence's keys that a program reads.

    Fields:
        length: the number of the sequence's keys.
        first_new: the position of the first new token.
        low, seen: the range of keys that some row of the tile sees, end exclusive.
        begin, end: the range of key blocks that the program reads, end exclusive.
        part: the index at which the program stores its partial result; negative if the result is final (no split-KV).
    """

    length: Any
    first_new: Any
    low: Any
    seen: Any
    begin: Any
    end: Any
    part: Any


class Latents(NamedTuple):
    """Latents and rotary parts of queries ([M, C] and [M, R]) or of a block of keys ([N, C] and [N, R]).

    ``rope`` is not read if the model has no rotary parts.
    """

    latent: Any
    rope: Any


class Addresses(NamedTuple):
    """Pointers to a key block's latents [N, C] and rotary parts [N, R], and to the first scale of each key [N].

    ``scale`` is read only if the latents have group scales.
    """

    latent: Any
    rope: Any
    scale: Any


class LatentCache(NamedTuple):
    """The latent cache ``[pages, slots, rank + rope]``.

    With group scales, the cache holds latents only, ``[pages, slots, rank]``. ``scale`` and ``rope`` then point to separate tensors
    of scales and rotary parts; otherwise both are None.
    """

    first: Any
    page_stride: Any
    slot_stride: Any
    dim_stride: Any
    scale: Any
    rope: Any


@triton.constexpr_function
def _blocks_in_pages(shape, groups, tile):
    """Whether each block of keys lies in a single page, so that one page number gives the addresses of the whole block."""
    return not shape.sparse and groups is None and shape.page_size % tile.block_n == 0


@triton.jit
def _tile_of(tile, first_token, length, q_len, tree_mask, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the query rows of a sequence's tile number ``tile``, as a `Tile`."""
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < q_len * HEADS
    token = first_token + row // HEADS
    position = length - q_len + row // HEADS
    last = position
    nodes = token
    if tree_mask is not None:
        nodes = tl.load(tree_mask + token, mask=real, other=0)
        position, last = placed(nodes, position, length - q_len)
    return Tile(row, real, token, row % HEADS, position, last, nodes)


@triton.jit
def _reach_of(tile, work_item, length, q_len, window_left, tree_mask, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Returns the `Reach` of a sequence's tile number ``tile``, restricted to the keys of ``work_item`` if that is not None."""
    HEADS: tl.constexpr = SHAPE.heads
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    seen = length
    if SHAPE.causal:
        seen = tl.maximum(length - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, q_len - 1) + 1, 0)
    begin = tile * 0
    if SHAPE.sparse:
        # The minimum is always 0, but the compiler does not know this. So it keeps the branches in `_attend`, without which the
        # kernel spills 480 bytes.
        begin = tl.minimum(length, 0)
    low = begin
    if SHAPE.windowed:
        # A tree node's depth gives its position, so any node of the tile may be at the position of the first new token.
        oldest = tile * BLOCK_M // HEADS if tree_mask is None else 0
        low = tl.maximum(length - q_len + oldest - window_left, 0)
    end = (length + BLOCK_N - 1) // BLOCK_N
    part = -1
    if work_item is not None:
        begin, end, part = tl.load(work_item + 1), tl.load(work_item + 2), tl.load(work_item + 3)
    begin = tl.maximum(begin, low // BLOCK_N)
    end = tl.minimum(end, (seen + BLOCK_N - 1) // BLOCK_N)
    return Reach(length, length - q_len, low, seen, begin, end, part)


@triton.jit
def _load_queries(q_rows, tile, SHAPE: tl.constexpr, FORMATS: tl.constexpr, TILE: tl.constexpr):
    """Loads the queries of a tile as `Latents`, in the MMA operands' dtype."""
    DTYPE: tl.constexpr = FORMATS.dtype
    Q_FP8: tl.constexpr = FORMATS.q_fp8
    RANK: tl.constexpr = SHAPE.rank
    ROPE: tl.constexpr = SHAPE.rope
    c = tl.arange(0, TILE.block_c)
    r = tl.arange(0, TILE.block_r)
    q_at = row_of(q_rows, tile.token, tile.head)
    latent = tl.load(q_at[:, None] + c[None, :] * q_rows.dim_stride, mask=tile.real[:, None] & (c < RANK)[None, :], other=0.0)
    if ROPE > 0:
        rope_at = q_at[:, None] + (RANK + r)[None, :] * q_rows.dim_stride
        rope = tl.load(rope_at, mask=tile.real[:, None] & (r < ROPE)[None, :], other=0.0)
    latent = widened(latent, DTYPE, Q_FP8)
    if ROPE > 0:
        rope = widened(rope, DTYPE, Q_FP8)
    else:
        rope = latent
    return Latents(latent, rope)


@triton.jit
def _scaling_of(multiplier, cap_log2, q_scale, kv_scale):
    """Returns the `Scaling` of scores. Its multiplier includes the per-tensor scales of the queries and of the cache."""
    if q_scale is not None:
        multiplier *= tl.load(q_scale)
    if kv_scale is not None:
        multiplier *= tl.load(kv_scale)
    return Scaling(multiplier, cap_log2)


@triton.jit
def _nothing_yet(TILE: tl.constexpr):
    """Returns ``(state, acc)`` before the first block of keys. The accumulator is [M, C], or [C, M] if transposed."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_C: tl.constexpr = TILE.block_c
    PARTS: tl.constexpr = TILE.parts
    if PARTS == 1:
        state = no_keys_yet(BLOCK_M)
    else:
        state = Softmax(tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M, PARTS], tl.float32))
    if TILE.transposed:
        acc = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    return state, acc


@triton.jit
def _first_lookup(pages, page_stride, reach, SHAPE: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Loads the first block's entries of the page table.

    With sparse attention, returns the slot of each key. If each block lies in one page, returns that page's number. Otherwise
    returns 0, which is not read.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    found = reach.begin * 0
    if SHAPE.sparse:
        key = reach.begin * BLOCK_N + tl.arange(0, BLOCK_N)
        found = tl.load(pages + key * page_stride, mask=key < reach.length, other=-1)
    if _blocks_in_pages(SHAPE, GROUPS, TILE) and reach.begin < reach.end:
        found = tl.load(pages + reach.begin // (SHAPE.page_size // BLOCK_N) * page_stride)
    return found


@triton.jit
def _next_lookup(found, block, pages, page_stride, reach, SHAPE: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Like `_first_lookup`, but for the block after ``block``, so that the load is in flight during ``block``.

    ``found``: the lookup's result for ``block``; returned unchanged where nothing is looked up.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    if SHAPE.sparse:
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        found = tl.load(pages + (key + BLOCK_N) * page_stride, mask=key + BLOCK_N < reach.length, other=-1)
    elif _blocks_in_pages(SHAPE, GROUPS, TILE):
        found = tl.load(pages + tl.minimum(block + 1, reach.end - 1) // (SHAPE.page_size // BLOCK_N) * page_stride)
    return found


@triton.jit
def _addresses(block, found, cache, pages, page_stride, reach, SHAPE: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Returns the `Addresses` of a block of keys. ``found``: the result of `_first_lookup` or `_next_lookup` for this block."""
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    BLOCK_N: tl.constexpr = TILE.block_n
    c = tl.arange(0, TILE.block_c)
    r = tl.arange(0, TILE.block_r)
    # A key that no query sees may be NaN, so the nearest visible key is read in its place.
    held = tl.minimum(tl.arange(0, BLOCK_N), reach.seen - 1 - block * BLOCK_N)
    if SHAPE.windowed:
        held = tl.maximum(held, reach.low - block * BLOCK_N)
    if _blocks_in_pages(SHAPE, GROUPS, TILE):
        block_at = cache.first + found.to(tl.int64) * cache.page_stride
        block_at += block % (PAGE_SIZE // BLOCK_N) * (BLOCK_N * cache.slot_stride)
        latent_at = block_at + (held[:, None] * cache.slot_stride + c[None, :] * cache.dim_stride)
        rope_at = block_at + (held[:, None] * cache.slot_stride + (SHAPE.rank + r)[None, :] * cache.dim_stride)
        scale_at = latent_at
    else:
        if SHAPE.sparse:
            slot = tl.maximum(found, 0)
            page, offset = (slot // PAGE_SIZE).to(tl.int64), slot % PAGE_SIZE
        else:
            held += block * BLOCK_N
            page = tl.load(pages + held // PAGE_SIZE * page_stride).to(tl.int64)
            offset = held % PAGE_SIZE
        key_at = cache.first + (page * cache.page_stride + offset * cache.slot_stride)
        latent_at = key_at[:, None] + c[None, :] * cache.dim_stride
        rope_at = key_at[:, None] + (SHAPE.rank + r)[None, :] * cache.dim_stride
        scale_at = key_at
        if GROUPS is not None:
            rope_rows = cache.rope + (page * GROUPS.rope_page + offset * GROUPS.rope_slot)
            rope_at = rope_rows[:, None] + r[None, :] * GROUPS.rope_dim
            scale_at = cache.scale + (page * GROUPS.scale_page + offset * GROUPS.scale_slot)
    return Addresses(latent_at, rope_at, scale_at)


@triton.jit
def _load_keys(at, named, SHAPE: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Loads a block of keys as stored. Returns their `Latents`, and the latents' scales [N, C / group] (1.0 without group scales).

    ``named``: with sparse attention, which keys of the block have an index (not -1). Slots without an index may hold NaN, so they
    are not read.
    """
    RANK: tl.constexpr = SHAPE.rank
    ROPE: tl.constexpr = SHAPE.rope
    SPARSE: tl.constexpr = SHAPE.sparse
    c = tl.arange(0, TILE.block_c)
    r = tl.arange(0, TILE.block_r)
    scale = 1.0
    if GROUPS is not None:
        g = tl.arange(0, TILE.block_c // GROUPS.group)
        scale_there = (g < RANK // GROUPS.group)[None, :]
        if SPARSE:
            scale_there &= named[:, None]
        scale = tl.load(at.scale[:, None] + g[None, :] * GROUPS.scale_group, mask=scale_there, other=0.0)
    if SPARSE:
        latent = tl.load(at.latent, mask=named[:, None] & (c < RANK)[None, :], other=0.0)
    elif TILE.block_c == RANK:
        latent = tl.load(at.latent)
    else:
        latent = tl.load(at.latent, mask=(c < RANK)[None, :], other=0.0)
    if SPARSE and ROPE > 0:
        rope = tl.load(at.rope, mask=named[:, None] & (r < ROPE)[None, :], other=0.0)
    elif TILE.block_r == ROPE:
        rope = tl.load(at.rope)
    elif ROPE > 0:
        rope = tl.load(at.rope, mask=(r < ROPE)[None, :], other=0.0)
    else:
        rope = latent
    return Latents(latent, rope), scale


@triton.jit
def _dequantised(stored, scale, SHAPE: tl.constexpr, GROUPS: tl.constexpr, FORMATS: tl.constexpr):
    """Converts stored keys to `Latents` in the MMA operands' dtype, with their scales applied."""
    DTYPE: tl.constexpr = FORMATS.dtype
    KV_FP8: tl.constexpr = FORMATS.kv_fp8
    rope = stored.rope
    if GROUPS is not None:
        latent = _scaled(stored.latent, scale, DTYPE, KV_FP8, GROUPS.group)
        if SHAPE.rope > 0:
            rope = stored.rope.to(DTYPE)
    else:
        latent = widened(stored.latent, DTYPE, KV_FP8)
        if SHAPE.rope > 0:
            rope = widened(stored.rope, DTYPE, KV_FP8)
    return Latents(latent, rope)


@triton.jit
def _qk_mma(block, queries, keys, end, ROPE: tl.constexpr, TILE: tl.constexpr):
    """Returns the dot products of the tile's queries and a block of keys, [M, N]: those of the latents plus those of the rotary
    parts."""
    if TILE.apart:
        # Both conditions below always hold, so the else branch never runs. The compiler chooses a dot's warp layout by the uses of
        # its result, up to the end of a branch. Without the branches, the scores would get the layout for the PV MMA: all warps in
        # one column. Both halves of the warps would then compute the same scores. The compiler keeps the branches, because the code
        # in them is too expensive to hoist.
        if block < end:
            dots = _scores(queries.rope, keys.rope, 0.0, TILE.transposed)
        else:
            dots = _scores(queries.rope, keys.rope, 1.0, TILE.transposed)
        if block >= 0:
            dots = _scores(queries.latent, keys.latent, dots, TILE.transposed)
    else:
        dots = _scores(queries.latent, keys.latent, 0.0, TILE.transposed)
        if ROPE > 0:
            dots = _scores(queries.rope, keys.rope, dots, TILE.transposed)
    if TILE.transposed:
        dots = tl.trans(dots)
    return dots


@triton.jit
def _visible(key, named, tile, reach, window_left, tree_mask, SHAPE: tl.constexpr):
    """Returns the mask of a block of keys: which keys each query row sees, [M, N], or [1, N] if all rows see the same keys."""
    if SHAPE.sparse:
        visible = named[None, :]
    elif SHAPE.causal:
        visible = key[None, :] <= tile.last[:, None]
    else:
        visible = (key < reach.length)[None, :]
    if SHAPE.windowed:
        visible &= key[None, :] >= tile.position[:, None] - window_left
    if tree_mask is not None:
        visible |= continued(tile.nodes, key, reach.first_new, reach.length)
    return visible


@triton.jit
def _accumulate(state, acc, scores, factor, values, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Performs one online-softmax step, then computes ``acc * decay + weights @ values``. Returns ``(state, acc)``."""
    if TILE.parts == 1:
        weights, decay, state = softmax_step(state, scores, factor)
    else:
        weights, decay, state = _softmax_step_in_parts(state, scores, factor, TILE.block_m, TILE.block_n, TILE.parts)
    weights = weights.to(DTYPE)
    if TILE.transposed:
        acc = tl.dot(tl.trans(values), tl.trans(weights), acc * decay[None, :], input_precision="ieee")
    else:
        acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")
    return state, acc


@triton.jit
def _attend(
    queries,
    cache,
    table,
    sequence,
    tile,
    reach,
    scaling,
    window_left,
    tree_mask,
    SHAPE: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMATS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Runs the mainloop: computes the attention of a tile over the key blocks of its `Reach`. Returns the softmax state and the
    accumulator."""
    DTYPE: tl.constexpr = FORMATS.dtype
    pages = pages_of(table, sequence)
    state, acc = _nothing_yet(TILE)
    found = _first_lookup(pages, table.page_stride, reach, SHAPE, GROUPS, TILE)
    for block in tl.range(reach.begin, reach.end, num_stages=TILE.stages):
        key = block * TILE.block_n + tl.arange(0, TILE.block_n)
        named = None
        if SHAPE.sparse:
            named = found >= 0
        at = _addresses(block, found, cache, pages, table.page_stride, reach, SHAPE, GROUPS, TILE)
        found = _next_lookup(found, block, pages, table.page_stride, reach, SHAPE, GROUPS, TILE)
        stored, scale = _load_keys(at, named, SHAPE, GROUPS, TILE)
        # This condition always holds. The compiler places the branch after the loads of the next block, so these loads are in
        # flight during the dots. Without the branch, the compiler places the loads after the dots.
        if block >= reach.begin:
            keys = _dequantised(stored, scale, SHAPE, GROUPS, FORMATS)
            dots = _qk_mma(block, queries, keys, reach.end, SHAPE.rope, TILE)
            visible = _visible(key, named, tile, reach, window_left, tree_mask, SHAPE)
            scores, factor = scale_scores(dots, scaling, SHAPE.has_cap)
            scores = tl.where(visible, scores, -float("inf"))
            state, acc = _accumulate(state, acc, scores, factor, keys.latent, DTYPE, TILE)
    if TILE.parts > 1:
        state = Softmax(state.row_max, tl.sum(state.row_sum, 1))
    if TILE.transposed:
        acc = tl.trans(acc)
    return state, acc


@triton.jit
def _store_partial(partial, partial_lse, state, acc, tile, part, q_bound, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Stores a work item's partial attention output (float32), and its LSE in base 2, for the split-KV merge."""
    c = tl.arange(0, TILE.block_c)
    at_row = part.to(tl.int64) * (q_bound * SHAPE.heads) + tile.row
    tl.store(partial_lse + at_row, log2_sum_exp(state), mask=tile.real)
    stored = tile.real[:, None] & (c < SHAPE.rank)[None, :]
    tl.store(partial + at_row[:, None] * SHAPE.rank + c[None, :], acc, mask=stored)


@triton.jit
def _store(out_rows, lse, state, acc, tile, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Stores the final attention output of a tile, and the rows' LSE unless ``lse`` is None."""
    c = tl.arange(0, TILE.block_c)
    out_offset = tile.token * out_rows.token_stride + tile.head * out_rows.head_stride
    out_at = out_rows.first + out_offset[:, None] + c[None, :] * out_rows.dim_stride
    stored = tile.real[:, None] & (c < SHAPE.rank)[None, :]
    tl.store(out_at, acc.to(out_rows.first.dtype.element_ty), mask=stored)
    if lse is not None:
        tl.store(lse + tile.token * SHAPE.heads + tile.head, log_sum_exp(state), mask=tile.real)


@triton.jit(do_not_specialize=["batch", "capacity", "q_bound", "window_left", "tiles"])
def attend_latent_kernel(
    q,  # [tokens, HEADS, RANK + ROPE]
    kv_cache,  # [pages, PAGE_SIZE, RANK + ROPE], or with GROUPS [pages, PAGE_SIZE, RANK]
    kv_scale_cache,  # [pages, PAGE_SIZE, RANK / GROUPS.group], or None
    rope_cache,  # [pages, PAGE_SIZE, ROPE], or None
    page_table,  # [batch, max_pages]
    cache_seqlens,
    cu_seqlens_q,  # None if every sequence has q_bound queries
    tree_mask,  # int64 [tokens], or None
    q_scale,
    kv_scale,
    out,
    lse,
    work_items,  # the work items of a `Schedule`, or None if every sequence is one work item
    partial,
    partial_lse,
    q_stride_t, q_stride_h, q_stride_d,
    kv_stride_p, kv_stride_t: tl.constexpr, kv_stride_d,
    page_table_stride_b, page_table_stride_p,
    out_stride_t, out_stride_h, out_stride_d,
    batch,
    capacity,
    q_bound,
    window_left,
    tiles,
    multiplier,
    cap_log2,
    SHAPE: tl.constexpr,
    GROUPS: tl.constexpr,
    FORMATS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes the attention of one tile of a sequence's query rows over all keys of the sequence, or over the keys of one work
    item.

    If the work item is the whole sequence, the program writes the final ``out`` and ``lse`` (natural logarithm). Otherwise it
    writes a normalised float32 partial result and its LSE in base 2, which `merge_partials` merges.
    """
    HEADS: tl.constexpr = SHAPE.heads
    BLOCK_M: tl.constexpr = TILE.block_m
    q_rows = Rows(q, q_stride_t, q_stride_h, q_stride_d)
    out_rows = Rows(out, out_stride_t, out_stride_h, out_stride_d)
    cache = LatentCache(kv_cache, kv_stride_p, kv_stride_t, kv_stride_d, kv_scale_cache, rope_cache)
    table = Pages(page_table, page_table_stride_b, page_table_stride_p)
    if TILE.early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait for the schedule
    # Tiles that read the same keys are adjacent in the grid, so that the second tile's loads hit L2.
    sequence = tl.program_id(0) // tiles
    number = tl.program_id(0) % tiles
    work_item = None
    if work_items is not None:
        work_item = work_items + tl.program_id(0) // tiles * 4
        sequence = tl.load(work_item)
        if sequence < 0:
            return
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + sequence), 0), capacity)
    if cu_seqlens_q is None:
        q_len = q_bound
        first_token = sequence.to(tl.int64) * q_len
    else:
        number = tiles - 1 - number  # later tiles see more keys, and are scheduled first
        first_token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        q_len = tl.load(cu_seqlens_q + sequence + 1) - first_token.to(tl.int32)
        if number * BLOCK_M >= q_len * HEADS:
            return
    tile = _tile_of(number, first_token, length, q_len, tree_mask, HEADS, BLOCK_M)
    reach = _reach_of(number, work_item, length, q_len, window_left, tree_mask, SHAPE, TILE)
    queries = _load_queries(q_rows, tile, SHAPE, FORMATS, TILE)
    scaling = _scaling_of(multiplier, cap_log2, q_scale, kv_scale)
    state, acc = _attend(
        queries, cache, table, sequence, tile, reach, scaling, window_left, tree_mask, SHAPE, GROUPS, FORMATS, TILE
    )
    acc *= reciprocal_of(state.row_sum)[:, None]
    if kv_scale is not None:
        acc *= tl.load(kv_scale)
    if work_items is not None and reach.part >= 0:
        _store_partial(partial, partial_lse, state, acc, tile, reach.part, q_bound, SHAPE, TILE)
        return
    _store(out_rows, lse, state, acc, tile, SHAPE, TILE)
