"""Tests the script that measures the loading of checkpoints."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "loading.py"


def test_it_compares_loading_with_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("loading", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = tmp_path / "result.json"
    made_in = tmp_path / "made"
    made_in.mkdir()
    sizes = ["--preset", "tiny", "--layers", "1", "--device", "cpu", "--repeats", "2", "--commit", "abc"]
    module.main([*sizes, "--folder", str(made_in), "--output", str(output)])
    found = json.loads(output.read_text())
    assert len(found["reading_s"]) == len(found["loading_s"]) == 2
    assert found["bytes"] > 100_000
    assert found["over_reading"] > 0
    assert found["metadata"]["git_commit"] == "abc"
    assert "times that" in capsys.readouterr().out
    assert not list(made_in.iterdir()), "the checkpoint is removed"
