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

# Pairs that a program looks at in one step. A routing of 4096 tokens to 4 experts is 16 steps, some microseconds.
_CHUNK = 1024


@dataclass(frozen=True)
class BlockSchedule:
    """Rows sorted by expert, and the blocks that they were cut into. All int32, on the device.

    A pair ``(token, slot)`` has the number ``token * top_k + slot``. A row is a position in ``order``.

    Attributes:
        order: ``[pairs]``: the pairs by expert, and in ascending order within an expert. Pairs whose expert is not here (a negative id)
            are left out; the last ``pairs - expert_start[-1]`` entries are undefined.
        expert_start: ``[num_experts + 1]``: the first row of each expert; the last entry is the number of rows.
        block_expert: ``[capacity]``: the expert of each block, -1 for blocks that do not exist; those that do come first, experts ascending.
        block_row: ``[capacity]``: the first row of each block. Its rows end at ``min(block_row + block_rows, expert_start[expert + 1])``.
            Undefined where the block does not exist.
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
    """The schedule of one call: one launch, safe in CUDA graphs, the same for the same ids. There must be at least one pair.

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
    # One allocation: the parts are small.
    memory = torch.empty(pairs + num_experts + 1 + 2 * capacity, dtype=torch.int32, device=topk_ids.device)
    order, expert_start, block_expert, block_row = memory.split([pairs, num_experts + 1, capacity, capacity])
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(pairs)))
    _schedule_kernel[(num_experts,)](
        topk_ids,
        topk_ids.stride(0),
        topk_ids.stride(1),
        pairs,
        top_k,
        order,
        expert_start,
        block_expert,
        block_row,
        num_experts,
        capacity,
        BLOCK_ROWS=block_rows,
        BINS=triton.next_power_of_2(num_experts + 1),
        CHUNK=chunk,
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


@triton.jit
def _schedule_kernel(
    ids_ptr,
    stride_token,
    stride_slot,
    pairs,
    top_k,
    order_ptr,
    expert_start_ptr,
    block_expert_ptr,
    block_row_ptr,
    num_experts,
    capacity,
    BLOCK_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program an expert. Each counts the pairs of all experts, so that none waits for another."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, CHUNK):
        ids = _load_ids(ids_ptr, stride_token, stride_slot, first + lane, pairs, top_k, num_experts)
        counts += tl.histogram(ids, BINS)
    bins = tl.arange(0, BINS)
    counts = tl.where(bins < num_experts, counts, 0)
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    row = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
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
        for first in range(0, pairs, CHUNK):
            pair = first + lane
            ids = _load_ids(ids_ptr, stride_token, stride_slot, pair, pairs, top_k, num_experts)
            mine = ids == expert
            place = row + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(order_ptr + place, pair, mask=mine)
            row += tl.sum(mine.to(tl.int32), 0)
