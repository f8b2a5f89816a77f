"""Tests the RoPE kernel beyond the shared cases: all combinations of options, and layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import apply_rope
from tokenspeed_kernel.workbench.numerics.compare import same_bits
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
TOKENS, POSITIONS = 7, 50
# (heads, kv_heads, head_dim, rotary_dim): full and partial rotation, powers of two and other sizes, one head and many.
SIZES = [
    (1, 1, 2, 2),
    (64, 8, 64, 64),
    (5, 3, 40, 40),
    (8, 1, 192, 64),
    (2, 2, 57, 30),
    (128, 1, 64, 64),
    (3, 1, 256, 6),
    (2, 1, 4096, 4000),
]


def _draw(heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads * head_dim)
    qkv = torch.randn(TOKENS, heads + 2 * kv_heads, head_dim, generator=generator)
    table = torch.randn(POSITIONS, rotary_dim + 3, generator=generator)[:, :rotary_dim]
    return qkv.to(DEVICE), torch.randint(0, POSITIONS, (TOKENS,), generator=generator).to(DEVICE), table.to(DEVICE)


def _split(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_in_place_and_strided(sizes: tuple[int, int, int, int], interleaved: bool) -> None:
    heads, kv_heads = sizes[:2]
    qkv, positions, table = _draw(*sizes)
    q, k, _ = _split(qkv, heads, kv_heads)
    expected = list(apply_rope(q, k, positions, table, interleaved, override="reference_apply_rope"))
    across = qkv.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # the last axis is not contiguous
    for fused in (qkv, across):
        got = apply_rope(*_split(fused, heads, kv_heads)[:2], positions.int(), table, interleaved, override="triton_apply_rope")
        torch.testing.assert_close(list(got), expected)
    strided_table = table.T.contiguous().T
    strided_positions = torch.stack((positions, positions), dim=1)[:, 0]
    for fused in (qkv.clone(), across):
        q, k, v = _split(fused, heads, kv_heads)
        kept = v.clone()
        got = apply_rope(q, k, strided_positions, strided_table, interleaved, q_out=q, k_out=k, override="triton_apply_rope")
        assert got[0] is q
        assert got[1] is k
        torch.testing.assert_close(list(got), expected)
        assert torch.equal(v, kept)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
        (torch.float16, torch.float8_e4m3fnuz),
    ],
    ids=str,
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES[:5], ids=str)
def test_the_cache_gets_what_is_returned(
    sizes: tuple[int, int, int, int], interleaved: bool, cache_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    """Caches of two layouts must hold exactly what `store_kv_cache` writes for the rotated keys. All other slots must be
    unchanged."""
    heads, kv_heads, head_dim, _ = sizes
    qkv, positions, table = _draw(*sizes)
    q, k, v = _split(qkv.to(dtype), heads, kv_heads)
    slots = torch.tensor([5, -1, 0, 8, -7, 3, 11], device=DEVICE)
    caches = torch.full((4, 2, 3, kv_heads, head_dim), math.nan, device=DEVICE).to(cache_dtype or dtype)
    for layout in (caches.transpose(0, 1), caches.view(4, 2, kv_heads, 3, head_dim).permute(1, 0, 3, 2, 4)):
        k_cache, v_cache = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x) for x in layout)
        got_q, got_k = apply_rope(
            q, k, positions, table, interleaved, v, k_cache, v_cache, slots.int(), override="triton_apply_rope"
        )
        expected = apply_rope(q, k, positions, table, interleaved, override="reference_apply_rope")
        torch.testing.assert_close([got_q, got_k], list(expected))
        for cache, values in ((k_cache, got_k), (v_cache, v)):
            wanted = torch.full_like(cache, math.nan, dtype=torch.float32).to(cache.dtype)
            _store(wanted, values, slots)
            assert same_bits(cache.contiguous(), wanted.contiguous())


@pytest.mark.parametrize("scale_heads", [0, 1, 3])
@pytest.mark.parametrize("v_head_dim", [8, 40, 130])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_scaled_caches_and_values_of_another_width(dtype: torch.dtype, v_head_dim: int, scale_heads: int) -> None:
    qkv, positions, table = _draw(5, 3, 40, 24)
    q, k, _ = _split(qkv.to(dtype), 5, 3)
    generator = torch.Generator().manual_seed(v_head_dim)
    v = torch.randn(TOKENS, 3, v_head_dim, generator=generator).to(DEVICE, dtype)
    shape = (scale_heads,) if scale_heads else ()
    k_scale, v_scale = (torch.rand(shape, generator=generator).to(DEVICE) * 0.01 + 0.001 for _ in range(2))
    slots = torch.tensor([5, -1, 0, 8, -7, 3, 11], device=DEVICE)
    k_cache, v_cache = (torch.zeros(4, 3, 3, width, device=DEVICE).to(torch.float8_e4m3fn) for width in (40, v_head_dim))
    _, turned = apply_rope(
        q, k, positions, table, False, v, k_cache, v_cache, slots, k_scale, v_scale, override="triton_apply_rope"
    )
    for cache, values, scale in ((k_cache, turned, k_scale), (v_cache, v, v_scale)):
        wanted = torch.zeros_like(cache, dtype=torch.float32).to(cache.dtype)
        _store(wanted, values, slots, scale)
        assert same_bits(cache, wanted)


def _store(cache: Tensor, values: Tensor, slots: Tensor, scale: Tensor | None = None) -> None:
    from tokenspeed_kernel_base.ops.kvcache.slots import store_slots

    store_slots(cache, values, slots, scale)
