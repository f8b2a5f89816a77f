"""Stores new keys and values in the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, FP8, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.kvcache.slots import (
    captured_slots,
    check_scale_values,
    check_slots,
    check_write,
    padding_of,
    store_slots,
    unwritten,
)
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "kvcache",
    "store_kv_cache",
    formats=("k", "k_cache"),
    traits={"head_dim": int, "v_head_dim": int, "page_size": int, "scaled": bool, "per_head_scale": bool},
    mutates=("k_cache", "v_cache"),
    varying=("tokens",),
    capacity=("pages",),
    scales=("k_scale", "v_scale"),
)
def store_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes each token's key and value to its slot of the paged cache, in place.

    Token t goes to ``k_cache[slot // page_size, slot % page_size]`` with ``slot = slot_mapping[t]``, and likewise for v. A token
    with a negative slot, for example the padding of a CUDA graph, is not written. Everything else in the caches is unchanged.

    If the cache has k's dtype, bits are copied. An 8-bit float cache receives ``saturate(k / scale)``: k is divided in float32 (in
    float64 for float64 inputs), and the quotient is rounded to the nearest value of the cache's dtype, ties to even. A float64
    quotient is rounded to float32 before. A quotient beyond the largest finite value becomes this value, with its sign. NaN stays
    NaN. Attention multiplies the stored values by the same scale.

    Args:
        k: float16, bfloat16, float32, float64 or an 8-bit float ``[tokens, kv_heads, head_dim]``. May be a strided slice of a
            fused qkv.
        v: k's dtype ``[tokens, kv_heads, v_head_dim]``. May be strided.
        k_cache: ``[pages, page_size, kv_heads, head_dim]`` of k's dtype, or an 8-bit float (e4m3fn, e5m2, e4m3fnuz). Written to.
            May be strided: a cache ``[pages, kv_heads, page_size, head_dim]`` (HND) is passed as ``k_cache.transpose(1, 2)``.
            Must not overlap k or v.
        v_cache: the value cache, k_cache's dtype ``[pages, page_size, kv_heads, v_head_dim]``; otherwise as k_cache.
        slot_mapping: int32 or int64 ``[tokens]``, each less than ``pages * page_size``. Slots that are not negative must be
            distinct: if two tokens have the same slot, either may remain. Both conditions are checked if slot_mapping lies in host
            memory.
        k_scale: float32 ``[]``, ``[1]`` or ``[kv_heads]``, finite, > 0; None means 1. Allowed only if k is converted to an 8-bit
            float.
        v_scale: the scale of v, like k_scale.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import store_kv_cache
        >>> k, v = torch.full((3, 1, 2), 5.0), torch.full((3, 1, 2), 7.0)
        >>> k_cache, v_cache = torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2)  # two pages of two slots
        >>> store_kv_cache(k, v, k_cache, v_cache, torch.tensor([2, -1, 1]))
        >>> k_cache.view(4, 2)
        tensor([[0., 0.],
                [5., 5.],
                [5., 5.],
                [0., 0.]])

    Safe in CUDA graphs.
    """
    store_slots(k_cache, k, slot_mapping, k_scale)
    store_slots(v_cache, v, slot_mapping, v_scale)


