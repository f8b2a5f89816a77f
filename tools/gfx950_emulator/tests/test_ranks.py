"""Tests multi-GPU kernels on two processes, each of which emulates a GPU. The memory that the kernels write to is a file that both
processes map."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenspeed_kernel as tk
from gfx950_emulator import Emulator, emulated_gfx950
from tokenspeed_kernel.workbench.numerics import CaseResult, Status, verify_case
from tokenspeed_kernel.workbench.worlds import run_world
from tokenspeed_kernel_base.operator import Operator, operators
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.registry import KernelRegistry

# Each workgroup runs in a batch of its own. In a common batch, a workgroup that waits for another rank could block the workgroup
# for which that rank waits.
ONE_WORKGROUP = 256


@pytest.fixture(autouse=True)
def _processes_find_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def reach_peers(emulator: Emulator, group: ProcessGroup) -> None:
    assert group.peers is not None
    for rank, memory in enumerate(group.peers.memory):
        emulator.share(memory, f"memory of rank {rank}")


def comm_operators() -> list[Operator[Any, Any]]:
    return [op for op in operators() if op.family == "comm"]


def cases_of_two(fast: bool) -> dict[str, list[CaseResult]]:
    """Runs each kernel on the small cases for two ranks; if `fast`, only up to the first case that passes."""
    group, found = ProcessGroup.with_peer_memory(), dict[str, list[CaseResult]]()
    with emulated_gfx950(batch_lanes=ONE_WORKGROUP) as emulator:
        reach_peers(emulator, group)
        for op in comm_operators():
            cases = [case for case in op.all_cases() if case.world_size == dist.get_world_size() and not case.large]
            for spec in KernelRegistry.get().get_for_operator(op.family, op.mode):
                if spec.solution != "triton":
                    continue
                results = found.setdefault(spec.name, [])
                for case in cases:
                    results.append(verify_case(spec, case))
                    if fast and results[-1].status is Status.PASSED:
                        break
        assert emulator.launches
    return found


def two_shots() -> list[bool]:
    """Returns, for consecutive two-shot all-reduces in reused memory, whether each result is correct. With two ranks, selection
    never uses the two-shot variant."""
    group, right = ProcessGroup.with_peer_memory(one_shot_bytes=1 << 16, two_shot_bytes=1 << 16), []
    generator = torch.Generator().manual_seed(0)
    with emulated_gfx950(batch_lanes=ONE_WORKGROUP) as emulator:
        reach_peers(emulator, group)
        for rows, hidden in ((3, 264), (1, 64), (5, 264)):
            every = torch.randint(-8, 9, (group.world_size, rows, hidden), generator=generator).half()
            x, residual, weight = every[group.rank].clone(), every[0] + every[1], torch.ones(hidden).half()
            normed, summed = tk.all_reduce_rmsnorm(
                x, weight, group, residual=residual, override="triton_two_shot_all_reduce_rmsnorm"
            )
            wanted = torch.nn.functional.rms_norm(summed.float(), (hidden,), eps=1e-5)
            right.append(torch.equal(summed, 2 * residual) and torch.allclose(normed.float(), wanted, rtol=2e-3, atol=1e-3))
            right.append(torch.equal(tk.all_reduce(x, group, override="triton_two_shot_all_reduce"), residual))
    return right


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_kernel_on_cases_for_two(fast: bool) -> None:
    for outcomes in run_world(cases_of_two, 2, (fast,)):
        assert [f"{e.kernel} on {e.case}: {e.reason}" for results in outcomes.values() for e in results if e.wrong] == []
        passed = {name for name, results in outcomes.items() if any(each.status is Status.PASSED for each in results)}
        assert {name for name in outcomes if "two_shot" in name} == outcomes.keys() - passed


def test_two_shots() -> None:
    assert run_world(two_shots, 2) == [[True] * 6] * 2
