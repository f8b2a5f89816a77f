"""Tests the benchmark program without a GPU: its arguments, its plan, its entry point and its acceptance bars."""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")

from sglang.srt.server_args import ServerArgs

from tokenspeed_kernel_sglang.settings import read_settings

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "beside_sglang.py"


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("beside_sglang", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plan(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--plan", "--variants", *program.VARIANTS]) == {}
    planned = json.loads(capsys.readouterr().out)
    assert [run["variant"] for run in planned] == list(program.VARIANTS)
    for run in planned:
        read_settings(run["environment"])  # raises an error for an unknown setting
        assert not set(run["engine"]) - set(ServerArgs.__annotations__)
        assert run["figures"] == ["decode 1", "decode 4", "decode 16", "decode 64", "prefill 4x8192"]
        assert run["engine"]["context_length"] == 8192 + 1 + 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "vllm"], "invalid choice"),
        (["--prefills", "8192"], "prompts x tokens"),
        (["--tokens", "8", "8"], "must increase, got 8 8"),
    ],
)
def test_invalid_arguments(program: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parse(arguments)
    assert message in capsys.readouterr().err


def test_sglang_finds_the_weights_by_their_entry_point(program: Any, tmp_path: Path) -> None:
    program.write_entry_point(tmp_path)
    found = [entry for installed in distributions(path=[str(tmp_path)]) for entry in installed.entry_points]
    assert [(entry.group, entry.name) for entry in found] == [("sglang.srt.plugins", program.DRAW)]
    model = program.weights_module().write_model(tmp_path / "model", 2)
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 2


def test_bars(program: Any) -> None:
    own = {"decode 1": 5.1, "decode 4": 7.0, "prefill 4x8192": 36_900.0}
    good = {"decode 1": 2.8, "decode 4": 6.9, "decode 64": 9.0, "prefill 4x8192": 48_000.0}
    assert program.judge({"sglang": own, "plugin": good}) == []
    slow = {"decode 1": 3.0, "decode 4": 7.1, "prefill 4x8192": 46_000.0}
    assert [line.partition(":")[0] for line in program.judge({"sglang": own, "plugin": slow})] == list(slow)
