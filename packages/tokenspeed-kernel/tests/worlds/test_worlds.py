"""Tests functions that run in several processes: their results, their errors, and clean-up."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tokenspeed_kernel.workbench import tuned, worlds
from tokenspeed_kernel.workbench.benchmark.run import bench_case
from tokenspeed_kernel.workbench.numerics import CaseResult, Status, verify_case
from tokenspeed_kernel.workbench.tuning.autotune import autotune
from tokenspeed_kernel.workbench.tuning.tune import tune_case
from tokenspeed_kernel.workbench.worlds import WorldError, agreed, current_rank, current_size, gap, run_world
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.comm.all_reduce import all_reduce
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel

FOLDER = os.path.dirname(__file__)
GLOO = {"world_size": 2, "backend": "gloo"}


@pytest.fixture(autouse=True)
def _processes_find_this_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this module importable in other processes, and checks that no process is left. pytest imports the module without adding
    its folder to sys.path. The parent folder must not be added, because it has another module named triton."""
    monkeypatch.syspath_prepend(FOLDER)
    yield
    assert multiprocessing.active_children() == []


def test_a_process_that_is_alone() -> None:
    assert (current_rank(), current_size(), agreed(3.5)) == (0, 1, 3.5)
    assert gap(2, torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert gap(2, torch.device("cuda")) == "2 processes need a GPU each, there are 0"


# The functions that the processes run. One world of processes runs several tests, because starting it takes seconds.


def everything_that_works(name: str) -> dict[str, Any]:
    rank, group = dist.get_rank(), ProcessGroup.of()
    assert group is ProcessGroup.of(dist.group.WORLD)
    values = torch.arange(6.0).view(2, 3) + 10 * rank
    sums = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = values.to(dtype, copy=True)
        for _ in range(3):  # selected, and memoised
            total = all_reduce(x, group)
            assert torch.equal(x, values.to(dtype))
        out = torch.empty_like(x)
        assert all_reduce(x, group, out=out) is out
        assert torch.equal(out, total)
        assert all_reduce(x, group, x) is x
        assert torch.equal(x, total)
        sums[str(dtype)] = total.tolist()
    turned = all_reduce(values.t(), group)
    compiled = torch.compile(lambda x: all_reduce(x, group) + 1, fullgraph=True, backend="aot_eager")(values)
    chosen = all_reduce.explain(values, group)
    return {
        "name": name,
        "rank": (current_rank(), current_size(), group.rank, group.world_size),
        "sums": sums,
        "turned": turned.tolist(),
        "compiled": compiled.tolist(),
        "traits": dict(chosen.request.traits),
        "agreed": agreed(float(rank)),
        "environment": os.environ["WORLD_SIZE"],
    }


def everything_that_is_wrong() -> list[str]:
    """Makes calls that differ between ranks, and returns the errors. Errors after which the group still works come first."""
    rank, group = dist.get_rank(), ProcessGroup.of()
    said = []
    for x in (torch.ones(2 + rank), torch.ones(4, dtype=torch.float32 if rank else torch.bfloat16)):
        with pytest.raises(ValueError, match="every rank must make the same call") as caught:
            all_reduce(x, group)
        said.append(str(caught.value))
    if rank == 0:  # the other rank never comes
        group.time_limit_s = 1.0
        with pytest.raises(RuntimeError, match="waited 1 s for all ranks") as late:
            all_reduce(torch.ones(7), group)
        said.append(str(late.value))
    return said


def both_fail(text: str) -> Any:
    if dist.get_rank() == 1:
        raise KeyError(text)
    return lambda: "what cannot be pickled"


def wait_for_ever() -> None:
    threading.Event().wait()


def one_dies() -> None:
    """Kills the process of rank 1 while the other process waits forever, outside of the group's collectives."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if dist.get_rank() == 1:
        store.wait(["the other waits"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("the other waits", "")
    wait_for_ever()


def one_is_late() -> None:
    if dist.get_rank() == 1:
        wait_for_ever()


# -- worlds ------------------------------------------------------------------------------------------------------------------------


def test_a_world_returns_results() -> None:
    first, second = run_world(everything_that_works, 2, ("a world",))
    assert (first.pop("rank"), second.pop("rank")) == ((0, 2, 0, 2), (1, 2, 1, 2))
    assert first == second
    total = (2 * torch.arange(6.0).view(2, 3) + 10).tolist()
    assert first == {
        "name": "a world",
        "sums": dict.fromkeys(("torch.float32", "torch.bfloat16", "torch.int64"), total),
        "turned": torch.tensor(total).t().tolist(),
        "compiled": (torch.tensor(total) + 1).tolist(),
        "traits": {**GLOO, "link": "none", "protocol": "none: made by ProcessGroup.of, without peer memory"},
        "agreed": 1.0,
        "environment": "2",
    }


def test_ranks_that_do_not_agree() -> None:
    """Ranks whose calls differ must get an error at the first call of a description, before anything is sent."""
    (shapes, dtypes, late), second = run_world(everything_that_is_wrong, 2)
    assert [shapes, dtypes] == second
    assert "got all_reduce(x: float32 [2]) on rank 0, all_reduce(x: float32 [3]) on rank 1" in shapes
    assert "got all_reduce(x: bfloat16 [4]) on rank 0, all_reduce(x: float32 [4]) on rank 1" in dtypes
    assert "all_reduce(x: float32 [7]): rank 0 of 2 waited 1 s for all ranks to make this call for the first time" in late


def test_errors_come_with_their_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "_LINGER_S", math.inf)  # the world waits for the errors of all ranks
    with pytest.raises(WorldError, match=r"(?s)rank 1 of 2: .*in both_fail.*KeyError: 'a") as caught:
        run_world(both_fail, 2, ("a reason",))
    assert sorted(caught.value.ranks) == [0, 1]
    assert "both_fail.<locals>.<lambda>" in str(caught.value)


def test_the_others_do_not_wait_for_one_that_died() -> None:
    """When one process has died, the world must end with an error instead of waiting for the other process."""
    with pytest.raises(WorldError, match=r"^rank 1 of 2: ended without a result") as caught:
        run_world(one_dies, 2)
    assert caught.value.ranks == (1,)


@pytest.mark.slow
def test_time_is_limited() -> None:
    with pytest.raises(WorldError, match=r"rank .*1 of 2 was not done after 8 s") as caught:
        run_world(one_is_late, 2, time_limit_s=8.0)
    assert 1 in caught.value.ranks


# -- cases -------------------------------------------------------------------------------------------------------------------------


def test_a_case_for_two_is_verified_by_two() -> None:
    spec = KernelRegistry.get().get_by_name("reference_all_reduce")
    case = next(case for case in get_operator("all_reduce").all_cases() if case.world_size == 2 and not case.large)
    result = verify_case(spec, case, "cpu")
    wanted = {**GLOO, "link": "host memory", "protocol": "none: 4290 bytes are not a multiple of 16"}
    assert (result.status, result.traits) == (Status.PASSED, wanted), result.reason
    assert result.comparisons


def test_a_case_that_other_processes_cannot_find() -> None:
    spec = KernelRegistry.get().get_by_name("reference_all_reduce")
    case = Case("of this test", lambda draw: {"x": draw.normal(3), "group": ProcessGroup.of()}, world_size=2)
    result = verify_case(spec, case, "cpu")
    assert result.status is Status.SKIPPED
    assert result.reason == "world of 2: only cases that the operator declares can be found by other processes"


def test_errors_of_a_world_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelRegistry.get().get_by_name("reference_all_reduce")
    case = next(case for case in get_operator("all_reduce").all_cases() if case.world_size == 2 and not case.large)

    def failing(*args: Any, **options: Any) -> Any:
        raise WorldError("rank 1 of 2: Traceback...\nKeyError: 'a reason'", [1])

    monkeypatch.setattr(worlds, "run_world", failing)
    result = verify_case(spec, case, "cpu")
    assert (result.status, result.reason) == (Status.ERROR, "in a world of 2: KeyError: 'a reason'")
    assert "Traceback" in result.traceback

    good = CaseResult(spec.name, spec.operator, case.name, Status.PASSED)
    wrong = replace(good, status=Status.FAILED, reason="output: 1 element is wrong")
    monkeypatch.setattr(worlds, "run_world", lambda *args, **options: [good, wrong])
    result = verify_case(spec, case, "cpu")
    assert (result.status, result.reason) == (Status.FAILED, "rank 1 of 2: output: 1 element is wrong")


def test_a_case_for_two_is_timed_by_two() -> None:
    spec = KernelRegistry.get().get_by_name("reference_all_reduce")
    case = next(case for case in get_operator("all_reduce").all_cases() if case.world_size == 2 and not case.large)
    row = bench_case(spec, case, "cpu", budget_s=0.02, rounds=2)
    assert (row.status, row.reason) == ("measured", "")
    assert row.timing is not None
    assert len(row.timing.rounds) == len(row.reference_us) == 2
    assert row.gb_per_s is not None


def test_ranks_measure_nothing_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in get_operator("all_reduce").all_cases() if case.world_size == 2)
    (outcome,) = tune_case("comm.all_reduce", case, "cpu")
    assert outcome.reason == "it is for 2 processes, and only calls of one are measured"

    ran: list[int] = []
    options: dict[str, Any] = {"solution": "testing", "signatures": None, "tunables": {"n": [1, 2]}}

    @register_kernel("comm", "all_reduce", name="a_choice", traits={"world_size": any, "backend": any}, **options)
    def a_choice(x: torch.Tensor, group: Any, out: Any, *, n: int = 1) -> torch.Tensor:
        ran.append(n)
        return x.clone()

    class Two(ProcessGroup):
        def __init__(self) -> None:
            super().__init__(None)
            self.world_size, self.key = 2, (2, "none")

    monkeypatch.setattr(tuned, "record", lambda entry: None)
    op = get_operator("all_reduce")
    try:
        arguments = op.complete({"x": torch.ones(3), "group": Two()})
        assert autotune(op.request(arguments), arguments, 0.01) == ""
        assert not ran
        arguments["group"] = ProcessGroup.of()
        assert autotune(op.request(arguments), arguments, 0.01) == ""
        assert ran, "a group of one is measured"
    finally:
        KernelRegistry.get().unregister("a_choice")


# -- groups ------------------------------------------------------------------------------------------------------------------------


def test_a_group_of_one() -> None:
    group = ProcessGroup.of()
    assert (group.rank, group.world_size, group.backend, group.group) == (0, 1, "none", None)
    assert ProcessGroup.of() is group
    assert str(group) == "ProcessGroup(rank 0 of 1, none)"
    x = torch.randn(3, 4)
    total = all_reduce(x, group)
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr()
    with pytest.raises(TypeError, match=r"group must be .*ProcessGroup.*, got -100"):
        ProcessGroup.of(-100)  # type: ignore[arg-type]  # what new_group gives to ranks outside
    with pytest.raises(TypeError, match=r"all_reduce: group .* ProcessGroup, got NoneType"):
        all_reduce(x, None)
    with pytest.raises(ValueError, match="all_reduce: out must not overlap x"):
        all_reduce(x.flatten()[:8], group, x.flatten()[4:])
    with pytest.raises(TypeError, match=r"all_reduce: x must be a tensor of .*, got bool"):
        all_reduce(x > 0, group)


def test_a_group_that_was_destroyed() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = ProcessGroup.of()
        assert (group.world_size, group.backend, group.device) == (1, "gloo", None)
        assert group.group is dist.group.WORLD
    finally:
        dist.destroy_process_group()
    assert ProcessGroup.of().backend == "none"
    with pytest.raises(RuntimeError, match=r"ProcessGroup\(rank 0 of 1, gloo\) was destroyed"):
        _ = group.group
