"""Products of operands that the matrix units take as they are: half-precision floats, and 8-bit floats where they do. Float32
scales may belong to tensors, rows and columns, or blocks.

Large products load tiles through tensor descriptors (where the operands' layouts allow it), and a program computes several tiles in
a row, so that one tile's result is stored while the next one's operands are loaded. Scales of whole lines multiply the finished
sums; those of blocks multiply the products of a block's elements along k before these are added up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, for_architecture, multiprocessors, tensor_descriptor
from tokenspeed_kernel.triton.gemm._operands import BLOCK, FLOAT32, LINE, NO_SCALE, WHOLE, Operand
from tokenspeed_kernel.triton.gemm._split_k import choose_splits, split_target, sum_splits
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_MX
from tokenspeed_kernel_base.platform import ArchVersion, platform_of

device_code = DeviceModule(__name__ + "_device")


class Scaling(NamedTuple):
    """What the scales of a and of b belong to, how they are stored, and how many elements along k and how many columns share one of
    b's: see `_operands.Operand`."""

    a: str
    b: str
    a_stored: str
    b_stored: str
    block: int
    b_lines: int


class Program(NamedTuple):
    """A `Config` as the kernel has it; ``even_k``: whether its ``k`` divides all of k."""

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
    """How a product is computed.

    Attributes:
        m, n, k: rows of a, columns of b and elements along k of a program's tile.
        warps, stages: of a program; how many loads of operands are under way.
        persistent: programs a multiprocessor, each with many tiles; 0 for a program a tile.
        partial: add sums of ``k`` products in float32, where the matrix unit's own sums of 8-bit products are shorter.
        descriptors: load tiles through tensor descriptors if the operands lie so.
        group: rows of tiles that are done together, see `tile_of`.
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
    """For few rows of a (at most 64, or 128 with scales of blocks), scales of blocks, scales of lines. ``best`` is for products
    that fill the device, of at most ``best_k`` elements along k, to half precision. For more rows and scales of blocks:
    ``columns`` where each column has its own, ``short`` for blocks of 32, where there is a better choice than ``blocks``.
    """

    few: Config
    few_blocks: Config
    blocks: Config
    lines: Config
    columns: Config | None = None
    short: Config | None = None
    best: Config | None = None
    best_k: int = 0


# One H200, 8192 x 8192 x 8192, e4m3fn. All sums in the matrix unit: 1484 TFLOP/s with 128 x 256 tiles (without descriptors 1258,
# without persistence 1446), 1390 with two 128 x 128 tiles a multiprocessor. But such sums lose 1.4% of 8192 positive products and
# 5.5% of 28672: beyond 2048 float32 adds them up, as scales of blocks want anyway (947 TFLOP/s with such scales; three stages
# 858, persistent 772, 64 x 128 tiles 886). Few rows (64 x 7168 x 4096): 12.9 us; tiles 128 wide 13.7, 128 deep 13.2; blocks 14.4.
# 4096 x 7168 x 4096: scales of each column 335 us (128 x 64 tiles 587, 128 x 128 424); blocks of 64 469 us, of 32 1106 (128 x 64
# tiles 1406, 128 x 128 1161).
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
# The same in bfloat16: 809 TFLOP/s, PyTorch's 805; four stages 738, 128 x 128 tiles 697.
_HALF_LARGE_MEMORY = Configs(
    few=Config(64, 64, 128, 4, 4),
    few_blocks=Config(64, 64, 128, 4, 4),
    blocks=Config(128, 128, 64, 8, 4, descriptors=True),
    lines=Config(128, 128, 64, 4, 4, persistent=2, descriptors=True),
    best=Config(128, 256, 64, 8, 3, persistent=1, descriptors=True),
    best_k=1 << 31,
)
# Within 64 KiB of shared memory, the least that there is.
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

# Columns of a tile each of which has scales of its own: those of 128 and their sums leave a thread too few registers.
_COLUMNS_WITH_SCALES = 64
# More rows than this are worth a launch that decodes scales, and puts them where they are loaded together.
_FEW_ROWS = 128
# Of a tile of scales that a program decodes.
SCALE_LINES, SCALE_BLOCKS = 64, 16

# From where on matrix units take e4m3fn and e5m2.
_FP8_SINCE = {"nvidia": ArchVersion(8, 9), "amd": ArchVersion(9, 5)}
_SCALINGS = {
    (BLOCK, BLOCK),
    *((a, b) for a in (WHOLE, LINE) for b in (WHOLE, LINE)),
    *((NO_SCALE, b) for b in (NO_SCALE, WHOLE, LINE, BLOCK)),
}


def serves(x: Operand, w: Operand) -> bool:
    """Whether the matrix units take these operands as they are."""
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
    # A float32 tile on its way out would not fit beside this many loads under way.
    if best is None or x.k > configs.best_k or out.element_size() > 2 or x.tensor.ndim == 3:
        return configs.lines
    tiles = cdiv(x.lines, best.m) * cdiv(w.lines, best.n)
    return best if tiles >= multiprocessors(device) else configs.lines


def _describable(x: Operand) -> bool:
    data = x.tensor
    return data.ndim == 2 and x.strides[2] == 1 and x.strides[1] * data.element_size() % 16 == 0 and data.data_ptr() % 16 == 0


def _with_scales_of_lines_together(x: Operand, across: bool) -> Operand:
    """The operand with scales of blocks in float32, those of neighbouring lines beside each other in memory, where each line has
    its own: every program that shares a tile decodes them again. Float32 scales only with ``across``: a program has many lines."""
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
    """``out[...] = a @ b + bias`` of operands that `serves` accepts; out has elements."""
    m, n, k = x.lines, w.lines, x.k
    a, b, device = x.tensor, w.tensor, x.tensor.device
    config = config or config_for(x, w, out)
    if w.scaling == BLOCK and m > _FEW_ROWS:
        x, w = _with_scales_of_lines_together(x, False), _with_scales_of_lines_together(w, True)
    tiles = cdiv(m, config.m) * cdiv(n, config.n) * x.batch
    splits, k_per_split = choose_splits(tiles, k, config.k, device)
    target, strides = split_target(out, splits)
    descriptors = config.descriptors and k > 0 and _describable(x) and _describable(w)
    programs = min(tiles, config.persistent * multiprocessors(device)) if config.persistent else tiles
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
