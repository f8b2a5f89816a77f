"""Tests the benchmark of the output projection and the router without a GPU: the emulator runs the kernels of a small layer, and
nothing is timed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tokenspeed_kernel")
sm90_emulator = pytest.importorskip("sm90_emulator")
if torch.cuda.is_available():
    pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process", allow_module_level=True)


@pytest.fixture
def benchmark_rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    module = importlib.import_module("h200_rows")
    # Each call runs once, and a graph is reported to take 10 us per call.
    monkeypatch.setattr(module, "sample_graph", lambda calls, *_, **__: [[call() for call in calls] and 10.0])
    return module


def test_rows(benchmark_rows: Any) -> None:
    """Asserts that every kernel agrees with float64, and that a failing kernel does not end the run."""
    sizes = benchmark_rows.Sizes(hidden=2048, width=3080, experts=16)
    with sm90_emulator.emulated_sm90(seed=1):
        layers = benchmark_rows.Layers(sizes, 1, torch.device("cpu"))
        found = [*benchmark_rows.rows(layers, [17], 1)]
        layers.biases["output"] = layers.biases["output"][1:]
        failed = benchmark_rows.measured(layers, "output", benchmark_rows.OURS["output"], 1, lambda: None, 1.0)
    assert [row["kernel"] for row in found] == [
        kernel for what in benchmark_rows.WHAT for kernel in benchmark_rows.kernels_of(what, 17)
    ]
    assert {row["us"] for row in found} == {row["apart_us"] for row in found} == {10.0}
    assert all(row["error"] < benchmark_rows.MOST_ERROR for row in found)
    assert "note" in failed
    assert all(benchmark_rows.line(row) for row in [*found, failed])


def test_programs(benchmark_rows: Any) -> None:
    """Asserts that the programs to compile ahead are those that the kernels launch."""
    assert len({*benchmark_rows.programs()}) == 4 + 1


def test_the_committed_report(benchmark_rows: Any) -> None:
    """Asserts that the README shows the report."""
    report = json.loads((benchmark_rows.HERE / "h200_rows.json").read_text())
    assert benchmark_rows.MARKS.inside(benchmark_rows.README.read_text()) == benchmark_rows.section(report)
