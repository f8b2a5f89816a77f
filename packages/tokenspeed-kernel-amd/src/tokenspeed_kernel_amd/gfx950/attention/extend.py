"""Extend: attention of stretches of new tokens to a paged cache that holds them and what came before.

The rows of a tile are all query heads of a key head, for as many tokens as fit: eight tokens of a group of eight are one tile of 64
rows. Tiles are as small as the longest stretch allows, so that a few tokens do not pay for many: 16 or 32 rows are one wave, as in
decode; 64 and 128 are four, which share the keys in LDS. A tile walks from the first key that its first token sees to the last one
that its last token sees; blocks that every row sees whole are not masked. A few new tokens of a few long sequences, which would
leave most of the device idle, are divided into units as in decode.

Lengths are known on the device only. Where most stretches may be about as long, every sequence has the tiles of the longest. Else
all share a grid of *slots*, of which sequence b owns those from ``cu_seqlens_q[b] * GROUP // M + b`` on: always enough for its
rows, never more than one too many. To look up whose a slot is takes 0.3 us of the emulator's timing model.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.gfx950.attention._call import Call, Tile, called
from tokenspeed_kernel_amd.gfx950.attention._paged import (
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
from tokenspeed_kernel_amd.gfx950.attention.decode import CONFIG, attend_in_units, new_tokens

# By rows, ascending: the first one that holds all rows of the longest stretch, or else the last.
TILES = (Tile(16, 32, 1), Tile(32, 32, 1), Tile(64, 64, 4), Tile(128, 64, 4))
# Heads of 128 fill the registers with half the rows: 128 rows are 458 registers.
WIDE_TILES = TILES[:3]
# Of fp8, which every wave widens for itself: few waves are better, as far as registers go. 64 sequences of 1024 with 8 new tokens
# take 18.3 us of the emulator's timing model, with four waves 24.8.
FP8_TILES = (Tile(16, 64, 1), Tile(32, 64, 1), Tile(64, 64, 2), Tile(128, 64, 4))
FP8_WIDE_TILES = (Tile(16, 64, 1), Tile(32, 64, 2), Tile(64, 64, 4))
STAGES = 2  # blocks on the way


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
    """See `tokenspeed_kernel_amd.mha_extend_with_kvcache`, which checks the arguments. q_scale is None."""
    call = called(
        "mha_extend_with_kvcache", q, cu_seqlens_q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k,
        is_causal, window_left, logit_cap, sinks, return_lse, softmax_scale, k_scale, v_scale, out,
    )  # fmt: skip
    tile = tile_of_stretches(call)
    if pays_in_units(call, tile):
        attend_in_units(call, tile, call.max_seqlen_q)
    else:
        attend_in_tiles(call, tile)
    return call.result


def tile_of_stretches(call: Call) -> Tile:
    """The tile for the longest stretch of new tokens that there may be."""
    rows = call.max_seqlen_q * call.group
    wide = max(call.q.shape[2], call.v_cache.shape[3]) > 64
    choice = (FP8_WIDE_TILES if wide else FP8_TILES) if call.fp8 else (WIDE_TILES if wide else TILES)
    return next((tile for tile in choice if rows <= tile.m), choice[-1])


def pays_in_units(call: Call, tile: Tile) -> bool:
    """A few tokens of a few sequences, with many keys, leave most of the device idle unless their keys are divided."""
    one_each = call.max_seqlen_q * call.group <= tile.m
    return one_each and call.shown(tile, call.max_seqlen_q) > CONFIG.whole and call.batch * call.kv_heads <= current_compute_units()


def slots_of(call: Call, tile: Tile) -> int:
    """Slots that are enough for all rows of a key head."""
    return call.tokens * call.group // tile.m + call.batch


def attend_in_tiles(call: Call, tile: Tile, passed: int = 0) -> None:
    """Attention of each tile by one workgroup. Sequences with at most ``passed`` new tokens are passed over."""
    if call.empty:
        return
    tiles = -(-call.max_seqlen_q * call.group // tile.m)
    slots = slots_of(call, tile)
    shared = 4 * slots < 3 * tiles * call.batch
    extend_kernel[(call.kv_heads, slots, 1) if shared else (call.kv_heads, tiles, call.batch)](
        *call.operands(),
        M=tile.m, BLOCK_N=tile.block_n, STAGES=STAGES, SHARED=shared, PASSED=passed,
        LENGTHS=call.lengths_at_once() if shared else 0, num_warps=tile.num_warps, **call.constants(),
    )  # fmt: skip
