"""Device code of `_mla_latent`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention import _online_softmax_device as softmax
from tokenspeed_kernel.triton.attention._fp8_device import widened


@triton.jit
def _scores(q, k, acc, TRANSPOSED: tl.constexpr):
    """``q @ k.T + acc`` [M, N], or its transpose."""
    if TRANSPOSED:
        products = tl.dot(k, tl.trans(q), tl.zeros([k.shape[0], q.shape[0]], tl.float32) + acc, input_precision="ieee")
    else:
        products = tl.dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32) + acc, input_precision="ieee")
    return products


@triton.jit(do_not_specialize=["batch", "capacity", "q_bound", "tiles"])
def attend_latent_kernel(
    q,  # [tokens, HEADS, RANK + ROPE]
    kv_cache,  # [pages, PAGE_SIZE, RANK + ROPE]
    page_table,  # [batch, max_pages]
    cache_seqlens,
    cu_seqlens_q,  # None where every sequence has Q_LEN queries
    q_scale,
    kv_scale,
    out,
    lse,
    units,  # a `Schedule`'s, or None where every sequence is one
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
    tiles,
    multiplier,
    cap_log2,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    Q_FP8: tl.constexpr,
    FP8: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    APART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One tile of the rows of a sequence, and all of its keys or a unit of them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # for the schedule
    # Tiles of the same keys lie side by side: the second finds them in the cache of the device.
    sequence = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if units is not None:
        unit = units + tl.program_id(0) // tiles * 4
        sequence = tl.load(unit)
        if sequence < 0:
            return
    length = tl.minimum(tl.maximum(tl.load(cache_seqlens + sequence), 0), capacity)
    if cu_seqlens_q is None:
        q_len = q_bound
        first_token = sequence.to(tl.int64) * q_len
    else:
        tile = tiles - 1 - tile  # the later queries see the most keys
        first_token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
        q_len = tl.load(cu_seqlens_q + sequence + 1) - first_token.to(tl.int32)
        if tile * BLOCK_M >= q_len * HEADS:
            return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < q_len * HEADS
    token = first_token + row // HEADS
    head = row % HEADS
    position = length - q_len + row // HEADS
    seen = length
    if CAUSAL:
        seen = tl.maximum(length - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, q_len - 1) + 1, 0)
    begin = tile * 0
    end = (length + BLOCK_N - 1) // BLOCK_N
    if units is not None:
        begin, end, part = tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3)
    end = tl.minimum(end, (seen + BLOCK_N - 1) // BLOCK_N)

    c = tl.arange(0, BLOCK_C)
    q_at = q + token * q_stride_t + head * q_stride_h
    q_latent = tl.load(q_at[:, None] + c[None, :] * q_stride_d, mask=real[:, None] & (c < RANK)[None, :], other=0.0)
    r = tl.arange(0, BLOCK_R)
    if ROPE > 0:
        q_rope_at = q_at[:, None] + (RANK + r)[None, :] * q_stride_d
        q_rope = tl.load(q_rope_at, mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    q_latent = widened(q_latent, DTYPE, Q_FP8)
    if ROPE > 0:
        q_rope = widened(q_rope, DTYPE, Q_FP8)
    if q_scale is not None:
        multiplier *= tl.load(q_scale)
    if kv_scale is not None:
        multiplier *= tl.load(kv_scale)

    pages = page_table + sequence.to(tl.int64) * page_table_stride_b
    n = tl.arange(0, BLOCK_N)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if PARTS == 1:
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, PARTS], tl.float32)
    if TRANSPOSED:
        acc = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    page = begin * 0
    if PAGE_SIZE % BLOCK_N == 0 and begin < end:
        page = tl.load(pages + begin // (PAGE_SIZE // BLOCK_N) * page_table_stride_p)
    for block in tl.range(begin, end, num_stages=STAGES):
        # Keys that no query sees are not read, as they may be NaN: the last one that some query sees stands in.
        key = block * BLOCK_N + n
        held = tl.minimum(n, seen - 1 - block * BLOCK_N)
        if PAGE_SIZE % BLOCK_N == 0:
            block_at = kv_cache + page.to(tl.int64) * kv_stride_p + block % (PAGE_SIZE // BLOCK_N) * (BLOCK_N * kv_stride_t)
            latent_at = block_at + (held[:, None] * kv_stride_t + c[None, :] * kv_stride_d)
            rope_at = block_at + (held[:, None] * kv_stride_t + (RANK + r)[None, :] * kv_stride_d)
            page = tl.load(pages + tl.minimum(block + 1, end - 1) // (PAGE_SIZE // BLOCK_N) * page_table_stride_p)
        else:
            held += block * BLOCK_N
            page_of = tl.load(pages + held // PAGE_SIZE * page_table_stride_p).to(tl.int64)
            key_at = kv_cache + (page_of * kv_stride_p + held % PAGE_SIZE * kv_stride_t)
            latent_at = key_at[:, None] + c[None, :] * kv_stride_d
            rope_at = key_at[:, None] + (RANK + r)[None, :] * kv_stride_d
        if BLOCK_C == RANK:
            latent = tl.load(latent_at)
        else:
            latent = tl.load(latent_at, mask=(c < RANK)[None, :], other=0.0)
        if BLOCK_R == ROPE:
            rope = tl.load(rope_at)
        elif ROPE > 0:
            rope = tl.load(rope_at, mask=(r < ROPE)[None, :], other=0.0)
        # Always so. But what is in a branch comes behind the loads of the next block, which are then on the way meanwhile; without,
        # the compiler puts them behind the products.
        if block >= begin:
            values = widened(latent, DTYPE, FP8)
            if ROPE > 0:
                rotary = widened(rope, DTYPE, FP8)
            if APART:
                # Always so, again. The compiler lays the warps out for a product by what its result leads to, as far as a branch's
                # end: for another product, in a column, each half of the warps would repeat the other's scores. The other branches
                # hold what costs enough not to be moved out.
                if block < end:
                    products = _scores(q_rope, rotary, 0.0, TRANSPOSED)
                else:
                    products = _scores(q_rope, rotary, 1.0, TRANSPOSED)
                if block >= 0:
                    products = _scores(q_latent, values, products, TRANSPOSED)
            else:
                products = _scores(q_latent, values, 0.0, TRANSPOSED)
                if ROPE > 0:
                    products = _scores(q_rope, rotary, products, TRANSPOSED)
            if TRANSPOSED:
                products = tl.trans(products)
            if CAUSAL:
                visible = key[None, :] <= position[:, None]
            else:
                visible = (key < length)[None, :]
            scores, factor = softmax.scored(products, multiplier, cap_log2, HAS_CAP)
            scores = tl.where(visible, scores, -float("inf"))
            if PARTS == 1:
                weights, decay, largest, total = softmax.step_scored(largest, total, scores, factor)
            else:  # the sums over the columns of each warp alone; `decayed` is `decay` in the same layout
                raised = tl.maximum(largest, tl.max(scores, 1) * factor)
                shift = tl.where(raised == -float("inf"), 0.0, raised)
                weights = tl.exp2(scores * factor - shift[:, None])
                decay = tl.exp2(largest - shift)
                decayed = tl.reshape(tl.broadcast_to(decay[:, None], [BLOCK_M, BLOCK_N]), [BLOCK_M, PARTS, BLOCK_N // PARTS])
                total = total * tl.max(decayed, 2) + tl.sum(tl.reshape(weights, [BLOCK_M, PARTS, BLOCK_N // PARTS]), 2)
                largest = raised
            weights = weights.to(DTYPE)
            if TRANSPOSED:
                acc = tl.dot(tl.trans(values), tl.trans(weights), acc * decay[None, :], input_precision="ieee")
            else:
                acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")

    if PARTS > 1:
        total = tl.sum(total, 1)
    if TRANSPOSED:
        acc = tl.trans(acc)
    acc *= softmax.reciprocal_of(total)[:, None]
    if kv_scale is not None:
        acc *= tl.load(kv_scale)
    stored = real[:, None] & (c < RANK)[None, :]
    if units is not None and part >= 0:
        at_row = part.to(tl.int64) * (q_bound * HEADS) + row
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        tl.store(partial_lse + at_row, shift + tl.log2(total), mask=real)
        tl.store(partial + at_row[:, None] * RANK + c[None, :], acc, mask=stored)
        return
    out_at = out + (token * out_stride_t + head * out_stride_h)[:, None] + c[None, :] * out_stride_d
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=stored)
    if lse is not None:
        tl.store(lse + token * HEADS + head, softmax.log_sum_exp(largest, total), mask=real)
