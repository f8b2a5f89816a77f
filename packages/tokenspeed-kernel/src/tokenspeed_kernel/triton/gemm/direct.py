"""Products of operands that the matrix units take as they are: half-precision floats, and 8-bit floats where they do. Float32
scales may belong to tensors, rows and columns, or blocks of 128.

Large products load tiles through tensor descriptors (where the operands' layouts allow it), and a program computes several tiles in
a row, so that one tile's result is stored while the next one's operands are loaded. Scales of whole lines multiply the finished
sums; those of blocks multiply the products of 128 elements along k before these are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenspeed_kernel.triton.common import for_architecture, multiprocessors
from tokenspeed_kernel.triton.gemm._operands import BLOCK, LINE, NO_SCALE, WHOLE, Operand
from tokenspeed_kernel.triton.gemm._split_k import choose_splits, split_target, sum_splits
from tokenspeed_kernel.triton.gemm._tiles import scale_of_lines, store_tile, tile_of
from tokenspeed_kernel_base.platform import ArchVersion, platform_of


@dataclass(frozen=True)
class Config:
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


@dataclass(frozen=True)
class Configs:
    """For few rows of a (at most 64, or 128 with scales of blocks), scales of blocks, scales of lines. ``best`` is for products
    that fill the device, of at most ``best_k`` elements along k, to half precision.
    """

    few: Config
    few_blocks: Config
    blocks: Config
    lines: Config
    best: Config | None = None
    best_k: int = 0


# One H200, 8192 x 8192 x 8192, e4m3fn. All sums in the matrix unit: 1484 TFLOP/s with 128 x 256 tiles (without descriptors 1258,
# without persistence 1446), 1390 with two 128 x 128 tiles a multiprocessor. But such sums lose 1.4% of 8192 positive products and
# 5.5% of 28672: beyond 2048 float32 adds them up, as scales of blocks want anyway (947 TFLOP/s with such scales; three stages
# 858, persistent 772, 64 x 128 tiles 886). Few rows (64 x 7168 x 4096): 12.9 us; tiles 128 wide 13.7, 128 deep 13.2; blocks 14.4.
_FP8_LARGE_MEMORY = Configs(
    few=Config(64, 64, 256, 4, 4, partial=True),
    few_blocks=Config(64, 128, 128, 4, 4, descriptors=True),
    blocks=Config(128, 128, 128, 8, 4, descriptors=True),
    lines=Config(128, 128, 128, 8, 4, descriptors=True, partial=True),
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

# From where on matrix units take e4m3fn and e5m2.
_FP8_SINCE = {"nvidia": ArchVersion(8, 9), "amd": ArchVersion(9, 5)}
_SCALINGS = {
    (BLOCK, BLOCK),
    *((a, b) for a in (WHOLE, LINE) for b in (WHOLE, LINE)),
    *((NO_SCALE, b) for b in (NO_SCALE, WHOLE, LINE, BLOCK)),
}


@triton.jit
def _lines(
    source,
    line0,
    lines,
    k0,
    K,
    stride,
    stride_k,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESC: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """``[LINES, BLOCK_K]`` from line ``line0`` and element k0 on. Beyond the last line anything, beyond K zeros."""
    if DESC:
        tile = source.load([line0, k0])
    else:
        line = (line0 + tl.arange(0, LINES)) % lines
        at = k0 + tl.arange(0, BLOCK_K)
        pointers = source + line.to(tl.int64)[:, None] * stride + at[None, :] * stride_k
        if EVEN_K:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(at < K)[None, :], other=0.0)
    return tile


@triton.jit
def _direct_mm(
    a,
    b,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    batches,
    stride_a_batch,
    stride_am,
    stride_ak,
    stride_b_batch,
    stride_bn,
    stride_bk,
    stride_as_batch,
    stride_asm,
    stride_ask,
    stride_bs_batch,
    stride_bsn,
    stride_bsk,
    stride_out_batch,
    stride_out_m,
    stride_out_n,
    stride_split: tl.int64,
    k_per_split,
    A_SCALING: tl.constexpr,
    B_SCALING: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PERSISTENT: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    split = tl.program_id(1)
    first = split * k_per_split
    last = tl.minimum(first + k_per_split, K)
    if PERSISTENT:
        step = tl.num_programs(0)
    else:
        step = tiles * batches
    for index in tl.range(tl.program_id(0), tiles * batches, step, flatten=PERSISTENT):
        batch = (index // tiles).to(tl.int64)
        tile_m, tile_n = tile_of(index % tiles, tiles_m, tiles_n, GROUP)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        m = (m0 + tl.arange(0, BLOCK_M))[:, None]
        n = (n0 + tl.arange(0, BLOCK_N))[None, :]
        if DESCRIPTORS:
            a_from, b_from = a, b
        else:
            a_from, b_from = a + batch * stride_a_batch, b + batch * stride_b_batch
        if A_SCALING != "none":
            a_scale = a_scale_ptr + batch * stride_as_batch
        if B_SCALING != "none":
            b_scale = b_scale_ptr + batch * stride_bs_batch
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(first, last, BLOCK_K):
            x = _lines(a_from, m0, M, k0, K, stride_am, stride_ak, BLOCK_M, BLOCK_K, DESCRIPTORS, EVEN_K)
            w = _lines(b_from, n0, N, k0, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, DESCRIPTORS, EVEN_K)
            if B_SCALING == "block":
                tl.static_assert(128 % BLOCK_K == 0 and 128 % BLOCK_N == 0)
                block = k0 // 128
                scale = tl.load(b_scale + (n0 // 128) * stride_bsn + block * stride_bsk)
                if A_SCALING == "block":
                    scale *= tl.load(a_scale + m.to(tl.int64) * stride_asm + block * stride_ask, mask=m < M, other=0.0)
                acc += tl.dot(x, tl.trans(w)) * scale
            elif PARTIAL:
                acc += tl.dot(x, tl.trans(w))
            else:
                acc = tl.dot(x, tl.trans(w), acc)
        if A_SCALING == "line" or A_SCALING == "whole":
            acc *= scale_of_lines(a_scale, m, m < M, stride_asm, A_SCALING)
        if B_SCALING == "line" or B_SCALING == "whole":
            acc *= scale_of_lines(b_scale, n, n < N, stride_bsn, B_SCALING)
        target = out_ptr + batch * stride_out_batch + split * stride_split
        store_tile(acc, target, bias_ptr, m, n, M, N, stride_out_m, stride_out_n, INTERPRETED)


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
        return configs.blocks if x.lines > 128 else configs.few_blocks
    if x.lines <= 64:
        return configs.few
    best = configs.best
    # A float32 tile on its way out would not fit beside this many loads under way.
    if best is None or x.k > configs.best_k or out.element_size() > 2 or x.tensor.ndim == 3:
        return configs.lines
    tiles = triton.cdiv(x.lines, best.m) * triton.cdiv(w.lines, best.n)
    return best if tiles >= multiprocessors(device) else configs.lines


def _describable(x: Operand) -> bool:
    data = x.tensor
    return data.ndim == 2 and x.strides[2] == 1 and x.strides[1] * data.element_size() % 16 == 0 and data.data_ptr() % 16 == 0


def multiply(x: Operand, w: Operand, bias: Tensor | None, out: Tensor, config: Config | None = None) -> None:
    """``out[...] = a @ b + bias`` of operands that `serves` accepts; out has elements."""
    m, n, k = x.lines, w.lines, x.k
    a, b, device = x.tensor, w.tensor, x.tensor.device
    config = config or config_for(x, w, out)
    tiles = triton.cdiv(m, config.m) * triton.cdiv(n, config.n) * x.batch
    splits, k_per_split = choose_splits(tiles, k, config.k, device)
    target, strides = split_target(out, splits)
    descriptors = config.descriptors and k > 0 and _describable(x) and _describable(w)
    programs = min(tiles, config.persistent * multiprocessors(device)) if config.persistent else tiles
    _direct_mm[(programs, splits)](
        TensorDescriptor(a, [m, k], [x.strides[1], 1], [config.m, config.k]) if descriptors else a,
        TensorDescriptor(b, [n, k], [w.strides[1], 1], [config.n, config.k]) if descriptors else b,
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
        A_SCALING=x.scaling,
        B_SCALING=w.scaling,
        PARTIAL=config.partial,
        BLOCK_M=config.m,
        BLOCK_N=config.n,
        BLOCK_K=config.k,
        GROUP=config.group,
        DESCRIPTORS=descriptors,
        PERSISTENT=config.persistent > 0,
        EVEN_K=k % config.k == 0,
        INTERPRETED=platform_of(device).is_cpu,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    sum_splits(target, bias, out, splits, platform_of(device).is_cpu)
