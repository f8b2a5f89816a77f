"""Device code of decode: attention to one split of a sequence's keys, and the split-KV merge. ``gluon.decode`` explains
the splits. The architecture provides the attention of a tile to a range of keys, as an argument of `decode_kernel`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3
from triton.language.extra.hip import libdevice

from tokenspeed_kernel_amd.gluon.layouts_device import everywhere_layout
from tokenspeed_kernel_amd.gluon.softmax_device import LN_2, LOG2_E, LOWEST, add, larger, normalise
from tokenspeed_kernel_amd.gluon.tiles_device import QueryTile, new_tokens, store_output, store_rows


@gluon.jit
def visible_keys(length, plan):
    """Returns two numbers for a sequence of ``length`` tokens. The first is the first key position that any of its queries sees,
    rounded down to a multiple of plan.aligned. The second is the number of keys from this position to the sequence's end.
    """
    begin = length * 0
    if plan.window_left >= 0:
        begin = gl.maximum(length - plan.q_len - plan.window_left, 0) // plan.aligned * plan.aligned
    return begin, length - begin


@gluon.jit
def blocks_at(operands, first, plan, layout: gl.constexpr):
    """Returns three vectors with an element for each of plan.lengths consecutive sequences. The first of these sequences has index
    ``first``. The vectors are the number of key blocks, whether the batch has such a sequence, and whether this launch computes it.

    A launch computes the sequences with 1 to plan.q_len new tokens. Other sequences have 0 blocks here.
    """
    index = first + gl.arange(0, plan.lengths, layout)
    real = index < operands.batch
    at = gl.minimum(index, operands.batch - 1)  # clamped instead of masked, so that loads have no branches
    computed = real
    if operands.cu_seqlens_q is not None:
        new = gl.load(operands.cu_seqlens_q + at + 1) - gl.load(operands.cu_seqlens_q + at)
        computed = real & (new > 0) & (new <= plan.q_len)
    _, keys = visible_keys(gl.minimum(gl.load(operands.cache_seqlens + at), operands.max_seqlen_k), plan)
    return gl.where(computed, (keys + plan.block_n - 1) // plan.block_n, 0), real, computed


@gluon.jit
def blocks_per_split(blocks, longest, plan):
    """Returns the number of blocks per split. The sequences of the batch have ``blocks`` blocks in total, and the longest has
    ``longest``.

    A large batch is divided into ``waves * at_once`` splits, plus less than one per sequence because of rounding. A batch that does
    not fill ``at_once`` splits of ``long`` blocks is divided into ``at_once`` shorter splits, of at least ``short`` blocks.
    """
    even = (blocks + plan.at_once - 1) // plan.at_once
    split_blocks = gl.maximum(gl.maximum((even + plan.waves - 1) // plan.waves, gl.minimum(even, plan.long)), plan.short)
    if plan.merge_cost > 0:
        balanced = gl.sqrt(gl.to_tensor(longest).to(gl.float32) * plan.merge_cost)
        split_blocks = gl.maximum(split_blocks, gl.ceil(balanced).to(gl.int32))
    return split_blocks


@gluon.jit
def passed_splits(split, some, real, computed, split_blocks, before, plan):
    """Finds the sequences, among those of one call of `blocks_at`, that end before split number ``split``. ``some`` is the number
    of blocks of each sequence, and ``before`` is the number of splits of all earlier sequences. Returns three numbers: how many
    sequences end before ``split``, the number of the first split after these sequences (0 if there are none), and the number of
    splits of all sequences of the call.
    """
    skipped = gl.where(real, plan.skipped_splits, 0)
    splits = gl.where(computed, gl.maximum((some + split_blocks - 1) // split_blocks, 1), skipped)
    ends = before + gl.associative_scan(splits, 0, add)
    passed = real & (ends <= split)
    return gl.sum(passed.to(gl.int32), 0), gl.max(gl.where(passed, ends, 0), 0), gl.sum(splits, 0)


@gluon.jit
def search_split(split, operands, plan):
    """Returns what `find_split` returns: the split's sequence, the sequence's first split, and the key blocks per split. Used for
    split-KV of several sequences, whose lengths are loaded plan.lengths at a time."""
    layout: gl.constexpr = everywhere_layout(plan.lengths, gl.num_warps())
    if plan.once:
        some, real, computed = blocks_at(operands, 0, plan, layout)
        split_blocks = blocks_per_split(gl.sum(some, 0), gl.max(some, 0), plan)
        sequence, first_split, _ = passed_splits(split, some, real, computed, split_blocks, 0, plan)
    else:
        blocks = 0
        longest = 0
        for first in range(0, operands.batch, plan.lengths):
            some, _, _ = blocks_at(operands, first, plan, layout)
            blocks += gl.sum(some, 0)
            if plan.merge_cost > 0:
                longest = gl.maximum(longest, gl.max(some, 0))
        split_blocks = blocks_per_split(blocks, longest, plan)
        sequence = 0
        before = 0
        first_split = 0
        for first in range(0, operands.batch, plan.lengths):
            some, real, computed = blocks_at(operands, first, plan, layout)
            count, ends, splits = passed_splits(split, some, real, computed, split_blocks, before, plan)
            sequence += count
            first_split = gl.maximum(first_split, ends)
            before += splits
    return sequence, first_split, split_blocks


@gluon.jit
def find_split(split, operands, plan):
    """Returns the sequence that split number ``split`` belongs to, that sequence's first split, and the number of key blocks per
    split. For a surplus split, the sequence is ``batch``.
    """
    sequence = split
    first_split = 0
    split_blocks = 0
    if plan.split_kv:
        if plan.lengths == 1:  # a batch of one
            _, count = visible_keys(gl.minimum(gl.load(operands.cache_seqlens), operands.max_seqlen_k), plan)
            blocks = (count + plan.block_n - 1) // plan.block_n
            split_blocks = blocks_per_split(blocks, blocks, plan)
            sequence = (split * split_blocks >= gl.maximum(blocks, 1)).to(gl.int32)
        else:
            sequence, first_split, split_blocks = search_split(split, operands, plan)
    return sequence, first_split, split_blocks


@gluon.jit
def decode_kernel(
    operands,
    partial,
    shape: gl.constexpr,
    strides: gl.constexpr,
    variant: gl.constexpr,
    tile_shape: gl.constexpr,
    plan: gl.constexpr,
    attend: gl.constexpr,
):
    """Computes attention of a tile of query rows to the keys of one split, for one KV head. Workgroups are numbered by tile, split
    and KV head. The KV head varies fastest, the tile slowest.

    Sequences with more than plan.q_len new tokens, or with none, are skipped.

    Args:
        operands, shape, strides, variant, tile_shape: the call's tensors, sizes, strides, options and tile, see `gluon.call`.
        partial, plan: the tensors of partial results, and the division of sequences into splits, see `gluon.decode`.
        attend: the architecture's function that computes attention of a tile to a range of positions, for example
            `gfx950.attention.paged_device.attend`.
    """
    block_n: gl.constexpr = tile_shape.block_n
    rows: gl.constexpr = plan.q_len * shape.gqa_ratio
    tiles: gl.constexpr = (rows + tile_shape.m - 1) // tile_shape.m
    kv_head = gl.program_id(0) % shape.kv_heads
    index = gl.program_id(0) // shape.kv_heads
    all_splits = gl.num_programs(0) // (shape.kv_heads * tiles)
    split = index % all_splits
    number = index // all_splits
    sequence, first_split, split_blocks = find_split(split, operands, plan)
    first_query, new = new_tokens(operands.cu_seqlens_q, gl.minimum(sequence, operands.batch - 1), plan.q_len)
    if (sequence < operands.batch) & (new > 0) & (new <= plan.q_len):
        length = gl.minimum(gl.load(operands.cache_seqlens + sequence), operands.max_seqlen_k)
        begin, count = visible_keys(length, plan)
        blocks = (count + block_n - 1) // block_n
        first_block = 0
        after_block = blocks
        if plan.split_kv:
            first_block = (split - first_split) * split_blocks
            after_block = gl.minimum(first_block + split_blocks, blocks)
            if split == first_split and number + kv_head == 0:
                gl.store(
                    partial.plan + sequence,
                    (gl.to_tensor(first_split).to(gl.int64) << 32) + (blocks + split_blocks - 1) // split_blocks,
                )
        start = begin + first_block * block_n
        if plan.window_left >= 0 and operands.cu_seqlens_q is not None:
            # `visible_keys` assumes plan.q_len new tokens. If a sequence has fewer, its first split begins too early, and may
            # include a page that was freed.
            start = gl.maximum(start, gl.maximum(length - new - plan.window_left, 0) // plan.aligned * plan.aligned)
        tile = QueryTile(
            gl.to_tensor(first_query),
            gl.to_tensor(new),
            number * tile_shape.m,
            kv_head,
            shape.gqa_ratio,
            tile_shape.m,
        )
        state = attend(
            operands, shape, strides, variant, tile_shape, tile, sequence, length,
            start, gl.minimum(begin + after_block * block_n, length),
            variant.is_causal and plan.q_len > 1,
        )  # fmt: skip
        if plan.split_kv and blocks > split_blocks:
            heads: gl.constexpr = shape.kv_heads * shape.gqa_ratio
            v_head_dim: gl.constexpr = shape.v_head_dim
            result, log_sum = normalise(state, None)
            first_token = split * plan.q_len
            store_rows(partial.results, result, tile, first_token, heads * v_head_dim, v_head_dim)
            store_rows(partial.log_sums, log_sum, tile, first_token, heads, 1)
        else:
            store_output(operands, shape, strides, variant, tile, state)


@gluon.jit
def merge_kernel(cu_seqlens_q, partial, sinks, out, lse, merge: gl.constexpr):
    """Merges the partial results of a sequence's splits for one query head of one token. Workgroups are numbered by sequence,
    token and head. The head varies fastest, the sequence slowest.

    The kernel is latency-bound: dependent loads take almost all of the time. So the chain of loads is as short as possible.

    Args:
        cu_seqlens_q, sinks, out, lse: the operator's tensors, see `gluon.call.Operands`.
        partial, merge: the tensors of partial results, and the merge's constants, see `gluon.decode`.
    """
    v_head_dim: gl.constexpr = merge.v_head_dim
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [256 // v_head_dim, v_head_dim // 4], [1, 1], [1, 0])
    head = gl.program_id(0) % merge.heads
    query = gl.program_id(0) // merge.heads % merge.q_len
    sequence = gl.program_id(0) // (merge.heads * merge.q_len)
    found = gl.load(partial.plan + sequence)
    first_split = (found >> 32).to(gl.int32)
    splits = found.to(gl.int32)
    first_query = sequence * merge.q_len
    wanted = splits > 1
    if cu_seqlens_q is not None:
        first_query, new = new_tokens(cu_seqlens_q, sequence, merge.q_len)
        # The decode kernel wrote no plan for the sequences that it skipped.
        wanted &= (query < new) & (new <= merge.q_len)
    if wanted:
        if merge.sinks:
            sink = gl.load(sinks + head)  # needed only at the end; issued early to hide its latency
        row_max = LOWEST
        row_sum = 0.0
        acc = gl.full([v_head_dim], 0.0, gl.float32, gl.SliceLayout(0, layout))
        at = gl.arange(0, v_head_dim, gl.SliceLayout(0, layout))
        begin = (first_split.to(gl.int64) * merge.q_len + query) * merge.heads + head
        for first in range(0, splits, merge.at_once):
            split = first + gl.arange(0, merge.at_once, gl.SliceLayout(1, layout))
            index = gl.minimum(split, splits - 1) * (merge.q_len * merge.heads)
            log_sums = gl.where(split < splits, gl.load(partial.log_sums + begin + index), float("-inf"))
            results = gl.load(partial.results + begin * v_head_dim + (index[:, None] * v_head_dim + at[None, :]))
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
        # The row sum of a row with a visible key is at least 1: the largest score contributes exp2(0). Without one, the divisor 1
        # avoids NaN.
        acc = acc * libdevice.fast_dividef(shrink, larger(row_sum, 1.0))
        token = (first_query + query).to(gl.int64)
        cdna3.buffer_store(acc.to(out.dtype.element_ty), out + token * merge.out_token + head * merge.out_head, at)
        if merge.lse:
            log_sum = gl.where(row_sum > 0, (row_max + gl.log2(row_sum)) * LN_2, float("-inf"))
            gl.store(lse + token * merge.heads + head, log_sum)
