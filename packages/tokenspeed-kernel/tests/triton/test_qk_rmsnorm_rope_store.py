"""Tests the fused kernel of QK norm, RoPE and cache store beyond the shared cases: bitwise equality with separate kernels, and
layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import apply_rope, qk_rmsnorm_rope_store_kv_cache
from tokenspeed_kernel.workbench.numerics.compare import same_bits
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
TOKENS, POSITIONS = 7, 30
FP8 = torch.float8_e4m3fn
# (heads, kv_heads, head_dim, v_head_dim, rotary_dim): tiles of one token and of several, full and partial rotation, powers of
# two and other sizes.
SIZES = [(16, 2, 128, 128, 128), (3, 3, 40, 16, 24), (5, 2, 57, 130, 6)]
MROPE: dict[str, Any] = {"mrope_section": (1, 1, 1), "mrope_interleaved": True}


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def _arguments(heads: int, kv_heads: int, head_dim: int, v_head_dim: int, rotary_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    positions = torch.randint(0, POSITIONS, (3, TOKENS), generator=torch.Generator().manual_seed(heads)).to(DEVICE)
    return {
        "qkv": _normal(TOKENS, heads * head_dim + kv_heads * (head_dim + v_head_dim)).to(dtype),
        "positions": positions if rotary_dim == 6 else positions[0],
        "cos_sin_cache": _normal(POSITIONS, rotary_dim + 3)[:, :rotary_dim],
        "slot_mapping": torch.tensor([5, -1, 0, 8, -7, 3, 11], device=DEVICE),
        **(MROPE if rotary_dim == 6 else {}),
    }


def _caches(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns caches that are not contiguous, with NaN in every slot."""
    _, kv_heads, head_dim, v_head_dim, _ = sizes
    made = (torch.full((4, kv_heads, 3, width), math.nan, device=DEVICE).to(dtype) for width in (head_dim, v_head_dim))
    k_cache, v_cache = (cache.transpose(1, 2) for cache in made)
    return k_cache, v_cache


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float16, FP8)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_without_norms_it_has_the_bits_of_apply_rope(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype, interleaved: bool
) -> None:
    heads, kv_heads, head_dim, v_head_dim, _ = sizes
    arguments = _arguments(*sizes, dtype)
    scale = torch.tensor([0.01] * kv_heads, device=DEVICE) if cache_dtype == FP8 else None
    common = {"interleaved": interleaved, "k_scale": scale, "v_scale": scale}
    caches, wanted_caches = _caches(sizes, cache_dtype), _caches(sizes, cache_dtype)
    got = qk_rmsnorm_rope_store_kv_cache(
        **arguments, **common, k_cache=caches[0], v_cache=caches[1], override="triton_qk_rmsnorm_rope_store_kv_cache"
    )
    q, k, v = arguments.pop("qkv").split((heads * head_dim, kv_heads * head_dim, kv_heads * v_head_dim), 1)
    wanted, _ = apply_rope(
        q.unflatten(1, (heads, head_dim)), k.unflatten(1, (kv_heads, head_dim)), **arguments, **common,
        v=v.unflatten(1, (kv_heads, v_head_dim)), k_cache=wanted_caches[0], v_cache=wanted_caches[1], override="triton_apply_rope",
    )  # fmt: skip
    assert same_bits(got, wanted)
    for one, other in zip(caches, wanted_caches, strict=True):
        assert same_bits(one.contiguous(), other.contiguous())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_norms_and_layouts(sizes: tuple[int, int, int, int, int], interleaved: bool) -> None:
    heads, _, head_dim = sizes[:3]
    arguments = _arguments(*sizes, torch.float32)
    weights = _normal(head_dim, 2)
    arguments |= {"q_weight": weights[:, 0], "k_weight": weights[:, 1].half(), "eps": 0.3, "interleaved": interleaved}
    wanted_caches = _caches(sizes, torch.float32)
    wanted = qk_rmsnorm_rope_store_kv_cache(
        **arguments, k_cache=wanted_caches[0], v_cache=wanted_caches[1], override="reference_qk_rmsnorm_rope_store_kv_cache"
    )
    qkv, positions = arguments["qkv"], arguments["positions"]
    apart = {"qkv": qkv.t().contiguous().t(), "positions": positions.unsqueeze(-1).expand(*positions.shape, 2)[..., 1].int()}
    slice_of = {
        "qkv": torch.cat((qkv, qkv), 1)[:, : qkv.shape[1]],
        "cos_sin_cache": arguments["cos_sin_cache"].t().contiguous().t(),
    }
    for changed, out in ((apart, None), (slice_of, torch.empty(heads, head_dim, TOKENS, device=DEVICE).permute(2, 0, 1))):
        caches = _caches(sizes, torch.float32)
        got = qk_rmsnorm_rope_store_kv_cache(
            **{**arguments, **changed}, k_cache=caches[0], v_cache=caches[1], out=out,
            override="triton_qk_rmsnorm_rope_store_kv_cache",
        )  # fmt: skip
        assert out is None or got is out
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(caches, wanted_caches, equal_nan=True)


def test_a_cache_without_pages() -> None:
    arguments = _arguments(*SIZES[1], torch.float32)
    arguments["slot_mapping"] = torch.full((TOKENS,), -1, device=DEVICE)
    k_cache, v_cache = (cache[:0] for cache in _caches(SIZES[1], torch.float32))
    got = qk_rmsnorm_rope_store_kv_cache(
        **arguments, k_cache=k_cache, v_cache=v_cache, override="triton_qk_rmsnorm_rope_store_kv_cache"
    )
    wanted = qk_rmsnorm_rope_store_kv_cache(
        **arguments, k_cache=k_cache, v_cache=v_cache, override="reference_qk_rmsnorm_rope_store_kv_cache"
    )
    torch.testing.assert_close(got, wanted)
