"""Device code of all-gather, reduce-scatter, MoE dispatch and MoE combine, which send rows over peer memory.

Each row goes directly to the ranks that need it. As in the all-reduces, a program processes one row at a time. The program sends
the row to the ranks that need it, then waits for those ranks' rows. If only some ranks need a row, every rank gets a header, which
says whether the row follows. The header also tells the receiver that the sender has finished the previous call.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.comm._exchange_device import (
    UNIT_VECTORS,
    from_other,
    load_row,
    row_inside,
    slot_of,
    store_row,
    trip_count,
)
from tokenspeed_kernel.triton.comm._peers_device import clear, pack, poll, push, sendable, unpack
from tokenspeed_kernel.triton.common_device import start


@triton.jit
def _advance(generations, position, UNITS: tl.constexpr, BLOCK_UNITS: tl.constexpr):
    """Increments the generation counters of a row's 512-byte blocks, so that the next call uses the other half of the receive
    buffer (see `slot_of`). Call this function after a barrier, when all threads have read the counters.
    """
    unit = tl.arange(0, BLOCK_UNITS)
    at = generations + position * UNITS + unit
    tl.store(at, tl.load(at, mask=unit < UNITS, other=0) + 1, mask=unit < UNITS)


@triton.jit(do_not_specialize=["rows", "total", "rank"])
def all_gather_kernel(
    x,
    out,
    generations,
    targets,
    source,
    capacity,
    rows,
    total,
    rank,
    limit,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    EARLY: tl.constexpr,
    PACK: tl.constexpr,
):
    # Writes the rows of all ranks to ``out``, ``[WORLD, rows, ROW vectors]``, ordered by rank. Arguments: see
    # `_exchange_device.one_shot_kernel`.
    UNITS: tl.constexpr = (ROW + UNIT_VECTORS - 1) // UNIT_VECTORS
    column = tl.arange(0, BLOCK)
    capacity = capacity.to(tl.int64)
    start(EARLY)
    for iteration in range(trip_count(rows)):
        row = tl.program_id(0) + iteration * tl.num_programs(0)
        inside = row_inside(row, column, total, ROW)
        slot, _ = slot_of(generations, row, column, inside, WORLD * capacity, UNITS)
        own = load_row(x, row, column, inside, ROW)
        for index in tl.static_range(WORLD - 1):
            push(targets[index] + slot, sendable(own, DTYPE), inside)
        for other in tl.static_range(WORLD):
            active = from_other(inside, rank, other, column)
            words = tl.where(rank == other, own, poll(source + other * capacity + slot, active, limit, PACK))
            store_row(out, row, column + other * total.to(tl.int64), inside, words, ROW)
        tl.debug_barrier()
        for other in tl.static_range(WORLD):
            clear(source + other * capacity + slot, from_other(inside, rank, other, column))
        _advance(generations, row, UNITS, BLOCK_UNITS)


@triton.jit(do_not_specialize=["rows", "total", "rank"])
def reduce_scatter_kernel(
    x,
    out,
    generations,
    targets,
    source,
    capacity,
    rows,
    total,
    rank,
    limit,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    EARLY: tl.constexpr,
    PACK: tl.constexpr,
):
    # Writes this rank's slice of the sum over ranks to ``out``. ``x`` has a slice of ``rows`` rows for each rank; slice ``r`` is
    # pushed to rank ``r``. The sum is in float32, in rank order, and is rounded once. Other arguments: see
    # `_exchange_device.one_shot_kernel`.
    UNITS: tl.constexpr = (ROW + UNIT_VECTORS - 1) // UNIT_VECTORS
    column = tl.arange(0, BLOCK)
    capacity = capacity.to(tl.int64)
    start(EARLY)
    for iteration in range(trip_count(rows)):
        row = tl.program_id(0) + iteration * tl.num_programs(0)
        inside = row_inside(row, column, total, ROW)
        slot, _ = slot_of(generations, row, column, inside, WORLD * capacity, UNITS)
        for index in tl.static_range(WORLD - 1):
            peer = (rank + 1 + index) % WORLD
            theirs = load_row(x, row, column + peer * total.to(tl.int64), inside, ROW)
            push(targets[index] + slot, sendable(theirs, DTYPE), inside)
        own = load_row(x, row, column + rank * total.to(tl.int64), inside, ROW)
        first = tl.zeros((BLOCK, 4), tl.float32)
        second = tl.zeros((BLOCK, 4), tl.float32)
        for other in tl.static_range(WORLD):
            active = from_other(inside, rank, other, column)
            words = tl.where(rank == other, own, poll(source + other * capacity + slot, active, limit, PACK))
            first_part, second_part = unpack(words, DTYPE)
            first += first_part
            second += second_part
        store_row(out, row, column, inside, pack(first, second, DTYPE), ROW)
        tl.debug_barrier()
        for other in tl.static_range(WORLD):
            clear(source + other * capacity + slot, from_other(inside, rank, other, column))
        _advance(generations, row, UNITS, BLOCK_UNITS)


@triton.jit
def _where(condition, mask):
    """Returns ``mask`` if the scalar condition is true, else a mask that is false everywhere."""
    return mask & (mask.to(tl.int32) * 0 + condition.to(tl.int32) != 0)


@triton.jit
def _header(topk_weights, topk_ids, token, word, experts_per_rank, rank, TOP_K: tl.constexpr):
    """Builds a token's header for rank ``rank``: the token's expert ids, local to that rank, then its routing weights, as int32
    words.

    Experts of other ranks get id -1 and weight 0. ``word``: the indices of the header's words to build.
    """
    is_id = word < TOP_K
    is_weight = (word >= TOP_K) & (word < 2 * TOP_K)
    slot = tl.where(is_id, word, word - TOP_K)
    ids = tl.load(topk_ids + token.to(tl.int64) * TOP_K + slot, mask=is_id | is_weight, other=-1)
    weights = tl.load(topk_weights + token.to(tl.int64) * TOP_K + slot, mask=is_weight, other=0.0)
    held = (ids >= 0) & (ids // experts_per_rank == rank)
    local = tl.where(held, ids - rank * experts_per_rank, -1)
    return tl.where(is_id, local, tl.where(held, sendable(weights.to(tl.int32, bitcast=True), tl.float32), 0))


@triton.jit
def _any_id(header, word, TOP_K: tl.constexpr):
    return tl.max(tl.max(tl.where(word < TOP_K, header, -1), axis=1), axis=0) >= 0


@triton.jit(do_not_specialize=["tokens", "rank", "experts_per_rank"])
def moe_dispatch_kernel(
    x,
    topk_weights,
    topk_ids,
    out,
    weights_out,
    ids_out,
    generations,
    targets,
    source,
    capacity,
    tokens,
    rank,
    experts_per_rank,
    limit,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK_HEADER: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    THREADS: tl.constexpr,
    EARLY: tl.constexpr,
    PACK: tl.constexpr,
):
    # Sends each token to the ranks that have at least one of its top-k experts, and writes the received tokens to ``out``.
    #
    # Every rank receives a header for every token: its top-k ids, local to the receiver (-1 for experts of other ranks), and its
    # weights. The token's row follows only if some id is not -1. The result has the tokens of all ranks, ordered by rank; the rows
    # of tokens that were not sent are zeros.
    UNITS: tl.constexpr = (HEADER + ROW + UNIT_VECTORS - 1) // UNIT_VECTORS
    column = tl.arange(0, BLOCK)
    inside = column < ROW
    head = tl.arange(0, BLOCK_HEADER)
    in_head = head < HEADER
    word = head[:, None] * 4 + tl.arange(0, 4)[None, :]
    # For each vector of a header, one thread sends the vector and clears its receive buffer. All threads read the header.
    lane = tl.arange(0, THREADS)
    in_lane = lane < HEADER
    lane_word = lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    capacity = capacity.to(tl.int64)
    half = WORLD * capacity
    start(EARLY)
    for iteration in range(trip_count(tokens)):
        token = tl.program_id(0) + iteration * tl.num_programs(0)
        head_slot, _ = slot_of(generations, token, head, in_head, half, UNITS)
        lane_slot, _ = slot_of(generations, token, lane, in_lane, half, UNITS)
        slot, _ = slot_of(generations, token, column + HEADER, inside, half, UNITS)
        own = load_row(x, token, column, inside, ROW)
        for index in tl.static_range(WORLD - 1):
            peer = (rank + 1 + index) % WORLD
            header = _header(topk_weights, topk_ids, token, word, experts_per_rank, peer, TOP_K)
            push(
                targets[index] + lane_slot,
                _header(topk_weights, topk_ids, token, lane_word, experts_per_rank, peer, TOP_K),
                in_lane,
            )
            push(targets[index] + slot, sendable(own, DTYPE), _where(_any_id(header, word, TOP_K), inside))
        own_header = _header(topk_weights, topk_ids, token, word, experts_per_rank, rank, TOP_K)
        for other in tl.static_range(WORLD):
            inbox = source + other * capacity
            active = from_other(in_head, rank, other, head)
            header = tl.where(rank == other, own_header, poll(inbox + head_slot, active, limit, 1))
            used = _where(_any_id(header, word, TOP_K), inside)
            sent = from_other(used, rank, other, column)
            words = tl.where(rank == other, own, poll(inbox + slot, sent, limit, PACK))
            row = other * tokens + token
            store_row(out, row, column, inside, tl.where(used[:, None], words, 0), ROW)
            at = row.to(tl.int64) * TOP_K + word
            tl.store(ids_out + at, header, mask=word < TOP_K)
            weights = header.to(tl.float32, bitcast=True)
            tl.store(weights_out + at - TOP_K, weights, mask=(word >= TOP_K) & (word < 2 * TOP_K))
            tl.debug_barrier()
            clear(inbox + lane_slot, from_other(in_lane, rank, other, lane))
            clear(inbox + slot, sent)
        tl.debug_barrier()
        _advance(generations, token, UNITS, BLOCK_UNITS)


@triton.jit
def _seen(ids, row, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Whether a row was routed to any expert of this rank (has an id >= 0)."""
    k = tl.arange(0, BLOCK_K)
    return tl.max(tl.load(ids + row.to(tl.int64) * TOP_K + k, mask=k < TOP_K, other=-1), axis=0) >= 0


