"""Computes, on the device, the schedule of a grouped GEMM: which expert and rows each block has.

`block_schedule` sorts the (token, slot) pairs of a mixture-of-experts layer by expert and splits every expert's rows into blocks.
The number of blocks depends on the routing, and the host never reads it. Grids cover the most blocks that any routing can need
(`block_capacity`), and unused blocks have expert -1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


# The number of pairs that a program processes in one step.
_CHUNK = 1024
# The search for an expert's pairs is split among at most this many programs.
_PARTS = 16


class BlockSchedule(NamedTuple):
    """The (token, slot) pairs sorted by expert, and their split into blocks of rows. All tensors are int32 on the device.

    A pair ``(token, slot)`` has the index ``token * top_k + slot``. A row is a position in ``order``.

    Attributes:
        order: ``[pairs]``: the pair indices by expert, ascending within an expert. Pairs whose expert is not on this rank (a
            negative id) are left out. The last ``pairs - expert_start[-1]`` entries are undefined.
        expert_start: ``[num_experts + 1]``: the first row of each expert; the last entry is the number of rows.
        block_expert: ``[capacity]``: the expert of each block, -1 for unused blocks. Used blocks come first, by ascending expert.
        block_row: ``[capacity]``: the first row of each block, undefined for unused blocks. The rows of a block end at
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
        """Returns the number of blocks that a grid must cover, used or not."""
        return self.block_expert.shape[0]


def block_capacity(pairs: int, num_experts: int, block_rows: int) -> int:
    """Returns the most blocks that any routing of ``pairs`` (token, slot) pairs can need."""
    used = min(pairs, num_experts)
    return (pairs + used * (block_rows - 1)) // block_rows


def block_schedule(topk_ids: Tensor, num_experts: int, block_rows: int) -> BlockSchedule:
    """Computes the schedule of one call. Takes one launch, or two launches for many pairs. Safe in CUDA graphs, and deterministic.

    There must be at least one pair.

    Args:
        topk_ids: int32 ``[tokens, top_k]``, any strides; ids that are negative (or not below ``num_experts``) are left out.
        num_experts: experts whose weights are on this rank.
        block_rows: the most rows of a block.

    Device code that reads the schedule of block ``i`` (feature tiles are another grid axis, or share this axis in grouped order)::

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
    # All four small arrays share one allocation. Each array is aligned to 16 bytes, because Triton recompiles a kernel for other
    # alignments.
    lengths = (pairs, num_experts + 1, capacity, capacity)
    padded = [cdiv(length, 4) * 4 for length in lengths]
    memory = torch.empty(sum(padded), dtype=torch.int32, device=topk_ids.device)
    views = zip(memory.split(padded), lengths, strict=True)
    order, expert_start, block_expert, block_row = (part[:length] for part, length in views)
    chunk = min(_CHUNK, max(32, next_power_of_2(pairs)))
    chunks = cdiv(pairs, chunk)
    bins = next_power_of_2(num_experts + 1)
    counts = totals = order  # not read if there is one chunk
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
