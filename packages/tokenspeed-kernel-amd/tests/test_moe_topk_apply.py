"""Tests moe_topk_apply with mxfp4 weights. Routing is part of the first GEMM, or is a separate launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import moe_topk_apply as operator
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_amd.gfx950.moe.moe_apply import moe_apply
from tokenspeed_kernel_amd.gfx950.moe.moe_topk_apply import moe_topk_apply as launcher_of_moe_topk_apply
from tokenspeed_kernel_amd.gluon.choose import choose
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.launchers import unchecked
from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk

from .experts import GPT_OSS, REACHED, RandomLayer, mxfp4_cases, reaching, relative_error
from .paging import check_case, kernel_of, spills

moe_topk_apply = unchecked(operator, launcher_of_moe_topk_apply)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Kernels for logits of another dtype differ only in the loads of logits. So tests that run outside the slow sessions use bf16
# logits.
FEW_DTYPES = [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])]
# Tokens, experts and top-k of layers. In the first eight layers, the first GEMM routes. In the next three, the launch that sorts
# pairs routes.
SIZES = [
    *((1, 128, 4), (4, 8, 4), (16, 9, 4), (5, 9, 3), (2, 12, 8), (3, 5, 1), (24, 9, 2), (7, 300, 6)),
    *((21, 8, 4), (64, 128, 4), (100, 8, 8)),
    *((65, 128, 2), (20, 9, 3)),
]


def random_logits(tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Returns random logits with some ties. In the first row, all positive logits are equal."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens + experts)) * 2
    logits[0].clamp_(max=0.0)
    return logits.to(dtype)


@pytest.mark.parametrize("case", mxfp4_cases("moe_topk_apply"), ids=lambda case: case.name)
def test_cases(gfx950: torch.device, case: Case) -> None:
    check_case(gfx950, f"moe_topk_apply_mxfp4{'_float32_fp8' if case.name.endswith('float32') else ''}", case)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_choice(gfx950: torch.device, dtype: torch.dtype, renormalize: bool) -> None:
    """The chosen ids equal those of the operator's body. The logits include ties, zeros of both signs, infinities and NaN, and one
    case has more tokens than one workgroup routes."""
    for tokens, experts, top_k in ((1, 128, 4), (5, 8, 3), (37, 300, 6), (3, 1024, 8), (70, 4, 1), (9, 5, 5), (0, 8, 2)):
        logits = random_logits(max(tokens, 5), experts, dtype)[:tokens].to(gfx950)
        logits[1:2, 1::2], logits[1:2, ::2] = -0.0, 0.0
        logits[2:3, 2], logits[3:4, 1], logits[3:4, 0] = torch.nan, torch.inf, -torch.inf
        weights, ids = choose(logits, top_k, renormalize, 1.5)
        wanted = moe_topk.operator.body(logits, top_k, renormalize=renormalize, scaling_factor=1.5)
        assert torch.equal(ids, wanted[1])
        torch.testing.assert_close(weights, wanted[0], rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
def test_as_the_parts_do(gfx950: torch.device, tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    """The result of moe_topk_apply equals that of routing followed by moe_apply. Logits need not be contiguous."""
    layer = RandomLayer(gfx950, experts, top_k, 96, 64, activation_dtype="fp8", **GPT_OSS)
    x, _, _ = layer.tokens(tokens)
    logits = random_logits(tokens, 2 * experts, dtype).to(gfx950)[:, :experts]
    weights, ids = moe_topk.operator.body(logits, top_k)
    got = moe_topk_apply(x, logits, layer.prepared, layer.plan)
    # The top-k weights may differ in their last bit. Then the results may differ by one rounding to bf16.
    assert relative_error(got, moe_apply(x, layer.prepared, weights, ids, layer.plan).float()) <= 1e-3
    out = torch.full_like(got, torch.nan)
    assert moe_topk_apply(x, logits, layer.prepared, layer.plan, out=out) is out
    assert torch.equal(out, got)


def test_launches(emulator: Any) -> None:
    """Few tokens take two launches. Routing takes one more launch in two cases: if the padded pairs exceed the lanes of a wave, or
    if there are too many tokens for the launch that sorts."""
    layer = RandomLayer(torch.device("cpu"), 11, 3, 96, 64, activation_dtype="fp8_static")
    sorted_products = ["grouped_kernel", "grouped_kernel", "combine_kernel"]
    for tokens, wanted in (
        (16, ["routed_first_kernel", "second_kernel"]),
        (17, ["choose_kernel", "first_kernel", "second_kernel"]),
        (48, ["choose_and_route_kernel", *sorted_products]),
        (128, ["choose_and_route_kernel", *sorted_products]),
        (144, ["choose_kernel", "route_kernel", *sorted_products]),
    ):
        x, _, _ = layer.tokens(tokens)
        del emulator.launches[:]
        moe_topk_apply(x, random_logits(tokens, 11, torch.bfloat16), layer.prepared, layer.plan)
        assert [launch.kernel for launch in emulator.launches] == wanted


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("tokens", [1, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_compiled_code(emulator: Any, tokens: int, dtype: torch.dtype) -> None:
    """There are no spills and no loops around buffer instructions, because the compiler knows that the expert is uniform in a
    wave."""
    layer = RandomLayer(torch.device("cpu"), 128, 4, 2880, 32, activation_dtype="fp8", **GPT_OSS)
    x, _, _ = layer.tokens(tokens)
    moe_topk_apply(x, random_logits(tokens, 128, dtype), layer.prepared, layer.plan)
    text = emulator.launches[0].program.assembly.text
    assert not any(spills(text).values())
    assert "s_cbranch_execnz" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", REACHED)
def test_the_kit_finds_nothing_at_all(gfx950: torch.device, kind: str) -> None:
    cases = [reaching("moe_topk_apply", "mxfp4", kind)] if kind else None  # the operator's cases reach only the first kernel
    findings = conform(kernel_of(f"moe_topk_apply_mxfp4{kind}"), gfx950, Options(shrink_seconds=0), cases)
    assert_none_wrong(findings)
