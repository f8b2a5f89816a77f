"""Tests the runner of benchmark programs without a GPU: implementations that succeed and fail, reports, bars, plots and pages."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tokenspeed_kernel.workbench.benchmark import Method, Report, Unsupported, collect_metadata, load_report, runner
from tokenspeed_kernel.workbench.benchmark.bars import against, at_most, no_less_accurate, outcome
from tokenspeed_kernel.workbench.benchmark.figures import Figure, Marks, Panel, measured, us
from tokenspeed_kernel.workbench.benchmark.runner import Benchmark, Between, Effort, Implementation, Limits, Task
from tokenspeed_kernel_base.cases import Cost

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    group: str = "group"
    operator: str = "family.mode"


SHAPES = tuple(map(Shape, ("small", "large")))
RIGHT = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(0))


def wrong_row() -> torch.Tensor:
    got = RIGHT.clone()
    got[31, 5] *= 1.1
    return got


def raising(error: Exception) -> Callable[[], Any]:
    def setup() -> Any:
        raise error

    return setup


WHO = [
    Implementation("ours", lambda: RIGHT.clone, "", ours=True),
    Implementation("triton", lambda: lambda: RIGHT * 1.01, "", ours=True, portable=True),
    Implementation("row", lambda: wrong_row, ""),
    Implementation("late", lambda: lambda: 1 // 0, ""),
    Implementation("absent", raising(ImportError("there is no such package")), ""),
    Implementation("unsupported", raising(Unsupported("not that")), ""),
    Implementation("slow", raising(ValueError("so")), "", on_demand=True),
]
STATUS = ["measured", "failed", "failed", "error", "absent", "skipped"]


def task(shape: Shape) -> Task:
    check = runner.errors_against(RIGHT), Limits(5e-3, 2e-2)
    return Task(shape, Cost(2e9, 4e6), lambda each: [(each.setup, *check)], lambda each: [each.setup()] * 2, 4, lambda m: {"m": 1})


def program(folder: Path, **options: Any) -> Benchmark:
    def panels(report: Any) -> list[Panel]:
        values = {name: {who: us(row) for who, row in of_one.items()} for name, of_one in measured(report, ["small"]).items()}
        return [Panel("microseconds", values, list(values), 1, one=True)]

    figure = Figure(
        "Calls", "## Measured", "microseconds", {"theirs": ("Theirs", "#c2410c")}, [shape.name for shape in SHAPES], panels,
        Marks("<!-- begin -->", "<!-- end -->"), folder / "README.md", columns=lambda report: {"m": lambda row: str(row["m"])},
    )  # fmt: skip
    given: dict[str, Any] = {
        "file": str(folder / "program.py"),
        "description": "measures",
        "shapes": SHAPES,
        "implementations": lambda given: WHO,
        "tasks": lambda shapes, who, device, effort: map(task, shapes),
        "bars": [at_most("small", 30.0), against("theirs", 1.0, ["small"], ["theirs", "absent"])],
        "judged": lambda rows: [outcome("rows", 99, len(rows))],
        "rate": lambda row: f"{row['tflops']:.0f} TF",
        "figure": figure,
    }
    return Benchmark(**{**given, **options})


def empty() -> Report:
    return Report(collect_metadata("python program.py", CPU), (), None, Method())


def test_shapes_are_measured(tmp_path: Path, fake_graphs: None, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    made = program(tmp_path).run(SHAPES[::-1], WHO[:6], CPU, Effort(3, 17, 0.0), empty(), file)
    assert "large: ours 28.00 us 71 TF err 0.0e+00 host 3.0 | triton failed: relative error" in capsys.readouterr().out
    assert [(row["case"], row["status"]) for row in made["rows"]] == [(s.name, status) for s in SHAPES for status in STATUS]
    assert json.loads(file.read_text()) == json.loads(json.dumps(made))
    assert [row.kernel for row in load_report(file).rows] == [row["kernel"] for row in made["rows"]]
    ours, *others = made["rows"][:6]
    assert (ours["timing"]["repeats"], ours["timing"]["median_us"], ours["between_us"], ours["m"]) == (51, 28.0, 1.5, 1)
    assert [each["median_us"] for each in ours["timing"]["rounds"]] == [28.0] * 3
    assert (ours["launch"]["host_us"], ours["relative_error"], ours["group"]) == (3.0, 0.0, "group")
    ends = ("is above 0.005", "of the worst row is above 0.02", "ZeroDivisionError", "no such package", "not that")
    assert all(end in row["reason"] for end, row in zip(ends, others, strict=True))
    assert all(row["timing"] is row["between_us"] is None for row in others)
    assert made["absent"] == {"absent": "there is no such package"}
    assert "absent" not in made["versions"]
    assert [(bar["name"], bar["value"], bar["holds"]) for bar in made["bars"]] == [
        ("small: us", 28.0, True), ("theirs", None, None), ("rows", 12, True),
    ]  # fmt: skip
    said = program(tmp_path).outcome(made).splitlines()
    assert "holds  small: us: 28 (<= 30)" in said
    assert said[-1].split() == ["large", "28.00", *STATUS[1:]]


def test_outputs_can_be_checked_alone(tmp_path: Path) -> None:
    (row,) = program(tmp_path).measure(task(SHAPES[0]), WHO[:1], CPU, Effort(0, 1, 0.0))
    assert row["timing"] is None
    assert program(tmp_path).line([row]) == "small: ours err 0.0e+00"


def test_another_kernel_follows_each_call(fake_graphs: None) -> None:
    launched: list[float] = []
    between = Between(CPU, Effort(1, 3, 0.0))
    assert between.us == 1.5
    small = between._launch.func.__self__  # type: ignore[attr-defined]
    assert (small == runner.BETWEEN).all()
    both = between.after(lambda: launched.append(float(small[0])))
    both()
    both()
    assert launched == [runner.BETWEEN, runner.BETWEEN + 1]
    alone = Between(CPU, Effort(1, 3, 0.0, back_to_back=True))
    assert alone.us is None
    assert alone.after(both) is both


def test_errors() -> None:
    assert runner.relative_error(wrong_row(), RIGHT) < 5e-3
    assert runner.worst_row_error(wrong_row(), RIGHT) == pytest.approx(0.1)
    assert runner.errors_against(RIGHT)(torch.full_like(RIGHT, torch.nan)) == (math.inf, math.inf)


def test_bars() -> None:
    times = {"a": {"ours": 10.0, "x": 20.0, "y": 15.0}, "b": {"ours": 10.0, "x": 12.0}}
    assert against("n", 1.2, ["a", "b"], ["x"], mean=True).judged(times)["value"] == pytest.approx(2.4**0.5)
    for absent, value in (((), None), (("y",), 1.2), (("x", "y"), None)):
        assert against("n", 1.2, ["a", "b"], ["x", "y"]).judged(times, absent)["value"] == value
    assert at_most("c", 3.0).judged(times) == {"name": "c: us", "bound": 3.0, "most": True, "value": None, "holds": None}
    assert not at_most("a", 9.0).judged(times)["holds"]
    (bar,) = no_less_accurate({"a": {"ours": 3.0, "triton": 2.0}, "b": {"ours": 1.0, "triton": 1.0}, "c": {"triton": 1.0}})
    assert (bar["value"], bar["holds"]) == (1.5, False)
    assert no_less_accurate({"c": {"triton": 1.0}}) == []


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = functools.partial(program, tmp_path)
    chosen().main(["--list", "--only", "^sm", "--only", "no"])
    assert capsys.readouterr().out.splitlines() == ["small", *(each.name for each in WHO[:6])]
    chosen().main(["--list", "--baselines", "slow"])
    assert capsys.readouterr().out.splitlines() == ["small", "large", "slow"]
    for words in (["--baselines", "ours,nobody"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            chosen().main(words)
    assert "no such shape" in capsys.readouterr().err
    given = chosen().parser().parse_args(["--check", "--commit", "abc"])
    report = chosen().empty_report(given, chosen().effort(given), ["program.py"], CPU)
    assert (report.metadata.git_commit, report.metadata.command.split()[1:]) == ("abc", ["program.py"])


def with_theirs(tmp_path: Path) -> dict[str, Any]:
    """Makes a report with a baseline that takes 35 microseconds."""
    theirs = runner.Measurement(Implementation("theirs", lambda: None, ""), SHAPES[0], error=0.0, row_error=4e-3, between_us=1.5)
    theirs.rounds.append([35.0] * 3)
    ours = dataclasses.replace(theirs, implementation=WHO[0], rounds=[[28.0]])
    rows = [{**each.row(Cost(1.0, 1.0)), "m": 7} for each in (ours, theirs)]
    return program(tmp_path).document(rows, WHO, empty())


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, figure = with_theirs(tmp_path), program(tmp_path).figure
    (tmp_path / "program.json").write_text(json.dumps(report))
    program(tmp_path).main(["--table"])
    lines = capsys.readouterr().out.splitlines()
    assert "| microseconds | m | this package | Theirs | best baseline / ours |" in lines
    assert "| small | 7 | 28 | 35 | 1.25 |" in lines
    assert "| small: us | at most 30 | 28 | holds |" in lines
    assert any("(1.50 us) is subtracted" in line and "4.0e-03" in line for line in lines)
    figure.readme.write_text("before\n<!-- begin -->\n\n## After\n")
    for _ in range(2):
        figure.write(report, tmp_path / "program.svg")
        text = figure.readme.read_text()
        assert figure.marks.inside(text) == figure.section(report, "program.svg")
        assert text.startswith("before\n")
        assert text.endswith("<!-- end -->\n\n## After\n")


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, file = with_theirs(tmp_path), tmp_path / "report.json"
    file.write_text(json.dumps(report))
    for name in ("a.svg", "b.svg", "c.png"):
        program(tmp_path).main(["--plot", str(file), "--output", str(tmp_path / name)])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").stat().st_size > 10_000
    program(tmp_path).figure.draw({**report, "rows": []}, tmp_path / "a.svg")
    ElementTree.parse(tmp_path / "a.svg")


def test_options_of_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size")

    program(tmp_path, options=options, chosen=lambda given, shape: shape.name == given.size).main(["--list", "--size", "large"])
    assert capsys.readouterr().out.splitlines()[0] == "large"
