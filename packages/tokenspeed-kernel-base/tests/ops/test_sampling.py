"""Tests argmax and sample_top_k_top_p: random numbers bit by bit, selections against Python integers, frequencies by chi-square
tests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as warpers

from tokenspeed_kernel_base.ops.sampling.argmax import argmax
from tokenspeed_kernel_base.ops.sampling.philox import philox4x32, uniform
from tokenspeed_kernel_base.ops.sampling.sample_top_k_top_p import sample_top_k_top_p
from tokenspeed_kernel_base.ops.sampling.top_k_top_p_probs import top_k_top_p_probs
from tokenspeed_kernel_base.ops.sampling.weights import scale_of, weights

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WORDS = st.integers(0, 2**32 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


# -- random numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, words: str) -> None:
    def parse(text: str) -> torch.Tensor:
        return torch.tensor([int(word, 16) for word in text.split()])

    assert torch.equal(philox4x32(parse(counter), parse(key)), parse(words))


def philox_of_integers(counter: list[int], key: list[int]) -> list[int]:
    """Computes the rounds of Philox with Python integers, which cannot overflow."""
    for number in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        keys = [(key[0] + number * 0x9E3779B9) % 2**32, (key[1] + number * 0xBB67AE85) % 2**32]
        counter = [right // 2**32 ^ counter[1] ^ keys[0], right % 2**32, left // 2**32 ^ counter[3] ^ keys[1], left % 2**32]
    return counter


@given(
    counters=st.lists(st.lists(WORDS, min_size=4, max_size=4), min_size=1, max_size=4), key=st.lists(WORDS, min_size=2, max_size=2)
)
def test_philox_is_the_same_with_integers_of_any_width(counters: list[list[int]], key: list[int]) -> None:
    got = philox4x32(torch.tensor(counters), torch.tensor(key))
    assert got.tolist() == [philox_of_integers(counter, key) for counter in counters]


@given(seed=INT64, offset=INT64)
def test_uniform_is_the_first_word_of_key_seed_and_counter_offset(seed: int, offset: int) -> None:
    s, o = seed % 2**64, offset % 2**64
    word = philox_of_integers([o % 2**32, o // 2**32, 0, 0], [s % 2**32, s // 2**32])[0]
    got = uniform(torch.tensor([seed]), torch.tensor([offset]))
    assert got.dtype == torch.float32
    assert got.item() == (word >> 8) / 2**24
    assert 0 <= got.item() < 1


def test_uniform_is_spread_evenly() -> None:
    numbers = uniform(torch.full((100_000,), 7), torch.arange(100_000))
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    assert chi_square(counts, torch.full((64,), 1 / 64)) < 113  # 63 degrees of freedom, p = 1e-4
    # The numbers of adjacent offsets must not correlate, nor those of adjacent seeds.
    other = uniform(torch.arange(100_000), torch.full((100_000,), 7))
    for x in (numbers, other):
        centred = x.double() - 0.5
        assert abs(float((centred[1:] * centred[:-1]).mean() * 12)) < 4 / math.sqrt(100_000)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# -- argmax ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 1001])
def test_argmax_is_the_first_of_the_largest(dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-3, 3, (50, vocab)).to(dtype)
    rows = logits.tolist()
    assert argmax(logits).tolist() == [row.index(max(row)) for row in rows]
    assert argmax(logits).dtype == torch.int64


@given(
    st.lists(st.lists(st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0]), min_size=20, max_size=20), min_size=1, max_size=5)
)
def test_argmax_takes_nan_for_the_largest(rows: list[list[float]]) -> None:
    def first(row: list[float]) -> int:
        broken = [i for i, x in enumerate(row) if math.isnan(x)]
        return broken[0] if broken else row.index(max(row))

    assert argmax(torch.tensor(rows)).tolist() == [first(row) for row in rows]


def test_argmax_strided_out_and_empty() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 5).t()
    out = torch.empty(5, dtype=torch.int64)
    assert argmax(logits, out=out) is out
    assert torch.equal(out, logits.contiguous().argmax(-1))
    assert argmax(torch.ones(0, 5)).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": torch.ones(2, 3).int()}, TypeError, "logits must be a tensor of .*, got int32"),
        ({"logits": torch.ones(3)}, ValueError, r"logits must be of shape \[rows, vocab\], got \[3\]"),
        ({"logits": torch.ones(2, 0)}, ValueError, "logits must be of shape .* vocab > 0, got"),
        ({"out": torch.ones(2).int()}, TypeError, "out must be int64, got a int32 tensor"),
        ({"out": torch.ones(3).long()}, ValueError, "out must have shape"),
    ],
)
def test_argmax_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^argmax: {message}"):
        argmax(**{"logits": torch.ones(2, 3), **arguments})


# -- sampling ----------------------------------------------------------------------------------------------------------------


def settings_for(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "temperature": torch.full((rows,), temperature),
        "top_k": torch.full((rows,), top_k, dtype=torch.int32),
        "top_p": torch.full((rows,), top_p),
        "seed": torch.full((rows,), seed),
        "offset": torch.arange(rows),
    }


def choose(row: list[float], temperature: float, top_k: int, top_p: float, u: float) -> int:
    """Selects a token as the docstring of `sample_top_k_top_p` specifies, with Python integers."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if temperature == 0:
        return order[0]
    of_token = weights(torch.tensor(row) - max(row), scale_of(torch.tensor([temperature]))).tolist()
    ordered = [of_token[i] for i in order]
    k = top_k if 0 < top_k < len(row) else len(row)
    limit = top_p * float(sum(ordered[:k]))
    kept = 1
    while kept < k and sum(ordered[:kept]) < limit:
        kept += 1
    target = math.floor(u * float(sum(ordered[:kept])))
    running = 0
    for i in sorted(order[:kept]):
        running += of_token[i]
        if running > target:
            return i
    raise AssertionError("the target lies beyond all weights")


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 30.0])
def test_weights_are_powers_of_e(temperature: float) -> None:
    distance = -torch.linspace(0, 30 * temperature, 300_001)
    got = weights(distance, scale_of(torch.tensor([temperature])))
    exact = 2.0**40 * torch.exp(distance.double() / torch.tensor(temperature).double())
    assert got[0] == 2**40
    assert got.min() == 0
    assert bool(((got - exact).abs() <= 3 + exact * 2.0**-19).all())


