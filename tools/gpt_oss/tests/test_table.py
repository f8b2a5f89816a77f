"""Tests the README's tables, and the script that generates these tables from the benchmark's results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gpt_oss import benchmark

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "table.py"


@pytest.fixture
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt_oss_table", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    workload = benchmark.Workload("tiny", 2, batches=(1, 2), contexts=(9,), decode_steps=3, prefills=((1, 8),), repeats=1)
    return benchmark.run(workload, torch.float32, "cpu", ("optimised", "fp8-cache"), "the command", commit="0123456789abcdef")


def test_the_readme_shows_the_results_that_are_there(program: ModuleType) -> None:
    text = program.README.read_text()
    begin, end = text.index(program.BEGIN) + len(program.BEGIN), text.index(program.END)
    assert text[begin:end].strip() == program.section().strip(), "run python tools/gpt_oss/benchmarks/table.py --write"


def test_a_result_in_tables(program: ModuleType, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "HERE", tmp_path)
    assert program.section() == ""
    theirs = {
        "vllm": "1.0",
        "decode": [{"milliseconds_a_step": 1e3 * row["milliseconds_a_step"]} for row in result["variants"]["optimised"]["decode"]],
        "prefill": [{"tokens_per_second": 500.0}],
    }
    (tmp_path / "h200.json").write_text(json.dumps(result))
    (tmp_path / "h200_variants.json").write_text(json.dumps(result))
    (tmp_path / "beside_vllm.json").write_text(json.dumps({"ours": result, "vllm": {"auto": theirs, "marlin": {"error": "no"}}}))
    text = program.section()
    assert "commit 0123456789ab" in text
    assert "`the command`" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert all(len(row) in (11, 9, 8, 6, 4) for row in rows)
    step = result["variants"]["optimised"]["decode"][1]
    assert ["2", "9", "01234567", "sampled", f"{step['milliseconds_a_step']:.3f}", ""] in [row[:6] for row in rows]
    assert [row[-1] for row in rows if row[0] == "decode, batch 2, context 9"] == ["1000.00"]
    assert [len(row) for row in rows if row[0] == "fp8-cache"] == [6, 8, 8, 6]
    assert [row[3] for row in rows if row[0] in ("optimised", "fp8-cache") and len(row) == 8] == [
        "itself, in shorter chunks",
        "optimised",
    ] * 2
    theirs["decode"][1] |= {"few_s": [1.0, 1.05, 3.0], "many_s": [2.0, 5.0, 9.0]}
    theirs["prefill"][0] |= {"all_seconds": [0.2, 0.21, 1.6]}
    (tmp_path / "beside_vllm.json").write_text(json.dumps({"ours": result, "vllm": {"auto": theirs}}))
    disturbed = [line for line in program.section().splitlines() if "disturbed" in line]
    assert len(disturbed) == 1
    assert disturbed[0].startswith("| decode, batch 2")
    passes = [row[0] for row in rows if row[0].startswith(("decode 1", "prefill 1")) and len(row) == 9]
    assert passes == ["decode 1 x 9", "prefill 1 x 8, two layers"]


def test_the_bars_are_shown(program: ModuleType, result: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(result))
    changed["variants"]["optimised"]["decode"][0] |= {"batch": 1, "context": 1024}
    changed["variants"]["optimised"]["prefill"][0] |= {"batch": 8, "tokens": 1024}
    assert not any(" | 1.67 | " in line for line in program.decode([changed])), "another model has no target values"
    changed["workload"]["preset"] = "gpt-oss-120b"
    *_, line = program.decode([changed])
    assert line.startswith("| 1 | 1024 |")
    assert " | 1.67 | " in line
    assert program.prefill([changed])[2].endswith(" | 58000 |")


def test_the_first_result_that_has_a_step_is_shown(program: ModuleType, result: dict[str, Any]) -> None:
    later = json.loads(json.dumps(result))
    measured = later["variants"]["optimised"]
    measured["decode"][0]["milliseconds_a_step"] = 1234.5
    measured["prefill"][0]["seconds"] = 1234.5
    for table in (program.decode, program.prefill, program.operators):
        assert table([result, later]) == table([result])
