"""mm with fp8 operands that have block scales, and with 16-bit floats, compared with the dequantised operands' GEMM in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd import mm
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm._inputs import Make, dense, fp8
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands

from .paging import check_case, kernel_of, spills

ERROR = 1e-6  # relative error of a float32 result: dot products are accumulated in float32


def check(device: torch.device, make: Make) -> None:
    arguments = {**make(Draw(device, 0)), "out_dtype": torch.float32}
    a, b = decode_operands("mm", *(arguments.get(name) for name in ("a", "b", "a_scale", "b_scale")))
    wanted = a.double() @ b.double()
    if "bias" in arguments:
        wanted += arguments["bias"].double()
    assert (mm(**arguments).double() - wanted).norm() <= ERROR * wanted.norm()


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


@pytest.mark.slow
@pytest.mark.parametrize("m", [3, 130])
def test_large_k_of_blocks_without_spills(emulator: Any, m: int) -> None:
    check(torch.device("cpu"), blocks(m, 5120, 200))
    assert not any(spills(emulator.launches[0].program.assembly.text).values())


@pytest.mark.slow
def test_many_dense_rows_are_not_served(gfx950: torch.device) -> None:
    with pytest.raises(NoKernelFoundError, match="gluon_mm_few"):
        mm(**dense(65, 96, 40)(Draw(gfx950, 0)))


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(kernel, case, id=case.name, marks=[pytest.mark.slow, *([pytest.mark.amd] if case.large else [])])
        for kernel, found in (("mm_fp8_block", "fp8 per block"), ("mm_few", "dense"))
        for case in get_operator("gemm.mm").all_cases()
        if case.name.startswith(found)
    ],
)
def test_a_case_of_the_operator(gfx950: torch.device, kernel: str, case: Case) -> None:
    check_case(gfx950, kernel, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mm_fp8_block", "mm_few"])
def test_the_kit_finds_nothing(gfx950: torch.device, name: str) -> None:
    findings = conform(kernel_of(name), gfx950, Options(shrink_seconds=0))
    assert_none_wrong(findings)
    assert {"values", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}
