"""Tests the script that predicts MoE times, with whole layers of GPT-OSS-120B at one and four tokens, and with slices of layers for
more tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def program(timing_programs: Callable[[str], ModuleType]) -> ModuleType:
    return timing_programs("timing_model_moe")


@pytest.mark.slow
def test_whole_layers(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full-size layers of 128 experts take two launches for 1 and 4 tokens, routing included. With 4 tokens, the predicted time is
    at most 1.35 times the floor."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{program.MARKS[0]}\nold\n{program.MARKS[1]}\nafter\n")
    monkeypatch.setattr(program, "README", readme)
    output = tmp_path / "report.json"
    few = [word for side in ("portable", "by-token", "others") for word in (f"--{side}-up-to", "0")]
    program.main(["--tokens", "1", "4", *few, "--output", str(output), "--readme"])
    report = json.loads(output.read_text())
    assert [row["tokens"] for row in report["rows"]] == [1, 4]
    for row in report["rows"]:
        assert row["ours"]["relative_error"] <= program.ERRORS["ours"]
        assert [launch["kernel"] for launch in row["ours"]["launches"]] == ["routed_first_kernel", "second_kernel"]
    assert report["rows"][1]["ours"]["us"] <= 1.35 * report["rows"][1]["floor_us"]
    assert report["summary"] == {}
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert program.table(report) in capsys.readouterr().out


@pytest.mark.slow
def test_256_tokens_in_full_size(program: ModuleType) -> None:
    """Executes a full-size layer, in which all 128 experts have tokens, on two processes, and checks the launches and the
    result."""
    from gfx950_emulator import emulated_gfx950

    layer = program.Layer(256, program.SIZE, program.SIZE, program.EXPERTS)
    with emulated_gfx950(sanitize=False, jobs=2) as emulator:
        out = program.ours(layer)()
    products = ["route_kernel", "grouped_kernel", "grouped_kernel", "combine_kernel"]
    assert [launch.kernel for launch in emulator.launches] == ["choose_kernel", *products]
    program.check("ours", layer, out)


def test_slices_predict_whole_layers(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a layer of 512 features, the prediction from slices of 256 is about the time of the whole layer."""
    monkeypatch.setattr(program, "SIZE", 512)
    monkeypatch.setattr(program, "EXPERTS", 16)
    monkeypatch.setattr(program, "WHOLE", 20)
    whole = program.measure("ours", program.ours, 20)
    monkeypatch.setattr(program, "WHOLE", 4)
    sliced = program.measure("ours", program.ours, 20)
    assert [launch["kernel"] for launch in sliced["launches"]] == [launch["kernel"] for launch in whole["launches"]]
    for found, wanted in zip(sliced["launches"], whole["launches"], strict=True):
        assert found["memory_us"] == pytest.approx(wanted["memory_us"], rel=0.15)
        assert found["us"] == pytest.approx(wanted["us"], rel=0.3)


def test_the_committed_report(program: ModuleType) -> None:
    """The README shows the committed report, which meets the pass criteria."""
    report = json.loads((FOLDER / "timing_model_moe.json").read_text())
    assert program.table(report) in (FOLDER.parent / "README.md").read_text()
    assert [row["tokens"] for row in report["rows"]] == list(program.TOKENS)
    assert report["summary"] == pytest.approx(program.summary(report["rows"]))
    ratios = {row["tokens"]: row["ours"]["us"] / row["peer"]["us"] for row in report["rows"]}
    assert max(ratios.values()) <= 0.95
    assert ratios[1] <= 0.7
    assert ratios[8192] <= 0.75
    assert all(row["portable"]["us"] >= 1.7 * row["by_token"]["us"] for row in report["rows"] if "portable" in row)
    assert all(row["ours"]["us"] <= 1.35 * row["floor_us"] for row in report["rows"] if 16 <= row["tokens"] <= 1024)
    assert math.prod(ratios.values()) ** (1 / len(ratios)) <= 0.8
