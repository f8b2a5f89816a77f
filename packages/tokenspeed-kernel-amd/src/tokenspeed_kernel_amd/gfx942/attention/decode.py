"""Decode: attention of the newest tokens of sequences to a paged cache.

A workgroup is one wave, and keys and values go from global memory to registers. `gluon.decode` describes splits and merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_amd.capability import GLUON_CDNA3
from tokenspeed_kernel_amd.gluon.architecture import Architecture
from tokenspeed_kernel_amd.gluon.call import CACHES, PAGED_TRAITS, Call, TileShape, called, paged_signatures
from tokenspeed_kernel_amd.gluon.decode import attend_split_kv
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

GFX942 = Architecture(paged=DeviceModule(__package__ + ".paged_device"))


@register_kernel(
    "attention",
    "mha_decode_with_kvcache",
    name="gluon_mha_decode_with_kvcache_gfx942",
    solution="gluon",
    capability=GLUON_CDNA3,
    signatures=paged_signatures(torch.float8_e4m3fnuz),
    traits={**PAGED_TRAITS, "multi_query": any},
    aligned_caches=CACHES,
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)
def mha_decode_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_k: int,
    max_seqlen_q: int,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mha_decode_with_kvcache`, which checks the arguments first. ``q_scale`` is
    always None, because these kernels support no fp8 queries."""
    call = called(
        "mha_decode_with_kvcache", q, None, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_q, max_seqlen_k, True,
        window_left, logit_cap, sinks, return_lse, softmax_scale, k_scale, v_scale, out,
    )  # fmt: skip
    attend_split_kv(call, _tile(call, max_seqlen_q * call.gqa_ratio), max_seqlen_q, GFX942)
    return call.result


def _tile(call: Call, rows: int) -> TileShape:
    """Returns the one-wave tile for ``rows`` query rows (tokens times query heads) of a KV head: 16 or 32 rows. More than 32 rows
    need several tiles.

    A wave holds two blocks of keys and values in registers. By the emulator's timing model, 16 sequences of 2048 keys take 14.5 us
    with blocks of 64 keys and 17.9 us with blocks of 32; with fp8 caches, 12.8 us and 17.7 us. With more rows or wider heads,
    blocks of 64 keys would spill registers.
    """
    small = rows <= 16 and call.q.shape[2] == call.v_cache.shape[3] == 64
    return TileShape(16 if rows <= 16 else 32, 64 if small else 32, 1)
