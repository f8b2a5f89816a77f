"""Tests the Triton sampling kernels beyond the operators' cases: weights and random numbers bit by bit, and all kinds of
distributions, including those for which a candidate list is not enough."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel import argmax, sample_top_k_top_p, top_k_top_p_probs
from tokenspeed_kernel.triton.sampling._guess_device import group_counts, range_of_cutoff
from tokenspeed_kernel.triton.sampling._rows import groups_of
from tokenspeed_kernel.triton.sampling._rows_device import from_sort_key, sort_key
from tokenspeed_kernel.triton.sampling._weights_device import scale_of, token_weights, uniform
from tokenspeed_kernel.triton.sampling.sample_top_k_top_p import device_code
from tokenspeed_kernel.triton.sampling.sample_top_k_top_p import sample_top_k_top_p as launcher
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.ops.sampling import philox
from tokenspeed_kernel_base.ops.sampling import weights as definition

DEVICE = default_device()
INF, NAN = float("inf"), float("nan")


@triton.jit
def _weigh(x, largest, scale, out, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, token_weights(tl.load(x + index), tl.load(largest), tl.load(scale), 0))


@pytest.mark.parametrize("temperature", [1.0, 100.0, 0.013, 1e-45])
def test_weights_are_those_of_the_definition_bit_for_bit(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = definition.scale_of(torch.tensor([temperature]))
    spread = 45 / float(scale)
    x = 3.0 - torch.cat(
        [
            torch.rand(40_000, generator=generator) * spread,
            torch.rand(20_000, generator=generator) * spread * 1e-3,
            torch.arange(5119) / (128 * float(scale)),
            torch.tensor([0.0, INF]),
        ]
    )
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024), value=3.0)
    largest = torch.tensor([3.0])
    got = torch.empty(len(x), dtype=torch.int64, device=DEVICE)
    _weigh[(len(x) // 1024,)](x.to(DEVICE), largest.to(DEVICE), scale.to(DEVICE), got, BLOCK=1024, enable_fp_fusion=False)
    expected = definition.weights(x - 3.0, scale)
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(definition.weights(x.to(DEVICE) - 3.0, scale.to(DEVICE)).cpu(), expected)


@triton.jit
def _uniform(seed, offset, out, count):
    for i in range(count):
        tl.store(out + i, uniform(tl.load(seed + i), tl.load(offset + i)))


def test_random_numbers_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    low, high = -(2**63), 2**63 - 1
    seed, offset = (torch.randint(low, high, (60,), generator=generator) for _ in range(2))
    seed[:4], offset[:4] = torch.tensor([0, -1, 2**32, low]), torch.tensor([0, -1, 2**32 - 1, high])
    got = torch.empty(60, dtype=torch.float64, device=DEVICE)
    _uniform[(1,)](seed.to(DEVICE), offset.to(DEVICE), got, 60)
    assert torch.equal(got.cpu(), philox.uniform(seed, offset).double())


@triton.jit
def _keys(x, keys, back, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    key = sort_key(tl.load(x + index))
    tl.store(keys + index, key)
    tl.store(back + index, from_sort_key(key))


def test_keys_sort_like_logits() -> None:
    ascending = [-INF, -3e38, -1.5, -1e-45, 0.0, 1e-45, 1.0, 1.5, 3e38, INF]
    x = torch.tensor([*ascending, -0.0, NAN, -NAN, 0.0, 0.0, 0.0], device=DEVICE)
    keys, back = torch.empty(16, dtype=torch.int32, device=DEVICE), torch.empty(16, device=DEVICE)
    _keys[(1,)](x, keys, back, BLOCK=16)
    values = keys.tolist()
    assert values[:10] == sorted(set(values[:10]))
    assert values[10] == values[4]
    assert values[11] == values[12] > values[9]
    assert back.tolist()[:10] == x.tolist()[:10]


Logits = Callable[[Tensor], Tensor]
DISTRIBUTIONS: dict[str, Logits] = {
    "narrow": lambda normal: normal,
    "wide": lambda normal: normal * 4,
    "few different ones": lambda normal: (normal * 2).round(),
    "all equal": lambda normal: normal * 0,
    "both zeros": lambda normal: torch.copysign(torch.zeros(()), normal),
    "most are masked": lambda normal: torch.where(normal.abs() < 2.5, -INF, normal),
    "almost equal": lambda normal: normal * 1e-6 + 5,
    "descending": lambda normal: (normal * 4).sort(dim=-1, descending=True)[0],
    "one far above": lambda normal: torch.cat([normal[:, :-1] * 30, torch.full_like(normal[:, :1], 500)], dim=1),
    "huge": lambda normal: normal * 1e38,
}


def requests(rows: int, vocab: int, generator: torch.Generator) -> list[Tensor]:
    """Makes random temperatures from 1e-3 to 1e3, top-k, top-p, seeds and offsets. The last row is greedy."""
    drawn = torch.rand(5, rows, generator=generator)
    temperature = 10 ** (drawn[0] * 6 - 3)
    temperature[-1] = 0.0
    top_k = torch.where(drawn[1] < 0.4, 0, (drawn[2] ** 3 * vocab).int() + 1).int()
    top_p = torch.where(drawn[3] < 0.4, 1.0, drawn[4].clamp(min=1e-4))
    seed, offset = (torch.randint(-(2**62), 2**62, (rows,), generator=generator) for _ in range(2))
    return [temperature, top_k, top_p, seed, offset]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("with_min_p", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution_gives_the_same_token_on_every_device(distribution: str, dtype: torch.dtype, with_min_p: bool) -> None:
    rows, vocab = (64, 20_000) if DEVICE.type == "cuda" else (3, 5_000)
    generator = torch.Generator().manual_seed(len(distribution))
    logits = DISTRIBUTIONS[distribution](torch.randn(rows, vocab, generator=generator)).to(dtype)
    request = requests(rows, vocab, generator)
    if with_min_p:
        request.append(10 ** (-6 * torch.rand(rows, generator=generator)))
    expected = sample_top_k_top_p(logits, *request, override="reference_sample_top_k_top_p")
    there = [x.to(DEVICE) for x in (logits, *request)]
    got = sample_top_k_top_p(*there, override="triton_sample_top_k_top_p")
    assert got.tolist() == expected.tolist()
    assert sample_top_k_top_p(*there, override="reference_sample_top_k_top_p").tolist() == expected.tolist()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution_gives_the_same_probabilities_on_every_device(distribution: str) -> None:
    rows, vocab = (64, 20_000) if DEVICE.type == "cuda" else (3, 5_000)
    generator = torch.Generator().manual_seed(len(distribution))
    logits = DISTRIBUTIONS[distribution](torch.randn(rows, vocab, generator=generator))
    request = [*requests(rows, vocab, generator)[:3], 10 ** (-6 * torch.rand(rows, generator=generator))]
    expected = top_k_top_p_probs(logits, *request, override="reference_top_k_top_p_probs")
    got = top_k_top_p_probs(*(x.to(DEVICE) for x in (logits, *request)), override="triton_top_k_top_p_probs")
    assert torch.equal(got.cpu(), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ties", [False, True])
def test_ranks_and_ties_around_the_sizes_of_blocks(ties: bool) -> None:
    """top_k is at or next to powers of two and the vocabulary size. With ``ties``, logits on both sides of rank top_k are equal."""
    edges = [1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2048, 4999, 5000, 5001]
    rows = len(edges)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, 5000, generator=generator) * 2
    if ties:
        # Several hundred tokens share each of the larger logits.
        logits = logits.round().clamp(max=4.0)
    top_k = torch.tensor(edges, dtype=torch.int32)
    seed, offset = torch.arange(rows), torch.arange(rows) * 7
    for top_p in (1.0, 0.7):
        request = [torch.ones(rows), top_k, torch.full((rows,), top_p), seed, offset]
        expected = sample_top_k_top_p(logits, *request, override="reference_sample_top_k_top_p")
        got = sample_top_k_top_p(*(x.to(DEVICE) for x in (logits, *request)), override="triton_sample_top_k_top_p")
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("first", [0, 31, 32, 4095, 4999])
def test_a_greedy_row_of_equal_logits_gives_the_first(first: int) -> None:
    logits = torch.full((2, 5000), -1.0)
    logits[:, first:] = 3.0
    request = [x.to(DEVICE) for x in requests(2, 5000, torch.Generator().manual_seed(0))]
    request[0] = torch.zeros(2, device=DEVICE)
    assert sample_top_k_top_p(logits.to(DEVICE), *request, override="triton_sample_top_k_top_p").tolist() == [first, first]


def test_greedy_rows_return_the_largest_despite_close_values_in_its_group() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(30, 5000, generator=generator)
    best = torch.randint(1, 5000, (30,), generator=generator)
    rows = torch.arange(30)
    # The token before the best token is in the same group, and its logit is far above all others.
    logits[rows, best - 1], logits[rows, best] = 9.0, 10.0
    request = [x.to(DEVICE) for x in requests(30, 5000, generator)]
    request[0] = torch.zeros(30, device=DEVICE)
    assert sample_top_k_top_p(logits.to(DEVICE), *request, override="triton_sample_top_k_top_p").tolist() == best.tolist()


def test_settings_out_of_range_do_what_is_documented() -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(12, 3000, generator=generator, device=DEVICE)
    temperature = torch.tensor([-1.0, NAN, INF, 0.0] + [1.0] * 8, device=DEVICE)
    top_k = torch.tensor([0] * 4 + [-3, 0, 2**31 - 1, 5] + [0] * 4, dtype=torch.int32, device=DEVICE)
    top_p = torch.tensor([1.0] * 8 + [0.0, -1.0, NAN, 1.5], device=DEVICE)
    min_p = torch.tensor([-1.0, NAN, 2.0, INF, -INF, -0.5, NAN, 0.1, 0.0, 0.0, 1.5, NAN], device=DEVICE)
    seed, offset = torch.arange(12, device=DEVICE), torch.arange(12, device=DEVICE)
    expected = sample_top_k_top_p.operator.body(logits, temperature, top_k, top_p, seed, offset)
    # Calls the launcher directly, because the operator checks values in host memory.
    assert torch.equal(launcher(logits, temperature, top_k, top_p, seed, offset, None, torch.int64, None), expected)
    expected = sample_top_k_top_p.operator.body(logits, temperature, top_k, top_p, seed, offset, min_p)
    assert torch.equal(launcher(logits, temperature, top_k, top_p, seed, offset, min_p, torch.int64, None), expected)


@pytest.mark.parametrize("rows", [1, 5])
def test_strided_logits_and_out(rows: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(2500, rows * 2, generator=generator, device=DEVICE).t()[::2]
    request = [x.to(DEVICE) for x in requests(rows, 2500, torch.Generator().manual_seed(1))]
    out = torch.full((rows, 3), -1, device=DEVICE)
    for function, inputs in ((argmax, [logits]), (sample_top_k_top_p, [logits, *request])):
        expected = function(*inputs, override=f"reference_{function.__name__}")
        function(*inputs, out=out[:, 1], override=f"triton_{function.__name__}")
        assert torch.equal(out[:, 1], expected)
        assert (out[:, ::2] == -1).all()


@triton.jit
def _range(
    logits,
    vocab,
    maxima,
    groups,
    length,
    k,
    p,
    rank,
    temperature,
    low,
    high,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    SAMPLE: tl.constexpr,
    READ: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    keys = tl.load(maxima + group, mask=group < groups, other=-0x80000000)
    scale = scale_of(tl.load(temperature))
    largest = tl.max(keys, axis=0)
    counts = group_counts(keys, from_sort_key(largest), scale)
    first, last = range_of_cutoff(
        logits,
        1,
        vocab,
        maxima,
        counts,
        groups,
        length,
        k > 0,
        k,
        tl.load(p),
        rank,
        largest,
        scale,
        None,
        BLOCK,
        BLOCKS,
        RUN,
        SAMPLE,
        READ,
    )
    tl.store(low, from_sort_key(first.to(tl.int32)))
    tl.store(high, from_sort_key(last.to(tl.int32)))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 0.5), (1.0, 0, 0.999), (1.0, 3000, 1.0), (2.0, 0, 0.9), (20.0, 0, 0.9)],
)
def test_a_range_holds_the_last_token_kept_and_few_others(temperature: float, top_k: int, top_p: float) -> None:
    vocab = 100_000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 4
    weight = definition.weights(logits - logits.max(), definition.scale_of(torch.tensor([temperature])))[0]
    ordered, order = logits[0].sort(descending=True, stable=True)
    sums = weight[order].cumsum(0)
    last = top_k - 1 if top_k else int((sums < top_p * sums[-1]).sum())

    groups, there = groups_of(logits), logits.to(DEVICE)
    grouping = {"BLOCK": groups.block, "BLOCKS": groups.blocks, "RUN": groups.run}
    maxima = torch.empty(groups.count, dtype=torch.int32, device=DEVICE)
    device_code.group_maxima_kernel[(groups.spans,)](
        there, vocab, 1, vocab, maxima, groups.spans, groups.length, EARLY=False, **grouping
    )
    low, high, p, warmth = (torch.tensor([x], device=DEVICE) for x in (0.0, 0.0, top_p, temperature))
    size = triton.next_power_of_2(groups.count)
    request = (groups.count, groups.length, top_k, p, 100, warmth)
    _range[(1,)](there, vocab, maxima, *request, low, high, GROUPS=size, SAMPLE=4096, READ=2048, **grouping)
    assert low.item() <= ordered[last] <= high.item()
    assert int(((ordered >= low.item()) & (ordered <= high.item())).sum()) < vocab // 5