def test_weights_of_float32_logits_are_within_the_documented_error() -> None:
    # The exponent is the product of two float32 values: the distance from the largest logit, and the scale. Each of the three is
    # rounded to float32. The errors are largest if the exponent is just below -16 and all three are rounded in one direction.
    torch.manual_seed(0)
    temperature, largest = torch.rand(1_000_000) + 0.5, torch.randn(1_000_000) * 10
    logits = (largest.double() - temperature.double() * (11.1 + 3 * torch.rand(1_000_000))).float()
    exact = 2.0**40 * torch.exp((logits.double() - largest.double()) / temperature.double())
    error = (weights(logits - largest, scale_of(temperature)) - exact.floor()).abs()
    assert bool((error <= (exact * 2.0**-18).clamp(min=3)).all())
    assert bool((error > (exact * 2.0**-19).clamp(min=3)).any())


# The logits have few distinct values, so that ties are common. top_p is a dyadic fraction, so that prefixes often have exactly this
# probability.
LOGITS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, -INF]), st.floats(-20, 20, width=32))
REQUEST = st.tuples(
    st.sampled_from([0.0, 0.25, 1.0, 1.5, 100.0]),
    st.integers(0, 14),
    st.sampled_from([0.0625, 0.25, 0.5, 0.75, 1.0]),
    INT64,
    INT64,
)


