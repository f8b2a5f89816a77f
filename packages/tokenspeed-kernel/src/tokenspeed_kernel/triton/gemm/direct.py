"""GEMMs of operands that the tensor cores support directly: 16-bit floats, and on some devices 8-bit floats. Scales may belong to
tensors, rows and columns, or blocks.

Large GEMMs load tiles through tensor descriptors where the operands' layouts allow it. A persistent program computes several tiles.
So the epilogue of one tile overlaps the loads of the next tile. Line scales multiply the accumulator; block scales multiply a
block's partial sum before it is added to the accumulator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, for_architecture, sm_count_of, tensor_descriptor
from tokenspeed_kernel.triton.gemm._operands import BLOCK, FLOAT32, LINE, NO_SCALE, WHOLE, Operand
from tokenspeed_kernel.triton.gemm._split_k import choose_splits, split_target, sum_splits
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX
from tokenspeed_kernel_base.platform import ArchVersion, platform_of

device_code = DeviceModule(__name__ + "_device")


class Scaling(NamedTuple):
    """Granularity (a, b) and storage format (a_stored, b_stored) of the scales of a and b: constants of `_operands`.

    A scale of b covers ``block`` elements along k and ``b_lines`` columns.
    """

    a: str
    b: str
    a_stored: str
    b_stored: str
    block: int
    b_lines: int


class Program(NamedTuple):
    """The kernel's compile-time constants: fields of `Config`, and ``even_k``: whether ``Config.k`` divides the operands' k."""

    m: int
    n: int
    k: int
    even_k: bool
    group: int
    persistent: bool
    partial: bool
    descriptors: bool
    interpreted: bool


class Config(NamedTuple):
    """How a GEMM is tiled and pipelined.

    Attributes:
        m, n, k: rows of a, columns of b and elements along k of a program's tile.
        warps, stages: a program's warps and pipeline stages.
        persistent: persistent programs per SM/CU; 0 for one program per tile.
        partial: whether to add each step's MMA result to the accumulator in float32, because the tensor core's fp8 accumulator is
            narrower.
        descriptors: whether to load tiles through tensor descriptors if the operands' layouts allow it.
        group: number of rows of tiles within which the tile order goes column by column, see `tile_of`.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    persistent: int = 0
    partial: bool = False
    descriptors: bool = False
    group: int = 8


class Configs(NamedTuple):
    """The configurations of a device for operands of one element size.

    Attributes:
        few, few_blocks: for few rows of a: at most 64, or at most 128 with block scales.
        blocks: for block scales and more rows of a.
        lines: for more rows of a without block scales.
        columns: for b with a block scale per column and more rows of a, if better than ``blocks``.
        short: for scale blocks of 32 elements along k and more rows of a, if better than ``blocks``.
        best, best_k: for GEMMs that fill the device, with at most ``best_k`` elements along k, a 16-bit result and no block scales.
    """

    few: Config
    few_blocks: Config
    blocks: Config
    lines: Config
    columns: Config | None = None
    short: Config | None = None
    best: Config | None = None
    best_k: int = 0


