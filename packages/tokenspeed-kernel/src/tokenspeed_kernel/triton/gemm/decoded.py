"""GEMMs whose operands are dequantised in registers: the weight-only formats, the mx formats, and 8-bit floats that the tensor
cores do not support. These GEMMs also handle dense operands with dtypes or options that backend ``torch`` lacks.

A *line* is a row of a, or a column of b. The MMAs are swap-AB: b's lines are the first MMA operand. On Hopper that operand can stay
in registers. So dequantised values need not be copied to shared memory. Few tokens are then padded to 16, not to 64.

Values of at most 8 bits times e8m0 scales are exact in bfloat16. mx weights exceed float16's range, so a float16 a is split into
the sum of two bfloat16 (``SPLIT_A``), which is exact too. e2m1 values times e4m3 scales have at most 6 significant bits and lie
between 2^-10 and 2688. So float16 and bfloat16 represent them exactly. Scales of larger blocks multiply a block's partial sum;
scales of lines and tensors multiply the accumulator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, common_device
from tokenspeed_kernel.triton.gemm._operands import BLOCK, E8M0, MICRO, Operand, described
from tokenspeed_kernel.triton.gemm._split_k import choose_splits, split_target, sum_splits
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel.triton.repeated import Launch, Repeated
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")
_launches = Repeated(lambda: device_code.decoded_mm_kernel)


class Formats(NamedTuple):
    """Formats of the operands, and how their MMAs are computed.

    Attributes:
        a, b: formats of the operands.
        a_scaling, b_scaling, a_scales, b_scales, a_block, b_block, b_lines, a_swizzled, b_swizzled: granularity and storage format
            of the scales, elements along k per scale, columns of b per scale, and whether scales are in tiles of 128x4. See
            ``scaling``, ``scale_format``, ``block``, ``lines_each`` and ``swizzled`` of `Operand`.
        split_a: whether a is split into the sum of two bfloat16.
        compute, precision: Triton's dtype of the MMA operands, and ``input_precision`` of float32 dot products.
        native, interpreted: whether the device converts 8-bit floats in hardware, and whether Triton's interpreter runs the
            kernel, see `Abilities`.
    """

    a: str
    b: str
    a_scaling: str
    b_scaling: str
    a_scales: str
    b_scales: str
    a_block: int
    b_block: int
    b_lines: int
    a_swizzled: bool
    b_swizzled: bool
    split_a: bool
    compute: Any
    precision: str | None
    native: bool
    interpreted: bool


class Program(NamedTuple):
    """The kernel's compile-time constants: the sizes of `Tile`, whether ``Tile.k`` divides the operands' k, and the number of rows
    of tiles in a group of the tile order (``GROUP`` of `tile_of`).
    """

    m: int
    n: int
    k: int
    even_k: bool
    group: int


class Tile(NamedTuple):
    """A program's tile (rows of a, columns of b, elements along k), and the program's warps and pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# float32 dot products do not use tensor cores: small tiles keep the accumulator in registers.
_WIDE = Tile(32, 32, 32, 4, 2)
# Unaligned lines are loaded one byte at a time, and each byte's address takes registers.
_UNALIGNED = Tile(16, 64, 64, 4, 2)
# Tiles for b with block scales: the partial sum of a block needs registers beside the accumulator.
_BLOCKS = (Tile(16, 64, 128, 4, 3), Tile(32, 64, 128, 4, 3), Tile(64, 64, 64, 4, 3))
_TILES = (Tile(16, 64, 128, 4, 3), Tile(32, 64, 128, 4, 3), Tile(64, 64, 128, 4, 3), Tile(128, 128, 64, 8, 3))

# The least number of programs per SM/CU with small tiles: one program dequantises while the loads of another are in flight.
_PROGRAMS = 3
# Rows of output tiles that are ordered column by column together, so that loads of b hit L2 (see `tile_of`).
_GROUP = 8


def tile_for(x: Operand, w: Operand) -> Tile:
    if x.tensor.dtype == torch.float32:
        return _WIDE
    if not (x.aligned and w.aligned):
        return _UNALIGNED
    tiles = _BLOCKS if w.scaling == BLOCK else _TILES
    return next(tile for tile in tiles if x.lines <= tile.m or tile is tiles[-1])


def multiply(
    x: Operand, w: Operand, bias: Tensor | None, out: Tensor, tile: Tile | None = None, alpha: Tensor | None = None
) -> None:
    """Computes ``out[...] = alpha * (a @ b) + bias`` for operands of two axes, or of three with the batch first. out must not be
    empty.
    """
    m, n, k = x.lines, w.lines, x.k
    device, dtype = x.tensor.device, x.tensor.dtype
    able = abilities(device)
    wide = dtype == torch.float32
    tile = tile or tile_for(x, w)
    # The elements of one step along k must share a scale.
    tile = tile._replace(k=min([tile.k, *(each.block for each in (x, w) if each.scaling == BLOCK)]))
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n) * x.batch
    splits, k_per_split = choose_splits(tiles, k, tile.k, device, _PROGRAMS if tile.m <= 64 else 1)
    target, strides = split_target(out, splits)
    split_a = dtype == torch.float16 and w.scaling == MICRO and w.scale_format == E8M0
    compute = (
        torch.float32 if wide or able.interpreted else torch.float16 if dtype == torch.float16 and not split_a else torch.bfloat16
    )

    def describe() -> Launch:
        formats = Formats(
            a=x.format,
            b=w.format,
            a_scaling=x.scaling,
            b_scaling=w.scaling,
            a_scales=x.scale_format,
            b_scales=w.scale_format,
            a_block=x.block,
            b_block=w.block,
            b_lines=w.lines_each,
            a_swizzled=x.swizzled,
            b_swizzled=w.swizzled,
            split_a=split_a,
            compute=common_device.DTYPES[compute],
            precision="ieee" if wide else None,
            native=able.native,
            interpreted=able.interpreted,
        )
        return Launch(
            (tiles, splits),
            (m, n, k, *x.strides, *w.strides, *x.scale_strides, *w.scale_strides, *strides, out.numel(), k_per_split),
            {
                "FORMATS": formats,
                "TILE": Program(tile.m, tile.n, tile.k, even_k=k % tile.k == 0, group=_GROUP),
                "num_warps": tile.warps,
                "num_stages": tile.stages,
            },
        )

    tensors = (x.codes, w.codes, x.scale, w.scale, alpha, bias if splits == 1 else None, target)
    _launches(tensors, (*described(x), *described(w), tile, splits, k_per_split, dtype), describe)
    sum_splits(target, bias, out, splits, able.interpreted)
