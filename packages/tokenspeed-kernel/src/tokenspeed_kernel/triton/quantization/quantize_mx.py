"""quantize_mxfp8 and quantize_mxfp4. A program quantises a tile of whole blocks, which it holds in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel.triton.quantization._rows import blocks_of, config_for, finish, made_or, rows_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX
from tokenspeed_kernel_base.ops.quantization.formats import block_scales_shape
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


@register_kernel(
    "quantization",
    "quantize_mxfp8",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"scales_rounded_up": any, "scales_in_tiles": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def quantize_mxfp8(
    x: Tensor, scale_rounding: str, scale_layout: str, out: Tensor | None, scale_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    q = made_or(out, tuple(x.shape), torch.float8_e4m3fn, x)
    return _launch(x, q, scale_layout, out, scale_out, up=scale_rounding == "up")


@register_kernel(
    "quantization",
    "quantize_mxfp4",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"scales_in_tiles": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def quantize_mxfp4(x: Tensor, scale_layout: str, out: Tensor | None, scale_out: Tensor | None) -> tuple[Tensor, Tensor]:
    q = made_or(out, (*x.shape[:-1], x.shape[-1] // 2), torch.uint8, x)
    return _launch(x, q, scale_layout, out, scale_out)


def _launch(
    x: Tensor, q: Tensor, scale_layout: str, out: Tensor | None, scale_out: Tensor | None, up: bool = False
) -> tuple[Tensor, Tensor]:
    # Launches `quantize_mx_kernel`: mxfp4 if q is uint8, otherwise mxfp8. ``up``: whether scales are rounded up.
    scale = made_or(scale_out, block_scales_shape(x, BLOCK_MX, scale_layout), torch.uint8, x)
    if x.numel():
        rows = rows_of(x)
        config = config_for(x.numel())
        blocks = config.tile // BLOCK_MX
        able = abilities(x.device)
        fp4 = q.dtype == torch.uint8
        tiles = scale_layout == "128x4"
        grid, numbers = blocks_of(x, rows, BLOCK_MX, blocks, tiles)
        device_code.quantize_mx_kernel[grid](
            rows,
            q.view(torch.uint8),
            scale,
            *numbers,
            BLOCKS=blocks,
            FP4=fp4,
            UP=up,
            PAIRS=fp4 and able.bfloat16_pairs and _has_pairs(rows),
            NATIVE=able.native,
            TILES=tiles,
            num_warps=config.warps,
        )
    return finish(q, out), finish(scale, scale_out)


def _has_pairs(rows: Tensor) -> bool:
    """Whether each pair of neighbouring elements of x is two bfloat16, aligned so that one int32 load reads both."""
    return rows.dtype == torch.bfloat16 and rows.data_ptr() % 4 == 0 and rows.stride(0) % 2 == 0
