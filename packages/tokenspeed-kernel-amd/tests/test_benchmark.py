"""Tests the script that predicts times, with small calls and without the baseline."""

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
    return timing_programs("timing_model")


@pytest.fixture
def tiles_program(timing_programs: Callable[[str], ModuleType]) -> ModuleType:
    return timing_programs("timing_tiles")


def test_runs(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measures each operator, and writes a report and a README."""
    heads: dict[str, Any] = {"heads": 4, "kv_heads": 2}
    cases = [
        program.Case("prefill", 1, 256, **heads),
        program.Case("decode", 2, 70, window_left=20, **heads),
        program.Case("extend", 2, 40, 3, bar=False, **heads),
    ]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{program.MARKS[0]}\nold\n{program.MARKS[1]}\nafter\n")
    monkeypatch.setattr(program, "CASES", cases)
    monkeypatch.setattr(program, "README", readme)
    output = tmp_path / "report.json"
    program.main(["--output", str(output), "--readme"])
    report = json.loads(output.read_text())
    assert [row["case"] for row in report["rows"]] == [case.name for case in cases]
    for row in report["rows"]:
        assert row["ours"]["relative_error"] <= program.ERROR
        assert all(launch["us"] >= max(launch["compute_us"], launch["memory_us"]) > 0 for launch in row["ours"]["launches"])
        assert "ratio" not in row
    assert report["summary"] == {}
    lines = readme.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert f"| {cases[0].name} | {report['rows'][0]['ours']['us']:.2f} |" in "\n".join(lines)
    assert program.table(report) in capsys.readouterr().out


def test_tiles_are_handed_out_as_the_kernel_does(program: ModuleType, tiles_program: ModuleType) -> None:
    """Every tile is assigned once, and the cycles of tiles equal values that were computed by hand."""
    cycles = tiles_program.Cycles(100.0, [300.0, 500.0, 700.0, 900.0])
    tiles = tiles_program.Tiles(128, 2, cycles, cycles)
    case = program.Case("prefill", 3, 1024, heads=16)
    workers = 64
    found = tiles_program.own_tiles(case, tiles, workers)
    assert sorted(found) == list(range(workers))
    handed_out = sorted(place for places in found.values() for place in places)
    assert handed_out == sorted(place for place in range(8) for _ in range(3 * 16))
    # The first four tiles were measured. Each further tile costs 200 cycles more.
    assert [cycles.tile(place) for place in range(6)] == [200, 400, 600, 800, 1000, 1200]


@pytest.mark.parametrize("own_order", [True, False])
def test_prefill_on_idle_units(program: ModuleType, tiles_program: ModuleType, own_order: bool) -> None:
    """If there are fewer tiles than CUs, a prefill takes as long as its longest tile alone."""
    from gfx950_emulator.hardware import MI355X

    tiles = tiles_program.Tiles(128, 2, tiles_program.Cycles(100.0, [300.0, 700.0]), tiles_program.Cycles(50.0, [200.0, 400.0]))
    case = program.Case("prefill", 1, 256, heads=8)
    assert tiles_program.prefill_seconds(case, tiles, own_order, MI355X) == pytest.approx(700 / 2.4e9)


def test_a_folder_without_the_peer(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--peer", str(tmp_path)])
    assert "no package tokenspeed_kernel_amd" in capsys.readouterr().err


def test_the_committed_report(program: ModuleType) -> None:
    """The README shows the committed report, which meets the pass criteria."""
    report = json.loads((FOLDER / "timing_model.json").read_text())
    assert program.table(report) in (FOLDER.parent / "README.md").read_text()
    assert [row["case"] for row in report["rows"]] == [case.name for case in program.CASES]
    assert report["summary"] == pytest.approx(program.summary(report["rows"]))
    assert report["summary"]["worst"] <= 1.001
    assert report["summary"]["geometric_mean"] <= 0.725
