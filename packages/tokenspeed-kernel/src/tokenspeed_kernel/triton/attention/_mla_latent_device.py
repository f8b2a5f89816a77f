"""Device code of `_mla_latent`."""

from __future__ import annotations

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
    """``q @ k.T + acc`` [M, N], or its transpose."""
    if TRANSPOSED:
        dots = tl.dot(k, tl.trans(q), tl.zeros([k.shape[0], q.shape[0]], tl.float32) + acc, input_precision="ieee")
    else:
        dots = tl.dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32) + acc, input_precision="ieee")
    return dots


@triton.jit
def _softmax_step_in_parts(state, scores, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """`softmax_step` with ``row_sum`` [M, PARTS]: partial sums over PARTS ranges of columns, without a reduction across warps."""
    row_max = tl.maximum(state.row_max, tl.max(scores, 1) * factor)
    shift = finite_or_zero(row_max)
    weights = tl.exp2(scores * factor - shift[:, None])
    decay = tl.exp2(state.row_max - shift)
    # `decay` in the layout of the row sums.
    decayed = tl.reshape(tl.broadcast_to(decay[:, None], [BLOCK_M, BLOCK_N]), [BLOCK_M, PARTS, BLOCK_N // PARTS])
    row_sum = state.row_sum * tl.max(decayed, 2) + tl.sum(tl.reshape(weights, [BLOCK_M, PARTS, BLOCK_N // PARTS]), 2)
    return weights, decay, Softmax(row_max, row_sum)


@triton.jit
def _scaled(latent, scale, DTYPE: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr):
    """Latents [N, C] times their scales [N, C / GROUP], rounded to the dtype of the dots."""
    N: tl.constexpr = latent.shape[0]
    C: tl.constexpr = latent.shape[1]
    groups = tl.reshape(widened(latent, tl.float32, FP8), [N, C // GROUP, GROUP])
    return tl.reshape((groups * scale[:, :, None]).to(DTYPE), [N, C])


@triton.jit(do_not_specialize=["batch", "capacity", "q_bound", "window_left", "tiles"])
def attend_latent_kernel(
    q,  # [tokens, HEADS, RANK + ROPE]
    kv_cache,  # [pages, PAGE_SIZE, RANK + ROPE], or with GROUPS [pages, PAGE_SIZE, RANK]
    kv_scale_cache,  # [pages, PAGE_SIZE, RANK / GROUPS.group], or None
    rope_cache,  # [pages, PAGE_SIZE, ROPE], or None
    page_table,  # [batch, max_pages]
    cache_seqlens,
    cu_seqlens_q,  # None where every sequence has Q_LEN queries
    tree_mask,  # int64 [tokens], or None
    q_scale,
    kv_scale,
    out,
    lse,
    work_items,  # those of a `Schedule`, or None where every sequence is one work item
    partial,
    partial_lse,
    q_stride_t,
    q_stride_h,
    q_stride_d,
    kv_stride_p,
    kv_stride_t: tl.constexpr,
    kv_stride_d,
    page_table_stride_b,
    page_table_stride_p,
    out_stride_t,
    out_stride_h,
    out_stride_d,
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
):
    """One tile of the rows of a sequence, over all of its keys or over the keys of one work item."""
    HEADS: tl.constexpr = SHAPE.heads
    RANK: tl.constexpr = SHAPE.rank
    ROPE: tl.constexpr = SHAPE.rope
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    CAUSAL: tl.constexpr = SHAPE.causal
    WINDOWED: tl.constexpr = SHAPE.windowed
    SPARSE: tl.constexpr = SHAPE.sparse
    APART: tl.constexpr = GROUPS is not None  # scales and rotary parts are in tensors of their own
    IN_PAGES: tl.constexpr = not SPARSE and not APART and PAGE_SIZE % TILE.block_n == 0  # each block of keys is in one page
    DTYPE: tl.constexpr = FORMATS.dtype
    Q_FP8: tl.constexpr = FORMATS.q_fp8
    FP8: tl.constexpr = FORMATS.kv_fp8
    TRANSPOSED: tl.constexpr = TILE.transposed
    PARTS: tl.constexpr = TILE.parts
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_C: tl.constexpr = TILE.block_c
    BLOCK_R: tl.constexpr = TILE.block_r
    q_rows = Rows(q, q_stride_t, q_stride_h, q_stride_d)
    out_rows = Rows(out, out_stride_t, out_stride_h, out_stride_d)
    table = Pages(page_table, page_table_stride_b, page_table_stride_p)
    if TILE.early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # wait for the schedule
    # Tiles of the same keys are adjacent in the grid, so that the second tile's loads hit L2.
    sequence = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
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
        tile = tiles - 1 - tile  # later queries see more keys, and are scheduled first
        first_token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        q_len = tl.load(cu_seqlens_q + sequence + 1) - first_token.to(tl.int32)
        if tile * BLOCK_M >= q_len * HEADS:
            return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < q_len * HEADS
    token = first_token + row // HEADS
    head = row % HEADS
    position = length - q_len + row // HEADS
    last = position  # the last key up to which a query sees all keys
    if tree_mask is not None:
        nodes = tl.load(tree_mask + token, mask=real, other=0)
        position, last = placed(nodes, position, length - q_len)
    seen = length
    if CAUSAL:
        seen = tl.maximum(length - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, q_len - 1) + 1, 0)
    begin = tile * 0
    if SPARSE:
        # This is 0 too, but the compiler does not know, and keeps the branches below. Without them it spills 480 bytes per thread.
        begin = tl.minimum(length, 0)
    low = begin
    if WINDOWED:  # the first key that some query sees
        # The distance of a tree node to the preceding tokens is its depth, which may be 0.
        oldest = tile * BLOCK_M // HEADS if tree_mask is None else 0
        low = tl.maximum(length - q_len + oldest - window_left, 0)
    end = (length + BLOCK_N - 1) // BLOCK_N
    if work_items is not None:
        begin, end, part = tl.load(work_item + 1), tl.load(work_item + 2), tl.load(work_item + 3)
    begin = tl.maximum(begin, low // BLOCK_N)
    end = tl.minimum(end, (seen + BLOCK_N - 1) // BLOCK_N)

    c = tl.arange(0, BLOCK_C)
    q_at = row_of(q_rows, token, head)
    q_latent = tl.load(q_at[:, None] + c[None, :] * q_rows.dim_stride, mask=real[:, None] & (c < RANK)[None, :], other=0.0)
    r = tl.arange(0, BLOCK_R)
    if ROPE > 0:
        q_rope_at = q_at[:, None] + (RANK + r)[None, :] * q_rows.dim_stride
        q_rope = tl.load(q_rope_at, mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    q_latent = widened(q_latent, DTYPE, Q_FP8)
    if ROPE > 0:
        q_rope = widened(q_rope, DTYPE, Q_FP8)
    if q_scale is not None:
        multiplier *= tl.load(q_scale)
    if kv_scale is not None:
        multiplier *= tl.load(kv_scale)
    scaling = Scaling(multiplier, cap_log2)

    pages = pages_of(table, sequence)
    n = tl.arange(0, BLOCK_N)
    if PARTS == 1:
        state = no_keys_yet(BLOCK_M)
    else:
        state = Softmax(tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M, PARTS], tl.float32))
    if TRANSPOSED:
        acc = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    page = begin * 0
    if SPARSE:  # the slots of a block are loaded during the block before it
        slots = tl.load(pages + (begin * BLOCK_N + n) * table.page_stride, mask=begin * BLOCK_N + n < length, other=-1)
    if IN_PAGES and begin < end:
        page = tl.load(pages + begin // (PAGE_SIZE // BLOCK_N) * table.page_stride)
    for block in tl.range(begin, end, num_stages=TILE.stages):
        # A key that no query sees may be NaN and is not read: the nearest visible key is read instead.
        key = block * BLOCK_N + n
        held = tl.minimum(n, seen - 1 - block * BLOCK_N)
        if WINDOWED:
            held = tl.maximum(held, low - block * BLOCK_N)
        if SPARSE:
            named = slots >= 0
            slot = tl.maximum(slots, 0)
            key_at = kv_cache + ((slot // PAGE_SIZE).to(tl.int64) * kv_stride_p + slot % PAGE_SIZE * kv_stride_t)
            latent_at = key_at[:, None] + c[None, :] * kv_stride_d
            rope_at = key_at[:, None] + (RANK + r)[None, :] * kv_stride_d
            if APART:
                page_of, offset = (slot // PAGE_SIZE).to(tl.int64), slot % PAGE_SIZE
            slots = tl.load(pages + (key + BLOCK_N) * table.page_stride, mask=key + BLOCK_N < length, other=-1)
        elif IN_PAGES:
            block_at = kv_cache + page.to(tl.int64) * kv_stride_p + block % (PAGE_SIZE // BLOCK_N) * (BLOCK_N * kv_stride_t)
            latent_at = block_at + (held[:, None] * kv_stride_t + c[None, :] * kv_stride_d)
            rope_at = block_at + (held[:, None] * kv_stride_t + (RANK + r)[None, :] * kv_stride_d)
            page = tl.load(pages + tl.minimum(block + 1, end - 1) // (PAGE_SIZE // BLOCK_N) * table.page_stride)
        else:
            held += block * BLOCK_N
            page_of = tl.load(pages + held // PAGE_SIZE * table.page_stride).to(tl.int64)
            key_at = kv_cache + (page_of * kv_stride_p + held % PAGE_SIZE * kv_stride_t)
            latent_at = key_at[:, None] + c[None, :] * kv_stride_d
            rope_at = key_at[:, None] + (RANK + r)[None, :] * kv_stride_d
            if APART:
                offset = held % PAGE_SIZE
        if APART:
            rope_of = rope_cache + (page_of * GROUPS.rope_page + offset * GROUPS.rope_slot)
            rope_at = rope_of[:, None] + r[None, :] * GROUPS.rope_dim
            g = tl.arange(0, BLOCK_C // GROUPS.group)
            scale_of = kv_scale_cache + (page_of * GROUPS.scale_page + offset * GROUPS.scale_slot)
            scale_there = (g < RANK // GROUPS.group)[None, :]
            if SPARSE:
                scale_there &= named[:, None]
            scale = tl.load(scale_of[:, None] + g[None, :] * GROUPS.scale_group, mask=scale_there, other=0.0)
        if SPARSE:  # a slot that no index names may hold NaN
            latent = tl.load(latent_at, mask=named[:, None] & (c < RANK)[None, :], other=0.0)
        elif BLOCK_C == RANK:
            latent = tl.load(latent_at)
        else:
            latent = tl.load(latent_at, mask=(c < RANK)[None, :], other=0.0)
        if SPARSE and ROPE > 0:
            rope = tl.load(rope_at, mask=named[:, None] & (r < ROPE)[None, :], other=0.0)
        elif BLOCK_R == ROPE:
            rope = tl.load(rope_at)
        elif ROPE > 0:
            rope = tl.load(rope_at, mask=(r < ROPE)[None, :], other=0.0)
        # This condition always holds. The compiler places a branch after the loads of the next block, which are then in flight
        # during the dots. Without the branch it places those loads after the dots.
        if block >= begin:
            if APART:
                values = _scaled(latent, scale, DTYPE, FP8, GROUPS.group)
                if ROPE > 0:
                    rotary = rope.to(DTYPE)
            else:
                values = widened(latent, DTYPE, FP8)
                if ROPE > 0:
                    rotary = widened(rope, DTYPE, FP8)
            if TILE.apart:
                # These conditions always hold, too. The compiler chooses a dot's warp layout by the uses of its result, up to the
                # end of a branch. The layout for the second dot would put all warps in one column, and the two halves of the warps
                # would compute the same scores. The branches that never run hold code that is too expensive to be hoisted.
                if block < end:
                    dots = _scores(q_rope, rotary, 0.0, TRANSPOSED)
                else:
                    dots = _scores(q_rope, rotary, 1.0, TRANSPOSED)
                if block >= 0:
                    dots = _scores(q_latent, values, dots, TRANSPOSED)
            else:
                dots = _scores(q_latent, values, 0.0, TRANSPOSED)
                if ROPE > 0:
                    dots = _scores(q_rope, rotary, dots, TRANSPOSED)
            if TRANSPOSED:
                dots = tl.trans(dots)
            if SPARSE:
                visible = named[None, :]
            elif CAUSAL:
                visible = key[None, :] <= last[:, None]
            else:
                visible = (key < length)[None, :]
            if WINDOWED:
                visible &= key[None, :] >= position[:, None] - window_left
            if tree_mask is not None:
                visible |= continued(nodes, key, length - q_len, length)
            scores, factor = scale_scores(dots, scaling, SHAPE.has_cap)
            scores = tl.where(visible, scores, -float("inf"))
            if PARTS == 1:
                weights, decay, state = softmax_step(state, scores, factor)
            else:
                weights, decay, state = _softmax_step_in_parts(state, scores, factor, BLOCK_M, BLOCK_N, PARTS)
            weights = weights.to(DTYPE)
            if TRANSPOSED:
                acc = tl.dot(tl.trans(values), tl.trans(weights), acc * decay[None, :], input_precision="ieee")
            else:
                acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")

    if PARTS > 1:
        state = Softmax(state.row_max, tl.sum(state.row_sum, 1))
    if TRANSPOSED:
        acc = tl.trans(acc)
    acc *= reciprocal_of(state.row_sum)[:, None]
    if kv_scale is not None:
        acc *= tl.load(kv_scale)
    stored = real[:, None] & (c < RANK)[None, :]
    if work_items is not None and part >= 0:
        at_row = part.to(tl.int64) * (q_bound * HEADS) + row
        tl.store(partial_lse + at_row, log2_sum_exp(state), mask=real)
        tl.store(partial + at_row[:, None] * RANK + c[None, :], acc, mask=stored)
        return
    out_offset = token * out_rows.token_stride + head * out_rows.head_stride
    out_at = out + out_offset[:, None] + c[None, :] * out_rows.dim_stride
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=stored)
    if lse is not None:
        tl.store(lse + token * HEADS + head, log_sum_exp(state), mask=real)
