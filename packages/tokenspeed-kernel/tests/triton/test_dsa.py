"""Tests the Triton kernels for DeepSeek sparse attention beyond the operators' cases: top-k searches, tiles and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.attention import _indexer as indexer
from tokenspeed_kernel.triton.attention import top_k_indices as selection
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


def chosen(scores: Tensor, top_k: int, lengths: Tensor | None = None) -> None:
    scores = scores.to(DEVICE)
    got = tk.top_k_indices(scores, top_k, lengths, override="triton_top_k_indices")
    assert torch.equal(got, tk.top_k_indices(scores, top_k, lengths, override="reference_top_k_indices"))


# With these small sizes, rows of a thousand scores need all steps of a search. ``spans``: 0 uses no candidate lists; 1 uses one CTA
# per row; more than 1, several CTAs per row.
SMALL = selection.Search(lanes=256, spans=1, segment=256, block=128, run=4, sample=64, deviations=4.0, stages=1, warps=4)
each_search = pytest.mark.parametrize("spans", [0, 1, 4])


def search(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(selection, "search_of", lambda *_: SMALL._replace(**changes))


@pytest.mark.sampled(3)
@each_search
@pytest.mark.parametrize("deviations", [-2.0, 4.0, 30.0], ids=["too high", "as usual", "too low"])
def test_bounds_estimated_from_a_sample(deviations: float, spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel estimates a bound of the threshold from a sample. If the bound is wrong, the kernel must search the whole row.
    Some rows have mostly distinct scores, others few distinct scores."""
    search(monkeypatch, spans=spans, deviations=deviations)
    lengths = torch.tensor([600, 300, 600, 50], dtype=torch.int32, device=DEVICE)
    chosen(torch.cat([normal(2, 600), (normal(2, 600) * 3).round()]), 60, lengths)


@each_search
def test_extremes_in_long_rows(spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search(monkeypatch, spans=spans)
    scores = normal(4, 700)
    scores[0] *= 1e-40
    scores[1, ::3], scores[1, 1::4] = torch.nan, torch.inf
    scores[2] = torch.nan
    scores[3] = scores[3].sign() * 0.0
    chosen(scores, 50)


@each_search
def test_mostly_hidden_scores(spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search(monkeypatch, spans=spans)
    scores = normal(3, 900)
    scores[0, 20:] = -torch.inf
    scores[1, : 900 - 90] = -torch.inf
    scores[2] = -torch.inf
    chosen(scores, 60)


def test_top_k_beyond_the_candidate_list() -> None:
    chosen(normal(1, 4500), 4000)


def test_strided_scores() -> None:
    scores = normal(40, 3).t()
    out = torch.zeros(3, 9, dtype=torch.int32, device=DEVICE)[:, ::2]
    got = tk.top_k_indices(scores.to(DEVICE), 5, out=out, override="triton_top_k_indices")
    assert got is out
    assert torch.equal(out, tk.top_k_indices(scores.to(DEVICE), 5, override="reference_top_k_indices"))


def sparse_arguments(tokens: int, top_k: int, heads: int = 3, rank: int = 64, rope: int = 16) -> dict[str, Any]:
    cache = normal(9, 8, rank + rope).to(DEVICE)
    indices = torch.stack([torch.randperm(72, generator=torch.Generator().manual_seed(i))[:top_k] for i in range(tokens)])
    return {
        "q": normal(tokens, heads, rank + rope).to(DEVICE),
        "kv_cache": cache,
        "indices": indices.int().to(DEVICE),
        "kv_lora_rank": rank,
        "softmax_scale": 0.1,
        "return_lse": True,
    }


def agree(arguments: dict[str, Any]) -> None:
    got = tk.mla_sparse_with_kvcache(**arguments, override="triton_mla_sparse_with_kvcache")
    wanted = tk.mla_sparse_with_kvcache(**arguments, override="reference_mla_sparse_with_kvcache")
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


def test_a_strided_cache_and_strided_indices() -> None:
    arguments = sparse_arguments(2, 70)
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.cat((cache, cache), dim=1)[:, :8]
    arguments["indices"] = arguments["indices"].repeat_interleave(2, dim=1)[:, ::2]
    agree(arguments)


def test_split_kv_with_uneven_key_counts() -> None:
    """One token has far more keys than the others."""
    arguments = sparse_arguments(5, 72)
    wide = arguments["indices"].repeat(1, 9)
    lengths = torch.tensor([648, 1, 0, 100, 130], dtype=torch.int32, device=DEVICE)
    agree({**arguments, "indices": wide, "topk_length": lengths})


def scores_agree(arguments: dict[str, Any]) -> None:
    got = tk.dsa_indexer_scores_with_kvcache(**arguments, override="triton_dsa_indexer_scores_with_kvcache")
    wanted = tk.dsa_indexer_scores_with_kvcache(**arguments, override="reference_dsa_indexer_scores_with_kvcache")
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(got[1], wanted[1])


def test_scores_of_strided_operands_and_more_new_tokens_than_a_sequence_has() -> None:
    keys, q, weights = normal(5, 8, 24), normal(6, 3, 24), normal(6, 3)
    arguments: dict[str, Any] = {
        "q": torch.stack((q, q), dim=2)[:, :, 0],
        "k_cache": torch.cat((keys, keys), dim=2)[:, :, :24],
        "weights": weights.t().contiguous().t(),
        "page_table": torch.tensor([[4, 0], [1, 9], [3, 2]], dtype=torch.int32).repeat_interleave(2, dim=1)[:, ::2],
        "cache_seqlens": torch.tensor([16, 1, 9], dtype=torch.int32),
    }
    arguments = {name: value.to(DEVICE) for name, value in arguments.items()}
    scores_agree(arguments)
    out = torch.zeros(16, 6, device=DEVICE).t()
    assert tk.dsa_indexer_scores_with_kvcache(**arguments, out=out, solution="triton")[0] is out
    torch.testing.assert_close(out, tk.dsa_indexer_scores_with_kvcache(**arguments, solution="reference")[0])


@pytest.mark.parametrize("batch", [1, 20])
def test_tokens_are_mapped_to_their_sequences(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences have several tiles of query tokens, others none. The device code scans 16 sequences at a time."""
    monkeypatch.setattr(indexer, "_SEQUENCES_AT_ONCE", 16)
    q_lens = [(7 * i) % 4 * (i % 3 + 1) + 2 * (batch == 1) for i in range(batch)]
    tokens = sum(q_lens)
    arguments = {
        "q": normal(tokens, 16, 16),
        "k_cache": normal(batch, 16, 16),
        "weights": normal(tokens, 16),
        "page_table": torch.arange(batch, dtype=torch.int32).flip(0).view(-1, 1),
        "cache_seqlens": torch.tensor([min(16, q_len + 3) for q_len in q_lens], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, *q_lens]).cumsum(0).int(),
    }
    scores_agree({name: value.to(DEVICE) for name, value in arguments.items()})


def test_tokens_without_a_sequence_are_left_alone() -> None:
    """Offsets in device memory are not checked, so a captured batch that is all padding has tokens and no sequence."""
    scores, lengths = torch.full((2, 3), 7.0, device=DEVICE), torch.full((2,), 7, dtype=torch.int32, device=DEVICE)
    offsets = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    q, k, weights = (normal(*shape).to(DEVICE) for shape in ((2, 16, 16), (3, 16), (2, 16)))
    indexer.write_scores(q, k, weights, None, offsets, offsets, None, scores, lengths)
    assert bool((scores == 7).all())
    assert bool((lengths == 7).all())
