"""Gated RMSNorm. Each program handles a tile of rows, and reads each row once."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    FLOATS,
    TRITON,
    cdiv,
    dense,
    launch_options,
    may_overlap,
    next_power_of_2,
    sm_count_of,
)
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")

# A program holds the gate's row and x's row in registers, so the longest row and the most elements per warp are half of
# `rmsnorm`'s.
_LONGEST_ROW, _MOST_ELEMENTS_A_WARP = 16384, 1024
# 8 elements per thread: one 16-byte load of x and one of the gate. With more elements, ptxas moves the loads of gates behind the
# sums of squares to save registers. A program then waits for the two loads one after the other. On an H100, 2048 rows of 128 take
# 2.0 us, and 3.7 us with 32 elements.
_ELEMENTS_A_WARP, _ELEMENTS, _MOST_WARPS = 256, 1024, 8
# With at least _MANY elements per SM/CU, a program's tile has _TOGETHER times as many rows. 262144 rows of 128 took 67.9 us with
# these larger tiles, and 70.1 us without.
_MANY, _TOGETHER = 65536, 4


class Tile(NamedTuple):
    """A program's tile: rows, columns (a power of two), and warps."""

    rows: int
    block: int
    warps: int


@functools.cache
def tile_for(hidden: int, many: bool) -> Tile:
    """Returns the tile for few or ``many`` rows of ``hidden`` elements. Both tiles have the same number of elements per thread."""
    block = next_power_of_2(hidden)
    together = max(1, _ELEMENTS // block)
    warps = min(together * block // _ELEMENTS_A_WARP, _MOST_WARPS)
    if together > 1 and many:
        together, warps = together * _TOGETHER, warps * _TOGETHER
    return Tile(together, block, max(warps, block // _MOST_ELEMENTS_A_WARP))


def _as_heads(x: Tensor) -> Tensor:
    """Reshapes ``[..., hidden]`` to ``[tokens, heads, hidden]``, so that a slice of heads needs no copy."""
    heads = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _like_tokens(x: Tensor) -> bool:
    """Whether the token and head axes of x ``[tokens, heads, hidden]`` can be merged into one axis with a single stride."""
    return x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


@register_kernel(
    "norm",
    "rmsnorm_gated",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures("x", "dense", FLOATS),
    traits={"hidden": at_most(_LONGEST_ROW), "activation": {"silu", "sigmoid"}, "gate_first": any},
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def rmsnorm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, norm_before_gate: bool, out: Tensor | None
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.rmsnorm_gated`, which documents the arguments."""
    result = out if out is not None and out.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        source, gates = _as_heads(x), _as_heads(gate)
        tokens, heads, hidden = source.shape
        if heads > 1 and _like_tokens(source) and _like_tokens(gates):
            source, gates = (a.as_strided((tokens * heads, 1, hidden), (a.stride(1), 0, 1)) for a in (source, gates))
            tokens, heads = tokens * heads, 1
        tile = tile_for(hidden, tokens * heads * hidden >= _MANY * sm_count_of(x.device))
        if 1 < heads < tile.rows:
            tile = tile_for(hidden, False)
        rows = tile.rows if heads == 1 else min(tile.rows, next_power_of_2(heads))
        early = may_overlap(x.device)
        grid = (cdiv(tokens, rows),) if heads == 1 else (tokens, cdiv(heads, rows))
        device_code.rmsnorm_gated_kernel[grid](
            source,
            gates,
            dense(weight),
            result,
            tokens,
            heads,
            hidden,
            eps,
            *source.stride()[:2],
            *gates.stride()[:2],
            SILU=activation == "silu",
            GATE_FIRST=not norm_before_gate,
            HEADS=heads > 1,
            ROWS=rows,
            BLOCK=tile.block,
            EARLY=early,
            num_warps=tile.warps,
            **launch_options(early),
        )
    if out is not None and out is not result:
        return out.copy_(result)
    return result
