"""mm with mxfp8, mxfp4 and fp8 operands, compared with the dequantised operands' GEMM in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd import mm
from tokenspeed_kernel_amd.gfx950.gemm import mm as launcher
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm._inputs import fp8, micro
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands

from .paging import check_case, kernel_of, spills

ERROR = 1e-6  # relative error of a float32 result: dot products are accumulated in float32
FORMATS = ("mxfp8", "mxfp4")


def inputs(device: torch.device, m: int, k: int, n: int, a: str = "mxfp8", b: str = "mxfp8", **options: Any) -> dict[str, Any]:
    return micro(m, k, n, a=a, b=b, out_dtype=torch.float32, **options)(Draw(device, m + k + n))


def reference(arguments: dict[str, Any]) -> Tensor:
    """Returns the GEMM of the dequantised operands, in float64. Dequantised elements are exact in float32."""
    a, b = decode_operands("mm", *(arguments[name] for name in ("a", "b", "a_scale", "b_scale")))
    result = a.double() @ b.double()
    bias = arguments.get("bias")
    return result if bias is None else result + bias.double()


def check(arguments: dict[str, Any], **options: Any) -> Tensor:
    got, wanted = mm(**arguments, **options), reference(arguments)
    assert (got.double() - wanted).norm() <= ERROR * wanted.norm()
    return got


@pytest.fixture
def compute_units(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes the launcher choose tiles as for a device with this many CUs."""
    return lambda count: monkeypatch.setattr(launcher, "current_compute_units", lambda: count)


# Tiles of a call: m, k, n, number of CUs, tile, number of splits. Sizes end within tiles and within blocks of k.
TILES = [
    (1, 96, 40, 256, (16, 16), 1),
    (5, 2080, 24, 256, (16, 16), 1),  # more than one block of k per wave
    (3, 6144, 40, 256, (16, 16), 12),
    (16, 160, 70, 3, (16, 32), 1),
    (9, 160, 200, 2, (16, 64), 1),
    (20, 672, 40, 256, (32, 16), 1),
    (40, 672, 70, 2, (64, 32), 1),
    (70, 96, 90, 256, (64, 64), 1),
    (70, 5120, 90, 256, (64, 64), 5),
    (130, 1184, 140, 7, (128, 128), 1),
    (130, 2592, 140, 7, (128, 128), 1),  # chunks of scales end in the loop
    (130, 4128, 140, 3, (128, 128), 1),  # many blocks of k
    (130, 1184, 140, 3, (128, 128), 1),  # two workgroups per CU
]


# The tests that are not slow.
SAMPLED = {((3, 6144), "mxfp8"), ((130, 1184), "mxfp4"), ((130, 2592), "mxfp8")}


@pytest.mark.parametrize(
    ("m", "k", "n", "units", "tile", "splits", "both"),
    [
        pytest.param(*case, both, marks=[] if (case[:2], both) in SAMPLED else pytest.mark.slow)
        for case in TILES
        for both in FORMATS
    ],
)
def test_tiles(
    gfx950: torch.device, compute_units: Any, m: int, k: int, n: int, units: int, tile: Any, splits: int, both: str
) -> None:
    compute_units(units)
    config = launcher.config_of(m, n, units, 1 if both == "mxfp4" else 2)
    assert (config.block_m, config.block_n) == tile
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    assert launcher.splits_of(config, tiles, k, units, 2)[0] == splits
    check(inputs(gfx950, m, k, n, both, both))


@pytest.mark.parametrize("m", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("a", "b"), [("mxfp8", "mxfp4"), pytest.param("mxfp4", "mxfp8", marks=pytest.mark.slow)])
def test_different_formats(gfx950: torch.device, m: int, a: str, b: str) -> None:
    check(inputs(gfx950, m, 608, 40, a, b, bias=torch.float32))


@pytest.mark.parametrize(
    ("m", "k", "n", "a_scale", "b_scale"),
    [
        (7, 96, 40, "token", "channel"),
        pytest.param(5, 6144, 24, "tensor", "channel", marks=pytest.mark.slow),
        pytest.param(40, 672, 48, "tensor", "tensor", marks=pytest.mark.slow),
        pytest.param(130, 1184, 140, "token", "tensor", marks=pytest.mark.slow),
        pytest.param(130, 1184, 140, "token", "channel", marks=pytest.mark.slow),
    ],
)
def test_fp8(gfx950: torch.device, m: int, k: int, n: int, a_scale: str, b_scale: str) -> None:
    make = fp8(m, k, n, a_scale=a_scale, b_scale=b_scale, out_dtype=torch.float32, bias=torch.float32)
    check(make(Draw(gfx950, m)))


