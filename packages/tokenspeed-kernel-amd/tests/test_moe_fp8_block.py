"""Tests moe_apply and moe_topk_apply with fp8 block-scaled weights: layout, cases, compiled code, and errors compared with the
portable kernel's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd.gfx950.moe import few, grouped
from tokenspeed_kernel_amd.gfx950.moe import fp8_block_layout as layout
from tokenspeed_kernel_amd.gfx950.moe.moe_apply import moe_apply
from tokenspeed_kernel_amd.gfx950.moe.moe_topk_apply import moe_topk_apply as launcher_of_moe_topk_apply
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.launchers import unchecked
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk
from tokenspeed_kernel_base.ops.quantization.encodings import decode_fp8

from .experts import GPT_OSS, REACHED, RandomLayer, reaching, relative_error
from .paging import check_case, kernel_of, spills

moe_topk_apply = unchecked(tokenspeed_kernel.moe_topk_apply, launcher_of_moe_topk_apply)

NARROW, BROAD, WIDE = grouped.Tile(16, 4), grouped.Tile(32, 4), grouped.Tile(128, 8, wide=True, blocks=3)
# Compiling a kernel takes longer than emulating it. So tests that need no particular layer share this one, and its kernels.
SMALL = (4, 2, 96, 224)
ROUNDED: list[dict[str, Any]] = [{"activation_dtype": dtype} for dtype in ("fp8", "none", "mxfp4", "fp8_static")]


def layer_of(device: torch.device, *sizes: int, **options: Any) -> RandomLayer:
    return RandomLayer(device, *sizes, weight_format="fp8_block", **options)


def read_back(weight: Tensor, scale: Tensor, k: int) -> Tensor:
    """Returns weights ``[experts, rows of strips, k]``, read one by one at the positions that the layout's docstring describes."""
    experts, strips, pieces = weight.shape[:3]
    found = torch.empty(experts, strips, 32, pieces * 64, dtype=torch.float32)
    factors = torch.empty(experts, strips, 32, scale.shape[2] * 4, dtype=torch.float32)
    for half in range(2):
        for r in range(16):
            for g in range(4):
                for b in range(16):
                    found[:, :, 16 * half + r, 16 * g + b :: 64] = weight[:, :, :, half, 16 * g + r, b].float()
            for step in range(4):
                factors[:, :, 16 * half + r, step::4] = scale[:, :, :, half, step]
    return (found[..., :k] * factors.repeat_interleave(128, -1)[..., :k]).flatten(1, 2)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "interleaved"), [(96, 64, True), (160, 224, False), (736, 32, True), (512, 544, False)]
)
def test_every_element_is_where_the_layout_says(hidden: int, intermediate: int, interleaved: bool) -> None:
    """Every weight, scale and bias is where the layout says. In one size, the gate rows end and the up rows begin within the same
    scale block."""
    layer = layer_of(torch.device("cpu"), 3, 2, hidden, intermediate, w13_interleaved=interleaved, bias=True)
    given, arranged = layer.given, layer.prepared
    assert arranged.layout == layout.LAYOUT
    assert given.w13_weight_scale is not None
    assert given.w2_weight_scale is not None
    assert given.w13_weight_bias is not None
    assert arranged.w13_weight_scale is not None
    assert arranged.w2_weight_scale is not None
    assert arranged.w13_weight_bias is not None
    feature, both = torch.arange(intermediate), torch.arange(2 * intermediate)
    at = feature // 16 * 32 + feature % 16  # the row of a feature's gate; the row of its up is 16 rows further
    gates = both[::2] if interleaved else both[:intermediate]
    ups = both[1::2] if interleaved else both[intermediate:]
    w13 = read_back(arranged.w13_weight, arranged.w13_weight_scale, hidden)
    w2 = read_back(arranged.w2_weight, arranged.w2_weight_scale, intermediate)
    for expert in range(3):
        canonical = decode_fp8(given.w13_weight[expert], given.w13_weight_scale[expert], (128, 128), torch.float32)
        assert torch.equal(w13[expert, at], canonical[gates])
        assert torch.equal(w13[expert, at + 16], canonical[ups])
        canonical = decode_fp8(given.w2_weight[expert], given.w2_weight_scale[expert], (128, 128), torch.float32)
        assert torch.equal(w2[expert], canonical)
    assert torch.equal(arranged.w13_weight_bias[:, at], given.w13_weight_bias[:, gates])
    assert torch.equal(arranged.w13_weight_bias[:, at + 16], given.w13_weight_bias[:, ups])


def cases(mode: str) -> list[Case]:
    """Returns the operator's cases with fp8 block-scaled weights. Cases that are sized for a GPU, or that no kernel of this package
    declares, are left out."""
    small = [case for case in get_operator(f"moe.{mode}").all_cases() if not case.large and "fp8 blocks" in case.name]
    return [case for case in small if "cut short" not in case.name]


@pytest.mark.parametrize("case", cases("moe_apply"), ids=lambda case: case.name)
def test_cases(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, "moe_apply_fp8_block", case)


