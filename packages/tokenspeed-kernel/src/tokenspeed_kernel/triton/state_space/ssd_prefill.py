"""The state-space recurrence of whole sequences, by chunks of tokens.

A program takes a head of a segment of a sequence and goes through its chunks, the state in registers, so that inputs are read and
results written once and nothing else. Where that makes too few programs (few heads, few sequences), sequences have several
segments: a first launch computes what each segment but the last adds to the state, from x, dt and B alone, and a program of the
second launch begins by adding up what the segments before it have left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, dense, for_architecture, multiprocessors, next_power_of_2
from tokenspeed_kernel.triton.state_space._recurrence import FORMATS, TRAITS, shape_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Tile(NamedTuple):
    """What a program computes: tokens of a chunk, rows and columns of a state as powers of two."""

    chunk: int
    rows: int
    columns: int


class Limits(NamedTuple):
    """What fits into registers: tokens of a chunk, and numbers of a state."""

    chunk: int
    elements: int


# Hopper's matrix unit takes no fewer rows than 64, and work within a chunk grows with its length. A state of 8192 numbers, 64 a
# thread, leaves room for the scores of 64 tokens against 64, and for their results, 32 each. With 8 warps a product of 64 rows
# would be computed twice. Where operands are held in registers, too, what fits is less.
_LIMITS = {"sm_90": Limits(64, 8192), "sm_100": Limits(64, 4096), "amd": Limits(64, 8192), "any": Limits(32, 4096)}
_ROWS, _WARPS = 64, 4
# Stages of the loop over chunks. Of a pipelined loop the compiler for AMD puts the last products behind a mask of lanes,
# which does not keep matrix units from writing where no lane is left.
_STAGES = {"amd": 1, "any": 2}
# Products of float32 are computed without matrix units, from registers.
_FLOAT32_CHUNK = 16
# Sequences have one segment where that makes three programs for every two multiprocessors, and otherwise as many as make four for
# each, but no more than 16: a segment adds a state that those behind it read. It has at least four chunks, for the first launch
# does a quarter of the second's work. On an H200 8192 tokens of nemotron-h, 128 programs a segment, take 728 us with one segment,
# 557 with two, 511 with four, 561 with eight.
_ENOUGH, _PROGRAMS, _SEGMENTS, _SEGMENT_CHUNKS = 1.5, 4, 16, 4
# Sequences that are looked at together to find the one that a program belongs to.
_AT_ONCE = 256


def tile_for(dtype: torch.dtype, head_dim: int, state_dim: int, limits: Limits) -> Tile:
    """The tile for states of this size, within limits. A product's operands have at least 16 rows and columns."""
    columns = max(16, next_power_of_2(state_dim))
    rows = max(16, min(next_power_of_2(head_dim), _ROWS, limits.elements // columns))
    return Tile(_FLOAT32_CHUNK if dtype == torch.float32 else limits.chunk, rows, columns)


def segment_for(tokens: int, batch: int, programs: int, chunk: int, sm_count: int) -> int:
    """Tokens of a segment, a multiple of a chunk, where a segment has that many programs. At least ``tokens`` says that every
    sequence has one."""
    whole = cdiv(tokens, chunk) * chunk
    if programs * batch >= _ENOUGH * sm_count:
        return whole
    segments = min(_SEGMENTS, max(1, _PROGRAMS * sm_count // programs))
    return min(whole, max(_SEGMENT_CHUNKS, cdiv(tokens, segments * chunk)) * chunk)


@register_kernel(
    "state_space",
    "ssd_prefill",
    solution="triton",
    capability=TRITON,
    signatures=FORMATS,
    traits={**TRAITS, "has_initial_state": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    state_slots: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    has_initial_state: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """See `tokenspeed_kernel.ssd_prefill`."""
    (tokens, heads, head_dim), batch = x.shape, len(state_slots)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not batch or not heads * head_dim:
        return out
    shape = shape_of(x, B, dt_softplus)
    tile = tile_for(x.dtype, head_dim, shape.state_dim, for_architecture(_LIMITS, x.device))
    blocks = heads * cdiv(head_dim, tile.rows)
    segment = segment_for(tokens, batch, blocks, tile.chunk, multiprocessors(x.device))
    # Each sequence has as many segments as its tokens need, or one more. Where it begins, they are numbered from
    # cu_seqlens // segment + its own number on, so no length is needed here.
    segments = tokens // segment + batch if segment else batch
    left = decays = None
    if segment < tokens:
        left = x.new_empty(segments, heads, head_dim, shape.state_dim, dtype=torch.float32)
        decays = x.new_empty(segments, heads, dtype=torch.float32)
    product = for_architecture({"cpu": torch.float32, "any": x.dtype}, x.device)  # interpreted products of bfloat16 are wrong
    common = (
        x,
        dt,
        dense(A),
        B,
        dense(dt_bias),
        dense(cu_seqlens),
        states,
        state_slots,
        has_initial_state,
        left,
        decays,
        batch,
        max(segment, tile.chunk),
        float(dt_min),
        float(dt_max),
        *x.stride(),
        *dt.stride(),
        *B.stride(),
        *states.stride(),
        state_slots.stride(0),
        0 if has_initial_state is None else has_initial_state.stride(0),
    )
    options = {
        "SHAPE": shape,
        "TILE": tile,
        "AT_ONCE": _AT_ONCE,
        "DTYPE": device_code.DTYPES[product],
        "num_warps": _WARPS,
        "num_stages": for_architecture(_STAGES, x.device),
    }
    if left is not None:
        device_code.ssd_segments_kernel[(blocks * segments,)](*common, **options)
    device_code.ssd_prefill_kernel[(blocks * segments,)](
        *common,
        C,
        dense(D),
        z,
        out,
        *C.stride(),
        *((0, 0, 0) if z is None else z.stride()),
        *out.stride(),
        **options,
    )
    return out
