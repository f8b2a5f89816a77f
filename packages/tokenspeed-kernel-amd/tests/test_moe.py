"""Tests moe_apply with mxfp4 weights: cases, errors compared with the portable kernel's, routing, and compiled code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenspeed_kernel
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd.gfx950.moe import few, grouped
from tokenspeed_kernel_amd.gfx950.moe.encoding import Encoded, Encoding
from tokenspeed_kernel_amd.gfx950.moe.moe_apply import WEIGHTS, moe_apply
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8

from .experts import GPT_OSS, REACHED, RandomLayer, mxfp4_cases, reaching, relative_error
from .paging import check_case, kernel_of, spills

FEW: list[tuple[int, int, dict[str, Any]]] = [
    (1, 4, {"activation_dtype": "fp8", **GPT_OSS}),
    (8, 8, {"activation_dtype": "fp8"}),
    (3, 3, {"activation_dtype": "mxfp4", **GPT_OSS}),
    (5, 1, {"dtype": torch.float16}),
    (4, 6, {"bias": True}),
    (1, 4, {"activation_dtype": "fp8_static", **GPT_OSS}),
    (7, 4, {"activation_dtype": "fp8_static", "dtype": torch.float16}),
    (16, 4, {"activation_dtype": "fp8", **GPT_OSS}),
    (1, 2, {"activation_dtype": "mxfp4"}),
    (1, 3, {"dtype": torch.float16, "bias": True}),
]
TILES = [grouped.Tile(16, 4), grouped.Tile(32, 4), grouped.Tile(128, 8, wide=True, blocks=3)]
OF_TWO = grouped.Tile(32, 4, wide=True, blocks=3, waves_per_simd=2)
FOR_FLOAT16 = grouped.Tile(64, 8, wide=True, blocks=3)  # see `tile_for`
# Compiling a kernel takes longer than emulating it. So tests that need no particular layer share layers, and therefore kernels.
FP8: dict[str, Any] = {"activation_dtype": "fp8", **GPT_OSS}
STATIC: dict[str, Any] = {"activation_dtype": "fp8_static", **GPT_OSS}
MXFP4: dict[str, Any] = {"activation_dtype": "mxfp4", **GPT_OSS}
UNROUNDED: dict[str, Any] = {"bias": True}
FLOAT16: dict[str, Any] = {"dtype": torch.float16, **GPT_OSS}
SMALL = (8, 4, 96, 64)  # experts, top_k and sizes of the operator's cases with GPT-OSS's options


@pytest.mark.parametrize("case", mxfp4_cases(), ids=lambda case: case.name)
def test_cases(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, f"moe_apply_mxfp4{'_float32_fp8' if 'float32' in case.name else ''}", case)


# Each tile, activation format and dtype. The other combinations are slow.
SOME_TILES: list[tuple[grouped.Tile, dict[str, Any]]] = [
    (TILES[2], FP8),
    (TILES[1], STATIC),
    (TILES[0], UNROUNDED),
    (TILES[1], MXFP4),
    (OF_TWO, UNROUNDED),
    (FOR_FLOAT16, FLOAT16),
]
ALL_TILES: list[tuple[grouped.Tile, dict[str, Any]]] = [
    *((tile, options) for options in (FP8, STATIC, UNROUNDED, MXFP4) for tile in TILES),
    (TILES[1], FLOAT16),
    *SOME_TILES[-2:],
]


@pytest.mark.parametrize(
    ("tile", "options"),
    [pytest.param(*each, marks=[] if each in SOME_TILES else [pytest.mark.slow]) for each in ALL_TILES],
    ids=str,
)
def test_tiles_are_as_exact_as_the_portable_kernel(gfx950: torch.device, tile: grouped.Tile, options: dict[str, Any]) -> None:
    """The error is at most `allowed_error`. Sizes are not multiples of k steps, blocks of strips and tiles. One expert has most
    tokens, and another expert has none."""
    layer = RandomLayer(gfx950, 6, 2, 224, 480, **options)
    x, weights, ids = layer.tokens(150)
    ids[:139, 0] = 4
    ids[:70, 1] = 1
    ids[5] = -1
    ids = ids.where(ids != 2, 3)
    wanted = layer.wanted(x, weights, ids)
    got = grouped.moe_apply_many(x, layer.prepared, weights, ids, layer.plan, tile=tile)
    assert not got[5].any()
    assert relative_error(got, wanted) <= allowed_error(layer, x, weights, ids, wanted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tokens", "top_k", "options"), FEW)
def test_few_tokens_are_as_exact_as_the_portable_kernel(
    gfx950: torch.device, tokens: int, top_k: int, options: dict[str, Any]
) -> None:
    """The error is at most `allowed_error`, and a second call gives the same bits. A top-k slot has no expert. One token has the
    same expert in two slots, and other tokens have this expert, too. An expert has more pairs than one workgroup computes."""
    layer = RandomLayer(gfx950, 9, top_k, 224, 672, **options)
    x, weights, ids = layer.tokens(tokens)
    ids[4:13, 0] = 5
    ids[-1, 0] = ids[0, -1]
    if top_k > 2:
        ids[0, 1] = -1
        ids[-1, 2] = ids[-1, 0]
    assert few.few_enough(tokens, layer.plan, layer.prepared)
    wanted = layer.wanted(x, weights, ids)
    got = few.moe_apply_few(x, layer.prepared, weights, ids, layer.plan)
    assert relative_error(got, wanted) <= allowed_error(layer, x, weights, ids, wanted)
    assert torch.equal(few.moe_apply_few(x, layer.prepared, weights, ids, layer.plan), got)


def allowed_error(layer: RandomLayer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns 1.2 times the portable kernel's error; with static scales, which the portable kernel does not have, 4e-3. The
    portable kernel rounds activations to the tokens' dtype before it quantises them."""
    if layer.plan.activation_dtype == "fp8_static":
        return 4e-3
    return 1.2 * relative_error(portable(layer, x, weights, ids), wanted)


