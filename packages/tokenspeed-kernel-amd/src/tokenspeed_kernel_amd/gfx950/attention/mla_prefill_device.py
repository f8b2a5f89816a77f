"""Device code of MLA prefill. ``mla_prefill`` explains the tile and the LDS."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.attention.extend_device import find_tile, visible_range
from tokenspeed_kernel_amd.gfx950.common.layouts_device import attention_layouts
from tokenspeed_kernel_amd.gfx950.common.mma_device import load_keys, load_values, pv_mma, qk_mma
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gluon.mask_device import hide_outside_band
from tokenspeed_kernel_amd.gluon.prefill_device import Rows, allocate_rows
from tokenspeed_kernel_amd.gluon.softmax_device import (
    LN_2,
    Scaling,
    SoftmaxState,
    cap_scores,
    initial_state,
    normalise,
    nothing_seen,
    softmax_step,
    summed,
)
from tokenspeed_kernel_amd.gluon.tiles_device import QueryTile, load_queries, store_rows

NOPE = gl.constexpr(128)  # columns of a key before its rotary part
ROPE = gl.constexpr(64)
V_HEAD_DIM = gl.constexpr(128)


@gluon.aggregate
class Sequence:
    """The keys and values of one head of a sequence, and their LDS buffers.

    Attributes:
        nope, rope, values: how blocks of the keys' first columns, of their rotary parts and of the values are copied.
        k, v: pointers to the first key and the first value.
    """

    nope: Rows
    rope: Rows
    values: Rows
    k: gl.tensor
    v: gl.tensor


@gluon.aggregate
class Queries:
    """A tile's rows of q as MFMA operands: the columns before the rotary part, and the rotary part."""

    nope: gl.tensor
    rope: gl.tensor


@gluon.jit
def open_sequence(operands, shape, layouts: gl.constexpr, rope_layouts: gl.constexpr, block_n: gl.constexpr, first_key, head):
    """Returns the `Sequence` whose keys begin with token ``first_key`` of k, and allocates its LDS buffers."""
    dtype: gl.constexpr = operands.k.dtype.element_ty
    first = first_key.to(gl.int64)
    return Sequence(
        allocate_rows(dtype, [1, block_n, NOPE], layouts.keys, layouts.key_copy, shape.k_token),
        allocate_rows(dtype, [1, block_n, ROPE], rope_layouts.keys, rope_layouts.key_copy, shape.k_token),
        allocate_rows(dtype, [1, block_n, V_HEAD_DIM], layouts.values, layouts.value_copy, shape.v_token),
        operands.k + first * shape.k_token + head * shape.k_head,
        operands.v + first * shape.v_token + head * shape.v_head,
    )


@gluon.jit
def copy_rows(rows, base, start, end):
    """Starts the copy of a block to LDS: ``rows`` from position ``start`` on. Rows from position ``end`` on are not read; the copy
    repeats the row before ``end`` in their place. ``base``: pointer to the sequence's first row."""
    column = gl.arange(0, rows.shared.shape[2], gl.SliceLayout(0, rows.offsets.type.layout))
    offsets = gl.minimum(rows.offsets, ((end - 1 - start) * rows.token_stride + column)[None, :])
    base += gl.to_tensor(start).to(gl.int64) * rows.token_stride
    copies.buffer_load_to_shared(rows.shared.index(0), base, offsets)


@gluon.jit
def copy_keys(sequence, start, end):
    """Starts the copy of a block of keys to LDS, see `copy_rows`."""
    copy_rows(sequence.nope, sequence.k, start, end)
    copy_rows(sequence.rope, sequence.k + NOPE, start, end)
    copies.commit_group()


@gluon.jit
def copy_values(sequence, start, end):
    """Starts the copy of a block of values to LDS, see `copy_rows`."""
    copy_rows(sequence.values, sequence.v, start, end)
    copies.commit_group()


