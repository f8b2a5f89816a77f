"""Tests attention of fp8 operands against float32 attention of the dequantised operands."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_nvidia.sm90.attention.decode import launch as decode
from tokenspeed_kernel_nvidia.sm90.attention.decode.config import WIDTHS, config_of
from tokenspeed_kernel_nvidia.sm90.attention.prefill import launch as prefill
from tokenspeed_kernel_nvidia.sm90.attention.prefill.config import FP8_TILES, Config
from tokenspeed_kernel_nvidia.sm90.attention.prefill.launch_mla import mla_prefill as launcher_of_mla_prefill
from tokenspeed_kernel_nvidia.sm90.attention.supported import HEAD_DIMS, PAGE_SIZES

from . import oracle
from .launched import as_operator
from .oracle import Options

mha_prefill = as_operator(prefill.mha_prefill)
mha_decode_with_kvcache = as_operator(decode.mha_decode_with_kvcache)
mha_extend_with_kvcache = as_operator(prefill.mha_extend_with_kvcache)

mla_prefill = as_operator(launcher_of_mla_prefill)

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SHARED_MEMORY, REGISTERS = 227 * 1024, 65536
# Softmax weights that are rounded to e4m3 have an rms error of 2.6%. The results of rows with many keys have about this error, and
# rows with few keys may have a larger error.
ROUGH: dict[str, Any] = {"tolerance": 0.04, "row_tolerance": 0.15}


def _scale(device: torch.device, kv_heads: int, seed: int) -> Tensor:
    """Returns one scale for each KV head, or one for all heads if the seed is odd."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand((kv_heads,) if seed % 2 == 0 else (), generator=draw) + 0.5).to(device)


def _wide(x: Tensor, scale: Tensor) -> Tensor:
    """Dequantises ``x``. There may be more query heads than scales."""
    factors = scale.reshape(-1).repeat_interleave(x.shape[-2] // scale.numel())
    return x.float() * factors.view(-1, 1)


def _paged(
    device: torch.device,
    q_lens: list[int],
    kv_lens: list[int],
    shape: tuple[int, int, int],
    page_size: int,
    q_dtype: torch.dtype,
    v_head_dim: int | None = None,
) -> tuple[oracle.Paged, oracle.Paged, dict[str, Tensor]]:
    """Returns a case with an e4m3 cache, the case with the dequantised cache, and the scales."""
    made = oracle.paged(q_lens, kv_lens, *shape, page_size, torch.float32, device, sum(kv_lens), v_head_dim)
    case = replace(made, q=made.q.to(q_dtype), k_cache=made.k_cache.to(E4M3), v_cache=made.v_cache.to(E4M3))
    scales = {name: _scale(device, shape[1], sum(kv_lens) + at) for at, name in enumerate(("k_scale", "v_scale"))}
    wide = replace(case, k_cache=_wide(case.k_cache, scales["k_scale"]), v_cache=_wide(case.v_cache, scales["v_scale"]))
    if q_dtype == E4M3:
        scales["q_scale"] = _scale(device, shape[1], sum(kv_lens))
        return case, replace(wide, q=_wide(case.q, scales["q_scale"])), scales
    return case, replace(wide, q=case.q.float()), scales


# -- without a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        *((head_dim, {"fp8": True}) for head_dim in HEAD_DIMS),
        *((head_dim, {"fp8_cache": True, "page_size": 16}) for head_dim in HEAD_DIMS),
        (256, {"fp8_cache": True, "page_size": 16, "v_head_dim": 256}),
    ],
    ids=str,
)
def test_a_cta_fits_on_an_sm(head_dim: int, options: dict[str, Any]) -> None:
    config = Config("bfloat16", head_dim, 8, **options)
    rows = config.q_stages * config.block_m + 2 * config.kv_stages * config.block_n
    out = 0 if config.stores_from_registers else 2 * head_dim * config.block_m
    assert config.bytes * head_dim * rows + config.raw_stages * config.raw_bytes + out + 2048 <= SHARED_MEMORY
    warpgroups = config.block_m // 64
    assert 128 * (warpgroups * config.consumer_registers + config.producer_registers) <= REGISTERS
    assert config.consumer_registers % 8 == config.producer_registers % 8 == 0


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("widths", FP8_TILES, ids=str)
def test_a_cta_of_other_head_dims_fits_on_an_sm(widths: tuple[int, int], page_size: int) -> None:
    config = Config("bfloat16", widths[0], 8, page_size, fp8=True, v_head_dim=widths[1])
    assert config.k_columns >= widths[0]
    assert config.raw_columns >= config.v_columns >= widths[1]
    loaded = config.q_stages * config.block_m * config.k_columns + config.kv_stages * config.kv_bytes
    assert loaded + config.kv_stages * config.v_bytes + config.raw_stages * config.raw_bytes + 2048 <= SHARED_MEMORY
    assert 128 * (config.warpgroups * config.consumer_registers + config.producer_registers) <= REGISTERS
    assert config.block_n in (64, 128)  # bytes of a row of transposed values


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_ring_has_a_tile_for_each_warp(head_dim: int, rows: int) -> None:
    config = config_of("bfloat16", (head_dim, head_dim), 64, rows, "much", fp8=True)
    assert config.stages >= config.parts
    assert config.stages % config.parts == 0