# One H200, 8192 x 8192 x 8192, e4m3fn. If the tensor core accumulates all of k: 1484 TFLOP/s with 128 x 256 tiles (1258 without
# descriptors, 1446 without persistence), 1390 with two CTAs of 128 x 128 tiles per SM. The tensor core's accumulator
# loses 1.4% of a sum of 8192 positive terms, and 5.5% of a sum of 28672. Beyond k = 2048, each step's partial sum is therefore
# added in float32, as block scales require anyway. Block scales: 947 TFLOP/s (858 with three stages, 772 persistent, 886 with 64 x
# 128 tiles).
# Few rows (64 x 7168 x 4096): 12.9 us; 13.7 us with tiles of 128 columns, 13.2 us with k = 128; 14.4 us with block scales.
# 4096 x 7168 x 4096: 335 us with scales per column (128 x 64 tiles 587 us, 128 x 128 tiles 424 us); 469 us with scale blocks of 64
# elements; 1106 us with scale blocks of 32 elements (128 x 64 tiles 1406 us, 128 x 128 tiles 1161 us).
_FP8_LARGE_MEMORY = Configs(
    few=Config(64, 64, 256, 4, 4, partial=True),
    few_blocks=Config(64, 128, 128, 4, 4, descriptors=True),
    blocks=Config(128, 128, 128, 8, 4, descriptors=True),
    lines=Config(128, 128, 128, 8, 4, descriptors=True, partial=True),
    columns=Config(64, 128, 128, 4, 3, descriptors=True),
    short=Config(64, 64, 32, 4, 8, descriptors=True),
    best=Config(128, 256, 128, 8, 3, persistent=1, descriptors=True),
    best_k=2048,
)
# The same GEMM in bfloat16: 809 TFLOP/s, and 805 TFLOP/s with PyTorch. With four stages: 738 TFLOP/s; with 128 x 128 tiles: 697
# TFLOP/s.
_HALF_LARGE_MEMORY = Configs(
    few=Config(64, 64, 128, 4, 4),
    few_blocks=Config(64, 64, 128, 4, 4),
    blocks=Config(128, 128, 64, 8, 4, descriptors=True),
    lines=Config(128, 128, 64, 4, 4, persistent=2, descriptors=True),
    best=Config(128, 256, 64, 8, 3, persistent=1, descriptors=True),
    best_k=1 << 31,
)
# These configurations fit into 64 KiB of shared memory, the least of any supported device.
_FP8_SMALL_MEMORY = Configs(
    few=Config(64, 64, 128, 4, 3),
    few_blocks=Config(64, 64, 128, 4, 3),
    blocks=Config(128, 64, 128, 8, 2),
    lines=Config(128, 128, 128, 8, 2),
)
_HALF_SMALL_MEMORY = Configs(
    few=Config(64, 64, 64, 4, 3),
    few_blocks=Config(64, 64, 64, 4, 3),
    blocks=Config(128, 64, 64, 8, 2),
    lines=Config(128, 128, 64, 8, 2),
)
_FP8 = {"sm_90": _FP8_LARGE_MEMORY, "sm_100": _FP8_LARGE_MEMORY, "any": _FP8_SMALL_MEMORY}
_HALF = {"sm_90": _HALF_LARGE_MEMORY, "sm_100": _HALF_LARGE_MEMORY, "any": _HALF_SMALL_MEMORY}

# The columns of the widest tile if columns have different block scales. The scales and partial sums of 128 columns would leave a
# thread too few registers.
_COLUMNS_WITH_SCALES = 64
# Above this many rows of a, a separate launch first converts block scales to float32 in a coalesced layout, which saves more time
# than it costs.
_FEW_ROWS = 128
# The tile of scales that one program of the converting launch handles.
SCALE_LINES, SCALE_BLOCKS = 64, 16

# The first architectures whose tensor cores support e4m3fn and e5m2.
_FP8_SINCE = {"nvidia": ArchVersion(8, 9), "amd": ArchVersion(9, 5)}
_SCALINGS = {
    (BLOCK, BLOCK),
    *((a, b) for a in (WHOLE, LINE) for b in (WHOLE, LINE)),
    *((NO_SCALE, b) for b in (NO_SCALE, WHOLE, LINE, BLOCK)),
}


def is_eligible(x: Operand, w: Operand) -> bool:
    """Whether the tensor cores support these operands without dequantisation."""
    platform = platform_of(x.tensor.device)
    if x.tensor.dtype != w.tensor.dtype or (x.scaling, w.scaling) not in _SCALINGS or platform.is_cpu:
        return False
    if not (x.aligned and w.aligned):
        return False
    if x.format == "dense":
        return x.tensor.dtype in (torch.float16, torch.bfloat16)
    since = _FP8_SINCE.get(platform.vendor)
    native = since is not None and platform.arch_version >= since
    return native and x.format in ("e4m3fn", "e5m2") and x.strides[2] == w.strides[2] == 1


