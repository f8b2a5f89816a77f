"""The self-check must find a planted wrong kernel, disable it, and check the kernel that is selected instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench import self_check as checking
from tokenspeed_kernel.workbench.numerics import CaseResult, Status
from tokenspeed_kernel.workbench.receipts import Receipt, receipt
from tokenspeed_kernel_base import selection
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.spec import KernelSpec

Body = Callable[..., Any]


@pytest.fixture
def plant() -> Iterator[Callable[..., None]]:
    """Returns a function that registers a kernel of rmsnorm for one test."""
    names: list[str] = []

    def register(name: str, body: Body, **declared: Any) -> None:
        names.append(name)
        traits = {"residual": any, "wide_residual": any}
        register_kernel("norm", "rmsnorm", name=name, solution="planted", signatures=None, traits=traits, **declared)(body)

    yield register
    for name in names:
        KernelRegistry.get().unregister(name)


def _right(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any) -> Any:
    return tk.rmsnorm.operator.reference(x, weight, eps, residual, out, residual_out)


def _wrong(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any) -> Any:
    made = _right(x, weight, eps, residual, out, residual_out)
    (made if residual is None else made[0])[..., -1:] += 1  # one wrong column, as if a compiler forgot a mask
    return made


def _receipt() -> Receipt:
    """Makes the receipt of one call of rmsnorm."""
    found = receipt("llama-3-8b", decode_sizes=(2,), prefill_sizes=(), context=16)
    return replace(found, rows=tuple(row for row in found.rows if row.role == "final norm"))


def test_a_planted_wrong_kernel_is_found_and_replaced(plant: Any) -> None:
    plant("second", _right, priority=18)
    plant("first", _wrong, priority=19)
    found = tk.self_check(_receipt(), seconds=60, disable=True)
    (wrong,) = found.wrong
    assert not found.ok
    assert (wrong.result.kernel, wrong.disabled, wrong.successor) == ("first", True, "second")
    assert wrong.result.comparisons[0].fault
    assert len(found.passed["second"]) > 1, "the kernel that takes over is checked"
    assert "WRONG first on " in str(found)
    assert "disabled, second takes over" in str(found)

    x, weight = torch.ones(2, 4), torch.ones(4)
    explanation = tk.rmsnorm.explain(x, weight)
    assert explanation.chosen is not None
    assert explanation.chosen.name == "second"
    (verdict,) = (v for v in explanation.verdicts if v.spec.name == "first")
    assert (verdict.gate, verdict.reason.partition(":")[0]) == ("implementation", "is disabled")
    with pytest.raises(tk.NoKernelFoundError, match=r"first, .*implementation gate: is disabled"):
        tk.rmsnorm(x, weight, override="first")
    assert tk.self_check(_receipt(), seconds=60).ok, "a receipt made now names the other kernel"


def test_without_disable_a_wrong_kernel_is_only_reported(plant: Any) -> None:
    plant("first", _wrong, priority=19)
    found = tk.self_check(_receipt(), seconds=60)
    (wrong,) = found.wrong
    assert not wrong.disabled
    assert wrong.successor.endswith("rmsnorm")
    explanation = tk.rmsnorm.explain(torch.ones(2, 4), torch.ones(4))
    assert explanation.chosen is not None
    assert explanation.chosen.name == "first"


def test_a_kernel_that_raises_is_wrong(plant: Any) -> None:
    def raises(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any) -> Any:
        raise RuntimeError("illegal instruction")

    plant("first", raises, priority=19)
    (wrong,) = tk.self_check(_receipt(), seconds=60).wrong
    assert "illegal instruction" in wrong.result.reason


def test_a_kernel_whose_compilation_is_forbidden_is_not_wrong(plant: Any) -> None:
    """In production the compile policy is ``forbid``. It must not make the self-check disable a right kernel."""

    def needs_a_program(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any) -> Any:
        raise tk.CompilationForbiddenError("some_kernel is not compiled yet, and the compile policy is forbid")

    plant("first", needs_a_program, priority=19)
    found = tk.self_check(_receipt(), seconds=60, disable=True)
    assert found.ok
    assert found.not_reached == {"first": "compile policy: some_kernel is not compiled yet, and the compile policy is forbid"}
    explanation = tk.rmsnorm.explain(torch.ones(2, 4), torch.ones(4))
    assert explanation.chosen is not None
    assert explanation.chosen.name == "first"


def test_the_time_of_the_receipt_does_not_count(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any, **options: Any) -> Receipt:
        time.sleep(0.3)
        return _receipt()

    plant("first", _right, priority=19)
    monkeypatch.setattr(checking, "receipt", slow)
    assert tk.self_check("llama-3-8b", seconds=0.2).passed


def test_what_the_time_does_not_suffice_for_is_said(plant: Any) -> None:
    plant("first", _wrong, priority=19)
    found = tk.self_check(_receipt(), seconds=0, disable=True)
    assert found.ok
    assert found.not_reached == {"first": "the time was over"}
    assert "not reached: first: the time was over" in str(found)


def test_every_kernel_has_a_case_before_any_has_two(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("first", _right, priority=19)
    plant("second", _right, priority=18)
    (row,) = _receipt().rows
    both = replace(_receipt(), rows=(row, replace(row, kernel="second"), replace(row, kernel="absent")))
    found = tk.self_check(both, seconds=60)
    assert found.not_reached == {"absent": "it is not registered in this process"}
    ran: list[str] = []

    def passing(spec: KernelSpec, case: Case, device: Any) -> CaseResult:
        ran.append(spec.name)
        return CaseResult(spec.name, spec.operator, case.name, Status.PASSED)

    monkeypatch.setattr(checking, "verify_case", passing)
    tk.self_check(both, seconds=60)
    assert ran[:4] == ["first", "second", "first", "second"]


def test_a_process_is_checked_by_default(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_made", {})  # other tests may have filled it
    plant("first", _wrong, priority=19)
    tk.rmsnorm(torch.ones(2, 4321), torch.ones(4321))
    assert "first" in {wrong.result.kernel for wrong in tk.self_check(seconds=60).wrong}
