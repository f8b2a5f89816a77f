"""Computes ``GELU(gate) * up``. One program computes one tile of the result; the tiles are those of `gated`."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.activation.gated import tile_for
from tokenspeed_kernel.triton.common import FLOATS, TRITON, as_rows, cdiv, has_rows
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


@register_kernel(
    "activation",
    "gelu_and_mul",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"tanh": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def gelu_and_mul(x: Tensor, approximate: str, out: Tensor | None) -> Tensor:
    """Implements the operator `tokenspeed_kernel.gelu_and_mul`, which documents the arguments."""
    intermediate = x.shape[-1] // 2
    result = out if out is not None and has_rows(out) else x.new_empty((*x.shape[:-1], intermediate))
    if result.numel():
        source, target = as_rows(x), as_rows(result)
        tile, rows = tile_for(intermediate), source.shape[0]
        column_tiles = cdiv(intermediate, tile.columns)
        device_code.gelu_kernel[(cdiv(rows, tile.rows) * column_tiles,)](
            source,
            target,
            rows,
            intermediate,
            column_tiles,
            source.stride(0),
            target.stride(0),
            TANH=approximate == "tanh",
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            INTERPRETED=abilities(x.device).interpreted,
            num_warps=tile.warps,
        )
    return result if out is None or out is result else out.copy_(result)
