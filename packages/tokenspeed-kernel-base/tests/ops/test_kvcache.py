"""Tests store_kv_cache against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.kvcache.store_kv_cache import store_kv_cache

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fnuz: 240.0}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, so that fp8 values and NaN can be compared."""
    return x.contiguous().view(torch.uint8)


def store_by_loop(values: torch.Tensor, cache: torch.Tensor, slots: list[int]) -> torch.Tensor:
    expected = cache.clone()
    page_size = cache.shape[1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // page_size, slot % page_size] = values[token]
    return expected


@given(data=st.data(), pages=st.integers(1, 5), page_size=st.integers(1, 5), heads=st.integers(1, 3), head_dim=st.integers(1, 4))
def test_each_token_goes_to_its_slot_and_nothing_else_changes(
    data: st.DataObject, pages: int, page_size: int, heads: int, head_dim: int
) -> None:
    order = data.draw(st.permutations(range(pages * page_size)))
    slots = [slot if data.draw(st.booleans()) else data.draw(st.integers(-5, -1)) for slot in order]
    slots = slots[: data.draw(st.integers(0, len(slots)))]
    dtype = data.draw(st.sampled_from(FLOATS))
    k, v = torch.randn(len(slots), heads, head_dim).to(dtype), torch.randn(len(slots), heads, head_dim).to(dtype)
    k_cache = torch.randn(pages, page_size, heads, head_dim).to(dtype)
    v_cache = torch.randn(pages, page_size, heads, head_dim).to(dtype)
    expected_k, expected_v = store_by_loop(k, k_cache, slots), store_by_loop(v, v_cache, slots)
    mapping = torch.tensor(slots, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    assert store_kv_cache(k, v, k_cache, v_cache, mapping) is None
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_values_may_be_narrower_or_wider_than_keys() -> None:
    for width in (1, 3, 9):
        k, v = torch.randn(3, 2, 4), torch.randn(3, 2, width)
        k_cache, v_cache = torch.randn(3, 2, 2, 4), torch.randn(3, 2, 2, width)
        expected = store_by_loop(k, k_cache, [4, -1, 0]), store_by_loop(v, v_cache, [4, -1, 0])
        store_kv_cache(k, v, k_cache, v_cache, torch.tensor([4, -1, 0]))
        assert torch.equal(k_cache, expected[0])
        assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("slots", [[-1, -1, -1], [-1, 0, -7], [-1, 5, 0], [3, -1, 4]])
def test_negative_slots_are_not_written(slots: list[int]) -> None:
    k, v = torch.rand(3, 2, 4) + 1, torch.rand(3, 2, 4) + 1
    k_cache, v_cache = torch.rand(3, 2, 2, 4), torch.rand(3, 2, 2, 4)
    expected = store_by_loop(k, k_cache, slots), store_by_loop(v, v_cache, slots)
    store_kv_cache(k, v, k_cache, v_cache, torch.tensor(slots))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_slices_of_a_fused_qkv_and_a_strided_cache() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, 4 + 2 + 2, 8)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    cache = torch.randn(3, 2, 4, 2, 8)  # keys and values of a page are adjacent
    before = cache.clone()
    slots = [11, 2, -1, 0, 6]
    store_kv_cache(k, v, cache[:, 0], cache[:, 1], torch.tensor(slots))
    assert torch.equal(cache[:, 0], store_by_loop(k, before[:, 0], slots))
    assert torch.equal(cache[:, 1], store_by_loop(v, before[:, 1], slots))


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_shape", [None, (), (1,), (3,)])
def test_an_fp8_cache_gets_the_nearest_value_of_the_quotient(
    cache_dtype: torch.dtype, dtype: torch.dtype, scale_shape: tuple[int, ...] | None
) -> None:
    torch.manual_seed(0)
    largest = FP8[cache_dtype]
    k, v = (torch.randn(40, 3, 16) * largest).to(dtype), (torch.randn(40, 3, 16)).to(dtype)
    k_scale, v_scale = (None, None) if scale_shape is None else (torch.rand(scale_shape) * 4 + 0.1, torch.rand(scale_shape) + 0.1)
    k_cache, v_cache = (torch.zeros(10, 4, 3, 16).to(cache_dtype) for _ in range(2))
    store_kv_cache(k, v, k_cache, v_cache, torch.arange(40), k_scale, v_scale)

    finite = torch.arange(256, dtype=torch.uint8).view(cache_dtype).double()
    finite = finite[finite.isfinite()].unique()
    for values, scale, cache in ((k, k_scale, k_cache), (v, v_scale, v_cache)):
        quotient = values.float() / (1 if scale is None else scale.reshape(-1, 1).expand(3, 1))
        quotient = quotient.double().clamp(-largest, largest)
        error = (cache.double().reshape(40, 3, 16) - quotient).abs()
        best = (quotient.unsqueeze(-1) - finite).abs().amin(-1)
        assert torch.equal(error, best)
    assert k_cache.double().abs().max() == largest


def test_an_fp8_cache_rounds_ties_to_even_and_keeps_nan() -> None:
    # Between 16 and 32, e4m3fn represents only even integers. So 17 and 19 are ties.
    k = torch.tensor([17.0, 19.0, -17.0, 1e9, float("-inf"), float("nan")]).reshape(6, 1, 1)
    k_cache, v_cache = (torch.zeros(6, 1, 1, 1).to(torch.float8_e4m3fn) for _ in range(2))
    store_kv_cache(k, k, k_cache, v_cache, torch.arange(6))
    stored = k_cache.float().flatten()
    assert stored[:5].tolist() == [16.0, 20.0, -16.0, 448.0, -448.0]
    assert stored[5].isnan()


def test_float64_values_are_rounded_to_float32_before_they_are_rounded_to_fp8() -> None:
    # 1.0625 is halfway between the fp8 values 1 and 1.125. The value below is larger, so one rounding would give 1.125. In float32
    # it is 1.0625, which is rounded to even, to 1. PyTorch's conversion also rounds twice.
    k = torch.full((1, 1, 1), 1.0625 + 2.0**-40, dtype=torch.float64)
    k_cache, v_cache = (torch.zeros(1, 1, 1, 1).to(torch.float8_e4m3fn) for _ in range(2))
    store_kv_cache(k, k, k_cache, v_cache, torch.tensor([0]))
    assert k_cache.item() == k.to(torch.float8_e4m3fn).item() == 1.0


def test_scales_may_differ_between_k_and_v() -> None:
    k = v = torch.full((1, 2, 1), 8.0)
    k_cache, v_cache = (torch.zeros(1, 1, 2, 1).to(torch.float8_e4m3fn) for _ in range(2))
    store_kv_cache(k, v, k_cache, v_cache, torch.tensor([0]), v_scale=torch.tensor([2.0, 4.0]))
    assert k_cache.float().flatten().tolist() == [8.0, 8.0]
    assert v_cache.float().flatten().tolist() == [4.0, 2.0]


def test_fp8_values_are_copied_bit_for_bit() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 2, 8)
    k_cache, v_cache = (torch.zeros(4, 4, 2, 8).to(torch.float8_e4m3fn) for _ in range(2))
    store_kv_cache(every, every, k_cache, v_cache, torch.arange(16))
    assert torch.equal(bits(k_cache).reshape(16, 2, 8), bits(every))


