"""Selects the functions that run a layer's latent attention, as `attention.serving` does for other attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_vllm.attention.serving import NOBODY, PAGE_SIZES, Answer, answer, packages


@dataclass(frozen=True)
class LatentShape:
    """The properties that decide which kernels are eligible for a layer.

    Attributes:
        heads: number of query heads on this rank.
        kv_lora_rank, rope_dim: widths of a cached latent and of its rotary part.
        dtype: dtype of queries and outputs.
        cache_dtype: dtype of the cache.
        device: the layer's device.
    """

    heads: int
    kv_lora_rank: int
    rope_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class PrefillShape:
    """The properties that decide which kernels are eligible for a model's prompts. ``head_dim`` and ``v_head_dim`` are the widths
    of keys and values that are expanded from latents.
    """

    heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LatentServing:
    """The functions that run a layer's latent attention.

    Attributes:
        decode: a package's `mla_decode_with_kvcache`.
        extend: the package's `mla_extend_with_kvcache`.
        store: the package's `store_mla_kv_cache`. None if the package lacks it; vLLM's own function then writes the cache.
        kernels: the names of the kernels that are selected for a call with one token.
    """

    decode: Callable[..., Tensor]
    extend: Callable[..., Tensor]
    store: Callable[..., None] | None
    kernels: tuple[str, ...]


@functools.cache
def find_latent(shape: LatentShape, package: str | None = None) -> LatentServing:
    """Finds the functions that run a layer's latent attention.

    Args:
        shape: the layer's properties.
        package: the package to use; None for the core if it is installed, otherwise the first wheel with eligible kernels.

    Raises:
        NotServedError: no package has eligible kernels.
    """
    reasons = []
    for module in packages(package):
        decode, extend, store = (_asked(module, name, arguments) for name, arguments in _calls(shape).items())
        if decode.kernel and extend.kernel:
            kernels = tuple(part.kernel for part in (decode, extend, store) if part.kernel)
            return LatentServing(decode.function, extend.function, store.function, kernels)
        reasons += [f"{module.__name__}: {part.reason}" for part in (decode, extend) if part.reason]
    raise _not_served(shape, reasons)


@functools.cache
def find_prefill(shape: PrefillShape, package: str | None = None) -> tuple[Callable[..., Any], str]:
    """Finds `mla_prefill` for a model. Returns the function, and the name of the kernel that is selected for one new token and keys
    of an earlier chunk. See `find_latent`.
    """
    make = functools.partial(torch.empty, device=shape.device, dtype=shape.dtype)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=shape.device)
    q, k = (make(1, shape.heads, shape.head_dim) for _ in range(2))
    given = {"q": q, "k": k, "v": make(1, shape.heads, shape.v_head_dim), "cu_seqlens": offsets, "return_lse": True}
    reasons = []
    for module in packages(package):
        # Attention within a whole prompt is causal. All keys of an earlier chunk are visible.
        prompt = _asked(module, "mla_prefill", {**given, "is_causal": True})
        chunk = _asked(module, "mla_prefill", {**given, "cu_seqlens_kv": offsets, "is_causal": False})
        if prompt.kernel and chunk.kernel:
            return chunk.function, chunk.kernel
        reasons += [f"{module.__name__}: {part.reason}" for part in (prompt, chunk) if part.reason]
    raise _not_served(shape, reasons)


def _asked(module: Any, name: str, arguments: dict[str, Any]) -> Answer:
    function = getattr(module, name, NOBODY)
    return Answer(reason=f"has no {name}") if function is NOBODY else answer(function, arguments)


def _not_served(shape: object, reasons: list[str]) -> NotServedError:
    text = "\n".join(reasons or ["no package with kernels is installed"])
    return NotServedError(f"no kernel serves latent attention of {shape}\n{text}")


def _calls(shape: LatentShape) -> dict[str, dict[str, Any]]:
    """Returns the arguments of a call of each function, with one sequence, one new token and a cache of one page."""
    make = functools.partial(torch.empty, device=shape.device)
    ints = functools.partial(torch.tensor, dtype=torch.int32, device=shape.device)
    page_size, width = PAGE_SIZES[0], shape.kv_lora_rank + shape.rope_dim
    scale = None if shape.cache_dtype == shape.dtype else torch.ones((), dtype=torch.float32, device=shape.device)
    cache = {"kv_cache": make(1, page_size, width, dtype=shape.cache_dtype), "kv_scale": scale}
    read = {
        **cache,
        "q": make(1, shape.heads, width, dtype=shape.dtype),
        "page_table": ints([[0]]),
        "cache_seqlens": ints([1]),
        "max_seqlen_k": page_size,
        "kv_lora_rank": shape.kv_lora_rank,
        "softmax_scale": 1.0,
    }
    latent, k_rope = make(1, width, dtype=shape.dtype).split([shape.kv_lora_rank, shape.rope_dim], -1)
    return {
        "mla_decode_with_kvcache": read,
        "mla_extend_with_kvcache": {**read, "cu_seqlens_q": ints([0, 1]), "cu_seqlens_kv": None, "max_seqlen_q": 1},
        "store_mla_kv_cache": {**cache, "latent": latent, "k_rope": k_rope, "slot_mapping": torch.zeros_like(ints([0]))},
    }
