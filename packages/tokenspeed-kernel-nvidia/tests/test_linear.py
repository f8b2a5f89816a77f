"""Tests the layout of a linear layer's weights, and the kernel's results on the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel_base.ops.gemm.linear_plan import LinearPlan
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_base.ops.quantization.encodings import decode_e2m1, decode_mxfp4, decode_nvfp4
from tokenspeed_kernel_base.platform import named_platform
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import CODE_BYTES
from tokenspeed_kernel_nvidia.sm90.gemm.linear import launch as linear
from tokenspeed_kernel_nvidia.sm90.gemm.linear.config import (
    GROUPS,
    HEAD_BYTES,
    MAX_K,
    SHARED_BYTES,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.gemm.linear.layout import NVFP4_FACTOR, prepare_weights

from .launched import emulated

FORMATS = pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4"])


def plan_of(k: int, n: int, weight_format: str, **options: Any) -> LinearPlan:
    facts = {"max_tokens": 16, "platform": named_platform("sm_90"), "solution": "cutedsl", **options}
    return tokenspeed_kernel.linear.plan(k, n, weight_format=weight_format, **facts)


def weights_of(k: int, n: int, weight_format: str, seed: int = 0, **more: Any) -> LinearWeights:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=draw)
    if weight_format == "mxfp4":
        return LinearWeights(codes, torch.randint(115, 130, (n, k // 32), dtype=torch.uint8, generator=draw), **more)
    # Scales are random e4m3 values of both signs, except NaN.
    scale = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=draw)
    scale |= torch.randint(0, 2, scale.shape, dtype=torch.uint8, generator=draw) << 7
    return LinearWeights(codes, scale.view(torch.float8_e4m3fn), torch.tensor([0.0137]), **more)


def values_of(weights: LinearWeights) -> Tensor:
    assert weights.weight_scale is not None
    if weights.weight_global_scale is None:
        return decode_mxfp4(weights.weight, weights.weight_scale, torch.float64)
    return decode_nvfp4(weights.weight, weights.weight_scale, weights.weight_global_scale).double()


def read(prepared: LinearWeights, weight_format: str, n: int, k: int) -> Tensor:
    """Reads the weights of a prepared layer bit by bit, as the docstring of the layout defines them."""
    panels, blocks, strips, _ = prepared.weight.shape
    words = prepared.weight[..., :CODE_BYTES].contiguous().view(torch.int32).view(panels, blocks, strips, 8, 4, 4).long()
    stored = prepared.weight[..., CODE_BYTES:].view(panels, blocks, strips, 8, -1, 2).long()
    quarters = stored.shape[4]
    result = torch.zeros(panels, strips, 16, blocks, 64, dtype=torch.float64)
    places = ((6, 7, 8, 15), (0, 1, 2, 9), (3, 4, 5, 12), (11, 10, 13, 14))  # bit positions of an e2m1 value, by register
    for s in range(4):
        for register in range(4):
            for odd in range(2):
                half = words[..., s] >> (16 * odd)
                code = sum((half >> place & 1) << bit for bit, place in enumerate(places[register]))
                value = decode_e2m1((code | code << 4).to(torch.uint8))[..., 0::2].double().view(code.shape)  # [..., g, t]
                bits = stored[..., s * quarters // 4, register % 2]
                if weight_format == "mxfp4":
                    scale = torch.exp2(bits.double() - 253)
                else:
                    scale = torch.exp2((bits >> 3).double() - 22) * (1 + (bits & 7).double() / 8)
                value = value * scale.unsqueeze(-1)
                for t in range(4):
                    at = 16 * s + 2 * t + 8 * (register // 2) + odd
                    result[:, :, 8 * (register % 2) : 8 * (register % 2) + 8, :, at] = value[..., t].permute(0, 2, 3, 1)
    assert prepared.weight_scale is not None
    factor = prepared.weight_scale.double() * (1.0 if weight_format == "mxfp4" else NVFP4_FACTOR)
    rows = result.reshape(panels * strips * 16, blocks * 64) * factor.unsqueeze(-1)
    assert not rows[n:].any()
    assert not rows[:, k:].any()
    return rows[:n, :k]


@FORMATS
@pytest.mark.parametrize(("k", "n"), [(64, 64), (96, 40), (224, 130)])
def test_layout(weight_format: str, k: int, n: int) -> None:
    weights = weights_of(k, n, weight_format)
    prepared = prepare_weights(weights, plan_of(k, n, weight_format))
    assert prepared.layout == f"sm90_linear_{weight_format}"
    torch.testing.assert_close(read(prepared, weight_format, n, k), values_of(weights), rtol=1e-6, atol=0)


def test_many_panels_are_arranged_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, plan = weights_of(64, 200, "nvfp4", bias=torch.randn(200).bfloat16()), plan_of(64, 200, "nvfp4", bias=True)
    whole = prepare_weights(weights, plan)
    monkeypatch.setattr("tokenspeed_kernel_nvidia.sm90.gemm.linear.layout._AT_ONCE", 3)
    parts = prepare_weights(weights, plan)
    assert torch.equal(whole.weight, parts.weight)
    assert whole.bias is not None
    assert torch.equal(whole.bias[:200], weights.bias.float())  # type: ignore[union-attr]


def test_configurations_fit() -> None:
    for config in every_config():
        assert config.shared_bytes <= SHARED_BYTES
        assert 8 <= GROUPS * config.stages <= 32  # each lane initialises the barriers of one stage
        assert GROUPS * config.stages * config.stage_bytes >= 50 * 1024  # enough bytes in flight to use the memory bandwidth
        assert 8 * 2 * GROUPS * (config.stages + 1) <= HEAD_BYTES
    assert {config_of("bfloat16", "nvfp4", tokens) for tokens in range(1, 17)} <= set(every_config())
    assert MAX_K == 28672  # the in-features of Llama 70B's down projection


def test_supported_plans() -> None:
    def chosen(**options: Any) -> str:
        facts = {"in_features": 8192, "out_features": 8192, "weight_format": "nvfp4", "max_tokens": 16, **options}
        return str(tokenspeed_kernel.linear.plan(**facts, platform=named_platform("sm_90")).kernel)

    assert chosen() == chosen(bias=True, dtype=torch.float16) == chosen(max_tokens=1) == "cutedsl_linear_nvfp4"
    assert chosen(in_features=MAX_K) == "cutedsl_linear_nvfp4"
    assert chosen(weight_format="mxfp4", in_features=2880) == "cutedsl_linear_mxfp4"
    for others in (
        {"weight_format": "dense"},
        {"weight_format": "fp8_block"},
        {"activation_dtype": "nvfp4"},
        {"max_tokens": None},
        {"max_tokens": 17},
        {"in_features": MAX_K + 16},
    ):
        assert chosen(**others) == "composed_linear"
    with pytest.raises(tokenspeed_kernel.NoKernelFoundError, match="max_tokens=None is not at most 16"):
        chosen(max_tokens=None, solution="cutedsl")


def test_naming_the_kernel_states_its_requirements() -> None:
    for k, tokens in ((64, 17), (MAX_K + 64, 1)):
        plan = plan_of(k, 8, "nvfp4", max_tokens=None, override="cutedsl_linear_nvfp4")
        weights = tokenspeed_kernel.linear.prepare(weights_of(k, 8, "nvfp4"), plan)
        with pytest.raises(ValueError, match=f"at most 16 tokens of 28672 .*, got {tokens} of {k}"):
            linear.linear(torch.randn(tokens, k).bfloat16(), weights, plan)


# -- on the emulator ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[{"seed": 0}, {"seed": 1}, {"copies": "late"}], ids=["in order", "at random", "late copies"])
def on_emulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the test on the emulator in three ways: in order, with warps and copies at random times, and with copies as late as
    possible. One cluster computes all panels."""
    monkeypatch.setattr(linear, "clusters_at_once", lambda *given: 1)
    # With fewer k blocks than CTAs, some CTAs send no partial sums. The kernel loads these unwritten partial sums, but does not use
    # them.
    with emulated(linear._launch_of, 8, uninitialised=False, **request.param):
        yield


