"""Products of operands that are decoded in registers: the weight-only and mx formats, 8-bit floats where the matrix units do not
take them, and dense operands of the dtypes and with the options that solution ``torch`` does not have.

b's lines are the matrix unit's first operand: where that may lie in registers (Hopper), decoded values are not copied to shared
memory, and few tokens are padded to 16, not to 64. Codes of at most 8 bits and their e8m0 scales are exact in bfloat16. So are
float16 values as sums of two bfloat16 (``SPLIT_A``), which meet mx weights, whose range float16 does not have. e2m1 codes times
their e4m3 scales have at most 6 bits and lie between 2^-10 and 2688: exact in both. Scales of larger blocks multiply the products
of a block, those of lines and tensors multiply sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, common_device
from tokenspeed_kernel.triton.gemm._operands import BLOCK, E8M0, MICRO, Operand
from tokenspeed_kernel.triton.gemm._split_k import choose_splits, split_target, sum_splits
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")


class Formats(NamedTuple):
    """What is multiplied, and how.

    Attributes:
        a, b: formats of the operands.
        a_scaling, b_scaling, a_scales, b_scales, a_block, b_block, b_lines, a_swizzled, b_swizzled: ``scaling``, ``scale_format``,
            ``block``, ``lines_each`` and ``swizzled`` of each `Operand`.
        split_a: whether a is the sum of two bfloat16.
        compute, precision: dtype of the products' operands, Triton's, and precision of float32 products.
        native, interpreted: see `Abilities`.
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
    """A `Tile` as the kernel has it, whether its ``k`` divides all of k, and rows of tiles that are done together (`tile_of`)."""

    m: int
    n: int
    k: int
    even_k: bool
    group: int


class Tile(NamedTuple):
    """Rows of a, columns of b and elements along k of a program's tile, its warps, and how many loads are under way."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# float32 products have no matrix unit: small tiles keep the sums in registers.
_WIDE = Tile(32, 32, 32, 4, 2)
# Lines that are not aligned are loaded byte by byte, each with its own address in registers.
_UNALIGNED = Tile(16, 64, 64, 4, 2)
# Products that are scaled block by block are held beside their sums.
_BLOCKS = (Tile(16, 64, 128, 4, 3), Tile(32, 64, 128, 4, 3), Tile(64, 64, 64, 4, 3))
_TILES = (Tile(16, 64, 128, 4, 3), Tile(32, 64, 128, 4, 3), Tile(64, 64, 128, 4, 3), Tile(128, 128, 64, 8, 3))

# Programs with small tiles that a multiprocessor needs at least: one decodes while the loads of another are in flight.
_PROGRAMS = 3
# Rows of tiles that are done together.
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
    """``out[...] = alpha * (a @ b) + bias`` for two axes, or three with the batch in front; out has elements."""
    m, n, k = x.lines, w.lines, x.k
    device, dtype = x.tensor.device, x.tensor.dtype
    able = abilities(device)
    wide = dtype == torch.float32
    tile = tile or tile_for(x, w)
    # A tile's products along k have one scale.
    tile = tile._replace(k=min([tile.k, *(each.block for each in (x, w) if each.scaling == BLOCK)]))
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n) * x.batch
    splits, k_per_split = choose_splits(tiles, k, tile.k, device, _PROGRAMS if tile.m <= 64 else 1)
    target, strides = split_target(out, splits)
    split_a = dtype == torch.float16 and w.scaling == MICRO and w.scale_format == E8M0
    compute = (
        torch.float32 if wide or able.interpreted else torch.float16 if dtype == torch.float16 and not split_a else torch.bfloat16
    )
    device_code.decoded_mm_kernel[(tiles, splits)](
        x.codes,
        w.codes,
        x.scale,
        w.scale,
        alpha,
        bias if splits == 1 else None,
        target,
        m,
        n,
        k,
        *x.strides,
        *w.strides,
        *x.scale_strides,
        *w.scale_strides,
        *strides,
        out.numel(),
        k_per_split,
        FORMATS=Formats(
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
        ),
        TILE=Program(tile.m, tile.n, tile.k, even_k=k % tile.k == 0, group=_GROUP),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    sum_splits(target, bias, out, splits, able.interpreted)
