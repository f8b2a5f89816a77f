"""Tests norms of vLLM's IR that run on the core's kernel. vLLM's own priorities select the kernel. The norms are called directly,
and lowered by vLLM's pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("tokenspeed_kernel", reason="norms are the core's")

from torch.fx.experimental.proxy_tensor import make_fx
from vllm import ir
from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass

import tokenspeed_kernel_vllm
from tokenspeed_kernel_vllm.norms import PROVIDER

NORMS = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)


@pytest.fixture
def preferred(vllm_config: Any) -> Iterator[Any]:
    """Sets the priority in the same way as ``--ir-op-priority``."""
    tokenspeed_kernel_vllm.register()
    with contextlib.ExitStack() as stack:
        for norm in NORMS:
            stack.enter_context(norm.set_priority([PROVIDER, "native"]))
        yield vllm_config


def inputs(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(rows, 96, generator=draw).bfloat16() for _ in range(2))
    return x, residual, torch.randn(96, generator=draw).bfloat16()


def both(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    normed = ir.ops.rms_norm(x, weight, 1e-5, None)
    return normed, *ir.ops.fused_add_rms_norm(normed, residual, weight, 1e-5, None)


def test_results_are_vllms_own(preferred: Any) -> None:
    x, residual, weight = inputs()
    assert ir.ops.rms_norm.dispatch(x, weight, 1e-5).provider == PROVIDER
    assert ir.ops.fused_add_rms_norm.dispatch(x, residual, weight, 1e-5).provider == PROVIDER
    normed, again, total = both(x, residual, weight)
    torch.testing.assert_close(normed, ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-5))
    expected, sums = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(normed, residual, weight, 1e-5)
    torch.testing.assert_close(again, expected)
    assert torch.equal(total, sums)


def test_what_is_not_served_is_vllms_own(preferred: Any) -> None:
    x, residual, weight = inputs()
    assert ir.ops.rms_norm.dispatch(x, None, 1e-5).provider == "native"
    assert ir.ops.rms_norm.dispatch(x, weight.float(), 1e-5).provider == "native"
    assert ir.ops.rms_norm.dispatch(x, weight, 1e-5, 48).provider == "native"
    assert ir.ops.fused_add_rms_norm.dispatch(x, residual.float(), weight, 1e-5).provider == "native"


def test_it_is_lowered_by_vllms_pass(preferred: Any) -> None:
    x, residual, weight = inputs()
    expected = both(x, residual, weight)
    traced = make_fx(both, tracing_mode="symbolic")(x, residual, weight)
    lowering = VllmIRLoweringPass(preferred)
    lowering(traced.graph)
    traced.recompile()
    assert {provider for chosen in lowering.selected_impls.values() for provider in chosen.values()} == {PROVIDER}
    assert "vllm_ir" not in traced.code
    for rows in (5, 9):
        given = inputs(rows)
        for got, wanted in zip(traced(*given), expected if rows == 5 else both(*given), strict=True):
            assert torch.equal(got, wanted)


def test_vllm_keeps_its_own_unless_it_is_told(vllm_config: Any) -> None:
    tokenspeed_kernel_vllm.register()
    tokenspeed_kernel_vllm.register()
    x, _, weight = inputs()
    with ir.ops.rms_norm.set_priority(["native"]):
        assert ir.ops.rms_norm.dispatch(x, weight, 1e-5).provider == "native"
