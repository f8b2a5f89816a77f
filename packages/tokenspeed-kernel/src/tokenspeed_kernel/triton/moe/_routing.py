"""Which rows each block of a grouped matrix product works on, decided on the device.

`block_schedule` sorts the (token, slot) pairs of a mixture-of-experts layer by expert and cuts every expert's rows into blocks. The
number of blocks depends on the routing and is never read by the host: grids cover the most that any routing can need
(`block_capacity`), and blocks beyond the real number have expert -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


# Pairs that a program looks at in one step.
_CHUNK = 1024
# Programs that share the pairs of an expert, at most.
_PARTS = 16


class BlockSchedule(NamedTuple):
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
    padded = [cdiv(length, 4) * 4 for length in lengths]
    memory = torch.empty(sum(padded), dtype=torch.int32, device=topk_ids.device)
    views = zip(memory.split(padded), lengths, strict=True)
    order, expert_start, block_expert, block_row = (part[:length] for part, length in views)
    chunk = min(_CHUNK, max(32, next_power_of_2(pairs)))
    chunks = cdiv(pairs, chunk)
    bins = next_power_of_2(num_experts + 1)
    counts = totals = order  # not read where there is one chunk
    if chunks > 1:
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=topk_ids.device)
        totals = torch.zeros(bins, dtype=torch.int32, device=topk_ids.device)
        device_code.count_kernel[(chunks,)](
            topk_ids, *topk_ids.stride(), pairs, top_k, counts, totals, num_experts, BINS=bins, CHUNK=chunk, num_warps=4
        )
    parts = min(chunks, _PARTS)
    device_code.schedule_kernel[(num_experts, parts)](
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
