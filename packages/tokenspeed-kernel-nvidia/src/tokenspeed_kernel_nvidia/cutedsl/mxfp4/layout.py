"""The layout ``"sm90_mxfp4"`` of mxfp4 expert weights, which the MoE kernels for Hopper read. Weights are put into this layout
once, when a model is loaded. The layout serves three aims: one bulk copy moves several blocks, a lane loads its A fragments of a
block by one 16-byte load without bank conflicts, and dequantisation takes few instructions.

A projection's weight ``[rows, k]`` is divided into *panels* of 64 rows. A panel has four *strips* of 16 rows, and *blocks* of 64
elements of k. In w13, a strip's rows are the gate rows of eight features, then the up rows of the same features. So one thread has
both the gate and the up of a feature. In w2, a strip has 16 consecutive rows. A panel is contiguous, because kernels stream panels.
Each block of a panel's four strips is also contiguous:

    512 bytes                     float32 [4, 2, 16]   of each strip, row factors and then row biases
    2176 bytes per block of k, of which each strip has 544:
        512 bytes                 int32 [32, 4]        e2m1 values: four words for each lane of a warp
        32 bytes                  uint8 [8, 2, 2]      scales: [row, half of the block's k, first or second eight rows]

A strip's e2m1 values of one block are the A operands of four mma.sync m16n8k16. The fragments of one warp in a wgmma m64nNk16 have
the same layout. Word ``s`` of lane ``4 g + t`` holds the values of the four registers of MMA number ``s``. Each register has two
neighbouring elements of k:

    register        a0            a1            a2            a3
    row             g             g + 8         g             g + 8
    k               16 s + 2 t    16 s + 2 t    16 s + 8 + 2 t    16 s + 8 + 2 t

The lower 16 bits of a word hold the even elements of k. The bit positions of sign (s), exponent (e) and mantissa (m) minimise the
instructions of dequantisation. The values of a0 and a2, which belong to one row, are already bytes of float8_e5m2 once other bits
are masked. The values of a1 and a3 also need two shifts. As float8_e5m2, the bytes are 2^-14 times the e2m1 values. In this table,
the digit names the register:

    bit   15   14 13 12   11 10 9   8     7    6 5 4   3 2 1   0
    value 2s   3 e e m    2 e e m   3s    0s   1 e e m 0 e e m 1s

A scale is stored as an exponent relative to its row's largest scale. The largest scale is stored as 253, and its actual value is
the row factor, which the epilogue applies. So kernels need not handle e8m0's full range. Rows and k are zero-padded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, e8m0_to_float

LAYOUT = "sm90_mxfp4"
STRIP = 16  # rows of weights
PANEL_STRIPS = 4
PANEL = PANEL_STRIPS * STRIP
BLOCK = 64  # elements of k
HEAD_BYTES = 128  # bytes of the row factors and biases of a strip
PANEL_HEAD_BYTES = PANEL_STRIPS * HEAD_BYTES
CODE_BYTES = STRIP * BLOCK // 2
BLOCK_BYTES = CODE_BYTES + STRIP * BLOCK // BLOCK_MX  # bytes of one block of one strip
PANEL_BLOCK_BYTES = PANEL_STRIPS * BLOCK_BYTES
_LARGEST = 253  # the stored scale of a row's largest scale
_NAN = 255  # the e8m0 encoding of NaN
_LEAST = 64  # the smallest stored scale, because kernels subtract 64 from it; terms this small do not change a sum
# For each of the registers a0 to a3: the positions, within 16 bits, of an e2m1 value's four bits, from the lowest bit to the sign.
PLACES = ((1, 2, 3, 7), (4, 5, 6, 0), (9, 10, 11, 15), (12, 13, 14, 8))
# Number of experts whose weights are rearranged at once. Intermediate tensors take four times the memory of these experts' weights.
_AT_ONCE = 8


def blocks_of(k: int) -> int:
    """Returns the number of 64-element blocks along k."""
    return -(-k // BLOCK)


def panels_of(rows: int) -> int:
    """Returns the number of 64-row panels of a projection with this many rows per expert."""
    return -(-rows // PANEL)


def panel_bytes(k: int) -> int:
    """Returns the bytes of a panel with k elements per row."""
    return PANEL_HEAD_BYTES + blocks_of(k) * PANEL_BLOCK_BYTES


def prepare_weights(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Copies canonical mxfp4 weights to the layout above. Returns new tensors uint8 ``[experts, panels, bytes of a panel]`` for w13
    and w2, which include scales and biases. ``weights`` does not change.
    """
    device = weights.w13_weight.device
    features = torch.arange(2 * plan.intermediate_size, device=device)
    gate_up = features.view(-1, 2).t() if plan.w13_interleaved else features.view(2, -1)  # [2, features]
    w13_rows = gate_up.reshape(2, -1, STRIP // 2).transpose(0, 1).flatten()
    w2_rows = torch.arange(plan.hidden_size, device=device)
    w13 = _arranged(weights.w13_weight, weights.w13_weight_scale, weights.w13_weight_bias, w13_rows)
    w2 = _arranged(weights.w2_weight, weights.w2_weight_scale, weights.w2_weight_bias, w2_rows)
    return MoEWeights(w13, None, None, w2, None, None, layout=LAYOUT)


def _arranged(codes: Tensor, scale: Tensor | None, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Returns the weights of one projection in this module's layout. ``rows[i]`` is the index of the input row that becomes row
    ``i`` of the strips."""
    assert scale is not None  # checked by the operator
    experts, count, half_k = codes.shape
    panels, k_blocks, strips = panels_of(count), blocks_of(2 * half_k), count // STRIP
    padded = panels * PANEL_STRIPS
    result = torch.empty(experts, panels, panel_bytes(2 * half_k), dtype=torch.uint8, device=codes.device)
    for first in range(0, experts, _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        relative, factor = relative_scales(scale[some].index_select(1, rows))
        number = len(factor)
        head = torch.zeros(number, padded, 2, STRIP, dtype=torch.float32, device=codes.device)
        head[:, :strips, 0] = factor.view(number, strips, STRIP)
        if bias is not None:
            head[:, :strips, 1] = bias[some].index_select(1, rows).view(number, strips, STRIP)
        block = torch.empty(number, padded, k_blocks, BLOCK_BYTES, dtype=torch.uint8, device=codes.device)
        block[:, strips:] = 0
        block[:, :strips, :, :CODE_BYTES] = words_of(codes[some].index_select(1, rows)).flatten(3).view(torch.uint8)
        block[:, :strips, :, CODE_BYTES:] = scale_bytes(relative)
        result[some, :, :PANEL_HEAD_BYTES] = head.view(number, panels, -1).view(torch.uint8)
        blocks = result[some, :, PANEL_HEAD_BYTES:].view(number, panels, k_blocks, PANEL_STRIPS, BLOCK_BYTES)
        blocks.copy_(block.view(number, panels, PANEL_STRIPS, k_blocks, BLOCK_BYTES).transpose(2, 3))
    return result


def words_of(codes: Tensor, places: Sequence[Sequence[int]] = PLACES) -> Tensor:
    """Rearranges canonical e2m1 values, uint8 ``[experts, rows, k / 2]``, to the words of blocks, int32 ``[experts, strips, blocks,
    lane, 4]``.

    Args:
        places: see `PLACES`.
    """
    experts, rows, half_k = codes.shape
    missing = blocks_of(2 * half_k) * BLOCK // 2 - half_k
    padded = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    # [experts, strip, second eight rows, g, block, s, second eight of k, t] -> [second eight of k, of rows, ..., block, g, t, s]
    bytes_of = padded.view(experts, rows // STRIP, 2, 8, -1, 4, 2, 4).permute(6, 2, 0, 1, 4, 3, 7, 5)
    # Use a lookup table: with shifts and masks, each operation would be its own pass over memory.
    bits = (
        of_byte.index_select(0, bytes_of[register // 2, register % 2].flatten().int())
        for register, of_byte in enumerate(_bits_of_bytes(codes.device, places))
    )
    words: Tensor = functools.reduce(Tensor.bitwise_or_, bits)
    return words.view(bytes_of.shape[2:]).flatten(3, 4)


def _bits_of_bytes(device: torch.device, places: Sequence[Sequence[int]]) -> Tensor:
    """Returns the lookup table of `words_of`, int32 ``[4, 256]``. Entry ``[register, byte]`` has the bits of a word that encode the
    byte's two neighbouring e2m1 values in this register."""
    pair = torch.arange(256, dtype=torch.int32, device=device)
    pair = (pair | pair << 12) & 0x000F000F  # one e2m1 value in each half of the word
    bits = [[(pair >> bit & 0x00010001) << place for bit, place in enumerate(of_code)] for of_code in places]
    return torch.stack([torch.stack(of_code).sum(0, dtype=torch.int32) for of_code in bits])


def relative_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the stored scales, which are relative to their row's largest scale, and the row factors, float32.

    Scales more than 2^189 times smaller than their row's largest scale are clamped to that limit. A NaN scale makes the row's
    results NaN, as the operator requires.
    """
    largest = scale.amax(-1)
    relative = (scale.int() - largest.int().unsqueeze(-1) + _LARGEST).clamp(min=_LEAST).to(torch.uint8)
    return relative, e8m0_to_float(largest)


def scales_beside_zeros(codes: Tensor, scale: Tensor) -> Tensor:
    """Replaces the scale of each all-zero mxfp4 block (32 elements) with the largest scale of its row's other blocks, or with 0 if
    the whole row is zero.

    The scale of an all-zero block has no effect, and padding leaves arbitrary scales there. A NaN scale is kept, because a NaN
    scale makes even zeros NaN.

    Args:
        codes: uint8 ``[experts, rows, k / 2]``.
        scale: uint8 ``[experts, rows, k / 32]``.
    """
    result = torch.empty_like(scale)
    for first in range(0, len(scale), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        magnitudes = (codes[some] & 0x77).view(*scale[some].shape, BLOCK_MX // 2).amax(-1)
        zeros = (magnitudes == 0) & (scale[some] != _NAN)
        largest = scale[some].masked_fill(zeros, 0).amax(-1, keepdim=True)
        result[some] = torch.where(zeros, largest, scale[some])
    return result


def scale_bytes(relative: Tensor) -> Tensor:
    """Rearranges `relative_scales`, uint8 ``[experts, rows, k / 32]``, to the scale bytes of blocks, ``[experts, strips, blocks,
    32]``."""
    experts, rows, halves = relative.shape
    padded = torch.nn.functional.pad(relative, (0, halves % 2))
    return padded.view(experts, rows // STRIP, 2, 8, -1, 2).permute(0, 1, 4, 3, 5, 2).flatten(3)
