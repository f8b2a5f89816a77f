"""Tests moe_apply on rows with outliers: if planes of fp8 values lose bits of a row, every kernel computes the row exactly, in
every format."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_amd.gfx950.moe import few, grouped
from tokenspeed_kernel_amd.gfx950.moe.moe_apply import WEIGHTS
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan, traits_of
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

from .experts import RandomLayer, relative_error
from .paging import kernel_of


def moe_apply_widest(x: Tensor, weights: MoEWeights, topk_weights: Tensor, topk_ids: Tensor, plan: MoEPlan) -> Tensor:
    """Uses the tile for many tokens, whatever the number of tokens."""
    return grouped.moe_apply_many(x, weights, topk_weights, topk_ids, plan, tile=grouped.tile_for(10**6, plan))


OF_TWO = grouped.Tile(32, 4, wide=True, blocks=3, waves_per_simd=2)
LAUNCHES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "one token": (few.moe_apply_few, 1),
    "few tokens": (few.moe_apply_few, 7),
    "16 columns": (functools.partial(grouped.moe_apply_many, tile=grouped.Tile(16, 4)), 20),
    "32 columns": (functools.partial(grouped.moe_apply_many, tile=grouped.Tile(32, 4)), 40),
    "wide, 32 columns": (functools.partial(grouped.moe_apply_many, tile=OF_TWO), 40),
    "wide": (moe_apply_widest, 60),
}
QUICK = [(name, "mxfp4", torch.bfloat16) for name in ("few tokens", "16 columns", "wide, 32 columns", "wide")]
SERVED = [(name, weights, torch.bfloat16) for name in LAUNCHES for weights in ("mxfp4", "fp8_block")]
SERVED += [(name, "mxfp4", torch.float16) for name in ("few tokens", "wide")]
SERVED += [(name, "fp8_block", torch.float16) for name in ("one token", "16 columns")]
KERNELS = [
    pytest.param(*served, marks=[] if served in QUICK else [pytest.mark.slow], id=", ".join(map(str, served)))
    for served in SERVED
    if served[1] == "mxfp4" or "wide" not in served[0]
]


def ignored(layer: RandomLayer, name: str, channels: slice) -> None:
    """Sets the weights of some channels of a projection to zero. The first channel must be even, because a byte of mxfp4 has two
    channels."""
    weight = getattr(layer.given, f"{name}_weight")
    if layer.plan.weight_format == "mxfp4":
        channels = slice(channels.start // 2, channels.stop // 2)
    weight.view(torch.uint8)[..., channels] = 0
    layer.prepared = WEIGHTS[layer.plan.weight_format].prepare(layer.given, layer.plan)


def allowed(layer: RandomLayer) -> float:
    return 4e-3 if layer.plan.dtype == torch.bfloat16 else 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("launch", "weight_format", "dtype"), KERNELS)
def test_tokens_with_outliers(gfx950: torch.device, launch: str, weight_format: str, dtype: torch.dtype) -> None:
    """Results are accurate if some tokens have outliers in two channels whose weights are zero. The results of the other tokens are
    bitwise unchanged."""
    apply, tokens = LAUNCHES[launch]
    layer = RandomLayer(gfx950, 3, 2, 608, 96, weight_format, dtype=dtype)
    if dtype == torch.float16:  # if tokens are about 2^-8, an outlier of 2^15 is far enough from the other elements
        layer.given.w13_weight_scale += 8 if weight_format == "mxfp4" else 255 * layer.given.w13_weight_scale
    ignored(layer, "w13", slice(38, 40))
    x, weights, ids = layer.tokens(tokens)
    if dtype == torch.float16:
        x *= 2.0**-8
    clean = apply(x, layer.prepared, weights, ids, layer.plan)
    spoilt = x.clone()
    for token, octaves in zip(range(0, tokens, 3), (20, 16, 30, 100), strict=False):
        spoilt[token, 38] = 2.0 ** min(octaves, 15 if dtype == torch.float16 else 100)
        spoilt[token, 39] = -3
    got = apply(spoilt, layer.prepared, weights, ids, layer.plan)
    wanted = layer.wanted(spoilt, weights, ids)
    rows = (got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert rows.max() <= 1.5 * allowed(layer)
    kept = (spoilt == x).all(-1)
    assert torch.equal(got[kept], clean[kept])


@pytest.mark.parametrize(("launch", "weight_format", "dtype"), KERNELS)
def test_activations_with_outliers(gfx950: torch.device, launch: str, weight_format: str, dtype: torch.dtype) -> None:
    """Results are accurate if the bias makes two features of one expert at least 2^20 times as large as the other features."""
    apply, tokens = LAUNCHES[launch]
    layer = RandomLayer(gfx950, 3, 2, 96, 608, weight_format, dtype=dtype, bias=True)
    assert layer.given.w13_weight_bias is not None
    layer.given.w13_weight_bias[1, 608 + 70 : 608 + 72] = torch.tensor([2.0**30, -(2.0**24)])
    ignored(layer, "w2", slice(70, 72))
    x, weights, ids = layer.tokens(tokens)
    ids[0, 0] = 1
    got = apply(x, layer.prepared, weights, ids, layer.plan)
    wanted = layer.wanted(x, weights, ids)
    rows = (got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert rows.max() <= 2 * allowed(layer)


@pytest.mark.parametrize(
    ("launch", "weight_format"),
    [
        ("one token", "mxfp4"),
        ("one token", "fp8_block"),
        ("16 columns", "mxfp4"),
        pytest.param("16 columns", "fp8_block", marks=pytest.mark.slow),
    ],
)
def test_one_outlier_and_equal_numbers(gfx950: torch.device, launch: str, weight_format: str) -> None:
    """Results are accurate if x is [2^20, 1.25, 1.25, ...] and the weights of the first two channels are 0."""
    apply, tokens = LAUNCHES[launch]
    layer = RandomLayer(gfx950, 2, min(tokens, 2), 64, 64, weight_format, bias=True)
    ignored(layer, "w13", slice(0, 2))
    x, weights, ids = layer.tokens(tokens)
    x[:], x[:, 0] = 1.25, 2.0**20
    got = apply(x, layer.prepared, weights, ids, layer.plan)
    assert relative_error(got, layer.wanted(x, weights, ids)) <= allowed(layer)


@pytest.mark.parametrize("launch", ["one token", "16 columns"])
def test_numbers_of_all_magnitudes(gfx950: torch.device, launch: str) -> None:
    """Results are accurate if each block has values from 2^-60 to 2^60. Only the weights of the smallest values are not zero."""
    apply, tokens = LAUNCHES[launch]
    layer = RandomLayer(gfx950, 2, min(tokens, 2), 96, 64, bias=True)
    for block in range(3):
        ignored(layer, "w13", slice(32 * block + 8, 32 * block + 32))
    x, weights, ids = layer.tokens(tokens)
    x *= 2.0 ** (torch.arange(96) % 32 // 8 * 40.0 - 60)
    layer.given.w13_weight_scale += 60
    layer.prepared = WEIGHTS["mxfp4"].prepare(layer.given, layer.plan)
    got = apply(x, layer.prepared, weights, ids, layer.plan)
    assert relative_error(got, layer.wanted(x, weights, ids)) <= allowed(layer)


@pytest.mark.parametrize("launch", ["few tokens", "16 columns"])
def test_exact_plans_lose_no_number(gfx950: torch.device, launch: str) -> None:
    """With ``exact_activations``, results are accurate even if only two small values of each row, beside large ones, have nonzero
    weights."""
    apply, tokens = LAUNCHES[launch]
    arguments: dict[str, Any] = {"exact_activations": True}
    layer = RandomLayer(gfx950, 6, 2, 64, 96, **arguments)  # the sizes of the operator's case of exact activations
    ignored(layer, "w13", slice(0, 40))
    ignored(layer, "w13", slice(42, 64))
    x, weights, ids = layer.tokens(tokens)
    x[:, 40:42] = x[:, 40:42] * 2.0**-20
    layer.given.w13_weight_scale += 20
    layer.prepared = WEIGHTS["mxfp4"].prepare(layer.given, layer.plan)
    got = apply(x, layer.prepared, weights, ids, layer.plan)
    assert relative_error(got, layer.wanted(x, weights, ids)) <= allowed(layer)


def test_the_bound_is_explained() -> None:
    plan = RandomLayer(torch.device("cpu"), 2, 1, 32, 32, exact_activations=True).plan
    spec = kernel_of("moe_apply_mxfp4")
    assert spec.trait_gaps({**traits_of(plan), "weight_layout": "gfx950_mxfp4", "processed_weights": True}) == []
    assert "2^-22" in spec.accuracy
    assert not grouped.tile_for(10**6, plan).wide
