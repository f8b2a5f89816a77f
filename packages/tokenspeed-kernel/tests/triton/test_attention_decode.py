"""Tests the Triton kernels for paged decode beyond the operator's cases: split-KV, layouts and formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.attention import _split_kv
from tokenspeed_kernel.triton.attention import mha_decode_with_kvcache as kernel
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.attention._inputs import paged

DEVICE = default_device()
ON_GPU = DEVICE.type == "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _draw(*args: Any, **options: Any) -> dict[str, Any]:
    return paged(*args, **options)(Draw(DEVICE))


def _close(got: Any, expected: Any, bound: float = 5e-3) -> None:
    if isinstance(got, tuple):
        torch.testing.assert_close(got[1], expected[1], atol=1e-3, rtol=1e-3)
        got, expected = got[0], expected[0]
    got, expected = got.float(), expected.float()
    assert not got.isnan().any()
    assert (got - expected).norm() <= bound * expected.norm() + 1e-30


def _agrees(arguments: dict[str, Any], bound: float = 5e-3) -> None:
    got = tk.mha_decode_with_kvcache(**arguments, solution="triton")
    _close(got, tk.mha_decode_with_kvcache(**arguments, solution="reference"), bound)


@pytest.fixture
def small_work_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configures the kernel such that work items have few keys, and sequence lengths are loaded 16 at a time."""
    choose = kernel._config
    small = {"block_n": 16, "least": 16, "long": 16, "whole": 16, "resident": 1, "waves": 1}
    monkeypatch.setattr(kernel, "_config", lambda *args: choose(*args)._replace(**small))
    monkeypatch.setattr(_split_kv, "_LENGTHS_AT_ONCE", 16)


@pytest.mark.usefixtures("small_work_items")
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 256])
@pytest.mark.parametrize("options", [{}, {"window_left": 40}, {"max_seqlen_q": 3, "sinks": True}], ids=["full", "window", "three"])
def test_work_items_of_ragged_sequences(page_size: int, options: dict[str, Any]) -> None:
    lengths = [200, 0, 1, 16, 17, 97, 5]
    _agrees(_draw(lengths, None, 4, 2, 16, page_size=page_size, dtype=torch.float32, stale=True, return_lse=True, **options), 1e-5)


@pytest.mark.usefixtures("small_work_items")
def test_lengths_are_loaded_in_chunks() -> None:
    lengths = [(i * 7) % 50 for i in range(37)]
    _agrees(_draw(lengths, None, 2, 1, 16, dtype=torch.float32, return_lse=True), 1e-5)