@pytest.mark.parametrize(
    ("tokens", "pages", "heads", "head_dim"), [(0, 2, 2, 4), (0, 0, 2, 4), (2, 0, 2, 4), (2, 1, 0, 4), (2, 1, 1, 0)]
)
def test_nothing_to_store(tokens: int, pages: int, heads: int, head_dim: int) -> None:
    k = torch.ones(tokens, heads, head_dim)
    k_cache, v_cache = torch.zeros(pages, 2, heads, head_dim), torch.zeros(pages, 2, heads, head_dim)
    store_kv_cache(k, k, k_cache, v_cache, torch.full((tokens,), -1))
    assert not k_cache.any()
    assert not v_cache.any()


def test_values_that_lie_in_host_memory_are_checked_again_when_they_change() -> None:
    k, k_cache, v_cache = torch.ones(2, 1, 4), torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    slots = torch.tensor([0, 1])
    store_kv_cache(k, k, k_cache, v_cache, slots)
    slots[1] = 4
    before = k_cache.clone()
    with pytest.raises(ValueError, match="slot_mapping must be below"):
        store_kv_cache(k + 1, k, k_cache, v_cache, slots)
    assert torch.equal(k_cache, before)


def arguments_for(cache_dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "k": torch.ones(3, 2, 4),
        "v": torch.ones(3, 2, 4),
        "k_cache": torch.zeros(2, 2, 2, 4).to(cache_dtype),
        "v_cache": torch.zeros(2, 2, 2, 4).to(cache_dtype),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }


