"""Device code of the all-reduces over peer memory, optionally fused with residual add, RMSNorm and quantisation.

A program processes one row at a time in a grid-stride loop. The program sends its own row, waits for the rows of the other ranks,
and adds all rows in rank order. So every rank gets bitwise equal results.

*One shot*: every rank sends every row to every other rank, and each rank adds all ranks' rows. A one-shot all-reduce takes one trip
between ranks. *Two shots*: row r is owned by rank r mod world size. The other ranks send the row to its owner, which adds all
ranks' rows and sends the sum to all ranks. Two shots take two trips, and move 2 / world size of the bytes of one shot. Every rank
normalises all sums itself, because sending the normalised rows as well would take as long again.

Receive buffers are double-buffered: successive calls alternate between two halves. Each block of 512 bytes (``UNIT``) has a
generation counter of its uses, whose parity selects the half; see `tokenspeed_kernel_base.ops.comm.peers`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.comm._peers_device import VECTOR, clear, pack, poll, push, rounded, sendable, unpack
from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.quantization._encode_device import divide, encode_fp8, larger, largest, prepare_divisor
from tokenspeed_kernel.triton.quantization.quantize_fp8_device import scale_of

# 16-byte vectors that share a generation counter (512 bytes).
UNIT_VECTORS = tl.constexpr(32)


@triton.jit
def trip_count(rows):
    """Returns how many rows this program processes in its grid-stride loop."""
    return (rows - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)


@triton.jit
def load_row(start, row, column, inside, ROW: tl.constexpr):
    """Loads a row of a dense tensor at ``start`` as int32 words ``[vectors, 4]``, with zeros outside the row."""
    vector = row.to(tl.int64) * ROW + column
    at = start.to(tl.pointer_type(tl.int32), bitcast=True) + vector[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(at, inside[:, None], other=0)


@triton.jit
def store_row(start, row, column, inside, words, ROW: tl.constexpr):
    # Stores a row's int32 words ``[vectors, 4]`` to a dense tensor at ``start``; the inverse of `load_row`.
    vector = row.to(tl.int64) * ROW + column
    tl.store(
        start.to(tl.pointer_type(tl.int32), bitcast=True) + vector[:, None] * 4 + tl.arange(0, 4)[None, :], words, inside[:, None]
    )


@triton.jit
def row_inside(row, column, total, ROW: tl.constexpr):
    """Returns the mask of a row's vectors that exist; the last row may be shorter than ROW vectors."""
    return (column < ROW) & (row.to(tl.int64) * ROW + column < total)


@triton.jit
def from_other(inside, rank, other, column):
    """Returns the mask of the row's vectors that rank ``other`` sends to this rank; all false if ``other`` is this rank."""
    return inside & (column * 0 + rank != other)


@triton.jit
def slot_of(generations, position, column, inside, half, UNITS: tl.constexpr):
    """Returns the byte offsets of a row's vectors in a rank's receive buffer, and the generation counters of the vectors' 512-byte
    blocks, whose parity selects the half of the buffer.
    """
    unit = position * UNITS + column // UNIT_VECTORS
    generation = tl.load(generations + unit, mask=inside, other=0)
    return (generation & 1).to(tl.int64) * half + (position.to(tl.int64) * (UNITS * UNIT_VECTORS) + column) * VECTOR, generation


