"""Tests DeepSeek sparse attention: scores, selection, and attention to the selected tokens, against loops and dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

from tokenspeed_kernel_base.ops.attention._indexer import index_views
from tokenspeed_kernel_base.ops.attention.dsa_indexer_scores import dsa_indexer_scores
from tokenspeed_kernel_base.ops.attention.dsa_indexer_scores_with_kvcache import dsa_indexer_scores_with_kvcache
from tokenspeed_kernel_base.ops.attention.dsa_select_with_kvcache import dsa_select_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_sparse_with_kvcache import mla_sparse_with_kvcache
from tokenspeed_kernel_base.ops.attention.top_k_indices import top_k_indices
from tokenspeed_kernel_base.ops.embedding.apply_rope import apply_rope
from tokenspeed_kernel_base.ops.kvcache.positions_to_slots import positions_to_slots
from tokenspeed_kernel_base.ops.kvcache.store_index_k_cache import store_index_k_cache
from tokenspeed_kernel_base.ops.norm.layernorm import layernorm
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8

RANK, ROPE, HEADS = 8, 4, 3


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 21), min_size=1, max_size=4), st.sampled_from([1, 4, 7]), st.integers(0, 5))
def test_attention_to_all_slots_of_a_sequence_is_dense_attention(kv_lens: list[int], page_size: int, spare: int) -> None:
    """Passes the slots in random order, with invalid indices among them."""
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


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_scores_are_those_of_a_loop_over_heads_tokens_and_positions() -> None:
    torch.manual_seed(0)
    heads, dim, page_size = 3, 4, 2
    q, weights = torch.randn(4, heads, dim), torch.randn(4, heads)
    k_cache, page_table, lengths = torch.randn(6, page_size, dim), ints([4, 1, 0], [2, 5, 3]), ints(5, 2)
    got, seen = dsa_indexer_scores_with_kvcache(q, k_cache, weights, page_table, lengths, cu_seqlens_q=ints(0, 3, 4))
    expected = torch.full((4, 6), -torch.inf)
    for token, (sequence, last) in enumerate([(0, 2), (0, 3), (0, 4), (1, 1)]):
        assert int(seen[token]) == last + 1
        for position in range(last + 1):
            key = k_cache[int(page_table[sequence, position // page_size]), position % page_size]
            products = [max(float(q[token, head] @ key), 0.0) * float(weights[token, head]) for head in range(heads)]
            expected[token, position] = sum(products)
    torch.testing.assert_close(got, expected)
    even, _ = dsa_indexer_scores_with_kvcache(q[2:], k_cache, weights[2:], page_table, lengths)
    torch.testing.assert_close(even, expected[2:])
    row = k_cache[page_table.long()].flatten(1, 2)
    keys, offsets = torch.cat((row[0, :5], row[1, :2])), (ints(0, 3, 4), ints(0, 5, 7))
    in_a_row, also_seen = dsa_indexer_scores(q, keys, weights, *offsets)
    torch.testing.assert_close(in_a_row[:, :6], expected)
    assert (in_a_row[:, 6:] == -torch.inf).all()
    assert torch.equal(also_seen, seen)


def test_selection_in_float64_tells_scores_apart_that_are_one_in_float32() -> None:
    k_cache = torch.tensor([1.0, 1.0 + 2.0**-40, 1.0 - 2.0**-40, 0.5], dtype=torch.float64).view(2, 2, 1)
    page_table, cache_seqlens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    slots, lengths = dsa_select_with_kvcache(one, k_cache, one[0], page_table, cache_seqlens, top_k=1)
    assert (slots.tolist(), lengths.tolist()) == ([[1]], [1])


def test_more_new_tokens_than_a_sequence_has() -> None:
    """A sequence that only pads the batch has more new tokens than its length."""
    q, weights = torch.ones(3, 1, 2), torch.ones(3, 1)
    got, seen = dsa_indexer_scores_with_kvcache(q, torch.ones(1, 4, 2), weights, ints([0]), ints(1))
    assert seen.tolist() == [0, 0, 1]
    assert got.tolist() == [[-torch.inf] * 4] * 2 + [[2.0] + [-torch.inf] * 3]


@pytest.mark.parametrize("scale_format", ["float32", "e8m0"])
def test_stored_keys_are_those_that_scores_are_made_of(scale_format: str) -> None:
    """Asserts that keys and scales are stored in pages of bytes, the scales after the keys, and that all other bytes are
    unchanged."""
    torch.manual_seed(0)
    page_size, dim = 4, 8
    packed = torch.randint(0, 255, (3, page_size * (dim + 4)), dtype=torch.uint8)
    keys, scales = index_views(packed, page_size, dim)
    k, slots = torch.randn(5, dim) * 100, torch.tensor([8, 9, -1, 3, 0])
    before = packed.clone()
    store_index_k_cache(k, keys, scales, slots, scale_format)
    q8, scale = quantize_fp8(k)
    stored = [slot for slot in slots.tolist() if slot >= 0]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            found = keys[slot // page_size, slot % page_size].float() * scales[slot // page_size, slot % page_size]
            if scale_format == "float32":
                assert torch.equal(found, q8[token].float() * scale[token])
            else:
                exponent = torch.log2(scales[slot // page_size, slot % page_size])
                assert exponent == exponent.round() == torch.log2(scale[token, 0]).ceil()
            assert (found - k[token]).abs().max() <= k[token].abs().max() / 14
    untouched = torch.ones(3, page_size, dtype=torch.bool)
    untouched.view(-1)[stored] = False
    for view, old in zip((keys.view(torch.uint8), scales), index_views(before, page_size, dim), strict=True):
        assert torch.equal(view[untouched], old.view(view.dtype)[untouched])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_positions_become_slots(q_lens: list[int], page_size: int, pages: int) -> None:
    torch.manual_seed(sum(q_lens))
    page_table = torch.randint(-1, 9, (len(q_lens), pages), dtype=torch.int32)
    positions = torch.randint(-2, (pages + 1) * page_size, (sum(q_lens), 6), dtype=torch.int32)
    offsets = ints(0, *torch.tensor(q_lens).cumsum(0).tolist())
    got = positions_to_slots(positions, page_table, page_size, offsets)
    assert torch.equal(positions_to_slots(positions[:, 1].long(), page_table, page_size, offsets), got[:, 1].long())
    for token, sequence in enumerate(i for i, q_len in enumerate(q_lens) for _ in range(q_len)):
        for at, position in enumerate(positions[token].tolist()):
            page = int(page_table[sequence, position // page_size]) if 0 <= position < pages * page_size else -1
            assert int(got[token, at]) == (page * page_size + position % page_size if page >= 0 else -1)


def test_the_indexer_of_transformers_selects_the_same_positions() -> None:
    from transformers import DeepseekV32Config

    torch.manual_seed(0)
    tokens, heads, dim, rope_dim, top_k = 40, 16, 16, 8, 7  # with few heads, many scores are 0 and tie
    sizes = {"index_n_heads": heads, "index_head_dim": dim, "index_topk": top_k, "qk_rope_head_dim": rope_dim}
    indexer = modeling.DeepseekV32Indexer(DeepseekV32Config(hidden_size=32, q_lora_rank=24, num_attention_heads=4, **sizes), 0)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter)
    x, q_latent, positions = torch.randn(tokens, 32), torch.randn(tokens, 24), torch.arange(tokens)
    angles = positions.unsqueeze(1) * 10000.0 ** -(torch.arange(rope_dim // 2) / (rope_dim // 2))
    embeddings = (torch.cat((f(angles), f(angles)), -1).unsqueeze(0) for f in (torch.cos, torch.sin))
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = indexer(x.unsqueeze(0), q_latent.unsqueeze(0), tuple(embeddings), seen, None)[0]
        q, weights = (q_latent @ indexer.wq_b.weight.t()).view(tokens, heads, dim), x @ indexer.weights_proj.weight.t()
        k = layernorm(x @ indexer.wk.weight.t(), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6)
    q, k = apply_rope(q, k.unsqueeze(1), positions, torch.cat((angles.cos(), angles.sin()), -1))
    scores, lengths = dsa_indexer_scores(q, k.squeeze(1), weights * heads**-0.5 * dim**-0.5, ints(0, tokens))
    selected = top_k_indices(scores, top_k, lengths=lengths)
    assert selected[top_k:].tolist() == expected[top_k:].sort().values.tolist()


def test_sparse_attention_is_dense_if_all_positions_are_selected() -> None:
    """Also asserts that with 5 selected positions, the result is dense attention to a cache of these positions only."""
    torch.manual_seed(0)
    page_table, lengths = ints([3, 0, 5], [1, 4, 2]), ints(11, 7)
    cache, keys = torch.randn(6, 4, RANK + ROPE), torch.randn(6, 4, 6)
    q, index_q, weights = torch.randn(2, HEADS, RANK + ROPE), torch.randn(2, 5, 6), torch.randn(2, 5)
    options: dict[str, Any] = {"kv_lora_rank": RANK, "softmax_scale": 0.3}
    dense = mla_decode_with_kvcache(q, cache, page_table, lengths, 12, **options)
    indices, count = dsa_select_with_kvcache(index_q, keys, weights, page_table, lengths, top_k=12)
    torch.testing.assert_close(mla_sparse_with_kvcache(q, cache, indices, topk_length=count, **options), dense)

    indices, count = dsa_select_with_kvcache(index_q, keys, weights, page_table, lengths, top_k=5)
    assert count.tolist() == [5, 5]
    scores, _ = dsa_indexer_scores_with_kvcache(index_q, keys, weights, page_table, lengths)
    best = scores.topk(5).indices
    chosen = cache.flatten(0, 1)[positions_to_slots(best.int(), page_table, 4).long()]
    alone = mla_decode_with_kvcache(q, chosen, ints([0], [1]), ints(5, 5), 5, **options)
    torch.testing.assert_close(mla_sparse_with_kvcache(q, cache, indices, **options), alone)


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    """Tests only these operators, because the others have one output and write to no arguments."""
    sparse = {"q": torch.randn(2, 3, 12), "kv_cache": torch.randn(4, 2, 12), "indices": ints([0, 7], [3, -1])}
    check_custom_op(mla_sparse_with_kvcache, {**sparse, "kv_lora_rank": 8, "softmax_scale": 0.3, "return_lse": True})
    tables = {"page_table": ints([0, 1], [2, 0]), "cu_seqlens_q": ints(0, 0, 2), "cache_seqlens": ints(3, 5)}
    indexer = {"q": torch.randn(2, 3, 8), "k_cache": torch.randn(3, 4, 8), "weights": torch.randn(2, 3), **tables}
    check_custom_op(dsa_indexer_scores_with_kvcache, indexer)
    keys, scales = index_views(torch.zeros(3, 48, dtype=torch.uint8), 4, 8)
    slots = torch.tensor([7, -1])
    check_custom_op(store_index_k_cache, {"k": torch.randn(2, 8), "k_cache": keys, "k_scale_cache": scales, "slot_mapping": slots})
