"""quantize_fp8_with_scale: 8-bit floats with given scales, per tensor, per row or per column."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv
from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, abilities, division_steps
from tokenspeed_kernel.triton.quantization._rows import as_matrix, finish, made_or, matrix_tile
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


# Columns per tile with one scale per column.
_CHANNELS = 256


@register_kernel(
    "quantization",
    "quantize_fp8_with_scale",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def quantize_fp8_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    q = made_or(out, tuple(x.shape), dtype, x)
    if x.numel():
        one_scale = scale.ndim == 0 or tuple(scale.shape) == (1,)
        matrix = as_matrix(x, whole=one_scale)
        rows, columns = matrix.shape
        per_token = scale.ndim > 0 and tuple(scale.shape) == (*x.shape[:-1], 1)
        # With one scale per column, limit the tile's columns. Each divisor is then prepared once for several rows of the tile.
        tile = matrix_tile(matrix, most_columns=None if one_scale or per_token else _CHANNELS)
        scales = scale.reshape(-1)
        able = abilities(x.device)
        device_code.quantize_with_scale_kernel[(cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)](
            matrix,
            scales,
            q.view(torch.uint8),
            rows,
            columns,
            matrix.stride(0),
            columns,
            scales.stride(0),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            FORMAT=FP8_NAMES[dtype],
            NATIVE=able.native,
            INTERPRETED=able.interpreted,
            STEPS=division_steps(x.dtype),
            SCALES="tensor" if one_scale else "token" if per_token else "channel",
            num_warps=tile.warps,
        )
    return finish(q, out)
