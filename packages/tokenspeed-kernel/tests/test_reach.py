"""Tests `tokenspeed_kernel.workbench.numerics.conformance.reach`, the check for kernels that use indices beyond the given lengths.
The check runs kernels in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenspeed_kernel.workbench.numerics.conformance import reach as reached
from tokenspeed_kernel.workbench.numerics.conformance.reach import reach
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Status
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.spec import KernelSpec

SAMPLES = Path(__file__).parent / "wrong_kernels"
DECODE = "attention.mha_decode_with_kvcache"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs the sample plugin in a folder in which the check's process finds it."""
    about = tmp_path / "wrong_kernels-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-kernels\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[tokenspeed_kernel.plugins]\nwrong-kernels = wrong_kernels.plugin:register\n")
    monkeypatch.syspath_prepend(str(SAMPLES))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def look(kernel: str, operator: str = DECODE, names: int = 2) -> list[CaseResult]:
    spec = KernelSpec(
        name=kernel, family=operator.split(".")[0], mode=operator.split(".")[1], solution="sample", format_signatures=None
    )
    cases = [case for case in get_operator(operator).all_cases() if not case.large][:names]
    return list(reach(spec, cases, torch.device("cpu"), 0))


def test_unbounded_lookups_crash_the_other_process(installed: Path) -> None:
    (found,) = look("reads_past_page_table")
    assert found.status is Status.FAILED
    assert found.reason.startswith("IndexError: index 2147483647")
    assert [fault.text for fault in found.faults] == [found.reason]


def test_bounded_lookups_pass(installed: Path) -> None:
    assert [found.status for found in look("nan_on_empty")] == [Status.PASSED] * 2


def test_a_kernel_that_only_this_process_knows_is_skipped() -> None:
    (found,) = look("registered_by_hand")
    assert found.status is Status.SKIPPED
    assert "importing tokenspeed_kernel does not register registered_by_hand" in found.reason


def test_operators_without_lookups_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached, "start_process", lambda *args: pytest.fail("a process was started"))
    assert look("any", "norm.rmsnorm") == []


@pytest.mark.nvidia
def test_the_command_tells_of_it_on_a_gpu(installed: Path) -> None:
    words = ["verify", "reads_past_page_table", "--conformance", "--shrink", "0", "--case", "lengths about a page's end"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tokenspeed_kernel", *words, "--output", str(installed / "report.json")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 1, ran.stderr
    findings = {row["check"]: row for row in json.loads((installed / "report.json").read_text())["results"]}
    wrong = {name: row["detail"] for name, row in findings.items() if row["status"] == "failed"}
    assert list(wrong) == ["unused values"]
    assert "uses values that must not matter, of page_table" in wrong["unused values"]