@settings(max_examples=200)
@given(data=st.data(), vocab=st.integers(1, 12), rows=st.integers(1, 4))
def test_the_choice_is_the_specified_one(data: st.DataObject, vocab: int, rows: int) -> None:
    logits = data.draw(st.lists(st.lists(LOGITS, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows))
    for row in logits:
        row[data.draw(st.integers(0, vocab - 1))] = 1.0  # at least one logit of a row is finite
    temperature, top_k, top_p, seed, offset = zip(*[data.draw(REQUEST) for _ in range(rows)], strict=True)
    u = uniform(torch.tensor(seed), torch.tensor(offset)).tolist()
    got = sample_top_k_top_p(
        torch.tensor(logits),
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(seed),
        torch.tensor(offset),
    )
    expected = [choose(*row) for row in zip(logits, temperature, top_k, top_p, u, strict=True)]
    assert got.tolist() == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    draws = 40_000
    logits = torch.tensor([0.5, 2.0, -1.0, 0.0, 1.0, 1.0, -0.5, 1.5])
    got = sample_top_k_top_p(logits.expand(draws, -1), **settings_for(draws, temperature, seed=3))
    counts = torch.bincount(got, minlength=8)
    assert chi_square(counts, torch.softmax(logits.double() / temperature, dim=-1)) < 29.9  # 7 degrees of freedom, p = 1e-4


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (3, 1.0, [1, 7, 4]),  # tokens 4 and 5 have equal logits, so the lower id is kept
        (0, 0.5, [1, 7]),
        (4, 0.75, [1, 7, 4]),
        (5, 0.99, [1, 7, 4, 5, 0]),
    ],
)
def test_frequencies_are_the_restricted_softmax(top_k: int, top_p: float, kept: list[int]) -> None:
    draws = 40_000
    logits = torch.tensor([0.5, 2.0, -1.0, 0.0, 1.0, 1.0, -0.5, 1.5])
    got = sample_top_k_top_p(logits.expand(draws, -1), **settings_for(draws, 1.0, top_k, top_p, seed=-5))
    counts = torch.bincount(got, minlength=8)
    assert set(counts.nonzero().flatten().tolist()) == set(kept)
    assert chi_square(counts[kept], torch.softmax(logits[kept].double(), dim=-1)) < 23.6  # at most 4 degrees of freedom, p = 1e-4


def support(logits: torch.Tensor, **options: Any) -> set[int]:
    rows = 4000
    return set(sample_top_k_top_p(logits.expand(rows, -1), **settings_for(rows, **options)).tolist())


def test_the_edges_of_top_k_and_top_p() -> None:
    even = torch.zeros(8)
    assert support(even) == set(range(8))
    assert support(even, top_k=8) == support(even, top_k=2**31 - 1) == set(range(8))
    assert support(even, top_k=1) == {0}
    assert support(even, top_k=5) == set(range(5))
    assert support(even, top_p=0.5) == set(range(4)), "the prefix that holds exactly top_p is enough"
    assert support(even, top_p=0.5 + 2**-20) == set(range(5))
    assert support(even, top_p=1e-30) == {0}
    assert support(even, top_k=4, top_p=0.5) == {0, 1}, "probabilities are renormalised after top_k"
    # One token has twice the probability of each of the other two: 1/2, 1/4, 1/4.
    sloped = torch.tensor([0.0, 0.0, math.log(2)])
    assert support(sloped, top_p=0.5) == {2}
    assert support(sloped, top_p=0.75) == {2, 0}


def test_a_number_on_the_boundary_of_two_tokens_belongs_to_the_second() -> None:
    # With equal logits, the interval of token i begins at exactly i / 4096. Few random numbers equal such a boundary, so the test
    # searches for them.
    offsets = torch.arange(1 << 19)
    u = uniform(torch.zeros_like(offsets), offsets).double()
    hits = (u * 4096).frac() == 0
    offsets, u = offsets[hits], u[hits]
    assert len(offsets) > 50
    arguments = {**settings_for(len(offsets)), "offset": offsets}
    assert torch.equal(sample_top_k_top_p(torch.zeros(len(offsets), 4096), **arguments), (u * 4096).long())


