"""The MoE benchmark for the H200, its bars and its plot: the parts that need no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch

from tokenspeed_kernel.workbench.benchmark import Method, Report, Unsupported, collect_metadata, load_report
from tokenspeed_kernel_base.cases import Cost, Draw
from tokenspeed_kernel_base.operator import get_operator

from .benchmark_programs import FOLDER, loaded, measure_on_the_cpu

NAMES = ("measuring", "judging", "moe_shapes", "moe_baselines", "moe_bars", "h200_moe", "plot_moe")
CPU = torch.device("cpu")


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    with loaded(NAMES) as programs:
        yield programs


def _small(shapes: ModuleType) -> list[Any]:
    """A shape of each kind, and one whose first token has no expert on this rank."""
    return [
        shapes.Shape(shapes.Model("mxfp4", 8, 4, 96, 64, gpt_oss=True), 5),
        shapes.Shape(shapes.Model("dense", 6, 2, 64, 48, "dense"), 3),
        shapes.Shape(shapes.Model("fp8", 4, 2, 128, 160, "fp8_block"), 7, "fp8"),
        shapes.Shape(shapes.Model("parallel", 3, 2, 64, 32, "dense", of=24), 9),
    ]


def _layers(shapes: ModuleType, shape: Any, count: int = 2) -> list[Any]:
    return [shapes.Layer.drawn(shape, CPU, seed) for seed in range(count)]


def test_shapes_are_those_of_the_bars(modules: dict[str, ModuleType]) -> None:
    shapes = modules["moe_shapes"].SHAPES
    names = [shape.name for shape in shapes]
    assert len({*names}) == len(names)
    assert {shape for bar in modules["moe_bars"].BARS for shape in bar.shapes} <= {*names}
    tokens = [shape.tokens for shape in shapes if shape.group == "gpt-oss-120b"]
    assert tokens == [1, 2, 4, 8, 16, 64, 256, 1024, 8192]
    assert [shape.name for shape in shapes if not shape.more][-1] == "gpt-oss-120b 8192 fp8"


@pytest.mark.parametrize("index", range(4))
def test_layers_are_what_models_say(modules: dict[str, ModuleType], index: int) -> None:
    shapes = modules["moe_shapes"]
    shape = _small(shapes)[index]
    model = shape.model
    first, second = _layers(shapes, shape)
    plan = first.plan
    assert (plan.num_experts, plan.top_k, plan.hidden_size) == (model.experts, model.top_k, model.hidden)
    assert (plan.weight_format, plan.activation_dtype) == (model.weight_format, shape.activation_dtype)
    assert (plan.w13_interleaved, plan.bias, plan.limit is not None) == (model.gpt_oss,) * 3
    assert not torch.equal(first.weights.w2_weight.float(), second.weights.w2_weight.float())
    made = shapes.batches(shape, 4, 2, CPU)
    assert [batch.layer for batch in made] == [0, 1, 0, 1]
    op = get_operator("moe.moe_apply")
    for batch in made:
        arguments = batch.arguments(first)
        op.check_call(arguments)
        assert batch.experts == len({*batch.topk_ids.flatten().tolist()} - {-1}) <= model.experts
        right, rounded = shapes.expected(batch, first), op.reference(*arguments.values())
        assert right.dtype == torch.float32
        torch.testing.assert_close(right.bfloat16(), rounded, rtol=0, atol=0)


def test_routing_is_uniform_and_never_tied(modules: dict[str, ModuleType]) -> None:
    shapes = modules["moe_shapes"]
    model = shapes.GPT_OSS_120B
    logits = shapes.router_logits(Draw(CPU, 1), 4096, model)
    best = logits.topk(model.top_k + 1, dim=-1).values
    assert logits.dtype == torch.bfloat16
    assert (best[:, -2] > best[:, -1]).all()
    chosen = logits.topk(model.top_k, dim=-1).indices.flatten().bincount(minlength=model.experts)
    assert 80 < int(chosen.min()) < 128 < int(chosen.max()) < 180


def test_floors_are_those_of_the_table(modules: dict[str, ModuleType]) -> None:
    """For given numbers of experts' weights, scales and biases, and for the arithmetic: within 3%."""
    shapes = modules["moe_shapes"]
    bytes_of_one = 2880 * 2880 * 3 * (0.5 + 1 / 32)
    for experts, us in ((4, 12.2), (128, 389.0)):
        assert shapes.floor_us(Cost(0.0, experts * bytes_of_one), "none") == pytest.approx(us, rel=0.03)
    flops = 6.0 * 8192 * 4 * 2880**2
    assert shapes.floor_us(Cost(flops, 0.0), "none") == pytest.approx(2040, rel=0.01)
    assert shapes.floor_us(Cost(flops, 0.0), "fp8") == pytest.approx(1090, rel=0.01)


