"""Tests copying, clearing and splitting of pages against loops over pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.attention.mha_decode_with_kvcache import mha_decode_with_kvcache
from tokenspeed_kernel_base.ops.kvcache.copy_kv_pages import copy_kv_pages
from tokenspeed_kernel_base.ops.kvcache.expand_page_table import expand_page_table
from tokenspeed_kernel_base.ops.kvcache.zero_kv_pages import zero_kv_pages

DTYPES = [torch.float32, torch.float8_e4m3fn, torch.uint8]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 9), st.booleans(), st.sampled_from(DTYPES))
def test_pages_are_copied_and_nothing_else_changes(data: st.DataObject, pages: int, other: bool, dtype: torch.dtype) -> None:
    order = data.draw(st.permutations(range(pages)))
    count = data.draw(st.integers(0, pages if other else pages - 1))
    origins = range(5) if other else order[count:]
    source = [data.draw(st.sampled_from([*origins, -1])) for _ in range(count)]
    target = [page if data.draw(st.booleans()) else -3 for page in order[:count]]
    cache = torch.randn(pages, 2, 3, 4).mul(9).to(dtype)
    staging = torch.randn(5, 2, 3, 4).mul(9).to(dtype) if other else None
    expected, origin = cache.clone(), (cache if staging is None else staging).clone()
    for one, another in zip(source, target, strict=True):
        if one >= 0 and another >= 0:
            expected[another] = origin[one]
    assert copy_kv_pages(cache, torch.tensor(source).long(), torch.tensor(target).int(), staging) is None
    assert torch.equal(bits(cache), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", [[], [-1], [2], [0, 3, -1, 0]])
def test_pages_are_cleared_and_nothing_else_changes(pages: list[int], dtype: torch.dtype) -> None:
    cache = torch.randn(5, 2, 6).mul(9).to(dtype)
    expected = cache.clone()
    for page in pages:
        if page >= 0:
            expected[page] = 0
    zero_kv_pages(cache, torch.tensor(pages, dtype=torch.int64))
    assert torch.equal(bits(cache), bits(expected))


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3), max_size=4), st.sampled_from([1, 2, 3, 64]))
def test_each_large_page_becomes_the_small_pages_that_it_holds(table: list[list[int]], factor: int) -> None:
    table = [[min(page, 2**31 // factor - 1) for page in row] for row in table]
    expected = [[page * factor + i if page >= 0 else -1 for page in row for i in range(factor)] for row in table]
    got = expand_page_table(torch.tensor(table, dtype=torch.int32).view(-1, 3), factor)
    assert got.dtype == torch.int32
    assert got.shape == (len(table), 3 * factor)
    assert got.tolist() == expected


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_attention_to_small_pages_is_attention_to_large_ones(factor: int) -> None:
    torch.manual_seed(0)
    caches = torch.randn(2, 6, 8, 1, 16)
    table, lengths = torch.tensor([[4, 1], [0, -1]], dtype=torch.int32), torch.tensor([13, 6], dtype=torch.int32)
    q = torch.randn(2, 2, 16)
    wanted = mha_decode_with_kvcache(q, caches[0], caches[1], table, lengths, 16)
    small = caches.view(2, 6 * factor, 8 // factor, 1, 16)
    got = mha_decode_with_kvcache(q, small[0], small[1], expand_page_table(table, factor), lengths, 16)
    torch.testing.assert_close(got, wanted)


def test_pages_by_way_of_a_staging_tensor() -> None:
    """Copies pages of one cache to a staging tensor, and from there to other pages of another cache, as in a transfer to the host
    and back."""
    cache, other, staging = torch.randn(6, 2, 4), torch.zeros(9, 2, 4), torch.empty(3, 2, 4)
    pages, places, row = torch.tensor([4, 0, 5]), torch.tensor([8, 2, 3]), torch.arange(3)
    copy_kv_pages(staging, pages, row, cache)
    copy_kv_pages(other, row, places, staging)
    assert torch.equal(other[places], cache[pages])
    assert other.count_nonzero() == cache[pages].count_nonzero()


E4M3 = torch.float8_e4m3fn
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache": torch.ones(4, 2)}, ValueError, "cache must be of shape"),
    ({"cache": torch.ones(4, 2, 3).int()}, TypeError, "cache must be a tensor of .*, got int32"),
    ({"source_pages": torch.tensor([0.0])}, TypeError, "source_pages must be a tensor of int32 or int64"),
    ({"target_pages": torch.tensor([1, 2])}, ValueError, "target_pages must be of shape .* where count is 1 in source_pages"),
    ({"source_pages": torch.tensor([4])}, ValueError, "source_pages must be below 4, the number of pages .*, got 4"),
    (
        {"target_pages": torch.tensor([0])},
        ValueError,
        "target_pages must be distinct from source_pages, because source is None, got page 0 in both",
    ),
    ({"source": torch.ones(4, 2, 5)}, ValueError, r"source must be of shape .* where width is 3 in cache"),
    ({"source": torch.ones(4, 2, 3).to(E4M3)}, TypeError, "source must be a tensor of float32, got float8_e4m3fn"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_wrong_copies_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"cache": torch.ones(4, 2, 3), "source_pages": torch.tensor([0]), "target_pages": torch.tensor([1])}
    with pytest.raises(error, match=f"^copy_kv_pages: .*{message}"):
        copy_kv_pages(**{**arguments, **changes})


def test_other_mistakes_are_refused() -> None:
    cache = torch.ones(4, 2, 3)
    with pytest.raises(ValueError, match=r"^copy_kv_pages: target_pages .* page 1 twice"):
        copy_kv_pages(cache, torch.tensor([0, 2]), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"^zero_kv_pages: pages must be below 4"):
        zero_kv_pages(cache, torch.tensor([-1, 9]))
    with pytest.raises(ValueError, match=r"^expand_page_table: factor .* 2\^20, got 0"):
        expand_page_table(torch.zeros(1, 1, dtype=torch.int32), 0)


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    pages = {"source_pages": torch.tensor([0, -1]), "target_pages": torch.tensor([1, 2])}
    check_custom_op(copy_kv_pages, {"cache": torch.ones(4, 2, 3), **pages})
    check_custom_op(copy_kv_pages, {"cache": torch.ones(4, 2, 3), **pages, "source": torch.zeros(2, 2, 3)})
    check_custom_op(zero_kv_pages, {"cache": torch.ones(4, 2, 3), "pages": torch.tensor([1])})
    check_custom_op(expand_page_table, {"page_table": torch.tensor([[1, -1]], dtype=torch.int32), "factor": 3})
