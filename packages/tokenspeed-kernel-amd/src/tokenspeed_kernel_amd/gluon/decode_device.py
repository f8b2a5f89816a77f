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
def ceil_div(number, divisor):
    """Divides non-negative int32 values, and rounds up. The division is unsigned, which takes fewer instructions."""
    return ((number + divisor - 1).to(gl.uint32) // gl.to_tensor(divisor).to(gl.uint32)).to(gl.int32)


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
def length_of(sequence, operands):
    """Loads the length of a sequence, or of a vector of sequences."""
    return gl.minimum(gl.load(operands.cache_seqlens + sequence), operands.max_seqlen_k)


@gluon.jit
def blocks_at(operands, first, plan, layout: gl.constexpr):
    """Returns four vectors with an element for each of plan.lengths consecutive sequences. The first of these sequences has index
    ``first``. The vectors are the number of key blocks, the length, whether the batch has such a sequence, and whether this launch
    computes it.

    A launch computes the sequences with 1 to plan.q_len new tokens. Other sequences have 0 blocks here.
    """
    index = first + gl.arange(0, plan.lengths, layout)
    real = index < operands.batch
    at = gl.minimum(index, operands.batch - 1)  # clamped instead of masked, so that loads have no branches
    computed = real
    if operands.cu_seqlens_q is not None:
        new = gl.load(operands.cu_seqlens_q + at + 1) - gl.load(operands.cu_seqlens_q + at)
        computed = real & (new > 0) & (new <= plan.q_len)
    length = length_of(at, operands)
    _, keys = visible_keys(length, plan)
    return gl.where(computed, ceil_div(keys, plan.block_n), 0), length, real, computed


@gluon.jit
def blocks_per_split(blocks, longest, plan):
    """Returns the number of blocks per split. The sequences of the batch have ``blocks`` blocks in total, and the longest has
    ``longest``.

    A large batch is divided into ``waves * at_once`` splits, plus less than one per sequence because of rounding. A batch that does
    not fill ``at_once`` splits of ``long`` blocks is divided into ``at_once`` shorter splits, of at least ``short`` blocks.
    """
    even = ceil_div(blocks, plan.at_once)
    split_blocks = gl.maximum(gl.maximum(ceil_div(even, plan.waves), gl.minimum(even, plan.long)), plan.short)
    if plan.merge_cost > 0:
        balanced = gl.sqrt(gl.to_tensor(longest).to(gl.float32) * plan.merge_cost)
        split_blocks = gl.maximum(split_blocks, gl.ceil(balanced).to(gl.int32))
    return split_blocks


@gluon.jit
def prefix_sums(values):
    """Returns the inclusive prefix sums of an int32 vector in `everywhere_layout`.

    With one element per lane, data-parallel primitives (DPP) compute them in registers. The compiler's scan would shuffle through
    LDS: by the timing model, that takes 430 cycles instead of 80.
    """
    if values.shape[0] == 64:
        # Sums within rows of 16 lanes, then of one and of two earlier rows. Lanes without a source keep their sum. DPP needs two
        # wait states after the write of its source.
        text: gl.constexpr = (
            "v_mov_b32 $0, $1\n\ts_nop 1\n\tv_add_u32_dpp $0, $0, $0 row_shr:1 row_mask:0xf bank_mask:0xf\n\t"
            "s_nop 1\n\tv_add_u32_dpp $0, $0, $0 row_shr:2 row_mask:0xf bank_mask:0xf\n\t"
            "s_nop 1\n\tv_add_u32_dpp $0, $0, $0 row_shr:4 row_mask:0xf bank_mask:0xf\n\t"
            "s_nop 1\n\tv_add_u32_dpp $0, $0, $0 row_shr:8 row_mask:0xf bank_mask:0xf\n\t"
            "s_nop 1\n\tv_add_u32_dpp $0, $0, $0 row_bcast:15 row_mask:0xa bank_mask:0xf\n\t"
            "s_nop 1\n\tv_add_u32_dpp $0, $0, $0 row_bcast:31 row_mask:0xc bank_mask:0xf"
        )
        found = gl.inline_asm_elementwise(text, "=&v,v", [values], dtype=gl.int32, is_pure=False, pack=1)
    else:
        found = gl.associative_scan(values, 0, add)
    return found


@gluon.jit
def splits_of(some, real, computed, split_blocks, plan):
    """Returns the number of splits of each sequence of one call of `blocks_at`. ``some``: the sequences' numbers of blocks."""
    skipped = gl.where(real, plan.skipped_splits, 0)
    return gl.where(computed, gl.maximum(ceil_div(some, split_blocks), 1), skipped)


@gluon.jit
def search_split(split, operands, plan):
    """Returns what `find_split` returns. Used for split-KV of several sequences, whose lengths are loaded plan.lengths at a
    time."""
    layout: gl.constexpr = everywhere_layout(plan.lengths, gl.num_warps())
    index = gl.arange(0, plan.lengths, layout)
    if plan.once:
        some, lengths, real, computed = blocks_at(operands, 0, plan, layout)
        split_blocks = blocks_per_split(gl.sum(some, 0), gl.max(some, 0), plan)
        splits = splits_of(some, real, computed, split_blocks, plan)
        begins = prefix_sums(splits) - splits
        own = (begins <= split) & (split - begins < splits)  # true for one sequence; for none if the split is surplus
        sequence = gl.min(gl.where(own, index, operands.batch), 0)
        first_split = gl.max(gl.where(own, begins, 0), 0)
        length = gl.max(gl.where(own, lengths, 0), 0)
    else:
        blocks = 0
        longest = 0
        for first in range(0, operands.batch, plan.lengths):
            some, _, _, _ = blocks_at(operands, first, plan, layout)
            blocks += gl.sum(some, 0)
            if plan.merge_cost > 0:
                longest = gl.maximum(longest, gl.max(some, 0))
        split_blocks = blocks_per_split(blocks, longest, plan)
        sequence = operands.batch
        before = 0
        first_split = 0
        length = 0
        for first in range(0, operands.batch, plan.lengths):
            some, lengths, real, computed = blocks_at(operands, first, plan, layout)
            splits = splits_of(some, real, computed, split_blocks, plan)
            begins = before + prefix_sums(splits) - splits
            own = (begins <= split) & (split - begins < splits)
            sequence = gl.minimum(sequence, gl.min(gl.where(own, first + index, operands.batch), 0))
            first_split = gl.maximum(first_split, gl.max(gl.where(own, begins, 0), 0))
            length = gl.maximum(length, gl.max(gl.where(own, lengths, 0), 0))
            before += gl.sum(splits, 0)
    return sequence, first_split, split_blocks, length


@gluon.jit
def find_split(split, operands, plan):
    """Returns the sequence that split number ``split`` belongs to, that sequence's first split, the number of key blocks per split,
    and the sequence's length. For a surplus split, the sequence is ``batch``, and the length is arbitrary.
    """
    sequence = split
    first_split = 0
    split_blocks = 0
    if plan.split_kv and plan.lengths > 1:
        sequence, first_split, split_blocks, length = search_split(split, operands, plan)
    else:
        length = length_of(gl.minimum(sequence, operands.batch - 1), operands)
        if plan.split_kv:  # a batch of one
            _, count = visible_keys(length, plan)
            blocks = ceil_div(count, plan.block_n)
            split_blocks = blocks_per_split(blocks, blocks, plan)
            sequence = (split * split_blocks >= gl.maximum(blocks, 1)).to(gl.int32)
    return sequence, first_split, split_blocks, length


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
    sequence, first_split, split_blocks, length = find_split(split, operands, plan)
    first_query, new = new_tokens(operands.cu_seqlens_q, gl.minimum(sequence, operands.batch - 1), plan.q_len)
    if (sequence < operands.batch) & (new > 0) & (new <= plan.q_len):
        begin, count = visible_keys(length, plan)
        blocks = ceil_div(count, block_n)
        first_block = 0
        after_block = blocks
        if plan.split_kv:
            first_block = (split - first_split) * split_blocks
            after_block = gl.minimum(first_block + split_blocks, blocks)
            if split == first_split and number + kv_head == 0:
                gl.store(
                    partial.plan + sequence,
                    (gl.to_tensor(first_split).to(gl.int64) << 32) + ceil_div(blocks, split_blocks),
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
