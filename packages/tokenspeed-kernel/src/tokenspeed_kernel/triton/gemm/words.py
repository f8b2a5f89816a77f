"""GEMMs with few rows of a and e2m1 weights b, which are dequantised in registers from 16-bit words of four values.

The sum over k may use any order. A tile of words is dequantised to four tiles of weights: the elements 4j, 4j + 1, 4j + 2 and
4j + 3. Few rows of a are loaded as int64, four elements at a time, and split in registers. More rows of a are first permuted in
memory ("arranged"). The elements for one tile of weights are then adjacent. Thus no weight moves between threads: words and scales
are loaded from shared memory directly in the layout of the MMA operand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import cdiv, common_device, for_architecture, launch_options, may_overlap
from tokenspeed_kernel.triton.gemm._operands import E8M0, MICRO, NO_SCALE, Operand, described
from tokenspeed_kernel.triton.gemm._split_k import choose_splits, split_target, sum_splits
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel.triton.repeated import Launch, Repeated
from tokenspeed_kernel_base.discovery import DeviceModule

device_code = DeviceModule(__name__ + "_device")
_launches = Repeated(lambda: device_code.words_mm_kernel)


class Program(NamedTuple):
    """Compile-time constants of `words_mm_kernel`.

    Attributes:
        m, n, k, arranged: sizes of the tile, and whether a is permuted in memory first, see `Tile`.
        even_k: whether ``Tile.k`` divides the operands' k.
        compute: Triton's dtype of the MMA operands.
        ptx: whether words are dequantised by inline PTX.
        asynchronous: whether a `tl.dot` may compile to WGMMA.
        early: whether the kernel is launched with PDL, see `may_overlap`.
        native, interpreted: whether the device converts 8-bit floats in hardware, and whether Triton's interpreter runs the
            kernel, see `Abilities`.
    """

    m: int
    n: int
    k: int
    even_k: bool
    compute: Any
    ptx: bool
    asynchronous: bool
    arranged: bool
    early: bool
    native: bool
    interpreted: bool


class Tile(NamedTuple):
    """How a GEMM is tiled and pipelined.

    Attributes:
        m, n, k: rows of a, columns of b and elements along k of a program's tile.
        warps, stages: a program's warps and pipeline stages.
        programs: how many programs per SM/CU split-K aims for.
        arranged: whether a is permuted in memory first.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    programs: int
    arranged: bool = False


# One H200, nvfp4, 8192 x 8192 weights, cold L2, microseconds. 1 row: 18 (26 with k = 128, `decoded` 36). 16 rows: 23 (28 with four
# programs per SM). 32 rows: 32 (arranged 36). 64 rows: 38 (not arranged 44, `decoded` 48). 128 rows: 52 (`decoded` 102). 512 rows:
# 130 (156 with k = 64, `once` 162). 4096 rows would take 1228 (`once` 740).
_TILES = {
    "sm_90": (
        Tile(8, 64, 256, 2, 3, 4),
        Tile(16, 64, 128, 2, 6, 2),
        Tile(32, 64, 128, 2, 5, 4),
        Tile(64, 64, 128, 4, 4, 2, arranged=True),
        Tile(128, 64, 128, 4, 3, 2, arranged=True),
        Tile(256, 128, 128, 8, 3, 1, arranged=True),
    ),
    # Not measured.
    "any": (Tile(16, 64, 128, 4, 2, 4), Tile(32, 64, 128, 4, 2, 4)),
}
# The kernels of this module are eligible if ``a`` has at most this many rows, which may need several tiles of the largest size.
_ROWS = {"sm_90": 512, "any": 32}


def is_eligible(x: Operand, w: Operand) -> bool:
    """Whether these kernels handle the operands: b is e2m1, a has few rows, and all lines are aligned for loads of words."""
    if x.tensor.ndim != 2 or w.format != "e2m1" or w.scaling != MICRO or x.scaling != NO_SCALE:
        return False
    if x.lines > for_architecture(_ROWS, x.tensor.device):
        return False
    # mx weights exceed float16's range.
    if x.tensor.dtype == torch.float16 and w.scale_format == E8M0:
        return False
    return _in_words(x.tensor, x.strides, 4) and _in_words(w.tensor, w.strides, 2)


def _in_words(x: Tensor, strides: tuple[int, int, int], each: int) -> bool:
    return strides[2] == 1 and strides[1] % each == 0 and x.data_ptr() % (each * x.element_size()) == 0


def _arranged(a: Tensor, step: int) -> Tensor:
    """Permutes each run of ``step`` elements of a row: first the elements 4j, then 4j + 1, 4j + 2 and 4j + 3. This is the order in
    which words are dequantised to four tiles of weights.

    Rows are padded with zeros to a multiple of ``step``.
    """
    steps = cdiv(a.shape[1], step)
    padded = torch.nn.functional.pad(a, (0, steps * step - a.shape[1])) if a.shape[1] % step else a
    return padded.reshape(-1, step // 4, 4).transpose(-1, -2).reshape(a.shape[0], steps * step)


def multiply(
    x: Operand, w: Operand, bias: Tensor | None, out: Tensor, alpha: Tensor | None = None, tile: Tile | None = None
) -> None:
    """Computes ``out[...] = alpha * (a @ b) + bias`` for operands that `is_eligible` accepts. out must not be empty."""
    m, n, k = x.lines, w.lines, x.k
    device, dtype = x.tensor.device, x.tensor.dtype
    able = abilities(device)
    tiles = for_architecture(_TILES, device)
    tile = tile or next(tile for tile in tiles if m <= tile.m or tile is tiles[-1])
    blocks = cdiv(m, tile.m) * cdiv(n, tile.n)
    splits, k_per_split = choose_splits(blocks, k, tile.k, device, tile.programs)
    target, strides = split_target(out, splits)
    compute = torch.float32 if able.interpreted else dtype
    early = may_overlap(device)
    a = _arranged(x.tensor, tile.k) if tile.arranged else x.tensor
    scale = w.scale.view(torch.uint8) if w.scale is not None else None

    def describe() -> Launch:
        program = Program(
            m=tile.m,
            n=tile.n,
            k=tile.k,
            even_k=k % tile.k == 0,
            compute=common_device.DTYPES[compute],
            ptx=able.bfloat16_pairs,
            asynchronous=tile.warps % 4 == 0,
            arranged=tile.arranged,
            early=early,
            native=able.native,
            interpreted=able.interpreted,
        )
        return Launch(
            (blocks, splits),
            (m, n, k, a.stride(0), w.strides[1], *w.scale_strides[1:], *strides[1:], out.numel(), k_per_split // tile.k),
            {
                "BLOCK": w.block,
                "SWIZZLED": w.swizzled,
                "TILE": program,
                "num_warps": tile.warps,
                "num_stages": tile.stages,
                **launch_options(early),
            },
        )

    tensors = (a, w.tensor, scale, alpha, bias if splits == 1 else None, target)
    _launches(tensors, (*described(w), tile, splits, k_per_split, k), describe)
    sum_splits(target, bias, out, splits, able.interpreted)
