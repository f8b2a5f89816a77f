"""Tests decode attention against float32 attention."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_nvidia.sm90.attention.decode import launch as decode
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import WIDTHS

from . import oracle
from .launched import as_operator
from .oracle import Options

mha_decode_with_kvcache = as_operator(decode.mha_decode_with_kvcache)

GPT_OSS = (64, 8, 64)
HALVES = (torch.bfloat16, torch.float16)


def _sinks(heads: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-2.0, 3.0, heads, device=device).to(dtype)


def _case(
    device: torch.device,
    kv_lens: list[int],
    new: int = 1,
    shape: tuple[int, int, int] = (16, 2, 64),
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    v_head_dim: int | None = None,
) -> oracle.Paged:
    return oracle.paged([new] * len(kv_lens), kv_lens, *shape, page_size, dtype, device, sum(kv_lens), v_head_dim)


def _launch(case: oracle.Paged, lengths: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    bounds = {"max_seqlen_k": max([0, *case.kv_lens]), "max_seqlen_q": max([1, *case.q_lens])}
    out = case.q.new_full((*case.q.shape[:2], case.v_cache.shape[3]), torch.nan)
    got = mha_decode_with_kvcache(
        case.q, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens if lengths is None else lengths,
        **{**bounds, "return_lse": True, "out": out, **options},
    )  # fmt: skip
    assert isinstance(got, tuple)
    return got


def _run(
    device: torch.device,
    kv_lens: list[int],
    new: int = 1,
    shape: tuple[int, int, int] = (16, 2, 64),
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    v_head_dim: int | None = None,
    **options: Any,
) -> None:
    case = _case(device, kv_lens, new, shape, page_size, dtype, v_head_dim)
    oracle.check(_launch(case, **options), case.wanted(Options(**options)))


@pytest.mark.parametrize(
    "kv_lens",
    [[], [0], [1], [64], [1000], [1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200], [1500, 1, 0, 700, 65, 257, 9000]],
    ids=str,
)
def test_lengths(sm90: torch.device, kv_lens: list[int]) -> None:
    """Tests lengths of zero and one, at the edges of pages and tiles, and sequences with many splits beside sequences with one
    split."""
    _run(sm90, kv_lens)


def test_a_long_sequence(sm90: torch.device) -> None:
    """Tests a sequence with more pages than a warp has lanes, which is split over all groups of CTAs."""
    _run(sm90, [40000], shape=GPT_OSS, sinks=_sinks(64, sm90))


@pytest.mark.parametrize("batch", [33, 300, 1000])
def test_many_sequences(sm90: torch.device, batch: int) -> None:
    """Tests batches with more sequences than groups of CTAs, and more than a warp handles at once."""
    draw = random.Random(batch)
    _run(sm90, [draw.randrange(700) for _ in range(batch)])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 8, 16, 20, 64])
def test_every_program(sm90: torch.device, rows: int, page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    """Tests batches with and without split-KV, and batches with little work and with much work."""
    new = 4 if rows > 16 else 1
    shape = (rows // new * 2, 2, head_dim)
    _run(sm90, [70, 2, 200], new, shape, page_size, dtype, sinks=_sinks(shape[0], sm90))
    _run(sm90, [700, 3, 0, 1300], new, shape, page_size, dtype, sinks=_sinks(shape[0], sm90))
    _run(sm90, [1100] * 200, new, shape, page_size, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("rows", [1, 8, 16, 20, 32])
def test_a_key_head_for_each_warp(sm90: torch.device, rows: int, page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    """Tests more sequences than CTAs, with short windows. The kernel then assigns one KV head to each warp."""
    draw = random.Random(rows)
    new = 4 if rows > 16 else 1
    shape = (rows // new * 4, 4, head_dim)
    kv_lens = [draw.choice([0, 1, 64, draw.randrange(1000)]) for _ in range(400)]
    _run(sm90, kv_lens, new, shape, page_size, dtype, sinks=_sinks(shape[0], sm90), window_left=draw.choice([1, 100, 127]))


@pytest.mark.parametrize("widths", WIDTHS[2:], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows", [2, 8, 16, 20, 64])
def test_other_widths(sm90: torch.device, rows: int, page_size: int, widths: tuple[int, int]) -> None:
    """Tests batches with and without split-KV, also with values that are narrower than keys."""
    new = 4 if rows > 16 else 1
    shape = (rows // new * 2, 2, widths[0])
    _run(sm90, [70, 2, 200], new, shape, page_size, v_head_dim=widths[1], sinks=_sinks(shape[0], sm90))
    _run(sm90, [700, 3, 0, 1300], new, shape, page_size, v_head_dim=widths[1], window_left=600)
    _run(sm90, [300] * 200, new, shape, page_size, v_head_dim=widths[1])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 8, 16, 20, 64])
def test_pages_of_one_token(sm90: torch.device, rows: int, head_dim: int) -> None:
    """Tests pages of one token, where the kernel gathers single rows of the cache: split and unsplit sequences, and many sequences
    with short windows."""
    new = 4 if rows > 16 else 1
    shape = (rows // new * 4, 4, head_dim)
    _run(sm90, [70, 2, 200], new, shape, 1, sinks=_sinks(shape[0], sm90))
    _run(sm90, [700, 3, 0, 1300] * 9, new, shape, 1)
    _run(sm90, [900, 0, 70, 1] * 90, new, shape, 1, window_left=100)


def test_freed_pages_of_one_token(sm90: torch.device) -> None:
    for window_left in (0, 100, 700):
        case = _case(sm90, [5, 128, 805, 0, 1400], 3, page_size=1)
        oracle.check(_launch(case.freed(window_left), window_left=window_left), case.wanted(Options(window_left)))


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("logit_cap", [0.5, 5.0, 50.0])
def test_capped_scores(sm90: torch.device, logit_cap: float, page_size: int) -> None:
    """Tests caps that some scores are near, and that others are far below."""
    options: dict[str, Any] = {"logit_cap": logit_cap, "softmax_scale": 0.4, "sinks": _sinks(64, sm90)}
    _run(sm90, [700, 65, 0, 3000], 1, GPT_OSS, page_size, **options)
    _run(sm90, [700, 65, 0, 3000], 2, GPT_OSS, page_size, window_left=127, **options)
    _run(sm90, [300, 20], 1, (8, 4, 256), page_size, logit_cap=logit_cap)


@pytest.mark.parametrize("new", [2, 3, 4, 8])
def test_several_new_tokens(sm90: torch.device, new: int) -> None:
    """Tests several new tokens for each sequence. Some sequences have fewer tokens in the cache than new tokens."""
    _run(sm90, [1, 20, 400, 0, 64, 3000, 2, 5], new, GPT_OSS, sinks=_sinks(64, sm90))
    _run(sm90, [1, 20, 400, 0, 64, 3000, 2, 5], new, GPT_OSS, window_left=100)


@pytest.mark.parametrize("window_left", [0, 1, 63, 127, 128, 500, 5000])
def test_windows(sm90: torch.device, window_left: int) -> None:
    kv_lens = [1, 63, 127, 128, 129, 130, 0, 1300, 3000]
    _run(sm90, kv_lens, window_left=window_left, sinks=_sinks(16, sm90))
    _run(sm90, kv_lens * 7, shape=GPT_OSS, window_left=window_left, sinks=_sinks(64, sm90))


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("window_left", [0, 100, 700])
def test_freed_pages(sm90: torch.device, window_left: int, new: int, page_size: int) -> None:
    for kv_lens in ([5, 128, 805, 0, 1400], [5, 128, 805, 0, 1400] * 80):
        case = _case(sm90, kv_lens, new, page_size=page_size)
        oracle.check(_launch(case.freed(window_left), window_left=window_left), case.wanted(Options(window_left)))


@pytest.mark.parametrize("ratio", range(1, 17))
def test_head_ratios(sm90: torch.device, ratio: int) -> None:
    _run(sm90, [70, 500], shape=(3 * ratio, 3, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_sinks(sm90: torch.device, dtype: torch.dtype) -> None:
    _run(sm90, [200, 900, 0], shape=GPT_OSS, sinks=_sinks(64, sm90, dtype), softmax_scale=0.3)


def test_large_sinks(sm90: torch.device) -> None:
    """Asserts that nothing overflows if a sink is far above all scores. The sink then gets all of the softmax's weight."""
    _run(sm90, [70, 800], sinks=_sinks(16, sm90) + 200)


