"""Device code of extend."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from tokenspeed_kernel_amd.gfx950.attention.decode_device import new_tokens
from tokenspeed_kernel_amd.gfx950.attention.paged_device import (
    LEAST,
    LOG2_E,
    PAGES_AT_ONCE,
    attend,
    finish,
    key_storage,
    mfma_layout,
    query_layout,
    scaled,
    value_storage,
)


@gluon.jit
def owner_of(slot, cu_seqlens_q, batch, GROUP: gl.constexpr, M: gl.constexpr, LENGTHS: gl.constexpr):
    """The sequence that owns a slot."""
    # Every warp holds all offsets: what a warp adds up by itself needs no LDS, and is in scalar registers.
    layout: gl.constexpr = gl.BlockedLayout([LENGTHS // 64], [64], [gl.num_warps()], [0])
    begun = 0
    for first in range(0, batch, LENGTHS):
        place = first + gl.arange(0, LENGTHS, layout)
        begins = gl.load(cu_seqlens_q + gl.minimum(place, batch - 1))  # not masked: loads without branches
        begun += gl.sum(((place < batch) & (begins * GROUP // M + place <= slot)).to(gl.int32), 0)
    return begun - 1


@gluon.jit
def extend_kernel(
    cu_seqlens_q, cache_seqlens, page_table, k_cache, v_cache, q, batch, capacity, table_row, k_token, v_token, scale, cap,
    k_scale, v_scale, out, lse, sinks,
    kv_heads: gl.constexpr, q_token: gl.constexpr, q_head: gl.constexpr, k_page: gl.constexpr, k_head: gl.constexpr,
    v_page: gl.constexpr, v_head: gl.constexpr, out_token: gl.constexpr, out_head: gl.constexpr, window_left: gl.constexpr,
    k_scale_head: gl.constexpr, v_scale_head: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, V_HEAD_DIM: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr, SINKS: gl.constexpr, CAP: gl.constexpr, LSE: gl.constexpr,
    ALIKE: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, PASSED: gl.constexpr, LENGTHS: gl.constexpr,
):  # fmt: skip
    """A tile of M query rows of one key head. Last tiles, which have most keys, come first.

    Program (key head, tile, sequence), or (key head, slot, 0) if SHARED. Sequences with at most PASSED new tokens are passed over.
    """
    warps: gl.constexpr = gl.num_warps()
    mfma: gl.constexpr = mfma_layout(warps)
    dtype: gl.constexpr = q.dtype.element_ty
    stored: gl.constexpr = k_cache.dtype.element_ty
    operand: gl.constexpr = query_layout(mfma, stored)
    aligned: gl.constexpr = min(PAGE_SIZE, BLOCK_N)
    WINDOWED: gl.constexpr = window_left >= 0
    kv_head = gl.program_id(0)
    sequence = gl.program_id(2)
    if ALIKE:  # keys and values lie at the same offsets of their caches
        v_token = k_token
    if SHARED:
        sequence = owner_of(gl.num_programs(1) - 1 - gl.program_id(1), cu_seqlens_q, batch, GROUP, M, LENGTHS)
    first_query, q_len = new_tokens(cu_seqlens_q, sequence, 0)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    if SHARED:
        tile -= first_query * GROUP // M + sequence
    first_row = tile * M
    rows = q_len * GROUP
    if PASSED > 0:
        rows = gl.where(q_len > PASSED, rows, 0)
    if first_row < rows:
        length = gl.minimum(gl.load(cache_seqlens + sequence), capacity)
        first_token = first_row // GROUP
        after_token = gl.minimum((first_row + M - 1) // GROUP + 1, q_len)
        begin = length * 0
        end = length
        if WINDOWED:
            begin = gl.maximum(length - q_len + first_token - window_left, 0) // aligned * aligned
        if CAUSAL:
            end = length - q_len + after_token

        keys = gl.allocate_shared_memory(stored, [STAGES, BLOCK_N, HEAD_DIM], key_storage(mfma, BLOCK_N, HEAD_DIM, stored))
        values = gl.allocate_shared_memory(stored, [STAGES, BLOCK_N, V_HEAD_DIM], value_storage(mfma, BLOCK_N, V_HEAD_DIM, stored))
        listed = gl.allocate_shared_memory(gl.int32, [PAGES_AT_ONCE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        row = first_row + gl.arange(0, M, gl.SliceLayout(1, operand))
        at = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, operand))
        q += first_query.to(gl.int64) * q_token + kv_head * GROUP * q_head
        offsets = row // GROUP * q_token + row % GROUP * q_head
        queries = cdna4.buffer_load(q, offsets[:, None] + at[None, :], mask=(row < rows)[:, None], other=0)

        acc = gl.zeros([M, V_HEAD_DIM], gl.float32, mfma)
        highest = gl.full([M], LEAST, gl.float32, gl.SliceLayout(1, mfma))
        total = gl.full([M], 0.0, gl.float32, gl.SliceLayout(1, mfma))
        row = first_row + gl.arange(0, M, gl.SliceLayout(1, mfma))
        token = row // GROUP
        row_end = length - q_len + token + 1
        row_begin = row_end - 1 - window_left
        if begin < end:
            acc, highest, total = attend(
                queries, keys, values, listed, k_cache + kv_head * k_head, v_cache + kv_head * v_head,
                page_table + sequence.to(gl.int64) * table_row, begin, end, length, row_end, row_begin,
                length - q_len + 1 + first_token, k_page, k_token, v_page, v_token,
                scaled(scale, k_scale, kv_head, k_scale_head), cap,
                PAGE_SIZE, CAP, CAUSAL, WINDOWED, M, mfma, STAGES, warps,
            )  # fmt: skip
            acc = scaled(acc, v_scale, kv_head, v_scale_head)

        at = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, mfma))
        inside = row < rows
        sink = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, mfma))
        head = kv_head * GROUP + row % GROUP
        if SINKS:
            sink = gl.load(sinks + head).to(gl.float32) * LOG2_E
        result, log_sum = finish(acc, highest, total, sink)
        offsets = token * out_token + row % GROUP * out_head
        out += first_query.to(gl.int64) * out_token + kv_head * GROUP * out_head
        cdna4.buffer_store(result.to(dtype), out, offsets[:, None] + at[None, :], mask=inside[:, None])
        if LSE:
            heads: gl.constexpr = kv_heads * GROUP
            cdna4.buffer_store(log_sum, lse + first_query.to(gl.int64) * heads, token * heads + head, mask=inside)
