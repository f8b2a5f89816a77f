"""Tests that the summary of a failing test has few lines, for any number of results and any length of their texts."""

from __future__ import annotations

import pytest

from tokenspeed_kernel.workbench.numerics import CaseResult, Finding, Status, assert_none_wrong, summary


def result(case: str, status: Status = Status.FAILED, reason: str = "1 element is wrong", traceback: str = "") -> CaseResult:
    return CaseResult("kernel", "norm.rmsnorm", case, status, reason, traceback=traceback)


def test_nothing_is_said_of_what_is_right() -> None:
    right = [result("a", Status.PASSED), result("b", Status.SKIPPED, "platform: needs a GPU")]
    assert summary(right) == summary([]) == ""
    assert_none_wrong(right)


def test_three_reasons_and_a_count() -> None:
    results = [result("right", Status.PASSED), *(result(f"case {i}", reason=f"reason {i}") for i in range(40))]
    said = "40 of 41 wrong\n" + "".join(f"  kernel, case {i}: reason {i}\n" for i in range(3)) + "  ... and 37 more"
    with pytest.raises(AssertionError) as caught:
        assert_none_wrong(results)
    assert str(caught.value) == said
    assert summary(results[:3]).splitlines()[-1] == "  kernel, case 1: reason 1"


def test_a_summary_is_short() -> None:
    traceback = "Traceback\n" + "  a line\n" * 5000 + "ValueError: the end\n"
    results = [result("x", Status.ERROR, "y" * 30_000, traceback) for _ in range(500)]
    said = summary(results)
    assert len(said) < 3000
    assert said.endswith("ValueError: the end")


def test_findings_are_told_by_their_checks() -> None:
    finding = Finding("kernel", "norm.rmsnorm", "bounds", Status.FAILED, "reads past x", (result("a", traceback="Traceback of a"),))
    passed = Finding("kernel", "norm.rmsnorm", "values", Status.PASSED, "3 calls")
    assert summary([passed, finding]) == "1 of 2 wrong\n  kernel, bounds: reads past x\nTraceback of a"
