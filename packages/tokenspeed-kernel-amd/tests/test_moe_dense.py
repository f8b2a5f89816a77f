"""Tests moe_apply with bf16 weights: cases, tiles, compiled code, and errors compared with the portable kernel's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel_amd.gfx950.moe import dense
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator

from .experts import GPT_OSS, RandomLayer, relative_error
from .paging import check_case, spills

TILES = [*(tile for _, tile in dense._TILES), dense._WIDE]


def layer_of(device: torch.device, *sizes: int, **options: Any) -> RandomLayer:
    return RandomLayer(device, *sizes, weight_format="dense", dtype=torch.bfloat16, **options)


def cases() -> list[Case]:
    """Returns the operator's cases with bf16 weights that the kernel declares."""
    small = [case for case in get_operator("moe.moe_apply").all_cases() if not case.large and case.name.startswith("dense")]
    return [case for case in small if "float" not in case.name or "bfloat16" in case.name]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, "moe_apply_dense", case)


def check(layer: RandomLayer, got: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> None:
    """Asserts that the error is at most 1.05 times the portable kernel's."""
    wanted = layer.wanted(x, weights, ids)
    plan = dataclasses.replace(layer.plan, kernel="triton_moe_apply", weight_layout="canonical")
    other = tokenspeed_kernel.moe_apply(x, layer.given, weights, ids, plan, override=plan.kernel)
    assert relative_error(got, wanted) <= 1.05 * relative_error(other, wanted)


@pytest.mark.parametrize(
    ("tokens", "top_k", "sizes", "options"),
    [
        (1, 8, (320, 192), {}),
        (8, 8, (128, 64), GPT_OSS),
        (5, 1, (1088, 1024), {"bias": True}),
        (3, 3, (256, 832), {"w13_interleaved": True, "limit": 2.0}),
    ],
)
def test_few_tokens_are_as_exact_as_the_portable_kernel(
    gfx950: torch.device, tokens: int, top_k: int, sizes: tuple[int, int], options: dict[str, Any]
) -> None:
    """A top-k slot has no expert, a token has the same expert in two slots, and an expert has more pairs than one workgroup
    computes. The sizes are multiples of the steps of k, and are not."""
    layer = layer_of(gfx950, 9, top_k, *sizes, **options)
    x, weights, ids = layer.tokens(tokens)
    ids[:5, 0] = 5
    ids[-1, 0] = ids[0, -1]
    if top_k > 2:
        ids[0, 1] = -1
        ids[-1, 2] = ids[-1, 0]
        weights[0, 1] = float("nan")
    got = dense.moe_apply_dense(x, layer.given, weights, ids, layer.plan)
    check(layer, got, x, weights, ids)


@pytest.mark.parametrize("options", [{}, GPT_OSS], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_are_as_exact_as_the_portable_kernel(gfx950: torch.device, tile: dense.Tile, options: dict[str, Any]) -> None:
    """The number of features is no multiple of a tile. One expert has most tokens, and another expert has none."""
    layer = layer_of(gfx950, 6, 2, 320, 192, **options)
    x, weights, ids = layer.tokens(60)
    ids[:49, 0] = 4
    ids[:30, 1] = 1
    ids[5] = -1
    ids = ids.where(ids != 2, 3)
    got = torch.full_like(x, 7.0)
    dense._many(x, layer.given, weights, ids, layer.plan, got, tile)
    assert not got[5].any()
    check(layer, got, x, weights, ids)


@pytest.mark.parametrize("tokens", [5, 70])
def test_a_number_that_is_not_finite_stays_in_its_token(gfx950: torch.device, tokens: int) -> None:
    layer = layer_of(gfx950, 4, 2, 128, 64)
    x, weights, ids = layer.tokens(tokens)
    clean = dense.moe_apply_dense(x, layer.given, weights, ids, layer.plan)
    x[2, 100] = float("nan")
    got = dense.moe_apply_dense(x, layer.given, weights, ids, layer.plan)
    assert not got[2].isfinite().any()
    others = torch.arange(tokens, device=gfx950) != 2
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("tokens", [3, 40])
def test_tensors_that_are_not_contiguous(gfx950: torch.device, tokens: int) -> None:
    """x, weights, ids and out may be slices. Only the slice of out is written."""
    layer = layer_of(gfx950, 4, 2, 128, 64)
    x, weights, ids = layer.tokens(tokens)
    wanted = dense.moe_apply_dense(x, layer.given, weights, ids, layer.plan)
    wide_x = torch.zeros(tokens, 136, dtype=torch.bfloat16, device=gfx950)
    wide_x[:, 3:131] = x
    wide_out = torch.full((tokens, 200), 7.0, dtype=torch.bfloat16, device=gfx950)
    out = wide_out[:, 1:129]
    got = dense.moe_apply_dense(wide_x[:, 3:131], layer.given, weights.mT.contiguous().mT, ids.repeat(1, 2)[:, :2], layer.plan, out)
    assert got is out
    assert torch.equal(out, wanted)
    assert bool((wide_out[:, 129:] == 7).all())


def test_nothing_to_do(gfx950: torch.device) -> None:
    layer = layer_of(gfx950, 4, 2, 128, 64)
    assert dense.moe_apply_dense(*layer.tokens(0)[:1], layer.given, *layer.tokens(0)[1:], layer.plan).shape == (0, 128)


def test_tokens_of_several_launches(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose tensors would exceed 32-bit offsets are divided."""
    layer = layer_of(gfx950, 4, 2, 128, 64)
    x, weights, ids = layer.tokens(40)
    wanted = dense.moe_apply_dense(x, layer.given, weights, ids, layer.plan)
    monkeypatch.setattr(dense, "_LARGEST", 512 * 15)
    assert torch.equal(dense.moe_apply_dense(x, layer.given, weights, ids, layer.plan), wanted)


def test_compiled_code(emulator: Any) -> None:
    """At the sizes of Qwen3-30B-A3B there are no spills, no loops around buffer instructions, and no bank conflicts."""
    layer = layer_of(torch.device("cpu"), 8, 8, 2048, 768)
    x, weights, ids = layer.tokens(2)
    dense.moe_apply_dense(x, layer.given, weights, ids, layer.plan)
    small = layer_of(torch.device("cpu"), 2, 2, 512, 64)
    x, weights, ids = small.tokens(3)
    for tile in TILES:
        dense._many(x, small.given, weights, ids, small.plan, torch.empty_like(x), tile)
    names = ("first_kernel", "second_kernel", "grouped_kernel")
    launches = [launch for launch in emulator.launches if launch.kernel in names]
    assert len(launches) == 2 + 2 * len(TILES)
    for launch in launches:
        text = launch.program.assembly.text
        assert not any(spills(text).values())
        assert "s_cbranch_execnz" not in text
        if launch.kernel == "grouped_kernel":
            assert launch.counters.total("lds_conflicts") == 0


def test_launches(emulator: Any) -> None:
    layer = layer_of(torch.device("cpu"), 4, 2, 128, 64)
    for tokens in (5, 40):
        x, weights, ids = layer.tokens(tokens)
        dense.moe_apply_dense(x, layer.given, weights, ids, layer.plan)
    names = ["first_kernel", "second_kernel", "sort_kernel", "grouped_kernel", "grouped_kernel", "combine_kernel"]
    assert [launch.kernel for launch in emulator.launches] == names


def test_who_serves_what(gfx950: torch.device) -> None:
    """fp16 weights, rounded activations, and sizes that are no multiples of 64 fall back to the portable kernel."""
    plan = tokenspeed_kernel.moe_apply.plan
    options: dict[str, Any] = {"weight_format": "dense", "device": gfx950}
    assert plan(4, 2, 128, 192, dtype=torch.bfloat16, **options).kernel == "gluon_moe_apply_dense"
    assert plan(4, 2, 128, 96, dtype=torch.bfloat16, **options).kernel == "triton_moe_apply"
    assert plan(4, 2, 128, 192, dtype=torch.float16, **options).kernel == "triton_moe_apply"
    assert plan(4, 2, 128, 192, dtype=torch.bfloat16, activation_dtype="fp8", **options).kernel == "triton_moe_apply"
