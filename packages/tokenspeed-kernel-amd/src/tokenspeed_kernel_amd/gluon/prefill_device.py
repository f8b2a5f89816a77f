"""Device code of prefill that architectures share: which tile a workgroup computes, and the order of its blocks of keys.

`gluon.prefill` explains how work is divided. The architecture provides a `Machine`: how blocks reach LDS, and the MFMAs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

from tokenspeed_kernel_amd.gluon.layouts_device import everywhere_layout
from tokenspeed_kernel_amd.gluon.mask_device import hide_outside_band
from tokenspeed_kernel_amd.gluon.softmax_device import (
    LN_2,
    LOG2_E,
    SoftmaxState,
    add,
    cap_scores,
    first_step,
    largest_sum,
    normalise,
    softmax_step,
    summed,
    weigh,
)

# 16-bit elements per vector of 16 bytes; the strides of q, k and v are in such vectors.
VECTOR = gl.constexpr(8)


@gluon.aggregate
class Machine:
    """What the architecture provides for prefill: device functions. The copy of a block begins with ``fetch`` and is complete after
    ``land``; in between, it is *in flight*.

    Attributes:
        fetch: ``fetch(keys, values, side, block)`` starts the copies of the keys and values of a block to LDS, side 0 or 1, and
            returns what ``land`` needs. No copy to the same side may be in flight.
        land: ``land(keys, values, side, flight)`` completes the copy in flight. An architecture may have one buffer for both
            sides: ``land`` must be called after the other side's last use.
        qk: ``qk(q, keys, side)`` returns the dot products of q and the keys in LDS, float32 [rows, block_n].
        pv: ``pv(weights, values, side, acc, dtype)`` returns acc + weights @ values, float32. Columns may be in the architecture's
            own order.
        in_order: ``in_order(state)`` returns a state whose accumulators have the columns of the values, in this order.
    """

    fetch: gl.constexpr
    land: gl.constexpr
    qk: gl.constexpr
    pv: gl.constexpr
    in_order: gl.constexpr


@gluon.aggregate
class TileLocation:
    """The query tile that a workgroup computes.

    Attributes:
        level: the tile's index within its sequence; negative if no tile is left.
        rank: the tile's index among the tiles of all sequences and heads that have this level.
        start, length: the sequence's first token, and the sequence's number of tokens.
    """

    level: gl.tensor
    rank: gl.tensor
    start: gl.tensor
    length: gl.tensor


@gluon.aggregate
class Rows:
    """How blocks of keys, or of values, are copied from global memory to LDS.

    Attributes:
        shared: LDS buffers of the architecture, by side: for keys [sides, block_n, head_dim].
        offsets: int32 [block_n, head_dim], offsets in global memory of a block's elements from the block's first element.
        token_stride: distance in global memory from one token to the next, in elements.
    """

    shared: gl.shared_memory_descriptor
    offsets: gl.tensor
    token_stride: gl.tensor


@gluon.aggregate
class Block:
    """The global addresses of the first key and the first value of a block."""

    keys: gl.tensor
    values: gl.tensor


@gluon.aggregate
class Band:
    """The causal window of a tile's query rows.

    Attributes:
        row: int32 [rows], each query's position in its sequence.
        window_left: a query sees its own position and this many positions before it.
    """

    row: gl.tensor
    window_left: gl.tensor


# -- which tile ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def rank_of(round_number, cu, cus: gl.constexpr):
    """Returns the index, in the order of all tiles, of the tile that a CU computes in round ``round_number``."""
    return round_number * cus + gl.where(round_number % 2 == 0, cu, cus - 1 - cu)


@gluon.jit
def find_tile(cu_seqlens, batch, level, rank, heads: gl.constexpr, block_m: gl.constexpr, block_b: gl.constexpr):
    """Returns the `TileLocation` of the tile that is ``rank`` tiles after the first tile of ``level``.

    Tiles are ordered from most keys to fewest: from the highest level down, within a level by sequence, and within a sequence by
    head.
    """
    if block_b == 1:
        start = gl.load(cu_seqlens)
        length = gl.load(cu_seqlens + 1) - start
        level = gl.minimum(level, (length + block_m - 1) // block_m - 1) - rank // heads
        rank = rank % heads
    else:
        layout: gl.constexpr = everywhere_layout(block_b, gl.num_warps())
        index = gl.arange(0, block_b, layout)
        real = index < batch
        begins = gl.load(cu_seqlens + index, mask=real, other=0)
        lengths = gl.load(cu_seqlens + index + 1, mask=real, other=0) - begins
        tiles = (lengths + block_m - 1) // block_m
        level = gl.minimum(level, gl.max(tiles, 0) - 1)
        members = gl.sum((tiles > level).to(gl.int32), 0)
        while (level >= 0) & (rank >= members * heads):
            rank -= members * heads
            level -= 1
            members = gl.sum((tiles > level).to(gl.int32), 0)
        sequence = rank // heads
        if members < batch:  # some sequence has too few tiles for this level
            location = gl.associative_scan((tiles > level).to(gl.int32), 0, add)
            sequence = gl.sum((location <= sequence).to(gl.int32), 0)
        start = gl.sum(gl.where(index == sequence, begins, 0), 0)
        length = gl.sum(gl.where(index == sequence, lengths, 0), 0)
    return TileLocation(level, rank, start, length)


# -- one tile ------------------------------------------------------------------------------------------------------------------


@gluon.jit
def allocate_rows(dtype: gl.constexpr, shape: gl.constexpr, storage: gl.constexpr, copy: gl.constexpr, token_stride):
    """Allocates the LDS buffers of keys or of values, and computes a block's element offsets in global memory."""
    row = gl.arange(0, copy.shape[0], gl.SliceLayout(1, copy))
    column = gl.arange(0, copy.shape[1], gl.SliceLayout(0, copy))
    offsets = row[:, None] * token_stride + column[None, :]
    return Rows(gl.allocate_shared_memory(dtype, shape, storage), offsets, gl.to_tensor(token_stride))


