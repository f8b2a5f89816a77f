"""Tests the core's portable Triton kernels on the emulated MI355X and MI300X, with the sanitizer on. Results are compared with the
operators' references, by the operators' tolerances."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from gfx950_emulator import Emulator, emulated, emulated_gfx950
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.verify import refusal
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.platform import current_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

CPU = torch.device("cpu")
# The number of a kernel's cases that run by default: the last, the first, and others evenly spaced between them. The remaining
# cases are marked slow. The architectures have most of their instructions in common.
FAST = {"gfx950": 2, "gfx942": 1}
# Cases of ten million wave instructions: one that searches down to the last bit, and one with long prompts.
HEAVY = ("ties across top-k and top-p", "deepseek-v3, 16 of its heads, 1 to 100 new")


def _runs(arch: str) -> list[Any]:
    """Returns triples of the architecture, a kernel, and an eligible case on its emulated platform. The platform determines the
    layout of a case's weights."""
    runs = []
    with emulated(arch):
        for op in operators():
            cases = {case: op.complete(case.build(CPU)) for case in op.all_cases() if not case.large}
            for spec in KernelRegistry.get().get_for_operator(op.family, op.mode):
                if spec.solution != "triton" or spec.family == "comm":  # `test_ranks` has the kernels for several processes
                    continue
                taken = [case for case, arguments in cases.items() if refusal(op, spec, arguments) is None]
                assert taken, f"no case reaches {spec.name}"
                step = max(1, (len(taken) - 1) // max(1, FAST[arch] - 1))
                fast = {case.name for case in [*taken[::step][: FAST[arch] - 1], taken[-1]]}
                for case in taken:
                    marks = [] if case.name in fast and case.name not in HEAVY else [pytest.mark.slow]
                    runs.append(pytest.param(arch, spec, case, marks=marks, id=f"{arch}-{spec.name}-{case.name}"))
    return runs


@pytest.mark.parametrize(("arch", "spec", "case"), [run for arch in FAST for run in _runs(arch)])
def test_a_kernel_agrees_with_the_reference(arch: str, spec: KernelSpec, case: Case) -> None:
    with emulated(arch) as emulator:
        result = verify_case(spec, case, CPU)
    assert result.status is Status.PASSED, f"{result.reason}\n{result.traceback}"
    assert result.comparisons, "something was compared"
    idle = any(word in case.name for word in ("empty", "no ", "nothing"))
    assert emulator.launches or idle, "the emulator executed nothing"


@pytest.mark.parametrize(("arch", "name"), [("gfx950", "AMD Instinct MI355X"), ("gfx942", "AMD Instinct MI300X")])
def test_the_platform_is_an_emulated_device(arch: str, name: str) -> None:
    outside = current_platform()
    with emulated(arch):
        inside = current_platform()
        x = torch.randn(3, 64)
        assert "triton_rmsnorm" in str(tk.rmsnorm.explain(x, torch.ones(64)))
    assert (inside.arch, inside.device_name, inside.emulated, inside.is_amd) == (arch, name, True, True)
    assert current_platform() == outside


def test_the_public_api_selects_and_runs() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 128), torch.randn(128)
    expected = tk.rmsnorm(x, weight)
    with emulated_gfx950() as emulator:
        result = tk.rmsnorm(x, weight)
    assert [launch.kernel for launch in emulator.launches], "a kernel was launched"
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_division_among_processes_changes_nothing() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(300, 4, 64, dtype=torch.bfloat16), torch.randn(300, 1, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 300], dtype=torch.int32)
    results = []
    for jobs in (1, 2):
        with emulated_gfx950(jobs=jobs, batch_lanes=1024) as emulator:
            assert isinstance(emulator, Emulator)
            results.append(tk.mha_prefill(q, k, k, cu, max_seqlen=300))
    assert torch.equal(*results)


def test_matrix_instructions_in_loops_whose_lanes_have_left() -> None:
    """Results are correct if one sequence has no keys, so that its lanes are inactive while MFMAs run. MFMAs ignore EXEC."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, 2, width).half() for tokens, width in ((8, 24), (7, 24), (7, 16)))
    cu, cu_kv = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 3, 8], [0, 0, 7]))
    expected = tk.mla_prefill(q, k, v, cu, cu_seqlens_kv=cu_kv)
    with emulated_gfx950() as emulator:
        result = tk.mla_prefill(q, k, v, cu, cu_seqlens_kv=cu_kv, override="triton_mla_prefill")
    assert emulator.launches
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)
    assert not result[:3].any()


def test_states_that_lie_transposed_in_a_tile_smaller_than_a_workgroup() -> None:
    """Results are correct if several waves hold copies of the state, and the lanes of a row add the elements in different
    orders."""
    torch.manual_seed(0)
    x, b, c = torch.randn(1, 1, 2, 8).half(), torch.randn(1, 1, 1, 16).half(), torch.randn(1, 1, 1, 16).half()
    states = torch.randn(1, 2, 16, 8).transpose(2, 3)
    arguments = (x, torch.rand(1, 1, 2).half(), -torch.rand(2), b, c)
    kept, slots = states.clone(), torch.zeros(1, dtype=torch.int32)
    expected = tk.ssd_decode(*arguments, kept, slots)
    with emulated_gfx950() as emulator:
        result = tk.ssd_decode(*arguments, states, slots, override="triton_ssd_decode")
    assert emulator.launches
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(states, kept)
