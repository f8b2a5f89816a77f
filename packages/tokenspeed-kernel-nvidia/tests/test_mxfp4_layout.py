"""Tests the layout of mxfp4 expert weights for Hopper against the canonical layout, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.ops.quantization.encodings import decode_mxfp4
from tokenspeed_kernel_base.platform import cpu_platform
from tokenspeed_kernel_nvidia.cutedsl.mxfp4 import layout as layout

SIGN_OF = {0: 7, 1: 0, 2: 15, 3: 8}
MAGNITUDE_OF = {0: 1, 1: 4, 2: 9, 3: 12}
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def read_back(arranged: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Reads arranged weights element by element, as the layout's docstring defines. Returns weights ``[experts, rows of strips,
    k]`` and biases."""
    experts, panels, _ = arranged.shape
    strips = 4 * panels
    head = arranged[:, :, :512].contiguous().view(torch.float32).view(experts, strips, 2, 16)
    blocks = arranged[:, :, 512:].reshape(experts, panels, -1, 4, 544).transpose(2, 3).reshape(experts, strips, -1, 544)
    words = blocks[..., :512].contiguous().view(torch.int32).view(experts, strips, -1, 32, 4).long()
    scales = blocks[..., 512:].reshape(experts, strips, -1, 8, 2, 2)
    weight = torch.empty(experts, strips, 16, blocks.shape[2] * 64, dtype=torch.float64)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for s in range(4):
            for register in range(4):
                row, offset = g + 8 * (register % 2), 16 * s + 8 * (register // 2) + 2 * t
                for half in range(2):
                    bits = words[..., lane, s] >> (16 * half)
                    sign = 1 - 2 * ((bits >> SIGN_OF[register]) & 1)
                    value = sign * MAGNITUDES[(bits >> MAGNITUDE_OF[register]) & 7].double()
                    field = scales[..., g, s // 2, register % 2].double()
                    weight[:, :, row, offset + half :: 64] = torch.where(field > 0, value * torch.exp2(field - 253), 0.0)
    weight *= head[:, :, 0].double().unsqueeze(-1)
    return weight.flatten(1, 2)[..., :k], head[:, :, 1].flatten(1)


def plan_of(hidden: int, intermediate: int, interleaved: bool, bias: bool) -> MoEPlan:
    plan: MoEPlan = moe_apply.plan(
        3,
        2,
        hidden,
        intermediate,
        weight_format="mxfp4",
        w13_interleaved=interleaved,
        bias=bias,
        platform=cpu_platform(),
        override="reference_moe_apply",
    )
    return plan


def draw(plan: MoEPlan) -> MoEWeights:
    random = torch.Generator().manual_seed(7)
    hidden, intermediate = plan.hidden_size, plan.intermediate_size

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.uint8)

    def projection(rows: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, scale = integers(0, 256, 3, rows, k // 2), integers(100, 140, 3, rows, k // 32)
        return codes, scale, torch.randn(3, rows, generator=random) if plan.bias else None

    return MoEWeights(*projection(2 * intermediate, hidden), *projection(hidden, intermediate))


@pytest.mark.parametrize(
    ("hidden", "intermediate", "interleaved", "bias"), [(96, 64, True, True), (64, 160, False, False), (2880, 32, True, False)]
)
def test_every_element_is_where_the_layout_says(hidden: int, intermediate: int, interleaved: bool, bias: bool) -> None:
    plan = plan_of(hidden, intermediate, interleaved, bias)
    weights = draw(plan)
    arranged = layout.prepare_weights(weights, plan)
    assert arranged.layout == layout.LAYOUT
    assert arranged.w13_weight.shape == (3, -(-intermediate // 32), layout.panel_bytes(hidden))
    assert arranged.w2_weight.shape == (3, -(-hidden // 64), layout.panel_bytes(intermediate))

    w13, b13 = read_back(arranged.w13_weight, hidden)
    feature, ups = torch.arange(intermediate), torch.arange(intermediate * 2)
    at = feature // 8 * 16 + feature % 8  # the row of each feature's gate; its up is eight rows below
    gates = ups[::2] if interleaved else ups[:intermediate]
    others = ups[1::2] if interleaved else ups[intermediate:]
    assert weights.w13_weight_scale is not None
    assert weights.w2_weight_scale is not None
    canonical = decode_mxfp4(weights.w13_weight, weights.w13_weight_scale, torch.float64)
    torch.testing.assert_close(w13[:, at], canonical[:, gates], rtol=0, atol=0)
    torch.testing.assert_close(w13[:, at + 8], canonical[:, others], rtol=0, atol=0)
    w2, b2 = read_back(arranged.w2_weight, intermediate)
    torch.testing.assert_close(
        w2[:, :hidden], decode_mxfp4(weights.w2_weight, weights.w2_weight_scale, torch.float64), rtol=0, atol=0
    )
    if bias:
        assert weights.w13_weight_bias is not None
        assert weights.w2_weight_bias is not None
        torch.testing.assert_close(b13[:, at], weights.w13_weight_bias[:, gates], rtol=0, atol=0)
        torch.testing.assert_close(b2[:, :hidden], weights.w2_weight_bias, rtol=0, atol=0)
    else:
        assert not b13.any()
        assert not b2.any()


def test_weights_that_are_given_stay_as_they_are() -> None:
    plan = plan_of(64, 64, True, True)
    weights = draw(plan)
    before = weights.w13_weight.clone()
    layout.prepare_weights(weights, plan)
    assert torch.equal(weights.w13_weight, before)


def test_a_scale_that_is_nan_makes_its_row_nan_alone() -> None:
    plan = plan_of(64, 64, False, False)
    weights = draw(plan)
    assert weights.w2_weight_scale is not None
    weights.w2_weight_scale[1, 5, 0] = 255
    w2, _ = read_back(layout.prepare_weights(weights, plan).w2_weight, 64)
    assert w2[1, 5].isnan().all()
    assert not torch.cat((w2[1, :5], w2[1, 6:])).isnan().any()


def most_allocated(function: Callable[[], Any]) -> tuple[int, Any]:
    """Calls a function. Returns the largest number of bytes that CPU tensors had at one time, and the function's result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    return max(allocated), result


def test_memory_beside_what_is_kept() -> None:
    """Asserts that the temporary memory of a preparation is small beside the result. A layer is prepared a few experts at a
    time."""
    experts, size = 64, 192

    def projection(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((experts, rows, size // 2), (experts, rows, size // 32))
        codes, scale = (torch.full(shape, 120, dtype=torch.uint8) for shape in shapes)
        return codes, scale, torch.zeros(experts, rows)

    weights = MoEWeights(*projection(2 * size), *projection(size))
    facts: dict[str, Any] = {"weight_format": "mxfp4", "bias": True, "device": "cpu"}
    plan = moe_apply.plan(experts, 4, size, size, override="reference_moe_apply", **facts)
    most, prepared = most_allocated(lambda: layout.prepare_weights(weights, plan))
    kept = prepared.w13_weight.nbytes + prepared.w2_weight.nbytes
    given = sum(part.nbytes for part in vars(weights).values() if isinstance(part, Tensor))
    assert kept <= 1.1 * given  # in this small layer, the panels' heads are a larger part of the weights than in a model
    assert most - kept <= 0.35 * kept