@gluon.jit
def within(rows, count):
    """Returns ``rows`` for a block with only ``count`` valid tokens: later rows of the block load the last valid token instead."""
    row = gl.arange(0, rows.offsets.shape[0], gl.SliceLayout(1, rows.offsets.type.layout))
    offsets = rows.offsets - (gl.maximum(row - (count - 1), 0) * rows.token_stride)[:, None]
    return Rows(rows.shared, offsets, rows.token_stride)


@gluon.jit
def block_at(base, keys, values, position):
    """Returns the addresses of the block that begins ``position`` tokens after the block ``base``."""
    position = gl.to_tensor(position).to(gl.int64)
    return Block(base.keys + position * keys.token_stride, base.values + position * values.token_stride)


@gluon.jit
def block_after(block, keys, values):
    """Returns the addresses of the block that follows ``block``."""
    block_n: gl.constexpr = keys.shared.shape[1]
    return Block(block.keys + block_n * keys.token_stride, block.values + block_n * values.token_stride)


@gluon.jit
def attend_block(
    machine, q, keys, values, side: gl.constexpr, first, state, band, scaling,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, MAXIMUM: gl.constexpr,
):  # fmt: skip
    """Updates the softmax state with the block in side ``side`` of LDS. The block's first key is at position
    ``first``.

    Args:
        MAXIMUM: "first" for the first block of a tile, "moves" to update the row max, "stays" to keep it (see `weigh`).
    """
    scores = cap_scores(machine.qk(q, keys, side), scaling)
    scores = hide_outside_band(scores, band.row, first, band.window_left, CAUSAL, WINDOWED)
    if MAXIMUM == "first":
        weights, state = first_step(scores, values.offsets.shape[1], scaling)
    elif MAXIMUM == "moves":
        weights, state = softmax_step(scores, state, scaling)
    else:
        weights, state = weigh(scores, state, scaling)
    acc = machine.pv(weights, values, side, state.acc, q.dtype)
    return SoftmaxState(acc, state.row_max, state.row_sum)


