"""What operators that write to the paged cache share. Slot ``page * page_size + offset`` is position ``offset`` of a page."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import nbytes
from tokenspeed_kernel_base.checks import FP8, INTS, Checker
from tokenspeed_kernel_base.ops.quantization.encodings import encode_fp8
from tokenspeed_kernel_base.variation import Variation

# A cache that stands for a captured one has as many pages, or as many as fit into this.
_REPLAYED_BYTES = 1 << 30


def store_slots(cache: Tensor, values: Tensor, slot_mapping: Tensor, scale: Tensor | None = None) -> None:
    """Writes tokens to their slots, and leaves out those of negative slots. Does not synchronise with the device.

    Args:
        cache: ``[pages, page_size, kv_heads, head_dim]``, written in place.
        values: ``[tokens, kv_heads, head_dim]``, cast to an 8-bit float where the cache has another dtype.
        slot_mapping: int32 or int64 ``[tokens]``.
        scale: float32 ``[]``, ``[1]`` or ``[kv_heads]``: what values are divided by before that cast.
    """
    if not values.numel() or not cache.numel():
        return
    if cache.dtype != values.dtype:
        wide = values.double() if values.dtype == torch.float64 else values.float()
        values = encode_fp8(wide if scale is None else wide / scale.reshape(-1, 1), cache.dtype)
    if cache.dtype in FP8:  # not every backend can index these but as bytes
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    # Selecting the written tokens would wait for their number. Instead every other token repeats the write of the first written
    # one; if there is none, all write back what slot 0 holds.
    written = slot_mapping >= 0
    source = torch.where(written, torch.arange(len(written), device=written.device), written.int().argmax())
    slots = slot_mapping.long()[source].clamp(min=0)
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    cache[page, offset] = torch.where(written.any(), values[source], cache[page, offset])


def padding_of(slot_mapping: Tensor) -> dict[str, list[int]]:
    """How many tokens are not written, for a capture."""
    return {"padding": [int((slot_mapping < 0).sum())]}


def captured_slots(variation: Variation, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> dict[str, Tensor]:
    """A slot or padding for each token of a captured call, and caches like its own, of fewer pages where those would take too
    much memory."""
    draw, tokens = variation.draw, len(slot_mapping)
    pages, page_size, *token = k_cache.shape
    needed, fitting = -(-tokens // page_size), _REPLAYED_BYTES // (nbytes(k_cache) // max(pages, 1) or 1)
    pages = min(pages, max(needed, fitting))
    slots = draw.permutation(pages * page_size, slot_mapping.dtype)[:tokens].clone()
    slots[draw.permutation(tokens)[: variation.values("padding", 1, 0)[0]]] = -1
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    return {"slot_mapping": slots, **{n: draw.normal(pages, page_size, *token, dtype=c.dtype) for n, c in caches.items()}}


def check_write(check: Checker, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Checks shapes and dtypes of keys and values and where they are written to. k's own shape has been checked."""
    check.tensor("v", v, "tokens kv_heads head_dim", k.dtype)
    check.tensor("k_cache", k_cache, "pages page_size kv_heads head_dim", {k.dtype} | (FP8 if k.dtype not in FP8 else set()))
    check.require(check["page_size"] > 0, "k_cache", "of a page_size > 0", str(list(k_cache.shape)))
    check.tensor("v_cache", v_cache, "pages page_size kv_heads head_dim", k_cache.dtype)
    check.tensor("slot_mapping", slot_mapping, "tokens", INTS)


def check_slots(check: Checker, slot_mapping: Tensor | None, cache: Tensor | None) -> None:
    """Checks slots that lie in host memory: each within the cache, none twice."""
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