# The other combinations are slow. The tests with mxfp4 weights run the same tiles with the other activation formats, and
# `test_cases` runs fp8 weights with these formats.
TILES: list[Any] = [
    (NARROW, ROUNDED[0]),
    (BROAD, {**ROUNDED[1], **GPT_OSS}),
    (WIDE, ROUNDED[0]),
    (WIDE, {**ROUNDED[3], **GPT_OSS}),
    *(pytest.param(WIDE, {**ROUNDED[kind], **GPT_OSS}, marks=pytest.mark.slow) for kind in (0, 2)),
    *(
        pytest.param(tile, {**options, **GPT_OSS}, marks=pytest.mark.slow)
        for tile in (NARROW, BROAD)
        for options in (*ROUNDED, {"dtype": torch.float16})
    ),
]


@pytest.mark.parametrize(("tile", "options"), TILES, ids=str)
def test_tiles_are_as_exact_as_the_portable_kernel(gfx950: torch.device, tile: grouped.Tile, options: dict[str, Any]) -> None:
    """The error is within the limit of `check`. Sizes are not multiples of k steps, blocks of strips and tiles. One expert has most
    tokens, and another expert has none."""
    if tile == BROAD and options.get("dtype") == torch.float16:
        tile = grouped.tile_for(10**6, layer_of(gfx950, 2, 1, 32, 32, **options).plan)
        assert tile == NARROW
    layer = layer_of(gfx950, 6, 2, 224, 480, **options)
    x, weights, ids = layer.tokens(60)
    ids[:49, 0] = 4
    ids[:30, 1] = 1
    ids[5] = -1
    ids = ids.where(ids != 2, 3)
    got = grouped.moe_apply_many(x, layer.prepared, weights, ids, layer.plan, tile=tile)
    assert not got[5].any()
    check(layer, got, x, weights, ids)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tokens", "top_k", "options"),
    [
        (1, 4, {"activation_dtype": "fp8", **GPT_OSS}),
        (8, 8, {"activation_dtype": "fp8"}),
        (5, 1, {"dtype": torch.float16}),
        (3, 3, {"activation_dtype": "mxfp4", **GPT_OSS}),
        (4, 6, {"bias": True}),
        (7, 4, {"activation_dtype": "fp8_static", "dtype": torch.float16}),
        (2, 2, {"activation_dtype": "fp8", "dtype": torch.float32}),
    ],
)
def test_few_tokens_are_as_exact_as_the_portable_kernel(
    gfx950: torch.device, tokens: int, top_k: int, options: dict[str, Any]
) -> None:
    """The error is within the limit of `check`. A top-k slot has no expert, a token has the same expert in two slots, and an expert
    has more pairs than one workgroup computes."""
    layer = layer_of(gfx950, 9, top_k, 224, 672, **options)
    x, weights, ids = layer.tokens(tokens)
    ids[:5, 0] = 5
    ids[-1, 0] = ids[0, -1]
    if top_k > 2:
        ids[0, 1] = -1
        ids[-1, 2] = ids[-1, 0]
    assert few.few_enough(tokens, layer.plan, layer.prepared)
    got = few.moe_apply_few(x, layer.prepared, weights, ids, layer.plan)
    check(layer, got, x, weights, ids)
    assert torch.equal(few.moe_apply_few(x, layer.prepared, weights, ids, layer.plan), got)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4])
def test_few_tokens_of_a_hidden_size_like_deepseek(gfx950: torch.device, tokens: int) -> None:
    """Two launches compute unquantised activations with top-8 routing, although 8 encoded rows of the hidden size do not fit into
    LDS: the gate/up GEMM encodes 4 at once."""
    layer = layer_of(gfx950, 8, 8, 7136, 32)
    x, weights, ids = layer.tokens(tokens)
    assert few.few_enough(tokens, layer.plan, layer.prepared)
    check(layer, few.moe_apply_few(x, layer.prepared, weights, ids, layer.plan), x, weights, ids)


