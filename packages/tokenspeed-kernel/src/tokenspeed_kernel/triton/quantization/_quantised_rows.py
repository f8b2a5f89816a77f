"""Quantised output of fused kernels: formats, tiles and memory for rows that a kernel computes and then quantises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv
from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, abilities, division_steps
from tokenspeed_kernel.triton.quantization._rows import finish
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX, SMALLEST_NORMAL
from tokenspeed_kernel_base.ops.quantization.formats import swizzled_shape
from tokenspeed_kernel_base.ops.quantization.value import Quantization
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

ROW, GIVEN = 0, -1
"""Special values of `Form.group`. ROW: one scale per row. GIVEN: the caller passes the scale."""

GROUPS = frozenset({8, 16, 32, 64, 128, 256, 512, 1024})
"""Supported block sizes of fp8, in elements: powers of two, because tiles are powers of two."""

_STORED = {"linear": "rows", "128x4": "tiles"}

DECLARED: dict[str, Any] = {
    "solution": "triton",
    "capability": TRITON,
    "signatures": format_signatures("x", "dense", FLOATS),
    "priority": Priority.PORTABLE,
}
"""Arguments of `register_kernel` that all fused kernels with quantised output share."""


KINDS: dict[str, dict[str, Any]] = {
    "fp8": {"granularity": {"token", "block"}, "block_size": GROUPS, "scales_e8m0": any, "scales_packed": any},
    "fp8_with_scale": {"granularity": "tensor"},
    "mxfp8": {"scales_rounded_up": any, "scales_in_tiles": any},
    "nvfp4": {"scales_in_tiles": any},
}
"""The formats to which these kernels quantise, with the traits of each. A launcher is registered once for each format."""


class Form(NamedTuple):
    """The format to which a fused kernel quantises its rows.

    Attributes:
        name: "fp8", "mxfp8" or "nvfp4".
        scales: the layout of scales: "rows"; "packed", four e8m0 scales of a row in an int32; or "tiles" of 128x4.
        e8m0: whether fp8's scales are e8m0 rather than float32.
        format: the 8-bit float of fp8.
        limit: the largest finite value of that 8-bit float.
        group: number of consecutive elements that share a scale; or `ROW` (one scale per row), or `GIVEN` (the caller passes the
            scale).
        up: whether mxfp8's e8m0 scales are rounded up.
        native, interpreted: whether the device converts 8-bit floats in hardware, and whether Triton's interpreter runs the
            kernel, see `Abilities`.
        steps: how often a quotient is corrected by its remainder, see `division_steps`.
    """

    name: str
    scales: str
    e8m0: bool
    format: str
    limit: float
    group: int
    up: bool
    native: bool
    interpreted: bool
    steps: int


def form_of(x: Tensor, quantization: Quantization) -> Form:
    """Returns the `Form` of a call that quantises a result computed from x, and rounded to x's dtype before it is quantised."""
    fp8, granularity = quantization.format == "fp8", quantization.granularity
    dtype = quantization.dtype if fp8 else torch.float8_e4m3fn
    able = abilities(x.device)
    return Form(
        quantization.format,
        "packed" if quantization.scale_dtype == torch.int32 else _STORED[quantization.scale_layout],
        fp8 and quantization.scale_dtype != torch.float32,
        FP8_NAMES[dtype],
        FP8_MAX[dtype],
        {"token": ROW, "given": GIVEN}.get(granularity, quantization.block_size),
        not fp8 and quantization.scale_rounding == "up",
        able.native,
        able.interpreted,
        division_steps(x.dtype),
    )


def least_columns(form: Form) -> int:
    """Returns the fewest columns of a tile: one group of elements that share a scale, or four groups if four scales of a row are
    stored together."""
    return form.group if form.scales == "rows" else 4 * form.group


class Rows(NamedTuple):
    """The distribution of x's rows over programs.

    Attributes:
        per_matrix: rows per matrix. All rows count as one matrix, unless scales are in tiles, because a tile has scales of one
            matrix only.
        programs: programs per matrix.
        matrices: number of matrices.
    """

    per_matrix: int
    programs: int
    matrices: int


def rows_for(x: Tensor, rows: int, form: Form, per_program: int) -> Rows:
    """Returns the distribution of x's ``rows`` rows over programs, with ``per_program`` rows each."""
    if form.scales != "tiles":
        return Rows(rows, cdiv(rows, per_program), 1)
    count = x.shape[-2]
    return Rows(count, cdiv(count, per_program), rows // count)


class Stored(NamedTuple):
    """The output tensors of a fused kernel that quantises.

    Attributes:
        codes: the quantised values, contiguous ``[..., columns]``, packed for fp4.
        scales: contiguous; the same tensor as ``codes`` if the caller passes the scale.
    """

    codes: Tensor
    scales: Tensor

    def finish(self, out: Tensor | None, scale_out: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the quantised values, and the scales if they were computed, in the caller's tensors where provided."""
        codes = finish(self.codes, out)
        return (codes,) if self.scales is self.codes else (codes, finish(self.scales, scale_out))


def stored_for(
    x: Tensor, shape: Sequence[int], form: Form, dtype: torch.dtype, out: Tensor | None, scale_out: Tensor | None = None
) -> Stored:
    """Returns the output tensors for rows of ``shape``: the caller's if contiguous, else new ones.

    ``dtype``: the dtype of the quantised values.
    """
    *lead, columns = shape
    codes = (*lead, columns // 2) if form.name == "nvfp4" else tuple(shape)
    made = out if out is not None and out.is_contiguous() else x.new_empty(codes, dtype=dtype)
    if form.group == GIVEN:
        return Stored(made, made)
    groups = 1 if form.group == ROW else cdiv(columns, form.group)
    scales = (*lead, cdiv(groups, 4) if form.scales == "packed" else groups)
    if form.scales == "tiles":
        scales = (*lead[:-1], *swizzled_shape(lead[-1], groups))
    eight = torch.int32 if form.scales == "packed" else torch.uint8 if form.e8m0 else torch.float32
    scale_dtype = {"fp8": eight, "mxfp8": torch.uint8, "nvfp4": torch.float8_e4m3fn}[form.name]
    provided = scale_out is not None and scale_out.is_contiguous()
    return Stored(made, scale_out if provided and scale_out is not None else x.new_empty(scales, dtype=scale_dtype))


def as_bytes(scales: Tensor) -> Tensor:
    """Views 8-bit floats and packed scales as bytes, which every device can store; returns float32 unchanged."""
    return scales if scales.dtype == torch.float32 else scales.view(torch.uint8)


def nothing_to(scales: Tensor) -> None:
    """Fills the float32 scales of rows without elements with the smallest normal value."""
    if scales.dtype == torch.float32:
        scales.fill_(SMALLEST_NORMAL)
