"""Tests MLA caches with one scale for each 128 elements: their byte layout, stores to these caches, and attention to them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_sparse_with_kvcache import mla_sparse_with_kvcache
from tokenspeed_kernel_base.ops.kvcache.latent_groups import mla_cache_views
from tokenspeed_kernel_base.ops.kvcache.store_mla_kv_cache import store_mla_kv_cache
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8

BF16, E4M3, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
RANK, ROPE, WIDTH = 256, 8, 256 + 2 * 4 + 8 * 2


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_a_token_is_latents_then_scales_then_rotary_elements() -> None:
    """Checks the layout byte by byte, with the sizes of DeepSeek-V3.2."""
    packed = torch.zeros(2, 3, 656, dtype=U8)
    views = mla_cache_views(packed)
    latent, k_rope = normal(1, 512), normal(1, 64)
    store_mla_kv_cache(latent, k_rope, slot_mapping=torch.tensor([4]), **views._asdict())
    token = bytes(packed[1, 1].tolist())
    scales = struct.unpack("<4f", token[512:528])
    codes = torch.tensor(list(token[:512]), dtype=U8).view(E4M3)
    for group, scale in enumerate(scales):
        numbers = latent[0, 128 * group : 128 * (group + 1)].float()
        assert scale == float(numbers.abs().max() / torch.tensor(448.0))
        assert torch.equal(codes[128 * group : 128 * (group + 1)].float(), (numbers / scale).to(E4M3).float())
    assert torch.equal(torch.tensor(list(token[528:]), dtype=U8).view(BF16), k_rope[0])
    packed[1, 1] = 0
    assert not packed.any(), "nothing else was written"


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_groups_are_those_of_quantize_fp8(dtype: torch.dtype) -> None:
    packed = torch.full((3, 4, WIDTH), 0x55, dtype=U8)
    before, views = packed.clone(), mla_cache_views(packed, RANK, ROPE, dtype)
    slots = torch.tensor([7, -1, 0, 10, 3])
    both = normal(5, RANK + ROPE, dtype=dtype) * 3
    both[0, 5], both[2, 130], both[3, :128] = math.nan, math.inf, 0.0
    store_mla_kv_cache(both[:, :RANK], both[:, RANK:], slot_mapping=slots, **views._asdict())
    codes, scales = quantize_fp8(both[:, :RANK].contiguous(), granularity="block", block_size=128)
    written = slots >= 0
    for view, values in zip(views, (codes, scales, both[:, RANK:]), strict=True):
        found = view.reshape(12, -1)[slots[written]]
        assert torch.equal(found.contiguous().view(U8), values[written].contiguous().view(U8))
    untouched = torch.ones(12, dtype=torch.bool)
    untouched[slots[written]] = False
    assert torch.equal(packed.view(12, -1)[untouched], before.view(12, -1)[untouched])
    assert views.kv_scale_cache[0, 3].isfinite().all()
    assert float(mla_cache_views(packed, RANK, ROPE, dtype).kv_scale_cache[2, 2, 0]) == 2.0**-126, "of zeros"


def filled(pages: int = 4, page_size: int = 6) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns a filled cache, and its tokens in float32 ``[slots, RANK + ROPE]``."""
    views = mla_cache_views(torch.zeros(pages, page_size, WIDTH, dtype=U8), RANK, ROPE)
    slots = torch.arange(pages * page_size)
    both = normal(len(slots), RANK + ROPE)
    store_mla_kv_cache(both[:, :RANK], both[:, RANK:], slot_mapping=slots, **views._asdict())
    codes = views.kv_cache.float().reshape(-1, RANK // 128, 128)
    latents = (codes * views.kv_scale_cache.reshape(-1, RANK // 128, 1)).flatten(1)
    return views._asdict(), torch.cat((latents, views.rope_cache.float().reshape(-1, ROPE)), 1)


def test_attention_agrees_with_the_dequantised_cache() -> None:
    cache, tokens = filled()
    assert (tokens[:, :RANK] - normal(24, RANK + ROPE)[:, :RANK].float()).abs().max() < 0.3
    q = normal(2, 3, RANK + ROPE)
    indices = torch.tensor([[3, 17, -1, 0], [23, 23, 5, 1 << 30]], dtype=torch.int32)
    lengths = torch.tensor([4, 3], dtype=torch.int32)
    got, lse = mla_sparse_with_kvcache(
        q, indices=indices, kv_lora_rank=RANK, softmax_scale=0.1, topk_length=lengths, return_lse=True, **cache
    )
    for token, chosen in enumerate(([3, 17, 0], [23, 23, 5])):
        scores = q[token].float() @ tokens[chosen].t() * 0.1
        torch.testing.assert_close(got[token], (scores.softmax(-1) @ tokens[chosen, :RANK]).to(BF16))
        torch.testing.assert_close(lse[token], scores.logsumexp(-1))
    table, held = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([8, 5], dtype=torch.int32)
    options: dict[str, Any] = {"kv_lora_rank": RANK, "softmax_scale": 0.1}
    dense = mla_decode_with_kvcache(q, page_table=table, cache_seqlens=held, max_seqlen_k=12, **options, **cache)
    order = torch.tensor([[*range(12, 18), 0, 1], [*range(18, 23), -1, -1, -1]], dtype=torch.int32)
    torch.testing.assert_close(dense, mla_sparse_with_kvcache(q, indices=order, **options, **cache))


def test_views_of_pages_that_are_apart() -> None:
    """Passes pages that are strided, as are the tokens within a page, for example in a buffer of several layers."""
    layers = torch.zeros(3, 2, 5, WIDTH + 8, dtype=U8)
    packed = layers[:, 1, :, 4 : 4 + WIDTH]
    views = mla_cache_views(packed, RANK, ROPE)
    views.kv_scale_cache.fill_(1.0)
    views.rope_cache.fill_(1.0)
    views.kv_cache.copy_(torch.ones(3, 5, RANK))
    wanted = [0x38] * RANK + [0, 0, 0x80, 0x3F] * 2 + [0x80, 0x3F] * ROPE
    assert packed.tolist() == [[wanted] * 5] * 3
    assert int((layers != 0).sum()) == 15 * sum(byte != 0 for byte in wanted)


WRONG_BUFFERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"packed": torch.zeros(2, 3, 656)}, TypeError, "packed must be a tensor of uint8, got float32"),
    ({"packed": torch.zeros(2, 3, 655, dtype=U8)}, ValueError, r"packed must be of shape \[pages, page_size, 656\]"),
    ({"packed": torch.zeros(2, 656, dtype=U8)}, ValueError, r"packed must be of shape \[pages, page_size, 656\]"),
    ({"packed": torch.zeros(2, 656, 3, dtype=U8).mT}, ValueError, "packed must be of stride 1 in its last axis"),
    ({"packed": torch.zeros(2, 3, 658, dtype=U8)[..., :656]}, ValueError, "packed must be of tokens at multiples of 4 bytes"),
    ({"packed": torch.zeros(2, 3, 660, dtype=U8)[..., 2:658]}, ValueError, "packed must be of tokens at multiples of 4 bytes"),
    ({"kv_lora_rank": 500}, ValueError, "kv_lora_rank must be a positive multiple of 128, got 500"),
    ({"rope_dim": 3}, ValueError, "rope_dim must be even, and not negative, got 3"),
    ({"rope_dtype": torch.float32}, ValueError, "rope_dtype must be one of bfloat16, float16, got float32"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_BUFFERS)
def test_a_wrong_buffer_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^mla_cache_views: {message}"):
        mla_cache_views(**{"packed": torch.zeros(2, 3, 656, dtype=U8), **changes})


def test_memory_at_an_odd_address_is_refused() -> None:
    memory = torch.frombuffer(bytearray(656 * 3 + 8), dtype=U8)
    start = -memory.data_ptr() % 4 + 1
    packed = torch.frombuffer(memory.numpy().data, dtype=U8, count=656 * 3, offset=start).view(1, 3, 656)
    with pytest.raises(ValueError, match=r"multiples of 4 bytes, got .* 1968, 656 .* 1"):
        mla_cache_views(packed)


def caches(**changes: Any) -> dict[str, Any]:
    views = mla_cache_views(torch.zeros(2, 4, WIDTH, dtype=U8), RANK, ROPE)
    return {**views._asdict(), **changes}


WRONG_CACHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rope_cache": None}, ValueError, "rope_cache must be a tensor, because kv_scale_cache is given, got None"),
    ({"kv_scale_cache": None}, ValueError, "kv_scale_cache must be a tensor, because rope_cache is given, got None"),
    ({"kv_scale": torch.tensor(1.0)}, ValueError, "kv_scale must be None, because kv_scale_cache is given"),
    ({"kv_cache": torch.zeros(2, 4, RANK + ROPE).to(E4M3)}, ValueError, "kv_cache must be of shape .* where kv_lora_rank is 256"),
    ({"kv_cache": torch.zeros(2, 4, RANK, dtype=BF16)}, TypeError, "kv_cache must be a tensor of float8_e4m3fn, got bfloat16"),
    ({"kv_scale_cache": torch.zeros(2, 4, 1)}, ValueError, "kv_scale_cache must be of shape .* where scale_groups is 2 in kv_lora"),
    ({"kv_scale_cache": torch.zeros(2, 3, 2)}, ValueError, "kv_scale_cache must be of shape .* where page_size is 4 in kv_cache"),
    ({"rope_cache": torch.zeros(2, 4, 6, dtype=BF16)}, ValueError, "rope_cache must be of shape .* where rope_dim is 8"),
    ({"rope_cache": torch.zeros(2, 4, ROPE)}, TypeError, "rope_cache must be a tensor of bfloat16, got float32"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_CACHES)
def test_a_wrong_cache_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    chosen = torch.zeros(1, 2, dtype=torch.int32)
    options: dict[str, Any] = {"q": normal(1, 3, RANK + ROPE), "kv_lora_rank": RANK, "softmax_scale": 0.1}
    with pytest.raises(error, match=f"^mla_sparse_with_kvcache: {message}"):
        mla_sparse_with_kvcache(indices=chosen, **options, **caches(**changes))
    paging: dict[str, Any] = {"page_table": chosen, "cache_seqlens": torch.ones(1, dtype=torch.int32), "max_seqlen_k": 8}
    with pytest.raises(error, match=f"^mla_decode_with_kvcache: {message}"):
        mla_decode_with_kvcache(**paging, **options, **caches(**changes))
    with pytest.raises(error, match=f"^store_mla_kv_cache: {message}"):
        store_mla_kv_cache(normal(1, RANK), normal(1, ROPE), slot_mapping=torch.tensor([1]), **caches(**changes))


def test_other_wrong_calls_are_refused() -> None:
    chosen, options = torch.zeros(1, 2, dtype=torch.int32), {"softmax_scale": 0.1}
    with pytest.raises(TypeError, match=r"^mla_sparse_with_kvcache: q .*got float32"):
        mla_sparse_with_kvcache(torch.zeros(1, 3, RANK + ROPE), indices=chosen, kv_lora_rank=RANK, **options, **caches())
    with pytest.raises(ValueError, match=r"kv_lora_rank .*multiple of 128, .*got 200"):
        mla_sparse_with_kvcache(normal(1, 3, RANK + ROPE), indices=chosen, kv_lora_rank=200, **options, **caches())
    with pytest.raises(TypeError, match=r"^store_mla_kv_cache: latent .*got float32"):
        store_mla_kv_cache(torch.zeros(1, RANK), torch.zeros(1, ROPE), slot_mapping=torch.tensor([1]), **caches())
    with pytest.raises(ValueError, match=r"^store_mla_kv_cache: slot_mapping .* below .* = 8"):
        store_mla_kv_cache(normal(1, RANK), normal(1, ROPE), slot_mapping=torch.tensor([8]), **caches())
    views = caches()
    with pytest.raises(ValueError, match=r"^store_mla_kv_cache: .*overlap"):
        store_mla_kv_cache(normal(1, RANK), views["rope_cache"][:1, 0], slot_mapping=torch.tensor([1]), **views)


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    cache, _ = filled()
    check_custom_op(
        mla_sparse_with_kvcache,
        {
            "q": normal(2, 3, RANK + ROPE),
            "indices": torch.tensor([[0, 7], [3, -1]], dtype=torch.int32),
            "kv_lora_rank": RANK,
            "softmax_scale": 0.1,
            **cache,
        },
    )
    stored = {"latent": normal(2, RANK), "k_rope": normal(2, ROPE), "slot_mapping": torch.tensor([7, -1])}
    check_custom_op(store_mla_kv_cache, {**stored, **cache})
