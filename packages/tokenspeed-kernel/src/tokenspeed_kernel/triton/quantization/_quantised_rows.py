"""How kernels that quantise rows which they have just computed store them, for every kernel that does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, abilities, division_steps
from tokenspeed_kernel.triton.quantization._rows import finish
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4, FP8_MAX, SMALLEST_NORMAL
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

ROW, GIVEN = 0, -1
"""Values of `Form.group`: a row has one scale; the scale is known beforehand."""

GROUPS = frozenset({8, 16, 32, 64, 128, 256, 512, 1024})
"""Elements of blocks in 8 bits that tiles are cut into: powers of two, as tiles have."""

DECLARED: dict[str, Any] = {
    "solution": "triton",
    "capability": TRITON,
    "signatures": format_signatures("x", "dense", FLOATS),
    "priority": Priority.PORTABLE,
}
"""What the declarations of these kernels have in common."""


class Form(NamedTuple):
    """What rows are quantised to.

    Attributes:
        name: "fp8", "mxfp8" or "nvfp4".
        format: the 8-bit float, of fp8.
        limit: its largest finite value.
        group: consecutive elements that share a scale; or `ROW`, or `GIVEN`.
        up: whether e8m0 scales are rounded up.
        native, interpreted: see `abilities` of the encoder.
        steps: see `division_steps` of the encoder.
    """

    name: str
    format: str
    limit: float
    group: int
    up: bool
    native: bool
    interpreted: bool
    steps: int


def form_of(x: Tensor, name: str, group: int, dtype: torch.dtype = torch.float8_e4m3fn, up: bool = False) -> Form:
    """The form of what is computed from x, and rounded to its dtype before it is quantised."""
    able = abilities(x.device)
    return Form(name, FP8_NAMES[dtype], FP8_MAX[dtype], group, up, able.native, able.interpreted, division_steps(x.dtype))


def fp8_form(x: Tensor, granularity: str, block_size: int, dtype: torch.dtype) -> Form:
    """The form for granularity ``"token"`` or ``"block"``."""
    return form_of(x, "fp8", ROW if granularity == "token" else block_size, dtype)


def fp8_with_scale_form(x: Tensor, dtype: torch.dtype) -> Form:
    return form_of(x, "fp8", GIVEN, dtype)


def mxfp8_form(x: Tensor, scale_rounding: str) -> Form:
    return form_of(x, "mxfp8", BLOCK_MX, up=scale_rounding == "up")


def nvfp4_form(x: Tensor) -> Form:
    return form_of(x, "nvfp4", BLOCK_NVFP4)


class Stored(NamedTuple):
    """Where quantised rows go, and what was given as their outputs.

    Attributes:
        codes: contiguous ``[..., columns]``, packed for fp4.
        scales: contiguous; the codes where scales are given.
    """

    codes: Tensor
    scales: Tensor

    def finish(self, out: Tensor | None, scale_out: Tensor | None) -> tuple[Tensor, ...]:
        """Codes, and scales where they are made, in what the caller provided."""
        codes = finish(self.codes, out)
        return (codes,) if self.scales is self.codes else (codes, finish(self.scales, scale_out))


def stored_for(
    x: Tensor, shape: Sequence[int], form: Form, dtype: torch.dtype, out: Tensor | None, scale_out: Tensor | None = None
) -> Stored:
    """Memory for rows of ``shape``, where possible what the caller provided. ``dtype``: of the codes."""
    *lead, columns = shape
    codes = (*lead, columns // 2) if form.name == "nvfp4" else tuple(shape)
    made = out if out is not None and out.is_contiguous() else x.new_empty(codes, dtype=dtype)
    if form.group == GIVEN:
        return Stored(made, made)
    scales = (*lead, 1 if form.group == ROW else -(-columns // form.group))
    scale_dtype = {"fp8": torch.float32, "mxfp8": torch.uint8, "nvfp4": torch.float8_e4m3fn}[form.name]
    provided = scale_out is not None and scale_out.is_contiguous()
    return Stored(made, scale_out if provided and scale_out is not None else x.new_empty(scales, dtype=scale_dtype))


def as_bytes(scales: Tensor) -> Tensor:
    """8-bit floats as bytes, which every device can store; float32 as it is."""
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


def nothing_to(scales: Tensor) -> None:
    """Fills the scales of rows without elements."""
    if scales.dtype == torch.float32:
        scales.fill_(SMALLEST_NORMAL)
