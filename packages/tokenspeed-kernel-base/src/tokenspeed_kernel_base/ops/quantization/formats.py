"""The formats of quantised tensors as kernels declare them, and how scales are recognised by their shapes.

A block's shape is stated along the axes of the tensor as it is passed: blocks along the last axis are ``(1, 32)``, those of a
matrix that is passed transposed ``(32, 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.signature import ScaleFormat, TensorFormat, tensor_format


def fp8_format(dtype: torch.dtype, granularity: str, block_shape: tuple[int, ...] | None = None) -> TensorFormat:
    """An 8-bit float with float32 scales; granularity as in `ScaleFormat`."""
    return tensor_format("fp8", dtype, scale=ScaleFormat(torch.float32, granularity, block_shape))


def mxfp8_format(dtype: torch.dtype = torch.float8_e4m3fn, block_shape: tuple[int, ...] = (1, BLOCK_MX)) -> TensorFormat:
    return tensor_format("mxfp8", dtype, scale=ScaleFormat(torch.uint8, "block", block_shape))


def mxfp4_format(block_shape: tuple[int, ...] = (1, BLOCK_MX)) -> TensorFormat:
    """Two e2m1 codes a byte; ``block_shape`` counts elements, not bytes."""
    return tensor_format("mxfp4", torch.uint8, scale=ScaleFormat(torch.uint8, "block", block_shape))


def nvfp4_format() -> TensorFormat:
    return tensor_format("nvfp4", torch.uint8, scale=ScaleFormat(torch.float8_e4m3fn, "block", (1, BLOCK_NVFP4)))


def blocks(size: int, block_size: int) -> int:
    """How many blocks cover an axis; the last may be short."""
    return (size + block_size - 1) // block_size


def scale_layouts(shape: Sequence[int], block_size: int) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that float32 scales of a tensor ``[..., m, k]`` may have, by layout.

    Where a shape fits several layouts they mean the same, and the first is its name.
    """
    *lead, k = shape
    layouts: dict[str, list[tuple[int, ...]]] = {
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
    """The layout that a scale's shape has, or None."""
    return next((name for name, shapes in layouts.items() if tuple(scale_shape) in shapes), None)
