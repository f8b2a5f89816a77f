"""Device code of prefill: causal attention of whole sequences whose keys lie in a row."""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.language.extra.hip import libdevice

_LOG2E = gl.constexpr(math.log2(math.e))
_LN2 = gl.constexpr(math.log(2))
# What the running maximum begins with. Finite, so that a row that has not seen a key yet gives weights of 0 and not NaN.
_LOWEST = gl.constexpr(-1e30)

# -- layouts -------------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _product_layout(warps):
    """Accumulators: a lane holds, of one row, runs of four columns. So a row's maximum and sum are almost all within a lane."""
    return gl.amd.AMDMFMALayout(4, [32, 32, 16], True, [warps, 1])


@gluon.constexpr_function
def _transposed(shared):
    """A padded layout of [rows, columns] as one of [columns, rows]: the same bytes."""
    bases = [list(reversed(basis)) for basis in shared.offset_bases]
    return gl.PaddedSharedLayout(list(shared.interval_padding_pairs), bases, [], list(reversed(shared.shape)))


@gluon.constexpr_function
def _copy_layout(shared, warps):
    """The register layout of a copy to LDS: as the tile lies in LDS, 16 bytes a lane, so that each wave writes 1 KB in a row."""
    bases = [list(basis) for basis in shared.offset_bases]
    waves = 9 + warps.bit_length() - 1
    return gl.DistributedLinearLayout(bases[:3] + bases[waves:], bases[3:9], bases[9:waves], [], list(shared.shape))


