"""Tests the adapter to AITER's MoE kernels with mxfp4 weights. The adapter has not been run on hardware; ``test_aiter`` explains
the stand-in.

The stand-in rounds as AITER does, but does not reproduce AITER's weight layout. The stand-in shuffles weights in another reversible
way, which depends on whether gate and up are interleaved.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import tokenspeed_kernel
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_apply import _GPT_OSS, _inputs, moe_apply
from tokenspeed_kernel_base.ops.quantization.encodings import (
    decode_e2m1,
    decode_mxfp4,
    decode_mxfp8,
    e8m0_to_float,
    encode_e2m1,
    encode_mxfp8,
)
from tokenspeed_kernel_base.spec import KernelSpec

from . import aiter_signatures, test_aiter
from .experts import relative_error

aiter, specs = test_aiter.aiter, test_aiter.specs  # fixtures

NAMES = ("aiter_moe_apply_mxfp4_gpt_oss", "aiter_moe_apply_mxfp4_silu")
ACTIVATION, QUANT = SimpleNamespace(Silu=object(), Swiglu=object()), SimpleNamespace(No=object(), per_1x32=object())
CODES = torch.float4_e2m1fn_x2
BOUND = 256  # from this many tokens on, GPT-OSS's activations are quantised


def turned(tensor: Tensor, by: int) -> Tensor:
    return tensor.flip(-1).roll(by, -2)


def unturned(tensor: Tensor, by: int) -> Tensor:
    return tensor.roll(-by, -2).flip(-1)


def shuffle_weight(given: dict[str, Any]) -> Tensor:
    assert given["layout"] == (16, 16)
    assert given["x"].shape[-1] % 32 == 0 == given["x"].shape[-2] % 16
    return turned(given["x"], 3)


def shuffle_scale(given: dict[str, Any]) -> Tensor:
    assert given["src"].dim() == 2
    assert given["src"].shape[0] % 256 == 0 == given["src"].shape[1] % 8  # AITER pads other sizes
    return turned(given["src"], 3)


def shuffle_weight_a16w4(given: dict[str, Any]) -> Tensor:
    assert given["NLane"] == 16
    assert given["src"].is_contiguous()
    return turned(given["src"], 1 + given["gate_up"])


def shuffle_scale_a16w4(given: dict[str, Any]) -> Tensor:
    assert given["src"].dim() == 2
    assert given["src"].shape[0] % given["experts_cnt"] == 0
    return turned(given["src"].unflatten(0, (given["experts_cnt"], -1)), 1 + given["gate_up"]).flatten(0, 1)


def rounded_to_mxfp4(x: Tensor) -> Tensor:
    """Rounds to mxfp4 values, returned as floats. The scale is computed from the block's amax, rounded to a power of two: up if the
    amax is at least 1.75 times a power of two, otherwise down."""
    blocks = x.float().unflatten(-1, (-1, 32))
    bits = (blocks.abs().amax(-1).view(torch.int32) + 0x200000) & 0x7F800000
    scale = e8m0_to_float(((bits >> 23) - 2).clamp(min=0).to(torch.uint8))[..., None]
    return (decode_e2m1(encode_e2m1((blocks / scale).flatten(-2))).unflatten(-1, (-1, 32)) * scale).flatten(-2)


def fused_moe(given: dict[str, Any]) -> Tensor:
    """Computes AITER's result for bf16 tokens and mxfp4 weights, according to AITER's source."""
    x, ids, mask = given["hidden_states"], given["topk_ids"], given["expert_mask"]
    assert given["quant_type"] is QUANT.per_1x32
    assert x.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert given["w1"].dtype == given["w2"].dtype == CODES
    assert given["w1"].is_shuffled
    assert given["w2"].is_shuffled
    assert ids.dtype == torch.int32
    assert given["topk_weight"].dtype == torch.float32
    experts = len(given["w1"])
    gpt_oss = given["activation"] is ACTIVATION.Swiglu
    if gpt_oss:
        assert given["gate_mode"] == "interleave"
        assert mask.tolist() == [1] * experts + [0]
        assert (ids[:, -1] == experts).all(), "AITER takes the last top-k slot for one without an expert"
        unrounded = len(x) < BOUND
    else:
        assert given["activation"] is ACTIVATION.Silu
        assert given["gate_mode"] == "separated"
        assert mask is None  # with a mask, AITER raises for some shapes
        assert given["bias1"] is None
        assert given["bias2"] is None
        unrounded = len(x) == 1  # as AITER does with split-K
    assert int(ids.min()) >= 0
    assert int(ids.max()) < experts + gpt_oss

    def weight(name: str, turns: int) -> Tensor:
        codes = unturned(given[name].view(torch.uint8), turns)
        scale, shape = given[f"{name}_scale"], (experts, -1)
        scale = unturned(scale.unflatten(0, shape), turns) if gpt_oss else unturned(scale, turns).unflatten(0, shape)
        return decode_mxfp4(codes, scale)

    def rounded(values: Tensor) -> Tensor:
        if unrounded:
            return values.bfloat16().float()
        return decode_mxfp8(*encode_mxfp8(values.bfloat16())) if gpt_oss else rounded_to_mxfp4(values.bfloat16())

    w1, w2 = (weight(name, turns if gpt_oss else 3) for name, turns in (("w1", 2), ("w2", 1)))
    assert w1.shape[-1] % 256 == 0 == w2.shape[-1] % 256
    result = torch.zeros(x.shape)
    for token, slot in (ids < experts).nonzero().tolist():
        expert = int(ids[token, slot])
        both = w1[expert] @ rounded(x[token])
        if given["bias1"] is not None:
            assert given["bias1"].dtype == given["bias2"].dtype == torch.float32
            both = both + given["bias1"][expert]
        gate, up = both.chunk(2)
        if gpt_oss:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            between = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            between = torch.nn.functional.silu(gate) * up
        values = w2[expert] @ rounded(between)
        if given["bias2"] is not None:
            values = values + given["bias2"][expert]
        result[token] += given["topk_weight"][token, slot] * values
    return result.to(x.dtype)


@pytest.fixture
def experts(aiter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the stand-in with MoE functions."""
    package = sys.modules["aiter"]
    monkeypatch.setattr(package, "ActivationType", ACTIVATION, raising=False)
    monkeypatch.setattr(package, "QuantType", QUANT, raising=False)
    monkeypatch.setattr(package, "dtypes", SimpleNamespace(fp4x2=CODES), raising=False)
    modules = {"aiter.fused_moe": ModuleType("aiter.fused_moe"), "aiter.ops.shuffle": ModuleType("aiter.ops.shuffle")}
    for body in (fused_moe, shuffle_weight, shuffle_scale, shuffle_weight_a16w4, shuffle_scale_a16w4):
        home = "aiter.fused_moe" if body is fused_moe else "aiter.ops.shuffle"

        def call(*args: Any, _body: Any = body, _name: str = f"{home}.{body.__name__}", **kwargs: Any) -> Any:
            bound = aiter_signatures.bind(_name, *args, **kwargs)
            bound.apply_defaults()
            return _body(bound.arguments)

        setattr(modules[home], body.__name__, call)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


