"""Prefill: causal attention of whole sequences, whose keys and values lie one after another in memory, not in pages.

Workgroups stay on the device and take one tile of queries after another. Which sequence a tile belongs to, and how long that is, is
found on the device.

A tile begins with the diagonal, whose largest score stays the maximum of the softmax: later weights may be larger than 1, which
bfloat16 and float32 hold as exactly as smaller ones. That saves the maximum and the rescaling of every further step. Where a row's
weights grow too large (a sum above 2**40, or above 2**15 in float16), the workgroup computes its tiles once more, and follows the
maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd._rows import deliver, rows_to_write
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.attention.call import score_scaling
from tokenspeed_kernel_base.alignment import ROW_BYTES, aligned
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device = DeviceModule(__name__ + "_device")

_XCDS = 8


@dataclass(frozen=True)
class Config:
    """How work is divided, and what the compiler is told. Figures are microseconds of the emulator's timing model.

    Attributes:
        waves_per_simd: how many waves must fit on a SIMD: three leave 168 registers for each lane, two leave 256. What one wave
            waits for, others hide. A prefill of 4 x 1024 tokens takes 36 with three and 41 with two; four would spill.
        block_n: keys of one step. Twice as many would need fewer instructions for each key, and more registers than three waves
            have: 40 for the same prefill.
        block_m: queries of one head that a workgroup computes at a time, two steps of keys; each of its waves has 32 of them.
        warps: waves of a workgroup.
        attributes: LLVM's attributes of the function. Without accumulation registers (AGPRs) any value may be in any register; with
            them LLVM reserves half of the registers and moves values between the halves.
    """

    waves_per_simd: int
    block_n: int = 64
    block_m: int = 128
    warps: int = 4
    attributes: str = "amdgpu-agpr-alloc=0"


def _config(head_dim: int, v_head_dim: int) -> Config:
    """Three waves a SIMD where heads are short, otherwise two: with heads of 128 three would spill."""
    return Config(3 if head_dim == v_head_dim == 64 else 2)


_VECTOR = ROW_BYTES // 2  # elements, of 16 bits


class Operands(NamedTuple):
    """Tensors of a call. out and lse are written; lse and sinks may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    cu_seqlens: Tensor


class Strides(NamedTuple):
    """Strides of tokens and heads. Those of q, k and v count vectors of 16 bytes, those of the output count elements.

    Triton infers from an argument only whether it is a multiple of 16; a count of elements that is a multiple of 8 would prove no
    alignment of a row, and copies to LDS need one.
    """

    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    out_token: int
    out_head: int


class Shape(NamedTuple):
    """What a model fixes. Known to the compiler.

    Attributes:
        head_dim, v_head_dim: elements of a head.
        xcds: XCDs that share the query heads evenly.
        heads: query heads of each.
        gqa_ratio: query heads of a key head.
    """

    head_dim: int
    v_head_dim: int
    xcds: int
    heads: int
    gqa_ratio: int


class Variant(NamedTuple):
    """The options that a kernel is compiled for. Known to the compiler.

    Attributes:
        windowed: whether there is a window.
        narrow: whether the window may hide keys in the diagonal blocks; one that is wider than a tile cannot.
        capped, sinks, lse: whether there is a logit cap, whether there are sinks, and whether the log-sum-exp is wanted.
    """

    windowed: bool
    narrow: bool
    capped: bool
    sinks: bool
    lse: bool


class TileShape(NamedTuple):
    """How work is divided. Known to the compiler.

    Attributes:
        block_m, block_n: see `Config`.
        block_b: how many sequences' lengths a workgroup reads together: 1 for one sequence, otherwise at least the batch.
        units: compute units of an XCD.
    """

    block_m: int
    block_n: int
    block_b: int
    units: int


@register_kernel(
    "attention",
    "mha_prefill",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=format_signatures(("q", "k", "v"), "dense", {torch.bfloat16, torch.float16}),
    traits={
        "head_dim": {64, 128},
        "v_head_dim": {64, 128},
        "logit_cap": any,
        "return_lse": any,
        "sliding_window": any,
        "sinks": any,
    },
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)
def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel_amd.mha_prefill`, which has checked the arguments. Nothing waits for the device."""
    tokens, heads, head_dim = q.shape
    v_head_dim = v.shape[2]
    result = rows_to_write(out, q, tokens, heads, v_head_dim)
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    batch = cu_seqlens.shape[0] - 1
    if tokens == 0:
        result = deliver(result, out)
        return result if lse is None else (result, lse)
    q, k, v, cu_seqlens = aligned(q), aligned(k), aligned(v), cu_seqlens.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    scale, cap = score_scaling(head_dim, softmax_scale, logit_cap)
    config = _config(head_dim, v_head_dim)
    xcds = math.gcd(heads, _XCDS)
    # An upper bound of the tiles of one XCD: the last one of every sequence may be partly empty.
    most = (tokens // config.block_m + min(batch, tokens)) * (heads // xcds)
    units = max(current_compute_units() // xcds, 1)
    each = min(4 * config.waves_per_simd // config.warps, -(-most // units))  # workgroups of a compute unit
    device.mha_prefill_gfx950[(xcds * min(most, units) * each,)](
        Operands(q, k, v, result, lse, sinks, cu_seqlens),
        batch,
        Strides(*(stride // _VECTOR for each in (q, k, v) for stride in each.stride()[:2]), *result.stride()[:2]),
        scale,
        cap,
        window_left,
        Shape(head_dim, v_head_dim, xcds, heads // xcds, heads // k.shape[1]),
        Variant(
            windowed=window_left >= 0,
            narrow=0 <= window_left < config.block_m - 1,
            capped=logit_cap > 0,
            sinks=sinks is not None,
            lse=return_lse,
        ),
        TileShape(config.block_m, config.block_n, 1 if batch == 1 else max(64, 1 << (batch - 1).bit_length()), units),
        num_warps=config.warps,
        waves_per_eu=config.waves_per_simd,
        llvm_fn_attrs=config.attributes,
    )
    result = deliver(result, out)
    return result if lse is None else (result, lse)
