"""Runs the benchmark program on a small model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "h200_transformers.py"


def test_every_variant(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("h200_transformers", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    output = tmp_path / "results.json"
    sizes = ["--tokens", "2", "--repeats", "1", "--prompts", "8", "--batches", "2", "--caches", "dynamic", "static"]
    rows = program.main(["--device", "cpu", "--tiny", *sizes, "--output", str(output)])
    assert [row["variant"] for row in rows] == [name for name in program.VARIANTS for _ in range(2)]
    assert all(row["error"] < 0.05 and row["prefill"] > 0 and row["decode"] > 0 for row in rows)
    found = json.loads(output.read_text())
    assert found["rows"] == rows
    assert found["measured_on"]["transformers"]