@pytest.mark.slow
@pytest.mark.parametrize("k", [96, 416, 608, 1184])
def test_one_tile_per_compute_unit(emulator: Any, compute_units: Any, k: int) -> None:
    """MFMAs of tiles of 128 x 128 alternate with reads from LDS: other formats and scales, a bias, few blocks of k, no spills."""
    compute_units(7)
    check(inputs(torch.device("cpu"), 140, k, 130, "mxfp4", "mxfp8", bias=torch.float32))
    make = fp8(140, k, 130, a_scale="token", b_scale="channel", out_dtype=torch.float32, bias=torch.float32)
    check(make(Draw(torch.device("cpu"), k)))
    for launch in emulator.launches:
        assert not any(spills(launch.program.assembly.text).values())


@pytest.mark.slow
def test_e5m2(gfx950: torch.device) -> None:
    arguments = inputs(gfx950, 8, 160, 24)
    arguments["b"] = arguments["b"].mT.float().to(torch.float8_e5m2).mT
    check(arguments)


@pytest.mark.slow
def test_every_exponent(gfx950: torch.device) -> None:
    """Scales of all magnitudes that keep dequantised elements finite, and NaN (255)."""
    arguments = inputs(gfx950, 16, 256, 16)
    arguments["a_scale"] = torch.arange(128, device=gfx950).view(16, 8).to(torch.uint8)
    arguments["b_scale"] = (240 - torch.arange(128, device=gfx950).view(16, 8)).to(torch.uint8).T
    got, wanted = mm(**arguments), reference(arguments).float()
    assert torch.allclose(got, wanted, rtol=1e-5, atol=0)
    arguments["a_scale"][3, 2] = 255
    assert mm(**arguments).isnan().any(1).tolist() == [row == 3 for row in range(16)]


@pytest.mark.slow
def test_other_strides(gfx950: torch.device) -> None:
    """Operands, scales and out are slices of wider tensors, or contiguous along another axis; a is not aligned."""
    arguments = inputs(gfx950, 6, 160, 24, bias=torch.float32)
    wanted = reference(arguments)
    arguments["a"] = torch.nn.functional.pad(arguments["a"].view(torch.uint8), (3, 2))[:, 3:-2].view(torch.float8_e4m3fn)
    arguments["b"] = arguments["b"].view(torch.uint8).contiguous().view(torch.float8_e4m3fn)
    arguments["a_scale"] = arguments["a_scale"].T.contiguous().T
    arguments["bias"] = arguments["bias"].repeat_interleave(2)[::2]
    wide = torch.full((6, 40), 7.0, device=gfx950)
    got = mm(**arguments, out=wide[:, 8:32])
    assert (got.double() - wanted).norm() <= ERROR * wanted.norm()
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 32:] == 7).all()


@pytest.mark.slow
def test_lines_that_are_far_apart(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands and outputs whose lines are too far apart for 32-bit offsets are copied."""
    monkeypatch.setattr(launcher, "FURTHEST", 16)
    arguments = inputs(gfx950, 6, 160, 24)
    out = torch.empty(6, 24, device=gfx950)
    assert check(arguments, out=out) is out


def test_one_launch_without_spills_and_bank_conflicts(emulator: Any) -> None:
    """One launch computes and merges the splits, and leaves the counters zero. The MFMAs are the scaled ones."""
    arguments = inputs(torch.device("cpu"), 3, 6144, 40)
    for _ in range(2):
        check(arguments)
    for launch in emulator.launches:
        text = launch.program.assembly.text
        assert "v_mfma_scale_f32_16x16x128_f8f6f4" in text
        assert not any(spills(text).values())
    assert len(emulator.launches) == 2


# -- the operator's cases, the conformance kit, and calls that are not eligible -------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow, *([pytest.mark.amd] if case.large else [])])
        for case in get_operator("gemm.mm").all_cases()
        if "mxfp" in case.name or "fp8 per t" in case.name
    ],
)
def test_a_case_of_the_operator(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, "mm_mx" if "mxfp" in case.name else "mm_fp8", case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mm_mx", "mm_fp8"])
def test_the_kit_finds_nothing(gfx950: torch.device, name: str) -> None:
    findings = conform(kernel_of(name), gfx950, Options(shrink_seconds=0))
    assert_none_wrong(findings)
    assert {"values", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}


@pytest.mark.parametrize(
    "make",
    [
        micro(5, 96, 40, a="dense", b="nvfp4"),
        micro(5, 96, 40, a="dense", b="mxfp4"),
    ],
    ids=["nvfp4 weight only", "weight only"],
)
def test_calls_that_are_not_served(gfx950: torch.device, make: Any) -> None:
    with pytest.raises(NoKernelFoundError, match=r"gluon_mm_mx +formats: "):
        mm(**make(Draw(gfx950, 0)))
