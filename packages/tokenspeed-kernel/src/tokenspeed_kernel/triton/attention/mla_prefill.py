"""Causal attention of whole sequences whose keys are wider than their values: the tiles of `_mha_tiles`, as many key heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention import _mha_tiles
from tokenspeed_kernel.triton.attention._mha_call import Call
from tokenspeed_kernel.triton.attention._mha_choice import attend, choose
from tokenspeed_kernel.triton.attention._mha_tiles import Tiles
from tokenspeed_kernel.triton.common import FLOATS, TRITON, for_architecture
from tokenspeed_kernel_base.ops.attention._softmax import softmax_scale_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

# Keys of 192 columns, values of 128. On an H200 4 x 4096 tokens, 128 heads: 434 TFLOP/s. With tensor maps 420, 4 stages 430, edges
# in the same loop 423, 128 keys at once 411, 64 rows 403 and less.
_TILES: dict[str, Tiles | None] = {"sm_90": Tiles(128, 64, 8, 3, "apart"), "cpu": Tiles(128, 128, 1, 1), "any": None}


@register_kernel(
    "attention",
    "mla_prefill",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("q", "k", "v"), "dense", FLOATS),
    traits={"head_dim": at_most(256), "v_head_dim": at_most(256), "logit_cap": any, "return_lse": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    logit_cap: float = 0.0,
    return_lse: bool = False,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel.mla_prefill`. Never waits for the device: the hint on the host is not looked at."""
    tokens, heads, head_dim = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, v.shape[2])
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    longest = tokens if max_seqlen is None else min(max_seqlen, tokens)
    scale = softmax_scale_of(softmax_scale, head_dim)
    call = Call(q, k, v, out, lse, cu_seqlens, scale, True, -1, logit_cap, None, longest)
    tiles = for_architecture(_TILES, q.device)
    if tiles and q.dtype != torch.float32 and (head_dim, v.shape[2]) == (192, 128):
        _mha_tiles.attend(tiles, call)
    else:
        attend(choose(call, longest), call)
    return out if lse is None else (out, lse)
