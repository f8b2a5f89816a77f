"""Tests the kernels of the MLA cache with one scale for each 128 latents, beyond the shared cases: layouts, split-KV, and attention
to entries that the store operator wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics.compare import same_bits
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
PAGES, PAGE_SIZE = 5, 24
SLOTS = PAGES * PAGE_SIZE
BF16 = torch.bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, BF16)


def views_of(rank: int, rope: int, layout: str) -> dict[str, Tensor]:
    """Returns the three views of a cache in a layout. The cache is filled with bytes of 0xFF, which are NaN in every view."""
    width = rank + rank // 32 + 2 * rope
    if layout == "pages of bytes":
        return tk.mla_cache_views(
            torch.full((PAGES, PAGE_SIZE, width), 0xFF, dtype=torch.uint8, device=DEVICE), rank, rope
        )._asdict()
    if layout == "a layer of several":
        layers = torch.full((PAGE_SIZE, PAGES, 2, width + 20), 0xFF, dtype=torch.uint8, device=DEVICE)
        return tk.mla_cache_views(layers[:, :, 1, 16 : 16 + width].transpose(0, 1), rank, rope)._asdict()
    parts = {"kv_cache": (rank, torch.float8_e4m3fn), "kv_scale_cache": (rank // 128, torch.float32), "rope_cache": (rope, BF16)}
    return {
        name: torch.full((columns * dtype.itemsize, PAGES, PAGE_SIZE), 0xFF, dtype=torch.uint8, device=DEVICE)
        .view(-1)
        .view(dtype)
        .view(columns, PAGES, PAGE_SIZE)
        .permute(1, 2, 0)
        for name, (columns, dtype) in parts.items()
    }


LAYOUTS = ("pages of bytes", "a layer of several", "elements apart")


def filled(rank: int, rope: int, layout: str, slots: Tensor, solution: str) -> dict[str, Tensor]:
    cache, both = views_of(rank, rope, layout), normal(len(slots), rank + rope)
    tk.store_mla_kv_cache(both[:, :rank], both[:, rank:], slot_mapping=slots, **cache, solution=solution)
    return cache


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (384, 6), (128, 0)], ids=str)
def test_layouts(rank: int, rope: int, layout: str) -> None:
    """Stores to every second slot of a cache. The cache must be bitwise equal to the reference's, and attention to these slots must
    agree with the reference."""
    slots = torch.arange(0, SLOTS, 2, device=DEVICE, dtype=torch.int32).flip(0)
    slots[::5] = -3
    cache, wanted = (filled(rank, rope, layout, slots, solution) for solution in ("triton", "reference"))
    for name, view in cache.items():
        assert same_bits(view.contiguous(), wanted[name].contiguous()), name
    held = slots[slots >= 0]
    indices = torch.stack([held.roll(5 * i)[:40] for i in range(3)])
    indices[1, 7] = -1
    options: dict[str, Any] = {"kv_lora_rank": rank, "softmax_scale": 0.05, "return_lse": True}
    q = normal(3, 5, rank + rope)
    got, lse = tk.mla_sparse_with_kvcache(q, indices=indices, **options, **cache, solution="triton")
    right, right_lse = tk.mla_sparse_with_kvcache(q, indices=indices, **options, **cache, solution="reference")
    torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, right_lse, rtol=2e-3, atol=2e-3)


def test_split_kv_follows_each_tokens_key_count() -> None:
    cache = filled(256, 16, "pages of bytes", torch.arange(SLOTS, device=DEVICE), "triton")
    indices = torch.arange(1200, device=DEVICE, dtype=torch.int32).view(2, 600) % SLOTS
    options: dict[str, Any] = {"kv_lora_rank": 256, "softmax_scale": 0.05, "indices": indices}
    q, lengths = normal(2, 5, 272), torch.tensor([600, 70], dtype=torch.int32, device=DEVICE)
    got = tk.mla_sparse_with_kvcache(q, topk_length=lengths, **options, **cache, solution="triton")
    right = tk.mla_sparse_with_kvcache(q, topk_length=lengths, **options, **cache, solution="reference")
    torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window_left", [-1, 30])
def test_dense_attention_is_that_to_all_slots_of_a_sequence(window_left: int) -> None:
    cache = filled(256, 16, "pages of bytes", torch.arange(SLOTS, device=DEVICE), "triton")
    table = torch.tensor([[3, 0, 4], [2, 1, -1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([61, 40], dtype=torch.int32, device=DEVICE)
    q = normal(2, 5, 272)
    options: dict[str, Any] = {"kv_lora_rank": 256, "softmax_scale": 0.05}
    got = tk.mla_decode_with_kvcache(
        q, page_table=table, cache_seqlens=lengths, max_seqlen_k=72, window_left=window_left, **options, **cache, solution="triton"
    )
    positions = torch.arange(72, device=DEVICE).expand(2, -1)
    seen = positions < lengths.unsqueeze(1)
    if window_left >= 0:
        seen = seen & (positions >= lengths.unsqueeze(1) - 1 - window_left)
    chosen = torch.where(seen, table.repeat_interleave(PAGE_SIZE, 1) * PAGE_SIZE + positions % PAGE_SIZE, -1).int()
    right = tk.mla_sparse_with_kvcache(q, indices=chosen, **options, **cache, solution="reference")
    torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2)


def test_a_kernel_that_is_silent_does_not_have_it() -> None:
    """A kernel that does not declare both the cache's formats and its trait must not be eligible."""
    from tokenspeed_kernel.triton.attention._formats import LATENT, LATENT_GROUPS
    from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel

    cache = filled(128, 0, "pages of bytes", torch.arange(SLOTS, device=DEVICE), "triton")
    indices = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    call = {"q": normal(1, 5, 128), "indices": indices, "kv_lora_rank": 128, "softmax_scale": 0.05, **cache}
    served = KernelRegistry.get().get_impl("triton_mla_sparse_with_kvcache")
    for name, signatures in (("of other formats", LATENT), ("silent of the trait", LATENT_GROUPS)):
        register_kernel(
            "attention", "mla_sparse_with_kvcache", name=name, solution="test", signatures=signatures, traits={}, priority=19
        )(served)
        try:
            explained = tk.mla_sparse_with_kvcache.explain(**call)
        finally:
            KernelRegistry.get().unregister(name)
        assert explained.chosen is not None
        assert explained.chosen.name == "triton_mla_sparse_with_kvcache", str(explained)
