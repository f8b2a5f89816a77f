"""Causal attention of whole sequences with contiguous keys (prefill)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.triton.attention._formats import MHA
from tokenspeed_kernel.triton.attention._mha_call import Call
from tokenspeed_kernel.triton.attention._mha_choice import attend, choose
from tokenspeed_kernel.triton.attention._mha_tiles import Tiles
from tokenspeed_kernel.triton.common import FLOATS, TRITON
from tokenspeed_kernel_base.ops.attention._softmax import output_dtype, softmax_scale_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority


def _tiles_of_rows(request: Any, config: Mapping[str, Any]) -> str | None:
    """Returns why a configuration of the tunables is rejected: fewer than 16 query rows per warp, or too many pipeline stages.

    Returns None if the configuration is valid. `_mha_band` ignores these tunables.
    """
    if config["num_warps"] * 16 > config["block_m"]:
        return f"{config['num_warps']} warps have less than 16 rows each in a tile of {config['block_m']}"
    if request.traits["head_dim"] > 128 and config["num_stages"] > 2:
        return "three blocks of keys of more than 128 columns do not fit into shared memory"
    return None


@register_kernel(
    "attention",
    "mha_prefill",
    solution="triton",
    capability=TRITON,
    signatures=format_signatures(("q", "k", "v"), "dense", (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)),
    traits={**MHA, "scaled": any},
    priority=Priority.PORTABLE,
    tags={"determinism"},
    tunables={"block_m": [64, 128], "num_warps": [4, 8], "num_stages": [2, 3]},
    tunable_if=_tiles_of_rows,
)
def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
    *,
    block_m: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel.mha_prefill`. Never synchronises with the device, and ignores ``cu_seqlens_cpu``.

    ``block_m``, ``num_warps`` and ``num_stages`` are described in `Tiles`. Calls that `_mha_band` handles ignore these options.
    """
    tokens, heads, head_dim = q.shape
    if out is None:
        out = q.new_empty(tokens, heads, v.shape[2], dtype=output_dtype(q))
    lse = q.new_empty(tokens, heads, dtype=torch.float32) if return_lse else None
    longest = tokens if max_seqlen is None else min(max_seqlen, tokens)
    call = Call(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        cu_seqlens=cu_seqlens,
        softmax_scale=softmax_scale_of(softmax_scale, head_dim),
        causal=True,
        window_left=window_left,
        logit_cap=logit_cap,
        sinks=sinks,
        longest=longest,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    tiles = choose(call, longest)
    if isinstance(tiles, Tiles) and block_m is not None:
        assert num_warps is not None
        assert num_stages is not None
        tiles = tiles._replace(block_m=block_m, num_warps=num_warps, num_stages=num_stages)
    attend(tiles, call)
    return out if lse is None else (out, lse)
