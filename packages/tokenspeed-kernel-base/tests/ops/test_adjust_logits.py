"""Tests adjust_logits against its definition in Python floats, and tests the tokens that are sampled from adjusted logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_kernel_base.ops.sampling.adjust_logits import adjust_logits
from tokenspeed_kernel_base.ops.sampling.sample_top_k_top_p import sample_top_k_top_p

INF = float("inf")
FLOAT32 = st.floats(-50, 50, width=32)


def int32(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def adjusted(x: float, count: int, bias: float, repetition: float, frequency: float, presence: float) -> float:
    """Computes one adjusted logit by the definition, in Python floats, which are float64."""
    x += bias
    if count >= 0:
        x = x / repetition if x > 0 else x * repetition
        x -= frequency * count
    if count > 0:
        x -= presence
    return float(np.float32(x))


@settings(max_examples=100)
@given(data=st.data(), vocab=st.integers(1, 8))
def test_each_listed_logit_is_the_defined_one(data: st.DataObject, vocab: int) -> None:
    logits = data.draw(st.lists(st.one_of(FLOAT32, st.just(-INF)), min_size=vocab, max_size=vocab))
    order = data.draw(st.permutations(range(vocab)))
    tokens = [order[i] if data.draw(st.booleans()) else data.draw(st.sampled_from([-1, vocab, 2**31 - 1])) for i in range(vocab)]
    counts = data.draw(st.lists(st.integers(-1, 1000), min_size=vocab, max_size=vocab))
    bias = data.draw(st.lists(FLOAT32, min_size=vocab, max_size=vocab))
    repetition = data.draw(st.floats(0.125, 8, width=32))
    frequency, presence = data.draw(st.floats(-2, 2, width=32)), data.draw(st.floats(-2, 2, width=32))
    got = adjust_logits(
        torch.tensor([logits]),
        int32(tokens),
        int32(counts),
        torch.tensor([bias]),
        torch.tensor([repetition]),
        torch.tensor([frequency]),
        torch.tensor([presence]),
    )
    expected = list(logits)
    for token, count, added in zip(tokens, counts, bias, strict=True):
        if 0 <= token < vocab:
            expected[token] = adjusted(logits[token], count, added, repetition, frequency, presence)
    assert got.tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_omitted_or_neutral_arguments_change_nothing(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = torch.arange(20, dtype=torch.int32).expand(3, -1).contiguous()
    counts = torch.full_like(tokens, 3)
    assert torch.equal(adjust_logits(logits, tokens), logits)
    assert torch.equal(adjust_logits(logits, tokens, counts), logits)
    neutral = torch.ones(3), torch.zeros(3), torch.zeros(3)
    got = adjust_logits(logits, tokens, counts, torch.zeros(3, 20), *neutral)
    assert got.dtype == dtype
    assert torch.equal(got, logits)
    assert got.data_ptr() != logits.data_ptr()


def test_each_penalty_by_itself() -> None:
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0]])
    tokens, counts = int32([0, 1, 2, 3]), int32([2, 2, 0, -1])
    assert adjust_logits(logits, tokens, counts, repetition_penalty=torch.tensor([2.0])).tolist() == [[2.0, -8.0, 2.0, 4.0]]
    assert adjust_logits(logits, tokens, counts, frequency_penalty=torch.tensor([0.5])).tolist() == [[3.0, -5.0, 4.0, 4.0]]
    assert adjust_logits(logits, tokens, counts, presence_penalty=torch.tensor([0.5])).tolist() == [[3.5, -4.5, 4.0, 4.0]]


def test_a_result_is_rounded_once_to_float32_and_once_to_the_logits_format() -> None:
    logits = torch.tensor([[1.0]], dtype=torch.bfloat16)
    got = adjust_logits(logits, int32([0]), logit_bias=torch.tensor([[2.0**-8 + 2.0**-20]]))
    assert got.item() == 1.0 + 2.0**-7, "above the middle of two neighbours"
    assert adjust_logits(logits, int32([0]), logit_bias=torch.tensor([[2.0**-8]])).item() == 1.0, "a tie goes to the even one"


def test_in_place_writes_listed_logits_only() -> None:
    logits = torch.zeros(2, 5)
    pointer = logits.data_ptr()
    assert adjust_logits(logits, int32([1, -1], [4, 0]), logit_bias=torch.tensor([[1.0, 9.0], [2.0, 3.0]]), out=logits) is logits
    assert logits.data_ptr() == pointer
    assert logits.tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0, 2.0]]


def test_banned_tokens_are_never_drawn_and_frequencies_follow_the_adjusted_logits() -> None:
    draws = 40_000
    logits = torch.tensor([[1.0, 2.0, 0.5, 1.5, 0.0]])
    changed = adjust_logits(
        logits,
        int32([0, 1, 3]),
        int32([3, 1, -1]),
        torch.tensor([[0.0, 0.0, -INF]]),
        torch.tensor([1.25]),
        torch.tensor([0.2]),
        torch.tensor([0.3]),
    )
    values = [adjusted(1.0, 3, 0.0, 1.25, 0.2, 0.3), adjusted(2.0, 1, 0.0, 1.25, 0.2, 0.3), 0.5, 0.0]
    got = sample_top_k_top_p(
        changed.expand(draws, -1),
        torch.ones(draws),
        torch.zeros(draws, dtype=torch.int32),
        torch.ones(draws),
        torch.full((draws,), 11),
        torch.arange(draws),
    )
    counts = torch.bincount(got, minlength=5).double()
    assert counts[3] == 0
    expected = torch.softmax(torch.tensor(values, dtype=torch.float64), 0) * draws
    kept = counts[[0, 1, 2, 4]]
    assert float(((kept - expected) ** 2 / expected).sum()) < 21.1  # 3 degrees of freedom, p = 1e-4


def test_min_p_keeps_the_softmax_of_those_above_its_share() -> None:
    draws = 40_000
    probabilities = torch.tensor([0.4, 0.05, 0.2, 0.1, 0.25], dtype=torch.float64)
    request: dict[str, Any] = {
        "temperature": torch.ones(draws),
        "top_k": torch.zeros(draws, dtype=torch.int32),
        "top_p": torch.ones(draws),
        "seed": torch.full((draws,), 5),
        "offset": torch.arange(draws),
    }
    logits = probabilities.log().expand(draws, -1)
    for min_p, kept in ((0.3, [0, 2, 4]), (0.2, [0, 2, 3, 4]), (1.0, [0]), (0.0, [0, 1, 2, 3, 4])):
        got = sample_top_k_top_p(logits, **request, min_p=torch.full((draws,), min_p), out_dtype=torch.int32)
        assert got.dtype == torch.int32
        counts = torch.bincount(got, minlength=5).double()
        assert counts.nonzero().flatten().tolist() == kept
        expected = probabilities[kept] / probabilities[kept].sum() * draws
        assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 23.6  # at most 4 degrees of freedom, p = 1e-4
    # top_p applies to the tokens that min_p keeps. These have the probabilities 0.4, 0.25 and 0.2. The first two add up to more
    # than half of the sum.
    got = sample_top_k_top_p(logits, **{**request, "top_p": torch.full((draws,), 0.5)}, min_p=torch.full((draws,), 0.3))
    assert set(got.tolist()) == {0, 4}


def test_min_p_of_the_definition_token_by_token() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 300, 40
    logits = torch.randn(rows, vocab, generator=generator).mul(2).round().div(2)
    temperature, min_p = torch.full((rows,), 0.75), 2.0 ** -torch.randint(0, 8, (rows,), generator=generator).float()
    top_p = torch.rand(rows, generator=generator).clamp(min=0.1)
    top_k = torch.randint(0, vocab, (rows,), generator=generator, dtype=torch.int32)
    seed, offset = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    masked = logits.double()
    share = torch.exp((masked - masked.max(-1, keepdim=True).values) / 0.75)
    masked = torch.where(share < min_p.double().unsqueeze(1), -INF, masked).float()
    expected = sample_top_k_top_p(masked, temperature, top_k, top_p, seed, offset)
    assert torch.equal(sample_top_k_top_p(logits, temperature, top_k, top_p, seed, offset, min_p), expected)


def test_it_is_a_proper_custom_operator(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    arguments = {"logits": torch.randn(2, 6), "tokens": int32([1, 2], [0, -1]), "logit_bias": torch.ones(2, 2)}
    check_custom_op(adjust_logits, arguments)
    check_custom_op(adjust_logits, {**arguments, "out": torch.zeros(2, 6)})
