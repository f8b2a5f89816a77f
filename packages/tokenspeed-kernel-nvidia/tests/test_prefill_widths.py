"""Tests prefill and extend with head dims other than 64 and 128, with logit caps, and MLA prefill, against float32."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tokenspeed_kernel_nvidia.sm90.attention.prefill import launch as prefill
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import TILES, Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.launch_mla import mla_prefill as launcher_of_mla_prefill
from tokenspeed_kernel_nvidia.sm90.attention.supported import GQA_RATIOS, OTHER_WIDTHS, PAGE_SIZES

from . import oracle
from .launched import as_operator
from .oracle import Options

mha_prefill = as_operator(prefill.mha_prefill)
mha_extend_with_kvcache = as_operator(prefill.mha_extend_with_kvcache)

mla_prefill = as_operator(launcher_of_mla_prefill)

BF16, FP16 = torch.bfloat16, torch.float16
# The maximum shared memory of a CTA of sm_90 in bytes, and the number of registers of an SM.
SHARED_MEMORY, REGISTERS = 227 * 1024, 65536
GEMMA = {"logit_cap": 50.0, "softmax_scale": 0.0625}


def check_prefill(
    device: torch.device,
    lengths: list[int],
    widths: tuple[int, int],
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = BF16,
    **options: Any,
) -> None:
    """Compares prefill of sequences with these lengths with float32, and fails if rows or LSEs differ."""
    q, k, v = oracle.ragged(lengths, *heads, max(widths), dtype, device, seed=sum(lengths))
    v = v[..., : widths[1]].contiguous()
    out = v.new_full((*q.shape[:2], widths[1]), math.nan)
    got = mha_prefill(q, k, v, oracle.offsets(lengths, device), return_lse=True, out=out, **options)
    assert got[0] is out
    oracle.check(got, oracle.attend_ragged(q, k, v, lengths, Options(**options)))


def check_extend(
    device: torch.device,
    q_lens: list[int],
    kv_lens: list[int],
    page_size: int,
    widths: tuple[int, int],
    heads: tuple[int, int] = (4, 2),
    is_causal: bool = True,
    **options: Any,
) -> None:
    """Compares extend with float32, and fails if rows or LSEs differ. Slots without a token are NaN."""
    case = oracle.paged(q_lens, kv_lens, *heads, widths[0], page_size, BF16, device, sum(kv_lens), widths[1])
    out = case.v_cache.new_full((*case.q.shape[:2], widths[1]), math.nan)
    got = mha_extend_with_kvcache(
        case.q, case.cu_seqlens_q, None, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens,
        max([0, *q_lens]), max([0, *kv_lens]), is_causal, return_lse=True, out=out, **options,
    )  # fmt: skip
    oracle.check(got, case.wanted(Options(is_causal=is_causal, **options)))


def check_latent(device: torch.device, q_lens: list[int], kv_lens: list[int], heads: int, is_causal: bool, **options: Any) -> None:
    """Compares MLA prefill of tokens to the keys of other tokens with float32."""
    q, k, v = oracle.ragged([max(sum(q_lens), sum(kv_lens))], heads, heads, 192, BF16, device)
    q, k, v = q[: sum(q_lens)], k[: sum(kv_lens)], v[: sum(kv_lens), :, :128]
    got = mla_prefill(
        q, k, v, oracle.offsets(q_lens, device), cu_seqlens_kv=oracle.offsets(kv_lens, device), is_causal=is_causal,
        return_lse=True, **options,
    )  # fmt: skip
    oracle.check(got, oracle.attend_to_others(q, k, v, q_lens, kv_lens, Options(is_causal=is_causal, **options)))


# -- without a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("widths", OTHER_WIDTHS, ids=str)
def test_a_cta_fits_on_an_sm(widths: tuple[int, int], page_size: int) -> None:
    config = Config("bfloat16", widths[0], 8, page_size, v_head_dim=widths[1])
    q = config.block_m * config.k_columns * config.q_stages
    kv = config.kv_stages * config.block_n * (config.k_columns + config.v_columns)
    assert 2 * (q + kv) + 2048 <= SHARED_MEMORY
    assert 128 * (config.warpgroups * config.consumer_registers + config.producer_registers) <= REGISTERS


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("widths", OTHER_WIDTHS, ids=str)
def test_bulk_copies_are_of_one_page_and_fill_a_block(widths: tuple[int, int], page_size: int) -> None:
    config = Config("bfloat16", widths[0], 8, page_size, v_head_dim=widths[1])
    assert page_size % config.box == config.block_n % config.box == config.box % 8 == 0


def test_each_of_the_widths_has_a_tile() -> None:
    assert set(TILES) == set(OTHER_WIDTHS)


# -- on the device -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [1000], [3, 0, 130, 700, 1, 24, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("widths", OTHER_WIDTHS, ids=str)
def test_lengths(sm90: torch.device, widths: tuple[int, int], lengths: list[int]) -> None:
    check_prefill(sm90, lengths, widths)
    check_prefill(sm90, lengths, widths, window_left=100, logit_cap=20.0)


@pytest.mark.parametrize("gqa_ratio", GQA_RATIOS)
@pytest.mark.parametrize("widths", OTHER_WIDTHS, ids=str)
def test_ratios_of_heads(sm90: torch.device, widths: tuple[int, int], gqa_ratio: int) -> None:
    sinks = torch.linspace(-2.0, 3.0, 2 * gqa_ratio, device=sm90)
    check_prefill(sm90, [100, 333, 7], widths, (2 * gqa_ratio, 2), FP16, sinks=sinks)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("widths", OTHER_WIDTHS, ids=str)
def test_new_tokens(sm90: torch.device, widths: tuple[int, int], page_size: int) -> None:
    check_extend(sm90, [5, 64, 0, 300, 1, 0], [70, 64, 33, 1000, 129, 0], page_size, widths)
    check_extend(sm90, [5, 64, 0, 300, 1, 0], [70, 64, 33, 1000, 129, 0], page_size, widths, window_left=150, **GEMMA)
    check_extend(sm90, [5, 64, 0, 300, 1, 0], [70, 6, 33, 1000, 129, 0], page_size, widths, is_causal=False)


@pytest.mark.parametrize("width", [64, 128])
def test_a_cap_of_other_widths(sm90: torch.device, width: int) -> None:
    check_prefill(sm90, [3, 130, 700], (width, width), (8, 2), **GEMMA)
    check_prefill(sm90, [3, 130, 700], (width, width), (8, 2), window_left=200, **GEMMA)
    check_extend(sm90, [5, 64, 300], [70, 64, 1000], 16, (width, width), (8, 2), **GEMMA)


def test_scores_far_beyond_a_cap(sm90: torch.device) -> None:
    check_prefill(sm90, [200, 33], (256, 256), logit_cap=5.0, softmax_scale=3.0)


@pytest.mark.parametrize("is_causal", [True, False])
def test_latent_attention_to_others(sm90: torch.device, is_causal: bool) -> None:
    check_latent(sm90, [5, 33, 2, 7, 300], [70, 33, 1, 0, 900], 8, is_causal)
    check_latent(sm90, [40, 9], [0, 0], 8, is_causal)


@pytest.mark.parametrize("window_left", [0, 63, 150, 2000])
def test_latent_attention_in_a_window(sm90: torch.device, window_left: int) -> None:
    check_latent(sm90, [5, 33, 2, 7, 300], [70, 33, 1, 0, 900], 8, True, window_left=window_left)
    check_latent(sm90, [3, 700], [3, 700], 2, True, window_left=window_left, logit_cap=20.0)


@pytest.mark.parametrize("seed", range(30))
def test_random_lengths(sm90: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(0, draw.choice((9, 90, 900))) for _ in range(draw.randint(1, 12))]
    check_prefill(sm90, lengths, draw.choice(OTHER_WIDTHS), (2 * draw.choice(GQA_RATIOS), 2))
    others = [draw.randint(0, draw.choice((9, 90, 900))) for _ in lengths]
    check_latent(sm90, lengths, others, draw.choice((1, 3, 16)), draw.random() < 0.5)


def test_a_graph_follows_lengths_that_change(sm90: torch.device) -> None:
    q, k, v = oracle.ragged([1000], 8, 8, 192, BF16, sm90)
    v = v[..., :128].contiguous()
    cu_seqlens = oracle.offsets([500, 500], sm90)
    out = torch.empty_like(v)
    mla_prefill(q, k, v, cu_seqlens, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_prefill(q, k, v, cu_seqlens, out=out)
    for changed in ([10, 990], [1000, 0], [333, 667]):
        cu_seqlens.copy_(oracle.offsets(changed, sm90))
        graph.replay()
        oracle.check(out, oracle.attend_ragged(q, k, v, changed, Options()))
