"""The layout of the dense weights of the persistent kernel, in which each stage of the ring buffer is contiguous.

A stage is one bulk copy, not one copy for each of its rows: the producer warp issues many small copies too slowly. On an H200, the
MMAs of qkv took 4.5 us with a copy for each row, and 3.1 us with one copy.

Each CTA has consecutive rows of the weights, divided into tiles of 8 rows, and each tile into parts of `part_bytes` along k.
A part is contiguous, with its rows one after the other. Lanes read 64 bytes of two neighbouring rows at once, which must be in
different banks. So if rows of a part are multiples of 128 bytes, the two halves of each 128 bytes of odd rows are swapped.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia.sm90.layers.config import CHUNK_BYTES, TILE, part_bytes


def arranged(weight: Tensor, ctas: int) -> Tensor:
    """Returns a copy of dense weights in this layout.

    Args:
        weight: 16-bit elements ``[rows, k]``, contiguous; k is a multiple of 32.
        ctas: the number of CTAs that share the rows.
    """
    rows, k = weight.shape
    chunks = weight.view(-1, CHUNK_BYTES // weight.element_size())
    return chunks[_order_of(rows, k * weight.element_size(), ctas).to(weight.device)].view(rows, k)


@functools.cache
def _order_of(rows: int, row_bytes: int, ctas: int) -> Tensor:
    """Returns the index of each 64-byte chunk's source, int64 ``[chunks]``, on the CPU."""
    chunks = torch.arange(rows * row_bytes // CHUNK_BYTES).view(rows, -1)
    order = []
    for cta in range(ctas):
        for tile in chunks[cta * rows // ctas : (cta + 1) * rows // ctas].split(TILE):
            for part in tile.split(part_bytes(row_bytes) // CHUNK_BYTES, dim=1):
                part = part.clone()
                if part.shape[1] % 2 == 0:
                    part[1::2] = part[1::2].unflatten(1, (-1, 2)).flip(2).flatten(1)
                order.append(part.flatten())
    return torch.cat(order)
