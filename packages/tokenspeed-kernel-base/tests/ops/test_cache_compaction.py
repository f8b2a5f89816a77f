"""Tests compact_kv_cache against a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.kvcache.compact_kv_cache import compact_kv_cache


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(1, 6), st.integers(0, 3))
def test_the_accepted_path_follows_the_earlier_tokens(data: st.DataObject, nodes: int, page_size: int, batch: int) -> None:
    lengths = [data.draw(st.integers(0, 20)) for _ in range(batch)]
    width = -(-max(lengths, default=0) // page_size) + 1
    table = torch.randperm(batch * width).view(batch, width).int()
    k_cache, v_cache = torch.randn(batch * width + 1, page_size, 2, 3), torch.randn(batch * width + 1, page_size, 2, 5)
    kept = [sorted(data.draw(st.sets(st.integers(0, nodes - 1)))) for _ in range(batch)]
    path = ints(*(node for row in kept for node in row + [-1] * (nodes - len(row)))).view(batch, nodes)
    expected = [k_cache.clone(), v_cache.clone()]
    for before, cache in zip((k_cache, v_cache), expected, strict=True):
        for sequence, row in enumerate(kept):
            first = lengths[sequence] - nodes
            for place, node in enumerate(row if first >= 0 else []):
                at = [(int(table[sequence, p // page_size]), p % page_size) for p in (first + place, first + node)]
                cache[at[0]] = before[at[1]]
    counts = ints(*map(len, kept))
    assert compact_kv_cache(k_cache, v_cache, table, ints(*lengths), path, counts) is None
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float16])
def test_latents_of_any_dtype(dtype: torch.dtype) -> None:
    cache = torch.arange(8.0).view(2, 4, 1).expand(-1, -1, 3).contiguous().to(dtype)
    compact_kv_cache(cache, None, ints(1, 0).view(1, 2), ints(6), ints(1, 3, -1, -1).view(1, 4), ints(2))
    # Positions 2 to 5 held the values 6, 7, 0 and 1. Now position 2 holds the second of these values, and position 3 the fourth.
    assert cache[..., 0].float().tolist() == [[0, 1, 2, 3], [4, 5, 7, 1]]


@pytest.mark.parametrize("entry", [-1, 2, 2**31 - 1, -(2**31)])
def test_entries_before_the_last_nodes_are_not_read(entry: int) -> None:
    """The first page holds positions 0 to 3. The two nodes are at positions 4 and 5, so the first page table entry is not read."""
    cache = torch.arange(8.0).view(2, 4, 1)
    compact_kv_cache(cache, None, ints(entry, 0).view(1, 2), ints(6), ints(1, -1).view(1, 2), ints(1))
    assert cache.flatten().tolist() == [1, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] .* k_cache, 0 to 1, .* got"):
        compact_kv_cache(cache, None, ints(entry, 0).view(1, 2), ints(5), ints(1, -1).view(1, 2), ints(1))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k_cache": torch.ones(2, 4, 1, 2, 2)}, ValueError, "k_cache must be of shape"),
    ({"k_cache": torch.ones(2, 4, 1, 2).int()}, TypeError, "k_cache must be a tensor of .*, got int32"),
    ({"v_cache": torch.ones(3, 4, 1, 2)}, ValueError, "v_cache must be of shape .* where pages is 2 in k_cache"),
    ({"path": ints(0, 1)}, ValueError, r"path must be of shape \[batch, nodes\]"),
    ({"path": torch.zeros(1, 3).long()}, TypeError, "path must be a tensor of int32, got int64"),
    ({"counts": ints(1, 1)}, ValueError, "counts must be of shape .* where batch is 1"),
    (
        {"cache_seqlens": ints(9)},
        ValueError,
        "cache_seqlens must be at most 8, the tokens that the pages of a sequence hold, got 9",
    ),
    ({"page_table": ints(0, 2).view(1, 2)}, ValueError, r"page_table\[0, 1\] must be a page of k_cache, 0 to 1"),
]


def arguments() -> dict[str, Any]:
    caches = {name: torch.zeros(2, 4, 1, 2) for name in ("k_cache", "v_cache")}
    rest = {"cache_seqlens": ints(7), "path": ints(0, 2, -1).view(1, 3), "counts": ints(2)}
    return {**caches, "page_table": ints(0, 1).view(1, 2), **rest}


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_wrong_calls_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^compact_kv_cache: .*{message}"):
        compact_kv_cache(**{**arguments(), **changes})


def test_it_is_a_proper_custom_operator(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    check_custom_op(compact_kv_cache, arguments())
