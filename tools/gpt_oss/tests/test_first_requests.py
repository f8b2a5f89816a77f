"""Tests the script that measures how soon a fresh process answers, with the tiny model on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tokenspeed_kernel_base import selection

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "first_requests.py"
SIZES = ("--prefill-tokens", 4, "--max-sequences", 1, "--batch", 1, "--batch-tokens", 8, "--requests", 3, "--longest", 12)


def test_it_measures_and_checks_the_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("first_requests", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(selection, "_made", {})  # other tests may have filled it, and a receipt selects again for each entry
    monkeypatch.setattr(module, "BARS", {"first_batch_s": 1e-9, "compilations": 0})
    output, receipt = tmp_path / "result.json", tmp_path / "receipt.json"
    model = ("--preset", "tiny", "--layers", 1, "--device", "cpu", "--dtype", "float32", "--pages", 16, "--commit", "abc")
    assert module.main([str(word) for word in (*model, *SIZES, "--output", output, "--receipt", receipt)]) == 1
    found = json.loads(output.read_text())
    assert 0 < found["weights_s"] < module.process_seconds()
    assert 0 < found["first_token_s"] < module.process_seconds()
    assert found["requests"] == 3
    assert found["steps"] >= 3
    assert found["compilations"] == found["warm_up"]["programs"] == 0
    assert found["metadata"]["git_commit"] == "abc"
    assert receipt.exists()
    said = capsys.readouterr().out
    assert "bar missed: first_batch_s is" in said
    assert "bar missed: compilations" not in said
