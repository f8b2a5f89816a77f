"""Runs the benchmarks of operators between GPUs on a CPU, and tests the table of a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from tokenspeed_kernel.workbench.worlds import run_world

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE = Path(__file__).parents[4] / "docs" / "measurements.md"


@pytest.fixture
def all_reduce(programs: Callable[[str], ModuleType]) -> Any:
    """Returns the benchmark's module, made importable by the processes that it starts."""
    return programs("all_reduce")


def test_it_measures_on_a_cpu(all_reduce: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert all_reduce.main(["--device", "cpu", "--rows", "1,3", "--hidden", "24", "--dtype", "float32", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert "--rows 1,3 --hidden 24 --dtype float32" in report["metadata"]["command"]
    assert str(tmp_path) not in report["metadata"]["command"]
    measured = {(row["operator"], row["contestant"]) for row in report["rows"] if row["us"]}
    wanted = {("all_reduce", "gloo"), ("all_reduce", "chosen"), ("all_reduce_rmsnorm", "gloo, rmsnorm")}
    assert wanted | {("all_reduce_rmsnorm", "chosen")} <= measured
    assert all(row["exact"] for row in report["rows"] if not row["skipped"])
    said = capsys.readouterr().out
    assert "torch one_shot, 1 rows: symmetric memory is for GPUs" in said
    assert all_reduce.table(report) in said


def one_rank_fails() -> dict[str, Any]:
    """Measures an implementation that cannot be made on rank 1."""
    import all_reduce

    def make() -> str:
        if dist.get_rank() == 1:
            raise OSError("no compiler")
        return "it is not for this device"

    found: dict[str, Any] = all_reduce._outcome("all_reduce", make, None, 1)
    return found


@pytest.mark.usefixtures("all_reduce")
def test_an_implementation_that_fails_ends_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for found in run_world(one_rank_fails, 2):
        assert (found["us"], found["skipped"], found["reason"]) == (None, False, "rank 1: OSError: no compiler")


def test_rows_are_sent_on_a_cpu(programs: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    program = programs("rows_between_gpus")
    assert program.main(["--device", "cpu", "--rows", "1,3", "--hidden", "24", "--dtype", "float16", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert "rows_between_gpus.py --ranks 2 --rows 1,3 --hidden 24" in report["metadata"]["command"]
    assert len(report["rows"]) == 2 * 6
    assert all(row["us"] > 0 and row["exact"] is not False for row in report["rows"])
    assert "| moe_dispatch, moe_combine: gloo, two all-to-alls |" in capsys.readouterr().out


def test_a_machine_without_gpus_says_so(all_reduce: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert all_reduce.main(["--ranks", "64"]) == 1
    assert "64 processes need a GPU each" in capsys.readouterr().err


def test_the_page_shows_the_report(all_reduce: Any) -> None:
    report = json.loads((FOLDER / "h200_all_reduce.json").read_text())
    page = PAGE.read_text()
    assert all_reduce.table(report) in page
    assert report["metadata"]["command"] in page
