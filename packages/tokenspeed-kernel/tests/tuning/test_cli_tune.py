"""Tests ``tokenspeed-kernel tune`` as a user runs it, with kernels that take prescribed times."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.benchmark import timing
from tokenspeed_kernel.workbench.cli import tune as command
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import cpu_platform
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_command.commands import app

LAB = Path(__file__).parent / "lab_modules"
runner = CliRunner()


def call(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, list(words))
    assert result.exit_code == code, result.output + str(result.exception)
    return result.stdout


def refused(*words: str) -> str:
    result = runner.invoke(app, list(words))
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.fixture
def folder(tmp_path: Path, settings_from: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Registers two kernels of rmsnorm, one of which spends a prescribed time. Returns the folder of the test's tuned results."""
    settings_from(TUNED=str(tmp_path / "tuned"))
    where = tmp_path / "kernels"
    where.mkdir()
    shutil.copy(LAB / "lab_clock.py", where / "clock_of_norms.py")
    (where / "norms.py").write_text(
        "import torch, clock_of_norms\n"
        "def waiting(x, weight, eps, residual, out, residual_out, *, wait=2000):\n"
        "    clock_of_norms.spend(wait)\n"
        "    return normed(x, weight, eps, residual, out, residual_out)\n"
        "def normed(x, weight, eps, residual, out, residual_out):\n"
        "    result = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)\n"
        "    return result if out is None else out.copy_(result)\n"
    )
    monkeypatch.syspath_prepend(str(where))
    for module in (timing, importlib.import_module("tokenspeed_kernel.workbench.tuning.search")):
        monkeypatch.setattr(module, "time", importlib.import_module("clock_of_norms").clock)
    facts: dict[str, Any] = {"solution": "lab", "signatures": None, "traits": {"hidden": any, "residual": False}}
    register_kernel("norm", "rmsnorm", name="waiting", priority=15, tunables={"wait": [100, 400]}, **facts)("norms:waiting")
    return tmp_path / "tuned"


def tune_some(*words: str, code: int = 0) -> str:
    return call("tune", "--op", "rmsnorm", "--case", "one row of 8", "--budget", "0.3", *words, code=code)


def test_it_measures_and_explains(folder: Path) -> None:
    printed = tune_some("--trials")
    assert "wait=100" in printed
    assert "waiting" in printed
    assert "wait=400" in printed, "--trials shows what lost"
    assert "speedup of tuned choices over untuned ones" in printed
    assert f"written to {folder}" in printed
    explained = call("explain", "rmsnorm", "--case", "one row of 8")
    assert "tuned: " in explained
    assert "(wait=100)" in explained
    listed = call("tune", "--list")
    assert "hidden=8, rows=1" in listed
    assert "1 results, 0 stale" in listed
    (entry,) = json.loads(call("tune", "--list", "--json"))
    assert entry["stale"] == ""
    assert entry["results"][0]["config"] == {"wait": 100}


def test_as_json(folder: Path) -> None:
    told = json.loads(tune_some("--json"))
    (outcome,) = told["outcomes"]
    assert outcome["config"] == {"wait": 100}
    assert outcome["gain"] == pytest.approx(outcome["untuned_us"] / outcome["tuned_us"], rel=1e-3)
    assert told["mean_gain"] == pytest.approx(outcome["gain"])
    assert {trial["status"] for trial in outcome["trials"]} <= {"measured", "hopeless"}


def test_stale_results_are_listed_and_cleared(folder: Path) -> None:
    tune_some()
    (listed,) = tuned.all_entries(cpu_platform())
    changed = tuned.Entry.from_dict({**listed.entry.to_dict(), "driver": "1.2.3", "sizes": {"rows": 4, "hidden": 8}})
    tuned.record(changed)
    told = call("tune", "--list")
    assert "the driver was 1.2.3 and is unknown" in told
    assert "2 results, 1 stale" in told
    assert "removed 1 results" in call("tune", "--clear", "--stale")
    assert "1 results, 0 stale" in call("tune", "--list")
    assert "removed 0 results" in call("tune", "--clear", "--op", "mm")
    assert "removed 1 results" in call("tune", "--clear")
    assert "no tuned results" in call("tune", "--list")


def test_an_export_is_a_shipped_table(folder: Path, tmp_path: Path) -> None:
    assert "there are no results" in refused("tune", "--export", str(tmp_path / "cpu.json"))
    tune_some()
    assert "1 results" in call("tune", "--export", str(tmp_path / "cpu.json"))
    call("tune", "--clear")
    assert "tuned: " not in call("explain", "rmsnorm", "--case", "one row of 8")
    tuned.register_tuned_tables(tmp_path)
    assert "tuned: " in call("explain", "rmsnorm", "--case", "one row of 8")
    assert str(tmp_path / "cpu.json") in call("tune", "--list")
    assert "there is no folder" in refused("tune", "--export", str(tmp_path / "nowhere" / "cpu.json"))


def test_captured_calls_are_tuned_on(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def captured(path: Path, operator: str | None = None) -> list[Any]:
        case = get_operator("rmsnorm").all_cases()[0]
        again = Case("rows that a model has", case.make)
        return [SimpleNamespace(operator="norm.rmsnorm", case=again, count=7)]

    monkeypatch.setattr(command, "load_cases", captured)
    told = json.loads(call("tune", "--from", str(tmp_path / "shapes.jsonl"), "--budget", "0.3", "--json"))
    assert [(o["case"], o["count"], o["config"]) for o in told["outcomes"]] == [("rows that a model has", 7, {"wait": 100})]
    monkeypatch.undo()


def test_a_wrong_kernel_ends_with_an_error(folder: Path) -> None:
    facts: dict[str, Any] = {"solution": "lab", "signatures": None, "traits": {"hidden": any, "residual": False}}
    register_kernel("norm", "rmsnorm", name="wrong", priority=16, tunables={"wait": [100]}, **facts)(
        lambda x, weight, eps, residual, out, residual_out, *, wait=5: x * 2
    )
    printed = tune_some("--kernel", "wrong", code=1)
    assert "wrong: wrong" in printed
    assert "verify: failed" in printed
    assert "no candidate ran to the end and was right" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what to tune on"),
        (("--list", "--clear"), "--list and --clear do not go together"),
        (("--list", "--from", "f"), "--list and --from do not go together"),
        (("--stale",), "--stale goes with --clear"),
        (("--op", "rmsnrm"), "did you mean rmsnorm"),
        (("--op", "rmsnorm", "--kernel", "reference_mm"), "--kernel reference_mm: it is no kernel of norm.rmsnorm"),
        (("--op", "rmsnorm", "--kernel", "nothing"), "no kernel or operator 'nothing'"),
        (("--from", "/nowhere/shapes.jsonl"), "--from /nowhere/shapes.jsonl: "),
    ],
)
def test_impossible_options_of_tune(folder: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused("tune", *words)
