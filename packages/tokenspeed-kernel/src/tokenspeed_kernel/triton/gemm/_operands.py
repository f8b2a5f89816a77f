"""Describes the operands of the Triton GEMMs to the launchers: format, scales and strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv
from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES
from tokenspeed_kernel_base.checks import FP8
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4

NO_SCALE, WHOLE, LINE, BLOCK, MICRO = "none", "whole", "line", "block", "micro"
"""The granularity of an operand's scales. NO_SCALE: no scales. WHOLE: one scale for the operand. LINE: one per row of a, or column
of b. BLOCK: one per 32 or more elements along k, which multiplies the block's partial sum. MICRO: one one-byte scale per 16 or 32
elements along k, which multiplies the elements.
"""

FLOAT32, E8M0, PACKED, E4M3 = "float32", "e8m0", "packed", "e4m3"
"""The storage format of an operand's scales. PACKED: four e8m0 scales in an int32."""


_STORED = {torch.float32: FLOAT32, torch.int32: PACKED, torch.float8_e4m3fn: E4M3}


class Operand(NamedTuple):
    """One operand of a GEMM, as lines along k: a line is a row of a, or a column of b.

    Attributes:
        tensor: the tensor that the caller passed.
        batch, lines, k: the operand's sizes; k counts elements.
        format: "dense", "e2m1" or an 8-bit float's name.
        scale, scaling: the scales and their granularity, see above.
        strides: strides of ``tensor`` by matrix, line, and element along k (e2m1: pair of elements), in elements of ``tensor``.
        scale_strides: strides of the scales by matrix, line (or group of ``lines_each``), and block along k (PACKED: four blocks).
            Swizzled scales: by matrix, row of tiles, and column of tiles; each tile is contiguous.
        scale_format: storage format of a scale, see above.
        block: elements along k that share a scale, for BLOCK and MICRO.
        lines_each: lines that share a scale, for BLOCK.
        swizzled: whether scales are in tiles of 128x4.
    """

    tensor: Tensor
    batch: int
    lines: int
    k: int
    format: str
    scale: Tensor | None
    scaling: str
    strides: tuple[int, int, int]
    scale_strides: tuple[int, int, int]
    scale_format: str = FLOAT32
    block: int = 0
    lines_each: int = 1
    swizzled: bool = False

    @property
    def codes(self) -> Tensor:
        """Returns ``tensor``, with 8-bit floats viewed as uint8."""
        return self.tensor.view(torch.uint8) if self.tensor.element_size() == 1 else self.tensor

    @property
    def aligned(self) -> bool:
        """Whether all matrices can be loaded 16 elements at a time, along k or across lines."""
        along, across = sorted(self.strides[1:])
        lie_well = along == 1 and (across % 16 == 0 or self.lines == 1)
        return self.k > 0 and self.k % 16 == 0 and lie_well and (self.batch == 1 or self.strides[0] % 16 == 0)


def described(x: Operand) -> tuple[Any, ...]:
    """Returns all fields of an operand but its tensors."""
    return *x[1:5], *x[6:]


def operand(x: Tensor, scale: Tensor | None, lines_axis: int) -> Operand:
    """Returns the `Operand` that describes a (``lines_axis=-2``) or b (-1). x has two axes, or three with the batch first."""
    k_axis = -3 - lines_axis
    fmt = FP8_NAMES[x.dtype] if x.dtype in FP8 else "e2m1" if x.dtype == torch.uint8 else "dense"
    k = x.shape[k_axis] * (2 if fmt == "e2m1" else 1)
    batch = x.shape[0] if x.ndim == 3 else 1
    bare = Operand(x, batch, x.shape[lines_axis], k, fmt, None, NO_SCALE, _strides(x, lines_axis, k_axis), (0, 0, 0))
    return bare if scale is None else _scaled(bare, scale, lines_axis, k_axis)


def _scaled(x: Operand, scale: Tensor, lines_axis: int, k_axis: int) -> Operand:
    # Returns the operand with its scale: finds the granularity and the block size from the scale's dtype and shape.
    if scale.dtype == torch.float32 and scale.ndim < 2:
        return x._replace(scale=scale, scaling=WHOLE)
    stored = _STORED.get(scale.dtype, E8M0)
    scale = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    if scale.ndim == x.tensor.ndim + 3:
        scale = scale.contiguous()
        strides = (scale.stride(0) if scale.ndim == 6 else 0, scale.stride(-5), scale.stride(-4))
        block = BLOCK_NVFP4 if stored == E4M3 else BLOCK_MX
        return x._replace(scale=scale, scaling=MICRO, scale_strides=strides, scale_format=stored, block=block, swizzled=True)
    lines, along = scale.shape[lines_axis], scale.shape[k_axis]
    strides = _strides(scale, lines_axis, k_axis)
    x = x._replace(scale=scale, scale_strides=strides, scale_format=stored)
    if stored == FLOAT32 and lines == x.lines and along == 1:
        return x._replace(scaling=LINE)
    if stored == E4M3:
        return x._replace(scaling=MICRO, block=BLOCK_NVFP4)
    if stored == E8M0 and lines == x.lines and along * BLOCK_MX == x.k:
        return x._replace(scaling=MICRO, block=BLOCK_MX)
    # If several block sizes fit, they are equivalent. Packed scales have blocks of 128.
    fits = (size for size in (128, 64) if cdiv(x.k, size) == along and lines in (x.lines, cdiv(x.lines, size)))
    block = 128 if stored == PACKED else next(fits, 32)
    return x._replace(scaling=BLOCK, block=block, lines_each=1 if lines == x.lines else block)


def _strides(x: Tensor, lines_axis: int, k_axis: int) -> tuple[int, int, int]:
    return (x.stride(0) if x.ndim == 3 else 0, x.stride(lines_axis), x.stride(k_axis))
