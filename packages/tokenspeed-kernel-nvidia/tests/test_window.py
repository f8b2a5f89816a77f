"""Tests sliding-window attention against float32 attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_nvidia.sm90.attention.supported import GQA_RATIOS
from tokenspeed_kernel_nvidia.sm90.attention.window import launch as window

from . import oracle
from .launched import as_operator
from .oracle import Options

mha_prefill = as_operator(window.mha_prefill)
mha_extend_with_kvcache = as_operator(window.mha_extend_with_kvcache)

GPT_OSS = (64, 8, 64)
HALVES = (torch.bfloat16, torch.float16)


def _sinks(heads: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-2.0, 3.0, heads, device=device).to(dtype)


def _prefill(
    device: torch.device,
    lengths: list[int],
    shape: tuple[int, int, int] = (16, 2, 64),
    dtype: torch.dtype = torch.bfloat16,
    window_left: int = 127,
    **options: Any,
) -> None:
    q, k, v = oracle.ragged(lengths, *shape, dtype, device, seed=sum(lengths))
    got = mha_prefill(q, k, v, oracle.offsets(lengths, device), window_left=window_left, return_lse=True, **options)
    oracle.check(got, oracle.attend_ragged(q, k, v, lengths, Options(window_left, **options)))


def _extend(
    device: torch.device,
    q_lens: list[int],
    kv_lens: list[int],
    shape: tuple[int, int, int] = (16, 2, 64),
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    window_left: int = 127,
    **options: Any,
) -> None:
    case = oracle.paged(q_lens, kv_lens, *shape, page_size, dtype, device, seed=sum(kv_lens))
    oracle.check(_launch(case, window_left, **options), case.wanted(Options(window_left, **options)))


def _launch(case: oracle.Paged, window_left: int = 127, **options: Any) -> tuple[Tensor, Tensor]:
    got = mha_extend_with_kvcache(
        case.q, case.cu_seqlens_q, None, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens,
        max([0, *case.q_lens]), max([0, *case.kv_lens]), True, window_left, return_lse=True, **options,
    )  # fmt: skip
    assert isinstance(got, tuple)
    return got


@pytest.mark.parametrize(
    "lengths", [[1], [8], [127], [128], [129, 0, 0, 1], [0, 1, 64, 65, 127, 128, 129, 0, 260], [1024], []], ids=str
)
def test_lengths(sm90: torch.device, lengths: list[int]) -> None:
    """Tests one and several sequences: lengths of 0 and 1, and lengths one above and one below that of a tile or a block."""
    _prefill(sm90, lengths)


def test_many_sequences(sm90: torch.device) -> None:
    """Tests more sequences (150) than the 32 lanes of the warp that maps blocks to sequences."""
    draw = random.Random(0)
    _prefill(sm90, [draw.randrange(90) for _ in range(150)])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("gqa_ratio", GQA_RATIOS)
def test_every_program(sm90: torch.device, gqa_ratio: int, head_dim: int, dtype: torch.dtype) -> None:
    _prefill(sm90, [200, 3, 131], (2 * gqa_ratio, 2, head_dim), dtype, sinks=_sinks(2 * gqa_ratio, sm90))
    _extend(sm90, [1, 60, 140, 5], [200, 129, 140, 301], (2 * gqa_ratio, 2, head_dim), 32, dtype, sinks=_sinks(2 * gqa_ratio, sm90))


@pytest.mark.parametrize("window_left", [0, 1, 7, 31, 64, 126])
def test_smaller_windows(sm90: torch.device, window_left: int) -> None:
    _prefill(sm90, [300, 40], window_left=window_left)
    _extend(sm90, [9, 77], [300, 90], window_left=window_left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_sinks(sm90: torch.device, dtype: torch.dtype) -> None:
    _prefill(sm90, [200, 90], GPT_OSS, sinks=_sinks(64, sm90, dtype), softmax_scale=0.3)


def test_large_sinks(sm90: torch.device) -> None:
    """Asserts that nothing overflows if a sink is far above all scores. The sink then gets all of the softmax's weight."""
    _prefill(sm90, [70], sinks=_sinks(16, sm90) + 200)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("logit_cap", [0.5, 5.0, 50.0])
def test_capped_scores(sm90: torch.device, logit_cap: float, head_dim: int) -> None:
    """Tests caps that some scores are near, and that others are far below."""
    options: dict[str, Any] = {"logit_cap": logit_cap, "softmax_scale": 0.4, "sinks": _sinks(16, sm90)}
    _prefill(sm90, [200, 3, 131], (16, 2, head_dim), **options)
    _extend(sm90, [1, 60, 140, 5], [200, 129, 140, 301], (16, 2, head_dim), **options)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pages(sm90: torch.device, page_size: int) -> None:
    _extend(sm90, [37, 64, 1, 555, 16, 0], [500, 64, 63, 1000, 17, 20], GPT_OSS, page_size)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("window_left", [0, 30, 127])
def test_freed_pages(sm90: torch.device, page_size: int, window_left: int) -> None:
    case = oracle.paged([40, 1, 7, 130, 3], [900, 129, 7, 400, 260], 16, 2, 64, page_size, torch.bfloat16, sm90)
    oracle.check(_launch(case.freed(window_left), window_left), case.wanted(Options(window_left)))


def test_positions_of_all_kinds(sm90: torch.device) -> None:
    """Tests first positions at all distances from a multiple of 16, so that copies of pages and tiles begin at different
    offsets."""
    starts = list(range(120, 152))
    _extend(sm90, [21] * len(starts), [start + 21 for start in starts])