E4M3 = torch.float8_e4m3fn
WRONG: list[tuple[torch.dtype, dict[str, Any], type[Exception], str]] = [
    (torch.float32, {"k": torch.ones(3, 2, 4).int()}, TypeError, "k must be a tensor of .*, got int32"),
    (torch.float32, {"k": torch.ones(3, 8)}, ValueError, r"k must be of shape \[tokens, kv_heads, head_dim\], got \[3, 8\]"),
    (torch.float32, {"v": torch.ones(3, 2, 4).half()}, TypeError, "v must be a tensor of float32, got float16"),
    (torch.float32, {"v": torch.ones(2, 2, 4)}, ValueError, "v must be of shape .* where tokens is 3 in k"),
    (torch.float32, {"v": torch.ones(3, 2, 8)}, ValueError, "v_cache must be of shape .* where v_head_dim is 8 in v"),
    (torch.float16, {}, TypeError, "k_cache must be a tensor of .*float32.*, got float16"),
    (torch.float32, {"k_cache": torch.zeros(2, 2, 1, 4)}, ValueError, "k_cache must be of shape .* where kv_heads is 2 in k"),
    (torch.float32, {"k_cache": torch.zeros(4, 2, 4)}, ValueError, "k_cache must be of shape"),
    (torch.float32, {"v_cache": torch.zeros(2, 2, 2, 4).to(E4M3)}, TypeError, "v_cache must be a tensor of float32"),
    (torch.float32, {"v_cache": torch.zeros(3, 2, 2, 4)}, ValueError, "v_cache must be of shape .* where pages is 2 in k_cache"),
    (torch.float32, {"k_cache": torch.zeros(2, 0, 2, 4)}, ValueError, "k_cache must be of a page_size > 0"),
    (torch.float32, {"slot_mapping": torch.tensor([0, 1])}, ValueError, "slot_mapping must be of shape .* where tokens is 3 in k"),
    (torch.float32, {"slot_mapping": torch.tensor([0.0, 1, 2])}, TypeError, "slot_mapping must be a tensor of int32 or int64"),
    (torch.float32, {"slot_mapping": [0, 1, 2]}, TypeError, "slot_mapping must be a tensor, got list"),
    (
        torch.float32,
        {"slot_mapping": torch.tensor([0, 4, 1])},
        ValueError,
        "slot_mapping must be below .* = 4 .* got 4 for token 1",
    ),
    (torch.float32, {"slot_mapping": torch.tensor([3, -1, 3])}, ValueError, r"of distinct slots .* slot 3 for tokens \[0, 2\]"),
    (torch.float32, {"k_scale": torch.tensor(1.0)}, ValueError, "k_scale must be None, because k_cache has k's dtype"),
    (torch.float32, {"v_scale": torch.tensor(1.0)}, ValueError, "v_scale must be None"),
    (E4M3, {"k_scale": torch.tensor(1.0).double()}, TypeError, "k_scale must be a tensor of float32, got float64"),
    (E4M3, {"k_scale": torch.ones(3)}, ValueError, r"k_scale must be of shape \[\], \[1\] or \[kv_heads\] = \[2\], got \[3\]"),
    (E4M3, {"v_scale": torch.ones(1, 2)}, ValueError, "v_scale must be of shape"),
    (E4M3, {"v_scale": torch.tensor([1.0, 0.0])}, ValueError, r"v_scale must be finite and more than 0, got \[1.0, 0.0\]"),
    (E4M3, {"k_scale": torch.tensor(float("nan"))}, ValueError, "k_scale must be finite and more than 0, got nan"),
    (E4M3, {"k_scale": 1.0}, TypeError, "k_scale must be a tensor or None, got float"),
]


@pytest.mark.parametrize(("cache_dtype", "arguments", "error", "message"), WRONG)
def test_refuses(cache_dtype: torch.dtype, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    complete = {**arguments_for(cache_dtype), **arguments}
    with pytest.raises(error, match=f"^store_kv_cache: .*{message}"):
        store_kv_cache(**complete)
    for name in ("k_cache", "v_cache"):
        assert not bits(complete[name]).any(), "something was written"


def test_duplicate_negative_slots_are_no_mistake() -> None:
    store_kv_cache(**{**arguments_for(), "slot_mapping": torch.tensor([-1, -1, 0])})


def test_it_is_a_proper_custom_operator(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    check_custom_op(store_kv_cache, {**arguments_for(), "slot_mapping": torch.tensor([3, -1, 0])})
    check_custom_op(store_kv_cache, {**arguments_for(E4M3), "k_scale": torch.tensor(0.5), "v_scale": torch.ones(2)})
