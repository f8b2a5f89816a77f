"""Tests portable kernels as Triton compiles them for Hopper, with cp.async, TMA and wgmma."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("sm90_emulator")
if torch.cuda.is_available():  # other tests in this process may launch programs on a GPU
    pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process", allow_module_level=True)

import tokenspeed_kernel
from sm90_emulator import emulated_sm90
from sm90_emulator.machine import LaunchReport
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.conformance.guards import LAYOUTS
from tokenspeed_kernel_base.cases import Recipe
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.parameters import NO_LIMIT, with_tensors
from tokenspeed_kernel_base.registry import KernelRegistry


def _launches(kernel: str, name: str, layout: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> list[LaunchReport]:
    """Verifies a kernel on a case of its operator, and returns the launches. Copies, MMAs and warps progress at random times."""
    spec = KernelRegistry.get().get_by_name(kernel)
    op = get_operator(spec.mode)
    (case,) = (case for case in op.all_cases() if case.name == name)
    drawn = case.make
    case = replace(case, make=lambda draw: with_tensors(op.parameters, op.complete(drawn(draw)), layout))
    with emulated_sm90(seed=1, triton=True) as emulator:
        result = verify_case(spec, case)
    assert result.status is Status.PASSED, result.reason
    assert emulator.launches
    return emulator.launches


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("gated_delta_rule_prefill", "odd sizes, float16, the last is padding"),
        ("gated_delta_rule_prefill", "odd sizes, a gate of each channel, float16"),
        ("gated_delta_rule_prefill", "one head of qwen3-next, 130 tokens"),
        ("ssd_prefill", "float16 and its states, head_dim 20, state_dim 24"),
        ("mla_sparse_with_kvcache", "deepseek-v3.2, 16 of its heads, top 192 of 300, a scale for each 128"),
        ("mla_decode_with_kvcache", "deepseek-v3.2, 16 of its heads, a scale for each 128"),
        ("mm", "fp8 per block, 258 tokens"),
        ("mm", "fp8 per token and channel, bias"),
    ],
)
def test_a_kernel_with_warpgroup_mma_agrees_with_the_reference_in_any_order(operator: str, name: str) -> None:
    assert any(launch.products for launch in _launches(f"triton_{operator}", name))


@pytest.mark.parametrize(("weights", "name"), [("fp8", "fp8 weight only, per channel"), ("mx", "mxfp4 weight only")])
def test_many_rows_meet_dequantised_weights(weights: str, name: str) -> None:
    """PyTorch's GEMM runs on the CPU, after the emulated kernel."""
    assert _launches(f"triton_mm_dequantised_{weights}", f"{name}, 600 tokens")


def test_a_repeated_launch_runs_on_its_own_tensors() -> None:
    x, weight = torch.randn(3, 5, 96).bfloat16(), torch.randn(96).bfloat16()
    with emulated_sm90(triton=True) as emulator, torch.no_grad():
        for rows in x:
            got = tokenspeed_kernel.rmsnorm(rows, weight, residual=x[0], override="triton_rmsnorm")
            wanted = tokenspeed_kernel.rmsnorm(rows, weight, residual=x[0], override="reference_rmsnorm")
            torch.testing.assert_close(got, wanted)
    assert len(emulator.launches) == len(x)


def test_tensor_descriptors_bring_tiles() -> None:
    launches = _launches("triton_mm", "fp8 per tensor, 130 tokens, bias")
    assert all(launch.copied_bytes and launch.products for launch in launches)


def test_an_fp8_cache_whose_elements_are_not_adjacent() -> None:
    """Tests a cache of every second element of a tensor. The kernel loads its rows one element at a time, with a mask if head_dim
    is not a power of two."""
    every_second = LAYOUTS["every second element"]
    assert _launches("triton_mha_decode_with_kvcache", "head_dim 80, fp8 cache, logit cap 5", every_second)


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("sample_top_k_top_p", "all of a small vocabulary"),
        ("adjust_logits", "inf, -inf, zeros, and entries out of range"),
        ("verify_draft_probs", "deepseek-v3, one draft"),
        ("verify_draft_probs", "probabilities of 1 and 0"),
        ("verify_draft_tokens", "a tree of 8 nodes"),
    ],
)
def test_a_kernel_without_mma_agrees_with_the_reference_in_any_order(operator: str, name: str) -> None:
    _launches(f"triton_{operator}", name)


@pytest.mark.parametrize("kernel", ["triton_rmsnorm_moe_topk", "triton_rmsnorm_qkv_rope_32"])
def test_rows_shorter_than_a_cache_line_are_prefetched(kernel: str) -> None:
    """Runs code that prefetches, which exists only for Hopper and later architectures. The interpreter and other GPUs never compile
    this code."""
    assert _launches(kernel, "a row shorter than a cache line")


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("mla_decode_with_kvcache", "deepseek-v3.2, 16 of its heads, a scale for each 128"),
        ("mha_decode_with_kvcache", "four new tokens, sinks and lse"),
    ],
)
@pytest.mark.parametrize("window_left", [NO_LIMIT - 1, pytest.param(2**31 - 1, marks=pytest.mark.slow)])
def test_windows_beyond_every_sequence(operator: str, name: str, window_left: int) -> None:
    (case,) = (case for case in get_operator(operator).all_cases() if case.name == name)
    assert isinstance(case.make, Recipe)
    with emulated_sm90(triton=True) as emulator:
        spec = KernelRegistry.get().get_by_name(f"triton_{operator}")
        result = verify_case(spec, replace(case, make=case.make.vary(window_left=window_left)))
    assert result.status is Status.PASSED, result.reason
    assert emulator.launches