def test_sixteen_tokens_of_many(sm90: torch.device) -> None:
    _extend(sm90, [16] * 64, [8192] * 4 + [300] * 60, GPT_OSS, sinks=_sinks(64, sm90))


@pytest.mark.parametrize("poisoned", [0, 1])
def test_nan_stays_in_its_sequence(sm90: torch.device, poisoned: int) -> None:
    lengths = [77, 50, 300]
    q, k, v = oracle.ragged(lengths, 16, 2, 64, torch.bfloat16, sm90)
    parts = [x.split(lengths) for x in (q, k, v)]
    for part in parts:
        part[poisoned].fill_(torch.nan)
    out, _ = mha_prefill(q, k, v, oracle.offsets(lengths, sm90), window_left=127, return_lse=True)
    for index, found in enumerate(out.split(lengths)):
        if index == poisoned:
            assert found.isnan().all()
        else:
            oracle.check(found, oracle.attend_one(*(part[index] for part in parts), Options(127)))


def test_strided_rows(sm90: torch.device) -> None:
    """Tests q, k, v and out that are slices of wider tensors."""
    lengths = [140, 30]
    fused = torch.randn(170, 20, 64, device=sm90).to(torch.bfloat16)
    q, k, v = fused[:, :16], fused[:, 16:18], fused[:, 18:]
    out = torch.full((170, 24, 64), 7.0, dtype=torch.bfloat16, device=sm90)
    got = mha_prefill(q, k, v, oracle.offsets(lengths, sm90), window_left=127, out=out[:, 4:20])
    assert isinstance(got, Tensor)
    assert got.data_ptr() == out[:, 4:20].data_ptr()
    oracle.check(got, oracle.attend_ragged(q, k, v, lengths, Options(127)))
    assert (out[:, :4] == 7).all()
    assert (out[:, 20:] == 7).all()


def test_nothing_else_is_written(sm90: torch.device) -> None:
    """Asserts that the kernel does not write rows of other sequences, which a tile at the end of a sequence may have."""
    lengths = [5, 0, 11, 130]
    q, k, v = oracle.ragged(lengths, 16, 2, 64, torch.bfloat16, sm90)
    room = torch.full((sum(lengths) + 64, 16, 64), 7.0, dtype=torch.bfloat16, device=sm90)
    out = room[32 : 32 + sum(lengths)]
    mha_prefill(q, k, v, oracle.offsets(lengths, sm90), window_left=127, out=out)
    oracle.check(out, oracle.attend_ragged(q, k, v, lengths, Options(127)))
    assert (room[:32] == 7).all()
    assert (room[-32:] == 7).all()


def test_graph_replay_with_other_lengths(sm90: torch.device) -> None:
    case = oracle.paged([20, 30, 14], [100, 230, 14], *GPT_OSS, 64, torch.bfloat16, sm90)
    cu_seqlens, lengths = case.cu_seqlens_q, case.cache_seqlens
    call = (case.q, cu_seqlens, None, case.k_cache, case.v_cache, case.page_table, lengths, 64, 256, True, 127)
    mha_extend_with_kvcache(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mha_extend_with_kvcache(*call)
    assert isinstance(out, Tensor)
    graph.replay()
    oracle.check(out, case.wanted(Options(127)))
    other = oracle.Paged(case.q, case.k_cache, case.v_cache, case.page_table, [0, 60, 4], [90, 200, 9])
    cu_seqlens.copy_(other.cu_seqlens_q)
    lengths.copy_(other.cache_seqlens)
    graph.replay()
    oracle.check(out, other.wanted(Options(127)))


def test_kernels_that_overlap(sm90: torch.device) -> None:
    """Tests kernels that overlap in a graph (PDL). The output of each call is the next call's queries, and lengths change in
    between."""
    case = oracle.paged([16] * 40 + [5], [300] * 20 + [25] * 21, *GPT_OSS, 64, torch.bfloat16, sm90)
    lengths, before = case.cache_seqlens, case.cache_seqlens.clone()
    others = (case.cu_seqlens_q, None, case.k_cache, case.v_cache, case.page_table, lengths, 16, 300, True, 127)

    def run(pause: Callable[[], None]) -> Tensor:
        out = case.q
        for step in range(12):
            got = mha_extend_with_kvcache(out, *others)
            assert isinstance(got, Tensor)
            out = got
            pause()
            if step % 3 == 1:
                lengths.sub_(1)
                pause()
        return out

    wanted = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(lambda: None)
    for _ in range(3):
        lengths.copy_(before)
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.slow
def test_random_configurations(sm90: torch.device) -> None:
    draw = random.Random(1)
    for _ in range(100):
        gqa_ratio, head_dim, dtype = draw.choice(GQA_RATIOS), draw.choice((64, 128)), draw.choice(HALVES)
        shape = (2 * gqa_ratio, 2, head_dim)
        lengths = [draw.choice((0, 1, draw.randrange(20), draw.randrange(400))) for _ in range(draw.randrange(1, 12))]
        options: dict[str, Any] = {"window_left": draw.choice((127, 127, draw.randrange(128)))}
        if draw.random() < 0.5:
            options["sinks"] = _sinks(shape[0], sm90)
        if draw.random() < 0.5:
            _prefill(sm90, lengths, shape, dtype, **options)
        else:
            before = [draw.choice((0, draw.randrange(300))) for _ in lengths]
            kv_lens = [new + old for new, old in zip(lengths, before, strict=True)]
            _extend(sm90, lengths, kv_lens, shape, draw.choice((16, 32, 64, 128)), dtype, **options)
