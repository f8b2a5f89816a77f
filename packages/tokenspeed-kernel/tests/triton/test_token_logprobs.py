"""Tests the Triton kernel of token_logprobs beyond the operator's cases: top tokens that tie, or that are in few groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import token_logprobs
from tokenspeed_kernel.triton.sampling.token_logprobs import _LANES, split_of
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
LARGEST_TOP_K = 256


def agree(logits: Tensor, top_k: int) -> None:
    tokens = torch.arange(len(logits), device=DEVICE) * 7
    got = token_logprobs(logits, tokens, top_k, override="triton_token_logprobs")
    expected = token_logprobs(logits, tokens, top_k, override="reference_token_logprobs")
    for name, one, other in zip(("token", "top", "top_tokens", "lse"), got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5, msg=name)


def normal(rows: int, vocab: int) -> Tensor:
    return 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))


@pytest.mark.parametrize("top_k", [20, pytest.param(LARGEST_TOP_K, marks=pytest.mark.slow)])
def test_all_of_them_in_few_groups(top_k: int) -> None:
    descending = normal(1, 5000).sort(dim=-1, descending=True).values
    agree(torch.cat([descending, descending.flip(-1)]).to(DEVICE), top_k)


@pytest.mark.parametrize("top_k", [1, 33])
def test_more_equal_ones_than_are_wanted(top_k: int) -> None:
    equal = torch.zeros(4, 5000)
    equal[1, 3000:] = 1.0
    equal[2, ::500] = 1.0
    equal[3] = normal(1, 5000)[0].round()
    agree(equal.to(DEVICE), top_k)


@pytest.mark.parametrize("vocab", [1, 31, 1025])
def test_fewer_groups_than_tokens_wanted(vocab: int) -> None:
    agree(normal(2, vocab).to(DEVICE), min(vocab, LARGEST_TOP_K))


def test_groups_are_larger_in_a_large_vocabulary() -> None:
    logits = normal(1, 300_000).to(DEVICE)
    assert split_of(1, 300_000, 1000).group > split_of(1, 200_000, 1000).group
    agree(logits, 20)


@pytest.mark.parametrize("top_k", [1, 20])
def test_largest_logits_in_groups_that_share_a_lane(top_k: int) -> None:
    """The groups of one lane contain all top tokens. In one row they exceed all others; in another row they tie with tokens of
    another lane."""
    logits = normal(2, 70_000)
    size = split_of(2, 70_000, 1).group
    sharing = torch.arange(3, 70_000 // size, _LANES)
    assert len(sharing) > 8  # more than one chunk of groups
    tokens = (sharing[:, None] * size + torch.tensor([0, 5, size - 1])).flatten()
    logits[0, tokens] = 100 + normal(1, len(tokens))[0]
    logits[1, tokens] = 100.0
    logits[1, 4 * size : 4 * size + 2] = 100.0
    agree(logits.to(DEVICE), top_k)


def test_large_logits_keep_their_differences() -> None:
    logits = normal(2, 5000) + 1e6
    agree(logits.to(DEVICE), 20)