GATED = {**_GPT_OSS, "weight_format": "mxfp4"}
ROUNDED: dict[str, Any] = {"weight_format": "mxfp4", "activation_dtype": "mxfp4"}


FEW = [
    Case("sizes between tiles", _inputs(7, 8, 4, 96, 64, **GATED)),
    Case("concatenated, no bias", _inputs(5, 4, 2, 320, 256, **{**GATED, "w13_interleaved": False, "bias": False})),
    Case("experts of other ranks", _inputs(12, 3, 2, 128, 96, of=9, **GATED)),
    Case("no tokens", _inputs(0, 4, 2, 128, 128, **GATED)),
]


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_few_tokens_of_gpt_oss(specs: dict[str, KernelSpec], case: Case) -> None:
    """For few tokens, AITER does not quantise activations, so results are those of a plan without quantisation."""
    verification = verify_case(replace(specs[NAMES[0]], only_by_name=""), case, "cpu")
    assert verification.status is Status.PASSED, verification


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(
    ("name", "inputs", "error"),
    [
        (NAMES[0], _inputs(BOUND, 2, 1, 64, 96, activation_dtype="fp8", **GATED), 0.1),
        (NAMES[1], _inputs(9, 6, 3, 96, 64, **ROUNDED), 0.2),
        (NAMES[1], _inputs(9, 2, 3, 96, 64, of=6, w13_interleaved=True, **ROUNDED), 0.2),
        (NAMES[1], _inputs(1, 6, 3, 96, 64, **ROUNDED), 0.3),
    ],
)
def test_rounding_is_its_own(specs: dict[str, KernelSpec], name: str, inputs: Any, error: float) -> None:
    """The result is near the result that the plan defines, but not equal, because AITER quantises differently."""
    operator = get_operator("moe.moe_apply")
    arguments = operator.complete(inputs(Draw(torch.device("cpu"), 0)))
    wanted = moe_apply.operator.body(**{**arguments, "x": arguments["x"].float()})
    prepared = operator.prepared(arguments, specs[name])
    found = tokenspeed_kernel.moe_apply(**prepared, override=name)
    assert 1e-3 < relative_error(found, wanted) < error
    out = torch.full_like(found, torch.nan)
    assert tokenspeed_kernel.moe_apply(**{**prepared, "out": out}, override=name) is out
    assert torch.equal(out, found)


