"""Tests the Triton kernels for prefill and extend beyond the operators' cases: tiles, layouts and head dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.attention import _mha_band, _mha_call, _mha_tiles
from tokenspeed_kernel.triton.attention import mha_extend_with_kvcache as extend
from tokenspeed_kernel.triton.attention import mha_prefill as prefill
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged

DEVICE = default_device()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALL_TILES = [
    _mha_tiles.Tiles(16, 16, 4, 2),
    _mha_tiles.Tiles(32, 16, 4, 3, "apart"),
    _mha_tiles.Tiles(16, 32, 4, 2, "apart", descriptors=True),
]


def _draw(make: Any) -> dict[str, Any]:
    return make(Draw(DEVICE))


def _close(got: Any, expected: Any) -> None:
    if isinstance(got, tuple):
        torch.testing.assert_close(got[1], expected[1], atol=1e-3, rtol=1e-3)
        got, expected = got[0], expected[0]
    got, expected = got.float(), expected.float()
    assert not got.isnan().any()
    assert (got - expected).norm() <= 5e-3 * expected.norm()


def _agrees(operator: Any, arguments: dict[str, Any]) -> None:
    _close(operator(**arguments, solution="triton"), operator(**arguments, solution="reference"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tiles", SMALL_TILES, ids=lambda tiles: f"{tiles.edges}-{tiles.descriptors}")
@pytest.mark.parametrize("options", [{}, {"window_left": 21}, {"window_left": 70, "sinks": True, "logit_cap": 3.0}], ids=str)
def test_tiles(monkeypatch: pytest.MonkeyPatch, tiles: Any, options: dict[str, Any]) -> None:
    """With small tiles, sequences have many blocks, and end at arbitrary positions in a block."""
    monkeypatch.setattr(prefill, "choose", lambda *args: tiles)
    monkeypatch.setattr(extend, "choose", lambda *args: tiles)
    options = {"dtype": torch.float16, "return_lse": True, **options}
    _agrees(tk.mha_prefill, _draw(ragged([40, 1, 0, 59], 3, 1, 16, **options)))
    for page_size, is_causal in ((32, True), (8, False), (8, True)):
        make = paged([60, 1, 0], [29, 1, 0], 3, 1, 16, page_size=page_size, stale=True, is_causal=is_causal, **options)
        _agrees(tk.mha_extend_with_kvcache, _draw(make))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("block_m", "heads"), [(32, 8), (16, 6), (16, 1)], ids=str)
@pytest.mark.parametrize("window_left", [15, 20])
def test_band(monkeypatch: pytest.MonkeyPatch, block_m: int, heads: int, window_left: int) -> None:
    band = _mha_band.Band(block_m, 4)
    monkeypatch.setattr(prefill, "choose", lambda *args: band)
    monkeypatch.setattr(extend, "choose", lambda *args: band)
    options = {"window_left": window_left, "return_lse": True}
    lengths = [39, 1, 0, 23]
    _agrees(tk.mha_prefill, _draw(ragged(lengths, heads, 1, 24, dtype=torch.float16, **options)))
    _agrees(tk.mha_prefill, _draw(ragged(lengths, heads, 1, 24, dtype=torch.float16, sinks=True, logit_cap=2.0, **options)))
    make = paged(lengths, [20, 1, 0, 7], heads, 1, 24, page_size=8, dtype=torch.float16, stale=True, is_causal=True, **options)
    _agrees(tk.mha_extend_with_kvcache, _draw(make))


@pytest.mark.parametrize("head_dim", [8, 16, 72, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("other", [None, 64, 24], ids="v {}".format)
def test_head_sizes(head_dim: int, other: int | None) -> None:
    _agrees(tk.mha_prefill, _draw(ragged([19], 2, 1, head_dim, other, dtype=torch.float16)))
    make = paged([40], [9], 2, 1, head_dim, other, page_size=16, is_causal=True)
    _agrees(tk.mha_extend_with_kvcache, _draw(make))


@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 64, 100, 128, 256])
@pytest.mark.parametrize("window_left", [-1, 50, 127])
def test_page_sizes(page_size: int, window_left: int) -> None:
    make = paged(
        [150, 3], [100, 3], 2, 1, 32, page_size=page_size, is_causal=True, window_left=window_left, stale=True, return_lse=True
    )
    _agrees(tk.mha_extend_with_kvcache, _draw(make))


@pytest.mark.parametrize("new", [1, 2, 4, 9, 16])
@pytest.mark.parametrize("window_left", [-1, 127])
def test_few_new_tokens(new: int, window_left: int) -> None:
    make = paged([150, new], [new] * 2, 8, 1, 64, is_causal=True, sinks=True, window_left=window_left, return_lse=True)
    _agrees(tk.mha_extend_with_kvcache, _draw(make))


@pytest.mark.parametrize("cache", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("window_left", [-1, 31])
def test_fp8_formats(cache: torch.dtype, dtype: torch.dtype, window_left: int) -> None:
    scales = ["k_scale", "v_scale", *(["q_scale"] if dtype in (E4M3, E5M2) else [])]
    make = paged(
        [40, 30],
        [12, 30],
        4,
        2,
        32,
        dtype=dtype,
        cache_dtype=cache,
        scales=scales,
        scale_per_head=True,
        is_causal=True,
        window_left=window_left,
        stale=True,
    )
    _agrees(tk.mha_extend_with_kvcache, _draw(make))


@pytest.mark.parametrize(("dtype", "head_dim"), [(E4M3, 64), (E4M3, 128), (E5M2, 80)], ids=str)
@pytest.mark.parametrize("window_left", [-1, 70])
def test_fp8_prefill(dtype: torch.dtype, head_dim: int, window_left: int) -> None:
    """First call: each KV head has a scale. Second call: q, k and v are side by side, as a fused QKV projection writes them."""
    options: dict[str, Any] = {"scales": ("q_scale", "k_scale", "v_scale"), "scale_per_head": True, "window_left": window_left}
    _agrees(tk.mha_prefill, _draw(ragged([40, 0, 70], 4, 2, head_dim, dtype=dtype, **options)))
    arguments = _draw(ragged([33], 4, 2, head_dim, dtype=dtype, window_left=window_left, return_lse=True))
    together = torch.cat([arguments[name].view(torch.uint8).flatten(1) for name in ("q", "k", "v")], 1).view(dtype)
    widths = [4 * head_dim, 2 * head_dim, 2 * head_dim]
    for name, part in zip(("q", "k", "v"), together.split(widths, 1), strict=True):
        arguments[name] = part.unflatten(1, (-1, head_dim))
    _agrees(tk.mha_prefill, arguments)


def test_more_sequences_than_one_chunk_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mha_call, "_SEQUENCES_AT_ONCE", 16)
    lengths = [i * 7 % 3 for i in range(40)]
    _agrees(tk.mha_prefill, _draw(ragged(lengths, 2, 1, 16, dtype=torch.float16)))
    _agrees(tk.mha_prefill, _draw(ragged(lengths, 2, 1, 16, dtype=torch.float16, window_left=15)))


@pytest.mark.parametrize("window_left", [-1, 31])
def test_sequences_keep_to_themselves(window_left: int) -> None:
    """NaN in one sequence must not affect other sequences, although tiles and blocks extend beyond the sequence's ends."""
    arguments = _draw(ragged([30, 9, 45], 4, 2, 64, dtype=torch.float16, window_left=window_left))
    for name in ("q", "k", "v"):
        arguments[name][30:39] = torch.nan
    out = tk.mha_prefill(**arguments, solution="triton")
    assert out[30:39].isnan().all()
    assert not out[:30].isnan().any()
    assert not out[39:].isnan().any()


