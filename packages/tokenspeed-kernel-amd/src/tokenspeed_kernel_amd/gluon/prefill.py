"""The launcher of prefill for every architecture: causal attention of whole sequences, with keys and values contiguous in memory,
not paged.

The kernel is persistent: a workgroup computes one query tile after another. The device finds the sequence of each tile, and the
sequence's length.

The mainloop of a tile starts at the diagonal key blocks. The row max of the first diagonal block is kept for the whole tile. So
later unnormalised probabilities may exceed 1. bf16 and fp32 represent them with the same relative precision as smaller values. A
fixed row max saves the max reduction and the rescaling of O in every further iteration. fp16 has a smaller range: the row max
includes the other diagonal block, and the first two blocks before the diagonal. These often have the largest scores, the first
token's. If a row sum grows too large nevertheless (above 2**64, or above 2**15 in fp16), the workgroup computes the tile a second
time, with the usual online softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd._rows import deliver, rows_to_write
from tokenspeed_kernel_amd.gluon.call import score_scaling
from tokenspeed_kernel_base.alignment import ROW_BYTES, aligned
from tokenspeed_kernel_base.signature import format_signatures

SIGNATURES = format_signatures(("q", "k", "v"), "dense", {torch.bfloat16, torch.float16})
TRAITS = {
    "head_dim": {64, 128},
    "v_head_dim": {64, 128},
    "logit_cap": any,
    "return_lse": any,
    "sliding_window": any,
    "sinks": any,
}

_XCDS = 8
_VECTOR = ROW_BYTES // 2  # 16-bit elements per vector of 16 bytes


@dataclass(frozen=True)
class Config:
    """Tile sizes and compiler options. Figures are microseconds of the emulator's timing model.

    Attributes:
        waves_per_simd: occupancy in waves per SIMD: three leave 168 registers per lane, two leave 256. More waves hide more
            latency. A prefill of 4 x 1024 tokens takes 36 us with three and 41 us with two; four would spill.
        block_n: keys per iteration. Twice as many keys need fewer instructions per key, but more registers than three waves per
            SIMD have: 40 us for the same prefill.
        block_m: query rows of one head in a workgroup's tile: twice block_n. Each wave has 32 of these rows.
        warps: waves per workgroup.
        attributes: LLVM function attributes. Without accumulation registers (AGPRs), any register can hold any value. With AGPRs,
            LLVM reserves half of the registers for them, and moves values between AGPRs and VGPRs.
    """

    waves_per_simd: int
    block_n: int = 64
    block_m: int = 128
    warps: int = 4
    attributes: str = "amdgpu-agpr-alloc=0"


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
    """Strides of tokens and heads. Strides of q, k and v are in vectors of 16 bytes, strides of the output in elements.

    Triton infers only whether an argument is a multiple of 16. A stride in elements may be a multiple of 8 but not of 16. Triton
    could then not infer that rows are aligned to 16 bytes, as copies to LDS require.
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
    """Sizes that a model determines: compile-time constants.

    Attributes:
        head_dim, v_head_dim: elements per head.
        xcds: XCDs (accelerator dies) among which the query heads are divided evenly.
        heads: query heads per XCD.
        gqa_ratio: query heads per KV head.
    """

    head_dim: int
    v_head_dim: int
    xcds: int
    heads: int
    gqa_ratio: int


class Variant(NamedTuple):
    """The options that a kernel is compiled for: compile-time constants.

    Attributes:
        windowed: whether there is a window.
        narrow: whether the window may hide keys in the diagonal blocks; False if the window is at least block_m tokens wide.
        capped, sinks, lse: whether there is a logit cap, whether there are sinks, and whether the LSE is requested.
    """

    windowed: bool
    narrow: bool
    capped: bool
    sinks: bool
    lse: bool


class TileShape(NamedTuple):
    """The division of work: compile-time constants.

    Attributes:
        block_m, block_n: query rows per tile, and keys per iteration, see `Config`.
        block_b: how many sequence lengths a workgroup loads at once: 1 for one sequence, otherwise at least the batch size.
        cus: CUs per XCD.
    """

    block_m: int
    block_n: int
    block_b: int
    cus: int


def launch_prefill(
    kernel: Any,
    config: Config,
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
    """Launches the kernel of an architecture. The other arguments and the result are those of the operator."""
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
    xcds = math.gcd(heads, _XCDS)
    # An upper bound of the number of tiles per XCD: every sequence's last tile may be partly empty.
    most = (tokens // config.block_m + min(batch, tokens)) * (heads // xcds)
    cus = max(current_compute_units() // xcds, 1)
    each = min(4 * config.waves_per_simd // config.warps, -(-most // cus))  # workgroups per CU
    kernel[(xcds * min(most, cus) * each,)](
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
        TileShape(config.block_m, config.block_n, 1 if batch == 1 else max(64, 1 << (batch - 1).bit_length()), cus),
        num_warps=config.warps,
        waves_per_eu=config.waves_per_simd,
        llvm_fn_attrs=config.attributes,
    )
    result = deliver(result, out)
    return result if lse is None else (result, lse)
