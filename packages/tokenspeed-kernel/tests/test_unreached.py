"""Tests `tokenspeed_kernel.workbench.numerics.unreached`: verification must not pass a kernel that is eligible for no case."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import plugins
from tokenspeed_kernel.plugins import PluginInfo
from tokenspeed_kernel.workbench.numerics import Options, Status, conformance
from tokenspeed_kernel.workbench.numerics.conformance import CHECKS
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_base.traits import at_most

QUICK = Options(shrink_seconds=0)


def _double(x: Tensor, out: Tensor | None = None) -> Tensor:
    return 2 * x


@pytest.fixture
def op(declare: Callable[..., Any]) -> Any:
    function = declare(_double, formats=("x",), traits={"width": int, "odd": bool})
    function.traits(lambda x: {"width": x.shape[-1], "odd": bool(x.shape[-1] % 2)})
    function.fake(lambda x: torch.empty_like(x))
    function.cases(
        lambda: [
            Case("four", lambda draw: {"x": draw.normal(2, 4)}),
            Case("eight", lambda draw: {"x": draw.normal(2, 8)}),
            Case("wide", lambda draw: {"x": draw.normal(2, 64)}, large=True),
        ]
    )
    return function.operator


def registered(op: Any, name: str = "mine", **options: Any) -> KernelSpec:
    given = {"solution": "testing", "signatures": None, **options}

    @register_kernel(op.family, op.mode, name=name, **given)
    def _(x: Tensor, out: Tensor | None) -> Tensor:
        return torch.mul(x, 2, out=out)

    return KernelRegistry.get().get_by_name(name)


def test_a_kernel_that_no_case_reaches_says_why(op: Any) -> None:
    findings = conformance([registered(op, traits={"width": at_most(2)})], "cpu", options=QUICK)
    assert [finding.check for finding in findings] == [*CHECKS]
    first, *others = findings
    assert (first.status, first.wrong) == (Status.UNREACHED, True)
    assert first.detail == (
        f"no case of {op} reaches it: 2 of 2 fail the gate traits: width=4 is not at most 2 (and the like). "
        "Correct its declaration, or add a case to the operator"
    )
    assert {(other.status, other.detail) for other in others} == {(Status.SKIPPED, "no case reaches it")}


def test_each_gate_is_counted(op: Any) -> None:
    halves = format_signatures("x", "dense", {torch.float16})
    (first, *_) = conformance([registered(op, signatures=halves)], "cpu", options=QUICK)
    assert "2 of 2 fail the gate formats: x: float32 wanted, float16 offered." in first.detail
    op._hooks["cases"] = list
    (first, *_) = conformance([registered(op, "other", priority=1)], "cpu", options=QUICK)
    assert f"no case of {op} reaches it: {op} has none." in first.detail


def test_a_kernel_that_only_large_cases_reach_fails_without_them(op: Any) -> None:
    spec = registered(op, traits={"width": 64})
    findings = conformance([spec], "cpu", options=QUICK)
    assert {finding.status for finding in findings} == {Status.SKIPPED}
    assert {finding.detail for finding in findings} == {"only large cases reach it, 1 of 1: --large runs them"}
    (first, *_) = conformance([spec], "cpu", options=Options(shrink_seconds=0, large=True))
    assert (first.check, first.status) == ("values", Status.PASSED)


def test_a_kernel_that_the_machine_cannot_run_is_not_at_fault(op: Any) -> None:
    elsewhere = registered(op, traits={"width": 3}, capability=CapabilityRequirement(vendors=frozenset({"nvidia"})))
    named = registered(op, "named", only_by_name="its caller must be sure of something", priority=1)
    for spec in (elsewhere, named):
        assert not any(finding.wrong for finding in conformance([spec], "cpu", options=QUICK))


# -- the command -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def command() -> Callable[..., tuple[str, int]]:
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from typer.testing import CliRunner

    from tokenspeed_kernel_command.commands import app

    def call(*words: str) -> tuple[str, int]:
        result = CliRunner().invoke(app, ["verify", *words])
        return result.stdout, result.exit_code

    return call


def test_verify_fails_with_the_reason(op: Any, command: Any) -> None:
    registered(op, traits={"odd": True})
    text, code = command("mine")
    assert code == 1
    rows = [line for line in text.splitlines() if line.startswith("mine") and "  not reached  " in line]
    assert len(rows) == 1
    assert "all cases" in rows[0]
    said = f"no case of {op} reaches it: 2 of 2 fail the gate traits: odd=False is not True"
    assert said in rows[0]
    assert f"\nmine, all cases:\n  {said}. Correct its declaration" in text
    assert "2 skipped, 1 not reached on" in text
    found = json.loads(command("mine", "--json")[0])
    assert found["summary"]["not reached"] == 1
    assert found["results"][-1]["status"] == "not reached"


def test_verify_of_chosen_cases_need_not_reach_a_kernel(op: Any, command: Any) -> None:
    registered(op, traits={"width": 8})
    assert command("mine")[1] == 0
    for words in (("--case", "four"), ("--case", "four", "--conformance")):
        text, code = command("mine", *words)
        assert "not reached" not in text, words
        assert "nothing was verified" in text, words
        assert code == 1, words


def test_verify_of_a_plugin_fails(op: Any, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(op, traits={"odd": True})
    monkeypatch.setattr(plugins, "_loaded", {"sample": PluginInfo("sample", "sample-kernels", "1", 1, ("mine",))})
    text, code = command("--plugin", "sample")
    assert code == 1
    assert "not reached" in text


def test_verify_of_a_kernel_without_an_operator_fails(command: Any) -> None:
    register_kernel("norm", "rmsnrom", name="mine", solution="testing", signatures=None)("nowhere:kernel")
    for words in ((), ("--conformance",)):
        text, code = command("mine", *words)
        assert code == 1
        assert "no operator norm.rmsnrom; did you mean norm.rmsnorm?" in text