def check(layer: RandomLayer, got: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> None:
    """Asserts that the error is at most 1.2 times the portable kernel's error. With static scales, which the portable kernel does
    not have, activations are rounded once, and the limit is 4e-3."""
    wanted = layer.wanted(x, weights, ids)
    allowed = 4e-3
    if layer.plan.activation_dtype != "fp8_static":
        plan = dataclasses.replace(layer.plan, kernel="triton_moe_apply", weight_layout="canonical")
        other = tokenspeed_kernel.moe_apply(x, layer.given, weights, ids, plan, override=plan.kernel)
        allowed = 1.2 * relative_error(other, wanted)
    assert relative_error(got, wanted) <= allowed


@pytest.mark.parametrize("tokens", [5, pytest.param(20, marks=pytest.mark.slow), 70])
def test_from_logits(gfx950: torch.device, tokens: int) -> None:
    layer = layer_of(gfx950, *SMALL, activation_dtype="fp8")
    x, _, _ = layer.tokens(tokens)
    logits = torch.randn(tokens, 4, generator=layer.random).bfloat16().to(gfx950)
    weights, ids = moe_topk.operator.body(logits, 2)
    got = moe_topk_apply(x, logits, layer.prepared, layer.plan)
    assert relative_error(got, moe_apply(x, layer.prepared, weights, ids, layer.plan).float()) <= 1e-3


@pytest.mark.parametrize("activation_dtype", ["fp8", pytest.param("none", marks=pytest.mark.slow)])
def test_a_number_that_is_not_finite_stays_in_its_token(gfx950: torch.device, activation_dtype: str) -> None:
    layer = layer_of(gfx950, *SMALL, activation_dtype=activation_dtype)
    x, weights, ids = layer.tokens(5)
    for launch in (few.moe_apply_few, grouped.moe_apply_many):
        clean = launch(x, layer.prepared, weights, ids, layer.plan)
        spoilt = x.clone()
        spoilt[1, 3], spoilt[3, 70] = torch.nan, torch.inf
        got = launch(spoilt, layer.prepared, weights, ids, layer.plan)
        assert got[[1, 3]].isnan().all()
        assert torch.equal(got[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.slow
def test_the_kit_finds_nothing(gfx950: torch.device) -> None:
    """Runs the conformance kit on a call of few tokens, and on a call with so many tokens that they are sorted by expert."""
    (case,) = (case for case in cases("moe_apply") if case.name == "fp8 blocks, fp8 activations")
    findings = conform(kernel_of("moe_apply_fp8_block"), gfx950, Options(shrink_seconds=0), [case])
    assert_none_wrong(findings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", REACHED)
@pytest.mark.parametrize("mode", ["moe_apply", "moe_topk_apply"])
def test_the_kit_finds_nothing_at_all(gfx950: torch.device, mode: str, kind: str) -> None:
    findings = conform(kernel_of(f"{mode}_fp8_block{kind}"), gfx950, Options(shrink_seconds=0), [reaching(mode, "fp8_block", kind)])
    assert_none_wrong(findings)


@pytest.mark.parametrize(
    "options", [ROUNDED[0], *(pytest.param(x, marks=pytest.mark.slow) for x in (*ROUNDED[1:], {"dtype": torch.float16}))], ids=str
)
def test_compiled_code(emulator: Any, options: dict[str, Any]) -> None:
    """At DeepSeek-V3's sizes, there are no spills, no loops around buffer instructions, and no bank conflicts in the tiled
    GEMMs."""
    cpu = torch.device("cpu")
    # Rows of 7136 and of 7168 elements have the same blocks. With 7136, which is not a multiple of 512, other tests share the down
    # projection's kernel.
    for sizes, tokens in (((4, 2, 7136, 32), 4), ((8, 8, 32, 2048), 4), ((4, 2, 7136, 32), 1)):
        layer = layer_of(cpu, *sizes, **options)
        if few.few_enough(tokens, layer.plan, layer.prepared):
            few.moe_apply_few(*_arguments(layer, tokens))
    layer = layer_of(cpu, 2, 2, 992, 32, **options)
    for tile in {NARROW, grouped.tile_for(10**6, layer.plan)}:
        grouped.moe_apply_many(*_arguments(layer, 3), tile=tile)
    names = ("first_kernel", "second_kernel", "grouped_kernel", "wide_kernel")
    launches = [launch for launch in emulator.launches if launch.kernel in names]
    assert launches
    for launch in launches:
        text = launch.program.assembly.text
        assert not any(spills(text).values())
        assert "s_cbranch_execnz" not in text
        if launch.kernel in names[2:]:
            assert launch.counters.total("lds_conflicts") == 0


def _arguments(layer: RandomLayer, tokens: int) -> tuple[Any, ...]:
    x, weights, ids = layer.tokens(tokens)
    return x, layer.prepared, weights, ids, layer.plan


def test_launches(emulator: Any) -> None:
    """A call has the same launches as with mxfp4 weights."""
    layer = layer_of(torch.device("cpu"), *SMALL, activation_dtype="fp8")
    moe_apply(*_arguments(layer, 5))
    assert [launch.kernel for launch in emulator.launches] == ["first_kernel", "second_kernel"]
    moe_apply(*_arguments(layer, 40))
    names = ["route_kernel", "grouped_kernel", "encode_kernel", "grouped_kernel", "combine_kernel"]
    assert [launch.kernel for launch in emulator.launches[2:]] == names
    del emulator.launches[:]
    moe_apply(*_arguments(layer, 100))
    names = ["route_kernel", "wide_kernel", "encode_kernel", "wide_kernel", "combine_kernel"]
    assert [launch.kernel for launch in emulator.launches] == names


def test_who_serves_what(gfx950: torch.device) -> None:
    """Sizes that are not multiples of 32 fall back to the portable kernel."""
    options: dict[str, Any] = {"weight_format": "fp8_block", "device": gfx950}
    assert tokenspeed_kernel.moe_apply.plan(4, 2, 128, 96, **options).kernel == "gluon_moe_apply_fp8_block"
    assert tokenspeed_kernel.moe_apply.plan(4, 2, 128, 136, **options).kernel == "triton_moe_apply"
