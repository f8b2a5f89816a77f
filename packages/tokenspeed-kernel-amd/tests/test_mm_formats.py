"""mm with fp8 block scales, nvfp4 and 16-bit floats, compared with the dequantised operands' GEMM in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd import mm
from tokenspeed_kernel_amd.gfx950.gemm import mm as launcher
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm._inputs import Make, dense, fp8, micro
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands

from .paging import check_case, kernel_of, spills

ERROR = 1e-6  # relative error of a float32 result: dot products are accumulated in float32


def check(device: torch.device, make: Make) -> None:
    arguments = {**make(Draw(device, 0)), "out_dtype": torch.float32}
    a, b = decode_operands("mm", *(arguments.get(name) for name in ("a", "b", "a_scale", "b_scale")))
    wanted = a.double() @ b.double() * float(arguments.get("alpha", 1.0))
    if "bias" in arguments:
        wanted += arguments["bias"].double()
    assert (mm(**arguments).double() - wanted).norm() <= ERROR * wanted.norm()


def nvfp4(m: int, k: int, n: int, **options: Any) -> Make:
    return micro(m, k, n, a="nvfp4", b="nvfp4", **options)


def blocks(m: int, k: int, n: int, **options: Any) -> Make:
    return fp8(m, k, n, a_scale="block", b_scale="block", **options)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(blocks(5, 1184, 200), id="5 rows"),
        *(
            pytest.param(make, id=name, marks=pytest.mark.slow)
            for name, make in {
                "one block": blocks(5, 96, 48),
                "one row and one column": blocks(1, 160, 1),
                "7 splits": blocks(3, 6144, 40, bias=torch.float32),
                "70 rows": blocks(70, 672, 140),
                "130 rows, e5m2": blocks(130, 1184, 200, b_dtype=torch.float8_e5m2),
            }.items()
        ),
    ],
)
def test_blocks(gfx950: torch.device, make: Make) -> None:
    check(gfx950, make)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(dense(5, 1184, 40, bias=torch.float32), id="5 rows"),
        *(
            pytest.param(make, id=name, marks=pytest.mark.slow)
            for name, make in {
                "one row": dense(1, 96, 40),
                "splits": dense(3, 6144, 40),
                "40 rows, float16": dense(40, 672, 48, dtype=torch.float16),
                "64 rows": dense(64, 2080, 24),
            }.items()
        ),
    ],
)
def test_dense(gfx950: torch.device, make: Make) -> None:
    check(gfx950, make)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(nvfp4(5, 1184, 40, bias=torch.float32), id="5 rows"),
        *(
            pytest.param(make, id=name, marks=pytest.mark.slow)
            for name, make in {
                "one row": nvfp4(1, 96, 40),
                "one row and one column": nvfp4(1, 64, 1),
                "splits": nvfp4(3, 6144, 40),
                "chunks of scales": nvfp4(16, 8224, 24),
                "40 rows": nvfp4(40, 672, 48),
                "64 rows": nvfp4(64, 2080, 24),
            }.items()
        ),
    ],
)
def test_nvfp4(gfx950: torch.device, make: Make) -> None:
    check(gfx950, make)


@pytest.mark.slow
@pytest.mark.parametrize("m", [9, 20, 40])
def test_wide_tiles_of_nvfp4(emulator: Any, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    """The largest tiles, with more than one chunk of scales, fit into LDS."""
    monkeypatch.setattr(launcher, "current_compute_units", lambda: 3)
    check(torch.device("cpu"), nvfp4(m, 5152, 200))
    assert emulator.launches[0].lds <= 160 * 1024


@pytest.mark.slow
def test_nvfp4_with_all_codes_and_scales(emulator: Any) -> None:
    """Every code by every scale, and NaN scales, without spills."""
    arguments = nvfp4(16, 2048, 16, out_dtype=torch.float32)(Draw(torch.device("cpu"), 0))
    codes = torch.arange(16, dtype=torch.uint8)
    arguments["a"] = (codes | codes.flip(0) << 4).repeat_interleave(8)[None, :].repeat(16, 8)
    scales = torch.arange(128, dtype=torch.uint8)
    arguments["a_scale"] = torch.stack([scales.roll(row) for row in range(16)]).view(torch.float8_e4m3fn)
    a, b = decode_operands("mm", *(arguments[name] for name in ("a", "b", "a_scale", "b_scale")))
    wanted = a.double() @ b.double() * float(arguments["alpha"])
    assert wanted.isnan().all()  # every row has the scale 127: NaN
    assert mm(**arguments).isnan().all()
    arguments["a_scale"] = scales.clamp(max=126).view(torch.float8_e4m3fn)[None, :].repeat(16, 1)
    a, _ = decode_operands("mm", *(arguments[name] for name in ("a", "b", "a_scale", "b_scale")))
    wanted = a.double() @ b.double() * float(arguments["alpha"])
    assert (mm(**arguments).double() - wanted).norm() <= ERROR * wanted.norm()
    assert not any(spills(emulator.launches[0].program.assembly.text).values())


@pytest.mark.parametrize("k", [2592, *(pytest.param(k, marks=pytest.mark.slow) for k in (96, 416, 608, 1184, 4128))])
def test_blocks_of_one_tile_per_compute_unit(emulator: Any, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """The VALU scales the MFMAs' results during later MFMAs of a tile of 128 x 128: few blocks of k, many, and no spills."""
    monkeypatch.setattr(launcher, "current_compute_units", lambda: 7)
    check(torch.device("cpu"), blocks(140, k, 130, bias=torch.float32))
    (launch,) = emulator.launches
    assert launch.waves == 4
    assert not any(spills(launch.program.assembly.text).values())


@pytest.mark.slow
@pytest.mark.parametrize("m", [3, 130])
def test_large_k_of_blocks_without_spills(emulator: Any, m: int) -> None:
    check(torch.device("cpu"), blocks(m, 5120, 200))
    assert not any(spills(emulator.launches[0].program.assembly.text).values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), [("few", dense(65, 96, 40)), ("nvfp4", nvfp4(65, 96, 40))])
def test_many_rows_are_not_eligible(gfx950: torch.device, name: str, make: Make) -> None:
    with pytest.raises(NoKernelFoundError, match=f"gluon_mm_{name}"):
        mm(**make(Draw(gfx950, 0)))


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(kernel, case, id=case.name, marks=[pytest.mark.slow, *([pytest.mark.amd] if case.large else [])])
        for kernel, found in (("mm_fp8_block", "fp8 per block"), ("mm_few", "dense"), ("mm_nvfp4", "nvfp4"))
        for case in get_operator("gemm.mm").all_cases()
        if case.name.startswith(found)
    ],
)
def test_a_case_of_the_operator(gfx950: torch.device, kernel: str, case: Case) -> None:
    check_case(gfx950, kernel, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mm_fp8_block", "mm_few", "mm_nvfp4"])
def test_the_kit_finds_nothing(gfx950: torch.device, name: str) -> None:
    findings = conform(kernel_of(name), gfx950, Options(shrink_seconds=0))
    assert_none_wrong(findings)
    assert {"values", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}
