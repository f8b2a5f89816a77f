"""linear with quantised activations, compared with the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd import linear
from tokenspeed_kernel_amd.gfx950.gemm import linear as launcher
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm import linear as contract

from .paging import check_case, kernel_of, spills

WEIGHTS = {"mxfp8": "mxfp4", "mxfp4": "mxfp4", "fp8": "fp8_channel", "fp8_static": "fp8_channel", "fp8_block": "fp8_block"}
NAMES = {"mxfp8": "mxfp4_mxfp8", "mxfp4": "mxfp4_mxfp4"}
FEW, MANY = ["linear_kernel"], ["quantize_kernel", "mm_kernel"]
# Results are rounded to x's dtype, and accumulated in another order than the reference's.
ERROR = {torch.bfloat16: 1e-3, torch.float16: 1e-4}


def check(device: torch.device, tokens: int, k: int, n: int, activation_dtype: str, **options: Any) -> None:
    facts = {"weight_format": WEIGHTS[activation_dtype], "activation_dtype": activation_dtype, **options}
    plan = linear.plan(k, n, **facts)
    assert plan.kernel == f"gluon_linear_{NAMES.get(activation_dtype, activation_dtype)}"
    x, weights = contract._drawn(Draw(device, tokens), tokens, plan)
    x[:, :40] *= 100  # blocks have different scales
    got = linear(x, linear.prepare(weights, plan), plan)
    reference = dataclasses.replace(plan, kernel="reference_linear", weight_layout="canonical")
    wanted = contract.linear(x, weights, reference, override="reference_linear").double()
    assert (got.double() - wanted).norm() <= ERROR[plan.dtype] * wanted.norm()


@pytest.mark.parametrize(
    ("tokens", "activation_dtype"),
    [
        pytest.param(tokens, dtype, marks=[] if (tokens, dtype) == (3, "mxfp8") else pytest.mark.slow)
        for tokens in (1, 3, 16, 20)
        for dtype in WEIGHTS
    ],
)
def test_formats(gfx950: torch.device, tokens: int, activation_dtype: str) -> None:
    check(gfx950, tokens, 672, 200, activation_dtype, bias=True)


@pytest.mark.slow
@pytest.mark.parametrize("activation_dtype", WEIGHTS)
def test_long_rows(gfx950: torch.device, activation_dtype: str) -> None:
    """Blocks of k after the ring's first, several chunks of scales, and float16."""
    check(gfx950, 2, 8224, 40, activation_dtype, dtype=torch.float16)


@pytest.mark.parametrize(
    ("tokens", "activation_dtype", "kernels"),
    [
        (5, "fp8", FEW),
        *(pytest.param(5, dtype, FEW, marks=pytest.mark.slow) for dtype in ("mxfp8", "mxfp4", "fp8_static", "fp8_block")),
        *(pytest.param(17, dtype, MANY, marks=pytest.mark.slow) for dtype in WEIGHTS),
    ],
)
def test_launches_without_spills(emulator: Any, tokens: int, activation_dtype: str, kernels: list[str]) -> None:
    check(torch.device("cpu"), tokens, 160, 48, activation_dtype)
    assert [launch.kernel for launch in emulator.launches] == kernels
    for launch in emulator.launches:
        assert not any(spills(launch.program.assembly.text).values())


@pytest.mark.slow
def test_the_most_elements_without_spills(emulator: Any) -> None:
    """With a scale per token, registers and LDS hold all tokens of a tile before they are quantised."""
    for activation_dtype in WEIGHTS:
        k = launcher.MOST_ELEMENTS // (16 if activation_dtype == "fp8" else 8)
        check(torch.device("cpu"), 16, k, 16, activation_dtype)
        assert emulator.launches[-1].kernel == "linear_kernel"
        assert not any(spills(emulator.launches[-1].program.assembly.text).values())


@pytest.mark.slow
@pytest.mark.parametrize("activation_dtype", WEIGHTS)
def test_two_tiles_of_tokens_and_two_pipeline_stages(
    gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, activation_dtype: str
) -> None:
    sizes = {"mxfp8": 80, "mxfp4": 80, "fp8": 144}
    monkeypatch.setattr(launcher, "RING_BYTES", sizes.get(activation_dtype, 110) * 1024)
    monkeypatch.setattr(launcher, "current_compute_units", lambda: 4)  # 32 columns per tile
    facts = {"weight_format": WEIGHTS[activation_dtype], "activation_dtype": activation_dtype}
    config = launcher.few_config(13, linear.plan(3168, 70, **facts), "e2m1" if "mx" in activation_dtype else "e4m3")
    assert config is not None
    assert config.stages == 2
    check(gfx950, 13, 3168, 70, activation_dtype, bias=True, dtype=torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("activation_dtype", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [2, 17])
def test_a_token_with_an_infinity_is_nan(gfx950: torch.device, tokens: int, activation_dtype: str) -> None:
    plan = linear.plan(160, 40, weight_format="mxfp4", activation_dtype=activation_dtype)
    x, weights = contract._drawn(Draw(gfx950, 0), tokens, plan)
    x[1, 37] = torch.inf
    x[0, 32:64] = 0
    got = linear(x, linear.prepare(weights, plan), plan)
    assert got.isnan().all(1).tolist() == [token == 1 for token in range(tokens)]


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(kernel, case, id=f"{kernel} {case.name}", marks=[pytest.mark.slow, *([pytest.mark.amd] * case.large)])
        for kernel in ("mxfp4_mxfp8", "mxfp4_mxfp4", "fp8", "fp8_static", "fp8_block")
        for case in get_operator("gemm.linear").all_cases()
        if "activations" in case.name or "in all" in case.name
    ],
)
def test_a_case_of_the_operator(gfx950: torch.device, kernel: str, case: Case) -> None:
    check_case(gfx950, f"linear_{kernel}", case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp4_mxfp8", "fp8_block"])
def test_the_kit_finds_nothing(gfx950: torch.device, name: str) -> None:
    assert_none_wrong(conform(kernel_of(f"linear_{name}"), gfx950, Options(shrink_seconds=0)))
