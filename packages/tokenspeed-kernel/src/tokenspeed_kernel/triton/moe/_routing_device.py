"""Device code of `_routing`: counts the pairs of each expert, and sorts pairs into blocks.

`schedule_kernel` has the grid [experts, parts of the pairs]. It sorts by counting: a pair's place is the number of pairs of earlier
experts, plus the number of earlier pairs of its expert. Only the order of integer additions in the totals is not fixed, so the
schedule is always the same. With few pairs, each program counts all pairs itself, and `count_kernel` is not launched.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_ids(ids_ptr, stride_token, stride_slot, pair, pairs, top_k, num_experts):
    """Loads the expert ids of (token, slot) pairs; ``num_experts`` for pairs without an expert."""
    token = pair // top_k
    address = ids_ptr + token.to(tl.int64) * stride_token + (pair - token * top_k) * stride_slot
    ids = tl.load(address, mask=pair < pairs, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    ids_ptr,
    stride_token,
    stride_slot,
    pairs,
    top_k,
    counts_ptr,
    totals_ptr,
    num_experts,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Counts each expert's pairs in a chunk of (token, slot) pairs, and adds the counts to the totals.

    Bin ``num_experts`` counts pairs without an expert.
    """
    chunk = tl.program_id(0)
    ids = _load_ids(ids_ptr, stride_token, stride_slot, chunk * CHUNK + tl.arange(0, CHUNK), pairs, top_k, num_experts)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(ids, BINS)
    tl.store(counts_ptr + chunk * BINS + bins, counts)
    tl.atomic_add(totals_ptr + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["pairs", "capacity", "chunks", "parts"])
def schedule_kernel(
    ids_ptr,
    stride_token,
    stride_slot,
    pairs,
    top_k,
    counts_ptr,
    totals_ptr,
    order_ptr,
    expert_start_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_experts,
    capacity,
    chunks,
    parts,
    BLOCK_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Sorts the pairs of one expert, in one range of chunks, into ``order``; see `_routing`.

    Each program reads the counts of all experts, so that no program waits for another.
    """
    expert = tl.program_id(0)
    part = tl.program_id(1)
    first_chunk = chunks * part // parts
    last_chunk = chunks * (part + 1) // parts
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    if COUNTED:
        counts = tl.load(totals_ptr + bins)
    else:
        counts = tl.histogram(_load_ids(ids_ptr, stride_token, stride_slot, lane, pairs, top_k, num_experts), BINS)
    counts = tl.where(bins < num_experts, counts, 0)
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    row = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    if part == 0:
        tl.store(expert_start_ptr + expert, row)
        if expert == num_experts - 1:
            tl.store(expert_start_ptr + num_experts, row + count)
            for first in range(block + (count + BLOCK_ROWS - 1) // BLOCK_ROWS, capacity, CHUNK):
                tl.store(block_expert_ptr + first + lane, tl.full([CHUNK], -1, tl.int32), mask=first + lane < capacity)
        for first in range(0, count, CHUNK * BLOCK_ROWS):
            start = first + lane * BLOCK_ROWS
            location = block + start // BLOCK_ROWS
            tl.store(block_expert_ptr + location, expert + tl.zeros([CHUNK], tl.int32), mask=start < count)
            tl.store(block_row_ptr + location, row + start, mask=start < count)
    if count > 0:
        if COUNTED:
            for first in range(0, first_chunk, CHUNK):
                earlier = tl.load(counts_ptr + (first + lane) * BINS + expert, mask=first + lane < first_chunk, other=0)
                row += tl.sum(earlier, 0)
        for chunk in range(first_chunk, last_chunk):
            pair = chunk * CHUNK + lane
            ids = _load_ids(ids_ptr, stride_token, stride_slot, pair, pairs, top_k, num_experts)
            mine = (ids == expert).to(tl.int32)
            location = row + tl.cumsum(mine, 0) - 1
            tl.store(order_ptr + location, pair, mask=mine != 0)
            row += tl.sum(mine, 0)