@triton.jit(do_not_specialize=["tokens", "rank"])
def moe_combine_kernel(
    x,
    ids,
    out,
    generations,
    targets,
    source,
    capacity,
    tokens,
    rank,
    limit,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    THREADS: tl.constexpr,
    EARLY: tl.constexpr,
    PACK: tl.constexpr,
):
    # Returns experts' results to the ranks of their tokens, and sums them there: the counterpart of `moe_dispatch_kernel`.
    #
    # ``x`` has a row for each token of each rank. A rank sends the rows of tokens that had an expert here, ``ids >= 0``, each after
    # a header that says whether the row follows. The sum over ranks is in float32, in rank order, and is rounded once.
    UNITS: tl.constexpr = (1 + ROW + UNIT_VECTORS - 1) // UNIT_VECTORS
    column = tl.arange(0, BLOCK)
    inside = column < ROW
    head = tl.arange(0, 2)
    in_head = head < 1
    lane = tl.arange(0, THREADS)
    in_lane = lane < 1
    capacity = capacity.to(tl.int64)
    half = WORLD * capacity
    start(EARLY)
    for iteration in range(trip_count(tokens)):
        token = tl.program_id(0) + iteration * tl.num_programs(0)
        head_slot, _ = slot_of(generations, token, head, in_head, half, UNITS)
        lane_slot, _ = slot_of(generations, token, lane, in_lane, half, UNITS)
        slot, _ = slot_of(generations, token, column + 1, inside, half, UNITS)
        for index in tl.static_range(WORLD - 1):
            row = (rank + 1 + index) % WORLD * tokens + token
            seen = _seen(ids, row, TOP_K, BLOCK_K)
            push(targets[index] + lane_slot, tl.zeros((THREADS, 4), tl.int32) + seen.to(tl.int32), in_lane)
            theirs = load_row(x, row, column, _where(seen, inside), ROW)
            push(targets[index] + slot, sendable(theirs, DTYPE), _where(seen, inside))
        own_row = rank * tokens + token
        own_seen = _seen(ids, own_row, TOP_K, BLOCK_K)
        own = load_row(x, own_row, column, _where(own_seen, inside), ROW)
        first = tl.zeros((BLOCK, 4), tl.float32)
        second = tl.zeros((BLOCK, 4), tl.float32)
        for other in tl.static_range(WORLD):
            inbox = source + other * capacity
            active = from_other(in_head, rank, other, head)
            header = poll(inbox + head_slot, active, limit, 1)
            received = tl.max(tl.max(header, axis=1), axis=0) > 0
            sent = from_other(_where(received, inside), rank, other, column)
            words = poll(inbox + slot, sent, limit, PACK)
            words = tl.where(sent[:, None], words, 0)
            mine = _where(own_seen & (rank == other), inside)
            words = tl.where(mine[:, None], own, words)
            first_part, second_part = unpack(words, DTYPE)
            first += first_part
            second += second_part
            tl.debug_barrier()
            clear(inbox + lane_slot, from_other(in_lane, rank, other, lane))
            clear(inbox + slot, sent)
        store_row(out, token, column, inside, pack(first, second, DTYPE), ROW)
        _advance(generations, token, UNITS, BLOCK_UNITS)
