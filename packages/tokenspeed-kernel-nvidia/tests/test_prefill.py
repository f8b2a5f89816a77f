"""Tests full causal attention of whole sequences, and of new tokens to a paged cache, against float32."""

from __future__ import annotations

import importlib.util
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.workspace import keeper
from tokenspeed_kernel_nvidia.sm90.attention.prefill import launch as prefill
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import Config
from tokenspeed_kernel_nvidia.sm90.attention.supported import GQA_RATIOS, HEAD_DIMS, PAGE_SIZES

from . import oracle
from .launched import as_operator
from .oracle import Options

mha_prefill = as_operator(prefill.mha_prefill)
mha_extend_with_kvcache = as_operator(prefill.mha_extend_with_kvcache)

BF16, FP16 = torch.bfloat16, torch.float16
GPT_OSS = (64, 8, 64)
WIDE = (32, 8, 128)
# The maximum shared memory of a CTA of sm_90 in bytes, and the number of registers of an SM.
SHARED_MEMORY, REGISTERS = 227 * 1024, 65536


def _sinks(heads: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-2.0, 3.0, heads, device=device).to(dtype)


def _prefill(
    device: torch.device, lengths: list[int], shape: tuple[int, int, int] = GPT_OSS, dtype: torch.dtype = BF16, **options: Any
) -> None:
    q, k, v = oracle.ragged(lengths, *shape, dtype, device, seed=sum(lengths))
    out = torch.full_like(q, math.nan)
    got = mha_prefill(q, k, v, oracle.offsets(lengths, device), return_lse=True, out=out, **options)
    assert got[0] is out
    oracle.check(got, oracle.attend_ragged(q, k, v, lengths, Options(**options)))


def _extend(
    device: torch.device,
    q_lens: list[int],
    kv_lens: list[int],
    page_size: int,
    shape: tuple[int, int, int] = GPT_OSS,
    is_causal: bool = True,
    **options: Any,
) -> None:
    case = oracle.paged(q_lens, kv_lens, *shape, page_size, BF16, device, seed=sum(kv_lens))
    got = mha_extend_with_kvcache(
        case.q, case.cu_seqlens_q, None, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens,
        max([0, *q_lens]), max([0, *kv_lens]), is_causal, return_lse=True, out=torch.full_like(case.q, math.nan), **options,
    )  # fmt: skip
    oracle.check(got, case.wanted(Options(is_causal=is_causal, **options)))


# -- without a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_cta_fits_on_an_sm(head_dim: int) -> None:
    config = Config("bfloat16", head_dim, 8)
    rows = config.q_stages * config.block_m + 2 * config.kv_stages * config.block_n + config.block_m  # of q, of k and v, of out
    assert 2 * head_dim * rows + 2048 <= SHARED_MEMORY
    warpgroups = config.block_m // 64
    assert 128 * (warpgroups * config.consumer_registers + config.producer_registers) <= REGISTERS
    assert config.consumer_registers % 8 == config.producer_registers % 8 == 0