def config_for(x: Operand, w: Operand, out: Tensor) -> Config:
    # Returns the configuration for operands that `is_eligible` accepts, by dtype, scaling and number of rows of a. ``out``: the
    # output, whose dtype limits the tile.
    device = x.tensor.device
    configs = for_architecture(_FP8 if x.tensor.element_size() == 1 else _HALF, device)
    if w.scaling == BLOCK:
        if x.lines > _FEW_ROWS and w.block == BLOCK_MX and configs.short is not None:
            return configs.short
        if x.lines > _FEW_ROWS and w.lines_each == 1 and w.block > BLOCK_MX and configs.columns is not None:
            return configs.columns._replace(k=min(configs.columns.k, w.block))
        config = configs.blocks if x.lines > _FEW_ROWS else configs.few_blocks
        columns = config.n if w.lines_each % config.n == 0 else min(config.n, _COLUMNS_WITH_SCALES)
        return config._replace(n=columns, k=min(config.k, w.block))
    if x.lines <= 64:
        return configs.few
    best = configs.best
    # A float32 output tile would not fit into shared memory beside the pipeline stages of ``best``.
    if best is None or x.k > configs.best_k or out.element_size() > 2 or x.tensor.ndim == 3:
        return configs.lines
    tiles = cdiv(x.lines, best.m) * cdiv(w.lines, best.n)
    return best if tiles >= sm_count_of(device) else configs.lines


def _describable(x: Operand) -> bool:
    # Whether a tensor descriptor can describe the operand: two axes, unit stride along k, lines aligned to 16 bytes.
    data = x.tensor
    return data.ndim == 2 and x.strides[2] == 1 and x.strides[1] * data.element_size() % 16 == 0 and data.data_ptr() % 16 == 0


def _with_scales_of_lines_together(x: Operand, across: bool) -> Operand:
    """Returns the operand with its block scales converted to float32 and transposed, so that scales of neighbouring lines are
    adjacent.

    Only scales that belong to a single line are converted: every program that reads a tile would otherwise decode them again.
    Scales that are float32 already are transposed only if ``across`` is set.
    """
    if x.scaling != BLOCK or x.scale is None or x.lines_each > 1:
        return x
    if x.scale_format == FLOAT32 and (x.scale_strides[1] == 1 or not across):
        return x
    blocks = cdiv(x.k, x.block)
    made = x.scale.new_empty((x.batch, blocks, x.lines), dtype=torch.float32)
    tiles = cdiv(x.lines, SCALE_LINES) * cdiv(blocks, SCALE_BLOCKS)
    device_code.float_scales_kernel[(tiles * x.batch,)](
        x.scale, made, x.lines, blocks, *x.scale_strides, STORED=x.scale_format, num_warps=4
    )
    return x._replace(scale=made, scale_format=FLOAT32, scale_strides=(blocks * x.lines, 1, x.lines))


def multiply(x: Operand, w: Operand, bias: Tensor | None, out: Tensor, config: Config | None = None) -> None:
    """Computes ``out[...] = a @ b + bias`` for operands that `is_eligible` accepts. out must not be empty."""
    m, n, k = x.lines, w.lines, x.k
    a, b, device = x.tensor, w.tensor, x.tensor.device
    config = config or config_for(x, w, out)
    if w.scaling == BLOCK and m > _FEW_ROWS:
        x, w = _with_scales_of_lines_together(x, False), _with_scales_of_lines_together(w, True)
    tiles = cdiv(m, config.m) * cdiv(n, config.n) * x.batch
    splits, k_per_split = choose_splits(tiles, k, config.k, device)
    target, strides = split_target(out, splits)
    descriptors = config.descriptors and k > 0 and _describable(x) and _describable(w)
    programs = min(tiles, config.persistent * sm_count_of(device)) if config.persistent else tiles
    device_code.direct_mm_kernel[(programs, splits)](
        tensor_descriptor.TensorDescriptor(a, [m, k], [x.strides[1], 1], [config.m, config.k]) if descriptors else a,
        tensor_descriptor.TensorDescriptor(b, [n, k], [w.strides[1], 1], [config.n, config.k]) if descriptors else b,
        x.scale,
        w.scale,
        bias if splits == 1 else None,
        target,
        m,
        n,
        k,
        x.batch,
        *x.strides,
        *w.strides,
        *x.scale_strides,
        *w.scale_strides,
        *strides,
        out.numel(),
        k_per_split,
        SCALING=Scaling(x.scaling, w.scaling, x.scale_format, w.scale_format, w.block, w.lines_each),
        TILE=Program(
            m=config.m,
            n=config.n,
            k=config.k,
            even_k=k % config.k == 0,
            group=config.group,
            persistent=config.persistent > 0,
            partial=config.partial,
            descriptors=descriptors,
            interpreted=platform_of(device).is_cpu,
        ),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    sum_splits(target, bias, out, splits, platform_of(device).is_cpu)
