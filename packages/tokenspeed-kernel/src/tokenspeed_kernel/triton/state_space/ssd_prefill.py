"""The chunked state-space recurrence (SSD) for prefill.

A program processes one head of a segment of a sequence, chunk after chunk, with the state in registers. So inputs are read once,
results are written once, and no other memory is accessed. With few heads and few sequences, one program per head and sequence would
be too few. Then sequences are split into several segments. A first launch computes what each segment except the last contributes to
the state, from x, dt and B alone. A program of the second launch first adds up the contributions of the preceding segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, dense, for_architecture, next_power_of_2, sm_count_of
from tokenspeed_kernel.triton.state_space._recurrence import FORMATS, TRAITS, shape_of
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device_code = DeviceModule(__name__ + "_device")


class Tile(NamedTuple):
    """A program's tile: tokens per chunk, and rows and columns of the state, padded to powers of two."""

    chunk: int
    rows: int
    columns: int


class Limits(NamedTuple):
    """The number of tokens per chunk and of elements of a state that fit in registers."""

    chunk: int
    elements: int


# A Hopper warpgroup MMA has at least 64 rows, and the work within a chunk grows with the chunk. A state of 8192 elements takes 64
# registers per thread. This leaves room for 64 x 64 scores and for the results, at 32 registers each. With 8 warps an MMA of 64
# rows would be computed twice. The limits are lower on GPUs whose MMA reads its operands from registers.
_LIMITS = {"sm_90": Limits(64, 8192), "sm_100": Limits(64, 4096), "amd": Limits(64, 8192), "any": Limits(32, 4096)}
_ROWS, _WARPS = 64, 4
# Pipeline stages of the loop over chunks. In a pipelined loop, the AMD compiler predicates the last MMAs with a lane mask. An MFMA
# ignores the mask and writes its result even if no lane is active. So the loop is not pipelined on AMD.
_STAGES = {"amd": 1, "any": 2}
# Tokens per chunk for float32: dot products then run on FMA units, with operands in registers.
_FLOAT32_CHUNK = 16
# Sequences have one segment if this makes at least 1.5 programs per SM/CU. Otherwise they have enough segments for 4 programs per
# SM/CU, but at most 16, because every segment adds a state that later segments read. A segment has at least 4 chunks, because the
# launch that computes the segments' contributions to the state does a quarter of the main launch's work. On an H200, 8192 tokens
# of nemotron-h with 128 programs per segment take 728 us with one segment, 557 us with two, 511 us with four, and 561 us with
# eight.
_ENOUGH, _PROGRAMS, _SEGMENTS, _SEGMENT_CHUNKS = 1.5, 4, 16, 4
# Sequences that a program compares at a time when it searches for its sequence.
_AT_ONCE = 256


def tile_for(dtype: torch.dtype, head_dim: int, state_dim: int, limits: Limits) -> Tile:
    """Returns the tile for states ``[head_dim, state_dim]``, within ``limits``. An MMA's operands have at least 16 rows and
    columns.
    """
    columns = max(16, next_power_of_2(state_dim))
    rows = max(16, min(next_power_of_2(head_dim), _ROWS, limits.elements // columns))
    return Tile(_FLOAT32_CHUNK if dtype == torch.float32 else limits.chunk, rows, columns)


def segment_for(tokens: int, batch: int, programs: int, chunk: int, sm_count: int) -> int:
    """Returns the tokens per segment, a multiple of a chunk. ``programs``: programs per segment.

    If the result is at least ``tokens``, every sequence has one segment.
    """
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
    """Implements the operator `tokenspeed_kernel.ssd_prefill`, which documents the arguments."""
    (tokens, heads, head_dim), batch = x.shape, len(state_slots)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not batch or not heads * head_dim:
        return out
    shape = shape_of(x, B, dt_softplus)
    tile = tile_for(x.dtype, head_dim, shape.state_dim, for_architecture(_LIMITS, x.device))
    blocks = heads * cdiv(head_dim, tile.rows)
    segment = segment_for(tokens, batch, blocks, tile.chunk, sm_count_of(x.device))
    # The segments of sequence b are numbered from cu_seqlens[b] // segment + b on. So each sequence has as many segments as its
    # tokens need, or one more. The host needs no lengths.
    segments = tokens // segment + batch if segment else batch
    left = decays = None
    if segment < tokens:
        left = x.new_empty(segments, heads, head_dim, shape.state_dim, dtype=torch.float32)
        decays = x.new_empty(segments, heads, dtype=torch.float32)
    operand_dtype = for_architecture({"cpu": torch.float32, "any": x.dtype}, x.device)  # the interpreter's bf16 dot is wrong
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
        "DTYPE": device_code.DTYPES[operand_dtype],
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
