"""Computes MLA prefill with the kernels of multi-head attention. Keys are wider than values, and every query head has its own KV
head."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention import _mha_tiles
from tokenspeed_kernel.triton.attention._mha_call import Call
from tokenspeed_kernel.triton.attention._mha_choice import attend, choose
from tokenspeed_kernel.triton.attention._mha_tiles import Tiles
from tokenspeed_kernel.triton.common import FLOATS, TRITON, for_architecture
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype, softmax_scale_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

# Tiles for keys of 192 columns and values of 128. On an H200, 4 sequences of 4096 tokens with 128 heads reach 434 TFLOP/s. With
# tensor descriptors: 420. With 4 stages: 430. With edge blocks in the same loop: 423. With blocks of 128 keys: 411. With tiles of
# 64 rows: at most 403.
_TILES: dict[str, Tiles | None] = {"sm_90": Tiles(128, 64, 8, 3, "apart"), "cpu": Tiles(128, 128, 1, 1), "any": None}


@register_kernel(
    "attention",
    "mla_prefill",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("q", "k", "v"), "dense", (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)),
    traits={
        "head_dim": at_most(256),
        "v_head_dim": at_most(256),
        "logit_cap": any,
        "return_lse": any,
        "own_kv_lengths": any,
        "is_causal": any,
        "sliding_window": any,
        "scaled": any,
    },
    priority=Priority.PORTABLE,
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
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.mla_prefill`. Never synchronises with the device, and ignores
    ``cu_seqlens_cpu``."""
    tokens, heads, head_dim = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, v.shape[2], dtype=output_dtype(q))
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    longest_q = tokens if max_seqlen is None else min(max_seqlen, tokens)
    call = Call(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        cu_seqlens=cu_seqlens,
        softmax_scale=softmax_scale_of(softmax_scale, head_dim),
        causal=is_causal,
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=None,
        longest=longest_q if cu_seqlens_kv is None else k.shape[0],
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        cu_seqlens_kv=cu_seqlens_kv,
    )
    tiles = for_architecture(_TILES, q.device)
    if tiles and q.dtype != torch.float32 and (head_dim, v.shape[2]) == (192, 128):
        _mha_tiles.attend(tiles, call)
    else:
        attend(choose(call, longest_q), call)
    return out if lse is None else (out, lse)