@gluon.jit
def attend_before_diagonal(
    machine, q, keys, values, block, flight, state, band, scaling, begin, end, last, WINDOWED: gl.constexpr, MAXIMUM: gl.constexpr
):
    """Updates the softmax state with an even number of blocks before the diagonal, from position ``begin`` to ``end``.

    On entry, the copy of ``block`` (the block at ``begin``) to side 0 of LDS is in flight. On exit, the copy of the block at
    ``end`` is in flight, unless ``end`` is ``last``: then there is no further block.

    Returns:
        The block at ``end``, its copy in flight, and the state.
    """
    block_n: gl.constexpr = keys.shared.shape[1]
    for first in range(begin, end, 2 * block_n):
        machine.land(keys, values, 0, flight)
        block = block_after(block, keys, values)
        flight = machine.fetch(keys, values, 1, block)
        state = attend_block(machine, q, keys, values, 0, first, state, band, scaling, False, WINDOWED, MAXIMUM)
        machine.land(keys, values, 1, flight)
        block = block_after(block, keys, values)
        if first + 2 * block_n < last:
            flight = machine.fetch(keys, values, 0, block)
        state = attend_block(machine, q, keys, values, 1, first + block_n, state, band, scaling, False, WINDOWED, MAXIMUM)
    return block, flight, state


@gluon.jit
def attend_window(
    machine,
    q,
    keys,
    values,
    block,
    flight,
    state,
    band,
    scaling,
    begin,
    full_begin,
    end,
    WINDOWED: gl.constexpr,
    MAXIMUM: gl.constexpr,
):
    """Updates the softmax state with all blocks from position ``begin`` to ``end``, where the diagonal begins.

    Blocks before ``full_begin`` are masked. If there is a window and the row max may move, all blocks are masked. In fp16, the row
    max moves in the first two blocks.
    """
    if MAXIMUM == "stays" and q.dtype == gl.float16:
        block_n: gl.constexpr = keys.shared.shape[1]
        settled = gl.minimum(begin + 2 * block_n, end)
        block, flight, state = attend_before_diagonal(
            machine, q, keys, values, block, flight, state, band, scaling, begin, settled, end, WINDOWED, "moves"
        )
        begin = settled
        full_begin = gl.maximum(full_begin, settled)
    if WINDOWED:
        masked_end = full_begin if MAXIMUM == "stays" else end
        block, flight, state = attend_before_diagonal(
            machine, q, keys, values, block, flight, state, band, scaling, begin, masked_end, end, True, MAXIMUM
        )
    if MAXIMUM == "stays" or not WINDOWED:
        _, _, state = attend_before_diagonal(
            machine, q, keys, values, block, flight, state, band, scaling, full_begin, end, end, False, MAXIMUM
        )
    return state


@gluon.jit
def window_begins(first_row, window_left, block_m: gl.constexpr, variant: gl.constexpr):
    """Returns two positions, both 0 without a window. Keys before the first position are visible to no row of the tile. Keys from
    the second position up to ``first_row`` are visible to every row.

    Both positions are multiples of block_m.
    """
    begin = 0
    full_begin = 0
    if variant.windowed:
        begin = gl.maximum(first_row - window_left, 0) // block_m * block_m
        # From full_begin on, every key is inside every row's window.
        inside = gl.maximum(first_row + block_m - 1 - window_left, 0)
        full_begin = gl.minimum((inside + block_m - 1) // block_m * block_m, first_row)
    return begin, full_begin


@gluon.jit
def store_tile(
    operands, state, sink, location, first_row, head, row, strides,
    shape: gl.constexpr, variant: gl.constexpr, block_m: gl.constexpr,
):  # fmt: skip
    """Normalises a tile's accumulator, and stores the output and the LSE. ``row``: int32 [rows], positions in the sequence."""
    result, log_sum = normalise(state, sink)
    first_token = (location.start + first_row).to(gl.int64)
    layout: gl.constexpr = result.type.layout
    out_row = gl.arange(0, block_m, gl.SliceLayout(1, layout))
    column = gl.arange(0, shape.v_head_dim, gl.SliceLayout(0, layout))
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))
    out = operands.out + first_token * strides.out_token + head * strides.out_head
    offsets = out_row[:, None] * strides.out_token + column[None, :]
    cdna3.buffer_store(result.to(operands.q.dtype.element_ty), out, offsets, mask=(row < location.length)[:, None])
    if variant.lse:
        all_heads: gl.constexpr = shape.xcds * shape.heads
        lse = operands.lse + first_token * all_heads + head
        cdna3.buffer_store(log_sum * LN_2, lse, out_row * all_heads, mask=row < location.length)