@pytest.mark.parametrize("index", range(4))
def test_our_kernels_compute_the_layer(modules: dict[str, ModuleType], index: int) -> None:
    """From logits to output, without experts of other ranks; the reference replaces the kernel."""
    shapes, errors_against = modules["moe_shapes"], modules["h200_moe"].errors_against
    shape = _small(shapes)[index]
    (layer,) = _layers(shapes, shape, 1)
    experts = modules["moe_baselines"].of_solution("reference")(shape, layer)
    for batch in shapes.batches(shape, 2, 1, CPU):
        error, row_error = errors_against(shapes.expected(batch, layer), experts(batch)())
        assert error < 4e-3
        assert row_error < 4e-3


def test_unsupported_calls_are_reported(modules: dict[str, ModuleType]) -> None:
    shapes, baselines = modules["moe_shapes"], modules["moe_baselines"]
    mxfp4, dense, fp8, _ = _small(shapes)
    (layer,) = _layers(shapes, mxfp4, 1)
    with pytest.raises(Unsupported, match="cutedsl"):
        baselines.of_solution("cutedsl")(mxfp4, layer)
    everyone = {each.name: each for each in baselines.implementations()}
    assert [each.name for each in everyone.values() if each.ours] == ["ours", "triton"]
    assert [each.name for each in everyone.values() if each.on_demand] == ["flashinfer"]
    for name, shape in (("triton_kernels", dense), ("marlin", fp8), ("vllm_triton", mxfp4), ("humming", dense)):
        with pytest.raises(Unsupported):
            everyone[name].setup(shape, layer)


