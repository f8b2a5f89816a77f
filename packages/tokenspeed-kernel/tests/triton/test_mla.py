"""Tests the Triton kernels for MLA beyond the operators' cases: tiles, split-KV, layouts and formats."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.attention import _mla_latent as latent
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged
from tokenspeed_kernel_base.platform import current_platform

DEVICE = default_device()
ON_GPU = DEVICE.type == "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TINY: dict[str, Any] = {"heads": 3, "head_dim": 24, "kv_lora_rank": 16, "softmax_scale": 0.25}
SMALL: dict[str, Any] = {"heads": 3, "head_dim": 80, "kv_lora_rank": 64, "softmax_scale": 0.1}
EXTEND: dict[str, Any] = {**TINY, "is_causal": True}
TILES = {
    "rows of queries": latent.Tile(16, 16, 4, 1),
    "rows of keys": latent.Tile(16, 64, 4, 2, transposed=True),
    "rows of keys, apart": latent.Tile(16, 64, 8, 2, transposed=True, apart=True, parts=4),
    "apart": latent.Tile(64, 64, 8, 2, apart=True, parts=2),
}


def _draw(*args: Any, **options: Any) -> dict[str, Any]:
    return paged(*args, **options)(Draw(DEVICE))


def _close(got: Any, expected: Any, bound: float = 5e-3) -> None:
    if isinstance(got, tuple):
        torch.testing.assert_close(got[1], expected[1], atol=1e-3, rtol=1e-3)
        got, expected = got[0], expected[0]
    got, expected = got.float(), expected.float()
    assert not got.isnan().any()
    assert (got - expected).norm() <= bound * expected.norm() + 1e-30


def _agrees(operator: Any, arguments: dict[str, Any], bound: float = 5e-3) -> None:
    got = operator(**arguments, solution="triton")
    _close(got, operator(**arguments, solution="reference"), bound)


@pytest.fixture(params=TILES)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the kernels use each tile configuration in turn, instead of the platform's choice."""
    chosen = TILES[request.param]
    if ON_GPU and chosen.apart and current_platform().arch != "sm_90":
        pytest.skip("laid out for the matrix units of another architecture")
    monkeypatch.setattr(latent, "tile_for", lambda *args: chosen)
    return chosen


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("options", [{}, {"max_seqlen_q": 7}, {"logit_cap": 4.0}], ids=["one", "seven", "cap"])
def test_decoding_with_every_tile(options: dict[str, Any]) -> None:
    _agrees(tk.mla_decode_with_kvcache, _draw([1, 300, 0, 64], **SMALL, **options, page_size=64, stale=True, return_lse=True))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("causal", [True, False])
def test_extending_with_every_tile(causal: bool) -> None:
    options = {**SMALL, "is_causal": causal, "page_size": 64, "return_lse": True, "stale": True}
    _agrees(tk.mla_extend_with_kvcache, _draw([200, 64, 0, 31], [40, 1, 0, 31], **options))


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("page_size", [4, 16, 64, 256])
def test_windows_with_every_tile(page_size: int) -> None:
    """Pages before the window are freed: they have -1 in the page table, and their memory holds NaN."""
    options = {**SMALL, "page_size": page_size, "return_lse": True, "freed": True}
    for window_left in (0, 30, 200):
        lengths = [1, 300, 0, 64, 700]
        _agrees(tk.mla_decode_with_kvcache, _draw(lengths, **options, max_seqlen_q=3, window_left=window_left))
        extend = {**options, "is_causal": True, "window_left": window_left}
        _agrees(tk.mla_extend_with_kvcache, _draw(lengths, [1, 40, 0, 64, 5], **extend))


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 256])
def test_page_sizes(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "tile_for", lambda *args: TILES["rows of queries"])
    lengths = [1, 260, 0, 65]
    _agrees(tk.mla_decode_with_kvcache, _draw(lengths, **TINY, page_size=page_size, stale=True, return_lse=True))
    _agrees(tk.mla_extend_with_kvcache, _draw(lengths, [1, 9, 0, 2], **EXTEND, page_size=page_size, stale=True))


def test_lengths_that_differ_much() -> None:
    """Runs batches whose sequence lengths differ much, because the split of keys into work items depends on the lengths."""
    rng = random.Random(5)
    for batch in (1, 5, 33):
        lengths = [rng.choice([0, 1, 63, 200, 700]) for _ in range(batch)]
        _agrees(tk.mla_decode_with_kvcache, _draw(lengths, **TINY, return_lse=True))


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, E4M3, E5M2], ids=str)
def test_fp8_caches(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    scales = ("q_scale", "kv_scale") if dtype in (E4M3, E5M2) else ("kv_scale",)
    arguments = _draw([90, 1, 20], **TINY, dtype=dtype, cache_dtype=cache_dtype, scales=scales, return_lse=True)
    _agrees(tk.mla_decode_with_kvcache, arguments, 4e-2)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e30])