@pytest.mark.parametrize("gqa_ratio", GQA_RATIOS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_tile_holds_as_many_whole_positions_as_fit(head_dim: int, gqa_ratio: int) -> None:
    config = Config("bfloat16", head_dim, gqa_ratio)
    assert 0 <= config.block_m - config.positions * gqa_ratio < gqa_ratio


def test_configurations_are_distinguished() -> None:
    configs = prefill.every_config()
    assert len(set(map(repr, configs))) == len(configs)


@pytest.mark.slow  # `test_emulated` compiles and runs the program
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("config", [Config("bfloat16", 64, 8), Config("float16", 128, 4, page_size=32)], ids=str)
def test_compiles_without_a_gpu(config: Config) -> None:
    prefill.prefill_program.compile(config)


# -- whole sequences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [24], [25, 23], [1000], [3, 0, 130, 700, 1, 24, 0], [2048, 2048], [0, 0]], ids=str)
def test_lengths(sm90: torch.device, lengths: list[int]) -> None:
    _prefill(sm90, lengths, sinks=_sinks(64, sm90))


@pytest.mark.parametrize("lengths", [[1], [31, 33], [1000], [3, 0, 130, 700, 1, 24, 0]], ids=str)
def test_lengths_with_wide_heads(sm90: torch.device, lengths: list[int]) -> None:
    _prefill(sm90, lengths, WIDE)


@pytest.mark.parametrize("gqa_ratio", [1, 2, 4, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_ratios_of_heads(sm90: torch.device, head_dim: int, gqa_ratio: int) -> None:
    _prefill(sm90, [100, 333, 7], (2 * gqa_ratio, 2, head_dim), FP16, sinks=_sinks(2 * gqa_ratio, sm90, FP16))


@pytest.mark.parametrize("seed", range(200))
def test_random_lengths(sm90: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(0, draw.choice((9, 90, 900))) for _ in range(draw.randint(1, 12))]
    sinks = draw.choice((None, _sinks(64, sm90), _sinks(64, sm90, BF16)))
    _prefill(sm90, lengths, sinks=sinks, softmax_scale=draw.choice((None, 0.3)))


def test_thousands_of_sequences(sm90: torch.device) -> None:
    draw = random.Random(0)
    _prefill(sm90, [draw.randint(0, 9) for _ in range(3000)] + [700], sinks=_sinks(64, sm90))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_that_grow_rescale_the_sums(sm90: torch.device, head_dim: int) -> None:
    """Tests keys whose norms grow toward the first key. The kernel processes keys from last to first, so the row max rises in most
    blocks."""
    q, k, v = oracle.ragged([900], 16, 2, head_dim, BF16, sm90)
    q, k = 4 * q, k * torch.linspace(6, 0.2, 900, device=sm90, dtype=BF16)[:, None, None]
    got = mha_prefill(q, k, v, oracle.offsets([900], sm90), return_lse=True)
    oracle.check(got, oracle.attend_ragged(q, k, v, [900], Options()))


def test_a_sequence_does_not_see_the_nan_of_another(sm90: torch.device) -> None:
    q, k, v = oracle.ragged([100, 100, 100], 8, 1, 64, BF16, sm90)
    others = torch.cat([torch.arange(100), torch.arange(200, 300)]).to(sm90)
    wanted = oracle.attend_ragged(q[others], k[others], v[others], [100, 100], Options())
    for x in (q, k, v):
        x[100:200] = math.nan
    out, lse = mha_prefill(q, k, v, oracle.offsets([100, 100, 100], sm90), return_lse=True)
    oracle.check((out[others], lse[others]), wanted)


def test_slices_of_one_tensor(sm90: torch.device) -> None:
    qkv = torch.randn(333, 8 + 2 * 2, 64, device=sm90).to(BF16)
    q, k, v = qkv.split([8, 2, 2], 1)
    out = mha_prefill(q, k, v, oracle.offsets([300, 33], sm90))
    oracle.check(out, oracle.attend_ragged(q, k, v, [300, 33], Options()))


def test_no_sequences(sm90: torch.device) -> None:
    q = torch.zeros(0, 8, 64, dtype=BF16, device=sm90)
    out, lse = mha_prefill(q, q, q, oracle.offsets([], sm90), return_lse=True)
    assert out.shape == (0, 8, 64)
    assert lse.shape == (0, 8)


# -- a paged cache -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", [GPT_OSS, WIDE], ids=str)
def test_new_tokens(sm90: torch.device, shape: tuple[int, int, int], page_size: int) -> None:
    _extend(sm90, [5, 64, 0, 300, 1, 0], [70, 64, 33, 1000, 129, 0], page_size, shape, sinks=_sinks(shape[0], sm90))


@pytest.mark.parametrize("seed", range(20))
def test_random_new_tokens(sm90: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    kv_lens = [draw.randint(0, draw.choice((90, 900))) for _ in range(draw.randint(1, 12))]
    _extend(sm90, [draw.randint(0, kv_len) for kv_len in kv_lens], kv_lens, draw.choice(PAGE_SIZES))


def test_both_ways(sm90: torch.device) -> None:
    _extend(sm90, [5, 64, 0, 300, 1], [70, 4, 33, 1000, 0], 64, is_causal=False, sinks=_sinks(64, sm90))


# -- graphs and streams --------------------------------------------------------------------------------------------------------


def test_a_graph_follows_lengths_that_change(sm90: torch.device) -> None:
    q, k, v = oracle.ragged([1000], *GPT_OSS, BF16, sm90)
    cu_seqlens = oracle.offsets([500, 500], sm90)
    out = torch.empty_like(q)
    mha_prefill(q, k, v, cu_seqlens, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mha_prefill(q, k, v, cu_seqlens, out=out)
    for changed in ([10, 990], [1000, 0], [333, 667]):
        cu_seqlens.copy_(oracle.offsets(changed, sm90))
        graph.replay()
        oracle.check(out, oracle.attend_ragged(q, k, v, changed, Options()))


def test_streams_side_by_side(sm90: torch.device) -> None:
    lengths = [400, 300]
    inputs = [oracle.ragged(lengths, *GPT_OSS, BF16, sm90, seed) for seed in range(4)]
    cu_seqlens = oracle.offsets(lengths, sm90)
    streams = [torch.cuda.Stream(sm90) for _ in inputs]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[] for _ in inputs]
    for _ in range(20):
        for stream, (q, k, v), results in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(mha_prefill(q, k, v, cu_seqlens))
    torch.cuda.synchronize()
    for (q, k, v), results in zip(inputs, outs, strict=True):
        wanted = oracle.attend_ragged(q, k, v, lengths, Options())
        for out in results:
            oracle.check(out, wanted)


def test_a_launch_leaves_its_counters_at_zero(sm90: torch.device) -> None:
    _prefill(sm90, [300, 40])
    torch.cuda.synchronize()
    assert not keeper.get(sm90.index, torch.cuda.current_stream(sm90).cuda_stream, 0, 2).counters.any()


@pytest.mark.parametrize("window_left", [128, 500, 3000])
@pytest.mark.parametrize("shape", [GPT_OSS, WIDE], ids=str)
def test_long_windows(sm90: torch.device, shape: tuple[int, int, int], window_left: int) -> None:
    _prefill(sm90, [1, 130, 1000, 0, 4000], shape, window_left=window_left, sinks=_sinks(shape[0], sm90))
    _extend(sm90, [70, 33, 0, 1, 300], [300, 33, 0, 900, 1640], 16, shape, window_left=window_left)