def _strided(x: Tensor) -> Tensor:
    """Returns a view with equal values into a larger tensor with another order of axes."""
    order = [x.dim() - 2, *(i for i in range(x.dim()) if i != x.dim() - 2)]
    room = torch.full([size + 3 for size in x.permute(order).shape], 7, device=x.device).to(x.dtype)
    view = room[tuple(slice(1, 1 + size) for size in x.permute(order).shape)]
    view.copy_(x.permute(order))
    return view.permute([order.index(i) for i in range(x.dim())])


@pytest.mark.parametrize("window_left", [-1, 31])
def test_strides(window_left: int) -> None:
    options = {"window_left": window_left, "return_lse": True}
    arguments = _draw(ragged([50, 3], 4, 2, 32, dtype=torch.float16, **options))
    expected = tk.mha_prefill(**arguments, solution="reference")
    moved = {name: _strided(arguments[name]) for name in ("q", "k", "v")}
    out = _strided(torch.empty_like(expected[0]))
    got = tk.mha_prefill(**{**arguments, **moved}, out=out, solution="triton")
    assert got[0] is out
    _close(got, expected)

    arguments = _draw(paged([50, 30], [20, 3], 4, 2, 32, dtype=torch.float16, is_causal=True, **options))
    expected = tk.mha_extend_with_kvcache(**arguments, solution="reference")
    moved = {name: _strided(arguments[name]) for name in ("q", "k_cache", "v_cache")}
    moved["page_table"] = arguments["page_table"].mT.contiguous().mT
    got = tk.mha_extend_with_kvcache(**{**arguments, **moved}, out=_strided(torch.empty_like(expected[0])), solution="triton")
    _close(got, expected)


def test_two_runs_are_bitwise_equal() -> None:
    arguments = _draw(ragged([100, 33], 8, 2, 64, dtype=torch.float16, sinks=True))
    assert torch.equal(*(tk.mha_prefill(**arguments, solution="triton") for _ in range(2)))