@pytest.mark.usefixtures("small_work_items")
@pytest.mark.parametrize("options", [{"sinks": True}, {"max_seqlen_q": 2, "window_left": 50}], ids=["sinks", "window"])
def test_one_program_merges_the_splits_of_all_heads(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel merges the splits of all heads in one CTA if there are many sequences. Here it must do so for few sequences."""
    monkeypatch.setattr(_split_kv, "_FEW", 0)
    _agrees(_draw([100, 0, 15, 61], None, 12, 4, 16, 24, dtype=torch.float32, return_lse=True, **options), 1e-5)


@pytest.mark.usefixtures("small_work_items")
def test_every_sequence_is_empty() -> None:
    _agrees(_draw([0, 0, 0], None, 2, 1, 16, return_lse=True, sinks=True))
    arguments = _draw([0, 0], None, 2, 1, 16, return_lse=True)
    _agrees({**arguments, "page_table": arguments["page_table"][:, :0], "max_seqlen_k": 0})


@pytest.mark.usefixtures("small_work_items")
def test_more_rows_than_a_tile() -> None:
    _agrees(_draw([40, 9, 3], None, 24, 1, 16, max_seqlen_q=4, sinks=True, return_lse=True, window_left=20))


@pytest.mark.parametrize("dim", [(8, 8), (24, 40), (72, 16), (192, 128), (256, 256)])
def test_head_dimensions(dim: tuple[int, int]) -> None:
    _agrees(_draw([70, 33], None, 6, 2, *dim, dtype=torch.float16))


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("cache_dtype", [torch.float16, E4M3], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_seqlen_q": 2, "sinks": True, "return_lse": True}], ids=["one", "two"])
def test_heads_that_share_a_program(group: int, cache_dtype: torch.dtype, options: dict[str, Any]) -> None:
    scales = {"scales": ("k_scale", "v_scale"), "scale_per_head": True} if cache_dtype == E4M3 else {}
    arguments = _draw([40, 17], None, 8 * group, 8, 32, dtype=torch.float16, cache_dtype=cache_dtype, **scales, **options)
    assert kernel._packed(arguments["k_cache"], arguments["v_cache"], group * options.get("max_seqlen_q", 1)) > 1 or group > 4
    _agrees(arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=str)
def test_fp8(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    scales = ("k_scale", "v_scale", "q_scale") if dtype in (E4M3, E5M2) else ("k_scale", "v_scale")
    _agrees(_draw([70, 33], None, 6, 2, 32, dtype=dtype, cache_dtype=cache_dtype, scales=scales, scale_per_head=True))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e30])
def test_queries_beyond_float16_meet_an_fp8_cache(size: float) -> None:
    arguments = _draw([70, 33], None, 4, 2, 32, cache_dtype=E4M3)
    _agrees({**arguments, "q": arguments["q"] * size, "softmax_scale": 1.0 / size})


def test_every_e4m3_number() -> None:
    """The values in the cache are all e4m3 numbers. Each token attends to one key, so the outputs must equal these values."""
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(E4M3)
    cache = every.view(16, 1, 1, 16)
    arguments = {
        "q": torch.zeros(16, 1, 16, device=DEVICE),
        "k_cache": torch.zeros_like(every).view(16, 1, 1, 16),
        "v_cache": cache,
        "page_table": torch.arange(16, dtype=torch.int32, device=DEVICE)[:, None],
        "cache_seqlens": torch.ones(16, dtype=torch.int32, device=DEVICE),
        "max_seqlen_k": 1,
    }
    out = tk.mha_decode_with_kvcache(**arguments, solution="triton")
    torch.testing.assert_close(out.flatten(), every.float(), rtol=0, atol=0, equal_nan=True)


def test_strides() -> None:
    arguments = _draw([50, 20, 33], None, 4, 2, 32, page_size=8, sinks=True)
    expected = tk.mha_decode_with_kvcache(**arguments, solution="reference")
    _close(tk.mha_decode_with_kvcache(**_strided(arguments), solution="triton"), expected)
    out = torch.zeros(3, 4, 64, dtype=torch.bfloat16, device=DEVICE)[..., ::2]
    assert tk.mha_decode_with_kvcache(**arguments, out=out, solution="triton") is out
    _close(out, expected)


def _strided(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with equal values in other layouts: heads before tokens, odd strides, no unit stride."""

    def apart(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype, device=DEVICE)
        wide[..., : 2 * x.shape[-1] : 2] = x
        return wide[..., : 2 * x.shape[-1] : 2]

    return {
        **arguments,
        "q": apart(arguments["q"]),
        "k_cache": arguments["k_cache"].transpose(1, 2).contiguous().transpose(1, 2),
        "v_cache": apart(arguments["v_cache"]),
        "page_table": arguments["page_table"].t().contiguous().t(),
    }


def test_tokens_before_the_window_may_be_gone() -> None:
    arguments = _draw([90, 47], None, 4, 2, 16, page_size=8, window_left=9, dtype=torch.float32)
    expected = tk.mha_decode_with_kvcache(**arguments, solution="reference")
    for row, length in zip(arguments["page_table"].tolist(), [90, 47], strict=True):
        first = length - 1 - 9
        for cache in (arguments["k_cache"], arguments["v_cache"]):
            cache[row[: first // 8]] = torch.nan
            cache[row[first // 8], : first % 8] = torch.nan
    _close(tk.mha_decode_with_kvcache(**arguments, solution="triton"), expected, 1e-5)


@pytest.mark.skipif(not ON_GPU, reason="a GPU captures graphs")
def test_a_graph_follows_lengths_and_pages() -> None:
    lengths = [2000, 5, 700, 1300]
    arguments = _draw(lengths, None, 16, 2, 64, page_size=16, sinks=True, return_lse=True)
    call = {**arguments, "page_table": arguments["page_table"].clone(), "cache_seqlens": arguments["cache_seqlens"].clone()}
    tk.mha_decode_with_kvcache(**call, solution="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = tk.mha_decode_with_kvcache(**call, solution="triton")
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 0, 1]):
        for fraction in (1.0, 0.3, 0.0):
            call["page_table"].copy_(arguments["page_table"][order])
            call["cache_seqlens"].copy_((arguments["cache_seqlens"][order] * fraction).int())
            graph.replay()
            _close(got, tk.mha_decode_with_kvcache(**call, solution="reference"))
            eager = tk.mha_decode_with_kvcache(**call, solution="triton")
            assert torch.equal(got[0], eager[0])
            assert torch.equal(got[1], eager[1])


@pytest.mark.parametrize("width", [1, 5, 64, 1000])
def test_merging_in_place_and_strided(width: int) -> None:
    draw = Draw(DEVICE)
    a, b = draw.normal(9, 3, width), draw.normal(9, 3, width)
    lse_a, lse_b = draw.normal(9, 3), draw.normal(9, 3)
    expected = tk.attn_merge_state(a, lse_a, b, lse_b, solution="reference")
    across = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (a, lse_a, b, lse_b)]
    torch.testing.assert_close(tk.attn_merge_state(*across, solution="triton"), expected)
    tk.attn_merge_state(a, lse_a, b, lse_b, out=a, lse=lse_b, solution="triton")
    torch.testing.assert_close((a, lse_b), expected)
