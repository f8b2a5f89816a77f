"""Tests the script that predicts times of MLA decode."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def program(timing_programs: Callable[[str], ModuleType]) -> ModuleType:
    return timing_programs("timing_model_mla")


@pytest.mark.slow
def test_runs(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measures both kernels, and writes a report and a README."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{program.MARKS[0]}\nold\n{program.MARKS[1]}\nafter\n")
    monkeypatch.setattr(program, "CASES", [program.Case(2, 70, 16)])
    monkeypatch.setattr(program, "README", readme)
    output = tmp_path / "report.json"
    program.main(["--output", str(output), "--readme"])
    report = json.loads(output.read_text())
    (row,) = report["rows"]
    assert [launch["kernel"] for launch in row["ours"]["launches"]] == ["mla_decode_kernel"]
    assert row["portable"]["us"] > row["ours"]["us"] > row["floor_us"] > 0
    assert "old" not in readme.read_text()
    assert program.table(report) in capsys.readouterr().out


def test_the_committed_report(program: ModuleType) -> None:
    """The README shows the committed report, which meets the pass criteria."""
    report = json.loads((FOLDER / "timing_model_mla.json").read_text())
    assert program.table(report) in (FOLDER.parent / "README.md").read_text()
    assert [(row["case"], row["bar_us"]) for row in report["rows"]] == [(case.name, case.bar_us) for case in program.CASES]
    for row in report["rows"]:
        assert row["ours"]["us"] <= row["bar_us"]
        assert len(row["ours"]["launches"]) == 1
