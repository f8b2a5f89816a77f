"""swizzle_scales, unswizzle_scales: a program holds whole tiles, as they lie in the result or the argument."""

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

# Bytes of a program, and its warps: eight tiles beside each other hold 32 bytes of each row, the least that memory transfers.
_BYTES, _WARPS = 4096, 4


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
    """``[..., rows, columns]`` to the tiles, which are contiguous, or the other way round; what is written is contiguous."""
    if not linear.numel():
        return
    matrices = linear.view(torch.uint8)
    matrices = matrices.reshape(-1, *matrices.shape[-2:])
    batch, rows, columns = matrices.shape
    size = tiles.numel() // batch
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