@gluon.constexpr_function
def _everywhere_layout(size, warps):
    """A vector of 64 or more elements of which every wave holds all: reductions need no LDS."""
    return gl.BlockedLayout([size // 64], [64], [warps], [0])


# -- which tile ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find_tile(cu_seqlens, batch, level, rank, HEADS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_B: gl.constexpr):
    """The tile that is ``rank`` places behind the first of ``level``.

    All tiles of all sequences lie in an order from the longest rows of keys to the shortest: level by level downward, where the
    level of a tile is its place in its sequence; within a level by sequence, and there by head.

    Returns:
        level (negative where there is none), rank within the level, first token and length of the tile's sequence.
    """
    if BLOCK_B == 1:
        start = gl.load(cu_seqlens)
        length = gl.load(cu_seqlens + 1) - start
        level = gl.minimum(level, (length + BLOCK_M - 1) // BLOCK_M - 1) - rank // HEADS
        rank = rank % HEADS
    else:
        layout: gl.constexpr = _everywhere_layout(BLOCK_B, gl.num_warps())
        index = gl.arange(0, BLOCK_B, layout)
        here = index < batch
        begins = gl.load(cu_seqlens + index, mask=here, other=0)
        lengths = gl.load(cu_seqlens + index + 1, mask=here, other=0) - begins
        tiles = (lengths + BLOCK_M - 1) // BLOCK_M
        level = gl.minimum(level, gl.max(tiles, 0) - 1)
        members = gl.sum((tiles > level).to(gl.int32), 0)
        while (level >= 0) & (rank >= members * HEADS):
            rank -= members * HEADS
            level -= 1
            members = gl.sum((tiles > level).to(gl.int32), 0)
        sequence = rank // HEADS
        if members < batch:  # some sequence is too short for this level
            place = gl.associative_scan((tiles > level).to(gl.int32), 0, _add)
            sequence = gl.sum((place <= sequence).to(gl.int32), 0)
        start = gl.sum(gl.where(index == sequence, begins, 0), 0)
        length = gl.sum(gl.where(index == sequence, lengths, 0), 0)
    return level, rank, start, length


# -- one tile ------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy(k_shared, v_shared, side, k_block, v_block, k_offsets, v_offsets):
    """Starts copying a block of keys and values to LDS."""
    async_copy.buffer_load_to_shared(k_shared.index(side), k_block, k_offsets)
    async_copy.buffer_load_to_shared(v_shared.index(side), v_block, v_offsets)
    async_copy.commit_group()


@gluon.jit
def _within(offsets, stride, rows):
    """Offsets of a block's elements, those of rows from ``rows`` on replaced by those of the last row before."""
    row = gl.arange(0, offsets.shape[0], gl.SliceLayout(1, offsets.type.layout))
    return offsets - (gl.maximum(row - (rows - 1), 0) * stride)[:, None]


@gluon.jit
def _attend(
    acc, total, top, q, k_shared, v_shared, first, row, scale, cap, window_left,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Attends to the block in LDS, whose first key is ``first``: sums of weights and of weighted values, relative to ``top``."""
    BLOCK_N: gl.constexpr = k_shared.shape[0]
    layout: gl.constexpr = acc.type.layout
    keys: gl.constexpr = gl.DotOperandLayout(1, layout, 8)
    # Runs of four as the accumulators have them: the weights become an operand where they are. The values' rows are in the same
    # order, which a product does not care about.
    weights: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    values: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
    k = async_copy.load_shared_relaxed(k_shared.permute([1, 0]), keys)
    score = cdna4.mfma(q, k, gl.zeros([acc.shape[0], BLOCK_N], gl.float32, layout))
    if CAP:
        # cap * tanh(score / cap), in the exponential's units. `scale` is 2 * log2(e) / cap of the scaled score here.
        # The division is v_rcp_f32, which errs by a unit in the last place; one by IEEE's rules is ten instructions.
        score = cap - libdevice.fast_dividef(2 * cap, 1 + gl.exp2(score * scale))
    if CAUSAL or WINDOW:
        # A lane's columns are known but for bit 2, which is the same for all of them: split there, columns are constants.
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))[None, :]
        newest = (row - first)[:, None] - (column & 4)
        if CAUSAL and WINDOW:
            visible = ((column & ~4) <= newest) & ((column & ~4) >= newest - window_left)
        elif CAUSAL:
            visible = (column & ~4) <= newest
        else:
            visible = (column & ~4) >= newest - window_left
        score = gl.where(visible, score, float("-inf"))
    highest = gl.maximum(top, gl.max(score, 1))
    if CAP:
        shrink = gl.exp2(top - highest)
        weight = gl.exp2(score - highest[:, None])
    else:
        shrink = gl.exp2((top - highest) * scale)
        weight = gl.exp2(score * scale - (highest * scale)[:, None])
    acc = acc * shrink[:, None]
    operand = gl.convert_layout(weight.to(v_shared.dtype), weights)
    total = total * shrink + gl.sum(weight, 1)
    v = async_copy.load_shared_relaxed(v_shared, values)
    acc = cdna4.mfma(operand, v, acc)
    return acc, total, highest


@gluon.jit
def _attend_all(
    acc, total, top, side, q, k_shared, v_shared, k_block, v_block, k_offsets, v_offsets, k_stride, v_stride,
    begin, end, last, row, scale, cap, window_left, WINDOW: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Attends to the blocks from ``begin`` to ``end``, all before the diagonal.

    The block at ``begin`` is on its way to ``side`` of LDS; k_block and v_block point to it in memory. On return the same holds
    of ``end``, unless that is ``last``, behind which no block is copied.
    """
    BLOCK_N: gl.constexpr = k_shared.shape[1]
    for first in range(begin, end, BLOCK_N):
        async_copy.wait_group(0)
        k_block += BLOCK_N * k_stride
        v_block += BLOCK_N * v_stride
        # A branch, not a copy in vain behind the last block: in one basic block with the copies the products are scheduled worse
        # (2992 instead of 2648 cycles a step of 128 keys by the emulator's model).
        if first + BLOCK_N < last:
            _copy(k_shared, v_shared, 1 - side, k_block, v_block, k_offsets, v_offsets)
        acc, total, top = _attend(
            acc, total, top, q, k_shared.index(side), v_shared.index(side), first, row, scale, cap, window_left, False, WINDOW, CAP
        )
        side = 1 - side
    return acc, total, top, side, k_block, v_block


@gluon.jit(do_not_specialize=["batch", "window_left"])
def mha_prefill_gfx950(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, cu_seqlens, batch,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head, scale, cap, window_left,
    HEAD_DIM: gl.constexpr, V_HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr, NARROW: gl.constexpr, CAP: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, XCDS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A workgroup works on tiles of the heads of its XCD until there are none left.

    NARROW: the window may hide keys on the diagonal, where otherwise all that a tile's rows are from one another is within it.
    HEADS: query heads of an XCD; GROUP: query heads of a key head; BLOCK_B: 1 for one sequence, else at least the batch.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = _product_layout(gl.num_warps())
    queries: gl.constexpr = gl.DotOperandLayout(0, layout, 8)
    # Keys lie in LDS as in memory, a row a key; the layout function speaks of the operand, whose rows are dimensions.
    k_operand: gl.constexpr = cdna4.compute_efficient_padded_shared_layout(
        gl.DotOperandLayout(1, layout, 8), [HEAD_DIM, BLOCK_N], dtype, True
    )
    k_layout: gl.constexpr = _transposed(k_operand)
    v_layout: gl.constexpr = cdna4.compute_efficient_padded_shared_layout(
        gl.DotOperandLayout(1, layout, 4), [BLOCK_N, V_HEAD_DIM], dtype, False
    )
    k_copy: gl.constexpr = _copy_layout(k_layout, gl.num_warps())
    v_copy: gl.constexpr = _copy_layout(v_layout, gl.num_warps())
    k_shared = gl.allocate_shared_memory(dtype, [2, BLOCK_N, HEAD_DIM], k_layout)
    v_shared = gl.allocate_shared_memory(dtype, [2, BLOCK_N, V_HEAD_DIM], v_layout)
    k_row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, k_copy))
    v_row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, v_copy))
    k_offsets = k_row[:, None] * k_stride + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, k_copy))[None, :]
    v_offsets = v_row[:, None] * v_stride + gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, v_copy))[None, :]

    # Consecutive workgroups go to different XCDs. Each XCD has heads of its own, so that its L2 holds the keys of few heads.
    xcd = gl.program_id(0) % XCDS
    workers = gl.num_programs(0) // XCDS
    worker = gl.program_id(0) // XCDS
    # The second half, whose workgroups join those of the first on the same compute units, takes its tiles in opposite order. So
    # does everyone in every other round: who had the longest tile gets the shortest next.
    half = (workers + 1) // 2
    rank = gl.where(worker < half, worker, workers - 1 + half - worker)
    place = rank  # of this workgroup in the round
    level, rank, start, length = _find_tile(cu_seqlens, batch, 1 << 30, rank, HEADS, BLOCK_M, BLOCK_B)
    while level >= 0:
        head = xcd * HEADS + rank % HEADS
        kv_head = head // GROUP
        first_row = level * BLOCK_M

        stop = gl.minimum(first_row + BLOCK_M, (length + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        # Every row sees all of a block that ends before the tile's first row.
        full_end = first_row // BLOCK_N * BLOCK_N
        if WINDOW:
            begin = gl.minimum(gl.maximum(first_row - window_left, 0) // BLOCK_N * BLOCK_N, full_end)
            # ... and begins in the window of its last one.
            inside = gl.maximum(first_row + BLOCK_M - 1 - window_left, 0)
            full_begin = gl.minimum((inside + BLOCK_N - 1) // BLOCK_N * BLOCK_N, full_end)
        else:
            begin = 0
            full_begin = 0
        k_base = k_ptr + start.to(gl.int64) * k_stride + kv_head * k_head
        v_base = v_ptr + start.to(gl.int64) * v_stride + kv_head * v_head
        k_block = k_base + full_end.to(gl.int64) * k_stride
        v_block = v_base + full_end.to(gl.int64) * v_stride
        rows = length - full_end
        _copy(k_shared, v_shared, 0, k_block, v_block, _within(k_offsets, k_stride, rows), _within(v_offsets, v_stride, rows))

        row_in_tile = gl.arange(0, BLOCK_M, gl.SliceLayout(1, queries))
        dimension = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, queries))
        q_base = q_ptr + (start + first_row).to(gl.int64) * q_stride + head * q_head
        q_row = gl.minimum(row_in_tile, length - 1 - first_row) * q_stride
        q = cdna4.buffer_load(q_base, q_row[:, None] + dimension[None, :])

        row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        acc = gl.zeros([BLOCK_M, V_HEAD_DIM], gl.float32, layout)
        total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, layout))
        top = gl.full([BLOCK_M], _LOWEST, gl.float32, gl.SliceLayout(1, layout))
        # The diagonal comes first: only its blocks may reach beyond the sequence, and each row sees some key in them.
        side = first_row * 0
        for first in range(full_end, stop, BLOCK_N):
            async_copy.wait_group(0)
            rows -= BLOCK_N
            if first + BLOCK_N < stop:
                k_block += BLOCK_N * k_stride
                v_block += BLOCK_N * v_stride
                k_within = _within(k_offsets, k_stride, rows)
                _copy(k_shared, v_shared, 1 - side, k_block, v_block, k_within, _within(v_offsets, v_stride, rows))
            else:
                k_block = k_base + gl.to_tensor(begin).to(gl.int64) * k_stride
                v_block = v_base + gl.to_tensor(begin).to(gl.int64) * v_stride
                if begin < full_end:
                    _copy(k_shared, v_shared, 1 - side, k_block, v_block, k_offsets, v_offsets)
            acc, total, top = _attend(
                acc, total, top, q, k_shared.index(side), v_shared.index(side), first, row, scale, cap, window_left,
                True, NARROW, CAP,
            )  # fmt: skip
            side = 1 - side
        if WINDOW:
            acc, total, top, side, k_block, v_block = _attend_all(
                acc, total, top, side, q, k_shared, v_shared, k_block, v_block, k_offsets, v_offsets, k_stride, v_stride,
                begin, full_begin, full_end, row, scale, cap, window_left, True, CAP,
            )  # fmt: skip
        acc, total, top, side, k_block, v_block = _attend_all(
            acc, total, top, side, q, k_shared, v_shared, k_block, v_block, k_offsets, v_offsets, k_stride, v_stride,
            full_begin, full_end, full_end, row, scale, cap, window_left, False, CAP,
        )  # fmt: skip

        if not CAP:
            top = top * scale
        if SINKS:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * _LOG2E
            highest = gl.maximum(top, sink)
            shrink = gl.exp2(top - highest)
            total = total * shrink + gl.exp2(sink - highest)
            acc = acc * (shrink / total)[:, None]
            top = highest
        else:
            acc = acc * (1.0 / total)[:, None]
        out_base = out_ptr + (start + first_row).to(gl.int64) * out_stride + head * out_head
        column = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, layout))
        out_row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        at = out_row[:, None] * out_stride + column[None, :]
        cdna4.buffer_store(acc.to(dtype), out_base, at, mask=(row < length)[:, None])
        if LSE:
            lse_base = lse_ptr + (start + first_row).to(gl.int64) * (XCDS * HEADS) + head
            cdna4.buffer_store((top + gl.log2(total)) * _LN2, lse_base, out_row * (XCDS * HEADS), mask=row < length)

        step = 2 * (workers - 1 - place) + 1
        place = workers - 1 - place
        level, rank, start, length = _find_tile(cu_seqlens, batch, level, rank + step, HEADS, BLOCK_M, BLOCK_B)