def test_scores_that_rise(sm90: torch.device) -> None:
    """Tests row maxima that grow along the sequence, slowly or fast. Accumulators are then rescaled."""
    case = _case(sm90, [3000, 900])
    for factor in (1e-4, 1e-2):
        rising = oracle.Paged(**{**vars(case), "k_cache": case.k_cache.clone()})
        for index, kv_len in enumerate(case.kv_lens):
            pages = case.page_table[index, : -(-kv_len // 64)].long()
            steps = 1 + factor * torch.arange(len(pages) * 64, device=sm90).view(-1, 64, 1, 1)
            rising.k_cache[pages] = (case.k_cache[pages].float() * steps).bfloat16()
        oracle.check(_launch(rising), rising.wanted(Options()))


def test_a_bound_that_is_far_off(sm90: torch.device) -> None:
    """Tests a page table and a max_seqlen_k for far longer sequences than those of the batch, as in a server."""
    case = _case(sm90, [100, 3000, 17])
    table = torch.full((3, 4096), 2**31 - 1, dtype=torch.int32, device=sm90)
    table[:, : case.page_table.shape[1]] = case.page_table
    wide = oracle.Paged(**{**vars(case), "page_table": table})
    oracle.check(_launch(wide, max_seqlen_k=4096 * 64), case.wanted(Options()))


def test_other_strides(sm90: torch.device) -> None:
    """Tests keys and values in one cache tensor, and q, out, page table and lengths that are slices."""
    case = _case(sm90, [700, 9])
    both = torch.stack([case.k_cache, case.v_cache], 2)
    q = torch.cat([case.q, case.q], 1)[:, :16]
    lengths = torch.stack([case.cache_seqlens, case.cache_seqlens], 1)[:, 0]
    table = case.page_table.T.contiguous().T
    wide = torch.full((2, 20, 64), 7.0, dtype=torch.bfloat16, device=sm90)
    out = wide[:, 2:18]
    got = mha_decode_with_kvcache(q, both[:, :, 0], both[:, :, 1], table, lengths, 700, out=out)
    assert got is out
    oracle.check(out, case.wanted(Options()))
    assert (wide[:, :2] == 7).all()
    assert (wide[:, 18:] == 7).all()
    turned = torch.empty_like(case.q).mT.contiguous().mT
    assert mha_decode_with_kvcache(q, both[:, :, 0], both[:, :, 1], table, lengths, 700, out=turned) is turned
    oracle.check(turned, case.wanted(Options()))


def test_pages_that_sequences_share(sm90: torch.device) -> None:
    case = _case(sm90, [500, 500])
    case.page_table[1] = case.page_table[0]
    oracle.check(_launch(case), case.wanted(Options()))


def test_the_same_again(sm90: torch.device) -> None:
    """Asserts that repeated calls give bitwise equal results. Splits are merged in a fixed order."""
    case = _case(sm90, [5000, 40, 9000], shape=GPT_OSS)
    first = _launch(case)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, _launch(case), strict=True))


