"""Extend: attention of stretches of new tokens to a paged cache that holds them and what came before.

The rows of a tile are all query heads of a key head, for as many tokens as fit: eight tokens of a group of eight are one tile of 64
rows. Tiles are as small as the longest stretch allows, so that a few tokens do not pay for many: 16 or 32 rows are one wave, as in
decode; 64 and 128 are four, which share the keys in LDS. A tile walks from the first key that its first token sees to the last one
that its last token sees; blocks that every row sees whole are not masked. A few new tokens of a few long sequences, which would
leave most of the device idle, are divided into units as in decode.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.gfx950.attention._paged import (
    LEAST,
    LOG2_E,
    PAGES_AT_ONCE,
    attend,
    check_served,
    finish,
    in_rows,
    key_storage,
    mfma_layout,
    value_storage,
)
from tokenspeed_kernel_amd.gfx950.attention.decode import CONFIG, Tile, attend_in_units

# By rows, ascending: the first one that holds all rows of the longest stretch, or else the last.
TILES = (Tile(16, 32, 1), Tile(32, 32, 1), Tile(64, 64, 4), Tile(128, 64, 4))
# Heads of 128 fill the registers with half the rows: 128 rows are 458 registers.
WIDE_TILES = TILES[:3]
STAGES = 2  # blocks on the way


@gluon.jit
def extend_kernel(
    cu_seqlens_q, cache_seqlens, page_table, k_cache, v_cache, q, capacity, table_row, k_token, v_token, scale, cap,
    out, lse, sinks,
    kv_heads: gl.constexpr, q_token: gl.constexpr, q_head: gl.constexpr, k_page: gl.constexpr, k_head: gl.constexpr,
    v_page: gl.constexpr, v_head: gl.constexpr, out_token: gl.constexpr, out_head: gl.constexpr, window_left: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, V_HEAD_DIM: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr, SINKS: gl.constexpr, CAP: gl.constexpr, LSE: gl.constexpr,
    ALIKE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A tile of M query rows of one key head: program (key head, tile, sequence). Last tiles, which have most keys, come first."""
    warps: gl.constexpr = gl.num_warps()
    mfma: gl.constexpr = mfma_layout(warps)
    operand: gl.constexpr = gl.DotOperandLayout(0, mfma, 8)
    dtype: gl.constexpr = k_cache.dtype.element_ty
    aligned: gl.constexpr = min(PAGE_SIZE, BLOCK_N)
    WINDOWED: gl.constexpr = window_left >= 0
    kv_head = gl.program_id(0)
    sequence = gl.program_id(2)
    if ALIKE:  # keys and values lie at the same offsets of their caches
        v_token = k_token
    first_query = gl.load(cu_seqlens_q + sequence)
    q_len = gl.load(cu_seqlens_q + sequence + 1) - first_query
    first_row = (gl.num_programs(1) - 1 - gl.program_id(1)) * M
    if first_row < q_len * GROUP:
        length = gl.minimum(gl.load(cache_seqlens + sequence), capacity)
        first_token = first_row // GROUP
        after_token = gl.minimum((first_row + M - 1) // GROUP + 1, q_len)
        begin = length * 0
        end = length
        if WINDOWED:
            begin = gl.maximum(length - q_len + first_token - window_left, 0) // aligned * aligned
        if CAUSAL:
            end = length - q_len + after_token

        keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], key_storage(mfma, BLOCK_N, HEAD_DIM, dtype))
        values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, V_HEAD_DIM], value_storage(mfma, BLOCK_N, V_HEAD_DIM, dtype))
        listed = gl.allocate_shared_memory(gl.int32, [PAGES_AT_ONCE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        row = first_row + gl.arange(0, M, gl.SliceLayout(1, operand))
        at = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, operand))
        q += first_query.to(gl.int64) * q_token + kv_head * GROUP * q_head
        rows = row // GROUP * q_token + row % GROUP * q_head
        queries = cdna4.buffer_load(q, rows[:, None] + at[None, :], mask=(row < q_len * GROUP)[:, None], other=0)

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
                length - q_len + 1 + first_token, k_page, k_token, v_page, v_token, scale, cap,
                PAGE_SIZE, CAP, CAUSAL, WINDOWED, M, mfma, STAGES, warps,
            )  # fmt: skip

        at = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, mfma))
        inside = row < q_len * GROUP
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


def mha_extend_with_kvcache(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    window_left: int = -1,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel_amd.mha_extend_with_kvcache`, which checks the arguments. q_scale, k_scale and v_scale are None."""
    check_served("mha_extend_with_kvcache", q, k_cache)
    tokens, heads, head_dim = q.shape
    page_size, kv_heads, v_head_dim = v_cache.shape[1:]
    batch, group = cache_seqlens.shape[0], heads // kv_heads
    q, k_cache, v_cache = in_rows(q), in_rows(k_cache), in_rows(v_cache)
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    cu_seqlens_q, cache_seqlens = cu_seqlens_q.contiguous(), cache_seqlens.contiguous()
    out = q.new_empty(tokens, heads, v_head_dim) if out is None else out
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None
    rows = min(max_seqlen_q, tokens) * group
    if rows == 0 or batch == 0:
        return (out, lse) if lse is not None else out

    choice = WIDE_TILES if max(head_dim, v_head_dim) > 64 else TILES
    tile = next((tile for tile in choice if rows <= tile.m), choice[-1])
    tiles = -(-rows // tile.m)
    shown = min(max_seqlen_k, window_left + max_seqlen_q + tile.block_n) if window_left >= 0 else max_seqlen_k
    # A few tokens of a few sequences leave most of the device idle, unless their keys are divided.
    if tiles == 1 and shown > CONFIG.whole and batch * kv_heads <= current_compute_units():
        return attend_in_units(
            tile, q, cu_seqlens_q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, max_seqlen_q, is_causal,
            window_left, logit_cap, sinks, return_lse, softmax_scale, out,
        )  # fmt: skip
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    extend_kernel[(kv_heads, tiles, batch)](
        cu_seqlens_q, cache_seqlens, page_table, k_cache, v_cache, q, max_seqlen_k, page_table.stride(0), k_cache.stride(1),
        v_cache.stride(1), scale if logit_cap > 0 else scale * LOG2_E.value, float(logit_cap), out, lse, sinks,
        kv_heads=kv_heads, q_token=q.stride(0), q_head=q.stride(1), k_page=k_cache.stride(0), k_head=k_cache.stride(2),
        v_page=v_cache.stride(0), v_head=v_cache.stride(2), out_token=out.stride(0), out_head=out.stride(1),
        window_left=window_left, GROUP=group, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, M=tile.m, BLOCK_N=tile.block_n,
        PAGE_SIZE=page_size, CAUSAL=is_causal, SINKS=sinks is not None, CAP=logit_cap > 0, LSE=return_lse,
        ALIKE=k_cache.stride() == v_cache.stride(), STAGES=STAGES, num_warps=tile.num_warps,
    )  # fmt: skip
    return (out, lse) if lse is not None else out