def test_baselines_are_called_as_declared(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are arranged by vLLM's own functions as far as they need no GPU; fake kernels check what is passed to launches."""
    pytest.importorskip("vllm")
    shapes, baselines = modules["moe_shapes"], modules["moe_baselines"]
    real, routing = baselines._from_vllm, (torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.int32), None)
    launched = {
        "triton_kernel_moe_forward": torch.zeros(5, 256),
        "fused_marlin_moe": torch.zeros(5, 256),
        "fused_experts": torch.zeros(5, 256),
        "fused_topk": routing,
        "marlin_make_workspace_new": torch.zeros(1),
    }

    def declared(module: str, name: str) -> Any:
        function = real(module, name)
        return mock.create_autospec(function, return_value=launched[name]) if name in launched else function

    def repacked(b_q_weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int, **_: Any) -> Any:
        return torch.zeros(size_k // 16, size_n * num_bits // 2, dtype=torch.int32)

    monkeypatch.setattr(baselines, "_from_vllm", declared)
    monkeypatch.setattr("vllm._custom_ops.gptq_marlin_repack", repacked)
    gpt_oss = shapes.Shape(shapes.Model("gpt-oss", 4, 2, 256, 192, gpt_oss=True), 5)
    parallel = shapes.Shape(shapes.Model("parallel", 4, 2, 256, 256, "fp8_block", of=8), 5, "fp8")
    everyone = {each.name: each for each in baselines.implementations()}
    for name, shape in (("triton_kernels", gpt_oss), ("marlin", gpt_oss), ("vllm_triton", parallel)):
        (layer,), (batch,) = _layers(shapes, shape, 1), shapes.batches(shape, 1, 1, CPU)
        assert everyone[name].setup(shape, layer)(batch)().shape == (5, 256)


def test_padding(modules: dict[str, ModuleType]) -> None:
    padded = modules["moe_baselines"]._padded(torch.ones(2, 3, 5), 4, 8)
    assert padded.shape == (2, 4, 8)
    assert padded.sum() == 30
    assert (padded[:, :3, :5] == 1).all()


def test_an_error_is_seen_where_there_are_no_experts(modules: dict[str, ModuleType]) -> None:
    errors_against = modules["h200_moe"].errors_against
    nothing = torch.zeros(4, 16)
    assert errors_against(nothing, nothing.bfloat16()) == (0.0, 0.0)
    assert min(errors_against(nothing, nothing + 0.5)) > 0.1
    some = nothing.clone()
    some[1] = 1.0
    assert errors_against(some, some) == (0.0, 0.0)
    assert errors_against(some, some + nothing.index_fill(0, torch.tensor([3]), 1.0))[0] == 1.0
    assert errors_against(some, some * 1.25)[1] == pytest.approx(0.25)


def test_graphs_hold_whole_turns_of_the_layers(modules: dict[str, ModuleType]) -> None:
    h200_moe, shapes = modules["h200_moe"], modules["moe_shapes"]
    for shape in _small(shapes):
        (layer,) = _layers(shapes, shape, 1)
        in_graph, count = h200_moe._calls_of(shape, layer)
        assert (in_graph, count) == (128, 32)
    huge = shapes.Shape(shapes.Model("long", 8, 4, 96, 64, gpt_oss=True), 1 << 22)
    (layer,) = _layers(shapes, huge, 1)
    assert h200_moe._calls_of(huge, layer) == (4, 4)


def _who(modules: dict[str, ModuleType]) -> list[Any]:
    """Implementations: correct, wrong, failing while weights are arranged, failing later, absent, unsupported."""
    baselines = modules["moe_baselines"]
    right = baselines.of_solution("reference")

    def wrong(shape: Any, layer: Any) -> Any:
        experts = right(shape, layer)
        return lambda batch: lambda: experts(batch)() * 1.25

    def late(shape: Any, layer: Any) -> Any:
        return lambda batch: lambda: 1 // 0

    def raises(error: Exception) -> Any:
        def setup(shape: Any, layer: Any) -> Any:
            raise error

        return setup

    make = baselines.Implementation
    return [
        make("ours", right, "", ours=True),
        make("triton", wrong, "", ours=True, portable=True),
        make("triton_kernels", raises(ValueError("so")), ""),
        make("marlin", late, ""),
        make("humming", raises(ImportError("there is no such package")), ""),
        make("vllm_triton", raises(Unsupported("not that")), ""),
    ]


def test_a_shape_is_measured(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    h200_moe, shapes, measuring = modules["h200_moe"], modules["moe_shapes"], modules["measuring"]
    measure_on_the_cpu(measuring, monkeypatch)
    monkeypatch.setattr(h200_moe, "_BATCHES", 4)
    monkeypatch.setattr(measuring, "IN_GRAPH", 4)
    monkeypatch.setattr(h200_moe, "_LAYERS", 2)
    who, rows = _who(modules), []
    for shape in _small(shapes):
        layers = _layers(shapes, shape)
        ready = [h200_moe.Loaded.of(each, shape, layers, CPU) for each in who]
        rows += h200_moe.measure_shape(shape, ready, layers, CPU, measuring.Effort(2, 17, 0.0))
        assert "ours 28.00 us" in h200_moe.line_of(shape, rows[-6:])
    assert [row["status"] for row in rows] == ["measured", "failed", "error", "error", "absent", "skipped"] * 4
    reasons = [row["reason"] for row in rows[:6]]
    assert reasons[1].endswith("above 0.01")
    assert reasons[2:] == [
        "ValueError: so",
        "ZeroDivisionError: integer division or modulo by zero",
        "there is no such package",
        "not that",
    ]
    ours = rows[0]
    assert (ours["timing"]["repeats"], ours["timing"]["median_us"], ours["between_us"]) == (34, 28.0, 1.5)
    assert (ours["operator"], ours["case"], ours["tokens"]) == ("moe.moe_apply", "mxfp4 5", 5)
    assert 4 <= ours["experts"] <= 8
    assert ours["floor_us"] > 0
    assert ours["prepare_ms"] > 0
    assert rows[2]["prepare_ms"] is None
    made = h200_moe.document(rows, who, Report(collect_metadata("h200_moe.py"), (), None, Method()))
    assert made["absent"] == {"humming": "there is no such package"}
    file = tmp_path / "report.json"
    measuring.write(file, made)
    assert json.loads(file.read_text()) == json.loads(json.dumps(made))
    assert [row.kernel for row in load_report(file).rows] == [row["kernel"] for row in rows]
    table = h200_moe.short_table(made["rows"]).splitlines()
    assert table[1].split()[-6:] == ["28.0", "failed", "error", "error", "absent", "skipped"]
    assert len(table) == 5


def test_models_are_measured_one_after_another(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    h200_moe, shapes, measuring = modules["h200_moe"], modules["moe_shapes"], modules["measuring"]
    measure_on_the_cpu(measuring, monkeypatch)
    monkeypatch.setattr(h200_moe, "_BATCHES", 4)
    monkeypatch.setattr(measuring, "IN_GRAPH", 4)
    first = _small(shapes)[0]
    wanted = [first, shapes.Shape(first.model, 2), *_small(shapes)[1:3]]
    file, report = tmp_path / "report.json", Report(collect_metadata("h200_moe.py"), (), None, Method())
    made = h200_moe.measure(wanted, _who(modules)[:2], CPU, measuring.Effort(1, 3, 0.0), report, file)
    assert [row["case"] for row in made["rows"]] == [shape.name for shape in wanted for _ in range(2)]
    assert json.loads(file.read_text()) == json.loads(json.dumps(made))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": a layer")[0] for line in lines if "arranged" in line] == ["mxfp4", "dense", "fp8 fp8"]


def test_who_changes_the_weights_stops_the_program(modules: dict[str, ModuleType]) -> None:
    shapes, baselines = modules["moe_shapes"], modules["moe_baselines"]
    shape = _small(shapes)[0]

    def changes(shape: Any, layer: Any) -> Any:
        layer.weights.w2_weight[1, 2, 3] ^= 1
        raise ValueError("too late")

    with pytest.raises(RuntimeError, match="marlin has changed"):
        modules["h200_moe"].Loaded.of(baselines.Implementation("marlin", changes, ""), shape, _layers(shapes, shape), CPU)


def test_outputs_can_be_checked_alone(modules: dict[str, ModuleType]) -> None:
    h200_moe, shapes, measuring = modules["h200_moe"], modules["moe_shapes"], modules["measuring"]
    shape = _small(shapes)[0]
    layers = _layers(shapes, shape)
    ready = [h200_moe.Loaded.of(_who(modules)[0], shape, layers, CPU)]
    (row,) = h200_moe.measure_shape(shape, ready, layers, CPU, measuring.Effort(0, 1, 0.0))
    assert row["timing"] is None
    assert "ours err" in h200_moe.line_of(shape, [row])


def test_the_program_rejects_unknown_names(modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    main = modules["h200_moe"].main
    main(["--list", "--tokens", "1", "8192"])
    assert capsys.readouterr().out.splitlines() == ["gpt-oss-120b 1", "gpt-oss-120b 8192", "gpt-oss-120b 8192 fp8"]
    main(["--list", "--more", "--only", "deepseek.* 4 fp8"])
    assert capsys.readouterr().out.splitlines() == ["deepseek-v3 32 of 256 4 fp8"]
    for words in (["--contestants", "ours,nobody"], ["--only", "nothing"], ["--tokens", "3"]):
        with pytest.raises(SystemExit):
            main(words)
    assert "no shape has such a name and number of tokens" in capsys.readouterr().err


# -- bars and plot -------------------------------------------------------------------------------------------------------------


def _times(modules: dict[str, ModuleType], factor: float) -> dict[str, dict[str, float]]:
    """Times just within the bars; the baselines take ``factor`` times as long."""
    bars = {bar.shapes[0]: bar.bound for bar in modules["moe_bars"].BARS if len(bar.shapes) == 1}
    times = {}
    for shape in modules["moe_shapes"].SHAPES:
        us = bars.get(shape.name, 10.0 + shape.tokens)
        times[shape.name] = {"ours": us, "triton": 1.5 * us, "marlin": us * factor, "triton_kernels": us * factor * 1.1}
        if shape.model.weight_format == "mxfp4":
            times[shape.name]["humming"] = us * factor * 1.2
    return times


def test_bars(modules: dict[str, ModuleType]) -> None:
    judge = modules["moe_bars"].judge
    errors = {"a": {"ours": 3e-3, "triton": 3e-3}, "b": {"ours": 4e-3, "triton": 3.5e-3}, "c": {"triton": 1.0}}
    judged = {bar["name"]: bar for bar in judge(_times(modules, 1.6), errors, {"ours": 40.0})}
    assert all(bar["holds"] for bar in judged.values())
    assert len(judged) == 14
    assert judged["gpt-oss-120b: best peer, geometric mean"]["value"] == pytest.approx(1.6)
    assert judged["relative error over the portable kernel's, worst shape"]["value"] == pytest.approx(4 / 3.5)
    slower = {
        bar["name"]: bar["holds"] for bar in judge(_times(modules, 1.2), {"b": {"ours": 5e-3, "triton": 4e-3}}, {"ours": 51.0})
    }
    assert [name for name, holds in slower.items() if not holds] == [
        "gpt-oss-120b: best peer, geometric mean",
        "relative error over the portable kernel's, worst shape",
        "gpt-oss-120b: ms to arrange a layer's weights",
    ]
    apart = _times(modules, 1.6)
    del apart["gpt-oss-120b 4"]["humming"]
    for absent, holds in (((), None), (("humming",), True)):
        found = {bar["name"]: bar["holds"] for bar in judge(apart, {}, {}, absent)}
        assert found["gpt-oss-120b: best peer, worst number of tokens"] is holds
    assert [bar["value"] for bar in judge({"gpt-oss-120b 1": {"ours": 20.0}}, {}, {}) if bar["value"] is not None] == [20.0]


def _report(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """A report like h200_moe.py's, with fake times."""
    h200_moe = modules["h200_moe"]
    everyone, rows = modules["moe_baselines"].implementations(), []
    for shape in modules["moe_shapes"].SHAPES:
        times = _times(modules, 1.25)[shape.name]
        for each in everyone:
            measurement = modules["measuring"].Measurement(each, shape, error=2e-3, row_error=4e-3)
            if each.name in times:
                measurement.between_us = 1.25
                measurement.rounds.append([times[each.name]] * 3)
            else:
                measurement.status = "skipped"
            more = {"tokens": shape.tokens, "experts": 4.0, "floor_us": times["ours"] / 1.5, "prepare_ms": 30.0}
            rows.append({**measurement.row(Cost(1e9, 1e6)), **more})
    return h200_moe.document(rows, everyone, Report(collect_metadata("h200_moe.py"), (), None, Method()))


def test_the_picture_and_the_table(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, report = modules["plot_moe"], _report(modules)
    file = tmp_path / "report.json"
    modules["measuring"].write(file, report)
    for name in ("a.svg", "b.svg", "c.png"):
        plot.main([str(file), "--output", str(tmp_path / name)])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    ElementTree.parse(tmp_path / "a.svg")
    assert (tmp_path / "c.png").stat().st_size > 20_000
    for wanted in ("gpt-oss-120b 1", "qwen3-235b 4", "none"):
        plot.draw({**report, "rows": [row for row in report["rows"] if row["case"] == wanted]}, tmp_path / "part.svg")
        ElementTree.parse(tmp_path / "part.svg")
    lines = plot.table(report).splitlines()
    (row,) = [line for line in lines if line.startswith("| gpt-oss-120b 1 |")]
    assert row == "| gpt-oss-120b 1 | 4.0 | 12 | 18 | 24.8 | 22.5 | 27 | 27 | 1.25 |"
    assert len(plot.panels(report)) == 5
    assert any(line.startswith("| gpt-oss-120b 16: us | at most 165 |") and line.endswith("holds |") for line in lines)


def test_the_committed_report(modules: dict[str, ModuleType]) -> None:
    """The report has the benchmark's shapes and bars, and the README shows it."""
    file = FOLDER / "h200_moe.json"
    if not file.exists():
        pytest.skip("nothing has been measured yet")
    report, measuring = json.loads(file.read_text()), modules["measuring"]
    wanted = {shape.name for shape in modules["moe_shapes"].SHAPES if not shape.more}
    found = {row["case"] for row in report["rows"]}
    assert wanted <= found <= {shape.name for shape in modules["moe_shapes"].SHAPES}
    again = modules["h200_moe"].judged(report["rows"])
    assert report["bars"] == json.loads(json.dumps(again))
    assert measuring.absent_of(report["rows"]) == report["absent"]
    if "plot_moe" in modules:
        plot = modules["plot_moe"]
        assert plot.MARKS.inside((FOLDER.parent / "README.md").read_text()) == plot.section(report, "benchmarks/h200_moe.svg")
