"""Operands of the Triton products on the host: which format, which scales, which strides."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES
from tokenspeed_kernel_base.checks import FP8

NO_SCALE, WHOLE, LINE, BLOCK, MX = "none", "whole", "line", "block", "mx"
"""No scale; one for all; one a row of a, column of b; one for 128 elements along k (and 128 columns of b); e8m0 for 32 along k."""


class Operand(NamedTuple):
    """One operand, as lines along k: the rows of a, the columns of b.

    Attributes:
        tensor: as the caller passed it.
        batch, lines, k: its sizes; k counts elements.
        format: "dense", "e2m1" or an 8-bit float's name.
        scale, scaling: the scales and what they belong to, see above.
        strides: elements of ``tensor`` from one matrix, one line, one element (e2m1: one pair of elements) along k to the next.
        scale_strides: likewise from one matrix, one line (BLOCK, b: 128 lines), one block along k to the next.
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

    @property
    def codes(self) -> Tensor:
        """``tensor``, 8-bit floats as uint8."""
        return self.tensor.view(torch.uint8) if self.tensor.element_size() == 1 else self.tensor

    @property
    def aligned(self) -> bool:
        """Whether all lines of all matrices, along k or across, can be loaded 16 elements at a time."""
        along, across = sorted(self.strides[1:])
        lie_well = along == 1 and (across % 16 == 0 or self.lines == 1)
        return self.k > 0 and self.k % 16 == 0 and lie_well and (self.batch == 1 or self.strides[0] % 16 == 0)


def operand(x: Tensor, scale: Tensor | None, lines_axis: int) -> Operand:
    """``a`` with ``lines_axis=-2``, ``b`` with -1; two axes, or three with the batch in front."""
    k_axis = -3 - lines_axis
    scaling, scale_strides = NO_SCALE, (0, 0, 0)
    if scale is not None:
        if scale.dtype == torch.uint8:
            scaling = MX
        elif scale.ndim < 2:
            scaling = WHOLE
        elif scale.shape[lines_axis] == x.shape[lines_axis] and scale.shape[k_axis] == 1:
            scaling = LINE
        else:
            scaling = BLOCK
        if scaling != WHOLE:
            scale_strides = _strides(scale, lines_axis, k_axis)
    fmt = FP8_NAMES[x.dtype] if x.dtype in FP8 else "e2m1" if x.dtype == torch.uint8 else "dense"
    k = x.shape[k_axis] * (2 if fmt == "e2m1" else 1)
    batch = x.shape[0] if x.ndim == 3 else 1
    return Operand(x, batch, x.shape[lines_axis], k, fmt, scale, scaling, _strides(x, lines_axis, k_axis), scale_strides)


def _strides(x: Tensor, lines_axis: int, k_axis: int) -> tuple[int, int, int]:
    return (x.stride(0) if x.ndim == 3 else 0, x.stride(lines_axis), x.stride(k_axis))
