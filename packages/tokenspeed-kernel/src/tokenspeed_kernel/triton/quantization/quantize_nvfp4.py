"""quantize_nvfp4. A program quantises a tile of whole blocks, which it holds in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel.triton.quantization._encode import abilities, division_steps
from tokenspeed_kernel.triton.quantization._rows import blocks_of, config_for, finish, made_or, rows_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.formats import block_scales_shape
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


@register_kernel(
    "quantization",
    "quantize_nvfp4",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"scales_in_tiles": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def quantize_nvfp4(
    x: Tensor, global_scale: Tensor, scale_layout: str, out: Tensor | None, scale_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    q = made_or(out, (*x.shape[:-1], x.shape[-1] // 2), torch.uint8, x)
    scale = made_or(scale_out, block_scales_shape(x, BLOCK_NVFP4, scale_layout), torch.float8_e4m3fn, x)
    if x.numel():
        rows = rows_of(x)
        config = config_for(x.numel())
        blocks = config.tile // BLOCK_NVFP4
        able = abilities(x.device)
        tiles = scale_layout == "128x4"
        grid, numbers = blocks_of(x, rows, BLOCK_NVFP4, blocks, tiles)
        device_code.quantize_nvfp4_kernel[grid](
            rows,
            global_scale,
            q,
            scale.view(torch.uint8),
            *numbers,
            BLOCKS=blocks,
            NATIVE=able.native,
            INTERPRETED=able.interpreted,
            STEPS=division_steps(x.dtype),
            TILES=tiles,
            num_warps=config.warps,
        )
    return finish(q, out), finish(scale, scale_out)
