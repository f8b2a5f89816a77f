"""swizzle_scales, unswizzle_scales: conversion of scales between rows and 128x4 tiles. A program copies whole tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv
from tokenspeed_kernel.triton.quantization._rows import finish, made_or
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.quantization.formats import swizzled_shape
from tokenspeed_kernel_base.ops.quantization.swizzle import SCALE_DTYPES
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

# For rows that consist of whole 32-bit words of four scales: the number of tiles that a program copies, which hold 128 bytes of
# each row, and the program's warps.
_ACROSS, _WARPS = 32, 4
# For other rows: the bytes that a program copies. They are eight neighbouring tiles, with 32 bytes (one memory sector) of each row.
_BYTES = 4096


@register_kernel(
    "quantization",
    "swizzle_scales",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("scale", "dense", SCALE_DTYPES),
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def swizzle_scales(scale: Tensor, out: Tensor | None) -> Tensor:
    *lead, rows, columns = scale.shape
    made = made_or(out, (*lead, *swizzled_shape(rows, columns)), scale.dtype, scale)
    _launch(scale, made, to_tiles=True)
    return finish(made, out)


@register_kernel(
    "quantization",
    "unswizzle_scales",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("scale", "dense", SCALE_DTYPES),
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def unswizzle_scales(scale: Tensor, rows: int, columns: int, out: Tensor | None) -> Tensor:
    made = made_or(out, (*scale.shape[:-5], rows, columns), scale.dtype, scale)
    _launch(made, scale.contiguous(), to_tiles=False)
    return finish(made, out)


def _launch(linear: Tensor, tiles: Tensor, to_tiles: bool) -> None:
    """Copies scales ``[..., rows, columns]`` to 128x4 tiles, or back. The tiles and the destination are contiguous."""
    if not linear.numel():
        return
    matrices = linear.view(torch.uint8)
    matrices = matrices.reshape(-1, *matrices.shape[-2:])
    batch, rows, columns = matrices.shape
    size = tiles.numel() // batch
    if _in_words(matrices):
        device_code.swizzle_words_kernel[(batch * cdiv(rows, 128) * cdiv(columns, 4 * _ACROSS),)](
            matrices.view(torch.int32),
            tiles.view(torch.uint8).flatten().view(torch.int32),
            rows,
            columns // 4,
            matrices.stride(0) // 4,
            matrices.stride(1) // 4,
            ACROSS=_ACROSS,
            TO_TILES=to_tiles,
            num_warps=_WARPS,
        )
        return
    device_code.swizzle_kernel[(batch * cdiv(size, _BYTES),)](
        matrices,
        tiles.view(torch.uint8),
        rows,
        columns,
        size,
        *matrices.stride(),
        BYTES=_BYTES,
        TO_TILES=to_tiles,
        num_warps=_WARPS,
    )


def _in_words(x: Tensor) -> bool:
    """Whether four scales of a row can be moved as one 32-bit word."""
    whole = x.shape[2] % 4 == 0 and x.stride(2) == 1 and x.storage_offset() % 4 == 0 and x.data_ptr() % 4 == 0
    return whole and x.stride(0) % 4 == 0 and x.stride(1) % 4 == 0
