"""quantize_fp8: 8-bit floats with scales made from the largest magnitudes of tensors, rows, blocks or tiles.

Rows and blocks are groups of consecutive elements: a program holds a tile of whole groups in registers, so that x is read once.
Groups and tiles too large for that are read twice, in chunks, by one program. The scale of a whole tensor takes two launches:
partial maxima, then the conversion, whose programs each reduce the partial maxima first; they go backwards, to find what the
first launch left in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv, multiprocessors, next_power_of_2
from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, abilities, division_steps
from tokenspeed_kernel.triton.quantization._rows import (
    Config,
    config_for,
    finish,
    grid,
    groups_of,
    made_or,
    packed_groups_of,
    rows_of,
)
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX, SMALLEST_NORMAL
from tokenspeed_kernel_base.ops.quantization.fp8 import quantised_scale_shape
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")

# One H200, 8192 x 8192 bfloat16, where a copy reaches 4.07 TB/s. Elements of a group that a program holds in registers at most,
# and of a region (where the device converts to 8 bits): what is larger is read twice. Tiles of 128 x 128: 3.44 TB/s held, 2.95 read
# twice.
_HELD, _REGION_HELD = 16384, 16384
_REGION_WARPS = 16
# Elements of a chunk of what is read twice, and warps.
_CHUNK, _CHUNK_WARPS = 4096, 8
# Elements a thread of a group that takes a program's whole tile: rows 3.93 TB/s, with 16 elements 3.38.
_EACH = 32
# A whole tensor: every program reduces the partial maxima, so the tiles of large ones are larger (2.39 TB/s; else 2.21).
_WHOLE_LARGE, _WHOLE_SMALL = Config(8192, 8), Config(2048, 4)
# Programs a multiprocessor that find partial maxima, and the most partial maxima there are: a program reduces them all.
_PARTIAL_PROGRAMS, _MOST_PARTIALS = 4, 1024


@register_kernel(
    "quantization",
    "quantize_fp8",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"scales_e8m0": any, "scales_packed": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def quantize_fp8(
    x: Tensor,
    granularity: str,
    block_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out: Tensor | None,
    scale_out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    k = x.shape[-1]
    q = made_or(out, tuple(x.shape), dtype, x)
    scale = made_or(scale_out, quantised_scale_shape(tuple(x.shape), granularity, block_size, scale_dtype), scale_dtype, x)
    if not x.numel():
        scale.fill_(SMALLEST_NORMAL if scale_dtype == torch.float32 else 0)
    elif granularity == "tensor":
        _whole(x, q, scale)
    elif granularity == "block2d":
        _tiles(x, q, scale, block_size)
    else:
        _groups(x, q, scale, k if granularity == "token" else block_size)
    return finish(q, out), finish(scale, scale_out)


def _format(x: Tensor, dtype: torch.dtype) -> dict[str, object]:
    able = abilities(x.device)
    return {
        "FORMAT": FP8_NAMES[dtype],
        "LIMIT": FP8_MAX[dtype],
        "NATIVE": able.native,
        "INTERPRETED": able.interpreted,
        "STEPS": division_steps(x.dtype),
    }


def _groups(x: Tensor, q: Tensor, scale: Tensor, length: int) -> None:
    rows = rows_of(x)
    if min(length, x.shape[-1]) > _HELD:
        return _regions(rows[None], q, scale, 1, length)
    packed = scale.dtype == torch.int32
    groups = packed_groups_of(rows, length) if packed else groups_of(rows, length)
    padded = next_power_of_2(groups.length)
    config = config_for(x.numel())
    per_program = max(config.tile // padded, 1)
    device_code.quantize_groups_kernel[grid(groups, per_program)](
        rows,
        q.view(torch.uint8),
        scale.view(torch.uint8) if packed else scale,
        groups.count,
        groups.length,
        groups.limit,
        groups.stride,
        groups.outer_stride,
        SHORT_LAST=groups.short_last,
        E8M0=scale.dtype != torch.float32,
        GROUPS=per_program,
        LENGTH=padded,
        FULL=padded == groups.length,
        num_warps=max(config.warps, min(padded // (32 * _EACH), 16)),
        **_format(x, q.dtype),
    )
    return None


def _tiles(x: Tensor, q: Tensor, scale: Tensor, block_size: int) -> None:
    matrices = x if x.ndim == 3 else x.reshape(-1, *x.shape[-2:])
    _regions(matrices if matrices.stride(2) == 1 else matrices.contiguous(), q, scale, block_size, block_size)


def _regions(x: Tensor, q: Tensor, scale: Tensor, rows: int, columns: int) -> None:
    """Regions of x ``[batch, m, k]``, the last axis of unit stride."""
    batch, m, k = x.shape
    packed = scale.dtype == torch.int32
    rows, columns = min(rows, m), min(columns, k)
    regions_m, regions_k = cdiv(m, rows), cdiv(k, columns)
    padded_rows, padded_columns = next_power_of_2(rows), next_power_of_2(columns)
    once = padded_rows * padded_columns <= (_REGION_HELD if abilities(x.device).native else _CHUNK)
    if not once:
        padded_columns = min(padded_columns, _CHUNK)
        padded_rows = min(padded_rows, max(_CHUNK // padded_columns, 1))
    device_code.quantize_regions_kernel[(batch * regions_m * regions_k,)](
        x,
        q.view(torch.uint8),
        scale.view(torch.uint8) if packed else scale,
        m,
        k,
        rows,
        columns,
        regions_m,
        regions_k,
        x.stride(0),
        x.stride(1),
        ROWS=padded_rows,
        COLUMNS=padded_columns,
        E8M0=scale.dtype != torch.float32,
        PACKED=packed,
        ONCE=once,
        EVEN_ROWS=m % padded_rows == 0 and rows == padded_rows,
        num_warps=_REGION_WARPS if once and padded_rows * padded_columns > _CHUNK else _CHUNK_WARPS,
        **_format(x, q.dtype),
    )


def _whole(x: Tensor, q: Tensor, scale: Tensor) -> None:
    x = x.contiguous()
    elements = x.numel()
    config = _WHOLE_LARGE if config_for(elements).tile > _WHOLE_SMALL.tile else _WHOLE_SMALL
    programs = cdiv(elements, config.tile)
    partials = min(programs, _PARTIAL_PROGRAMS * multiprocessors(x.device), _MOST_PARTIALS)
    partial = x.new_empty(partials, dtype=torch.float32)
    device_code.partial_maxima_kernel[(partials,)](x, partial, elements, TILE=config.tile, num_warps=config.warps)
    device_code.quantize_tensor_kernel[(programs,)](
        x,
        q.view(torch.uint8),
        scale,
        partial,
        partials,
        elements,
        TILE=config.tile,
        PARTIALS=next_power_of_2(partials),
        num_warps=config.warps,
        **_format(x, q.dtype),
    )
