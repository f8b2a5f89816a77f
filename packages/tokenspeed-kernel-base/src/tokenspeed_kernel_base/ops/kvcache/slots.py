"""Code shared by operators that write to the paged cache. Slot ``page * page_size + offset`` is position ``offset`` of ``page``."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import absent_ids, nbytes, poisoned
from tokenspeed_kernel_base.checks import FP8, INTS, Checker
from tokenspeed_kernel_base.ops.quantization.encodings import encode_fp8
from tokenspeed_kernel_base.variation import Variation

# Largest size, in bytes, of a cache that is drawn for a captured call. A cache is larger only if its tokens need more pages.
_REPLAYED_BYTES = 1 << 30


def store_slots(cache: Tensor, values: Tensor, slot_mapping: Tensor, scale: Tensor | None = None) -> None:
    """Writes tokens to their slots, and skips tokens with negative slots. Does not synchronise with the device.

    Args:
        cache: ``[pages, page_size, kv_heads, head_dim]``, written in place.
        values: ``[tokens, kv_heads, head_dim]``, quantised to the cache's 8-bit float if the cache has another dtype.
        slot_mapping: int32 or int64 ``[tokens]``.
        scale: float32 ``[]``, ``[1]`` or ``[kv_heads]``: divisor of the values before the quantisation.
    """
    if not values.numel() or not cache.numel():
        return
    if cache.dtype != values.dtype:
        wide = values.double() if values.dtype == torch.float64 else values.float()
        values = encode_fp8(wide if scale is None else wide / scale.reshape(-1, 1), cache.dtype)
    if cache.dtype in FP8:  # on some devices PyTorch indexes fp8 only as uint8
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    # Selecting the written tokens by a mask would synchronise with the device. Instead each skipped token repeats the write of
    # the first written token. If no token is written, all repeat the content of slot 0.
    written = slot_mapping >= 0
    source = torch.where(written, torch.arange(len(written), device=written.device), written.int().argmax())
    slots = slot_mapping.long()[source].clamp(min=0)
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    cache[page, offset] = torch.where(written.any(), values[source], cache[page, offset])


def store_latents(kv_cache: Tensor, latent: Tensor, k_rope: Tensor, slot_mapping: Tensor, scale: Tensor | None = None) -> None:
    """Writes latents and rotary parts to a cache, as `store_slots` does.

    latent is ``[tokens, kv_lora_rank]``, k_rope ``[tokens, rope_dim]``, kv_cache
    ``[pages, page_size, kv_lora_rank + rope_dim]``."""
    store_slots(kv_cache.unsqueeze(2), torch.cat((latent, k_rope), dim=-1).unsqueeze(1), slot_mapping, scale)


def padding_of(slot_mapping: Tensor) -> dict[str, list[int]]:
    """For ``work`` hooks: returns the number of tokens that are not written."""
    return {"padding": [int((slot_mapping < 0).sum())]}


def unwritten(slot_mapping: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """For ``vary`` hooks: changes the values ``[tokens, ...]`` of unwritten tokens to NaN, and their slots to other negative
    numbers.
    """
    absent = slot_mapping < 0
    return {"slot_mapping": absent_ids(slot_mapping, absent), **{name: poisoned(value, absent) for name, value in values.items()}}


def captured_slots(variation: Variation, slot_mapping: Tensor, **caches: Tensor) -> dict[str, Tensor]:
    """Draws slots, padding and caches for a captured call.

    The caches have the captured page shape and dtype, but fewer pages if they would take too much memory."""
    draw, tokens = variation.draw, len(slot_mapping)
    pages, page_size = next(iter(caches.values())).shape[:2]
    largest = max(nbytes(cache) for cache in caches.values())
    needed, fitting = -(-tokens // page_size), _REPLAYED_BYTES // (largest // max(pages, 1) or 1)
    pages = min(pages, max(needed, fitting))
    slots = draw.permutation(pages * page_size, slot_mapping.dtype)[:tokens].clone()
    slots[draw.permutation(tokens)[: variation.values("padding", 1, 0)[0]]] = -1
    return {"slot_mapping": slots, **{n: draw.normal(pages, page_size, *c.shape[2:], dtype=c.dtype) for n, c in caches.items()}}


def check_write(
    check: Checker,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Checks shapes and dtypes of v, the caches, slots and scales. Call this function after the check of k's shape."""
    check.tensor("v", v, "tokens kv_heads v_head_dim", k.dtype)
    check.tensor("k_cache", k_cache, "pages page_size kv_heads head_dim", {k.dtype} | (FP8 if k.dtype not in FP8 else set()))
    check.require(check["page_size"] > 0, "k_cache", "of a page_size > 0", str(list(k_cache.shape)))
    check.tensor("v_cache", v_cache, "pages page_size kv_heads v_head_dim", k_cache.dtype)
    check.tensor("slot_mapping", slot_mapping, "tokens", INTS)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(check, name, scale, "k", k, "k_cache", k_cache)


