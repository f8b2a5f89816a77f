"""dequantize_fp8, dequantize_mxfp8, dequantize_mxfp4, dequantize_nvfp4: the kernels decode values, multiply them by their scales,
and round once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv
from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, abilities
from tokenspeed_kernel.triton.quantization._rows import (
    as_matrix,
    config_for,
    finish,
    grid,
    groups_of,
    made_or,
    matrix_tile,
    rows_of,
)
from tokenspeed_kernel.triton.repeated import Launch, Repeated
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.formats import scale_layout, scale_layouts
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")
_fp8_launches = Repeated(lambda: device_code.dequantize_fp8_kernel)
_block_launches = Repeated(lambda: device_code.dequantize_blocks_kernel)


@functools.lru_cache(maxsize=256)
def _layout_of(shape: torch.Size, block_size: int, stored: torch.dtype, scale_shape: torch.Size) -> str | None:
    return scale_layout(scale_layouts(shape, block_size, stored), scale_shape)


@register_kernel(
    "quantization",
    "dequantize_fp8",
    solution="triton",
    capability=TRITON,
    signatures=None,
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def dequantize_fp8(q: Tensor, scale: Tensor, out_dtype: torch.dtype, block_size: int, out: Tensor | None) -> Tensor:
    made = made_or(out, tuple(q.shape), out_dtype, q)
    if q.numel():
        layout = _layout_of(q.shape, block_size, scale.dtype, scale.shape)
        matrix, scale = as_matrix(q, whole=layout == "tensor"), scale.contiguous()
        e8m0 = scale.dtype != torch.float32
        if e8m0:  # the bytes of packed scales are in the order of the blocks
            scale = scale.view(torch.uint8)

        def describe() -> Launch:
            rows, columns = matrix.shape
            tile = matrix_tile(matrix, most_columns=block_size if layout in ("block", "block2d") else None)
            able, tiled = abilities(q.device), layout == "block2d"
            scale_columns = scale.shape[-1] if scale.ndim else 1
            return Launch(
                (cdiv(rows, tile.rows) * cdiv(columns, tile.columns),),
                (
                    rows,
                    columns,
                    matrix.stride(0),
                    q.shape[-2] if tiled else rows,
                    block_size if tiled else 1,
                    block_size,
                    scale.shape[-2] * scale_columns if tiled else 0,
                    scale_columns,
                    1,
                ),
                {
                    "ROWS": tile.rows,
                    "COLUMNS": tile.columns,
                    "FORMAT": FP8_NAMES[q.dtype],
                    "NATIVE": able.native,
                    "INTERPRETED": able.interpreted,
                    "E8M0": e8m0,
                    "LAYOUT": layout,
                    "ONE_BLOCK": block_size % tile.columns == 0,
                    "num_warps": tile.warps,
                },
            )

        _fp8_launches((matrix, scale, made), (q.dtype, layout, e8m0, block_size, q.shape[-2:]), describe)
    return finish(made, out)


@register_kernel(
    "quantization",
    "dequantize_mxfp8",
    solution="triton",
    capability=TRITON,
    signatures=None,
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def dequantize_mxfp8(q: Tensor, scale: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return decode_blocks(q, scale, None, BLOCK_MX, out_dtype, out)


@register_kernel(
    "quantization",
    "dequantize_mxfp4",
    solution="triton",
    capability=TRITON,
    signatures=None,
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def dequantize_mxfp4(q: Tensor, scale: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return decode_blocks(q, scale, None, BLOCK_MX, out_dtype, out)


@register_kernel(
    "quantization",
    "dequantize_nvfp4",
    solution="triton",
    capability=TRITON,
    signatures=None,
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def dequantize_nvfp4(q: Tensor, scale: Tensor, global_scale: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return decode_blocks(q, scale, global_scale, BLOCK_NVFP4, out_dtype, out)


def decode_blocks(
    q: Tensor, scale: Tensor, global_scale: Tensor | None, block: int, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Dequantises e2m1 values or 8-bit floats ``[..., k]`` with one 1-byte scale per ``block`` elements.

    Args:
        q: uint8 (two e2m1 values per byte) or an 8-bit float.
        scale: e8m0, or e4m3 for blocks of 16; ``[..., k / block]``, or in 128x4 tiles over the last two axes of q.
        global_scale: float32, one element, a factor of all scales, or None.
        block: elements that share a scale.
        out_dtype: dtype of the result.
        out: the output tensor, or None for a new one.

    Returns:
        ``out_dtype [..., k]``.
    """
    fmt = FP8_NAMES.get(q.dtype, "e2m1")
    per_byte = 2 if fmt == "e2m1" else 1
    swizzled = scale.ndim == q.ndim + 3
    made = made_or(out, (*q.shape[:-1], per_byte * q.shape[-1]), out_dtype, q)
    if q.numel():
        rows, stored = rows_of(q), scale.contiguous().view(torch.uint8)

        def describe() -> Launch:
            groups = groups_of(rows, block // per_byte)
            config = config_for(made.numel())
            blocks = config.tile // block
            able = abilities(q.device)
            return Launch(
                grid(groups, blocks),
                (groups.count, groups.stride, groups.outer_stride, made.shape[-1] // block),
                {
                    "BLOCKS": blocks,
                    "BLOCK": block,
                    "FORMAT": fmt,
                    "SWIZZLED": swizzled,
                    "NATIVE": able.native,
                    "INTERPRETED": able.interpreted,
                    "num_warps": config.warps,
                },
            )

        _block_launches((rows, stored, global_scale, made), (fmt, swizzled, block), describe)
    return finish(made, out)
