"""Tests the script that compares the runtime with vLLM, as far as possible without vLLM and without a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gpt_oss import Config, preset
from gpt_oss.benchmark import Workload, _Measuring

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "beside_vllm.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("beside_vllm", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_run_the_same_model(program: ModuleType) -> None:
    configuration = program.configuration(program.arguments(["--layers", "3"]))
    assert Config.from_hf(configuration) == preset("gpt-oss-120b").with_layers(3)
    assert configuration["architectures"] == ["GptOssForCausalLM"]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GptOssConfig.from_dict(json.loads(json.dumps(configuration)))
    assert theirs.num_hidden_layers == 3
    assert theirs.rope_parameters["rope_type"] == "yarn"


def test_both_get_the_same_prompts(program: ModuleType) -> None:
    measuring = _Measuring.__new__(_Measuring)
    measuring.workload, measuring.config = Workload("tiny", seed=5), preset("tiny")
    assert program.prompts_of(3, 11, preset("tiny").vocab_size, 5) == measuring._prompts(3, 11)


def test_the_longest_sequence(program: ModuleType) -> None:
    assert program.longest_of(program.arguments(["--context", "100", "--prefills", "2x50"])) == 100 + program.MANY
    assert program.longest_of(program.arguments(["--context", "100", "--prefills", "2x5000"])) == 5001


def test_runs_are_repeated_until_the_fastest_agree(program: ModuleType) -> None:
    compiling = iter([8.0, 0.50, 3.0, 0.51, 5.0, 0.52, 0.1])
    assert program.steady(lambda: next(compiling), 3) == [0.50, 0.51, 0.52]
    growing = (2.0**run for run in itertools.count())
    assert program.steady(lambda: next(growing), 2) == [1.0, 2.0]
    assert next(growing) == 2.0**program.MOST_RUNS
    assert program.steady(lambda: 1.0, 1) == [1.0]


def test_vllm_finds_the_loader_as_a_plugin(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = program.entry_point(tmp_path)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(PROGRAM.parent)
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == program.LOAD_FORMAT]
    assert found.load().__name__ == "register_loader"


def test_a_run_whose_vllm_fails(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If vLLM fails, our figures are kept, and the result contains vLLM's error."""
    failing = tmp_path / "python"
    failing.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    failing.chmod(0o755)
    output = tmp_path / "result.json"
    monkeypatch.setattr(program, "MANY", program.FEW + 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if not torch.cuda.is_available() else "0")
    sizes = ("--preset", "tiny", "--layers", "1", "--batches", "2", "--context", "5", "--prefills", "1x4", "--repeats", "1")
    program.main([*sizes, "--vllm-python", str(failing), "--output", str(output)])
    written = json.loads(output.read_text())
    assert written["vllm"] == {kind: {"error": "its process ended with 3"} for kind in ("auto", "marlin")}
    assert written["ours"]["variants"]["optimised"]["decode"][0]["batch"] == 2
    shown = capsys.readouterr().out
    assert "vLLM, marlin: its process ended with 3" in shown
    assert "decode, batch 2" in shown


def test_the_table_says_how_many_times_longer_vllm_takes(program: ModuleType) -> None:
    def measured(step: float, rate: float) -> dict[str, object]:
        return {
            "decode": [{"batch": 4, "milliseconds_a_step": step}],
            "prefill": [{"batch": 8, "tokens": 9, "tokens_per_second": rate}],
        }

    result = {
        "ours": {"variants": {"optimised": measured(2.0, 6e4)}},
        "vllm": {"auto": measured(5.0, 3e4), "marlin": {"error": "no"}},
    }
    heading, decode, prefill, last = program.table_of(result)
    assert heading.split() == ["ours", "vLLM,", "auto", "over", "ours"]
    assert decode.split() == ["decode,", "batch", "4", "2.000", "ms", "5.000", "ms", "2.50"]
    assert prefill.split() == ["prefill,", "8", "x", "9", "60.0", "K/s", "30.0", "K/s", "2.00"]
    assert last == "vLLM, marlin: no"
