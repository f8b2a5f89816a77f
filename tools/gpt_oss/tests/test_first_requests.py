"""Tests the script that measures how soon a fresh process answers, with the tiny model on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpt_oss import Engine
from gpt_oss import engine as engine_module
from tokenspeed_kernel import CompilationForbiddenError
from tokenspeed_kernel_base import compilation, selection

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "first_requests.py"
SIZES = ("--prefill-tokens", 4, "--max-sequences", 1, "--batch", 1, "--batch-tokens", 8, "--requests", 3, "--longest", 12)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_requests", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(selection, "_made", {})  # other tests may have filled it, and a receipt selects again for each entry
    return module


def run(program: ModuleType, *words: object) -> int:
    model = ("--preset", "tiny", "--layers", 1, "--device", "cpu", "--dtype", "float32", "--pages", 16, "--commit", "abc")
    return program.main([str(word) for word in (*model, *SIZES, *words)])


def test_it_measures_and_checks_the_bars(
    tmp_path: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "BARS", {"first_batch_s": 1e-9, "compilations": 0})
    output, receipt = tmp_path / "result.json", tmp_path / "receipt.json"
    assert run(program, "--output", output, "--receipt", receipt) == 1
    found = json.loads(output.read_text())
    assert 0 < found["weights_s"] < program.process_seconds()
    assert 0 < found["first_token_s"] < program.process_seconds()
    assert found["requests"] == 3
    assert found["requests_left"] == 0
    assert found["steps"] >= 3
    assert found["compilations"] == found["warm_up"]["programs"] == 0
    assert found["refused"] == []
    assert found["metadata"]["git_commit"] == "abc"
    assert receipt.exists()
    said = capsys.readouterr().out
    assert "bar missed: first_batch_s is" in said
    assert "bar missed: compilations" not in said


@pytest.mark.parametrize("stage", ["warm_up", "generate", "step"])
def test_a_missing_program_is_noted_and_the_measurement_goes_on(
    tmp_path: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    owner, name = {"warm_up": (engine_module, "warm_up"), "generate": (Engine, "generate"), "step": (Engine, "step")}[stage]
    original, policies = getattr(owner, name), []

    def needs_a_program(*arguments: Any, **options: Any) -> Any:
        policies.append(compilation.current_compile_policy())
        if len(policies) == 1:
            raise CompilationForbiddenError("some_kernel is not compiled yet")
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, needs_a_program)
    output = tmp_path / "result.json"
    run(program, "--output", output)
    found = json.loads(output.read_text())
    assert found["refused"] == ["some_kernel is not compiled yet"]
    assert policies[:2] == ["forbid", "warn"]
    assert found["requests_left"] == 0


def test_a_failure_keeps_what_was_measured(tmp_path: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(program, "run_random", fails)
    output = tmp_path / "result.json"
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(program, "--output", output)
    found = json.loads(output.read_text())
    assert found["error"] == "RuntimeError: the device is gone"
    assert found["first_token_s"] > 0
    assert found["first_batch_s"] > 0
    assert found["metadata"]["git_commit"] == "abc"


def test_no_request_starts_after_the_time_limit(tmp_path: Path, program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    assert run(program, "--output", output, "--seconds", 0) == 1
    assert json.loads(output.read_text())["requests_left"] == 3
    assert "bar missed: requests_left is 3, must be at most 0" in capsys.readouterr().out
