"""DeepSeek sparse attention: scores, selection and attention to what was selected, against loops and against dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_sparse_with_kvcache import mla_sparse_with_kvcache
from tokenspeed_kernel_base.ops.attention.top_k_indices import top_k_indices

RANK, ROPE, HEADS = 8, 4, 3


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 21), min_size=1, max_size=4), st.sampled_from([1, 4, 7]), st.integers(0, 5))
def test_attention_to_all_slots_of_a_sequence_is_dense_attention(kv_lens: list[int], page_size: int, spare: int) -> None:
    """In any order, and with indices that are no keys among them."""
    torch.manual_seed(len(kv_lens))
    width = -(-max(kv_lens) // page_size) or 1
    page_table = torch.randperm(len(kv_lens) * width).view(-1, width).int()
    cache = torch.randn(len(kv_lens) * width, page_size, RANK + ROPE)
    q = torch.randn(len(kv_lens), HEADS, RANK + ROPE)
    indices = torch.full((len(kv_lens), max(kv_lens) + spare), -1, dtype=torch.int32)
    for row, (pages, kv_len) in enumerate(zip(page_table.tolist(), kv_lens, strict=True)):
        slots = [pages[at // page_size] * page_size + at % page_size for at in range(kv_len)]
        places = torch.randperm(indices.shape[1])[:kv_len]
        indices[row, places] = torch.tensor(slots, dtype=torch.int32)
    options: dict[str, Any] = {"kv_lora_rank": RANK, "softmax_scale": 0.3, "return_lse": True}
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    wanted = mla_decode_with_kvcache(q, cache, page_table, lengths, width * page_size, **options)
    for got, expected in zip(mla_sparse_with_kvcache(q, cache, indices, **options), wanted, strict=True):
        torch.testing.assert_close(got, expected)


def test_only_indices_that_count_are_keys() -> None:
    cache = torch.randn(4, 2, RANK + ROPE)
    cache[3, 1] = torch.nan
    q = torch.randn(1, HEADS, RANK + ROPE)
    indices = torch.tensor([[5, 0, 7]], dtype=torch.int32)
    some = mla_sparse_with_kvcache(q, cache, indices[:, :2], RANK, 0.3)
    assert not some.isnan().any()
    assert torch.equal(
        mla_sparse_with_kvcache(q, cache, indices, RANK, 0.3, topk_length=torch.tensor([2], dtype=torch.int32)), some
    )
    twice = mla_sparse_with_kvcache(q, cache, torch.tensor([[5, 5, 0, 0]], dtype=torch.int32), RANK, 0.3)
    torch.testing.assert_close(twice, some)


FEW_SCORES = st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, torch.inf, -torch.inf, torch.nan])


@settings(max_examples=50, deadline=None)
@given(st.lists(FEW_SCORES, max_size=12), st.integers(1, 14), st.integers(0, 12))
def test_selection_is_that_of_a_sort_by_score_and_position(scores: list[float], top_k: int, length: int) -> None:
    length = min(length, len(scores))

    def rank(at: int) -> tuple[float, int]:
        score = scores[at]
        return (-torch.inf, at) if score != score else (-score if score != torch.inf else -1e300, at)

    candidates = [at for at in range(length) if scores[at] != -torch.inf]
    expected = sorted(sorted(candidates, key=rank)[:top_k])
    got = top_k_indices(torch.tensor([scores]).view(1, -1).float(), top_k, torch.tensor([length], dtype=torch.int32))
    assert got[0].tolist() == expected + [-1] * (top_k - len(expected))


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    sparse = {"q": torch.randn(2, 3, 12), "kv_cache": torch.randn(4, 2, 12), "indices": torch.tensor([[0, 7], [3, -1]]).int()}
    check_custom_op(mla_sparse_with_kvcache, {**sparse, "kv_lora_rank": 8, "softmax_scale": 0.3, "return_lse": True})
    check_custom_op(top_k_indices, {"scores": torch.randn(2, 9), "top_k": 4, "lengths": torch.tensor([9, 2]).int()})
