"""Formats of quantised tensors for kernel declarations, and recognition of scale layouts by shape.

A block's shape refers to the axes of the tensor as it is passed. Blocks along the last axis are ``(1, 32)``; blocks of a transposed
matrix are ``(32, 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4, SOURCE_DTYPES, TILE_ROWS, TILE_SCALES
from tokenspeed_kernel_base.signature import SCALE_LAYOUTS, ScaleFormat, TensorFormat, dtype_names, tensor_format

E8M0 = frozenset({torch.uint8}) | {dtype for dtype in (getattr(torch, "float8_e8m0fnu", None),) if dtype is not None}
"""Dtypes of e8m0 scales, 1 byte each: uint8 and float8_e8m0fnu. PyTorch 2.6 lacks float8_e8m0fnu."""

SOURCE_DTYPE_NAMES = dtype_names(SOURCE_DTYPES)
"""Names of the dtypes that operators dequantise to."""


def fp8_format(
    dtype: torch.dtype, granularity: str, block_shape: tuple[int, ...] | None = None, scale_dtype: torch.dtype = torch.float32
) -> TensorFormat:
    """Returns the format of an 8-bit float. `ScaleFormat` explains the granularity, block shape and dtype of the scales."""
    return tensor_format("fp8", dtype, scale=ScaleFormat(scale_dtype, granularity, block_shape))


def mxfp8_format(
    dtype: torch.dtype = torch.float8_e4m3fn, block_shape: tuple[int, ...] = (1, BLOCK_MX), layout: str = "linear"
) -> TensorFormat:
    return tensor_format("mxfp8", dtype, scale=ScaleFormat(torch.uint8, "block", block_shape, layout=layout))


def mxfp4_format(block_shape: tuple[int, ...] = (1, BLOCK_MX), layout: str = "linear") -> TensorFormat:
    """Returns the format with two e2m1 values in a byte; ``block_shape`` counts elements, not bytes."""
    return tensor_format("mxfp4", torch.uint8, scale=ScaleFormat(torch.uint8, "block", block_shape, layout=layout))


def nvfp4_format(block_shape: tuple[int, ...] = (1, BLOCK_NVFP4), layout: str = "linear") -> TensorFormat:
    """Returns a format like that of `mxfp4_format`, with e4m3 scales. The float32 global scale is not part of the format."""
    return tensor_format("nvfp4", torch.uint8, scale=ScaleFormat(torch.float8_e4m3fn, "block", block_shape, layout=layout))


def check_scalar(check: Checker, argument: str, scale: Tensor) -> None:
    """Raises TypeError or ValueError unless scale is one float32 element."""
    check.dtype(argument, scale, torch.float32)
    check.require(tuple(scale.shape) in ((), (1,)), argument, "of shape [] or [1]", scale)


def check_scale_layout(check: Checker, x: Tensor, scale_layout: str) -> None:
    """Raises ValueError unless x's scales can have this layout."""
    check.one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    check.require(scale_layout == "linear" or x.ndim >= 2, "x", f"of at least two axes with scale_layout={scale_layout!r}", x)


def block_scales_shape(x: Tensor, block: int, scale_layout: str) -> tuple[int, ...]:
    """Returns the shape of block scales along x's last axis."""
    *lead, k = x.shape
    return (*lead[:-1], *swizzled_shape(lead[-1], k // block)) if scale_layout == "128x4" else (*lead, k // block)


def swizzled_shape(rows: int, columns: int) -> tuple[int, ...]:
    """Returns the shape of scales ``[rows, columns]`` in 128x4 tiles, see `swizzle_scales`."""
    return blocks(rows, TILE_ROWS), blocks(columns, TILE_SCALES), 32, 4, 4


def blocks(size: int, block_size: int) -> int:
    """Returns how many blocks cover an axis; the last one may be partial."""
    return (size + block_size - 1) // block_size


def bind_blocks(check: Checker, size: str, block_size: int) -> str:
    """Binds the number of blocks that cover the axis ``size`` as a size of its own, and returns that size's name."""
    name = f"ceil({size}/{block_size})"
    check.bind(name, blocks(check[size], block_size), "the plan")
    return name


def scale_layouts(shape: Sequence[int], block_size: int, dtype: torch.dtype = torch.float32) -> dict[str, list[tuple[int, ...]]]:
    """Returns the shapes that scales of a tensor ``[..., m, k]`` may have, by layout.

    ``dtype`` is the scales' dtype: float32; for block scales also e8m0, or int32, which packs four e8m0 scales.

    If a shape fits several layouts, these have the same meaning, and the first one's name is used.
    """
    *lead, k = shape
    if dtype != torch.float32:
        along = blocks(k, block_size) if dtype in E8M0 else blocks(blocks(k, block_size), 4)
        layouts = {"block": [(*lead, along)]}
        if lead:
            layouts["block2d"] = [(*lead[:-1], blocks(lead[-1], block_size), along)]
        return layouts
    layouts = {
        "tensor": [(), (1,)],
        "token": [(*lead, 1)],
        "block": [(*lead, blocks(k, block_size))],
        "channel": [(k,)],
    }
    if lead:
        *outer, m = lead
        layouts["block2d"] = [(*outer, blocks(m, block_size), blocks(k, block_size))]
    return layouts


def scale_layout(layouts: dict[str, list[tuple[int, ...]]], scale_shape: Sequence[int]) -> str | None:
    """Returns the layout that matches a scale's shape; None if no layout does."""
    return next((name for name, shapes in layouts.items() if tuple(scale_shape) in shapes), None)
