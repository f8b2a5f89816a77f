"""Tests the benchmark of persistent layers without a GPU: the emulator runs the kernels of a small model, and nothing is timed."""

from __future__ import annotations

import importlib
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
def persistent(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    module = importlib.import_module("h200_persistent")
    # Each call runs once, and is reported to take 25 us.
    monkeypatch.setattr(module, "sample_graph", lambda calls, *_, **__: [calls[0]() or 25.0])
    return module


@pytest.mark.slow
def test_rows(persistent: Any) -> None:
    """Asserts that variants are compared with the public operators, that a failing variant does not end the run, and that a trace
    has all events."""
    shapes = importlib.import_module("moe_shapes")
    shape = shapes.Shape(shapes.Model("small", 8, 2, 64, 64, gpt_oss=True), 1)
    with sm90_emulator.emulated_sm90(multiprocessors=7, seed=1):
        model = persistent.Model(2, torch.device("cpu"), shape, kv_heads=1, group=2)
        batch = persistent.Batch(model, 1, 150)
        persistent.CHOICES["broken"] = persistent.Choice({"slab": -1})
        found = {row["variant"]: row for row in persistent.rows(batch, ["persistent", "one layer a launch", "broken"], 1)}
        lines = [*persistent.trace(batch, "with a trace", "small", 2)]
        scaled = persistent.Batch(model.quantised(), 1, 150)
        (*_, fp8) = persistent.rows(scaled, ["persistent"], 1)
    assert [row["us"] for row in found.values()] == [12.5, 12.5, 12.5, None]
    assert "error" in found["persistent"]["note"]
    assert (fp8["dense"], fp8["us"]) == ("float8_e4m3fn", 12.5)
    assert fp8["bytes"] < found["persistent"]["bytes"]
    assert "Error" in found["broken"]["note"]
    assert all(persistent.line(row) for row in found.values())
    events = importlib.import_module("tokenspeed_kernel_nvidia.sm90.layers.config").EVENTS
    assert [line[:36].rstrip() for line in lines[2:-1]] == [*events]
    assert "nan" not in "".join(lines)