def test_queries_beyond_the_range_of_float16(magnitude: float) -> None:
    arguments = _draw([90, 1, 20], **TINY, cache_dtype=E4M3, return_lse=True)
    arguments["q"] *= magnitude
    arguments["softmax_scale"] /= magnitude
    _agrees(tk.mla_decode_with_kvcache, arguments, 4e-2)


def test_strided_operands() -> None:
    arguments = _draw([90, 1, 20], **TINY)
    q, cache = arguments["q"], arguments["kv_cache"]
    arguments["q"] = torch.stack((q, q), dim=2)[:, :, 0]
    arguments["kv_cache"] = torch.cat((cache, cache), dim=1)[:, : cache.shape[1]]
    arguments["page_table"] = arguments["page_table"].repeat_interleave(2, dim=1)[:, ::2]
    out = torch.empty(q.shape[0], 16, q.shape[1], dtype=q.dtype, device=DEVICE).transpose(1, 2)
    got = tk.mla_decode_with_kvcache(**arguments, out=out, solution="triton")
    assert got is out
    _close(out, tk.mla_decode_with_kvcache(**arguments, solution="reference"))


def test_a_rotary_part_that_fills_no_power_of_two() -> None:
    for rank, width in ((16, 21), (10, 26), (40, 41), (33, 33)):
        options = {**TINY, "kv_lora_rank": rank, "head_dim": width}
        _agrees(tk.mla_decode_with_kvcache, _draw([70, 3], **options, return_lse=True))


def test_extending_by_as_many_of_each_is_decoding() -> None:
    arguments = _draw([90, 3, 64], **TINY, max_seqlen_q=3)
    decoded = tk.mla_decode_with_kvcache(**arguments, solution="triton")
    offsets = torch.arange(0, 12, 3, dtype=torch.int32, device=DEVICE)
    extended = tk.mla_extend_with_kvcache(cu_seqlens_q=offsets, cu_seqlens_kv=None, is_causal=True, **arguments, solution="triton")
    assert torch.equal(decoded, extended)


def test_prefill_of_broadcast_rotary_keys() -> None:
    arguments = ragged([5, 40], 3, 3, 40, 24, return_lse=True)(Draw(DEVICE))
    shared = arguments["k"][:, :1, 24:].expand(-1, 3, -1)
    arguments["k"] = torch.cat((arguments["k"][..., :24], shared), dim=-1)
    _agrees(tk.mla_prefill, arguments)
    arguments["v"] = torch.cat((arguments["v"], arguments["v"]), dim=-1)[..., :24]
    _agrees(tk.mla_prefill, arguments)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("window_left", [-1, 0, 20, 100])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (40, 24), (96, 64)])
def test_prefill_with_keys_of_their_own(head_dim: int, v_head_dim: int, is_causal: bool, window_left: int) -> None:
    lengths, kv_lengths = [70, 0, 1, 33, 5], [200, 9, 40, 0, 3]
    options: dict[str, Any] = {"is_causal": is_causal, "window_left": window_left, "return_lse": True}
    for dtype in (torch.float16, E4M3, E5M2):
        scales = ("q_scale", "k_scale", "v_scale") if dtype != torch.float16 else ()
        recipe = ragged(lengths, 2, 2, head_dim, v_head_dim, dtype, kv_lengths=kv_lengths, scales=scales, **options)
        _agrees(tk.mla_prefill, recipe(Draw(DEVICE)), 5e-3 if dtype == torch.float16 else 4e-2)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs are captured on a GPU")
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_follows_lengths(heads: int) -> None:
    rng = random.Random(heads)
    options: dict[str, Any] = {"heads": heads, "head_dim": 576, "kv_lora_rank": 512, "page_size": 64, "softmax_scale": 0.05}
    arguments = _draw([3000] * 9, **options)
    call = lambda: tk.mla_decode_with_kvcache(**arguments, solution="triton")  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(4):
        lengths = torch.tensor([rng.choice([0, 1, 64, 700, 3000]) for _ in range(9)], dtype=torch.int32)
        arguments["cache_seqlens"].copy_(lengths)
        used = arguments["page_table"][:, :-1]
        used.copy_(used.flatten()[torch.randperm(used.numel(), device=DEVICE)].view_as(used))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call())
        _close(out, tk.mla_decode_with_kvcache(**arguments, solution="reference"))