def check_latent_write(check: Checker, latent: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None) -> None:
    """Checks the latent cache, the slots and the scale of a store. Call this function after the checks of latent and k_rope."""
    check.require(check["kv_lora_rank"] > 0, "latent", "of a kv_lora_rank > 0", str(list(latent.shape)))
    check.bind("latent_dim", check["kv_lora_rank"] + check["rope_dim"], "latent and k_rope together")
    check.tensor("kv_cache", kv_cache, "pages page_size latent_dim", {latent.dtype} | (FP8 if latent.dtype not in FP8 else set()))
    check.require(check["page_size"] > 0, "kv_cache", "of a page_size > 0", str(list(kv_cache.shape)))
    check.tensor("slot_mapping", slot_mapping, "tokens", INTS)
    check_scale(check, "kv_scale", kv_scale, "latent", latent, "kv_cache", kv_cache)


def check_scale(check: Checker, name: str, scale: Tensor | None, source: str, x: Tensor, target: str, cache: Tensor) -> None:
    """Checks the scale by which values are divided before they are stored: one scale for all heads, or one for each KV head."""
    if scale is None:
        return
    check.require(cache.dtype != x.dtype, name, f"None, because {target} has {source}'s dtype", scale)
    check.dtype(name, scale, torch.float32)
    kv_heads = check.sizes().get("kv_heads", 1)
    fits = scale.dim() == 0 or (scale.dim() == 1 and len(scale) in (1, kv_heads))
    allowed = "[] or [1]" if "kv_heads" not in check.sizes() else f"[], [1] or [kv_heads] = [{kv_heads}]"
    check.require(fits, name, f"of shape {allowed}", str(list(scale.shape)))


def check_scale_values(check: Checker, **scales: Tensor | None) -> None:
    """Checks scales in host memory: they are divisors, so they must be finite and positive."""
    for name, scale in scales.items():
        if scale is not None and not ((scale > 0) & scale.isfinite()).all():
            check.fail(name, "finite and more than 0", str(scale.tolist()))


def check_slots(check: Checker, slot_mapping: Tensor | None, cache: Tensor | None) -> None:
    """Checks slots in host memory: each slot must lie in the cache, and none may occur twice."""
    if slot_mapping is None or cache is None or not slot_mapping.numel():
        return
    slots = cache.shape[0] * cache.shape[1]
    largest = int(slot_mapping.max())
    if largest >= slots:
        token = int(slot_mapping.argmax())
        check.fail("slot_mapping", f"below pages * page_size = {slots} (negative: not written)", f"{largest} for token {token}")
    ordered = slot_mapping.sort().values
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if twice.any():
        slot = int(ordered[1:][twice][0])
        tokens = (slot_mapping == slot).nonzero().flatten().tolist()
        check.fail("slot_mapping", "of distinct slots (negative: not written)", f"slot {slot} for tokens {tokens}")
