"""Runs the benchmark program on a small model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "h200_transformers.py"


@pytest.fixture
def program() -> Any:
    spec = importlib.util.spec_from_file_location("h200_transformers", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_variant(program: Any, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    sizes = ["--tokens", "2", "--repeats", "1", "--prompts", "8", "--batches", "2", "--caches", "dynamic", "static"]
    rows = program.main(["--device", "cpu", "--tiny", *sizes, "--output", str(output)])
    assert [row["variant"] for row in rows] == [name for name in program.VARIANTS for _ in range(2)]
    assert all(row["error"] < 0.05 and row["prefill"] > 0 and row["decode"] > 0 for row in rows)
    found = json.loads(output.read_text())
    assert found["rows"] == rows
    assert found["measured_on"]["transformers"]


def test_a_run_that_is_cut_off_keeps_its_rows(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(given: Any, model: Any, ids: Any, cache: str) -> dict[str, Any]:
        if cache == "static":
            raise KeyboardInterrupt
        return {"decode": 1.0}

    monkeypatch.setattr(program, "figures", figures)
    output = tmp_path / "results.json"
    sizes = ["--device", "cpu", "--tiny", "--variants", "sdpa", "--prompts", "8", "--batches", "1", "--caches", "dynamic", "static"]
    with pytest.raises(KeyboardInterrupt):
        program.main([*sizes, "--output", str(output)])
    assert [row["cache"] for row in json.loads(output.read_text())["rows"]] == ["dynamic"]
