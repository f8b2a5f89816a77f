"""The gated delta rule for decode. A program holds a range of columns of one value head's state, and updates them token by token.

The kernel is bound by the memory traffic of states. A state is read once and written once, or written once per token if every
token's state is kept.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, dense, launch_options, may_overlap, next_power_of_2, sm_count_of
from tokenspeed_kernel.triton.linear_attention._operands import SIGNATURES, gates_of, rows
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.linear_attention._delta_rule import L2NORM_EPS, scale_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


class Shape(NamedTuple):
    """Sizes and options of a call.

    Attributes:
        k_dim, v_dim: rows and columns of a state.
        v_heads: number of value heads.
        group: value heads per query/key head.
        gates: what the argument g holds: 0 for log decays, 1 for raw gates, 2 for raw gates with a bias, see
            `_gates_device.log_decay`.
        per_channel: whether there is one gate per channel rather than per token.
        l2norm, eps: whether queries and keys are L2-normalised, and the epsilon added to their sums of squares.
        outputs: whether the state after every token is written.
    """

    k_dim: int
    v_dim: int
    v_heads: int
    group: int
    gates: int
    per_channel: bool
    l2norm: bool
    eps: float
    outputs: bool


class Tile(NamedTuple):
    """The tile of a state that one program holds: all rows (k) and a range of columns (v), padded to powers of two; and warps."""

    k: int
    v: int
    warps: int


# A thread holds 64 state values. With 128, the state and its elementwise products with keys and queries exceed 255 registers.
# A row of 64 float32 columns is two 128-byte cache lines; with fewer than 32 columns, several programs share a line.
# qwen3-next on an H200, us with 16/32/64 columns: 365/288/281 for 256 requests, 88.6/75.4/74.8 for 64, no difference for 16.
_VALUES_A_WARP, _WARPS, _COLUMNS = 2048, 4, 64
# The fewest columns of a tile. With few requests, tiles are narrower, so that there are more programs. A row of 16 float32
# columns is two 32-byte sectors. On an H200 one request of qwen3-next takes 3.8 us with 16 columns, and 4.6 us with 8.
_FEWEST_COLUMNS = 16
# The largest number of key channels for which the kernel is eligible. With more channels, more than 8 warps would take part in
# each reduction over rows.
_LONGEST = 1024


@functools.cache
def tile_for(k_dim: int, v_dim: int, states: int, sm_count: int) -> Tile:
    """Returns the tile for ``states`` states, one per request and value head, of ``k_dim`` rows and ``v_dim`` columns."""
    k = next_power_of_2(k_dim)
    v = min(_COLUMNS, max(_FEWEST_COLUMNS, _WARPS * _VALUES_A_WARP // k), next_power_of_2(v_dim))
    while v > _FEWEST_COLUMNS and states * cdiv(v_dim, v) < 2 * sm_count:
        v //= 2
    return Tile(k, v, max(1, k * v // _VALUES_A_WARP))


@register_kernel(
    "linear_attention",
    "gated_delta_rule_decode",
    solution="triton",
    capability=TRITON,
    signatures=SIGNATURES,
    traits={
        "k_dim": at_most(_LONGEST),
        "gate": {"head", "channel"},
        "raw_gates": any,
        "dt_bias": any,
        "qk_l2norm": any,
        "output_slots": any,
    },
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    state_slots: Tensor,
    output_slots: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
    scale: float | None,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.gated_delta_rule_decode`, which documents the arguments."""
    batch, tokens, heads, k_dim = q.shape
    v_heads, v_dim = v.shape[2:]
    result = out if out is not None and out.is_contiguous() else torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if batch * tokens * v_heads * v_dim:
        q, k, v = rows(q), rows(k), rows(v)
        shape = Shape(
            k_dim,
            v_dim,
            v_heads,
            v_heads // heads,
            gates_of(A_log, dt_bias),
            g.dim() == 4,
            qk_l2norm,
            L2NORM_EPS,
            output_slots is not None,
        )
        tile = tile_for(k_dim, v_dim, batch * v_heads, sm_count_of(v.device))
        slots = None if output_slots is None else rows(output_slots)
        early = may_overlap(v.device)
        device_code.gated_delta_rule_decode_kernel[(cdiv(v_dim, tile.v) * v_heads * batch,)](
            q,
            k,
            v,
            g,
            beta,
            states,
            dense(state_slots),
            slots,
            dense(A_log),
            dense(dt_bias),
            result,
            scale_of(scale, k_dim),
            tokens,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *g.stride()[:3],
            g.stride(3) if shape.per_channel else 0,
            *beta.stride(),
            *states.stride(),
            0 if slots is None else slots.stride(0),
            SHAPE=shape,
            TILE=tile,
            EARLY=early,
            num_warps=tile.warps,
            **launch_options(early),
        )
    if out is not None and out is not result:
        return out.copy_(result)
    return result