@pytest.mark.parametrize("new", [1, 4])
def test_a_graph_whose_lengths_change(sm90: torch.device, new: int) -> None:
    """Asserts that replays of a graph use the current lengths, and that a replay leaves no state for the next replay."""
    case = _case(sm90, [6000] * 8, new, GPT_OSS)
    lengths = case.cache_seqlens
    sinks = _sinks(64, sm90)

    def call() -> tuple[Tensor, Tensor]:
        got = mha_decode_with_kvcache(
            case.q, case.k_cache, case.v_cache, case.page_table, lengths, 6000, new, sinks=sinks, return_lse=True
        )
        assert isinstance(got, tuple)
        return got

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    draw = random.Random(new)
    some = [[draw.randrange(6001) for _ in range(8)] for _ in range(4)]
    several = [[6000] * 8, [0] * 8, [1, 0, 6000, 63, 64, 65, 5000, 129], *some]
    for kv_lens in several:
        lengths.copy_(torch.tensor(kv_lens, dtype=torch.int32))
        graph.replay()
        oracle.check(got, oracle.Paged(**{**vars(case), "kv_lens": kv_lens}).wanted(Options(sinks=sinks)))


@pytest.mark.parametrize(("window_left", "many"), [(-1, 800), (100, 800), (100, 1)])
def test_results_of_the_preceding_kernel_are_visible(
    sm90: torch.device, monkeypatch: pytest.MonkeyPatch, window_left: int, many: int
) -> None:
    """Tests kernels that overlap (PDL). The result of each call is the queries of the next call. Lengths and pages change right
    before a call."""
    monkeypatch.setattr(decode, "MANY", many)
    options = Options(window_left=window_left)
    case = _case(sm90, [3000, 1, 700, 65], shape=GPT_OSS)
    other = [64, 2000, 1, 900]
    order = [1, 2, 3, 0]
    counts = [-(-kv_len // 64) for kv_len in case.kv_lens]
    tables = [case.page_table.clone(), case.page_table[order].clone()]
    lens = [case.kv_lens, [min(other[b], counts[order[b]] * 64, case.kv_lens[order[b]]) for b in range(4)]]
    lengths = [torch.tensor(kv_lens, dtype=torch.int32, device=sm90) for kv_lens in lens]
    q, table, length = case.q.clone(), tables[0].clone(), lengths[0].clone()
    steps = []
    torch.cuda.synchronize()
    for step in range(40):
        table.copy_(tables[step % 2])
        length.copy_(lengths[step % 2])
        out = torch.full_like(q, torch.nan)
        caches = (case.k_cache, case.v_cache, table, length, 3000)
        mha_decode_with_kvcache(q, *caches, window_left=window_left, out=out)
        again = mha_decode_with_kvcache(out, *caches, window_left=window_left)
        steps.append((q, out, again))
        q = (again.float() * 30).bfloat16()  # without this factor, queries would be near zero after a few steps
    for step, (asked, out, again) in enumerate(steps):
        now = oracle.Paged(**{**vars(case), "q": asked, "page_table": tables[step % 2], "kv_lens": lens[step % 2]})
        oracle.check(out, now.wanted(options))
        oracle.check(again, oracle.Paged(**{**vars(now), "q": out}).wanted(options))


def test_two_graphs_at_once(sm90: torch.device) -> None:
    """Captures two graphs on PyTorch's capture stream, and replays them many times on two other streams, beside calls without a
    graph."""
    cases = [_case(sm90, kv_lens, shape=GPT_OSS) for kv_lens in ([20000, 300], [7000] * 4, [9000, 50, 4000])]
    wanted = [case.wanted(Options()) for case in cases]
    lengths = [case.cache_seqlens for case in cases]
    found = [_launch(case) for case in cases]
    graphs = [torch.cuda.CUDAGraph() for _ in cases[:2]]
    for index, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            found[index] = _launch(cases[index], lengths[index])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(sm90) for _ in graphs]
    for _ in range(100):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        found[2] = _launch(cases[2], lengths[2])
    torch.cuda.synchronize()
    for got, each in zip(found, wanted, strict=True):
        oracle.check(got, each)


def test_two_streams(sm90: torch.device) -> None:
    """Tests calls on two streams that overlap. Each stream must have separate memory for partial results."""
    cases = [_case(sm90, kv_lens, shape=GPT_OSS) for kv_lens in ([20000, 300], [7000] * 4)]
    streams = [torch.cuda.Stream(sm90) for _ in cases]
    wanted = [case.wanted(Options()) for case in cases]
    torch.cuda.synchronize()
    found: list[list[Any]] = [[], []]
    for _ in range(10):
        for index, case in enumerate(cases):
            with torch.cuda.stream(streams[index]):
                found[index].append(_launch(case))
    torch.cuda.synchronize()
    for several, each in zip(found, wanted, strict=True):
        for got in several:
            oracle.check(got, each)


def test_random_calls(sm90: torch.device) -> None:
    """Makes 200 calls with random options of every kind."""
    draw = random.Random(7)
    for _ in range(200):
        kv_heads, ratio, new = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 4, 5, 8, 8, 16]), draw.choice([1, 1, 1, 2, 3, 4])
        batch = draw.choice([1, 2, 5, 17, 60])
        most = draw.choice([70, 300, 2000, 9000 if batch < 10 else 500])
        shape = (kv_heads * ratio, kv_heads, draw.choice([64, 64, 128]))
        options: dict[str, Any] = {"window_left": draw.choice([-1, -1, draw.randrange(400), 127])}
        if draw.random() < 0.5:
            options["sinks"] = _sinks(shape[0], sm90)
        kv_lens = [draw.randrange(most + 1) for _ in range(batch)]
        _run(sm90, kv_lens, new, shape, draw.choice([16, 32, 64, 128]), draw.choice(HALVES), **options)


# -- without a GPU -------------------------------------------------------------------------------------------------------------


def test_configurations() -> None:
    """Asserts that every configuration has a ring buffer of at least three stages."""
    every = decode.every_config()
    assert len(set(every)) == len(every)
    for config in every:
        assert config.stages >= 3
        assert config.stages % config.parts == 0
        assert config.block % config.box == 0
