"""The reports of a token's time and of linear layers, as committed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", ["timing_model_token", "timing_model_linear"])
def test_the_readme_shows_the_committed_report(timing_programs: Callable[[str], ModuleType], name: str) -> None:
    program = timing_programs(name)
    report = json.loads((FOLDER / f"{name}.json").read_text())
    assert program.table(report) in (FOLDER.parent / "README.md").read_text()


def test_a_token_takes_at_most_1700_us(timing_programs: Callable[[str], ModuleType]) -> None:
    program = timing_programs("timing_model_token")
    report = json.loads((FOLDER / "timing_model_token.json").read_text())
    assert [row["call"] for row in report["rows"]] == [call.name for call in program.CALLS]
    assert report["summary"] == pytest.approx(program.summary(report["rows"]))
    assert report["summary"]["floor_us"] < report["summary"]["us"] < report["summary"]["with_launches_us"] <= 1700


def test_linear_takes_less_than_its_operators(timing_programs: Callable[[str], ModuleType]) -> None:
    """With launch overhead, one launch takes less time than separate quantisation and GEMM."""
    program = timing_programs("timing_model_linear")
    report = json.loads((FOLDER / "timing_model_linear.json").read_text())
    assert [row["case"] for row in report["rows"]] == [case.name for case in program.CASES]
    for row in report["rows"]:
        assert len(row["ours"]["launches"]) == 1
        assert row["ours"]["with_launches_us"] < row["composed"]["with_launches_us"]
