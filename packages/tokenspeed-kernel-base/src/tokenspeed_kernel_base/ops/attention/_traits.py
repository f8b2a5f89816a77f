"""The traits of attention operators, under one set of names."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_base.traits import TraitKind

# The traits that the functions below return, with the type of each.
SOFTMAX_KINDS: dict[str, TraitKind] = {"head_dim": int, "v_head_dim": int, "gqa_ratio": int, "logit_cap": bool, "return_lse": bool}
WINDOW_KINDS: dict[str, TraitKind] = {"sliding_window": bool, "window_left": int}
WINDOW_AND_SINK_KINDS: dict[str, TraitKind] = {**WINDOW_KINDS, "sinks": bool}
SCALE_KINDS: dict[str, TraitKind] = {"scaled": bool}
CACHE_KINDS: dict[str, TraitKind] = {"page_size": int, **SCALE_KINDS}
LATENT_KINDS: dict[str, TraitKind] = {**CACHE_KINDS, "grouped_scales": bool}


def softmax_traits(q: Tensor, kv_heads: int, v_head_dim: int, logit_cap: float, return_lse: bool) -> dict[str, object]:
    """Returns the traits that all attention operators have. ``gqa_ratio`` is the GQA group size: query heads for each KV head."""
    return {
        "head_dim": q.shape[-1],
        "v_head_dim": v_head_dim,
        "gqa_ratio": q.shape[1] // kv_heads,
        "logit_cap": logit_cap > 0,
        "return_lse": return_lse,
    }


def window_traits(window_left: int) -> dict[str, object]:
    """Returns the traits of operators with windows; ``window_left`` is present only if there is a window."""
    return {"sliding_window": True, "window_left": window_left} if window_left >= 0 else {"sliding_window": False}


def window_and_sink_traits(window_left: int, sinks: Tensor | None) -> dict[str, object]:
    """Returns the traits of operators with windows and sinks."""
    return {**window_traits(window_left), "sinks": sinks is not None}


def cache_traits(cache: Tensor, *scales: Tensor | None) -> dict[str, object]:
    """Returns the traits of a paged cache: its page size, and whether an operand has a scale."""
    return {"page_size": cache.shape[1], **scale_traits(*scales)}


def latent_traits(cache: Tensor, kv_scale_cache: Tensor | None, *scales: Tensor | None) -> dict[str, object]:
    """Returns the traits of a paged cache of latents. ``grouped_scales``: whether each 128 elements of a latent have a scale, and
    the rotary parts lie in a separate cache."""
    return {**cache_traits(cache, *scales), "grouped_scales": kv_scale_cache is not None}


def scale_traits(*scales: Tensor | None) -> dict[str, object]:
    """Returns the trait ``scaled``: whether at least one operand has a scale."""
    return {"scaled": any(scale is not None for scale in scales)}
