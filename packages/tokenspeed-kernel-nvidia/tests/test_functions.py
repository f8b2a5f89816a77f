"""Tests the public functions on the device, without tokenspeed-kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel_nvidia

from .oracle import Options, attend_ragged, check, offsets, paged, ragged

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 64
WINDOWS = [-1, 31, 127]
LENGTHS = [1, 0, 150, 33, 256]
Q_LENS, KV_LENS = [1, 0, 40, 33, 128], [70, 5, 40, 300, 200]


def _options(device: torch.device, window_left: int) -> Options:
    sinks = torch.randn(HEADS, generator=torch.Generator(device).manual_seed(1), device=device)
    return Options(window_left, sinks, softmax_scale=0.2)


def _call(name: str, device: torch.device, window_left: int) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    """Returns the arguments of a function, and the expected result."""
    options = _options(device, window_left)
    shape = (HEADS, KV_HEADS, HEAD_DIM)
    common = {"window_left": window_left, "sinks": options.sinks, "softmax_scale": options.softmax_scale, "return_lse": True}
    if name == "mha_prefill":
        q, k, v = ragged(LENGTHS, *shape, torch.bfloat16, device)
        return {"q": q, "k": k, "v": v, "cu_seqlens": offsets(LENGTHS, device), **common}, attend_ragged(q, k, v, LENGTHS, options)
    new = [2] * len(KV_LENS) if name == "mha_decode_with_kvcache" else Q_LENS
    made = paged(new, KV_LENS, *shape, 64, torch.bfloat16, device)
    cache = {"k_cache": made.k_cache, "v_cache": made.v_cache, "page_table": made.page_table}
    given = {"q": made.q, **cache, "cache_seqlens": made.cache_seqlens, "max_seqlen_q": max(new), "max_seqlen_k": max(KV_LENS)}
    if name == "mha_extend_with_kvcache":
        given |= {"cu_seqlens_q": made.cu_seqlens_q, "cu_seqlens_kv": None, "is_causal": True}
    return {**given, **common}, made.wanted(options)


@pytest.mark.parametrize("window_left", WINDOWS)
@pytest.mark.parametrize("name", ["mha_prefill", "mha_extend_with_kvcache", "mha_decode_with_kvcache"])
def test_a_function_is_right(sm90: torch.device, name: str, window_left: int) -> None:
    arguments, wanted = _call(name, sm90, window_left)
    function = getattr(tokenspeed_kernel_nvidia, name)
    check(function(**arguments), wanted)
    out = torch.full_like(arguments["q"], torch.nan)
    got, lse = function(**arguments, out=out)
    assert got is out
    check((out, lse), wanted)
    check(function(**{**arguments, "return_lse": False}), wanted)


@pytest.mark.parametrize("window_left", WINDOWS)
@pytest.mark.parametrize("name", ["mha_prefill", "mha_extend_with_kvcache", "mha_decode_with_kvcache"])
def test_elements_apart(sm90: torch.device, name: str, window_left: int) -> None:
    """Tests tensors that consist of every second element of a larger tensor, and an output that is unaligned."""
    arguments, wanted = _call(name, sm90, window_left)
    for argument, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[argument] = value.repeat_interleave(2, dim=-1)[..., ::2]
    q = arguments["q"]
    out = torch.empty(q.numel() + 1, dtype=q.dtype, device=sm90)[1:].view(q.shape)
    got, lse = getattr(tokenspeed_kernel_nvidia, name)(**arguments, out=out)
    assert got is out
    check((out, lse), wanted)


@pytest.mark.parametrize("window_left", [-1, 127])
@pytest.mark.parametrize("name", ["mha_prefill", "mha_extend_with_kvcache", "mha_decode_with_kvcache"])
def test_wrong_calls_after_a_correct_one_are_rejected(sm90: torch.device, name: str, window_left: int) -> None:
    arguments, wanted = _call(name, sm90, window_left)
    function = getattr(tokenspeed_kernel_nvidia, name)
    out = torch.empty_like(arguments["q"])
    values, lengths = ("v", "cu_seqlens") if name == "mha_prefill" else ("v_cache", "cache_seqlens")
    several: list[tuple[str, Any, type[Exception], str]] = [
        (values, arguments[values].half(), TypeError, "be a tensor of bfloat16, got float16"),
        (values, arguments[values][:-1], ValueError, "be of shape"),
        (values, arguments[values].cpu(), ValueError, "be on cuda:0 like q, got a .* on cpu"),
        (lengths, arguments[lengths].long(), TypeError, "be a tensor of int32, got int64"),
        ("sinks", arguments["sinks"].cpu(), ValueError, "be on cuda:0 like q, got a .* on cpu"),
        ("out", out.float(), TypeError, "be bfloat16, got a float32"),
        ("out", out[1:], ValueError, "have shape"),
        ("out", out.cpu(), ValueError, "be on cuda:0 like q, got a .* on cpu"),
        ("out", 3, TypeError, "be a tensor or None, got int"),
    ]
    for argument, wrong, error, message in several:
        check(function(**arguments, out=out), wanted)
        with pytest.raises(error, match=f"^{name}: {argument} must {message}"):
            function(**{**arguments, "out": out, argument: wrong})


@pytest.mark.parametrize("name", ["mha_prefill", "mha_extend_with_kvcache", "mha_decode_with_kvcache"])
def test_a_captured_call_follows_its_inputs(sm90: torch.device, name: str) -> None:
    arguments, _ = _call(name, sm90, -1)
    function = getattr(tokenspeed_kernel_nvidia, name)
    function(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = function(**arguments)
    arguments["q"].normal_()
    graph.replay()
    expected = function(**arguments)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_the_error_for_host_tensors(sm90: torch.device) -> None:
    arguments, _ = _call("mha_prefill", sm90, -1)
    with pytest.raises(ValueError, match=r"mha_prefill: k .* cuda:0 like q, got .* cpu"):
        tokenspeed_kernel_nvidia.mha_prefill(**{**arguments, "k": arguments["k"].cpu()})
    on_host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    with pytest.raises(RuntimeError, match=r"platform: needs an NVIDIA device, this is a CPU") as caught:
        tokenspeed_kernel_nvidia.mha_prefill(**on_host)
    assert "cutedsl_mha_prefill_64" in str(caught.value)
