"""Tests the kernels that write the MLA cache beyond the shared cases: layouts and odd sizes."""

from __future__ import annotations

import math

import pytest
import torch

from tokenspeed_kernel import apply_rope_mla, store_mla_kv_cache
from tokenspeed_kernel.workbench.numerics.compare import same_bits
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
TOKENS, POSITIONS = 11, 30
FP8 = torch.float8_e4m3fn
# (kv_lora_rank, rope_dim): powers of two and other sizes; either may be the larger one.
SIZES = [(512, 64), (40, 6), (3, 2), (16, 70), (1030, 64)]


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def _slots(pages: int, page_size: int) -> torch.Tensor:
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(pages))[:TOKENS]
    slots[3::4] = -1 - slots[3::4]  # any negative value
    return slots.to(DEVICE)


def _caches(width: int, pages: int, page_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns caches of three layouts, with NaN in every slot."""
    filled = torch.full((pages, page_size, width, 2), math.nan, device=DEVICE).to(dtype)
    return [filled[..., 0].contiguous(), filled[..., 0], filled[..., 0].transpose(0, 1).contiguous().transpose(0, 1)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_stores_to_caches_of_any_layout(sizes: tuple[int, int], page_size: int) -> None:
    rank, rope = sizes
    pages = -(-TOKENS // page_size) + 1
    slots = _slots(pages, page_size)
    both = _normal(TOKENS, rank + rope)
    kinds = {
        "fused": both.split((rank, rope), 1),
        "elements apart": both.t().contiguous().t().split((rank, rope), 1),
    }
    for cache_dtype, scale in ((torch.float32, None), (FP8, None), (FP8, torch.tensor([0.003], device=DEVICE))):
        for kind, (latent, k_rope) in kinds.items():
            for cache in _caches(rank + rope, pages, page_size, cache_dtype):
                wanted = cache.clone()
                store_mla_kv_cache(latent, k_rope, cache, slots.int(), scale, override="triton_store_mla_kv_cache")
                store_mla_kv_cache(latent, k_rope, wanted, slots, scale, override="reference_store_mla_kv_cache")
                assert same_bits(cache.contiguous(), wanted.contiguous()), (kind, cache_dtype)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rotates_and_stores_from_any_layout(sizes: tuple[int, int], heads: int, interleaved: bool) -> None:
    rank, rope = sizes
    slots = _slots(4, 4)
    table = _normal(POSITIONS, rope + 3)[:, :rope]
    positions = torch.randint(0, POSITIONS, (TOKENS,), generator=torch.Generator().manual_seed(rank)).to(DEVICE)
    q = _normal(TOKENS, heads, rank + rope)
    kv = _normal(TOKENS, rank + rope)
    apart = q[..., :rank].transpose(0, 1).contiguous().transpose(0, 1), q[..., rank:].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for q_latent, q_rope in ((q[..., :rank], q[..., rank:]), apart):
        for cache in _caches(rank + rope, 4, 4, torch.float32):
            wanted_cache = cache.clone()
            arguments = (q_latent, q_rope, kv[:, :rank], kv[:, rank:], positions, table)
            strided = torch.empty(TOKENS, rank + rope, heads, device=DEVICE).transpose(1, 2)
            got = apply_rope_mla(*arguments, cache, slots, interleaved, out=strided, override="triton_apply_rope_mla")
            assert got is strided
            wanted = apply_rope_mla(*arguments, wanted_cache, slots, interleaved, override="reference_apply_rope_mla")
            torch.testing.assert_close(got, wanted)
            assert torch.equal(cache.isnan(), wanted_cache.isnan())
            torch.testing.assert_close(cache, wanted_cache, equal_nan=True)
