"""Tests autotuning: the first call of a description measures the kernels."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.tuned import tables
from tokenspeed_kernel.workbench.tuning import tune_case
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.platform import CapabilityRequirement, cpu_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import (
    NoKernelFoundError,
    SelectionPolicy,
    SelectionStrategy,
    set_selection_policy,
)


@pytest.fixture
def autotuning(lab: Any) -> None:
    set_selection_policy(SelectionPolicy(op_strategies={("testing", "lab"): SelectionStrategy.AUTOTUNE}, autotune_budget_s=0.3))


def test_autotune_measures_once_a_bucket(lab: Any, autotuning: None, folder: Path, tmp_path: Path) -> None:
    lab.register("steady", "growing")
    x, out = torch.ones(2, 4), torch.zeros(2, 4)
    assert lab.lab(x, out=out) is out
    assert torch.equal(x, torch.ones(2, 4))
    assert {name for name, _ in lab.calls()} == {"steady", "growing"}
    lab.calls().clear()
    for _ in range(3):
        lab.lab(x)
        lab.lab(torch.ones(2, 4), out=out)
    assert lab.calls() == [("growing", {})] * 6
    lab.calls().clear()
    lab.lab(torch.ones(64, 4))
    assert {name for name, _ in lab.calls()} == {"steady", "growing"}, "another bucket"
    assert lab.serving(50) == "steady"
    lab.calls().clear()
    lab.lab(torch.ones(50, 4))
    assert lab.calls() == [("steady", {})]
    assert len(tuned.read_table(lab.table())) == 2
    assert lab.in_a_new_process()[0] == "growing steady steady"


def test_autotune_does_not_touch_what_the_caller_passed(declare: Callable[..., Any], lab: Any, registry: KernelRegistry) -> None:
    def accumulate(x: torch.Tensor, total: torch.Tensor) -> None:
        total += x

    op = declare(accumulate, formats=("x",), mutates=("total",), outs=())
    mode = op.operator.mode
    op.fake(lambda: None)
    register_kernel("testing", mode, name="writing", solution="lab", signatures=None, tunables={"wait": [300, 1000]})(
        "lab_kernels:writing"
    )
    set_selection_policy(SelectionPolicy(SelectionStrategy.AUTOTUNE, autotune_budget_s=0.3))
    x, total = torch.ones(4), torch.zeros(4)
    op(x, total)
    assert len(lab.calls()) > 10
    assert torch.equal(total, torch.ones(4))
    assert lab.calls()[-1] == ("writing", {"wait": 300})


def test_autotune_rejects_differing_results(lab: Any, autotuning: None) -> None:
    register_kernel(
        "testing", "lab", name="settable", solution="lab", signatures=None, traits={"width": any},
        tunables={"wait": [300], "wrong": [True]},
    )("lab_kernels:settable")  # fmt: skip
    x = torch.ones(2, 4)
    assert torch.equal(lab.lab(x), x + 1)
    assert torch.equal(lab.lab(x), x + 1)
    assert dict(lab.lab.explain(x).verdicts[0].config) == {}


def test_autotune_waits_until_a_graph_is_captured(lab: Any, autotuning: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.register("steady", "growing")
    x = torch.ones(2, 4)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.warns(UserWarning, match=r"testing.lab is not measured: .* captured"):
            lab.lab(x)
        lab.lab(x)
    assert lab.calls() == [("steady", {})] * 2, "as without AUTOTUNE"
    lab.lab(x)
    assert len(lab.calls()) > 5, "now it measures"
    lab.calls().clear()
    lab.lab(x)
    assert lab.calls() == [("growing", {})]


def test_autotune_says_when_copies_do_not_fit(lab: Any, autotuning: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["tokenspeed_kernel.workbench.tuning.autotune"]
    lab.register("steady", "growing")
    monkeypatch.setattr(module, "_COPIED_BYTES", 10)
    with pytest.warns(UserWarning, match="copies of out would take"):
        lab.lab(torch.ones(3, 4), out=torch.ones(3, 4))


def test_autotune_has_nothing_to_do_for_one_candidate(lab: Any, autotuning: None, folder: Path) -> None:
    lab.register("steady")
    lab.lab(torch.ones(2, 4))
    assert lab.calls() == [("steady", {})]
    assert lab.lab(torch.ones(0, 4)).shape == (0, 4)
    assert not folder.exists()


@pytest.mark.parametrize("good_for", [0, 1, 20])
def test_autotune_survives_kernels_that_fail(lab: Any, autotuning: None, good_for: int) -> None:
    lab.register("steady", "growing")
    register_kernel(
        "testing", "lab", name="fragile", solution="lab", signatures=None, traits={"width": any}, priority=1,
        tunables={"good_for": [good_for]},
    )("lab_kernels:fragile")  # fmt: skip
    importlib.import_module("lab_kernels").fragile.__kwdefaults__["good_for"] = good_for
    x = torch.ones(2, 4)
    assert torch.equal(lab.lab(x), x + 1)
    assert lab.serving(2) == "growing"


def test_threads_measure_once(lab: Any, autotuning: None) -> None:
    lab.register("steady", "growing")
    measured: list[int] = []
    original = tables.record

    def record(entry: Any) -> Any:
        measured.append(1)
        return original(entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "record", record)
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda _: lab.lab(torch.ones(2, 4)), range(8)))
    assert all(torch.equal(result, torch.full((2, 4), 2.0)) for result in results)
    assert measured == [1]


def test_no_kernel_is_still_an_error_under_autotune(lab: Any, autotuning: None) -> None:
    with pytest.raises(NoKernelFoundError):
        lab.lab(torch.ones(2, 4), solution="nothing")


def test_a_case_with_one_candidate_is_reported(lab: Any) -> None:
    case = Case("one", lambda draw: {"x": draw.normal(2, 4)})
    assert [o.reason for o in tune_case("testing.lab", case, "cpu")] == ["the operator has no kernel but the reference"]
    amd = CapabilityRequirement(vendors=frozenset({"amd"}))
    register_kernel("testing", "lab", name="for_amd", solution="testing", signatures=None, capability=amd)(lambda x, out: x)
    reasons = ["no kernel but the reference is eligible: for_amd: platform: needs an AMD device, this is a CPU"]
    assert [o.reason for o in tune_case("testing.lab", case, "cpu")] == reasons
    KernelRegistry.get().unregister("for_amd")
    lab.register("steady")
    reasons = ["none of the kernels to measure is eligible: steady: not among the kernels that were named"]
    assert [o.reason for o in tune_case("testing.lab", case, "cpu", kernels=["other"])] == reasons
    assert [o.reason for o in tune_case("testing.lab", case, "cpu")] == ["steady is the only candidate, with nothing to tune"]
    with use_platform(dataclasses.replace(cpu_platform(), pretended=True)):
        assert "emulated or pretended" in tune_case("testing.lab", case, "cpu")[0].reason
