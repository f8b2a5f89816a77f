"""Tests the script that predicts times of GEMMs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def program(timing_programs: Callable[[str], ModuleType]) -> ModuleType:
    return timing_programs("timing_model_mm")


@pytest.mark.slow
def test_runs(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measures both kernels with few rows, and a sample with many rows. Writes a report and a README."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{program.MARKS[0]}\nold\n{program.MARKS[1]}\nafter\n")
    monkeypatch.setattr(program, "CASES", [program.Case(3, 512, 64, "mxfp8"), program.Case(4096, 512, 4096, "mxfp4")])
    monkeypatch.setattr(program, "SAMPLED", 2)
    monkeypatch.setattr(program, "README", readme)
    output = tmp_path / "report.json"
    program.main(["--output", str(output), "--readme"])
    report = json.loads(output.read_text())
    few, many = report["rows"]
    assert few["portable"]["us"] > few["ours"]["us"] > few["floor_us"] > 0
    assert many["portable"] is None
    assert many["ours"]["us"] > many["floor_us"] > 0
    assert many["ours"]["launches"][0]["tiles"] == 32 * 32
    assert "old" not in readme.read_text()
    assert program.table(report) in capsys.readouterr().out


def test_the_committed_report(program: ModuleType) -> None:
    """The README shows the committed report, which meets the pass criteria."""
    report = json.loads((FOLDER / "timing_model_mm.json").read_text())
    assert program.table(report) in (FOLDER.parent / "README.md").read_text()
    assert [(row["case"], row["bar_us"]) for row in report["rows"]] == [(case.name, case.bar_us) for case in program.CASES]
    for row in report["rows"]:
        assert row["bar_us"] is None or row["ours"]["us"] <= row["bar_us"]
        assert len(row["ours"]["launches"]) == 1
