"""Conversion of block scales to and from the layout of Blackwell's block-scaled MMAs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.quantization.encodings import poison_padding, swizzle, unswizzle
from tokenspeed_kernel_base.ops.quantization.formats import E8M0, swizzled_shape
from tokenspeed_kernel_base.variation import Variation, Want

SCALE_DTYPES = E8M0 | {torch.float8_e4m3fn}


@operator(
    "quantization",
    "swizzle_scales",
    formats=("scale",),
    traits={"columns": int},
    exact=True,
    varying=("rows", "m"),
    scales=("scale",),
)
def swizzle_scales(scale: Tensor, out: Tensor | None = None) -> Tensor:
    """Swizzles block scales into 128x4 tiles, the layout of Blackwell's block-scaled MMAs (nvfp4, mxfp4, mxfp8).

    The last tiles are padded with zeros::

        out[..., i // 128, j // 4, i % 32, i // 32 % 4, j % 4] = scale[..., i, j]

    The scale of row i and column j is element
    ``((i // 128) * ceil(columns/4) + j // 4) * 512 + (i % 32) * 16 + (i // 32 % 4) * 4 + j % 4`` of the memory of a matrix. Some
    libraries give the same memory the shape ``[128 * ceil(rows/128), 4 * ceil(columns/4)]``; ``view`` converts between the two
    shapes.

    Args:
        scale: uint8 or float8_e8m0fnu (e8m0), or float8_e4m3fn, ``[..., m, columns]``: a row's scales lie along the last axis.
        out: receives the result.

    Returns:
        scale's dtype ``[..., ceil(m/128), ceil(columns/4), 32, 4, 4]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import swizzle_scales
        >>> scale = torch.arange(33 * 4, dtype=torch.uint8).reshape(33, 4)
        >>> swizzled = swizzle_scales(scale)
        >>> swizzled.shape, swizzled.flatten()[:8]  # row 0, and row 32 behind it
        (torch.Size([1, 1, 32, 4, 4]), tensor([  0,   1,   2,   3, 128, 129, 130, 131], dtype=torch.uint8))

    Safe in CUDA graphs.
    """
    return swizzle(scale)


@operator(
    "quantization",
    "unswizzle_scales",
    formats=("scale",),
    traits={"columns": int},
    exact=True,
    varying=("rows", "tiles"),
    scales=("scale",),
)
def unswizzle_scales(scale: Tensor, rows: int, columns: int, out: Tensor | None = None) -> Tensor:
    """Inverts `swizzle_scales`: returns block scales in linear layout, without the padding.

    Args:
        scale: uint8, float8_e8m0fnu or float8_e4m3fn ``[..., tiles, tiles_across, 32, 4, 4]``.
        rows: rows of the result, such that ``ceil(rows/128)`` is tiles.
        columns: columns of the result, such that ``ceil(columns/4)`` is tiles_across.
        out: receives the result.

    Returns:
        scale's dtype ``[..., rows, columns]``.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import swizzle_scales, unswizzle_scales
        >>> scale = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
        >>> unswizzle_scales(swizzle_scales(scale), 2, 3)
        tensor([[0, 1, 2],
                [3, 4, 5]], dtype=torch.uint8)

    Safe in CUDA graphs.
    """
    return unswizzle(scale, rows, columns)


@swizzle_scales.traits
def _(scale: Tensor) -> dict[str, object]:
    return {"columns": scale.shape[-1]}


@unswizzle_scales.traits
def _(columns: int) -> dict[str, object]:
    return {"columns": columns}


@swizzle_scales.check
def _(check: Checker, scale: Tensor) -> None:
    check.tensor("scale", scale, "... m columns", SCALE_DTYPES)


@unswizzle_scales.check
def _(check: Checker, scale: Tensor, rows: int, columns: int) -> None:
    check.tensor("scale", scale, "... tiles tiles_across 32 4 4", SCALE_DTYPES)
    check.require(rows >= 0, "rows", "at least 0", rows)
    check.require(columns >= 0, "columns", "at least 0", columns)
    wanted = [*scale.shape[:-5], *swizzled_shape(rows, columns)]
    check.require(list(scale.shape) == wanted, "scale", f"of shape {wanted} for {rows} rows and {columns} columns", scale)


@swizzle_scales.fake
def _(scale: Tensor) -> Tensor:
    *lead, m, columns = scale.shape
    return scale.new_empty((*lead, *swizzled_shape(m, columns)))


@unswizzle_scales.fake
def _(scale: Tensor, rows: int, columns: int) -> Tensor:
    return scale.new_empty((*scale.shape[:-5], rows, columns))


@unswizzle_scales.vary
def _(variation: Variation, scale: Tensor, rows: int, columns: int) -> dict[str, Any]:
    return {"scale": poison_padding(scale, rows, columns)} if variation.want is Want.UNUSED else {}


@recipe
def _bytes(*shape: int, dtype: torch.dtype = torch.uint8) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"scale": draw.integers(0, 256, *shape, dtype=torch.uint8).view(dtype)}


@recipe
def _tiles(
    rows: int, columns: int, lead: tuple[int, ...] = (), dtype: torch.dtype = torch.uint8
) -> Callable[[Draw], dict[str, Any]]:
    shape = (*lead, *swizzled_shape(rows, columns))
    return lambda draw: {
        "scale": draw.integers(0, 256, *shape, dtype=torch.uint8).view(dtype),
        "rows": rows,
        "columns": columns,
    }


@swizzle_scales.cases
def _() -> list[Case]:
    return [
        Case("one scale", _bytes(1, 1)),
        Case("gpt-oss-120b, mxfp4, 130 rows", _bytes(130, 90)),
        Case("batch of 2, e4m3", _bytes(2, 200, 6, dtype=torch.float8_e4m3fn)),
        Case("no rows", _bytes(0, 90)),
        Case("llama-70b weight 28672 x 8192, nvfp4", _bytes(28672, 512, dtype=torch.float8_e4m3fn), large=True),
        Case("gpt-oss-120b experts, mxfp4", _bytes(128, 5760, 90), large=True),
    ]


@unswizzle_scales.cases
def _() -> list[Case]:
    return [
        Case("one scale", _tiles(1, 1)),
        Case("gpt-oss-120b, mxfp4, 130 rows", _tiles(130, 90)),
        Case("batch of 2, e4m3", _tiles(200, 6, (2,), torch.float8_e4m3fn)),
        Case("no rows", _tiles(0, 90)),
        Case("llama-70b weight 28672 x 8192, nvfp4", _tiles(28672, 512, (), torch.float8_e4m3fn), large=True),
    ]


@swizzle_scales.cost
def _(scale: Tensor) -> Cost:
    *lead, m, columns = scale.shape
    return Cost(flops=0.0, bytes=nbytes(scale) + math.prod((*lead, *swizzled_shape(m, columns))))


@unswizzle_scales.cost
def _(scale: Tensor, rows: int, columns: int) -> Cost:
    return Cost(flops=0.0, bytes=2.0 * math.prod(scale.shape[:-5]) * rows * columns)
