"""Decode: attention of the newest tokens of sequences to a paged cache.

Memory decides the speed. A workgroup is one wave, which needs no barriers; at head_dim 64, 18 of them fit on a compute unit, each
with 8 KB on the way. Long sequences are divided into *units*, one workgroup's share of the keys of one sequence. The lengths that
decide how are read on the device only: capacity bounds the grid, every workgroup finds its own unit, and those beyond the last one
end at once. Units of one sequence leave partial results, which a second launch merges in a fixed order; a sequence of one unit is
finished by the first. Where the host can tell that no sequence is worth dividing, as in layers with a short window, there are as
many units as sequences, and one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd.gfx950.attention._call import Call, Tile, called
from tokenspeed_kernel_amd.gfx950.attention._paged import (
    LEAST,
    LN_2,
    LOG2_E,
    PAGES_AT_ONCE,
    attend,
    finish,
    key_storage,
    mfma_layout,
    value_storage,
)


@dataclass(frozen=True)
class Config:
    """How work is cut. Figures are microseconds of the emulator's timing model, of 64 query heads and 8 key heads of dimension 64.

    Attributes:
        stages: blocks on the way in a wave where there are few workgroups, twice as many where nothing is divided; else 1.
        waves: workgroups of a compute unit that much work is divided for.
        long: keys that make a unit long enough: units are shorter only as long as there are fewer than two a compute unit.
        least: keys that a unit has at least.
        whole: where no sequence shows more keys than this, none is divided.
        merged: units that the merging launch looks at together, at most.
    """

    stages: int = 2  # a sequence of 1024: 3.17, with 1: 3.5, with 4: 3.6. Window of 128: 4 stages 2.59, 2: 2.74, 1: 3.4
    waves: int = 8
    long: int = 1024  # 64 sequences of 1024: 17.8, with 512: 19.3
    least: int = 64
    whole: int = 256
    merged: int = 32  # a sequence of 32768, the merging launch: 2.8, with 16: 5.1, with 64: 2.3; but of 1024: 1.4, 1.4, 1.9


CONFIG = Config()


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def visible_keys(length, q_len, window_left, WINDOWED: gl.constexpr, ALIGNED: gl.constexpr):
    """The first position that some query sees, rounded down to a multiple of ALIGNED, and how many keys follow."""
    begin = length * 0
    if WINDOWED:
        begin = gl.maximum(length - q_len - window_left, 0) // ALIGNED * ALIGNED
    return begin, length - begin


@gluon.jit
def new_tokens(cu_seqlens_q, sequence, q_len):
    """Where the new tokens of a sequence begin in q, and how many there are: q_len, if no offsets say otherwise."""
    first = sequence * q_len
    new = q_len
    if cu_seqlens_q is not None:
        first = gl.load(cu_seqlens_q + sequence)
        new = gl.load(cu_seqlens_q + sequence + 1) - first
    return first, new


@gluon.jit
def blocks_at(
    cu_seqlens_q, cache_seqlens, first, batch, capacity, q_len, window_left,
    WINDOWED: gl.constexpr, ALIGNED: gl.constexpr, BLOCK_N: gl.constexpr, LENGTHS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Blocks of keys of LENGTHS sequences, and whether they are of the batch, and served: with 1 to q_len new tokens."""
    place = first + gl.arange(0, LENGTHS, layout)
    real = place < batch
    at = gl.minimum(place, batch - 1)  # not masked: loads without branches
    served = real
    if cu_seqlens_q is not None:
        new = gl.load(cu_seqlens_q + at + 1) - gl.load(cu_seqlens_q + at)
        served = real & (new > 0) & (new <= q_len)
    _, keys = visible_keys(gl.minimum(gl.load(cache_seqlens + at), capacity), q_len, window_left, WINDOWED, ALIGNED)
    return gl.where(served, (keys + BLOCK_N - 1) // BLOCK_N, 0), real, served


@gluon.jit
def share_of(blocks, AT_ONCE: gl.constexpr, WAVES: gl.constexpr, LONG: gl.constexpr, SHORT: gl.constexpr):
    """Blocks of a unit, of all ``blocks`` of a batch.

    Much work is divided into ``WAVES * AT_ONCE`` units, and less than one more a sequence. Work that is too little for AT_ONCE
    units of LONG blocks is divided into that many shorter ones, of SHORT blocks or more.
    """
    even = (blocks + AT_ONCE - 1) // AT_ONCE
    return gl.maximum(gl.maximum((even + WAVES - 1) // WAVES, gl.minimum(even, LONG)), SHORT)


@gluon.jit
def find_unit(
    unit, cu_seqlens_q, cache_seqlens, batch, capacity, q_len, window_left,
    WINDOWED: gl.constexpr, ALIGNED: gl.constexpr, BLOCK_N: gl.constexpr, AT_ONCE: gl.constexpr, WAVES: gl.constexpr,
    LONG: gl.constexpr, SHORT: gl.constexpr, LENGTHS: gl.constexpr,
):  # fmt: skip
    """The sequence of a unit, ``batch`` if it is beyond the last; the first unit of that sequence; and the blocks of a unit."""
    # Every warp holds all lengths: what a warp adds up by itself needs no LDS, and is in scalar registers.
    layout: gl.constexpr = gl.BlockedLayout([LENGTHS // 64], [64], [gl.num_warps()], [0])
    blocks = 0
    for first in range(0, batch, LENGTHS):
        some, _, _ = blocks_at(
            cu_seqlens_q, cache_seqlens, first, batch, capacity, q_len, window_left, WINDOWED, ALIGNED, BLOCK_N, LENGTHS, layout
        )
        blocks += gl.sum(some, 0)
    share = share_of(blocks, AT_ONCE, WAVES, LONG, SHORT)
    sequence = 0
    before = 0
    first_unit = 0
    for first in range(0, batch, LENGTHS):
        some, real, served = blocks_at(
            cu_seqlens_q, cache_seqlens, first, batch, capacity, q_len, window_left, WINDOWED, ALIGNED, BLOCK_N, LENGTHS, layout
        )
        units = gl.where(served, gl.maximum((some + share - 1) // share, 1), 0)
        ends = before + gl.associative_scan(units, 0, add)
        passed = real & (ends <= unit)
        sequence += gl.sum(passed.to(gl.int32), 0)
        first_unit = gl.maximum(first_unit, gl.max(gl.where(passed, ends, 0), 0))
        before += gl.sum(units, 0)
    return sequence, first_unit, share


@gluon.jit
def decode_kernel(
    cu_seqlens_q, cache_seqlens, page_table, k_cache, v_cache, q, batch, capacity, table_row, k_token, v_token, scale, cap,
    out, lse, sinks, part, part_top, part_total, plan,
    kv_heads: gl.constexpr, q_token: gl.constexpr, q_head: gl.constexpr, k_page: gl.constexpr, k_head: gl.constexpr,
    v_page: gl.constexpr, v_head: gl.constexpr, out_token: gl.constexpr, out_head: gl.constexpr, q_len: gl.constexpr,
    window_left: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, V_HEAD_DIM: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr, SINKS: gl.constexpr, CAP: gl.constexpr, LSE: gl.constexpr, DIVIDED: gl.constexpr,
    ALIKE: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr, WAVES: gl.constexpr, LONG: gl.constexpr,
    SHORT: gl.constexpr, LENGTHS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One unit of one key head, and a tile of M query rows: program (key head, unit, tile).

    Sequences with more than q_len new tokens, or with none, are passed over.
    """
    warps: gl.constexpr = gl.num_warps()
    mfma: gl.constexpr = mfma_layout(warps)
    operand: gl.constexpr = gl.DotOperandLayout(0, mfma, 8)
    dtype: gl.constexpr = k_cache.dtype.element_ty
    aligned: gl.constexpr = min(PAGE_SIZE, BLOCK_N)
    WINDOWED: gl.constexpr = window_left >= 0
    kv_head = gl.program_id(0)
    unit = gl.program_id(1)
    column = gl.program_id(2) * kv_heads + kv_head
    first_row = gl.program_id(2) * M

    if ALIKE:  # keys and values lie at the same offsets of their caches
        v_token = k_token
    sequence = unit
    first_unit = 0
    share = 0
    if DIVIDED:
        if LENGTHS == 1:  # a batch of one
            begin, count = visible_keys(gl.minimum(gl.load(cache_seqlens), capacity), q_len, window_left, WINDOWED, aligned)
            blocks = (count + BLOCK_N - 1) // BLOCK_N
            share = share_of(blocks, AT_ONCE, WAVES, LONG, SHORT)
            sequence = (unit * share >= gl.maximum(blocks, 1)).to(gl.int32)
        else:
            sequence, first_unit, share = find_unit(
                unit, cu_seqlens_q, cache_seqlens, batch, capacity, q_len, window_left, WINDOWED, aligned, BLOCK_N, AT_ONCE, WAVES,
                LONG, SHORT, LENGTHS,
            )  # fmt: skip
    first_query, new = new_tokens(cu_seqlens_q, gl.minimum(sequence, batch - 1), q_len)
    if (sequence < batch) & (new > 0) & (new <= q_len):
        length = gl.minimum(gl.load(cache_seqlens + sequence), capacity)
        begin, count = visible_keys(length, q_len, window_left, WINDOWED, aligned)
        blocks = (count + BLOCK_N - 1) // BLOCK_N
        first_block = 0
        after_block = blocks
        if DIVIDED:
            first_block = (unit - first_unit) * share
            after_block = gl.minimum(first_block + share, blocks)
            if unit == first_unit and column == 0:
                gl.store(plan + 2 * sequence, first_unit)
                gl.store(plan + 2 * sequence + 1, (blocks + share - 1) // share)

        keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], key_storage(mfma, BLOCK_N, HEAD_DIM, dtype))
        values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, V_HEAD_DIM], value_storage(mfma, BLOCK_N, V_HEAD_DIM, dtype))
        listed = gl.allocate_shared_memory(gl.int32, [PAGES_AT_ONCE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        row = first_row + gl.arange(0, M, gl.SliceLayout(1, operand))
        at = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, operand))
        q += first_query.to(gl.int64) * q_token + kv_head * GROUP * q_head
        rows = row // GROUP * q_token + row % GROUP * q_head
        queries = cdna4.buffer_load(q, rows[:, None] + at[None, :], mask=(row < new * GROUP)[:, None], other=0)

        acc = gl.zeros([M, V_HEAD_DIM], gl.float32, mfma)
        highest = gl.full([M], LEAST, gl.float32, gl.SliceLayout(1, mfma))
        total = gl.full([M], 0.0, gl.float32, gl.SliceLayout(1, mfma))
        row = first_row + gl.arange(0, M, gl.SliceLayout(1, mfma))
        token = row // GROUP
        row_end = length - new + token + 1
        row_begin = row_end - 1 - window_left
        if (first_block < after_block) & (first_row < new * GROUP):
            acc, highest, total = attend(
                queries, keys, values, listed, k_cache + kv_head * k_head, v_cache + kv_head * v_head,
                page_table + sequence.to(gl.int64) * table_row, begin + first_block * BLOCK_N,
                gl.minimum(begin + after_block * BLOCK_N, length), length, row_end, row_begin,
                length - new + 1 + first_row // GROUP,
                k_page, k_token, v_page, v_token, scale, cap,
                PAGE_SIZE, CAP, CAUSAL and q_len > 1, WINDOWED, M, mfma, STAGES, warps,
            )  # fmt: skip

        at = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, mfma))
        inside = row < new * GROUP
        if DIVIDED and blocks > share:
            place = (unit * (kv_heads * gl.num_programs(2)) + column).to(gl.int64) * M
            local = row - first_row
            cdna4.buffer_store(acc, part + place * V_HEAD_DIM, local[:, None] * V_HEAD_DIM + at[None, :], mask=inside[:, None])
            cdna4.buffer_store(highest, part_top + place, local, mask=inside)
            cdna4.buffer_store(total, part_total + place, local, mask=inside)
        else:
            sink = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, mfma))
            head = kv_head * GROUP + row % GROUP
            if SINKS:
                sink = gl.load(sinks + head).to(gl.float32) * LOG2_E
            result, log_sum = finish(acc, highest, total, sink)
            offsets = token * out_token + row % GROUP * out_head
            own_out = out + first_query.to(gl.int64) * out_token + kv_head * GROUP * out_head
            cdna4.buffer_store(result.to(dtype), own_out, offsets[:, None] + at[None, :], mask=inside[:, None])
            if LSE:
                heads = kv_heads * GROUP
                cdna4.buffer_store(log_sum, lse + first_query.to(gl.int64) * heads, token * heads + head, mask=inside)


@gluon.jit
def merge_kernel(
    cu_seqlens_q, plan, part_top, part_total, part, sinks, out, lse,
    q_len: gl.constexpr, out_token: gl.constexpr, out_head: gl.constexpr, kv_heads: gl.constexpr, columns: gl.constexpr,
    GROUP: gl.constexpr, V_HEAD_DIM: gl.constexpr, M: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """One query head of one token, from the partial results of its sequence's units: program (head, token, sequence)."""
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [256 // V_HEAD_DIM, V_HEAD_DIM // 4], [1, 1], [1, 0])
    head = gl.program_id(0)
    sequence = gl.program_id(2)
    row = gl.program_id(1) * GROUP + head % GROUP
    column = row // M * kv_heads + head // GROUP
    first_unit = gl.load(plan + 2 * sequence)
    units = gl.load(plan + 2 * sequence + 1)
    first_query, new = new_tokens(cu_seqlens_q, sequence, q_len)
    # There is no plan of sequences that were passed over.
    if (gl.program_id(1) < new) & (new <= q_len) & (units > 1):
        top = float("-inf")
        if SINKS:
            top = gl.load(sinks + head).to(gl.float32) * LOG2_E
        total = gl.where(top > float("-inf"), 1.0, 0.0)
        acc = gl.full([V_HEAD_DIM], 0.0, gl.float32, gl.SliceLayout(0, tile))
        at = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, tile))
        for first in range(0, units, MERGED):
            unit = first + gl.arange(0, MERGED, gl.SliceLayout(1, tile))
            place = (first_unit + unit) * (columns * M) + (column * M + row % M)
            real = unit < units
            tops = cdna4.buffer_load(part_top, place, mask=real, other=LEAST)
            totals = cdna4.buffer_load(part_total, place, mask=real, other=0.0)
            parts = cdna4.buffer_load(part, place[:, None] * V_HEAD_DIM + at[None, :], mask=real[:, None], other=0.0)
            risen = gl.maximum(top, gl.max(tops, 0))
            weights = gl.exp2(tops - risen)
            fade = gl.exp2(top - risen)
            total = total * fade + gl.sum(totals * weights, 0)
            acc = acc * fade + gl.sum(parts * weights[:, None], 0)
            top = risen
        log_sum = top + gl.log2(total)
        acc = acc * gl.where(total > 0, gl.exp2(-gl.log2(total)), 0.0)
        token = (first_query + gl.program_id(1)).to(gl.int64)
        gl.store(out + token * out_token + head * out_head + at, acc.to(out.dtype.element_ty))
        if LSE:
            gl.store(lse + token * gl.num_programs(0) + head, gl.where(total > 0, log_sum * LN_2, float("-inf")))


def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int = 1,
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
    """See `tokenspeed_kernel_amd.mha_decode_with_kvcache`, which checks the arguments. q_scale, k_scale and v_scale are None."""
    call = called(
        "mha_decode_with_kvcache", q, None, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k, True,
        window_left, logit_cap, sinks, return_lse, softmax_scale, out,
    )  # fmt: skip
    attend_in_units(call, tile_of_rows(max_seqlen_q * call.group), max_seqlen_q)
    return call.result


def tile_of_rows(rows: int) -> Tile:
    """The tile of one wave for so many rows of a key head; of more than it has, several are launched."""
    return Tile(16, 32, 1) if rows <= 16 else Tile(32, 32, 1)


def attend_in_units(call: Call, tile: Tile, q_len: int) -> None:
    """Attention over units, of sequences with 1 to q_len new tokens. Others are passed over; without offsets there are none."""
    if call.empty:
        return
    config, block_n, m = CONFIG, tile.block_n, tile.m
    batch, kv_heads = call.batch, call.kv_heads
    tiles = -(-q_len * call.group // m)
    columns = kv_heads * tiles
    shown = call.shown(tile, q_len)
    device = current_compute_units()
    few = batch * columns <= 2 * device
    waves = 2 if few else config.waves // 2
    at_once = divided = 0
    if shown > config.whole:
        at_once = max(1, 2 * device // columns)
        divided = min(at_once * waves, batch * -(-shown // config.least))
    units = batch + divided if divided > 1 else batch
    split = units > batch
    stages = (config.stages if split or tile.num_warps > 1 else 2 * config.stages) if few else 1
    v_head_dim = call.v_cache.shape[3]
    part = call.q.new_empty((units * columns * m, v_head_dim) if split else (0, 0), dtype=torch.float32)
    part_top, part_total = call.q.new_empty((2, units * columns * m if split else 0), dtype=torch.float32)
    plan = call.cache_seqlens.new_empty((batch, 2) if split else (0, 2))
    constants = call.constants()
    decode_kernel[(kv_heads, units, tiles)](
        *call.operands(), part, part_top, part_total, plan,
        q_len=q_len, M=m, BLOCK_N=block_n, DIVIDED=split, STAGES=stages, AT_ONCE=at_once, WAVES=waves,
        LONG=config.long // block_n, SHORT=max(1, config.least // block_n), LENGTHS=call.lengths_at_once(),
        num_warps=tile.num_warps, **constants,
    )  # fmt: skip
    if split:
        # A sequence has about as many units, if all are about as long.
        merged = min(config.merged, max(4, 1 << (divided // batch - 1).bit_length()))
        merge_kernel[(call.q.shape[1], q_len, batch)](
            call.cu_seqlens_q, plan, part_top, part_total, part, call.sinks, call.out, call.lse,
            q_len=q_len, columns=columns, M=m, MERGED=merged, num_warps=1,
            **{name: constants[name] for name in ("out_token", "out_head", "kv_heads", "GROUP", "V_HEAD_DIM", "SINKS", "LSE")},
        )  # fmt: skip
