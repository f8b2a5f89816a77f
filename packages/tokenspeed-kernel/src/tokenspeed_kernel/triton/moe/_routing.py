"""Which rows each block of a grouped matrix product works on, decided on the device.

`block_schedule` sorts the (token, slot) pairs of a mixture-of-experts layer by expert and cuts every expert's rows into blocks. The
number of blocks depends on the routing and is never read by the host: grids cover the most that any routing can need
(`block_capacity`), and blocks beyond the real number have expert -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs that a program looks at in one step.
_CHUNK = 1024
# Programs that share the pairs of an expert, at most.
_PARTS = 16


@dataclass(frozen=True)
class BlockSchedule:
    """Rows sorted by expert, and the blocks that they were cut into. All int32, on the device.

    A pair ``(token, slot)`` has the number ``token * top_k + slot``. A row is a position in ``order``.

    Attributes:
        order: ``[pairs]``: the pairs by expert, and in ascending order within an expert. Pairs whose expert is not here (a negative
            id) are left out; the last ``pairs - expert_start[-1]`` entries are undefined.
        expert_start: ``[num_experts + 1]``: the first row of each expert; the last entry is the number of rows.
        block_expert: ``[capacity]``: the expert of each block, -1 for blocks that do not exist; those that do come first, experts
            ascending.
        block_row: ``[capacity]``: the first row of each block, undefined where it does not exist. Its rows end at
            ``min(block_row + block_rows, expert_start[expert + 1])``.
        block_rows: the most rows of a block.
    """

    order: Tensor
    expert_start: Tensor
    block_expert: Tensor
    block_row: Tensor
    block_rows: int

    @property
    def capacity(self) -> int:
        """Blocks that a grid must cover."""
        return self.block_expert.shape[0]


def block_capacity(pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that any routing of so many pairs can need."""
    used = min(pairs, num_experts)
    return (pairs + used * (block_rows - 1)) // block_rows


def block_schedule(topk_ids: Tensor, num_experts: int, block_rows: int) -> BlockSchedule:
    """The schedule of one call: one launch (two for many pairs), safe in CUDA graphs, the same for the same ids.

    There must be at least one pair.

    Args:
        topk_ids: int32 ``[tokens, top_k]``, any strides; ids that are negative (or not below ``num_experts``) are left out.
        num_experts: experts whose weights are here.
        block_rows: rows of a block, at most.

    Device code that walks it, for block ``i`` (tiles of features are another axis of the grid, or the same in grouped order)::

        expert = tl.load(block_expert + i)
        if expert < 0: return
        first = tl.load(block_row + i)
        rows = first + tl.arange(0, BLOCK_ROWS)
        mask = rows < tl.load(expert_start + expert + 1)
        pair = tl.load(order + rows, mask=mask, other=0)        # token = pair // top_k; topk_weights flat at pair
    """
    tokens, top_k = topk_ids.shape
    pairs = tokens * top_k
    capacity = block_capacity(pairs, num_experts, block_rows)
    # One allocation: the parts are small. Each begins at a multiple of 16 bytes, or kernels would be compiled for every alignment.
    lengths = (pairs, num_experts + 1, capacity, capacity)
    padded = [triton.cdiv(length, 4) * 4 for length in lengths]
    memory = torch.empty(sum(padded), dtype=torch.int32, device=topk_ids.device)
    views = zip(memory.split(padded), lengths, strict=True)
    order, expert_start, block_expert, block_row = (part[:length] for part, length in views)
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(pairs)))
    chunks = triton.cdiv(pairs, chunk)
    bins = triton.next_power_of_2(num_experts + 1)
    counts = totals = order  # not read where there is one chunk
    if chunks > 1:
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=topk_ids.device)
        totals = torch.zeros(bins, dtype=torch.int32, device=topk_ids.device)
        _count_kernel[(chunks,)](
            topk_ids, *topk_ids.stride(), pairs, top_k, counts, totals, num_experts, BINS=bins, CHUNK=chunk, num_warps=4
        )
    parts = min(chunks, _PARTS)
    _schedule_kernel[(num_experts, parts)](
        topk_ids,
        *topk_ids.stride(),
        pairs,
        top_k,
        counts,
        totals,
        order,
        expert_start,
        block_expert,
        block_row,
        num_experts,
        capacity,
        chunks,
        parts,
        BLOCK_ROWS=block_rows,
        BINS=bins,
        CHUNK=chunk,
        COUNTED=chunks > 1,
        num_warps=4 if chunk >= 256 else 1,
    )
    return BlockSchedule(order, expert_start, block_expert, block_row, block_rows)


@triton.jit
def _load_ids(ids_ptr, stride_token, stride_slot, pair, pairs, top_k, num_experts):
    """The experts of some pairs; ``num_experts`` stands for none."""
    token = pair // top_k
    address = ids_ptr + token.to(tl.int64) * stride_token + (pair - token * top_k) * stride_slot
    ids = tl.load(address, mask=pair < pairs, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
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
    """How many pairs each expert has, of a chunk and added to those of all; the bin after the last counts those of none."""
    chunk = tl.program_id(0)
    ids = _load_ids(ids_ptr, stride_token, stride_slot, chunk * CHUNK + tl.arange(0, CHUNK), pairs, top_k, num_experts)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(ids, BINS)
    tl.store(counts_ptr + chunk * BINS + bins, counts)
    tl.atomic_add(totals_ptr + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["pairs", "capacity", "chunks", "parts"])
def _schedule_kernel(
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
    """A program for an expert and a range of chunks. Each looks at the counts of all experts, so that none waits for another."""
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
            place = block + start // BLOCK_ROWS
            tl.store(block_expert_ptr + place, expert + tl.zeros([CHUNK], tl.int32), mask=start < count)
            tl.store(block_row_ptr + place, row + start, mask=start < count)
    if count > 0:
        if COUNTED:
            for first in range(0, first_chunk, CHUNK):
                earlier = tl.load(counts_ptr + (first + lane) * BINS + expert, mask=first + lane < first_chunk, other=0)
                row += tl.sum(earlier, 0)
        for chunk in range(first_chunk, last_chunk):
            pair = chunk * CHUNK + lane
            ids = _load_ids(ids_ptr, stride_token, stride_slot, pair, pairs, top_k, num_experts)
            mine = (ids == expert).to(tl.int32)
            place = row + tl.cumsum(mine, 0) - 1
            tl.store(order_ptr + place, pair, mask=mine != 0)
            row += tl.sum(mine, 0)
