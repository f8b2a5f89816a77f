"""Tests which format each expert gets when mxfp4 weights are prepared for fp8 activations."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import NoKernelFoundError
from tokenspeed_kernel_nvidia.cutedsl.mxfp4 import layout as mxfp4_layout
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.weights import OCTAVES, RoundedWeights, exact_experts
from tokenspeed_kernel_nvidia.sm90.moe.grouped import launch as grouped

from .experts import GPT_OSS, RandomLayer

CPU = torch.device("cpu")


def test_experts_with_scales_far_apart() -> None:
    w13 = torch.full((4, 6, 3), 120, dtype=torch.uint8)
    w2 = torch.full((4, 5, 2), 100, dtype=torch.uint8)
    w13[0, 2, 1] += OCTAVES  # the largest distance between a row's scales that float8_e5m2 can represent
    w13[1, 5, 0] -= OCTAVES + 1
    w2[3, 4, 1] += OCTAVES + 1
    assert exact_experts(w13, w2).tolist() == [1, 0, 1, 0]


def test_rounded_weights() -> None:
    layer = RandomLayer(CPU, 5, 2, 96, 64, activation_dtype="fp8")
    assert isinstance(layer.prepared, RoundedWeights)
    assert layer.prepared.inexact == 0
    assert "all weights exactly" in str(layer.prepared)
    layer.spread_scales([0, 3])
    assert isinstance(layer.prepared, RoundedWeights)
    assert layer.prepared.exact is not None
    assert layer.prepared.exact.tolist() == [0, 1, 1, 0, 1]
    assert layer.prepared.card == (
        "5 experts: float8 MMAs use the weights of 3 exactly; 2 with scales more than 15 octaves apart in a row have "
        "16-bit MMAs: 0, 3"
    )
    assert layer.prepared.layout == mxfp4_layout.LAYOUT
    plain = mxfp4_layout.prepare_weights(layer.given, layer.plan)
    assert torch.equal(layer.prepared.w13_weight, plain.w13_weight)
    assert torch.equal(layer.prepared.w2_weight, plain.w2_weight)


def test_scales_of_zeros_make_no_expert_inexact() -> None:
    layer = RandomLayer(CPU, 10, 2, 96, 64, activation_dtype="fp8", **GPT_OSS)
    layer.pad_rows([0, 2, 9])
    assert isinstance(layer.prepared, RoundedWeights)
    assert layer.prepared.inexact == 0
    layer.spread_scales([2])
    assert layer.prepared.inexact_ids == (2,)


def test_scales_beside_zeros() -> None:
    codes = torch.full((1, 4, 48), 0x21, dtype=torch.uint8)
    codes[0, 0, :16], codes[0, 1, 16:32], codes[0, 2], codes[0, 3, 32:] = 0, 0x88, 0x08, 0
    scale = torch.tensor([[[0, 120, 119], [7, 250, 9], [3, 0, 200], [5, 6, 255]]], dtype=torch.uint8)
    wanted = [[120, 120, 119], [7, 9, 9], [0, 0, 0], [5, 6, 255]]
    assert mxfp4_layout.scales_beside_zeros(codes, scale).tolist() == [wanted]


def test_a_card_of_many_names_some() -> None:
    layer = RandomLayer(CPU, 40, 2, 64, 32, activation_dtype="fp8")
    layer.spread_scales(range(1, 40, 2))
    assert isinstance(layer.prepared, RoundedWeights)
    assert layer.prepared.card.endswith("16-bit MMAs: 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 and 4 more")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("inexact", [[], [2]], ids=["all exact", "some not"])
def test_calls_say_whether_experts_are_exact(inexact: list[int]) -> None:
    """Asserts that the explanation shows the card of the weights, and that the request has the trait ``inexact_experts``. So a
    kernel with fp8 MMAs only is rejected."""
    folding = "folding_moe_apply"
    layer = RandomLayer(CPU, 5, 2, 96, 64, activation_dtype="fp8", **GPT_OSS)
    layer.spread_scales(inexact)
    ours = KernelRegistry.get().get_by_name("cutedsl_moe_apply_mxfp4_fp8")
    traits = {name: constraint for name, constraint in ours.traits.items() if name != "inexact_experts"}
    options: dict[str, Any] = {
        "capability": ours.capability,
        "signatures": ours.format_signatures,
        "priority": ours.priority + 1,
    }
    register_kernel(ours.family, ours.mode, name=folding, solution="test", traits=traits, **options)(lambda *_: None)
    try:
        with use_platform(named_platform("sm_90")):
            x, topk_weights, topk_ids = layer.tokens(3)
            plan = dataclasses.replace(layer.plan, kernel=ours.name, weight_layout=mxfp4_layout.LAYOUT)
            weights = moe_apply.prepare(layer.given, plan)
            assert isinstance(weights, RoundedWeights)
            assert weights.inexact_ids == tuple(inexact)
            explained = moe_apply.explain(x, weights, topk_weights, topk_ids, plan)
            with pytest.raises(NoKernelFoundError) if inexact else contextlib.nullcontext():
                moe_apply.bind(x, weights, topk_weights, topk_ids, plan, override=folding)
    finally:
        KernelRegistry.get().unregister(folding)
    assert explained.chosen is not None
    assert explained.chosen.name == (ours.name if inexact else folding)
    assert explained.request.traits["inexact_experts"] is bool(inexact)
    assert f"  weights  {weights.card}\n" in str(explained)
    assert ("does not declare the flag inexact_experts, which the request sets" in str(explained)) == bool(inexact)


def test_other_activations_have_plain_weights() -> None:
    assert type(RandomLayer(CPU, 5, 2, 96, 64).prepared) is MoEWeights


def test_plain_weights_are_refused() -> None:
    layer = RandomLayer(CPU, 5, 2, 96, 64, activation_dtype="fp8")
    plain = mxfp4_layout.prepare_weights(layer.given, layer.plan)
    with pytest.raises(TypeError, match=r"moe_apply.prepare .* fp8 .*, got MoEWeights"):
        grouped.moe_apply_rounded(*layer.tokens(2)[:1], plain, *layer.tokens(2)[1:], layer.plan)
