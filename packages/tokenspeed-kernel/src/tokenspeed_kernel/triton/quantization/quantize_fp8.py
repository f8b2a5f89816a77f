"""quantize_fp8: 8-bit floats with scales from the amax of tensors, rows, blocks or 2D tiles.

Rows and blocks are groups of consecutive elements. A program holds a tile of whole groups in registers, so that x is read once.
Larger groups and 2D tiles are read twice by one program, in chunks. The scale of a whole tensor takes two launches. The first
computes partial maxima. In the second, each program reduces all partial maxima, then quantises. The second launch starts at the end
of x, to hit the data that the first launch left in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, cdiv, next_power_of_2, sm_count_of
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

# All figures are from one H200 with 8192 x 8192 bfloat16, which a copy moves at 4.07 TB/s. _HELD and _REGION_HELD are the most
# elements of a group, and of a region (with hardware conversion to fp8), that a program holds in registers. Larger groups and
# regions are read twice. Tiles of 128 x 128 reach 3.44 TB/s when held, and 2.95 TB/s when read twice.
_HELD, _REGION_HELD = 16384, 16384
_REGION_WARPS = 16
# Elements per chunk of a group or region that is read twice, and warps per program.
_CHUNK, _CHUNK_WARPS = 4096, 8
# Elements per thread if one group fills a program's tile. Scales per row reach 3.93 TB/s, and 3.38 TB/s with 16 elements.
_EACH = 32
# For one scale per tensor, every program reduces all partial maxima. So large tensors get larger tiles (2.39 rather than 2.21
# TB/s).
_WHOLE_LARGE, _WHOLE_SMALL = Config(8192, 8), Config(2048, 4)
# Programs per SM/CU in the launch for partial maxima, and the most partial maxima. Every program of the second launch reduces all
# partial maxima.
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
    # Returns the kernels' compile-time arguments that depend on the fp8 dtype and on the device.
    able = abilities(x.device)
    return {
        "FORMAT": FP8_NAMES[dtype],
        "LIMIT": FP8_MAX[dtype],
        "NATIVE": able.native,
        "INTERPRETED": able.interpreted,
        "STEPS": division_steps(x.dtype),
    }


def _groups(x: Tensor, q: Tensor, scale: Tensor, length: int) -> None:
    # Quantises groups of ``length`` consecutive elements of each row. Groups that do not fit in registers are quantised as regions
    # of one row.
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
    """Quantises x ``[batch, m, k]``, whose last stride is 1. Each region of ``rows`` by ``columns`` elements gets one scale."""
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
    # Quantises x with one scale, in two launches: partial maxima, then quantisation.
    x = x.contiguous()
    elements = x.numel()
    config = _WHOLE_LARGE if config_for(elements).tile > _WHOLE_SMALL.tile else _WHOLE_SMALL
    programs = cdiv(elements, config.tile)
    partials = min(programs, _PARTIAL_PROGRAMS * sm_count_of(x.device), _MOST_PARTIALS)
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
