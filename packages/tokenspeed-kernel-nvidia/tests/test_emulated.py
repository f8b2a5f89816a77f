"""Kernels on cases of their operators, executed by the emulator where there is no GPU: host code, PTX, and results."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("sm90_emulator")

import tokenspeed_kernel  # noqa: F401  - registers the kernels
from sm90_emulator import emulated_sm90
from tokenspeed_kernel.workbench.numerics.verify import verify_case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.registry import KernelRegistry

# A small case of each program that `test_*_ptx` do not execute.
CASES = [
    ("cutedsl_mha_decode_with_kvcache_64", "four new tokens, sinks and lse"),
    ("cutedsl_mha_decode_with_kvcache_64", "freed pages before a window"),
    ("cutedsl_mha_decode_with_kvcache_wide_64", "sixteen query heads a key head"),
    ("cutedsl_mha_extend_with_kvcache_64", "not causal, lse"),
    ("cutedsl_mha_extend_with_kvcache_64", "NaN in slots that hold no token"),
    ("cutedsl_mha_prefill_64", "lengths known on the host"),
    ("cutedsl_mha_extend_with_kvcache_window_64", "freed pages before a window"),
    ("cutedsl_mha_prefill_window_64", "window of the token alone"),
    pytest.param("cutedsl_mha_decode_with_kvcache_128", "four new tokens, head_dim 128, pages of 64", marks=pytest.mark.slow),
    pytest.param("cutedsl_mha_prefill_window_128", "head_dim 128 in a window of 100", marks=pytest.mark.slow),
    pytest.param("cutedsl_mha_prefill_128", "llama-70b, 1 to 150 tokens, lse", marks=pytest.mark.slow),
    pytest.param("cutedsl_mha_extend_with_kvcache_128", "llama-70b, pages of 32", marks=pytest.mark.slow),
    pytest.param("cutedsl_mha_prefill_64", "gpt-oss-120b full layer, 1 to 100 tokens", marks=pytest.mark.slow),
    pytest.param("cutedsl_mm_bfloat16", "dense, bfloat16 with float32 bias", marks=pytest.mark.slow),
    pytest.param("cutedsl_rmsnorm_qkv_rope_64", "gpt-oss-120b heads, narrow, decode 2 with cache", marks=pytest.mark.slow),
    pytest.param("cutedsl_moe_apply_mxfp4", "mxfp4, gpt-oss options", marks=pytest.mark.slow),
    pytest.param("cutedsl_moe_apply_mxfp4_fp8", "mxfp4, concatenated, fp8 activations", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kernel", "name"), CASES)
def test_cases(kernel: str, name: str) -> None:
    """Once in order, and with warps, copies and products of warpgroups at random times."""
    spec = KernelRegistry.get().get_by_name(kernel)
    case = next(case for case in get_operator(spec.operator).all_cases() if case.name == name)
    for seed in (0, 1):
        with emulated_sm90(seed=seed) as emulator:
            result = verify_case(spec, case)
        assert result.status.value == "passed", result.reason
        assert emulator.launches


def test_late_copies_and_products() -> None:
    """What is as late as it may be changes nothing."""
    spec = KernelRegistry.get().get_by_name("cutedsl_mha_prefill_64")
    case = next(case for case in get_operator(spec.operator).all_cases() if case.name == "lengths known on the host")
    with emulated_sm90(copies="late"):
        result = verify_case(spec, case)
    assert result.status.value == "passed", result.reason
