"""Tests the script that predicts times as ranges, with small calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def program(timing_programs: Callable[[str], ModuleType]) -> ModuleType:
    return timing_programs("timing_ranges")


def test_runs(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Predicts a prefill, a decode and a GEMM, and writes a report and a README."""
    heads: dict[str, Any] = {"heads": 4, "kv_heads": 2}
    attention, mm = program.attention, program.mm
    calls = [
        program.attends(attention.Case("prefill", 1, 256, **heads)),
        program.attends(attention.Case("decode", 2, 70, **heads)),
        program.multiplies(mm.Case(1, 256, 128, "mxfp8")),
    ]
    readme, output = tmp_path / "README.md", tmp_path / "report.json"
    readme.write_text(f"before\n{program.MARKS[0]}\nold\n{program.MARKS[1]}\nafter\n")
    monkeypatch.setattr(program, "CALLS", calls)
    monkeypatch.setattr(program, "README", readme)
    program.main(["--output", str(output), "--readme"])
    report = json.loads(output.read_text())
    assert [row["call"] for row in report["rows"]] == [call.name for call in calls]
    for row in report["rows"]:
        assert 0 < row["fast_us"] <= 1.02 * row["modelled_us"] <= 1.02 * row["slow_us"]
        assert row["alone_us"]["clock_hz, slow"] > row["modelled_us"]
    names = {constant["name"] for constant in report["constants"]}
    assert {name.split(", ")[0] for name in report["rows"][0]["alone_us"]} == names
    text = readme.read_text()
    assert "old" not in text
    assert all(f"| `{name}` |" in text for name in names)
    assert f"| {calls[0].name} | {report['rows'][0]['fast_us']:.2f} |" in text


def test_the_modelled_time_is_that_of_the_other_scripts(program: ModuleType) -> None:
    """The call is the same as in `timing_model`, and so is its time."""
    case = program.attention.Case("decode", 2, 70, heads=4, kv_heads=2)
    row = program.measure(program.attends(case))
    assert row["modelled_us"] == pytest.approx(program.attention.measure(case, program.attention.ours("decode"), True)["us"])


def test_the_committed_report(program: ModuleType) -> None:
    """The README shows the committed report, with the constants that the emulator has."""
    report = json.loads((FOLDER / "timing_ranges.json").read_text())
    assert program.table(report) in (FOLDER.parent / "README.md").read_text()
    assert [row["call"] for row in report["rows"]] == [call.name for call in program.CALLS]
    assert report["constants"] == program.constants()
