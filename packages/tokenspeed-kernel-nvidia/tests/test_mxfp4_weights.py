"""What is decided about mxfp4 weights when they are loaded for fp8 activations."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_nvidia.sm90.moe import grouped, mxfp4_layout
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_weights import OCTAVES, RoundedWeights, exact_experts

from .experts import RandomLayer

CPU = torch.device("cpu")


def test_experts_with_scales_far_apart() -> None:
    w13 = torch.full((4, 6, 3), 120, dtype=torch.uint8)
    w2 = torch.full((4, 5, 2), 100, dtype=torch.uint8)
    w13[0, 2, 1] += OCTAVES  # as far as may be
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
    assert "of 3 exactly; 2 with scales" in layer.prepared.card
    assert layer.prepared.layout == mxfp4_layout.LAYOUT
    plain = mxfp4_layout.prepare_weights(layer.given, layer.plan)
    assert torch.equal(layer.prepared.w13_weight, plain.w13_weight)
    assert torch.equal(layer.prepared.w2_weight, plain.w2_weight)


def test_other_activations_have_plain_weights() -> None:
    assert type(RandomLayer(CPU, 5, 2, 96, 64).prepared) is MoEWeights


def test_plain_weights_are_refused() -> None:
    layer = RandomLayer(CPU, 5, 2, 96, 64, activation_dtype="fp8")
    plain = mxfp4_layout.prepare_weights(layer.given, layer.plan)
    with pytest.raises(TypeError, match="what moe_process_weights makes for fp8 activations, got MoEWeights"):
        grouped.moe_apply_rounded(*layer.tokens(2)[:1], plain, *layer.tokens(2)[1:], layer.plan)
