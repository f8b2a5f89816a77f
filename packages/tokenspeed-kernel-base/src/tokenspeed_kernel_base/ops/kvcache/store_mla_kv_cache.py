"""Stores latents and their rotary parts in the paged cache of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, FP8, HALVES, INTS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.kvcache.latent_groups import check_latent_groups, mla_cache_views, quantize_groups
from tokenspeed_kernel_base.ops.kvcache.slots import (
    captured_slots,
    check_latent_write,
    check_scale_values,
    check_slots,
    padding_of,
    store_latents,
    store_slots,
    unwritten,
)
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "kvcache",
    "store_mla_kv_cache",
    formats=("latent", "kv_cache", "rope_cache"),
    traits={"kv_lora_rank": int, "rope_dim": int, "page_size": int, "scaled": bool, "grouped_scales": bool},
    mutates=("kv_cache", "kv_scale_cache", "rope_cache"),
    varying=("tokens",),
    capacity=("pages",),
    scales=("kv_scale",),
)
def store_mla_kv_cache(
    latent: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
    kv_scale_cache: Tensor | None = None,
    rope_cache: Tensor | None = None,
) -> None:
    """Writes each token's latent, followed by its rotary part, to its slot of the paged cache, in place.

    `mla_decode_with_kvcache` and `mla_extend_with_kvcache` read this cache (DeepSeek-AI, 2024, arXiv:2405.04434). Token t goes to
    ``kv_cache[slot // page_size, slot % page_size]`` with ``slot = slot_mapping[t]``. A token with a negative slot, for example the
    padding of a CUDA graph, is not written. Everything else in the cache is unchanged.

    If the cache has the latent's dtype, bits are copied. An 8-bit float cache receives ``saturate(x / kv_scale)`` of both parts: x
    is divided in float32 (in float64 for float64 inputs), and the quotient is rounded to the nearest value of the cache's dtype,
    ties to even. A float64 quotient is rounded to float32 before. A quotient beyond the largest finite value becomes this value,
    with its sign. NaN stays NaN. Attention multiplies the stored values by the same scale.

    With kv_scale_cache and rope_cache, the cache has DeepSeek-V3.2's layout, with 656 bytes for each token. `mla_cache_views`
    returns the three tensors as views of pages of bytes. Rotary parts are copied. Each 128 elements of a latent share one scale.
    The result is bitwise that of `quantize_fp8`, with all operations in float32 and correctly rounded::

        scale = max(amax / 448, 2^-126)   # amax: the largest magnitude of the 128 elements
        q     = e4m3(latent / scale)      # to nearest, ties to even, saturating

    If one of the 128 elements is NaN, the scale and all quantised values are NaN. If one of them is infinite, the scale is
    infinite, infinities become NaN, and the other quantised values are 0.

    Args:
        latent: float16, bfloat16, float32, float64 or an 8-bit float ``[tokens, kv_lora_rank]``, after the model's normalisation.
            With kv_scale_cache: float16 or bfloat16, with kv_lora_rank a multiple of 128. May be a strided slice of a fused
            projection.
        k_rope: latent's dtype ``[tokens, rope_dim]``, after rotation. May be strided.
        kv_cache: ``[pages, page_size, kv_lora_rank + rope_dim]`` of latent's dtype, or an 8-bit float (e4m3fn, e5m2, e4m3fnuz);
            with kv_scale_cache float8_e4m3fn ``[pages, page_size, kv_lora_rank]``. Written to. May be strided. Must not overlap
            latent or k_rope.
        slot_mapping: int32 or int64 ``[tokens]``, each less than ``pages * page_size``. Slots that are not negative must be
            distinct: if two tokens have the same slot, either may remain. Both conditions are checked if slot_mapping lies in host
            memory.
        kv_scale: float32 ``[]`` or ``[1]``, finite, > 0; None means 1. Allowed only if values are converted to an 8-bit float. Not
            allowed with kv_scale_cache.
        kv_scale_cache: float32 ``[pages, page_size, kv_lora_rank / 128]``. Written to. May be strided. Requires rope_cache.
        rope_cache: latent's dtype ``[pages, page_size, rope_dim]``. Written to. May be strided. Requires kv_scale_cache.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is written.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import store_mla_kv_cache
        >>> latent, k_rope = torch.full((2, 2), 5.0), torch.full((2, 1), 7.0)
        >>> kv_cache = torch.zeros(2, 2, 3)  # two pages of two slots
        >>> store_mla_kv_cache(latent, k_rope, kv_cache, torch.tensor([2, -1]))
        >>> kv_cache.view(4, 3)
        tensor([[0., 0., 0.],
                [0., 0., 0.],
                [5., 5., 7.],
                [0., 0., 0.]])

    Safe in CUDA graphs.
    """
    if kv_scale_cache is None or rope_cache is None:
        store_latents(kv_cache, latent, k_rope, slot_mapping, kv_scale)
        return
    for cache, values in zip((kv_cache, kv_scale_cache, rope_cache), (*quantize_groups(latent), k_rope), strict=True):
        store_slots(cache.unsqueeze(2), values.unsqueeze(1), slot_mapping)


@store_mla_kv_cache.traits
def _(
    latent: Tensor, k_rope: Tensor, kv_cache: Tensor, kv_scale: Tensor | None, kv_scale_cache: Tensor | None
) -> dict[str, object]:
    return {
        "kv_lora_rank": latent.shape[-1],
        "rope_dim": k_rope.shape[-1],
        "page_size": kv_cache.shape[1],
        "scaled": kv_scale is not None,
        "grouped_scales": kv_scale_cache is not None,
    }


@store_mla_kv_cache.check
def _(
    check: Checker,
    latent: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> None:
    grouped = kv_scale_cache is not None or rope_cache is not None
    check.tensor("latent", latent, "tokens kv_lora_rank", HALVES if grouped else FLOATS | FP8)
    check.tensor("k_rope", k_rope, "tokens rope_dim", latent.dtype)
    if not grouped:
        check_latent_write(check, latent, kv_cache, slot_mapping, kv_scale)
        return
    check.require(check["kv_lora_rank"] > 0, "latent", "of a kv_lora_rank > 0", str(list(latent.shape)))
    check_latent_groups(check, kv_cache, kv_scale, kv_scale_cache, rope_cache, latent)
    check.require(check["page_size"] > 0, "kv_cache", "of a page_size > 0", str(list(kv_cache.shape)))
    check.tensor("slot_mapping", slot_mapping, "tokens", INTS)


@store_mla_kv_cache.check_values(host=("slot_mapping", "kv_scale"))
def _(check: Checker, slot_mapping: Tensor | None, kv_cache: Tensor, kv_scale: Tensor | None) -> None:
    check_slots(check, slot_mapping, kv_cache)
    check_scale_values(check, kv_scale=kv_scale)


@store_mla_kv_cache.fake
def _() -> None:
    return None


def _tokens(
    draw: Draw,
    tokens: int,
    slots: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    padding: int,
    slot_dtype: torch.dtype,
    fused: bool,
) -> dict[str, Any]:
    """Draws latents, rotary parts, and distinct slots for all but the last ``padding`` tokens."""
    slot_mapping = draw.permutation(slots, slot_dtype)[:tokens].clone()
    slot_mapping[tokens - padding :] = -1
    both = draw.normal(tokens, rank + rope, dtype=dtype)
    parts = both[:, :rank], both[:, rank:]
    latent, k_rope = parts if fused else (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return {"latent": latent, "k_rope": k_rope, "slot_mapping": slot_mapping}


@recipe
def _inputs(
    tokens: int,
    pages: int,
    page_size: int,
    kv_lora_rank: int,
    rope_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    scaled: bool = False,
    padding: int = 0,
    slot_dtype: torch.dtype = torch.int64,
    fused: bool = True,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws tokens at distinct random slots of a filled cache. The last ``padding`` tokens are not written.

    With ``fused``, both parts are slices of one tensor, as after the model's projection.
    """

    def make(draw: Draw) -> dict[str, Any]:
        arguments = _tokens(draw, tokens, pages * page_size, kv_lora_rank, rope_dim, dtype, padding, slot_dtype, fused)
        arguments["kv_cache"] = draw.normal(pages, page_size, kv_lora_rank + rope_dim, dtype=cache_dtype or dtype)
        if scaled:
            arguments["kv_scale"] = draw.uniform(low=0.001, high=0.01)  # scales this small make some values saturate
        return arguments

    return make


@recipe
def _groups(
    tokens: int,
    pages: int,
    page_size: int,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 0,
    slot_dtype: torch.dtype = torch.int64,
    fused: bool = True,
    unusual: bool = False,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments whose caches are views of pages of bytes. The groups of 128 elements of a latent have very different
    magnitudes, and so very different scales.

    With ``unusual``, the first four tokens hold a NaN, an infinity, zeros, and subnormal numbers.
    """

    def make(draw: Draw) -> dict[str, Any]:
        arguments = _tokens(draw, tokens, pages * page_size, kv_lora_rank, rope_dim, dtype, padding, slot_dtype, fused)
        latent = arguments["latent"]
        sizes = draw.normal(tokens, kv_lora_rank // 128, scale=2.0).exp().repeat_interleave(128, dim=1)
        latent.copy_(latent.float() * sizes)
        if unusual:
            latent[0, 3], latent[1, 5], latent[2], latent[3] = torch.nan, torch.inf, 0.0, torch.finfo(dtype).smallest_normal / 4
        packed = draw.integers(0, 120, pages, page_size, kv_lora_rank // 32 * 33 + 2 * rope_dim, dtype=torch.uint8)
        return {**arguments, **mla_cache_views(packed, kv_lora_rank, rope_dim, dtype)._asdict()}

    return make


@store_mla_kv_cache.cases
def _() -> list[Case]:
    fp8 = torch.float8_e4m3fn
    deepseek_v3: tuple[int, int, int] = (64, 512, 64)
    return [
        Case("one token, float32", _inputs(1, 2, 4, 8, 4, torch.float32)),
        Case("deepseek-v3 decode 16, padded by 5", _inputs(16, 3, *deepseek_v3, padding=5)),
        Case("page size 1, int32 slots, odd widths 57 and 6", _inputs(9, 12, 1, 57, 6, torch.float16, slot_dtype=torch.int32)),
        Case("float64", _inputs(5, 2, 4, 16, 4, torch.float64)),
        Case("no rotary part", _inputs(5, 2, 4, 16, 0)),
        Case("fp8 cache, no scale", _inputs(12, 4, 16, 64, 16, cache_dtype=fp8, padding=2)),
        Case("deepseek-v3 decode 9, fp8 cache with a scale", _inputs(9, 2, *deepseek_v3, cache_dtype=fp8, scaled=True)),
        Case("e5m2 cache, float16", _inputs(12, 4, 16, 40, 8, torch.float16, torch.float8_e5m2, scaled=True)),
        Case("e4m3fnuz cache, float32, not fused", _inputs(5, 2, 4, 20, 4, torch.float32, torch.float8_e4m3fnuz, fused=False)),
        Case("fp8 copied", _inputs(6, 3, 4, 32, 16, fp8)),
        Case("every token is padding", _inputs(4, 2, 4, 16, 4, padding=4)),
        Case("no tokens", _inputs(0, 2, 4, 16, 4, fused=False)),
        Case("the whole cache", _inputs(64, 4, 16, 32, 8, torch.float32)),
        Case("deepseek-v3.2 decode 9, a scale for each 128, padded by 2", _groups(9, 3, 64, padding=2)),
        Case(
            "a scale for each 128, float16, page size 1, int32 slots",
            _groups(7, 9, 1, 384, 6, torch.float16, slot_dtype=torch.int32),
        ),
        Case("a scale for each 128, NaN, infinity, zeros and tiny numbers", _groups(6, 2, 4, 256, 4, unusual=True)),
        Case("a scale for each 128, float16, NaN and others", _groups(6, 2, 4, 128, 4, torch.float16, unusual=True)),
        Case("a scale for each 128, no rotary part, every token is padding", _groups(4, 2, 4, 128, 0, padding=4)),
        Case("a scale for each 128, no tokens", _groups(0, 2, 4, 128, 4, fused=False)),
        Case("deepseek-v3 decode 128", _inputs(128, 2048, *deepseek_v3), large=True),
        Case("deepseek-v3 prefill 16384", _inputs(16384, 2048, *deepseek_v3), large=True),
        Case("deepseek-v3 prefill 16384, fp8 cache", _inputs(16384, 2048, *deepseek_v3, cache_dtype=fp8, scaled=True), large=True),
        Case("deepseek-v3 prefill 65536", _inputs(65536, 2048, *deepseek_v3), large=True),
        Case("deepseek-v3.2 decode 128, a scale for each 128", _groups(128, 2048, 64), large=True),
        Case("deepseek-v3.2 prefill 16384, a scale for each 128", _groups(16384, 2048, 64), large=True),
    ]


@store_mla_kv_cache.vary
def _(
    variation: Variation,
    latent: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> dict[str, Tensor]:
    if variation.want is Want.CAPTURED:
        caches = {"kv_cache": kv_cache, "kv_scale_cache": kv_scale_cache, "rope_cache": rope_cache}
        return captured_slots(variation, slot_mapping, **{name: cache for name, cache in caches.items() if cache is not None})
    if variation.want is Want.UNUSED:
        return unwritten(slot_mapping, latent=latent, k_rope=k_rope)
    return {}


@store_mla_kv_cache.work
def _(slot_mapping: Tensor) -> dict[str, list[int]]:
    return padding_of(slot_mapping)


@store_mla_kv_cache.cost
def _(
    latent: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None,
    kv_scale_cache: Tensor | None,
    rope_cache: Tensor | None,
) -> Cost:
    if kv_scale_cache is not None:
        written = sum(nbytes(cache[:1, :1]) for cache in (kv_cache, kv_scale_cache, rope_cache) if cache is not None)
        return Cost(flops=3.0 * latent.numel(), bytes=float(nbytes(latent, k_rope, slot_mapping) + len(latent) * written))
    elements = latent.numel() + k_rope.numel()
    stored = elements * kv_cache.element_size()
    scaled = elements if kv_scale is not None else 0
    return Cost(flops=1.0 * scaled, bytes=nbytes(latent, k_rope, slot_mapping, kv_scale) + stored)
