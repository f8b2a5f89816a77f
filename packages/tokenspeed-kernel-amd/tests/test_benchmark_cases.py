"""Tests the scripts that predict times of single calls: of MLA decode, and of GEMMs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"
Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns a function that runs a script with changed constants, and returns the rows of its report."""

    def rows(program: ModuleType, **constants: Any) -> Any:
        readme, output = tmp_path / "README.md", tmp_path / "report.json"
        readme.write_text(f"before\n{program.MARKS[0]}\nold\n{program.MARKS[1]}\nafter\n")
        for name, value in {"README": readme, **constants}.items():
            monkeypatch.setattr(program, name, value)
        program.main(["--output", str(output), "--readme"])
        report = json.loads(output.read_text())
        assert "old" not in readme.read_text()
        assert program.table(report) in capsys.readouterr().out
        return report["rows"]

    return rows


@pytest.mark.slow
def test_mla_decode(timing_programs: Callable[[str], ModuleType], run: Run) -> None:
    program = timing_programs("timing_model_mla")
    (row,) = run(program, CASES=[program.Case(2, 70, 16)])
    assert [launch["kernel"] for launch in row["ours"]["launches"]] == ["mla_decode_kernel"]
    assert row["portable"]["us"] > row["ours"]["us"] > row["floor_us"] > 0


@pytest.mark.slow
def test_mla_prompts(timing_programs: Callable[[str], ModuleType], run: Run) -> None:
    program = timing_programs("timing_model_mla_prompt")
    rows = run(program, CASES=[program.Case(40, 40, 1), program.Case(3, 70, 16, torch.bfloat16)])
    kernels = [[launch["kernel"] for launch in row["ours"]["launches"]] for row in rows]
    assert kernels == [["mla_prefill_kernel"], ["mla_decode_kernel"]]
    assert all(row["portable"]["us"] > row["ours"]["us"] > row["floor_us"] > 0 for row in rows)


@pytest.mark.slow
def test_attention_on_gfx942(timing_programs: Callable[[str], ModuleType], run: Run) -> None:
    program = timing_programs("timing_model_gfx942")
    small = {"heads": 8, "kv_heads": 1}
    cases = [program.Case("decode", 2, 300, fp8=True, **small), program.Case("prefill", 1, 200, 50, **small)]
    rows = run(program, CASES=cases)
    kernels = [[launch["kernel"] for launch in row["ours"]["launches"]] for row in rows]
    assert kernels == [["decode_kernel", "merge_kernel"], ["mha_prefill_gfx942"]]
    assert all(row["ours"]["us"] > row["floor_us"] > 0 for row in rows)


def test_the_committed_report_of_gfx942(timing_programs: Callable[[str], ModuleType]) -> None:
    """The README shows the committed report. Our times meet the bar."""
    program = timing_programs("timing_model_gfx942")
    report = json.loads((FOLDER / "timing_model_gfx942.json").read_text())
    assert program.table(report) in (FOLDER.parent / "README.md").read_text()
    assert [row["case"] for row in report["rows"]] == [case.name for case in program.CASES]
    for row in report["rows"]:
        assert row["ours"]["us"] <= program.BAR * row["portable"]["us"]


@pytest.mark.slow
def test_gemms(timing_programs: Callable[[str], ModuleType], run: Run) -> None:
    """Both kernels are measured with few rows. With many rows, a sample of our kernel's tiles is."""
    program = timing_programs("timing_model_mm")
    few, many = run(program, CASES=[program.Case(3, 512, 64, "mxfp8"), program.Case(4096, 512, 4096, "mxfp4")], SAMPLED=(2, 2))
    assert few["portable"]["us"] > few["ours"]["us"] > few["floor_us"] > 0
    assert many["portable"] is None
    assert many["ours"]["us"] > many["floor_us"] > 0
    assert many["ours"]["launches"][0]["tiles"] == 32 * 32


@pytest.mark.parametrize("name", ["timing_model_mla", "timing_model_mla_prompt", "timing_model_mm"])
def test_the_committed_report(timing_programs: Callable[[str], ModuleType], name: str) -> None:
    """The README shows the committed report, which meets the pass criteria."""
    program = timing_programs(name)
    report = json.loads((FOLDER / f"{name}.json").read_text())
    assert program.table(report) in (FOLDER.parent / "README.md").read_text()
    assert [(row["case"], row["bar_us"]) for row in report["rows"]] == [(case.name, case.bar_us) for case in program.CASES]
    for row in report["rows"]:
        assert row["bar_us"] is None or row["ours"]["us"] <= row["bar_us"]
        assert len(row["ours"]["launches"]) == 1