def test_values_out_of_range_that_cannot_be_checked_do_what_is_documented() -> None:
    # Values in device memory are not checked. The operator's body computes the documented results for such values.
    body = sample_top_k_top_p.operator.body
    torch.manual_seed(0)
    logits = torch.randn(4, 30)

    def changed(**values: torch.Tensor) -> torch.Tensor:
        return body(logits, **{**settings_for(4, top_k=20, top_p=0.9), **values})

    greedy, plain = argmax(logits), settings_for(4, top_k=20, top_p=0.9)
    assert torch.equal(changed(temperature=torch.tensor([-1.0, NAN, INF, -INF])), greedy)
    assert torch.equal(changed(top_p=torch.tensor([0.0, -1.0, NAN, -INF])), greedy)
    assert torch.equal(changed(top_p=torch.tensor([1.5, 1.0, INF, 2.0])), body(logits, **{**plain, "top_p": torch.ones(4)}))
    everything = torch.zeros(4, dtype=torch.int32)
    assert torch.equal(changed(top_k=everything - 3), body(logits, **{**plain, "top_k": everything}))


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((50,), -INF)
    logits[[3, 17, 40]] = torch.tensor([0.0, 1.0, 0.5])
    assert support(logits) == support(logits, top_k=20, temperature=100.0) == {3, 17, 40}


def test_temperature_0_is_argmax_and_warm_rows_beside_it_are_not_disturbed() -> None:
    torch.manual_seed(0)
    logits = torch.randint(-3, 3, (200, 40)).float()
    mixed = settings_for(200, temperature=1.0, seed=9)
    mixed["temperature"][::2] = 0.0
    got = sample_top_k_top_p(logits, **mixed)
    warm = sample_top_k_top_p(logits, **settings_for(200, temperature=1.0, seed=9))
    assert torch.equal(got[::2], argmax(logits)[::2])
    assert torch.equal(got[1::2], warm[1::2])
    assert not torch.equal(warm, argmax(logits))


def test_a_tiny_temperature_draws_from_the_largest_only() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0 - 1e-6, 2.0])
    assert support(logits, temperature=1e-30) == {1}
    assert support(logits, temperature=1e-45) == {1}


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_without_a_finite_largest_logit_give_argmax(dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [[1.0, NAN, 2.0, NAN], [-INF, -INF, -INF, -INF], [1.0, 2.0, INF, INF], [NAN, INF, 0.0, 0.0], [-INF, NAN, -INF, INF]],
        dtype=dtype,
    )
    got = sample_top_k_top_p(logits, **settings_for(5))
    assert got.tolist() == argmax(logits).tolist() == [1, 0, 2, 0, 1]


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 10), vocab=st.integers(1, 300))
def test_a_row_gives_the_same_token_in_any_batch(seed: int, rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab, generator=generator)
    arguments = {
        "temperature": torch.rand(rows, generator=generator) * 2,
        "top_k": torch.randint(0, vocab + 2, (rows,), generator=generator, dtype=torch.int32),
        "top_p": torch.rand(rows, generator=generator).clamp(min=0.01),
        "seed": torch.randint(0, 2**40, (rows,), generator=generator),
        "offset": torch.randint(0, 2**20, (rows,), generator=generator),
    }
    together = sample_top_k_top_p(logits, **arguments)
    order = torch.randperm(rows, generator=generator)
    moved = sample_top_k_top_p(logits[order], **{name: x[order] for name, x in arguments.items()})
    assert torch.equal(moved, together[order])
    for row in range(rows):
        alone = sample_top_k_top_p(logits[row : row + 1], **{name: x[row : row + 1] for name, x in arguments.items()})
        assert alone.item() == together[row].item()


def test_seed_and_offset_are_all_that_matters_and_both_do() -> None:
    logits = torch.zeros(500, 1000)
    base = sample_top_k_top_p(logits, **settings_for(500, seed=1))
    assert torch.equal(base, sample_top_k_top_p(logits, **settings_for(500, seed=1)))
    other_seed = sample_top_k_top_p(logits, **settings_for(500, seed=2))
    high_word = sample_top_k_top_p(logits, **settings_for(500, seed=1 + 2**32))
    for other in (other_seed, high_word, base.roll(1)):
        assert (other == base).float().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_widened_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, 100)).to(dtype)
    arguments = settings_for(64, temperature=0.7, top_k=30, top_p=0.9)
    assert torch.equal(sample_top_k_top_p(logits, **arguments), sample_top_k_top_p(logits.float(), **arguments))


