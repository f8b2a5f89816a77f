"""The weight layouts ``"sm90_linear_mxfp4"`` and ``"sm90_linear_nvfp4"`` of a linear layer. Weights are put into these layouts when
a model is loaded.

The e2m1 values are arranged as in `mxfp4.layout`: panels of 64 rows, each of four strips of 16, and blocks of 64 elements of k.
Three things differ. Row factors and biases are separate tensors. nvfp4 has other scales. The bit positions of the e2m1 values in a
word minimise the instructions of dequantisation to bfloat16. The bits of register a0 are in place, those of a2 need a shift by 3,
and those of a1 a shift by 6. The bits of a3 take the remaining positions and need three shifts. In the table, the digit names the
register, and s, e and m are sign, exponent and mantissa:

    bit   15   14   13  12   11  10  9    8 7 6    5 4 3    2 1 0
    value 0s   3s   3e  2s   3m  3e  1s   0 e e m  2 e e m  1 e e m

    2176 bytes per k block of a panel in mxfp4 (544 per strip), 2304 (576 per strip) in nvfp4. A strip has:
                                int32 [32, 4]         e2m1 values: four words for each lane of a warp
                                uint8 [8, 2, 2]       scales in mxfp4: [row, half of the block's k, first or second eight rows]
                                uint8 [8, 4, 2]       scales in nvfp4: [row, quarter of the block's k, first or second eight rows]

A scale in mxfp4 is stored as an exponent relative to the largest scale of its row. That largest scale is the row factor. A scale in
nvfp4 is stored with five exponent bits, three mantissa bits and no subnormals, so that few instructions convert it:
2^(e - 22) * (1 + m / 8). The sign of a negative nvfp4 scale moves into the e2m1 values. A zero scale makes the e2m1 values zero.
The row factor in nvfp4 is the global scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.gemm.linear_plan import LinearPlan
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import (
    BLOCK,
    CODE_BYTES,
    PANEL,
    PANEL_STRIPS,
    STRIP,
    blocks_of,
    panels_of,
    relative_scales,
    scale_bytes,
    words_of,
)

# Bit positions of the e2m1 values of registers a0 to a3, see `mxfp4.layout.PLACES`. 3e at bit 13 is the upper exponent bit.
PLACES = ((6, 7, 8, 15), (0, 1, 2, 9), (3, 4, 5, 12), (11, 10, 13, 14))
LAYOUTS = {"mxfp4": "sm90_linear_mxfp4", "nvfp4": "sm90_linear_nvfp4"}
SCALE_BYTES = {"mxfp4": STRIP * BLOCK // 32, "nvfp4": STRIP * BLOCK // 16}  # scale bytes of one block of one strip
# The stored nvfp4 scales are this factor times the given scales. The largest scale then has float16's largest exponent.
NVFP4_FACTOR = 2.0**-7
# Number of panels that are rearranged at once. Intermediate tensors take several times the memory of these panels.
_AT_ONCE = 128


def block_bytes(weight_format: str) -> int:
    """Returns the bytes of one k block of one strip."""
    return CODE_BYTES + SCALE_BYTES[weight_format]


def prepare_weights(weights: LinearWeights, plan: LinearPlan) -> LinearWeights:
    """Copies canonical mxfp4 or nvfp4 weights to the layout above.

    Returns weights uint8 ``[panels, blocks, 4, bytes of a block]``; row factors float32 ``[64 * panels]`` instead of scales; and a
    bias of the factors' shape and dtype. The function waits for the device, because kernels read these tensors without waiting for
    preceding kernels (PDL).
    """
    assert weights.weight_scale is not None  # checked by the operator
    codes, scale = weights.weight, weights.weight_scale.view(torch.uint8)
    n, half_k = codes.shape
    panels, blocks = panels_of(n), blocks_of(2 * half_k)
    size = block_bytes(plan.weight_format)
    result = torch.empty(panels, blocks, PANEL_STRIPS, size, dtype=torch.uint8, device=codes.device)
    factors = codes.new_zeros(panels * PANEL, dtype=torch.float32)
    for first in range(0, panels, _AT_ONCE):
        count = min(_AT_ONCE, panels - first)
        rows = slice(first * PANEL, min(n, (first + count) * PANEL))
        short = count * PANEL - (rows.stop - rows.start)
        if plan.weight_format == "mxfp4":
            relative, factors[rows] = relative_scales(scale[rows])
            some, scales = codes[rows], scale_bytes(_padded(relative, short)[None])[0]
        else:
            some, stored = _without_signs(codes[rows], scale[rows])
            scales = _quarters(_padded(stored, short), blocks)
        words = words_of(_padded(some, short)[None], PLACES)[0]
        made = torch.cat([words.flatten(2).view(torch.uint8), scales], -1)
        result[first : first + count] = made.view(count, PANEL_STRIPS, blocks, size).transpose(1, 2)
    if plan.weight_format == "nvfp4":
        assert weights.weight_global_scale is not None
        factors[:n] = weights.weight_global_scale / NVFP4_FACTOR
    bias = None
    if weights.bias is not None:
        bias = factors.new_zeros(panels * PANEL)
        bias[:n] = weights.bias
    if codes.is_cuda:
        torch.cuda.current_stream(codes.device).synchronize()
    return LinearWeights(result, factors, None, bias, layout=LAYOUTS[plan.weight_format])


def _padded(rows: Tensor, more: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, more))


def _without_signs(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Converts nvfp4 values and scales so that no scale is negative, zero or subnormal. Returns e2m1 values and stored scales that
    represent the same weights, up to `NVFP4_FACTOR`."""
    table = torch.tensor(_multiplier_bytes(), dtype=torch.uint8, device=scale.device)
    magnitude = scale & 0x7F
    change = torch.where(scale >= 0x80, 0x88, 0).to(torch.uint8).repeat_interleave(8, -1)
    kept = torch.where(magnitude == 0, 0, 0xFF).to(torch.uint8).repeat_interleave(8, -1)
    return (codes ^ change) & kept, table[magnitude.int()]


def _multiplier_bytes() -> list[int]:
    """Returns the stored scale byte for each nonnegative e4m3 bit pattern."""
    found = [0]
    for bits in range(1, 0x7F):
        exponent, mantissa = bits >> 3, bits & 7
        if exponent == 0:  # subnormal
            shift = 4 - mantissa.bit_length()
            exponent, mantissa = 1 - shift, (mantissa << shift) & 7
        found.append((exponent + 15) << 3 | mantissa)
    return [*found, 0xFF]  # NaN


def _quarters(scale: Tensor, blocks: int) -> Tensor:
    """Rearranges stored nvfp4 scales, uint8 ``[rows, k / 16]``, to the scale bytes of blocks, ``[strips, blocks, 64]``. ``blocks``:
    the number of k blocks."""
    padded = torch.nn.functional.pad(scale, (0, 4 * blocks - scale.shape[1]))
    return padded.view(-1, 2, STRIP // 2, blocks, 4).permute(0, 3, 2, 4, 1).flatten(2)
