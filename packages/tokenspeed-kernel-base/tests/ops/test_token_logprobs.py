"""Tests token_logprobs and argmax_with_value against log_softmax, and merged results of vocabulary shards against results of the
whole vocabulary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernel_base.ops.sampling.argmax import argmax
from tokenspeed_kernel_base.ops.sampling.argmax_with_value import argmax_with_value
from tokenspeed_kernel_base.ops.sampling.merge_argmax import merge_argmax
from tokenspeed_kernel_base.ops.sampling.merge_token_logprobs import merge_token_logprobs
from tokenspeed_kernel_base.ops.sampling.token_logprobs import token_logprobs

NAN, INF = float("nan"), float("inf")
LOGITS = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5])


def parts_of(logits: Tensor, ends: list[int]) -> list[tuple[Tensor, int]]:
    return [(logits[:, begin:end], begin) for begin, end in itertools.pairwise(ends)]


def stacked(results: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.stack(one) for one in zip(*results, strict=True)]


# -- argmax ------------------------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.lists(LOGITS, min_size=12, max_size=12), min_size=1, max_size=4), cut=st.integers(1, 11), flip=st.booleans()
)
def test_the_best_of_parts_is_the_best_of_all(rows: list[list[float]], cut: int, flip: bool) -> None:
    logits = torch.tensor(rows)
    parts = [argmax_with_value(part, first) for part, first in parts_of(logits, [0, cut, 12])]
    values, tokens = stacked(parts[::-1] if flip else parts)
    assert merge_argmax(values, tokens).tolist() == argmax(logits).tolist()
    assert merge_argmax(values, tokens, out_dtype=torch.int32).dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_value_is_the_logit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 33).to(dtype)
    values, tokens = argmax_with_value(logits, 7)
    assert torch.equal(values, logits.amax(-1).float())
    assert torch.equal(tokens, (logits.argmax(-1) + 7).int())
    assert math.copysign(1.0, argmax_with_value(torch.tensor([[-0.0, -1.0]]))[0].item()) == 1.0


# -- log-probabilities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("warm", [False, True])
def test_they_are_those_of_log_softmax(dtype: torch.dtype, warm: bool) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(12, 500)).to(dtype)
    tokens = torch.randint(0, 500, (12,))
    temperature = torch.rand(12) + 0.2 if warm else None
    expected = torch.log_softmax(logits.double() / (temperature.double().unsqueeze(1) if temperature is not None else 1.0), -1)
    chosen, top, top_tokens, lse = token_logprobs(logits, tokens, 9, temperature)
    torch.testing.assert_close(chosen.double(), expected.gather(1, tokens.unsqueeze(1)).squeeze(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top.double(), expected.topk(9).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top.double(), expected.gather(1, top_tokens.long()), rtol=1e-5, atol=1e-5)
    plain = token_logprobs(logits, tokens, 9, temperature, normalize=False)
    torch.testing.assert_close(plain[0] - lse, chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain[1] - lse.unsqueeze(1), top, rtol=1e-5, atol=1e-5)
    assert torch.equal(plain[2], top_tokens)
    assert torch.equal(plain[3], lse)


def test_equal_logits_come_by_token_and_nan_first() -> None:
    logits = torch.tensor([[1.0, 2.0, NAN, 2.0, -INF, 2.0], [0.0, -0.0, -1.0, 0.0, -0.0, 0.0]])
    top_tokens = token_logprobs(logits, torch.tensor([0, 0]), 6, first_token=10)[2]
    assert top_tokens.tolist() == [[12, 11, 13, 15, 10, 14], [10, 11, 13, 14, 15, 12]]


def test_temperatures_that_are_none_count_as_1() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(5)
    odd = token_logprobs(logits, tokens, 3, torch.tensor([0.0, -1.0, INF, NAN, 1.0]))
    for one, other in zip(odd, token_logprobs(logits, tokens, 3), strict=True):
        assert torch.equal(one, other)


def test_tokens_without_probability() -> None:
    logits = torch.tensor([[-INF, 0.0, -INF], [-INF, -INF, -INF], [INF, 0.0, -INF], [NAN, 0.0, -INF]])
    chosen, top, _, lse = token_logprobs(logits, torch.tensor([0, 1, 1, 1]), 3)
    assert chosen[:2].tolist() == [-INF, -INF]
    assert chosen[2:].isnan().all()
    assert top[0].tolist() == [0.0, -INF, -INF]
    assert top[1].tolist() == [-INF] * 3
    assert top[2:, :2].isnan().all()
    assert top[2:, 2].tolist() == [-INF, -INF]
    assert lse[:2].tolist() == [0.0, -INF]
    assert lse[2:].isnan().all()
    # Tokens that the logits do not cover have log-probability -inf.
    assert token_logprobs(logits, torch.tensor([-1, 3, 100, 5]), first_token=10)[0].tolist() == [-INF] * 4


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), ends=st.sets(st.integers(1, 59), max_size=4), top_k=st.integers(0, 5), flip=st.booleans())
def test_parts_merge_into_the_whole(seed: int, ends: set[int], top_k: int, flip: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(6, 60, generator=generator)).round()  # many logits are equal
    logits[0, ::2] = -INF
    tokens = torch.randint(-1, 60, (6,), generator=generator)
    bounds = [0, *sorted(ends), 60]
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    top_k = min(top_k, *sizes)
    parts = [token_logprobs(part, tokens, top_k, first_token=first, normalize=False) for part, first in parts_of(logits, bounds)]
    merged = merge_token_logprobs(*stacked(parts[::-1] if flip else parts))
    whole = token_logprobs(logits, tokens, top_k)
    for name, one, other in zip(("token", "top", "top_tokens", "lse"), merged, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)


def test_shards_are_compared_by_their_rounded_values() -> None:
    close = torch.tensor([[1.0, 1.0 + 2.0**-40]], dtype=torch.float64)
    halves = [argmax_with_value(close[:, token : token + 1], token) for token in (0, 1)]
    assert argmax(close).item() == 1
    assert merge_argmax(*map(torch.stack, zip(*halves, strict=True))).item() == 0

    logits, token = torch.tensor([[8 - 2.0**-20, 8 - 2.0**-21]]), torch.tensor([0])
    temperature = torch.tensor([1.9])
    quotients = (logits / temperature)[0].tolist()
    assert quotients[0] == quotients[1]
    assert token_logprobs(logits, token, 1, temperature)[2].item() == 1
    parts = [token_logprobs(logits[:, i : i + 1], token, 1, temperature, first_token=i, normalize=False) for i in (0, 1)]
    assert merge_token_logprobs(*map(torch.stack, zip(*parts, strict=True)))[2].item() == 0


def test_a_part_without_probability_changes_nothing() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    logits[:, 10:] = -INF
    tokens = torch.tensor([3, 12, 9])
    parts = [token_logprobs(part, tokens, 4, first_token=first, normalize=False) for part, first in parts_of(logits, [0, 10, 20])]
    whole = token_logprobs(logits, tokens, 4)
    for one, other in zip(merge_token_logprobs(*stacked(parts)), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_out_and_empty() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).t()
    outs = {
        "token_out": torch.empty(3),
        "top_out": torch.empty(3, 2),
        "top_tokens_out": torch.empty(3, 2).int(),
        "lse_out": torch.empty(3),
    }
    results = token_logprobs(logits, torch.tensor([0, 4, 2]), 2, **outs)
    assert all(result is out for result, out in zip(results, outs.values(), strict=True))
    for one, other in zip(results, token_logprobs(logits.contiguous(), torch.tensor([0, 4, 2]), 2), strict=True):
        assert torch.equal(one, other)
    assert [list(x.shape) for x in token_logprobs(torch.ones(0, 5), torch.ones(0).long(), 2)] == [[0], [0, 2], [0, 2], [0]]
    assert merge_argmax(torch.ones(2, 0), torch.ones(2, 0).int()).shape == (0,)


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    logits = torch.randn(3, 10)
    check_custom_op(argmax_with_value, {"logits": logits, "first_token": 5})
    check_custom_op(token_logprobs, {"logits": logits, "tokens": torch.tensor([1, 2, 3]), "top_k": 2})
    values, tokens = stacked([argmax_with_value(logits, first) for first in (0, 10)])
    check_custom_op(merge_argmax, {"values": values, "tokens": tokens})
    parts = stacked([token_logprobs(logits, torch.tensor([1, 2, 3]), 2, first_token=first, normalize=False) for first in (0, 10)])
    check_custom_op(merge_token_logprobs, dict(zip(("token_logits", "top_logits", "top_tokens", "lse"), parts, strict=True)))
