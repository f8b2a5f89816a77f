"""``tokenspeed-kernel capture``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.watching import ShapeCapture, load
from tokenspeed_kernel_command.commands import app


def call(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["capture", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Writes two capture files, as two processes would."""
    found = [tmp_path / "a", tmp_path / "b"]
    for count, path in enumerate(found, 1):
        with tk.shape_capture(path):
            for _ in range(count):
                tk.silu_and_mul(torch.ones(2, 8))
    with tk.shape_capture(found[1]):
        tk.rmsnorm(torch.ones(2, 8), torch.ones(8))
    return found


def test_show_adds_up_and_sorts(files: list[Path]) -> None:
    lines = call("show", *files).splitlines()
    assert lines[0].split() == ["calls", "operator", "kernel", "call"]
    assert [line.split()[:2] for line in lines[1:3]] == [["3", "activation.silu_and_mul"], ["1", "norm.rmsnorm"]]
    assert "x float32[2, 8]" in lines[1]
    assert lines[-1] == "4 calls of 2 kinds"


def test_show_one_operator_as_json(files: list[Path]) -> None:
    shown = json.loads(call("show", files[1], "--op", "rmsnorm", "--json"))
    assert [(r["operator"], r["count"]) for r in shown["records"]] == [("norm.rmsnorm", 1)]
    assert shown["dropped"] == {}


def test_show_reports_unrecorded_calls(tmp_path: Path) -> None:
    kept = ShapeCapture(max_records=1)
    for n in range(3):
        kept.record("f.m", "k", n, {}, {})
    kept.dump(tmp_path / "shapes")
    shown = call("show", tmp_path / "shapes")
    assert "2 more of f.m were not recorded: there were too many kinds" in shown
    assert "a call of f.m was captured: no operator f.m" in shown


def test_merge(files: list[Path], tmp_path: Path) -> None:
    assert call("merge", *files, "-o", tmp_path / "sum") == f"4 calls of 2 kinds in {tmp_path / 'sum'}\n"
    assert sorted(record["count"] for record in load(tmp_path / "sum").records) == [1, 3]


@pytest.mark.parametrize("words", [("show",), ("merge", "-o", "sum")])
def test_files_that_hold_none(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("hello\n")
    command, *options = words
    assert "notes holds no captured shapes" in call(command, "notes", *options, code=2)
    assert "there are no captured shapes at missing" in call(command, "missing", *options, code=2)
    assert not (tmp_path / "sum").exists()


def test_an_unknown_operator(files: list[Path]) -> None:
    assert "did you mean rmsnorm" in call("show", files[0], "--op", "rmsnorn", code=2)
