"""RMSNorm of rows, after an optional residual add. One program normalises one tile of rows.

A row is read once, kept in registers between the sum of squares and the scaling, and written once. Only rows that do not fit in
registers are read twice.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, TRITON, as_rows, cdiv, has_rows, launch_options, may_overlap, next_power_of_2
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel.triton.repeated import Launch, Repeated
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")
_launches = Repeated(lambda: device_code.rmsnorm_kernel)


class Tile(NamedTuple):
    """The rows and columns that one program holds at once.

    Attributes:
        rows: rows per program.
        block: columns held at once, a power of two; a row with more columns takes two passes.
        warps: warps per program.
    """

    rows: int
    block: int
    warps: int


# H200, 16384 rows of 2880 elements, bf16, percent of a copy's bandwidth. 32 elements per thread (4 warps) reach 95%, 16 elements
# 89%, 8 elements 73%. With a residual, all three sizes reach 96%. 64 rows take 1.8 us with each size. Rows of 128 to 8192 elements
# reach 89 to 98% with 32 elements per thread.
_ELEMENTS_A_WARP = 1024
# For rows of 8192 or more elements, more elements per thread are better. Rows of 12288 elements reach 90% with 8 warps, 85% with
# 16, 60% with 32.
_WARPS = 8
# More than 64 elements per thread would spill registers.
_MOST_ELEMENTS_A_WARP = 2048
# Rows longer than LONGEST_ROW take two passes, in steps of _STEP columns.
LONGEST_ROW, _STEP = 32768, 8192


@functools.cache
def tile_for(hidden: int) -> Tile:
    """Returns the tile for rows of ``hidden`` elements."""
    if hidden > LONGEST_ROW:
        return Tile(1, _STEP, _WARPS)
    block = next_power_of_2(hidden)
    rows = max(1, _ELEMENTS_A_WARP // block)
    warps = min(rows * block // _ELEMENTS_A_WARP, _WARPS)
    return Tile(rows, block, max(warps, block // _MOST_ELEMENTS_A_WARP))


def launch_rows(
    launches: Repeated,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
    *more: Tensor,
    **flags: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Launches a kernel that normalises rows; shared with `layernorm`.

    Args:
        launches: the Triton kernel.
        x, weight, eps, residual, out, residual_out: the operator's arguments.
        more: vectors that the kernel takes after the tensors of `rmsnorm_kernel`; x itself for an absent one. The kernel takes the
            strides of these vectors after the other scalars.
        flags: constexpr arguments that `rmsnorm_kernel` does not take.
    """
    normed = out if out is not None and has_rows(out) else torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None
    if residual is not None:
        total = residual_out
        if total is None or not has_rows(total):
            total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    if x.numel():
        source, target = as_rows(x), as_rows(normed)
        added, sums = (source, target) if residual is None or total is None else (as_rows(residual), as_rows(total))
        tensors = (source, added, source if weight is None else weight, target, sums, *more)

        def describe() -> Launch:
            rows, hidden = source.shape
            tile, early = tile_for(hidden), may_overlap(x.device)
            return Launch(
                (cdiv(rows, tile.rows),),
                (
                    rows,
                    hidden,
                    eps,
                    source.stride(0),
                    added.stride(0),
                    0 if weight is None else weight.stride(0),
                    target.stride(0),
                    sums.stride(0),
                    *(0 if each is x else each.stride(0) for each in more),
                ),
                {
                    "HAS_RESIDUAL": residual is not None,
                    "ROWS": tile.rows,
                    "BLOCK": tile.block,
                    "ONE_PASS": tile.block >= hidden,
                    "INTERPRETED": abilities(x.device).interpreted,
                    "EARLY": early,
                    **flags,
                    "num_warps": tile.warps,
                    **launch_options(early),
                },
            )

        launches(tensors, (eps, residual is None, weight is None, *flags.values()), describe)
    if out is not None and out is not normed:
        out.copy_(normed)
        normed = out
    if total is None:
        return normed
    if residual_out is not None and residual_out is not total:
        residual_out.copy_(total)
        total = residual_out
    return normed, total


@register_kernel(
    "norm",
    "rmsnorm",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"residual": any, "wide_residual": any},
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def rmsnorm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor | None, residual_out: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.rmsnorm`, which documents the arguments."""
    return launch_rows(_launches, x, weight, eps, residual, out, residual_out)
