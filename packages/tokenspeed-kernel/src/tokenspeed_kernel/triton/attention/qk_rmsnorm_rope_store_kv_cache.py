"""RMSNorm and rotary embedding of q and k, and the write of k and v to the paged cache, in one launch.

A program handles a tile of heads of q, or of k and v. The tiles are those of `apply_rope`, which hold whole heads, as RMSNorm
requires. Every byte of qkv is read once, and k and v are written only to the cache.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel.triton.common import FLOATS, FP8, TRITON, cdiv, dense, launch_options, may_overlap
from tokenspeed_kernel.triton.embedding.apply_rope import Shape, Write, streams_of, tile_for
from tokenspeed_kernel.triton.kvcache._write import as_storable, encoding_for
from tokenspeed_kernel.triton.quantization._encode import abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")


@register_kernel(
    "attention",
    "qk_rmsnorm_rope_store_kv_cache",
    solution="triton",
    capability=TRITON,
    signatures={
        format_signature(qkv=dense_tensor_format(dtype), k_cache=dense_tensor_format(cache))
        for dtype in FLOATS
        for cache in (dtype, *FP8)
    },
    traits={
        "qk_norm": any,
        "interleaved": any,
        "mrope": any,
        "cache_write": True,
        "scaled": any,
        "per_head_scale": any,
        "head_dim": at_most(16384),
        "v_head_dim": at_most(16384),
    },
    priority=Priority.PORTABLE,
    tags={"determinism", "batch_invariant"},
)
def qk_rmsnorm_rope_store_kv_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    interleaved: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    mrope_section: tuple[int, ...] | None,
    mrope_interleaved: bool,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.qk_rmsnorm_rope_store_kv_cache`, which documents the arguments."""
    (page_size, kv_heads, head_dim), v_head_dim = k_cache.shape[1:], v_cache.shape[3]
    tokens, rotary_dim = len(qkv), cos_sin_cache.shape[1]
    heads = (qkv.shape[1] - kv_heads * (head_dim + v_head_dim)) // head_dim
    q = out if out is not None and out.stride(2) == 1 else qkv.new_empty(tokens, heads, head_dim)
    qkv, table = (x if x.stride(1) == 1 else x.contiguous() for x in (qkv, cos_sin_cache))
    k = qkv[:, heads * head_dim :]
    v = k[:, kv_heads * head_dim :]
    encoding = encoding_for(qkv, k_cache, k_scale, v_scale)
    if k_cache.element_size() == 1:
        k_cache, v_cache = as_storable(k_cache), as_storable(v_cache)
    tile = tile_for(head_dim, rotary_dim, v_head_dim)
    # If a cache has no pages, no tokens are stored.
    k_programs = cdiv(tokens * kv_heads, tile.k_heads) if k_cache.numel() else 0
    if tokens:
        early = may_overlap(qkv.device)
        device_code.qk_rmsnorm_rope_store_kv_cache_kernel[(k_programs + cdiv(tokens * heads, tile.q_heads),)](
            qkv,
            k,
            v,
            dense(q_weight),
            dense(k_weight),
            positions,
            table,
            q,
            k_cache,
            v_cache,
            slot_mapping,
            dense(k_scale),
            dense(v_scale),
            tokens,
            k_programs,
            eps,
            qkv.stride(0),
            q.stride(0),
            q.stride(1),
            positions.stride(-1),
            positions.stride(0),
            table.stride(0),
            slot_mapping.stride(0),
            *k_cache.stride(),
            *v_cache.stride(),
            SHAPE=Shape(heads, kv_heads, head_dim, rotary_dim, interleaved, streams_of(mrope_section, mrope_interleaved)),
            WRITE=Write(True, page_size, v_head_dim, encoding),
            TILE=tile,
            INTERPRETED=abilities(qkv.device).interpreted,
            EARLY=early,
            num_warps=tile.warps,
            **launch_options(early),
        )
    return q if out is None or out is q else out.copy_(q)
