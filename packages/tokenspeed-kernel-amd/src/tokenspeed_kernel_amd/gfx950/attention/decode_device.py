"""Device code of decode."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.language.extra.hip import libdevice

from tokenspeed_kernel_amd.gfx950.attention.paged_device import (
    LEAST,
    LN_2,
    LOG2_E,
    PAGES_AT_ONCE,
    attend,
    finish,
    key_storage,
    larger,
    mfma_layout,
    query_layout,
    scaled,
    value_storage,
)


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
    k_scale, v_scale, out, lse, sinks, part, part_sum, plan,
    kv_heads: gl.constexpr, q_token: gl.constexpr, q_head: gl.constexpr, k_page: gl.constexpr, k_head: gl.constexpr,
    v_page: gl.constexpr, v_head: gl.constexpr, out_token: gl.constexpr, out_head: gl.constexpr, q_len: gl.constexpr,
    window_left: gl.constexpr, k_scale_head: gl.constexpr, v_scale_head: gl.constexpr,
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
    dtype: gl.constexpr = q.dtype.element_ty
    stored: gl.constexpr = k_cache.dtype.element_ty
    operand: gl.constexpr = query_layout(mfma, stored)
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
                gl.store(plan + sequence, (gl.to_tensor(first_unit).to(gl.int64) << 32) + (blocks + share - 1) // share)

        keys = gl.allocate_shared_memory(stored, [STAGES, BLOCK_N, HEAD_DIM], key_storage(mfma, BLOCK_N, HEAD_DIM, stored))
        values = gl.allocate_shared_memory(stored, [STAGES, BLOCK_N, V_HEAD_DIM], value_storage(mfma, BLOCK_N, V_HEAD_DIM, stored))
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
                k_page, k_token, v_page, v_token, scaled(scale, k_scale, kv_head, k_scale_head), cap,
                PAGE_SIZE, CAP, CAUSAL and q_len > 1, WINDOWED, M, mfma, STAGES, warps,
            )  # fmt: skip
            acc = scaled(acc, v_scale, kv_head, v_scale_head)

        at = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, mfma))
        inside = row < new * GROUP
        heads: gl.constexpr = kv_heads * GROUP
        sink = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, mfma))
        if DIVIDED and blocks > share:
            result, log_sum = finish(acc, highest, total, sink)
            first_place = unit.to(gl.int64) * (q_len * heads) + kv_head * GROUP
            places = token * heads + row % GROUP
            own_part = part + first_place * V_HEAD_DIM
            cdna4.buffer_store(result, own_part, places[:, None] * V_HEAD_DIM + at[None, :], mask=inside[:, None])
            cdna4.buffer_store(log_sum * LOG2_E, part_sum + first_place, places, mask=inside)
        else:
            head = kv_head * GROUP + row % GROUP
            if SINKS:
                sink = gl.load(sinks + head).to(gl.float32) * LOG2_E
            result, log_sum = finish(acc, highest, total, sink)
            offsets = token * out_token + row % GROUP * out_head
            own_out = out + first_query.to(gl.int64) * out_token + kv_head * GROUP * out_head
            cdna4.buffer_store(result.to(dtype), own_out, offsets[:, None] + at[None, :], mask=inside[:, None])
            if LSE:
                cdna4.buffer_store(log_sum, lse + first_query.to(gl.int64) * heads, token * heads + head, mask=inside)


@gluon.jit
def merge_kernel(
    cu_seqlens_q, plan, part_sum, part, sinks, out, lse,
    heads: gl.constexpr, q_len: gl.constexpr, out_token: gl.constexpr, out_head: gl.constexpr, V_HEAD_DIM: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """One query head of one token, from the partial results of its sequence's units: program (head, token, sequence).

    A partial result is a unit's output [q_len, heads, V_HEAD_DIM] and the log-sum-exp [q_len, heads] of its scores, in units of
    log 2. Almost all of the time goes by between loads that wait for one another, so there are as few of these as can be.
    """
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [256 // V_HEAD_DIM, V_HEAD_DIM // 4], [1, 1], [1, 0])
    head = gl.program_id(0)
    query = gl.program_id(1)
    sequence = gl.program_id(2)
    found = gl.load(plan + sequence)
    first_unit = (found >> 32).to(gl.int32)
    units = found.to(gl.int32)
    first_query = sequence * q_len
    wanted = units > 1
    if cu_seqlens_q is not None:
        first_query, new = new_tokens(cu_seqlens_q, sequence, q_len)
        # There is no plan of sequences that were passed over.
        wanted &= (query < new) & (new <= q_len)
    if wanted:
        if SINKS:
            sink = gl.load(sinks + head)  # needed at the end only
        top = LEAST
        total = 0.0
        acc = gl.full([V_HEAD_DIM], 0.0, gl.float32, gl.SliceLayout(0, tile))
        at = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, tile))
        for first in range(0, units, MERGED):
            unit = first + gl.arange(0, MERGED, gl.SliceLayout(1, tile))
            place = (first_unit + gl.minimum(unit, units - 1)) * (q_len * heads) + (query * heads + head)
            sums = gl.where(unit < units, gl.load(part_sum + place), float("-inf"))
            parts = gl.load(part + (place[:, None] * V_HEAD_DIM + at[None, :]))
            risen = larger(top, gl.reduce(sums, 0, larger))
            weights = gl.exp2(sums - risen)
            fade = gl.exp2(top - risen)
            total = total * fade + gl.sum(weights, 0)
            acc = acc * fade + gl.sum(parts * weights[:, None], 0)
            top = risen
        fade = 1.0
        if SINKS:
            wide = sink.to(gl.float32) * LOG2_E
            risen = larger(top, wide)
            fade = gl.exp2(top - risen)
            total = total * fade + gl.exp2(wide - risen)
            top = risen
        # At least 1 is the sum for a row that sees something: its maximum's own weight.
        acc = acc * libdevice.fast_dividef(fade, larger(total, 1.0))
        token = (first_query + query).to(gl.int64)
        cdna4.buffer_store(acc.to(out.dtype.element_ty), out + token * out_token + head * out_head, at)
        if LSE:
            log_sum = gl.where(total > 0, (top + gl.log2(total)) * LN_2, float("-inf"))
            gl.store(lse + token * heads + head, log_sum)