@store_kv_cache.traits
def _(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> dict[str, object]:
    scales = [scale for scale in (k_scale, v_scale) if scale is not None]
    return {
        "head_dim": k_cache.shape[-1],
        "v_head_dim": v_cache.shape[-1],
        "page_size": k_cache.shape[1],
        "scaled": bool(scales),
        "per_head_scale": any(scale.numel() != 1 for scale in scales),
    }


@store_kv_cache.check
def _(
    check: Checker,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check.tensor("k", k, "tokens kv_heads head_dim", FLOATS | FP8)
    check_write(check, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


@store_kv_cache.check_values(host=("slot_mapping", "k_scale", "v_scale"))
def _(check: Checker, slot_mapping: Tensor | None, k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    check_slots(check, slot_mapping, k_cache)
    check_scale_values(check, k_scale=k_scale, v_scale=v_scale)


@store_kv_cache.fake
def _() -> None:
    return None


@recipe
def _inputs(
    tokens: int,
    pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    v_head_dim: int | None = None,
    cache_dtype: torch.dtype | None = None,
    scale_shape: tuple[int, ...] | None = None,
    padding: int = 0,
    slot_dtype: torch.dtype = torch.int64,
    fused: bool = True,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws tokens at distinct random slots of a filled cache. The last ``padding`` tokens are not written.

    With ``fused``, k and v are slices of one tensor, as after a fused projection.
    """

    def make(draw: Draw) -> dict[str, Any]:
        slots = draw.permutation(pages * page_size, slot_dtype)[:tokens].clone()
        slots[tokens - padding :] = -1
        v_width = v_head_dim or head_dim
        kv = draw.normal(tokens, kv_heads * (head_dim + v_width), dtype=dtype)
        parts = kv[:, : kv_heads * head_dim], kv[:, kv_heads * head_dim :]
        slices = [part.view(tokens, kv_heads, width) for part, width in zip(parts, (head_dim, v_width), strict=True)]
        k, v = slices if fused else (x.clone(memory_format=torch.contiguous_format) for x in slices)
        arguments = {
            "k": k,
            "v": v,
            "k_cache": draw.normal(pages, page_size, kv_heads, head_dim, dtype=cache_dtype or dtype),
            "v_cache": draw.normal(pages, page_size, kv_heads, v_width, dtype=cache_dtype or dtype),
            "slot_mapping": slots,
        }
        if scale_shape is not None:
            arguments["k_scale"] = draw.uniform(*scale_shape, low=0.001, high=0.1)  # scales this small make some values saturate
            arguments["v_scale"] = draw.uniform(*scale_shape, low=0.01, high=2.0)
        return arguments

    return make


@store_kv_cache.cases
def _() -> list[Case]:
    fp8 = torch.float8_e4m3fn
    return [
        Case("one token, float32", _inputs(1, 2, 4, 1, 8, torch.float32)),
        Case("gpt-oss-120b decode 16, padded by 5", _inputs(16, 8, 16, 8, 64, padding=5)),
        Case("page size 1, int32 slots, odd head_dim 57", _inputs(9, 12, 1, 3, 57, torch.float16, slot_dtype=torch.int32)),
        Case("fp8 cache, no scale", _inputs(12, 4, 16, 8, 64, cache_dtype=fp8, padding=2)),
        Case("fp8 cache, one scale", _inputs(12, 4, 16, 8, 64, cache_dtype=fp8, scale_shape=())),
        Case("fp8 cache, one scale a head, float16", _inputs(7, 2, 8, 4, 128, torch.float16, None, fp8, (4,))),
        Case("deepseek-v3 heads before absorption, 4 of them", _inputs(9, 3, 4, 4, 192, v_head_dim=128)),
        Case("values wider than keys, fp8 cache, one scale a head", _inputs(7, 2, 8, 3, 40, torch.float32, 100, fp8, (3,))),
        Case("e5m2 cache, one scale", _inputs(12, 4, 16, 2, 64, cache_dtype=torch.float8_e5m2, scale_shape=(1,))),
        Case("e4m3fnuz cache, no scale", _inputs(5, 2, 4, 2, 64, cache_dtype=torch.float8_e4m3fnuz)),
        Case("fp8 copied", _inputs(6, 3, 4, 2, 64, fp8)),
        Case("every token is padding", _inputs(4, 2, 4, 2, 16, padding=4)),
        Case("no tokens", _inputs(0, 2, 4, 2, 16, fused=False)),
        Case("the whole cache, not fused", _inputs(64, 4, 16, 2, 32, torch.float32, fused=False)),
        Case("gpt-oss-120b decode 64", _inputs(64, 512, 64, 8, 64), large=True),
        Case("gpt-oss-120b prefill 16384", _inputs(16384, 2048, 16, 8, 64), large=True),
        Case("gpt-oss-120b prefill 16384, fp8 cache", _inputs(16384, 2048, 16, 8, 64, cache_dtype=fp8, scale_shape=()), large=True),
        Case("deepseek-v3 prefill 4096", _inputs(4096, 64, 64, 128, 192, v_head_dim=128), large=True),
        Case("gpt-oss-120b prefill 65536", _inputs(65536, 1280, 64, 8, 64), large=True),
        Case("gpt-oss-120b prefill 65536, fp8 cache", _inputs(65536, 1280, 64, 8, 64, cache_dtype=fp8, scale_shape=()), large=True),
    ]


@store_kv_cache.vary
def _(variation: Variation, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    if variation.want is Want.CAPTURED:
        return captured_slots(variation, slot_mapping, k_cache=k_cache, v_cache=v_cache)
    if variation.want is Want.UNUSED:
        return unwritten(slot_mapping, k=k, v=v)
    return {}


@store_kv_cache.work
def _(slot_mapping: Tensor) -> dict[str, list[int]]:
    return padding_of(slot_mapping)


@store_kv_cache.cost
def _(k: Tensor, v: Tensor, k_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Cost:
    stored = (k.numel() + v.numel()) * k_cache.element_size()
    scaled = (k.numel() if k_scale is not None else 0) + (v.numel() if v_scale is not None else 0)
    return Cost(flops=1.0 * scaled, bytes=nbytes(k, v, slot_mapping, k_scale, v_scale) + stored)