def check(x: Tensor, weights: LinearWeights, plan: LinearPlan, out: Tensor | None = None) -> None:
    got = linear.linear(x, tokenspeed_kernel.linear.prepare(weights, plan), plan, out)
    wanted = x.double() @ values_of(weights).t()
    if weights.bias is not None:
        wanted += weights.bias.double()
    assert got.dtype == x.dtype
    torch.testing.assert_close(
        got.double(), wanted, rtol=torch.finfo(x.dtype).eps, atol=1e-5 * wanted.abs().nan_to_num().max().item()
    )


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("on_emulator")
@FORMATS
@pytest.mark.parametrize(("m", "dtype"), [(3, torch.bfloat16), (16, torch.float16), (9, torch.bfloat16)])
def test_many_panels_and_blocks(weight_format: str, m: int, dtype: torch.dtype) -> None:
    """Tests shapes in which stages and buffers are reused. CTAs have 2 or 3 k blocks, so the last stage of some CTAs has one block.
    The last panel is partly filled."""
    k, n = 19 * 64 - 32, 10 * 64 + 24
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
    weights, plan = weights_of(k, n, weight_format, bias=bias), plan_of(k, n, weight_format, bias=True, dtype=dtype)
    check(torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype), weights, plan)


@pytest.mark.usefixtures("on_emulator")
def test_rows_that_begin_anywhere() -> None:
    """Tests rows of tokens and of results that begin at unaligned addresses, with fewer k blocks than CTAs."""
    weights, plan = weights_of(64, 72, "nvfp4"), plan_of(64, 72, "nvfp4")
    out = torch.empty(11, 200, dtype=torch.bfloat16)[:, 3:75]
    check(torch.randn(11, 80).bfloat16()[:, 5:69], weights, plan, out)


@pytest.mark.usefixtures("on_emulator")
def test_as_much_k_as_there_is_room_for() -> None:
    weights, plan = weights_of(MAX_K, 24, "nvfp4"), plan_of(MAX_K, 24, "nvfp4")
    check(torch.randn(16, MAX_K).bfloat16(), weights, plan)


@pytest.mark.usefixtures("on_emulator")
def test_nonfinite_values_do_not_spread() -> None:
    """Asserts that a NaN scale makes only the outputs of its row NaN, and that a NaN in a token makes only this token's results
    NaN."""
    weights, plan = weights_of(128, 64, "nvfp4"), plan_of(128, 64, "nvfp4")
    assert weights.weight_scale is not None
    weights.weight_scale.view(torch.uint8)[7, 3] = 0x7F
    x = torch.randn(4, 128).bfloat16()
    x[2, 100] = torch.nan
    got = linear.linear(x, tokenspeed_kernel.linear.prepare(weights, plan), plan)
    wanted = torch.zeros(4, 64, dtype=torch.bool)
    wanted[:, 7] = wanted[2] = True
    assert torch.equal(got.isnan(), wanted)