@gluon.jit
def load_queries(q, location, first_row, head, strides, head_dim: gl.constexpr, block_m: gl.constexpr, layout: gl.constexpr):
    """Loads a tile of q. Rows beyond the sequence's end load its last token instead."""
    row = gl.arange(0, block_m, gl.SliceLayout(1, layout))
    column = gl.arange(0, head_dim, gl.SliceLayout(0, layout))
    q_token = strides.q_token * VECTOR
    base = q + (location.start + first_row).to(gl.int64) * q_token + head * (strides.q_head * VECTOR)
    offsets = gl.minimum(row, location.length - 1 - first_row) * q_token
    return cdna3.buffer_load(base, offsets[:, None] + column[None, :])


@gluon.jit
def bit_of(turn):
    """Returns the bit of tile ``turn`` of a workgroup in a set of tiles. Tiles from 31 on share a bit."""
    return gl.to_tensor(1) << gl.minimum(turn, 31)


@gluon.jit
def next_chosen(
    cu_seqlens, batch, location, turn, round_number, rank, chosen,
    workers, cu, heads: gl.constexpr, block_m: gl.constexpr, tile_shape: gl.constexpr,
):  # fmt: skip
    """Returns ``location``, ``turn``, ``round_number`` and ``rank`` of the workgroup's first tile in the set ``chosen`` (`bit_of`),
    from the given tile on."""
    while (location.level >= 0) & ((chosen & bit_of(turn)) == 0):
        turn += 1
        round_number += (workers + tile_shape.cus - 1) // tile_shape.cus
        next_rank = rank_of(round_number, cu, tile_shape.cus)
        location = find_tile(
            cu_seqlens, batch, location.level, location.rank + next_rank - rank, heads, block_m, tile_shape.block_b
        )
        rank = next_rank
    return location, turn, round_number, rank


