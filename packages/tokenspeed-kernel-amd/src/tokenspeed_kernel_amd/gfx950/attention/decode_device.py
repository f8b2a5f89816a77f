"""Device code of decode: a unit of one sequence's keys, and the merging of units. ``decode`` says what units are for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.language.extra.hip import libdevice

from tokenspeed_kernel_amd.gfx950.attention.paged_device import attend, store_output
from tokenspeed_kernel_amd.gfx950.common.layouts_device import everywhere_layout
from tokenspeed_kernel_amd.gfx950.common.softmax_device import LN_2, LOG2_E, LOWEST, add, larger, normalise
from tokenspeed_kernel_amd.gfx950.common.tiles_device import QueryTile, new_tokens, store_rows


@gluon.jit
def visible_keys(length, plan):
    """The first position that some query sees, rounded down to a multiple of plan.aligned, and how many keys follow."""
    begin = length * 0
    if plan.window_left >= 0:
        begin = gl.maximum(length - plan.q_len - plan.window_left, 0) // plan.aligned * plan.aligned
    return begin, length - begin


@gluon.jit
def blocks_at(operands, first, plan, layout: gl.constexpr):
    """Of plan.lengths sequences from ``first`` on: blocks of keys, whether they are of the batch, and whether they are served.

    Sequences with 1 to plan.q_len new tokens are served.
    """
    place = first + gl.arange(0, plan.lengths, layout)
    real = place < operands.batch
    at = gl.minimum(place, operands.batch - 1)  # not masked: loads without branches
    served = real
    if operands.cu_seqlens_q is not None:
        new = gl.load(operands.cu_seqlens_q + at + 1) - gl.load(operands.cu_seqlens_q + at)
        served = real & (new > 0) & (new <= plan.q_len)
    _, keys = visible_keys(gl.minimum(gl.load(operands.cache_seqlens + at), operands.max_seqlen_k), plan)
    return gl.where(served, (keys + plan.block_n - 1) // plan.block_n, 0), real, served


@gluon.jit
def share_of(blocks, plan):
    """Blocks of a unit, of all ``blocks`` of a batch.

    Much work is divided into ``waves * at_once`` units, and less than one more a sequence. Work that is too little for at_once
    units of ``long`` blocks is divided into that many shorter ones, of ``short`` blocks or more.
    """
    even = (blocks + plan.at_once - 1) // plan.at_once
    return gl.maximum(gl.maximum((even + plan.waves - 1) // plan.waves, gl.minimum(even, plan.long)), plan.short)


@gluon.jit
def find_unit(unit, operands, plan):
    """The sequence of a unit, ``batch`` if it is beyond the last; the first unit of that sequence; and the blocks of a unit."""
    layout: gl.constexpr = everywhere_layout(plan.lengths, gl.num_warps())
    blocks = 0
    for first in range(0, operands.batch, plan.lengths):
        some, _, _ = blocks_at(operands, first, plan, layout)
        blocks += gl.sum(some, 0)
    share = share_of(blocks, plan)
    sequence = 0
    before = 0
    first_unit = 0
    for first in range(0, operands.batch, plan.lengths):
        some, real, served = blocks_at(operands, first, plan, layout)
        units = gl.where(served, gl.maximum((some + share - 1) // share, 1), 0)
        ends = before + gl.associative_scan(units, 0, add)
        passed = real & (ends <= unit)
        sequence += gl.sum(passed.to(gl.int32), 0)
        first_unit = gl.maximum(first_unit, gl.max(gl.where(passed, ends, 0), 0))
        before += gl.sum(units, 0)
    return sequence, first_unit, share


@gluon.jit
def decode_kernel(
    operands,
    partial,
    shape: gl.constexpr,
    strides: gl.constexpr,
    variant: gl.constexpr,
    tile_shape: gl.constexpr,
    plan: gl.constexpr,
):
    """One unit of one key head, and a tile of query rows: program (key head, unit, tile).

    Sequences with more than plan.q_len new tokens, or with none, are passed over.

    Args:
        operands, shape, strides, variant, tile_shape: see `gfx950.attention.call`.
        partial, plan: see `gfx950.attention.decode`.
    """
    block_n: gl.constexpr = tile_shape.block_n
    kv_head = gl.program_id(0)
    unit = gl.program_id(1)
    sequence = unit
    first_unit = 0
    share = 0
    if plan.divided:
        if plan.lengths == 1:  # a batch of one
            _, count = visible_keys(gl.minimum(gl.load(operands.cache_seqlens), operands.max_seqlen_k), plan)
            blocks = (count + block_n - 1) // block_n
            share = share_of(blocks, plan)
            sequence = (unit * share >= gl.maximum(blocks, 1)).to(gl.int32)
        else:
            sequence, first_unit, share = find_unit(unit, operands, plan)
    first_query, new = new_tokens(operands.cu_seqlens_q, gl.minimum(sequence, operands.batch - 1), plan.q_len)
    if (sequence < operands.batch) & (new > 0) & (new <= plan.q_len):
        length = gl.minimum(gl.load(operands.cache_seqlens + sequence), operands.max_seqlen_k)
        begin, count = visible_keys(length, plan)
        blocks = (count + block_n - 1) // block_n
        first_block = 0
        after_block = blocks
        if plan.divided:
            first_block = (unit - first_unit) * share
            after_block = gl.minimum(first_block + share, blocks)
            if unit == first_unit and gl.program_id(2) + kv_head == 0:
                gl.store(partial.plan + sequence, (gl.to_tensor(first_unit).to(gl.int64) << 32) + (blocks + share - 1) // share)
        tile = QueryTile(
            gl.to_tensor(first_query),
            gl.to_tensor(new),
            gl.program_id(2) * tile_shape.m,
            kv_head,
            shape.gqa_ratio,
            tile_shape.m,
        )
        state = attend(
            operands, shape, strides, variant, tile_shape, tile, sequence, length,
            begin + first_block * block_n, gl.minimum(begin + after_block * block_n, length),
            variant.is_causal and plan.q_len > 1,
        )  # fmt: skip
        if plan.divided and blocks > share:
            heads: gl.constexpr = shape.kv_heads * shape.gqa_ratio
            v_head_dim: gl.constexpr = shape.v_head_dim
            result, log_sum = normalise(state, None)
            first_token = unit * plan.q_len
            store_rows(partial.results, result, tile, first_token, heads * v_head_dim, v_head_dim)
            store_rows(partial.log_sums, log_sum, tile, first_token, heads, 1)
        else:
            store_output(operands, shape, strides, variant, tile, state)


@gluon.jit
def merge_kernel(cu_seqlens_q, partial, sinks, out, lse, merge: gl.constexpr):
    """One query head of one token, from the partial results of its sequence's units: program (head, token, sequence).

    Almost all of the time goes by between loads that wait for one another, so there are as few of these as can be.

    Args:
        cu_seqlens_q, sinks, out, lse: see `gfx950.attention.call.Operands`.
        partial, merge: see `gfx950.attention.decode`.
    """
    v_head_dim: gl.constexpr = merge.v_head_dim
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [256 // v_head_dim, v_head_dim // 4], [1, 1], [1, 0])
    head = gl.program_id(0)
    query = gl.program_id(1)
    sequence = gl.program_id(2)
    found = gl.load(partial.plan + sequence)
    first_unit = (found >> 32).to(gl.int32)
    units = found.to(gl.int32)
    first_query = sequence * merge.q_len
    wanted = units > 1
    if cu_seqlens_q is not None:
        first_query, new = new_tokens(cu_seqlens_q, sequence, merge.q_len)
        # There is no plan of sequences that were passed over.
        wanted &= (query < new) & (new <= merge.q_len)
    if wanted:
        if merge.sinks:
            sink = gl.load(sinks + head)  # needed at the end only
        row_max = LOWEST
        row_sum = 0.0
        acc = gl.full([v_head_dim], 0.0, gl.float32, gl.SliceLayout(0, layout))
        at = gl.arange(0, v_head_dim, gl.SliceLayout(0, layout))
        for first in range(0, units, merge.at_once):
            unit = first + gl.arange(0, merge.at_once, gl.SliceLayout(1, layout))
            place = (first_unit + gl.minimum(unit, units - 1)) * (merge.q_len * merge.heads) + (query * merge.heads + head)
            log_sums = gl.where(unit < units, gl.load(partial.log_sums + place), float("-inf"))
            results = gl.load(partial.results + (place[:, None] * v_head_dim + at[None, :]))
            top = larger(row_max, gl.reduce(log_sums, 0, larger))
            weights = gl.exp2(log_sums - top)
            shrink = gl.exp2(row_max - top)
            row_sum = row_sum * shrink + gl.sum(weights, 0)
            acc = acc * shrink + gl.sum(results * weights[:, None], 0)
            row_max = top
        shrink = 1.0
        if merge.sinks:
            wide = sink.to(gl.float32) * LOG2_E
            top = larger(row_max, wide)
            shrink = gl.exp2(row_max - top)
            row_sum = row_sum * shrink + gl.exp2(wide - top)
            row_max = top
        # At least 1 is the sum for a row that sees something: its maximum's own weight.
        acc = acc * libdevice.fast_dividef(shrink, larger(row_sum, 1.0))
        token = (first_query + query).to(gl.int64)
        cdna4.buffer_store(acc.to(out.dtype.element_ty), out + token * merge.out_token + head * merge.out_head, at)
        if merge.lse:
            log_sum = gl.where(row_sum > 0, (row_max + gl.log2(row_sum)) * LN_2, float("-inf"))
            gl.store(lse + token * merge.heads + head, log_sum)