@gluon.jit
def attend_block(q, sequence, start, end, state, row, scaling, variant: gl.constexpr, ENDS: gl.constexpr, LAST: gl.constexpr):
    """Updates the softmax state with the block of keys in LDS, which begins at position ``start``.

    Args:
        end: the position after the last key that some row sees.
        row: int32 [rows], the position of each query among the keys.
        ENDS: whether causality may hide keys of this block from some row.
        LAST: whether this block is the last. Otherwise the next block is copied to LDS as soon as this block has been read.
    """
    block_n: gl.constexpr = sequence.values.shared.shape[1]
    copies.wait_group(1)  # the keys; the copy of the values is in flight
    scores = qk_mma(q.nope, load_keys(q.nope, sequence.nope.shared.index(0)))
    scores = isa.mfma(q.rope, load_keys(q.rope, sequence.rope.shared.index(0)), scores)
    if not LAST:
        copy_keys(sequence, start + block_n, end)
    scores = hide_outside_band(cap_scores(scores, scaling), row, start, variant.window_left, ENDS, variant.window_left >= 0)
    if LAST and not variant.is_causal:
        index = gl.arange(0, block_n, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where((index < end - start)[None, :], scores, float("-inf"))
    weights, state = softmax_step(scores, state, scaling)
    copies.wait_group(0 if LAST else 1)
    acc = pv_mma(weights, load_values(q.nope, sequence.values.shared.index(0)), state.acc, q.nope.dtype)
    if not LAST:
        copy_values(sequence, start + block_n, end)
    return SoftmaxState(acc, state.row_max, state.row_sum)


@gluon.jit
def attend(q, sequence, begin, end, first_position, scaling, variant: gl.constexpr, tile_shape, mfma: gl.constexpr):
    """Computes attention of a tile to positions ``begin`` to ``end``, a range that is not empty.

    Args:
        first_position: the position of the tile's first query among the keys.

    Returns:
        The softmax state, with row sums reduced across lanes (see `summed`).
    """
    block_n: gl.constexpr = tile_shape.block_n
    causal: gl.constexpr = variant.is_causal
    state = initial_state(tile_shape.m, V_HEAD_DIM, block_n, mfma)
    copy_keys(sequence, begin, end)
    copy_values(sequence, begin, end)
    row = first_position + gl.arange(0, tile_shape.m, gl.SliceLayout(1, mfma))
    # Opaque to LLVM, which would otherwise keep comparison masks in scalar registers, see `prefill_device.attend_tiles`.
    row = gl.inline_asm_elementwise("", "=v,0", [row], dtype=gl.int32, is_pure=True, pack=1)
    before_last = (end - begin - 1) // block_n  # number of blocks before the last
    unmasked = 0
    if causal:
        unmasked = gl.maximum(gl.minimum((first_position + 1 - begin) // block_n, before_last), 0)
        for block in range(unmasked):
            start = begin + block * block_n
            state = attend_block(q, sequence, start, end, state, row, scaling, variant, False, False)
    for block in range(unmasked, before_last):
        state = attend_block(q, sequence, begin + block * block_n, end, state, row, scaling, variant, causal, False)
    start = begin + before_last * block_n
    return summed(attend_block(q, sequence, start, end, state, row, scaling, variant, causal, True))


@gluon.jit
def mla_prefill_kernel(operands, shape: gl.constexpr, variant: gl.constexpr, tile_shape: gl.constexpr, slots: gl.constexpr):
    """Computes the attention output of a tile of queries of one head. Workgroups are numbered by tile, see
    `extend_device.find_tile`, and head. The head varies fastest.

    `gfx950.attention.mla_prefill` describes the arguments.
    """
    m: gl.constexpr = tile_shape.m
    block_n: gl.constexpr = tile_shape.block_n
    dtype: gl.constexpr = operands.q.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    layouts: gl.constexpr = attention_layouts(32, warps, block_n, NOPE, V_HEAD_DIM, dtype)
    rope_layouts: gl.constexpr = attention_layouts(32, warps, block_n, ROPE, V_HEAD_DIM, dtype)
    head = gl.program_id(0) % shape.heads
    at = find_tile(gl.program_id(0) // shape.heads, gl.num_programs(0) // shape.heads, operands, 1, m, slots)
    if at.first_row < at.rows:
        first_key = at.first_query
        length = at.q_len
        if operands.cu_seqlens_kv is not None:
            first_key = gl.load(operands.cu_seqlens_kv + at.sequence)
            length = gl.load(operands.cu_seqlens_kv + at.sequence + 1) - first_key
        begin, end = visible_range(at, length, 1, m, variant, 1)
        tile = QueryTile(at.first_query, at.q_len, at.first_row, head, 1, m)
        state = nothing_seen(m, V_HEAD_DIM, layouts.mfma)
        if begin < end:
            nope = load_queries(operands.q, tile, shape, NOPE, layouts.queries)
            q = Queries(nope, load_queries(operands.q + NOPE, tile, shape, ROPE, rope_layouts.queries))
            sequence = open_sequence(operands, shape, layouts, rope_layouts, block_n, first_key, head)
            scaling = Scaling(operands.scale, operands.cap, variant.capped)
            first_position = length - at.q_len + at.first_row
            state = attend(q, sequence, begin, end, first_position, scaling, variant, tile_shape, layouts.mfma)
        result, log_sum = normalise(state, None)
        store_rows(operands.out, result, tile, at.first_query, shape.out_token, shape.out_head)
        if variant.lse:
            store_rows(operands.lse, log_sum * LN_2, tile, at.first_query, shape.heads, 1)
