"""Tests the attention and GEMM benchmarks for the H200, as far as they need no GPU, and the committed reports of the
benchmarks."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench.benchmark import Method, Report, Unsupported, collect_metadata, runner
from tokenspeed_kernel_base.operator import get_operator

FOLDER = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")
Programs = Callable[[str], ModuleType]


def _small(shapes: ModuleType) -> list[Any]:
    heads: dict[str, Any] = {"heads": 8, "kv_heads": 2}
    return [
        shapes.Shape("prefill", "mha_prefill", 70, 3, **heads),
        shapes.Shape("window prefill", "mha_prefill", 200, 2, **heads, window_left=127),
        shapes.Shape("extend", "mha_extend_with_kvcache", 190, 5, 16, **heads, window_left=31),
        shapes.Shape("decode", "mha_decode_with_kvcache", 200, 6, **heads),
        shapes.Shape("decode of 4", "mha_decode_with_kvcache", 200, 2, 4, **heads),
    ]


def _reference(shape: Any, arguments: Any, factor: float = 1.0) -> Any:
    op = get_operator(f"attention.{shape.mode}")
    return lambda: op.reference(*arguments.values()) * factor


@pytest.mark.parametrize(("name", "bars"), [("h200", 17), ("h200_mm", 6), ("h200_moe", 16), ("h200_moe_activations", 14)])
def test_the_committed_report(programs: Programs, name: str, bars: int) -> None:
    """Asserts that the report has the shapes and bars of the benchmark, and that the README shows the report."""
    benchmark, report = programs(name).BENCHMARK, json.loads((FOLDER / f"{name}.json").read_text())
    names = [shape.name for shape in benchmark.shapes]
    assert len({*names}) == len(names)
    assert {shape for bar in benchmark.bars for shape in bar.shapes} <= {*names}
    assert {row["case"] for row in report["rows"]} <= {*names}
    assert len(report["bars"]) == bars
    assert report["bars"] == json.loads(json.dumps(benchmark.judge(report["rows"])))
    assert report["absent"] == runner.absent_of(report["rows"])
    readme = (FOLDER.parent / "README.md").read_text()
    assert benchmark.figure.marks.inside(readme) == benchmark.figure.section(report, f"benchmarks/{name}.svg")
    for panel in benchmark.figure.panels(report):
        assert len(panel.values) == len(panel.ticks) > 0
        assert all("ours" in values for values in panel.values.values())


@pytest.mark.parametrize(
    ("name", "shape"), [("h200", "decode 1K x 1"), ("h200_mm", "GPT-OSS-120B router x 1"), ("h200_moe", "gpt-oss-120b 1")]
)
def test_a_program_measures_on_the_gpu(programs: Programs, sm90: torch.device, tmp_path: Path, name: str, shape: str) -> None:
    output = tmp_path / "report.json"
    words = ["--quick", "--only", f"^{shape}$", "--baselines", "ours,triton", "--output", str(output)]
    programs(name).BENCHMARK.main(words)
    rows = json.loads(output.read_text())["rows"]
    assert [(row["kernel"], row["status"], row["reason"]) for row in rows] == [("ours", "measured", ""), ("triton", "measured", "")]
    assert 0.5 < rows[0]["timing"]["median_us"] < 100


def test_shapes_are_those_of_models(programs: Programs) -> None:
    shapes = programs("shapes").SHAPES
    full = [(shape.length, shape.batch) for shape in shapes if shape.group == "prefill"]
    assert full == [(length, batch) for length in (1024, 4096, 8192) for batch in (1, 2, 4, 8, 16)]
    assert all(shape.window_left in (-1, 127) for shape in shapes)


@pytest.mark.parametrize("index", range(5))
def test_the_reference_of_rows_is_that_of_the_operator(programs: Programs, index: int) -> None:
    h200, shapes = programs("h200"), programs("shapes")
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
        out = programs("baselines").output_of(op.reference(*given.values()))
        assert out.shape == arguments["q"].shape
        expected = shapes.reference_rows(shape, given, rows, sinks=sinks)
        error, row_error = runner.errors_against(expected)(out[rows])
        assert error < 3e-3  # near the rounding error of bfloat16
        assert row_error < 0.5 * h200.LIMITS.row_error
        assert runner.relative_error(out[rows] * 1.01, expected) > h200.LIMITS.error


def test_implementations_state_what_they_do_not_support(programs: Programs) -> None:
    """Asserts that an implementation rejects unsupported calls before it imports a baseline. So the baselines need not be
    installed."""
    shapes = {shape.name: shape for shape in programs("shapes").SHAPES}
    everyone = {each.name: each for each in programs("baselines").implementations({})}
    assert [each.name for each in everyone.values() if each.ours] == ["ours", "triton"]
    for name, shape in (("fa4", "decode 1K x 1"), ("cudnn", "window prefill 1K x 16"), ("flashinfer", "decode of 4 8K x 16")):
        with pytest.raises(Unsupported):
            everyone[name].setup(shapes[shape], {})


def test_our_functions_get_the_arguments_by_name(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("made_for_this")
    made.attend = lambda **arguments: arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_for_this", made)
    setup = programs("baselines").own({"mha_prefill": "made_for_this:attend"})
    assert setup(_small(programs("shapes"))[0], {"q": 1, "window_left": -1})() == {"q": 1, "window_left": -1}


def test_attention_is_measured(programs: Programs, monkeypatch: pytest.MonkeyPatch, fake_graphs: None) -> None:
    h200 = programs("h200")
    for name in ("_COPIES", "_PREFILL_COPIES"):
        monkeypatch.setattr(h200, name, 2)
    who = [
        runner.Implementation("ours", _reference, "", ours=True),
        runner.Implementation("triton", lambda s, a: _reference(s, a, 1.01), "", ours=True),
    ]
    effort = runner.Effort(1, 3, 0.0)
    for task in h200.tasks(_small(programs("shapes")), who, CPU, effort):
        ours, wrong = h200.BENCHMARK.measure(task, who, CPU, effort)
        assert 0 < ours["relative_error"] < 3e-3
        assert ours["relative_error"] < ours["worst_row_error"] < 1e-2
        assert ours["timing"]["median_us"] == 21.0
        assert wrong["reason"].endswith("is above 0.005")
        assert "ours 21.00 us" in h200.BENCHMARK.line([ours])


# -- GEMMs ---------------------------------------------------------------------------------------------------------------------


def test_gemms_are_listed(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    programs("h200_mm").BENCHMARK.main(["--only", "GPT-OSS-120B router x", "--variants", "no c", "--list"])
    names = [f"GPT-OSS-120B router x {m}" for m in (1, 2, 4, 8, 16)]
    assert capsys.readouterr().out.splitlines() == [*names, "ours", "torch", "triton", "no cluster"]


def test_gemms_are_measured(programs: Programs, monkeypatch: pytest.MonkeyPatch, fake_graphs: None) -> None:
    """Measures GEMMs with small weights on the CPU, with fake times, and checks the rows and bars of the report."""
    h200_mm, shapes = programs("h200_mm"), programs("mm_shapes")
    monkeypatch.setattr(h200_mm, "_TOUCHED", 1e4)
    benchmark = dataclasses.replace(h200_mm.BENCHMARK, between=runner.Between)
    small = dataclasses.replace(shapes.GEMMS[0], k=64, n=24)

    def stand_in(inputs: Any) -> Any:
        return functools.partial(torch.addmm, inputs["bias"], inputs["a"], inputs["b"], out=inputs["out"])

    def wrong(inputs: Any) -> Any:
        return functools.partial(torch.mm, inputs["a"], inputs["b"], out=inputs["out"])

    who = [runner.Implementation(*each, "", ours=index == 0) for index, each in enumerate((("ours", stand_in), ("torch", wrong)))]
    report = Report(collect_metadata("h200_mm.py"), (), None, Method())
    some = [shapes.Shape(small, m) for m in (1, 16)]
    made = benchmark.run(some, who, CPU, runner.Effort(2, 3, 0.0), report)
    assert [row["status"] for row in made["rows"]] == ["measured", "failed"] * 2
    ours, failed = made["rows"][:2]
    assert (ours["timing"]["median_us"], ours["ordinary_us"], ours["between_us"]) == (21.0, 21.0, 1.5)
    assert failed["ordinary_us"] is None
    assert made["method"]["between"] == benchmark.between_is
    bars = {bar["name"]: (bar["bound"], bar["value"]) for bar in made["bars"]}
    assert bars["GPT-OSS-120B qkv x 1: us"] == (7.8, 21.0)
    assert bars["GPT-OSS-120B qkv x 16: us"] == (8.97, 21.0)
    assert bars["GPT-OSS-120B router x 1: us"] == (1.8, None)
    assert "| GPT-OSS-120B qkv x 1 | 0.000706 | 21 |  | 21 |  |" in benchmark.figure.table(made).splitlines()


def test_operands_of_gemms(programs: Programs) -> None:
    """Asserts for every format of weights that the stated number of bytes is correct, and that a GEMM uses the first rows of the
    activations."""
    h200_mm, shapes = programs("h200_mm"), programs("mm_shapes")
    for weights in shapes._MADE:
        small = shapes.Gemm("a model's", "layer", 128, 2880, weights=weights)
        inputs = h200_mm.inputs_of(small, CPU, 0)
        for m in (1, 16):
            some = h200_mm.first_rows(inputs, m)
            assert (some["a"].shape[0], some["out"].shape) == (m, (m, 2880))
        assert small.bytes == pytest.approx(sum(t.nbytes for t in (inputs["b"], inputs["b_scale"]) if t is not None), rel=0.05)
