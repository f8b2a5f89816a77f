"""Tests the kernel that writes the KV cache beyond the shared cases: bitwise results of every conversion, and layouts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import store_kv_cache
from tokenspeed_kernel.workbench.numerics.compare import same_bits
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


def _both(
    k: Tensor, v: Tensor, caches: Tensor, slots: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs the kernel and the reference on copies of ``caches``, ``[2, pages, page_size, heads, dim]`` with any strides. Returns
    both copies."""
    results = []
    for kernel in ("triton_store_kv_cache", "reference_store_kv_cache"):
        written = torch.empty_strided(caches.shape, caches.stride(), dtype=caches.dtype, device=DEVICE)
        written.copy_(caches)
        store_kv_cache(k, v, written[0], written[1], slots, k_scale, v_scale, override=kernel)
        results.append(written.contiguous())
    return results[0], results[1]


@pytest.mark.parametrize("scale", [None, 1.0, 0.25, 0.3, 3.0, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", FP8, ids=str)
def test_every_bit_of_a_conversion(dtype: torch.dtype, cache_dtype: torch.dtype, scale: float | None) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(cache_dtype).float()
    finite = codes[codes.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    interesting = torch.cat(
        (
            codes,
            middle,
            torch.nextafter(middle, torch.tensor(math.inf)),
            torch.nextafter(middle, torch.tensor(-math.inf)),
            torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 448, 464, 465, 480, 240, 248, 249, 61440, 61441]),
            torch.randn(500, generator=torch.Generator().manual_seed(0)) * 100,
        )
    )
    values = (interesting * (1.0 if scale is None else scale)).to(dtype)
    tokens = -(-len(values) // 16)
    k = torch.zeros(tokens * 16, dtype=dtype)
    k[: len(values)] = values
    k = k.view(tokens, 2, 8).to(DEVICE)
    scales = None if scale is None else torch.tensor(scale, device=DEVICE)
    caches = torch.zeros(2, tokens, 1, 2, 8, device=DEVICE).to(cache_dtype)
    got, expected = _both(k, -k, caches, torch.arange(tokens, device=DEVICE), scales, scales)
    same = got.view(torch.uint8) == expected.view(torch.uint8)
    assert same.all(), [
        (k.flatten()[i % k.numel()], got.flatten()[i], expected.flatten()[i]) for i in (~same).flatten().nonzero()[:4]
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_layouts(page_size: int, cache_dtype: torch.dtype) -> None:
    heads, dim, tokens = 3, 40, 11
    pages = -(-tokens // page_size) + 1
    generator = torch.Generator().manual_seed(page_size)
    kv = torch.randn(tokens, 2, heads, dim, generator=generator).bfloat16().to(DEVICE)
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    slots[3::4] = -1 - slots[3::4]  # any negative value
    shapes = {
        "pages, slots, heads": (2, pages, page_size, heads, dim),
        "pages, heads, slots": (2, pages, heads, page_size, dim),
        "k and v of a page side by side": (pages, 2, page_size, heads, dim),
        "k and v of a head side by side": (pages, page_size, heads, 2, dim),
        "elements apart": (2, pages, page_size, heads, dim, 2),
    }
    orders = [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 2, 3, 4), (3, 0, 1, 2, 4), (0, 1, 2, 3, 4, 5)]
    scale, head_scales = torch.tensor([0.5], device=DEVICE), torch.rand(heads, 2, generator=generator).to(DEVICE) + 0.1
    scalings = (
        [(None, None)] if cache_dtype == torch.bfloat16 else [(None, None), (scale, head_scales[:, 1]), (head_scales[:, 0], None)]
    )
    for (shape, order), scales in itertools.product(zip(shapes.values(), orders, strict=True), scalings):
        caches = torch.randn(shape, generator=generator).to(cache_dtype).to(DEVICE).permute(order)
        caches = caches[..., 1] if caches.dim() == 6 else caches
        for kind, (k, v) in {
            "fused": (kv[:, 0], kv[:, 1]),
            "apart": (kv[:, 0].contiguous(), kv[:, 1].contiguous()),
            "elements apart": kv.permute(1, 3, 0, 2).contiguous().permute(0, 2, 3, 1).unbind(0),
        }.items():
            integer = torch.int32 if kind == "fused" else torch.int64
            got, expected = _both(k, v, caches, slots.to(DEVICE, integer), *scales)
            assert same_bits(got, expected), (shape, kind)


def test_unwritten_slots_are_unchanged() -> None:
    k = torch.ones(3, 2, 8, device=DEVICE)
    caches = torch.full((2, 4, 2, 2, 8), math.nan, device=DEVICE)
    store_kv_cache(k, 2 * k, *caches, torch.tensor([5, -1, 0], device=DEVICE), override="triton_store_kv_cache")
    for cache, value in zip(caches, (1.0, 2.0), strict=True):
        rows = cache.view(8, 16)
        assert (rows[[0, 5]] == value).all()
        assert rows[[1, 2, 3, 4, 6, 7]].isnan().all()
