"""Code that the engines' plugins share for latent attention (MLA): properties of layers, and calls that select kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LatentShape:
    """The properties that decide which kernels are eligible for a layer's attention to cached latents.

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

    @property
    def scaled(self) -> bool:
        """Whether the cache holds quantised latents, which have a scale."""
        return self.cache_dtype != self.dtype

    def calls(self, page_size: int) -> dict[str, dict[str, Any]]:
        """Returns the arguments of a call of each operator, with one sequence, one new token and a cache of one page.

        Args:
            page_size: number of tokens per page.

        Returns:
            The arguments, by operator: decode, extend, and the write of the cache.
        """
        make = functools.partial(torch.empty, device=self.device)
        ints = functools.partial(torch.tensor, dtype=torch.int32, device=self.device)
        width = self.kv_lora_rank + self.rope_dim
        scale = torch.ones((), dtype=torch.float32, device=self.device) if self.scaled else None
        cache = {"kv_cache": make(1, page_size, width, dtype=self.cache_dtype), "kv_scale": scale}
        read = {
            **cache,
            "q": make(1, self.heads, width, dtype=self.dtype),
            "page_table": ints([[0]]),
            "cache_seqlens": ints([1]),
            "max_seqlen_k": page_size,
            "kv_lora_rank": self.kv_lora_rank,
            "softmax_scale": 1.0,
        }
        latent, k_rope = make(1, width, dtype=self.dtype).split([self.kv_lora_rank, self.rope_dim], -1)
        return {
            "mla_decode_with_kvcache": read,
            "mla_extend_with_kvcache": {**read, "cu_seqlens_q": ints([0, 1]), "cu_seqlens_kv": None, "max_seqlen_q": 1},
            "store_mla_kv_cache": {**cache, "latent": latent, "k_rope": k_rope, "slot_mapping": torch.zeros_like(ints([0]))},
        }


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

    def call(self) -> dict[str, Any]:
        """Returns the arguments of a call of `mla_prefill` with one token."""
        make = functools.partial(torch.empty, device=self.device, dtype=self.dtype)
        q, k = (make(1, self.heads, self.head_dim) for _ in range(2))
        offsets = torch.tensor([0, 1], dtype=torch.int32, device=self.device)
        return {"q": q, "k": k, "v": make(1, self.heads, self.v_head_dim), "cu_seqlens": offsets, "is_causal": True}
