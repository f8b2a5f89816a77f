"""The attention benchmark for the H200, its bars and its plot: the parts that need no GPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tokenspeed_kernel.workbench.benchmark import Method, Report, Unsupported, collect_metadata, load_report
from tokenspeed_kernel_base.cases import Cost
from tokenspeed_kernel_base.operator import get_operator

from .benchmark_programs import FOLDER, loaded, measure_on_the_cpu

NAMES = ("measuring", "shapes", "baselines", "bars", "h200", "mm_shapes", "h200_mm", "plot", "plot_mm")


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    with loaded(NAMES) as programs:
        yield programs


def _small(shapes: ModuleType) -> list[Any]:
    heads: dict[str, Any] = {"heads": 8, "kv_heads": 2}
    return [
        shapes.Shape("prefill", "mha_prefill", 70, 3, **heads),
        shapes.Shape("window prefill", "mha_prefill", 200, 2, **heads, window_left=127),
        shapes.Shape("extend", "mha_extend_with_kvcache", 190, 5, 16, **heads, window_left=31),
        shapes.Shape("decode", "mha_decode_with_kvcache", 200, 6, **heads),
        shapes.Shape("decode of 4", "mha_decode_with_kvcache", 200, 2, 4, **heads),
    ]


def test_shapes_are_those_of_the_bars(modules: dict[str, ModuleType]) -> None:
    shapes = modules["shapes"].SHAPES
    names = [shape.name for shape in shapes]
    assert len({*names}) == len(names)
    assert {shape for bar in modules["bars"].BARS for shape in bar.shapes} <= {*names}
    full = [(shape.length, shape.batch) for shape in shapes if shape.group == "prefill"]
    assert full == [(length, batch) for length in (1024, 4096, 8192) for batch in (1, 2, 4, 8, 16)]
    assert "decode 1K x 256" in names
    assert all(shape.window_left in (-1, 127) for shape in shapes)


@pytest.mark.parametrize("index", range(5))
def test_the_reference_of_rows_is_that_of_the_operator(modules: dict[str, ModuleType], index: int) -> None:
    shapes, baselines, measuring = modules["shapes"], modules["baselines"], modules["measuring"]
    shape = _small(shapes)[index]
    op = get_operator(f"attention.{shape.mode}")
    arguments = op.complete(shape.case().build("cpu"))
    op.check_call(arguments)
    rows = shapes.sampled_rows(shape)
    tokens = arguments["q"].shape[0]
    assert rows == sorted({*rows})
    assert {0, tokens - 1} <= {*rows} <= {*range(tokens)}
    for sinks in (True, False):
        given = arguments if sinks else {**arguments, "sinks": None}
        out = baselines.output_of(op.reference(*given.values()))
        assert out.shape == arguments["q"].shape
        expected = shapes.reference_rows(shape, given, rows, sinks=sinks)
        assert measuring.relative_error(out[rows], expected) < 3e-3  # the rounding error of bfloat16
        assert measuring.relative_error(out[rows] * 1.01, expected) > modules["bars"].LARGEST_ERROR
        assert measuring.worst_row_error(out[rows], expected) < 0.5 * modules["bars"].LARGEST_ROW_ERROR
    assert measuring.relative_error(torch.full_like(expected, torch.nan), expected) == math.inf


def test_one_wrong_row_among_many_is_seen(modules: dict[str, ModuleType]) -> None:
    measuring, bars = modules["measuring"], modules["bars"]
    expected = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(0))
    got = expected.clone()
    got[31, 5] *= 1.1
    assert measuring.relative_error(got, expected) < bars.LARGEST_ERROR
    assert measuring.worst_row_error(got, expected) == pytest.approx(0.1)
    got[31, 5] = torch.nan
    assert measuring.worst_row_error(got, expected) == math.inf


def test_implementations_state_what_they_do_not_support(modules: dict[str, ModuleType]) -> None:
    """Before any import, so it does not matter whether they are installed."""
    shapes = {shape.name: shape for shape in modules["shapes"].SHAPES}
    everyone = {each.name: each for each in modules["baselines"].implementations({})}
    assert [each.name for each in everyone.values() if each.ours] == ["ours", "triton"]
    for name, shape in (("fa4", "decode 1K x 1"), ("cudnn", "window prefill 1K x 16"), ("flashinfer", "decode of 4 8K x 16")):
        with pytest.raises(Unsupported):
            everyone[name].setup(shapes[shape], {})


def test_our_functions_get_the_arguments_by_name(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("made_for_this")
    made.attend = lambda **arguments: arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_for_this", made)
    shape = _small(modules["shapes"])[0]
    setup = modules["baselines"].own({"mha_prefill": "made_for_this:attend"})
    assert setup(shape, {"q": 1, "window_left": -1})() == {"q": 1, "window_left": -1}


def test_a_shape_is_measured(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Five implementations (correct, wrong, failing, absent, unsupported) are measured into a report, which is loaded again."""
    h200, shapes, baselines = modules["h200"], modules["shapes"], modules["baselines"]
    measuring = modules["measuring"]
    measure_on_the_cpu(measuring, monkeypatch)
    for name in ("_COPIES", "_PREFILL_COPIES"):
        monkeypatch.setattr(h200, name, 2)

    def reference(shape: Any, arguments: Any, factor: float = 1.0) -> Any:
        op = get_operator(f"attention.{shape.mode}")
        return lambda: op.reference(*arguments.values()) * factor

    def absent(shape: Any, arguments: Any) -> Any:
        raise ImportError("there is no such package")

    def unsupported(shape: Any, arguments: Any) -> Any:
        raise Unsupported("not that")

    who = [
        baselines.Implementation("ours", reference, "", ours=True),
        baselines.Implementation("triton", lambda s, a: reference(s, a, 1.01), "", ours=True),
        baselines.Implementation("fa3", lambda s, a: lambda: 1 // 0, ""),
        baselines.Implementation("fa4", absent, ""),
        baselines.Implementation("cudnn", unsupported, ""),
    ]
    rows = []
    for shape in _small(shapes):
        rows += h200.measure_shape(shape, who, torch.device("cpu"), measuring.Effort(3, 17, 0.0))
        assert "ours 28.00 us" in h200.line_of(shape, rows[-5:])
    assert [row["status"] for row in rows] == ["measured", "failed", "error", "absent", "skipped"] * 5
    assert "above 0.005" in rows[1]["reason"]
    assert "ZeroDivisionError" in rows[2]["reason"]
    ours = rows[0]
    assert ours["timing"]["repeats"] == 51
    assert (ours["timing"]["median_us"], ours["launch"]["host_us"]) == (28.0, 3.0)
    assert 0 < ours["relative_error"] < 3e-3
    assert ours["relative_error"] < ours["worst_row_error"] < 1e-2
    assert (ours["between_us"], rows[3]["between_us"]) == (1.5, None)
    made = h200.document(rows, who, Report(collect_metadata("h200.py"), (), None, Method()))
    assert made["absent"] == {"fa4": "there is no such package"}
    assert "fa4" not in made["versions"]
    assert "between_us" in made["method"]["between"]
    file = tmp_path / "report.json"
    measuring.write(file, made)
    assert json.loads(file.read_text()) == json.loads(json.dumps(made))
    assert [row.kernel for row in load_report(file).rows] == [row["kernel"] for row in rows]
    assert sum(line.startswith('    {"kernel"') for line in file.read_text().splitlines()) == len(rows)


def test_another_kernel_stands_after_each_call(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    measuring, captured, launched = modules["measuring"], [], []

    def sample_graph(calls: Any, device: Any, **options: Any) -> list[float]:
        captured.append(len(calls))
        for call in calls:
            call()
        return [1.0, 3.0, 2.0]

    monkeypatch.setattr(measuring, "sample_graph", sample_graph)
    between = measuring.Between(torch.device("cpu"), 3)
    assert (between.us, captured) == (2.0, [measuring._BETWEEN])
    small = between._launch.func.__self__
    assert (small == measuring._BETWEEN).all()
    both = between.after(lambda: launched.append(float(small[0])))
    both()
    both()
    assert launched == [measuring._BETWEEN, measuring._BETWEEN + 1]


def test_a_wrong_row_fails(modules: dict[str, ModuleType]) -> None:
    shape, baselines = _small(modules["shapes"])[3], modules["baselines"]
    op = get_operator(f"attention.{shape.mode}")

    def spoilt(shape: Any, arguments: Any) -> Any:
        out = op.reference(*arguments.values())
        out[0, 0] *= 1.025
        return lambda: out

    (row,) = modules["h200"].measure_shape(
        shape,
        [baselines.Implementation("ours", spoilt, "", ours=True)],
        torch.device("cpu"),
        modules["measuring"].Effort(0, 1, 0.0),
    )
    assert row["status"] == "failed"
    assert row["reason"].endswith("of the worst row is above 0.02")


def test_outputs_can_be_checked_alone(modules: dict[str, ModuleType]) -> None:
    shape, baselines = _small(modules["shapes"])[3], modules["baselines"]
    op = get_operator(f"attention.{shape.mode}")
    who = [baselines.Implementation("ours", lambda s, a: lambda: op.reference(*a.values()), "", ours=True)]
    (row,) = modules["h200"].measure_shape(shape, who, torch.device("cpu"), modules["measuring"].Effort(0, 1, 0.0))
    assert row["timing"] is None
    assert "ours err 1." in modules["h200"].line_of(shape, [row])


def test_the_program_rejects_unknown_names(modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    main = modules["h200"].main
    main(["--list", "--only", "^decode 1K"])
    assert capsys.readouterr().out.split("\n")[:4] == [f"decode 1K x {batch}" for batch in (1, 16, 64, 256)]
    for words in (["--contestants", "ours,nobody"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            main(words)
    assert "no shape has such a name" in capsys.readouterr().err


# -- bars and plot -------------------------------------------------------------------------------------------------------------


def _times(modules: dict[str, ModuleType], factor: float) -> dict[str, dict[str, float]]:
    """Times by a crude model; the baselines take ``factor`` times as long."""
    times = {}
    for shape in modules["shapes"].SHAPES:
        if shape.paged:
            keys = min(shape.length, 128 + shape.new) if shape.window_left >= 0 else shape.length
            us = 3.0 + shape.batch * keys * shape.kv_heads * shape.head_dim * 4 / 4.2e6
        elif shape.window_left >= 0:
            us = 5.0 + shape.batch * shape.length / 170
        else:
            us = 5.0 + 2 * shape.batch * shape.length**2 * shape.heads * shape.head_dim / 600e6
        times[shape.name] = {"ours": us, "triton": us * 4, "fa3": us * factor}
        if not shape.paged:
            times[shape.name]["fa4"] = us * factor * 1.1
            if shape.window_left < 0:
                times[shape.name]["cudnn"] = us * factor * 1.2
        elif shape.window_left < 0 and shape.new == 1:
            times[shape.name]["flashinfer"] = us * factor * 0.9
    return times


def test_bars(modules: dict[str, ModuleType]) -> None:
    judge = modules["bars"].judge
    judged = {bar["name"]: bar for bar in judge(_times(modules, 1.4), {"a": 1e-3, "b": 4e-3})}
    assert len(judged) == len(modules["bars"].BARS) + 1
    assert judged["prefill: best peer, geometric mean"]["value"] == pytest.approx(1.4)
    assert judged["prefill head_dim 128: FA3, worst shape"]["value"] == pytest.approx(1.4)
    assert judged["decode: best peer, geometric mean"]["value"] == pytest.approx(1.4 * 0.9)
    assert judged["prefill 1K x 16: TFLOP/s"]["value"] == pytest.approx(
        2**39 * 16 / 64 / (5 + 2**39 * 16 / 64 / 600e6) / 1e6, rel=0.3
    )
    assert judged["relative error, worst shape"] == {
        "name": "relative error, worst shape", "bound": 5e-3, "most": True, "value": 4e-3, "holds": True,
    }  # fmt: skip
    slower = {bar["name"]: bar["holds"] for bar in judge(_times(modules, 1.04), {"a": 6e-3})}
    assert not slower["prefill: best peer, geometric mean"]
    assert slower["prefill: best peer, worst shape"]
    assert not slower["relative error, worst shape"]
    apart = _times(modules, 1.4)
    del apart["decode 1K x 1"]["flashinfer"]
    for absent, holds in (((), None), (("flashinfer",), True), (("flashinfer", "fa3"), None)):
        judged = {bar["name"]: bar for bar in judge(apart, {}, absent)}
        assert judged["decode: best peer, geometric mean"]["holds"] is holds
    nothing = judge({"decode 1K x 1": {"ours": 5.0}}, {})
    assert [bar["value"] for bar in nothing if bar["value"] is not None] == [5.0]
    assert {bar["holds"] for bar in nothing} == {None, True}


def _report(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """A report like h200.py's, with fake times."""
    h200 = modules["h200"]
    everyone, rows = modules["baselines"].implementations({}), []
    for shape in modules["shapes"].SHAPES:
        times = _times(modules, 1.25)[shape.name]
        flops = 2 * shape.batch * shape.length**2 * shape.heads * shape.head_dim
        moved = 2.0 * shape.batch * shape.length * shape.kv_heads * shape.head_dim * 2
        for each in everyone:
            measurement = modules["measuring"].Measurement(each, shape, error=2e-3, row_error=4e-3)
            if each.name in times:
                measurement.between_us = 1.25
                measurement.rounds.append([times[each.name]] * 3)
            else:
                measurement.status = "skipped"
            rows.append(measurement.row(Cost(flops, moved)))
    metadata = collect_metadata("h200.py --output h200.json")
    return h200.document(rows, everyone, Report(metadata, (), None, Method()))


def test_the_picture(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = _report(modules)
    file = tmp_path / "report.json"
    modules["measuring"].write(file, report)
    for name in ("a.svg", "b.svg", "c.png"):
        modules["plot"].main([str(file), "--output", str(tmp_path / name)])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    ElementTree.parse(tmp_path / "a.svg")
    assert (tmp_path / "c.png").stat().st_size > 20_000


def test_the_picture_of_a_part(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """Reports of one shape, and of none, can be plotted too."""
    pytest.importorskip("matplotlib")
    report = _report(modules)
    for wanted in ("decode 8K x 1", "none"):
        part = {**report, "rows": [row for row in report["rows"] if row["case"] == wanted]}
        modules["plot"].draw(part, tmp_path / "part.svg")
        ElementTree.parse(tmp_path / "part.svg")


def test_the_table(modules: dict[str, ModuleType]) -> None:
    pytest.importorskip("matplotlib")
    lines = modules["plot"].table(_report(modules)).splitlines()
    (said,) = [line for line in lines if "small PyTorch kernel stands after each call" in line]
    assert "(1.25 us) is subtracted" in said
    assert "4.0e-03" in said
    (row,) = [line for line in lines if line.startswith("| decode 8K x 16 |")]
    assert row.endswith("| 1.12 |")
    assert any(line.startswith("| decode 8K x 16: us | at most 76 |") and line.endswith("holds |") for line in lines)


def test_the_section_of_the_readme(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, report = modules["plot"], _report(modules)
    (tmp_path / "report.json").write_text(json.dumps(report))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{plot.MARKS.begin}\n\n## After\n")
    monkeypatch.setattr(plot, "README", readme)
    for _ in range(2):
        plot.main([str(tmp_path / "report.json"), "--output", str(tmp_path / "picture.svg"), "--readme"])
        assert plot.MARKS.inside(readme.read_text()) == plot.section(report, "picture.svg")
        assert readme.read_text().startswith("before\n")
        assert readme.read_text().endswith(f"{plot.MARKS.end}\n\n## After\n")


def test_the_committed_report(modules: dict[str, ModuleType]) -> None:
    """The report has the benchmark's shapes and bars, and the README shows it."""
    file = FOLDER / "h200.json"
    if not file.exists():
        pytest.skip("nothing has been measured yet")
    report = json.loads(file.read_text())
    assert {row["case"] for row in report["rows"]} == {shape.name for shape in modules["shapes"].SHAPES}
    times = modules["measuring"].times_of(report["rows"])
    errors = {r["case"]: r["relative_error"] for r in report["rows"] if r["kernel"] == "ours" and r["relative_error"] is not None}
    assert report["bars"] == json.loads(json.dumps(modules["bars"].judge(times, errors, report["absent"])))
    if "plot" in modules:
        assert modules["plot"].MARKS.inside((FOLDER.parent / "README.md").read_text()) == modules["plot"].section(
            report, "benchmarks/h200.svg"
        )


# -- GEMMs ---------------------------------------------------------------------------------------------------------------------


def test_gemms_are_listed(modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    modules["h200_mm"].main(["--only", "GPT-OSS-120B router x", "--variants", "no c", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [f"GPT-OSS-120B router x {m}" for m in (1, 2, 4, 8, 16)]
    assert lines[5:] == ["ours", "torch", "triton", "no cluster"]
    with pytest.raises(SystemExit):
        modules["h200_mm"].main(["--only", "nothing has this name"])


def test_gemms_are_measured(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU, with small weights: rows, bars and files, with fake times."""
    h200_mm, shapes, measuring = (modules[name] for name in ("h200_mm", "mm_shapes", "measuring"))
    measure_on_the_cpu(measuring, monkeypatch)
    monkeypatch.setattr(h200_mm, "sample_graph", measuring.sample_graph)
    monkeypatch.setattr(h200_mm, "Norm", measuring.Between)
    small = [dataclasses.replace(gemm, k=64, n=24) for gemm in shapes.GEMMS[:1]]
    some = [shapes.Shape(gemm, m) for gemm in small for m in (1, 16)]

    def stand_in(inputs: Any) -> Any:
        return functools.partial(torch.addmm, inputs["bias"], inputs["a"], inputs["b"], out=inputs["out"])

    def wrong(inputs: Any) -> Any:
        return functools.partial(torch.mm, inputs["a"], inputs["b"], out=inputs["out"])

    who = [measuring.Implementation(name, setup, "", ours=name == "ours") for name, setup in
           (("ours", stand_in), ("torch", stand_in), ("wrong", wrong))]  # fmt: skip
    monkeypatch.setattr(h200_mm, "_TOUCHED", 1e4)
    report = Report(collect_metadata("h200_mm.py"), (), None, Method())
    made = h200_mm.measure(some, who, torch.device("cpu"), measuring.Effort(2, 3, 0.0), report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(made))
    status = {(row["case"], row["kernel"]): row["status"] for row in made["rows"]}
    assert status["GPT-OSS-120B qkv x 16", "ours"] == "measured"
    assert status["GPT-OSS-120B qkv x 16", "wrong"] == "failed"
    ours = next(row for row in made["rows"] if row["kernel"] == "ours")
    assert (ours["timing"]["median_us"], ours["ordinary_us"], ours["between_us"]) == (21.0, 21.0, 1.5)
    assert made["method"]["between"] == h200_mm._BETWEEN_IS
    bars = {bar["name"]: bar for bar in made["bars"]}
    assert (bars["GPT-OSS-120B qkv x 1: us"]["bound"], bars["GPT-OSS-120B qkv x 1: us"]["value"]) == (7.8, 21.0)
    assert bars["GPT-OSS-120B qkv x 16: us"]["bound"] == 8.97
    assert bars["GPT-OSS-120B router x 1: us"]["value"] is None
    head, *lines = h200_mm.short_table(made["rows"]).splitlines()
    assert head.split() == ["us", "floor", "ours", "torch", "wrong"]
    assert [line.split()[-2:] for line in lines] == [["21.00", "-"]] * 2
    if "plot_mm" in modules:
        plot = modules["plot_mm"]
        for name in ("a.svg", "b.svg"):
            plot.main([str(tmp_path / "report.json"), "--output", str(tmp_path / name)])
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
        rows = plot.table(made).splitlines()
        assert "| GPT-OSS-120B qkv x 1 | 0.000706 | 21 | 21 | 21 | 21 | 1.00 |" in rows
        assert any(line.startswith("| GPT-OSS-120B qkv x 16: us | at most 8.97 | 21 | missed |") for line in rows)


def test_the_committed_report_of_gemms(modules: dict[str, ModuleType]) -> None:
    """The report has the benchmark's shapes and bars, and the README shows it."""
    file = FOLDER / "h200_mm.json"
    if not file.exists():
        pytest.skip("nothing has been measured yet")
    report, measuring = json.loads(file.read_text()), modules["measuring"]
    assert {row["case"] for row in report["rows"]} <= {shape.name for shape in modules["mm_shapes"].SHAPES}
    judged = modules["mm_shapes"].judge(
        measuring.times_of(report["rows"]), measuring.errors_of(report["rows"]), measuring.absent_of(report["rows"])
    )
    assert report["bars"] == json.loads(json.dumps(judged))
    if "plot_mm" in modules:
        plot = modules["plot_mm"]
        assert plot.MARKS.inside((FOLDER.parent / "README.md").read_text()) == plot.section(report, "benchmarks/h200_mm.svg")


def test_the_commit_of_a_copy(modules: dict[str, ModuleType]) -> None:
    measuring = modules["measuring"]
    given = measuring.parser_of("").parse_args(["--check", "--commit", "abc"])
    report = measuring.empty_report(given, measuring.effort_of(given), ["h200_mm.py"], 1, torch.device("cpu"))
    assert report.metadata.git_commit == "abc"


def test_operands_of_gemms(modules: dict[str, ModuleType]) -> None:
    """For every kind of weights: their size in bytes as stated, and the first rows of activations."""
    h200_mm, shapes = modules["h200_mm"], modules["mm_shapes"]
    for weights in shapes._MADE:
        small = shapes.Gemm("a model's", "layer", 128, 2880, weights=weights)
        inputs = h200_mm.inputs_of(small, torch.device("cpu"), 0)
        for m in (1, 16):
            some = h200_mm.first_rows(inputs, m)
            assert (some["a"].shape[0], some["out"].shape) == (m, (m, 2880))
        assert small.bytes == pytest.approx(sum(t.nbytes for t in (inputs["b"], inputs["b_scale"]) if t is not None), rel=0.05)