def _instructions(program: Any, config: Any, folder: Path) -> str:
    """Returns the PTX of a configuration."""
    return str(program.compile(config, f"--keep-cubin --keep-ptx --dump-dir {folder}").__ptx__)


@pytest.mark.slow  # `test_emulated` compiles and runs the program with fp8
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize(
    "config",
    [
        Config("bfloat16", 128, 8, fp8=True),
        Config("bfloat16", 64, 8, page_size=256, fp8_cache=True),
        Config("bfloat16", 192, 1, fp8=True, v_head_dim=128, own_kv=True),
    ],
    ids=str,
)
def test_prefill_compiles_without_a_gpu(config: Config, tmp_path: Path) -> None:
    ptx = _instructions(prefill.prefill_program, config, tmp_path)
    assert "wgmma.mma_async" in ptx
    assert "e4m3" in ptx


@pytest.mark.slow  # `test_emulated` compiles and runs the program with much work
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_decode_compiles_without_a_gpu(tmp_path: Path) -> None:
    assert "e4m3" in _instructions(decode.decode_program, config_of("bfloat16", (64, 64), 64, 8, "much", fp8=True), tmp_path)


# -- decode --------------------------------------------------------------------------------------------------------------------


def _decode(
    device: torch.device,
    kv_lens: list[int],
    new: int = 1,
    shape: tuple[int, int, int] = (16, 2, 64),
    page_size: int = 64,
    dtype: torch.dtype = BF16,
    queries: float = 1.0,
    v_head_dim: int | None = None,
    **options: Any,
) -> None:
    case, wide, scales = _paged(device, [new] * len(kv_lens), kv_lens, shape, page_size, dtype, v_head_dim)
    case, wide = replace(case, q=case.q * queries), replace(wide, q=(case.q * queries).float())
    got = mha_decode_with_kvcache(
        case.q, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, max([0, *kv_lens]), new, return_lse=True,
        out=case.q.new_full((*case.q.shape[:2], case.v_cache.shape[3]), math.nan), **scales, **options,
    )  # fmt: skip
    oracle.check(got, wide.wanted(Options(**options)))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("rows", [1, 8, 16, 20, 64])