@triton.jit
def next_generation(generations, position, column, inside, generation, UNITS: tl.constexpr):
    """Increments the generation counters of a row's 512-byte blocks, so that the next call uses the other half of the receive
    buffer. Call this function after a barrier, when all threads have read the old counters.
    """
    first = inside & (column % UNIT_VECTORS == 0)
    tl.store(generations + position * UNITS + column // UNIT_VECTORS, generation + 1, mask=first)


@triton.jit
def store_fp8(
    first,
    second,
    row,
    column,
    inside,
    out,
    scale_out,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantises a row to fp8 with one scale per ``GROUP`` vectors.

    ``first``, ``second``: float32 elements of the row's words, rounded to DTYPE, zeros outside the row. ``GROUP`` is a power of
    two.
    """
    BLOCK: tl.constexpr = first.shape[0]
    GROUPS: tl.constexpr = BLOCK // GROUP
    MADE: tl.constexpr = (ROW + GROUP - 1) // GROUP
    magnitude = larger(tl.abs(first), tl.abs(second))
    scale = scale_of(largest(tl.reshape(largest(magnitude, 1), (GROUPS, GROUP)), 1), LIMIT)
    group = tl.arange(0, GROUPS)
    tl.store(scale_out + row.to(tl.int64) * MADE + group, scale, mask=group < MADE)
    factor, divisor, reciprocal = prepare_divisor(scale, INTERPRETED)
    factor = tl.reshape(tl.broadcast_to(factor[:, None], (GROUPS, GROUP)), (BLOCK, 1))
    divisor = tl.reshape(tl.broadcast_to(divisor[:, None], (GROUPS, GROUP)), (BLOCK, 1))
    reciprocal = tl.reshape(tl.broadcast_to(reciprocal[:, None], (GROUPS, GROUP)), (BLOCK, 1))
    PAIRS: tl.constexpr = DTYPE.primitive_bitwidth == 16
    STEPS: tl.constexpr = 1 if PAIRS else 2
    ITEM: tl.constexpr = 8 if PAIRS else 4
    quotient = divide(first, factor, divisor, reciprocal, INTERPRETED, STEPS)
    if PAIRS:
        # Interleave the pairs before the conversion to fp8: ptxas 12.8 miscompiles an interleave of the converted bytes.
        quotient = tl.interleave(quotient, divide(second, factor, divisor, reciprocal, INTERPRETED, STEPS))
    at = (row.to(tl.int64) * ROW + column)[:, None] * ITEM + tl.arange(0, ITEM)[None, :]
    tl.store(out + at, encode_fp8(quotient, FORMAT, NATIVE), mask=inside[:, None])


@triton.jit
def finish(
    first,
    second,
    row,
    column,
    inside,
    scales,
    added,
    out,
    scale_out,
    residual_out,
    hidden,
    eps,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Runs the epilogue of a row. If requested, adds the residual to the sum over the ranks, normalises and quantises. Stores the
    result.

    ``first``, ``second``: the sum, see `unpack`. ``scales``, ``added``: words of the norm's weight and of the residual. GROUP:
    vectors that share a scale for fp8 output, else 0.
    """
    if NORM:
        first, second = rounded(first, DTYPE), rounded(second, DTYPE)
        if RESIDUAL:
            first_added, second_added = unpack(added, DTYPE)
            first, second = rounded(first + first_added, DTYPE), rounded(second + second_added, DTYPE)
            store_row(residual_out, row, column, inside, pack(first, second, DTYPE), ROW)
        squares = tl.sum(tl.sum(first * first + second * second, axis=1), axis=0)
        inverse = tl.rsqrt(squares / hidden + eps)
        first_scale, second_scale = unpack(scales, DTYPE)
        first, second = first * inverse * first_scale, second * inverse * second_scale
    if GROUP == 0:
        store_row(out, row, column, inside, pack(first, second, DTYPE), ROW)
    else:
        first, second = rounded(first, DTYPE), rounded(second, DTYPE)
        store_fp8(first, second, row, column, inside, out, scale_out, DTYPE, ROW, GROUP, FORMAT, LIMIT, NATIVE, INTERPRETED)


@triton.jit
def sum_ranks(
    source, slot, own, column, inside, capacity, rank, limit,
    WORLD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Waits for the words that the other ranks send for a row, and adds the words of all ranks in rank order.

    Returns the sum as two float32 tiles (see `unpack`).

    ``source``: the receive buffer, with ``capacity`` bytes for each rank. ``slot``: offsets of the row's vectors, see `slot_of`.
    ``own``: this rank's words.
    """
    first = tl.zeros((BLOCK, 4), tl.float32)
    second = tl.zeros((BLOCK, 4), tl.float32)
    for other in tl.static_range(WORLD):
        active = from_other(inside, rank, other, column)
        received = poll(source + other * capacity + slot, active, limit, PACK)
        first_part, second_part = unpack(tl.where(rank == other, own, received), DTYPE)
        first += first_part
        second += second_part
    return first, second


@triton.jit
def clear_ranks(source, slot, column, inside, capacity, rank, WORLD: tl.constexpr):
    """Resets the words that `sum_ranks` has read to the sentinel, the value that means "not yet arrived"."""
    for other in tl.static_range(WORLD):
        clear(source + other * capacity + slot, from_other(inside, rank, other, column))


@triton.jit(do_not_specialize=["rows", "total", "rank"])
def one_shot_kernel(
    x,
    residual,
    weight,
    out,
    scale_out,
    residual_out,
    generations,
    targets,
    source,
    capacity,
    rows, total, rank,
    hidden, eps, limit,
    WORLD: tl.constexpr, DTYPE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, ONCE: tl.constexpr, EARLY: tl.constexpr, PACK: tl.constexpr,
    GROUP: tl.constexpr, FORMAT: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # All-reduce in one trip: every rank pushes each of its rows to all other ranks, and sums the ranks' rows itself.
    #
    # Args:
    #     x: this rank's rows.
    #     residual, weight, out, scale_out, residual_out: operands and results of the fused operation, see `finish`.
    #     generations: the generation counters of the receive buffer's 512-byte blocks.
    #     targets: this rank's section in the receive buffers of the other ranks, the next rank first.
    #     source: this rank's receive buffer, ``[2 halves, WORLD ranks, capacity vectors]``.
    #     rows, total: number of rows, and of 16-byte vectors of all rows.
    #     limit: time limit of the polling, in nanoseconds, see `poll`.
    UNITS: tl.constexpr = (ROW + UNIT_VECTORS - 1) // UNIT_VECTORS
    column = tl.arange(0, BLOCK)
    capacity = capacity.to(tl.int64)
    half = WORLD * capacity
    start(EARLY)
    scales = tl.zeros((BLOCK, 4), tl.int32)
    if NORM:
        scales = load_row(weight, rank * 0, column, column < ROW, ROW)
    for iteration in range(1 if ONCE else trip_count(rows)):
        row = tl.program_id(0) + iteration * tl.num_programs(0)
        inside = row_inside(row, column, total, ROW)
        slot, generation = slot_of(generations, row, column, inside, half, UNITS)
        own = load_row(x, row, column, inside, ROW)
        added = own
        if RESIDUAL:
            added = load_row(residual, row, column, inside, ROW)
        words = sendable(own, DTYPE)
        for index in tl.static_range(WORLD - 1):
            push(targets[index] + slot, words, inside)
        first, second = sum_ranks(source, slot, own, column, inside, capacity, rank, limit, WORLD, DTYPE, BLOCK, PACK)
        finish(
            first, second, row, column, inside, scales, added, out, scale_out, residual_out, hidden, eps,
            DTYPE, ROW, NORM, RESIDUAL, GROUP, FORMAT, LIMIT, NATIVE, INTERPRETED,
        )  # fmt: skip
        tl.debug_barrier()
        clear_ranks(source, slot, column, inside, capacity, rank, WORLD)
        next_generation(generations, row, column, inside, generation, UNITS)


@triton.jit(do_not_specialize=["rows", "total", "rank"])
def two_shot_kernel(
    x,
    residual,
    weight,
    out,
    scale_out,
    residual_out,
    generations, sum_generations,
    targets, sum_targets,
    source, sum_source,
    capacity, sum_capacity, units,
    rows, total, rank,
    hidden, eps, limit,
    WORLD: tl.constexpr, DTYPE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, ONCE: tl.constexpr, EARLY: tl.constexpr, PACK: tl.constexpr,
    GROUP: tl.constexpr, FORMAT: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # All-reduce in two trips: each row is pushed to its owner, rank ``row % WORLD``. The owner sums the ranks' rows and pushes the
    # sum to all ranks.
    #
    # There are two receive buffers, each with its own generation counters: ``source`` for the rows that this rank owns, and
    # ``sum_source`` for the sums that owners send. ``units``: the number of generation counters of an owner's receive buffer. Other
    # arguments: see `one_shot_kernel`.
    UNITS: tl.constexpr = (ROW + UNIT_VECTORS - 1) // UNIT_VECTORS
    column = tl.arange(0, BLOCK)
    capacity = capacity.to(tl.int64)
    half = WORLD * capacity
    start(EARLY)
    scales = tl.zeros((BLOCK, 4), tl.int32)
    if NORM:
        scales = load_row(weight, rank * 0, column, column < ROW, ROW)
    for iteration in range(1 if ONCE else trip_count(rows)):
        row = tl.program_id(0) + iteration * tl.num_programs(0)
        owner = row % WORLD
        position = row // WORLD
        inside = row_inside(row, column, total, ROW)
        # The generations of the receive buffer at the row's owner. Each rank counts the generations of every owner's receive
        # buffer.
        owned = generations + owner * units
        slot, generation = slot_of(owned, position, column, inside, half, UNITS)
        sum_slot, sum_generation = slot_of(sum_generations, row, column, inside, sum_capacity, UNITS)
        own = load_row(x, row, column, inside, ROW)
        added = own
        if RESIDUAL:
            added = load_row(residual, row, column, inside, ROW)
        if owner != rank:
            for index in tl.static_range(WORLD - 1):
                # targets[0] is the next rank's buffer, targets[1] that of the rank after it, and so on.
                to_owner = inside & (column * 0 + (rank + 1 + index) % WORLD == owner)
                push(targets[index] + slot, sendable(own, DTYPE), to_owner)
            total_words = poll(sum_source + sum_slot, inside, limit, PACK)
        else:
            first, second = sum_ranks(source, slot, own, column, inside, capacity, rank, limit, WORLD, DTYPE, BLOCK, PACK)
            # The owner uses the same rounded words that it sends, so that all ranks have bitwise equal results.
            total_words = sendable(pack(first, second, DTYPE), DTYPE)
            for index in tl.static_range(WORLD - 1):
                push(sum_targets[index] + sum_slot, total_words, inside)
        first_sum, second_sum = unpack(total_words, DTYPE)
        finish(
            first_sum, second_sum, row, column, inside, scales, added, out, scale_out, residual_out, hidden, eps,
            DTYPE, ROW, NORM, RESIDUAL, GROUP, FORMAT, LIMIT, NATIVE, INTERPRETED,
        )  # fmt: skip
        tl.debug_barrier()
        if owner == rank:
            clear_ranks(source, slot, column, inside, capacity, rank, WORLD)
        else:
            clear(sum_source + sum_slot, inside)
        next_generation(owned, position, column, inside, generation, UNITS)
        next_generation(sum_generations, row, column, inside, sum_generation, UNITS)