@pytest.mark.usefixtures("experts")
def test_weights_are_whole_tiles() -> None:
    """Gate rows come before up rows; weights and biases are padded with zeros, scales with ones."""
    from tokenspeed_kernel_amd.aiter.moe_mxfp4_device import prepare_gpt_oss

    arguments = _inputs(1, 2, 1, 96, 64, **GATED)(Draw(torch.device("cpu"), 0))
    given, made = arguments["weights"], prepare_gpt_oss(arguments["weights"], arguments["plan"])
    codes, bias = unturned(made.w13_weight, 2), made.w13_weight_bias
    assert codes.shape == (2, 512, 128)
    assert torch.equal(codes[:, :64, :48], given.w13_weight[:, 0::2])
    assert torch.equal(codes[:, 256:320, :48], given.w13_weight[:, 1::2])
    assert codes[:, 64:256].count_nonzero() == codes[..., 48:].count_nonzero() == 0
    assert bias is not None
    assert torch.equal(bias[:, :64], given.w13_weight_bias[:, 0::2].float())
    assert bias[:, 64:256].count_nonzero() == 0
    assert made.w2_weight_scale is not None
    scale = unturned(made.w2_weight_scale.unflatten(0, (2, -1)), 1)
    assert torch.equal(scale, pad(given.w2_weight_scale, (0, 6, 0, 160), value=127))


@pytest.mark.usefixtures("experts")
def test_who_gets_it(specs: dict[str, KernelSpec]) -> None:
    """Only a plan that names the kernel selects the kernel. `prepare` rejects a plan whose limit or bias the kernel does not
    support."""
    plan_of: dict[str, Any] = {
        "num_experts": 4,
        "top_k": 2,
        "hidden_size": 96,
        "intermediate_size": 64,
        "device": "cpu",
        "weight_format": "mxfp4",
    }
    gpt_oss = {"alpha": 1.702, "limit": 7.0, "beta": 1.0, "bias": True}
    with pytest.raises(tokenspeed_kernel.NoKernelFoundError, match=r"only for calls that name it: .* fewer than 256"):
        tokenspeed_kernel.moe_apply.plan(**plan_of, **gpt_oss, solution="aiter")
    plan = tokenspeed_kernel.moe_apply.plan(**plan_of, **gpt_oss, override=NAMES[0])
    assert plan.weight_layout == "aiter_mxfp4_gpt_oss"
    silu = tokenspeed_kernel.moe_apply.plan(**plan_of, activation_dtype="mxfp4", override=NAMES[1])
    assert silu.weight_layout == "aiter_mxfp4_silu"
    weights = _inputs(1, 4, 2, 96, 64, **{**GATED, "w13_interleaved": False})(Draw(torch.device("cpu"), 0))["weights"]
    with pytest.raises(ValueError, match=r"plan.limit must be 7.0 .*, got 6.0"):
        tokenspeed_kernel.moe_apply.prepare(weights, replace(plan, limit=6.0))
    silu = tokenspeed_kernel.moe_apply.plan(**plan_of, activation_dtype="mxfp4", bias=True, override=NAMES[1])
    with pytest.raises(ValueError, match=r"plan.bias must be False .*, got True"):
        tokenspeed_kernel.moe_apply.prepare(weights, silu)


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_on_the_device(gfx950: torch.device, specs: dict[str, KernelSpec], case: Case) -> None:
    """Runs the cases with AITER itself on a gfx950. This test has not been run yet."""
    test_aiter.need_the_real_one(gfx950)
    assert verify_case(replace(specs[NAMES[0]], only_by_name=""), case, gfx950).status is Status.PASSED
