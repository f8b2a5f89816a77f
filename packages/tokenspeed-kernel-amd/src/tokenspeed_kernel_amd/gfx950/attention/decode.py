"""Decode: attention of the newest tokens of sequences to a paged cache.

Decode is memory-bound. A workgroup is one wave and needs no barriers. At head_dim 64, 18 workgroups fit on a CU, each with 8 KB of
loads in flight. `gluon.decode` describes the splits of long sequences and their merge.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gluon.architecture import Architecture
from tokenspeed_kernel_amd.gluon.call import CACHES, PAGED_SIGNATURES, PAGED_TRAITS, Call, TileShape, called
from tokenspeed_kernel_amd.gluon.decode import attend_split_kv
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

GFX950 = Architecture(paged=DeviceModule(__package__ + ".paged_device"))


@register_kernel(
    "attention",
    "mha_decode_with_kvcache",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=PAGED_SIGNATURES,
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
    attend_split_kv(call, tile_of_rows(call, max_seqlen_q * call.gqa_ratio), max_seqlen_q, GFX950)
    return call.result


def tile_of_rows(call: Call, rows: int) -> TileShape:
    """Returns the one-wave tile for ``rows`` query rows (tokens times query heads) of a KV head: 16 or 32 rows. More than 32 rows
    need several tiles."""
    return TileShape(16 if rows <= 16 else 32, 64 if call.fp8 else 32, 1)
