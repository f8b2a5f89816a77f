"""Tests operators that write the MLA cache, against a loop over tokens, and together with attention that reads the cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.embedding.apply_rope import apply_rope
from tokenspeed_kernel_base.ops.embedding.apply_rope_mla import apply_rope_mla
from tokenspeed_kernel_base.ops.kvcache.store_mla_kv_cache import store_mla_kv_cache
from tokenspeed_kernel_base.ops.quantization.encodings import encode_fp8

E4M3 = torch.float8_e4m3fn


@given(data=st.data(), pages=st.integers(1, 4), page_size=st.integers(1, 5), rank=st.integers(1, 5), rope=st.integers(0, 3))
def test_each_token_goes_to_its_slot_and_nothing_else_changes(
    data: st.DataObject, pages: int, page_size: int, rank: int, rope: int
) -> None:
    order = data.draw(st.permutations(range(pages * page_size)))
    slots = [slot if data.draw(st.booleans()) else -1 - slot for slot in order][: data.draw(st.integers(0, len(order)))]
    latent, k_rope = torch.randn(len(slots), rank), torch.randn(len(slots), rope)
    kv_cache = torch.randn(pages, page_size, rank + rope)
    expected = kv_cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // page_size, slot % page_size] = torch.cat((latent[token], k_rope[token]))
    assert store_mla_kv_cache(latent, k_rope, kv_cache, torch.tensor(slots, dtype=torch.int32)) is None
    assert torch.equal(kv_cache, expected)


def made(tokens: int = 7, heads: int = 3, rank: int = 8, rope: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Draws the arguments of `apply_rope_mla`, without the cache. Each token has its own position."""
    generator = torch.Generator().manual_seed(tokens * heads)
    angles = torch.arange(20.0).unsqueeze(1) * torch.tensor([1.0, 0.1])[: rope // 2]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "q_latent": normal(tokens, heads, rank),
        "q_rope": normal(tokens, heads, rope),
        "latent": normal(tokens, rank),
        "k_rope": normal(tokens, rope),
        "positions": torch.arange(tokens) * 2,
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1),
    }


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, E4M3])
def test_it_is_rope_then_quantise_then_store(out_dtype: torch.dtype | None, cache_dtype: torch.dtype, interleaved: bool) -> None:
    arguments = made(dtype=torch.bfloat16)
    slots = torch.tensor([5, -1, 0, 8, 9, 3, 11])
    fused, apart = (torch.zeros(4, 3, 12).to(cache_dtype) for _ in range(2))
    q_scale = torch.tensor(0.01) if out_dtype == E4M3 else None
    kv_scale = torch.tensor([0.02]) if cache_dtype == E4M3 else None
    got = apply_rope_mla(
        **arguments,
        kv_cache=fused,
        slot_mapping=slots,
        interleaved=interleaved,
        q_scale=q_scale,
        kv_scale=kv_scale,
        out_dtype=out_dtype,
    )
    q_rope, k_rope = apply_rope(
        arguments["q_rope"], arguments["k_rope"].unsqueeze(1), arguments["positions"], arguments["cos_sin_cache"], interleaved
    )
    store_mla_kv_cache(arguments["latent"], k_rope.squeeze(1), apart, slots, kv_scale)
    assert torch.equal(fused.view(torch.uint8), apart.view(torch.uint8))
    wanted = torch.cat((arguments["q_latent"], q_rope), -1)
    if out_dtype == E4M3:
        wanted = encode_fp8(wanted.float() / 0.01, E4M3)
    assert got.dtype == wanted.dtype
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_decoding_from_what_was_written_is_attention_with_rotated_keys() -> None:
    """The last token of a sequence attends to all tokens. The test computes the expected result without any operator."""
    arguments = made(tokens=7)
    kv_cache = torch.full((3, 4, 12), math.nan)
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2])  # slots of page 2, then of page 0
    q = apply_rope_mla(**arguments, kv_cache=kv_cache, slot_mapping=slots, interleaved=True)
    table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    got = mla_decode_with_kvcache(q[-1:], kv_cache, table, lengths, 8, kv_lora_rank=8, softmax_scale=0.3)
    phases = torch.complex(*arguments["cos_sin_cache"].chunk(2, -1))[arguments["positions"]]

    def rotated(x: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * phase

    keys = rotated(arguments["k_rope"], phases)
    queries = rotated(arguments["q_rope"][-1], phases[-1])
    scores = torch.einsum("hr,tr->ht", arguments["q_latent"][-1], arguments["latent"])
    scores = scores + torch.einsum("hp,tp->ht", queries, keys.conj()).real
    wanted = torch.softmax(scores * 0.3, -1) @ arguments["latent"]
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got[0], wanted)


