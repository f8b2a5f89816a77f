"""MLA prefill: attention of whole sequences, or of chunks of them, with keys and values expanded from their latents.

A head has its own keys of 192 columns, of which the last 64 are the rotary part, and its own values of 128 columns. A workgroup of
4 waves computes a tile of 128 queries of one head:

* QK: each wave computes 32 rows, with 12 MFMAs 32x32x16 along the 192 columns for each 32 of a block's 64 keys. q stays in
  registers.
* PV: the probabilities stay in their lanes; values are read with transposing LDS reads.
* LDS: one stage, 40 KB, so that two workgroups share a CU. The next keys are copied after the QK MFMAs, the next values after the
  PV MFMAs. The other workgroup's MFMAs hide these copies and the softmax.
* Head ``h`` runs on XCD ``h % 8``, whose L2 holds its keys and values. Tiles with the most keys run first.

`extend` explains the grid. A tile begins at the first key that some row sees. With causality and no window, only the blocks at the
diagonal are masked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import deliver, rows_to_write
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.attention.extend import grid_of
from tokenspeed_kernel_amd.gluon.call import TileShape, score_scaling
from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

device = DeviceModule(__name__ + "_device")

HEAD_DIM, V_HEAD_DIM = 192, 128
TILE = TileShape(m=128, block_n=64, num_warps=4, stages=1)
WAVES_PER_SIMD = 2  # 256 registers per lane
# Any register can hold any value, see `gluon.prefill.Config`.
ATTRIBUTES = "amdgpu-agpr-alloc=0"


class Operands(NamedTuple):
    """The run-time arguments: the operator's tensors, and what `score_scaling` returns. The kernel writes out and lse.

    Attributes:
        cu_seqlens_q: the operator's cu_seqlens.
        cu_seqlens_kv: None if every sequence has as many keys as queries.
        batch: the number of sequences.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    batch: int
    scale: float
    cap: float
    out: Tensor
    lse: Tensor | None


class Shape(NamedTuple):
    """Sizes and strides that a model fixes: compile-time constants. Strides are in elements."""

    heads: int
    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    out_token: int
    out_head: int


class Variant(NamedTuple):
    """The options that a kernel is compiled for: compile-time constants, see `gluon.call.Variant`."""

    window_left: int
    is_causal: bool
    capped: bool
    lse: bool


@register_kernel(
    "attention",
    "mla_prefill",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=format_signatures(("q", "k", "v"), "dense", {torch.bfloat16, torch.float16}),
    traits={
        "head_dim": HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "logit_cap": any,
        "return_lse": any,
        "sliding_window": any,
        "own_kv_lengths": any,
        "is_causal": any,
    },
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)
def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    logit_cap: float,
    return_lse: bool,
    softmax_scale: float | None,
    cu_seqlens_kv: Tensor | None,
    is_causal: bool,
    window_left: int,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mla_prefill`, which checks the arguments first."""
    tokens, heads, head_dim = q.shape
    batch = cu_seqlens.shape[0] - 1
    written = rows_to_write(out, q, tokens, heads, v.shape[2])
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None
    longest = tokens if max_seqlen is None else min(max_seqlen, tokens)
    if batch and longest:
        q, k, v = aligned(q), aligned(k), aligned(v)
        scale, cap = score_scaling(head_dim, softmax_scale, logit_cap)
        count, slots = grid_of(tokens // TILE.m + batch, -(-longest // TILE.m) * batch, batch)
        device.mla_prefill_kernel[(heads * count,)](
            Operands(
                cu_seqlens.contiguous(), None if cu_seqlens_kv is None else cu_seqlens_kv.contiguous(),
                q, k, v, batch, scale, cap, written, lse,
            ),
            Shape(heads, *(stride for each in (q, k, v, written) for stride in each.stride()[:2])),
            Variant(window_left, is_causal, cap > 0, return_lse),
            TILE,
            slots,
            num_warps=TILE.num_warps,
            waves_per_eu=WAVES_PER_SIMD,
            llvm_fn_attrs=ATTRIBUTES,
        )  # fmt: skip
    written = deliver(written, out)
    return written if lse is None else (written, lse)