def portable(layer: RandomLayer, *arguments: torch.Tensor) -> torch.Tensor:
    plan = dataclasses.replace(layer.plan, kernel="triton_moe_apply_mxfp4", weight_layout="triton_mxfp4")
    prepared = tokenspeed_kernel.moe_apply.prepare(layer.given, plan)
    x, weights, ids = arguments
    return tokenspeed_kernel.moe_apply(x, prepared, weights, ids, plan, override=plan.kernel)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("experts", "tokens", "top_k"), [(384, 5, 8), (9, 40, 8), (384, 40, 8), (3, 77, 2)])
def test_the_order_of_tokens_changes_no_bit(gfx950: torch.device, experts: int, tokens: int, top_k: int) -> None:
    """If the order of tokens changes, so that tokens are in other columns and other tiles, the results stay bitwise the same."""
    layer = RandomLayer(gfx950, experts, top_k, 64, 32, activation_dtype="fp8", **GPT_OSS)
    x, weights, ids = layer.tokens(tokens)
    ids[1 : tokens // 2, 0] = experts - 1
    turned = torch.arange(tokens - 1, -1, -1, device=gfx950)
    got = moe_apply(x, layer.prepared, weights, ids, layer.plan)
    assert torch.equal(moe_apply(x[turned], layer.prepared, weights[turned], ids[turned], layer.plan), got[turned])
    assert relative_error(got, layer.wanted(x, weights, ids)) <= 1.5e-2


@pytest.mark.parametrize(("tokens_by", "w13_by", "w2_by"), [(80, -80, 0), (-80, 80, 0), (0, 55, -100)])
def test_numbers_far_from_one(gfx950: torch.device, tokens_by: int, w13_by: int, w2_by: int) -> None:
    """Results are correct if tokens and weights are multiplied by large or small powers of 2. Projections and gate times up stay in
    fp32's range."""
    layer = RandomLayer(gfx950, 3, 2, 608, 96)
    assert layer.given.w13_weight_scale is not None
    assert layer.given.w2_weight_scale is not None
    layer.given.w13_weight_scale += w13_by
    layer.given.w2_weight_scale += w2_by
    prepared = WEIGHTS["mxfp4"].prepare(layer.given, layer.plan)
    x, weights, ids = layer.tokens(3)
    x = x * 2.0**tokens_by
    got = moe_apply(x, prepared, weights, ids, layer.plan)
    assert relative_error(got, layer.wanted(x, weights, ids)) <= 4e-3


@pytest.mark.parametrize("activation_dtype", ["fp8", *(pytest.param(other, marks=pytest.mark.slow) for other in ("none", "mxfp4"))])
def test_a_number_that_is_not_finite_stays_in_its_token(gfx950: torch.device, activation_dtype: str) -> None:
    layer = RandomLayer(gfx950, *SMALL, **{**FP8, "activation_dtype": activation_dtype})
    x, weights, ids = layer.tokens(5)
    clean = grouped.moe_apply_many(x, layer.prepared, weights, ids, layer.plan)
    x[1, 3], x[3, 70] = torch.nan, torch.inf
    got = grouped.moe_apply_many(x, layer.prepared, weights, ids, layer.plan)
    assert got[[1, 3]].isnan().all()
    assert torch.equal(got[[0, 2, 4]], clean[[0, 2, 4]])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mxfp4, concatenated, fp8 activations", "mxfp4, float16"])
def test_the_kit_finds_nothing(gfx950: torch.device, name: str) -> None:
    """Runs the conformance kit on a call of few tokens, and on a call with so many tokens that they are sorted by expert."""
    (case,) = (case for case in mxfp4_cases() if case.name == name)
    spec = kernel_of("moe_apply_mxfp4")
    traits = get_operator(spec.operator).request(get_operator(spec.operator).complete(case.build(gfx950))).traits
    flags = {name: {True} for name, value in traits.items() if value is True}
    kept = {"weight_layout": spec.traits["weight_layout"], "processed_weights": spec.traits["processed_weights"]}
    findings = conform(dataclasses.replace(spec, traits={**flags, **kept}), gfx950, Options(shrink_seconds=0), [case])
    assert_none_wrong(findings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", REACHED)
def test_the_kit_finds_nothing_at_all(gfx950: torch.device, kind: str) -> None:
    cases = [reaching("moe_apply", "mxfp4", kind)] if kind else None
    findings = conform(kernel_of(f"moe_apply_mxfp4{kind}"), gfx950, Options(shrink_seconds=0), cases)
    assert_none_wrong(findings)


@pytest.mark.parametrize(
    ("tile", "top_k", "options"),
    [
        (TILES[0], 4, FP8),
        (TILES[2], 2, FP8),
        (TILES[2], 2, UNROUNDED),
        (OF_TWO, 2, UNROUNDED),
        pytest.param(TILES[1], 2, FP8, marks=pytest.mark.slow),
        pytest.param(TILES[2], 2, GPT_OSS, marks=pytest.mark.slow),
        pytest.param(TILES[2], 2, MXFP4, marks=pytest.mark.slow),
        pytest.param(FOR_FLOAT16, 2, FLOAT16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_code(emulator: Any, tile: grouped.Tile, top_k: int, options: dict[str, Any]) -> None:
    """No register is spilled. There are no bank conflicts and no loops around buffer instructions."""
    layer = RandomLayer(torch.device("cpu"), top_k, top_k, 992, 32, **options)
    grouped.moe_apply_many(*_arguments(layer, 3), tile=tile)
    launches = [launch for launch in emulator.launches if launch.kernel in ("grouped_kernel", "wide_kernel", "exact_kernel")]
    assert len(launches) == (4 if tile.columns > 32 and layer.plan.activation_dtype == "none" else 2)
    for launch in launches:
        text = launch.program.assembly.text
        assert not any(spills(text).values())
        assert launch.counters.total("lds_conflicts") == 0
        assert "s_cbranch_execnz" not in text


def _arguments(layer: RandomLayer, tokens: int) -> tuple[Any, ...]:
    x, weights, ids = layer.tokens(tokens)
    return x, layer.prepared, weights, ids, layer.plan


def test_the_tile_for_many_tokens() -> None:
    """Calls with many tokens use the wide tile, whatever the activation format."""
    for options in ({"activation_dtype": "fp8"}, {}, {"activation_dtype": "mxfp4"}, {"dtype": torch.float16}):
        plan = RandomLayer(torch.device("cpu"), 2, 1, 32, 32, **options).plan
        tile = grouped.tile_for(1000, plan)
        assert (tile.wide, tile.columns) == (True, 64 if plan.dtype == torch.float16 else 128)
        assert grouped.tile_for(90, plan) == (OF_TWO if options == {} else TILES[1])
        assert not grouped.tile_for(20, plan).wide


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activation_dtype", ["fp8", "fp8_static", "none", "mxfp4"])
def test_compiled_code_for_few(emulator: Any, activation_dtype: str) -> None:
    layer = RandomLayer(torch.device("cpu"), 8, 4, 2880, 32, activation_dtype=activation_dtype, **GPT_OSS)
    few.moe_apply_few(*_arguments(layer, 4))
    for launch in emulator.launches:
        text = launch.program.assembly.text
        assert not any(spills(text).values())
        assert "s_cbranch_execnz" not in text


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_layer_in_full_size(gfx950: torch.device, tokens: int) -> None:
    """The error is small at GPT-OSS-120B's sizes. The layer has only eight experts, so that four tokens share experts. With 128
    experts, tokens rarely share one."""
    layer = RandomLayer(gfx950, 8, 4, 2880, 2880, activation_dtype="fp8", **GPT_OSS)
    x, weights, ids = layer.tokens(tokens)
    got = moe_apply(x, layer.prepared, weights, ids, layer.plan)
    wanted = layer.wanted(x, weights, ids)
    # Emulating the portable kernel takes minutes. So its error is given here. Between the GEMMs, it rounds to bf16 and then to
    # quantised values. In exact arithmetic, this causes an error of 1.60e-2 for one token, and 1.42e-2 for four.
    assert relative_error(got, wanted) <= 1.2 * (1.60e-2 if tokens == 1 else 1.42e-2)
    assert torch.equal(moe_apply(x, layer.prepared, weights, ids, layer.plan), got)


@pytest.mark.slow
def test_more_ids_than_a_workgroup_reads_at_once(gfx950: torch.device) -> None:
    layer = RandomLayer(gfx950, 5, 4, 32, 32, activation_dtype="fp8")
    x, weights, ids = layer.tokens(1100)
    ids[7, 2], ids[1090, 1] = -1, -1
    got = moe_apply(x, layer.prepared, weights, ids, layer.plan)
    wanted = layer.wanted(x, weights, ids)
    assert relative_error(got, wanted) <= 1.2 * relative_error(portable(layer, x, weights, ids), wanted)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("k", [320, 2880, 9312])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_of_a_scale_a_token(gfx950: torch.device, dtype: torch.dtype, k: int) -> None:
    """Rows are quantised like the core's reference, both rows that fit into registers and longer rows. Values beyond k are zeros;
    rows beyond the count are not written."""
    x = torch.randn(7, k, device=gfx950).to(dtype)
    x[2] = 0
    x[3] *= 1e-6
    width = grouped.padded(k)
    codes = torch.full((7, width), 77, dtype=torch.uint8, device=gfx950)
    scale = torch.full((7,), 77.0, device=gfx950)
    count = torch.tensor([6], dtype=torch.int32, device=gfx950)
    grouped.encode(x, count, Encoded(codes[None], scale), Encoding("e4m3", 1, "token"))
    wanted, wanted_scale = quantize_fp8.operator.body(x[:6], "token")
    assert torch.equal(scale[:6], wanted_scale[:, 0])
    # Multiplying by the reciprocal may round to the adjacent quantised value.
    apart = (codes[:6, :k].int() - wanted.view(torch.uint8).int()).abs()
    assert int(apart.max()) <= 1
    assert int(apart.sum()) <= 0.01 * apart.numel()
    assert not codes[:6, k:].any()
    assert bool((codes[6] == 77).all())
    assert scale[6] == 77


@pytest.mark.parametrize(
    ("weight_format", "activation_dtype", "tokens", "tile"),
    [
        ("mxfp4", "none", 40, None),  # this call with few tokens is among the operator's cases
        pytest.param("mxfp4", "none", 40, FOR_FLOAT16, marks=pytest.mark.slow),
        pytest.param("mxfp4", "fp8", 1, None, marks=pytest.mark.slow),
        pytest.param("mxfp4", "fp8", 40, None, marks=pytest.mark.slow),
        pytest.param("fp8_block", "none", 1, None, marks=pytest.mark.slow),
        pytest.param("fp8_block", "none", 40, None, marks=pytest.mark.slow),
    ],
)
def test_activations_beyond_float16(
    gfx950: torch.device, weight_format: str, activation_dtype: str, tokens: int, tile: grouped.Tile | None
) -> None:
    layer = RandomLayer(gfx950, 4, 2, 96, 64, weight_format, dtype=torch.float16, activation_dtype=activation_dtype)
    x, weights, ids = layer.wide_tokens(tokens)
    launch = moe_apply if tile is None else functools.partial(grouped.moe_apply_many, tile=tile)
    got = launch(x, layer.prepared, weights, ids, layer.plan)
    assert relative_error(got, layer.wanted(x, weights, ids)) <= (1e-3 if activation_dtype == "none" else 2e-2)


@pytest.mark.parametrize(("dtype", "planes", "least"), [(torch.bfloat16, 2, 22), (torch.float16, 3, 27), (torch.float32, 3, 19)])
def test_planes_restore_numbers(gfx950: torch.device, dtype: torch.dtype, planes: int, least: int) -> None:
    """The sum of the planes differs from a 16-bit value by at most 2^-22 (bf16) or 2^-27 (fp16) of the block's amax. The sum is
    exact if the value is at least 2^-14 of the amax.

    fp16 activations that exceed fp16's range are fp32; three planes round these to 12 bits.
    """
    random = torch.Generator().manual_seed(0)
    octaves = 10 if dtype == torch.float16 else 40
    x = torch.randn(6, 512, generator=random) * 2.0 ** torch.randint(-octaves, octaves // 2, (6, 512), generator=random)
    x = x.to(dtype).to(gfx950)
    codes = torch.zeros(planes, 6, 512, dtype=torch.uint8, device=gfx950)
    scale = torch.zeros(planes * 6 * 16 + 6, dtype=torch.uint8, device=gfx950)  # `encoding` describes the last 6 bytes
    count = torch.tensor([6], dtype=torch.int32, device=gfx950)
    grouped.encode(x, count, Encoded(codes, scale), Encoding("e4m3", planes, "block"))
    exponents = scale[: planes * 6 * 16].view(planes, 6, 4, 4).transpose(2, 3).reshape(planes, 6, 16, 1)
    values = codes.view(torch.float8_e4m3fn).double().view(planes, 6, 16, 32) * torch.exp2(exponents.double() - 127)
    given = x.double().view(6, 16, 32)
    largest = given.abs().amax(-1, keepdim=True)
    error = (values.sum(0) - given).abs()
    if dtype == torch.float32:
        assert (error <= torch.maximum(given.abs() * 2.0**-12, largest * 2.0**-27)).all()
    else:
        assert (error <= largest * 2.0**-least).all()
        assert not error[given.abs() >= largest * 2.0**-14].any()


@pytest.mark.parametrize(
    ("launch", "tokens"),
    [
        (few.moe_apply_few, 7),
        (functools.partial(grouped.moe_apply_many, tile=TILES[0]), 21),
        pytest.param(functools.partial(grouped.moe_apply_many, tile=TILES[2]), 21, marks=pytest.mark.slow),
    ],
    ids=["few", "narrow", "wide"],
)
def test_static_scales_saturate(gfx950: torch.device, launch: Callable[..., torch.Tensor], tokens: int) -> None:
    """Values beyond the scales' range saturate, in tokens and between the GEMMs."""
    layer = RandomLayer(gfx950, *SMALL, **STATIC)
    for name in ("w13_input_scale", "w2_input_scale"):
        for each in (layer.given, layer.prepared):
            getattr(each, name).fill_(0.5 / 448)
    x, weights, ids = layer.tokens(tokens)
    x[3, 5], x[4, 6] = 1e4, -1e4
    wanted = layer.wanted(x, weights, ids)
    assert relative_error(launch(x, layer.prepared, weights, ids, layer.plan), wanted) <= 4e-3


def test_launches(emulator: Any) -> None:
    layer = RandomLayer(torch.device("cpu"), *SMALL, **FP8)
    moe_apply(*_arguments(layer, 7))
    assert [launch.kernel for launch in emulator.launches] == ["first_kernel", "second_kernel"]
    moe_apply(*_arguments(layer, 21))
    names = ["route_kernel", "grouped_kernel", "encode_kernel", "grouped_kernel", "combine_kernel"]
    assert [launch.kernel for launch in emulator.launches[2:]] == names
    layer = RandomLayer(torch.device("cpu"), *SMALL, **STATIC)
    moe_apply(*_arguments(layer, 21))
    assert [launch.kernel for launch in emulator.launches[7:]] == [name for name in names if name != "encode_kernel"]