def test_out_and_empty() -> None:
    out = torch.full((3,), -1)
    arguments = settings_for(3)
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).t()
    assert sample_top_k_top_p(logits, **arguments, out=out) is out
    assert torch.equal(out, sample_top_k_top_p(logits.contiguous(), **arguments))
    assert sample_top_k_top_p(torch.ones(0, 5), **settings_for(0)).shape == (0,)


LOGITS_2X3 = torch.ones(2, 3)
# -- the distribution itself -------------------------------------------------------------------------------------------------


def probs_of(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    request = settings_for(len(logits), **options)
    return top_k_top_p_probs(logits, *(request[name] for name in ("temperature", "top_k", "top_p")))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_probabilities_are_the_softmax(temperature: float) -> None:
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(0)) * 3
    got = probs_of(logits, temperature=temperature)
    torch.testing.assert_close(got, torch.softmax(logits / temperature, dim=-1), rtol=1e-5, atol=1e-11)
    assert (got.double().sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (7, 1.0), (0, 0.6), (40, 0.9)])
def test_probabilities_are_the_restricted_softmax(top_k: int, top_p: float) -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)) * 3
    ordered, order = torch.softmax(logits.double(), dim=-1).sort(-1, descending=True)
    ordered[:, top_k or 300 :] = 0
    ordered /= ordered.sum(-1, keepdim=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    ordered /= ordered.sum(-1, keepdim=True)
    wanted = torch.zeros_like(ordered).scatter(1, order, ordered)
    got = probs_of(logits, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-11)
    assert torch.equal(got > 0, wanted > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_probabilities_are_those_of_transformers(dtype: torch.dtype) -> None:
    # Requests are drawn from a fixed seed: rounding may decide about a token whose probability is that of a limit.
    draw = random.Random(0)
    for _ in range(150):
        vocab = draw.choice([1, 2, 7, 60])
        # The logits are distinct: transformers keeps all tokens that tie with the last one.
        logits = torch.tensor([(i - vocab // 3) / 8 for i in draw.sample(range(vocab), vocab)], dtype=dtype)
        logits[draw.sample(range(vocab), draw.randrange(vocab))] = -INF
        temperature, top_k = draw.choice([0.05, 0.5, 1.0, 3.0]), draw.choice([0, 1, vocab // 2, vocab, vocab + 3])
        top_p, min_p = draw.choice([0.05, 0.5, 0.9, 1.0]), draw.choice([0.0, 0.02, 0.3, 1.0])
        request = torch.tensor([[temperature], [top_p], [min_p]])
        temperature, top_p, min_p = request.flatten().tolist()  # rounded to float32
        expected = warpers.TemperatureLogitsWarper(temperature)(None, logits.double().unsqueeze(0))
        expected = warpers.MinPLogitsWarper(min_p)(None, expected) if min_p else expected
        expected = warpers.TopKLogitsWarper(top_k)(None, expected) if top_k else expected
        expected = warpers.TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
        got = top_k_top_p_probs(logits.unsqueeze(0), request[0], torch.tensor([top_k], dtype=torch.int32), request[1], request[2])
        torch.testing.assert_close(got.double(), expected.softmax(-1), rtol=2e-5, atol=1e-11)


def test_min_p_leaves_out_what_is_less_probable() -> None:
    logits = torch.tensor([[0.0, math.log(0.5), math.log(0.25)]] * 2)
    rest = (torch.ones(2), torch.zeros(2, dtype=torch.int32), torch.ones(2))
    got = top_k_top_p_probs(logits, *rest, torch.tensor([0.4, 0.0]))
    torch.testing.assert_close(got, torch.tensor([[2 / 3, 1 / 3, 0.0], [4 / 7, 2 / 7, 1 / 7]]))


def test_rows_that_are_not_drawn_give_one_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [NAN, INF, NAN], [-INF, -INF, -INF], [1.0, INF, INF]])
    eye = torch.eye(3)
    assert torch.equal(probs_of(logits, temperature=1.0)[1:], eye[[0, 0, 1]])
    assert torch.equal(probs_of(logits, temperature=0.0), eye[[1, 0, 0, 1]])
    assert torch.equal(probs_of(logits, temperature=0.0).argmax(-1), argmax(logits))


def test_tokens_are_drawn_from_the_probabilities() -> None:
    logits = torch.tensor([[0.3, -1.0, 0.9, 0.0, 2.0, -0.5]])
    options: dict[str, Any] = {"temperature": 1.3, "top_k": 5, "top_p": 0.92}
    probabilities = probs_of(logits, **options)[0]
    drawn = sample_top_k_top_p(logits.expand(20_000, -1), **settings_for(20_000, **options))
    counts = torch.bincount(drawn, minlength=6)
    assert (counts[probabilities == 0] == 0).all()
    kept = probabilities > 0
    assert 1 < kept.sum() < 6
    assert chi_square(counts[kept], probabilities[kept]) < 24  # at most 4 degrees of freedom, p = 1e-4


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": LOGITS_2X3.long()}, TypeError, "logits must be a tensor of .*, got int64"),
    ({"logits": torch.ones(3)}, ValueError, "logits must be of shape"),
    ({"logits": torch.ones(2, 0)}, ValueError, r"logits must be of shape .* with vocab in 1 to 4194304, got \[2, 0\]"),
    ({"logits": torch.ones(1).expand(2, 2**22 + 1)}, ValueError, "logits must be of shape .* with vocab in 1 to 4194304"),
    ({"temperature": torch.ones(3)}, ValueError, "temperature must be of shape .* where rows is 2 in logits"),
    ({"temperature": torch.ones(2).double()}, TypeError, "temperature must be a tensor of float32"),
    ({"temperature": torch.tensor([1.0, -0.1])}, ValueError, "temperature must be finite and not negative, got -0.1 in row 1"),
    ({"temperature": torch.tensor([NAN, 1.0])}, ValueError, "temperature must be finite and not negative, got nan in row 0"),
    ({"temperature": torch.tensor([1.0, INF])}, ValueError, "temperature must be finite .* got inf in row 1"),
    ({"temperature": 1.0}, TypeError, "temperature must be a tensor, got float"),
    ({"top_k": torch.tensor([0, 1])}, TypeError, "top_k must be a tensor of int32, got int64"),
    ({"top_k": torch.tensor([0], dtype=torch.int32)}, ValueError, "top_k must be of shape"),
    ({"top_k": torch.tensor([0, -1], dtype=torch.int32)}, ValueError, "top_k must be 0 for all tokens, .* got -1 in row 1"),
    ({"top_p": torch.tensor([0.0, 1.0])}, ValueError, "top_p must be more than 0 and at most 1, got 0 in row 0"),
    ({"top_p": torch.tensor([1.0, 1.5])}, ValueError, "top_p must be more than 0 and at most 1, got 1.5 in row 1"),
    ({"top_p": torch.tensor([1.0, NAN])}, ValueError, "top_p must be more than 0 and at most 1, got nan in row 1"),
    ({"top_p": torch.ones(2).half()}, TypeError, "top_p must be a tensor of float32"),
    ({"seed": torch.ones(2, dtype=torch.int32)}, TypeError, "seed must be a tensor of int64, got int32"),
    ({"offset": torch.ones(2)}, TypeError, "offset must be a tensor of int64, got float32"),
    ({"offset": torch.ones(2, 1).long()}, ValueError, "offset must be of shape"),
    ({"out": torch.ones(2)}, TypeError, "out must be int64"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^sample_top_k_top_p: {message}"):
        sample_top_k_top_p(**{"logits": LOGITS_2X3, **settings_for(2), **arguments})


def test_probabilities_are_a_proper_custom_operator(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    request = settings_for(3)
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    check_custom_op(top_k_top_p_probs, {"logits": logits, **{n: request[n] for n in ("temperature", "top_k", "top_p")}})


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    logits = torch.randn(3, 10)
    check_custom_op(argmax, {"logits": logits})
    check_custom_op(argmax, {"logits": logits, "out": torch.zeros(3, dtype=torch.int64)})
    check_custom_op(sample_top_k_top_p, {"logits": logits, **settings_for(3, top_k=4, top_p=0.9)})
