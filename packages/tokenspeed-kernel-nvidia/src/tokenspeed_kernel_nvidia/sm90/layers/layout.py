"""The layout of the dense weights of the persistent kernel, in which the data of each stage of the ring buffer is contiguous.

So a stage needs one bulk copy, not one copy for each of its rows. The producer warp issues many small copies too slowly: on an
H200, the MMAs of qkv took 4.5 us with a copy for each row, and 3.1 us with one copy.

Each CTA has consecutive rows of the weights, divided into tiles of 8 rows, and each tile into parts of `part_bytes` along k. A part
fills a stage, with its rows one after the other. Eight lanes read 64 bytes of two neighbouring rows at once, which must be in
different banks. So if the length of a part's rows is a multiple of 128 bytes, the two halves of each 128 bytes of odd rows are
swapped.

A lane loads 16 bytes of a row of bfloat16 weights, which are the right operands of two MMAs: words 0 and 2, and words 1 and 3, see
`gemm_device`. So words 1 and 2 of each 16 bytes are swapped, and the operands are neighbouring registers.

With fp8 weights, a lane multiplies 16 weights (one 16-byte load) by 16 elements of a token (two 16-byte loads). To avoid bank
conflicts, neighbouring lanes of a quad must load neighbouring 16 bytes of the token. So a lane's first load has 8 of a chunk's
first 32 elements, and its second load 8 of the last 32. The 64 weights of a chunk are stored in the matching order: for each lane
of a quad, 8 of the first 32 weights, then 8 of the last 32. The scales of the rows follow all rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tokenspeed_kernel_nvidia.sm90.layers.config import CHUNK_BYTES, TILE, part_bytes


def arranged(weight: Tensor, ctas: int, scale: Tensor | None = None) -> Tensor:
    """Returns a copy of dense weights in this layout, uint8.

    Args:
        weight: ``[rows, k]``, contiguous: bfloat16, where k is a multiple of 32; or an 8-bit float, where k is a multiple of 64.
        ctas: the number of CTAs that share the rows.
        scale: float32 ``[rows, 1]``: the scales of 8-bit floats.
    """
    rows, k = weight.shape
    order = _order_of(rows, k * weight.element_size(), ctas).to(weight.device)
    chunks = weight.view(torch.uint8).view(-1, CHUNK_BYTES)
    if scale is None:
        return chunks[order].view(torch.int32).view(-1, 2, 2).transpose(1, 2).contiguous().view(torch.uint8).flatten()
    lanes = chunks.view(-1, 2, 4, 8).transpose(1, 2).reshape(-1, CHUNK_BYTES)
    return torch.cat((lanes[order].flatten(), scale.contiguous().view(torch.uint8).flatten()))


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