WRONG_STORES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"latent": torch.ones(3, 2, 4)}, ValueError, r"latent must be of shape \[tokens, kv_lora_rank\]"),
    ({"latent": torch.ones(3, 4).int()}, TypeError, "latent must be a tensor of .*, got int32"),
    ({"latent": torch.ones(3, 0), "kv_cache": torch.ones(2, 2, 2)}, ValueError, "latent must be of a kv_lora_rank > 0"),
    ({"k_rope": torch.ones(3, 2).half()}, TypeError, "k_rope must be a tensor of float32, got float16"),
    ({"k_rope": torch.ones(2, 2)}, ValueError, "k_rope must be of shape .* where tokens is 3 in latent"),
    ({"kv_cache": torch.ones(2, 2, 5)}, ValueError, "kv_cache must be of shape .* where latent_dim is 6 in latent and k_rope"),
    ({"kv_cache": torch.ones(2, 0, 6)}, ValueError, "kv_cache must be of a page_size > 0"),
    ({"kv_cache": torch.ones(2, 2, 6).half()}, TypeError, "kv_cache must be a tensor of .*float32.*, got float16"),
    ({"slot_mapping": torch.tensor([0, 4, 1])}, ValueError, "slot_mapping must be below .* = 4 .* got 4 for token 1"),
    ({"slot_mapping": torch.tensor([3, -1, 3])}, ValueError, r"of distinct slots .* slot 3 for tokens \[0, 2\]"),
    ({"kv_scale": torch.tensor(1.0)}, ValueError, "kv_scale must be None, because kv_cache has latent's dtype"),
    ({"kv_cache": torch.ones(2, 2, 6).to(E4M3), "kv_scale": torch.ones(2)}, ValueError, r"kv_scale must be of shape \[\] or \[1\]"),
    ({"kv_cache": torch.ones(2, 2, 6).to(E4M3), "kv_scale": torch.tensor(-1.0)}, ValueError, "kv_scale must be finite and more"),
]


def store_arguments() -> dict[str, Any]:
    return {
        "latent": torch.ones(3, 4),
        "k_rope": torch.ones(3, 2),
        "kv_cache": torch.zeros(2, 2, 6),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_STORES)
def test_a_wrong_store_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^store_mla_kv_cache: .*{message}"):
        store_mla_kv_cache(**{**store_arguments(), **changes})


WRONG_ROPES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q_rope": torch.ones(7, 3, 3), "k_rope": torch.ones(7, 3)}, ValueError, "q_rope must be of an even rope_dim"),
    ({"latent": torch.ones(7, 9)}, ValueError, "latent must be of shape .* where kv_lora_rank is 8 in q_latent"),
    ({"k_rope": torch.ones(7, 6)}, ValueError, "k_rope must be of shape .* where rope_dim is 4 in q_rope"),
    ({"cos_sin_cache": torch.ones(20, 2)}, ValueError, "cos_sin_cache must be of shape .* where rope_dim is 4"),
    ({"positions": torch.full((7,), 20)}, ValueError, "positions must be in 0 to 19"),
    ({"out_dtype": torch.float16}, ValueError, "out_dtype must be one of float32, .*, got float16"),
    ({"q_scale": torch.tensor(1.0)}, ValueError, "q_scale must be None, because out_dtype is q_latent's dtype"),
    ({"out_dtype": E4M3, "q_scale": torch.ones(3)}, ValueError, r"q_scale must be of shape \[\] or \[1\], got \[3\]"),
    ({"out_dtype": E4M3, "q_scale": torch.tensor(math.inf)}, ValueError, "q_scale must be finite and more than 0"),
    ({"slot_mapping": torch.arange(7) + 6}, ValueError, "slot_mapping must be below .* = 12"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_ROPES)
def test_a_wrong_rope_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {**made(), "kv_cache": torch.zeros(4, 3, 12), "slot_mapping": torch.arange(7)}
    with pytest.raises(error, match=f"^apply_rope_mla: .*{message}"):
        apply_rope_mla(**{**arguments, **changes})


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    check_custom_op(store_mla_kv_cache, store_arguments())
    arguments = {**made(), "kv_cache": torch.zeros(4, 3, 12).to(E4M3), "slot_mapping": torch.arange(7)}
    check_custom_op(apply_rope_mla, {**arguments, "out_dtype": E4M3, "q_scale": torch.tensor(0.5)})