def test_every_program_of_decode(sm90: torch.device, rows: int, page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    """Tests batches with and without split-KV, and batches with little work and with much work."""
    new = 4 if rows > 16 else 1
    shape = (rows // new * 2, 2, head_dim)
    sinks = torch.linspace(-2.0, 3.0, shape[0], device=sm90)
    _decode(sm90, [70, 2, 200], new, shape, page_size, dtype, sinks=sinks)
    _decode(sm90, [700, 3, 0, 1300], new, shape, page_size, dtype, sinks=sinks)
    _decode(sm90, [1100] * 200, new, shape, page_size, dtype)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("rows", [4, 8, 16, 64])
def test_other_widths_and_pages_of_one_token(sm90: torch.device, rows: int, page_size: int, widths: tuple[int, int]) -> None:
    new = 4 if rows > 16 else 1
    shape = (rows // new * 2, 2, widths[0])
    _decode(sm90, [70, 2, 200], new, shape, page_size, v_head_dim=widths[1], logit_cap=3.0)
    _decode(sm90, [700, 3, 0, 1300], new, shape, page_size, v_head_dim=widths[1])
    _decode(sm90, [300] * 200, new, shape, page_size, v_head_dim=widths[1])


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("kv_heads", [2, 3, 8])
@pytest.mark.parametrize("options", [{}, {"logit_cap": 4.0}, {"window_left": 700}], ids=str)
def test_two_key_heads_abreast(sm90: torch.device, options: dict[str, Any], kv_heads: int, new: int) -> None:
    """Tests even and odd numbers of KV heads. The kernel processes two KV heads at once if the number is even and the heads are
    adjacent in the cache."""
    sinks = torch.linspace(-2.0, 3.0, 4 * kv_heads, device=sm90)
    for kv_lens in ([700, 3, 0, 1300, 64, 65, 5000], [9000], [300] * 200):
        for page_size in (16, 64):
            _decode(sm90, kv_lens, new, (4 * kv_heads, kv_heads, 64), page_size, sinks=sinks, **options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 8, 16, 32])
def test_a_key_head_for_each_warp(sm90: torch.device, rows: int, head_dim: int) -> None:
    """Tests more sequences than CTAs, with short windows. The kernel then assigns one KV head to each warp."""
    _decode(sm90, [1000, 0, 70, 1, 300] * 80, 1, (4 * rows, 4, head_dim), 64, window_left=100)


@pytest.mark.parametrize("queries", [0.0, 1e-20, 1e-3, 1e3])
def test_queries_of_any_size(sm90: torch.device, queries: float) -> None:
    """Tests bfloat16 queries of any magnitude. The kernel scales them into float16's range."""
    _decode(sm90, [300, 65, 0], queries=queries)


# -- prefill and extend --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [24], [25, 23], [1000], [3, 0, 130, 700, 1, 24, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("shape", [(64, 8, 64), (32, 8, 128), (6, 3, 64), (16, 1, 128)], ids=str)
def test_whole_sequences(sm90: torch.device, shape: tuple[int, int, int], lengths: list[int]) -> None:
    q, k, v = (x.to(E4M3) for x in oracle.ragged(lengths, *shape, torch.float32, sm90, seed=sum(lengths)))
    scales = [_scale(sm90, shape[1], sum(lengths) + at) for at in range(3)]
    sinks = torch.linspace(-2.0, 3.0, shape[0], device=sm90)
    out = torch.full(q.shape, math.nan, dtype=BF16, device=sm90)
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    got = mha_prefill(q, k, v, oracle.offsets(lengths, sm90), sinks=sinks, return_lse=True, out=out, **named)
    assert got[0] is out
    wide = [_wide(x, scale) for x, scale in zip((q, k, v), scales, strict=True)]
    oracle.check(got, oracle.attend_ragged(*wide, lengths, Options(sinks=sinks)), **ROUGH)


@pytest.mark.parametrize("window_left", [-1, 100])
@pytest.mark.parametrize("lengths", [[1], [1000], [3, 0, 130, 700, 1, 24, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (16, 1)], ids=str)
@pytest.mark.parametrize("widths", FP8_TILES, ids=str)
def test_whole_sequences_of_other_widths(
    sm90: torch.device, widths: tuple[int, int], heads: tuple[int, int], lengths: list[int], window_left: int
) -> None:
    q, k, v = (x.to(E4M3) for x in oracle.ragged(lengths, *heads, widths[0], torch.float32, sm90, seed=sum(lengths)))
    v = v[..., : widths[1]].contiguous()
    scales = [_scale(sm90, heads[1], sum(lengths) + at) for at in range(3)]
    out = torch.full((*q.shape[:2], widths[1]), math.nan, dtype=BF16, device=sm90)
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    got = mha_prefill(q, k, v, oracle.offsets(lengths, sm90), window_left=window_left, return_lse=True, out=out, **named)
    wide = [_wide(x, scale) for x, scale in zip((q, k, v), scales, strict=True)]
    oracle.check(got, oracle.attend_ragged(*wide, lengths, Options(window_left)), **ROUGH)


@pytest.mark.parametrize("seen", [{"is_causal": True}, {"is_causal": False}, {"is_causal": True, "window_left": 100}], ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("widths", FP8_TILES, ids=str)
def test_extensions_of_other_widths(sm90: torch.device, widths: tuple[int, int], page_size: int, seen: dict[str, Any]) -> None:
    q_lens, kv_lens = [70, 33, 0, 1, 128], [300, 33, 0, 257, 640]
    case, wide, scales = _paged(sm90, q_lens, kv_lens, (4, 2, widths[0]), page_size, E4M3, widths[1])
    out = torch.full((*case.q.shape[:2], widths[1]), math.nan, dtype=BF16, device=sm90)
    got = mha_extend_with_kvcache(
        case.q, case.cu_seqlens_q, None, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, 128, 640,
        return_lse=True, out=out, **seen, **scales,
    )  # fmt: skip
    oracle.check(got, wide.wanted(Options(**seen)), **ROUGH)


@pytest.mark.parametrize("seen", [{"is_causal": True}, {"is_causal": False}, {"is_causal": True, "window_left": 60}], ids=str)
@pytest.mark.parametrize("heads", [1, 5])
def test_latent_attention_to_others(sm90: torch.device, heads: int, seen: dict[str, Any]) -> None:
    """Tests a newly allocated output that is narrower than the queries."""
    q_lens, kv_lens = [5, 33, 2, 7, 300], [70, 33, 1, 0, 900]
    q, k, v = (x.to(E4M3) for x in oracle.ragged([sum(kv_lens)], heads, heads, 192, torch.float32, sm90))
    q, v = q[: sum(q_lens)], v[..., :128].contiguous()
    scales = [_scale(sm90, heads, at) for at in range(3)]
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    offsets = oracle.offsets(q_lens, sm90)
    got = mla_prefill(q, k, v, offsets, cu_seqlens_kv=oracle.offsets(kv_lens, sm90), return_lse=True, **seen, **named)
    wide = [_wide(x, scale) for x, scale in zip((q, k, v), scales, strict=True)]
    oracle.check(got, oracle.attend_to_others(*wide, q_lens, kv_lens, Options(**seen)), **ROUGH)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", [(64, 8, 64), (32, 8, 128), (6, 3, 64), (16, 1, 128)], ids=str)
@pytest.mark.parametrize("q_dtype", [BF16, FP16, E4M3], ids=str)
def test_extensions(sm90: torch.device, q_dtype: torch.dtype, shape: tuple[int, int, int], page_size: int, is_causal: bool) -> None:
    """Tests sequences that end near the ends of blocks and pages. The cache holds NaN past the sequences' ends."""
    q_lens, kv_lens = [70, 33, 0, 1, 128], [300, 33, 0, 257, 640]
    case, wide, scales = _paged(sm90, q_lens, kv_lens, shape, page_size, q_dtype)
    out = torch.full(case.q.shape, math.nan, dtype=BF16 if q_dtype == E4M3 else q_dtype, device=sm90)
    got = mha_extend_with_kvcache(
        case.q, case.cu_seqlens_q, None, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, 128, 640, is_causal,
        return_lse=True, out=out, **scales,
    )  # fmt: skip
    oracle.check(got, wide.wanted(Options(is_causal=is_causal)), **(ROUGH if q_dtype == E4M3 else {}))


@pytest.mark.parametrize("window_left", [-1, 0, 100])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("gqa_ratio", [1, 8, 16])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_wide_heads(sm90: torch.device, dtype: torch.dtype, gqa_ratio: int, page_size: int, window_left: int) -> None:
    q_lens, kv_lens = [70, 33, 0, 1, 128], [300, 33, 0, 257, 640]
    case, wide, scales = _paged(sm90, q_lens, kv_lens, (2 * gqa_ratio, 2, 256), page_size, dtype)
    freed = case.freed(window_left) if window_left >= 0 else case
    sinks = torch.linspace(-2.0, 3.0, 2 * gqa_ratio, device=sm90)
    out = torch.full(case.q.shape, math.nan, dtype=dtype, device=sm90)
    got = mha_extend_with_kvcache(
        freed.q, freed.cu_seqlens_q, None, freed.k_cache, freed.v_cache, freed.page_table, freed.cache_seqlens, 128, 640, True,
        window_left=window_left, sinks=sinks, return_lse=True, out=out, **scales,
    )  # fmt: skip
    oracle.check(got, wide.wanted(Options(window_left, sinks=sinks)))


@pytest.mark.parametrize("window_left", [0, 1, 100, 127, 128, 500])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("shape", [(64, 8, 64), (32, 8, 128)], ids=str)
@pytest.mark.parametrize("q_dtype", [BF16, E4M3], ids=str)
def test_windows(sm90: torch.device, q_dtype: torch.dtype, shape: tuple[int, int, int], page_size: int, window_left: int) -> None:
    """Tests windows after the pages before them were freed."""
    q_lens, kv_lens = [70, 33, 0, 1, 300], [300, 33, 0, 900, 1640]
    case, wide, scales = _paged(sm90, q_lens, kv_lens, shape, page_size, q_dtype)
    freed = case.freed(window_left)
    out = torch.full(case.q.shape, math.nan, dtype=BF16, device=sm90)
    got = mha_extend_with_kvcache(
        freed.q, freed.cu_seqlens_q, None, freed.k_cache, freed.v_cache, freed.page_table, freed.cache_seqlens, 300, 1640, True,
        window_left=window_left, return_lse=True, out=out, **scales,
    )  # fmt: skip
    oracle.check(got, wide.wanted(Options(window_left)), **(ROUGH if q_dtype == E4M3 else {}))