@gluon.jit
def attend_tiles(
    machine, operands, batch, keys, values, strides, scaling, window_left,
    shape: gl.constexpr, variant: gl.constexpr, tile_shape: gl.constexpr, queries: gl.constexpr, chosen, MAXIMUM: gl.constexpr,
):  # fmt: skip
    """Computes a workgroup's tiles and stores their outputs.

    Args:
        machine: the architecture's part.
        queries: the layout of q, an operand of the MFMA.
        chosen: a set of the workgroup's tiles, see `bit_of`: only these are computed. All are computed if the row max stays.
        MAXIMUM: "stays" or "moves", see `attend_block`: how the row max is treated after a tile's first block. In fp16, "stays"
            begins after the blocks that `attend_window` names.

    Returns:
        int32 [rows]: per row, the set of tiles whose row sum became too large for a fixed row max.
    """
    block_m: gl.constexpr = tile_shape.block_m
    block_n: gl.constexpr = tile_shape.block_n
    heads: gl.constexpr = shape.heads
    dtype: gl.constexpr = operands.q.dtype.element_ty
    row_layout: gl.constexpr = gl.SliceLayout(1, queries.parent)
    repeat = gl.zeros([block_m], gl.int32, row_layout)
    # Consecutive workgroups run on different XCDs. Each XCD computes its own heads. So its L2 holds the keys of few heads.
    xcd = gl.program_id(0) % shape.xcds
    workers = gl.num_programs(0) // shape.xcds
    worker = gl.program_id(0) // shape.xcds
    # Load balancing: each round assigns one tile to every CU, the longest tiles first. Every second round assigns in reverse order,
    # so that the CU with the longest tile of a round gets the shortest of the next. A CU's workgroups alternate between rounds.
    cus: gl.constexpr = tile_shape.cus
    round_number = worker // cus
    rank = rank_of(round_number, worker % cus, cus)
    location = find_tile(operands.cu_seqlens, batch, 1 << 30, rank, heads, block_m, tile_shape.block_b)
    turn = gl.to_tensor(0)
    if MAXIMUM == "moves":
        location, turn, round_number, rank = next_chosen(
            operands.cu_seqlens,
            batch,
            location,
            turn,
            round_number,
            rank,
            chosen,
            workers,
            worker % cus,
            heads,
            block_m,
            tile_shape,
        )
    while location.level >= 0:
        head = xcd * heads + location.rank % heads
        kv_head = head // shape.gqa_ratio
        first_row = location.level * block_m

        begin, full_begin = window_begins(first_row, window_left, block_m, variant)
        sequence = Block(
            operands.k + location.start.to(gl.int64) * keys.token_stride + kv_head * (strides.k_head * VECTOR),
            operands.v + location.start.to(gl.int64) * values.token_stride + kv_head * (strides.v_head * VECTOR),
        )
        # The diagonal blocks come first. Only these blocks may reach beyond the sequence, and every row sees a key in them.
        block = block_at(sequence, keys, values, first_row)
        left = location.length - first_row
        # The first q @ k needs both q and the keys. q comes from HBM and takes longest, so its load is issued first: loads return
        # in order. The keys are often in L2 already, because other workgroups read them too.
        q = load_queries(operands.q, location, first_row, head, strides, shape.head_dim, block_m, queries)
        flight = machine.fetch(within(keys, left), within(values, left), 0, block)
        sink = None
        if variant.sinks:
            sink = gl.load(operands.sinks + head).to(gl.float32) * LOG2_E
        # Find the next tile while this tile's keys are in flight, not after the output store: loads wait for earlier stores.
        round_number += (workers + cus - 1) // cus
        next_rank = rank_of(round_number, worker % cus, cus)
        step = next_rank - rank
        rank = next_rank
        following = find_tile(operands.cu_seqlens, batch, location.level, location.rank + step, heads, block_m, tile_shape.block_b)
        row = first_row + gl.arange(0, block_m, row_layout)
        # The empty inline assembly makes the row positions opaque to LLVM. Otherwise LLVM would keep the diagonal's comparison
        # masks, which are the same for all tiles. The masks would take 64 pairs of scalar registers, and spill.
        opaque = gl.inline_asm_elementwise("", "=v,0", [row], dtype=gl.int32, is_pure=True, pack=1)
        band = Band(opaque, gl.to_tensor(window_left))
        machine.land(keys, values, 0, flight)
        if left > block_n:
            flight = machine.fetch(
                within(keys, left - block_n), within(values, left - block_n), 1, block_after(block, keys, values)
            )
        state = attend_block(machine, q, keys, values, 0, first_row, None, band, scaling, True, variant.narrow, "first")
        block = block_at(sequence, keys, values, begin)
        if left > block_n:
            machine.land(keys, values, 1, flight)
        if begin < first_row:
            flight = machine.fetch(keys, values, 0, block)
        if left > block_n:
            # A row with a narrow window may see no key in the first block. Its row max is then still `LOWEST`, so the second block
            # must update it.
            second: gl.constexpr = "moves" if variant.narrow or dtype == gl.float16 else MAXIMUM
            state = attend_block(
                machine, q, keys, values, 1, first_row + block_n, state, band, scaling, True, variant.narrow, second
            )
        state = attend_window(
            machine, q, keys, values, block, flight, state, band, scaling, begin, full_begin, first_row, variant.windowed, MAXIMUM
        )
        state = summed(state)
        if MAXIMUM == "stays":
            repeat |= gl.where(state.row_sum <= largest_sum(dtype), 0, bit_of(turn))

        state = machine.in_order(state)
        store_tile(operands, state, sink, location, first_row, head, row, strides, shape, variant, block_m)
        location = following
        turn += 1
        if MAXIMUM == "moves":
            location, turn, round_number, rank = next_chosen(
                operands.cu_seqlens, batch, location, turn, round_number, rank, chosen, workers, worker % cus, heads, block_m,
                tile_shape,
            )  # fmt: skip
    return repeat
