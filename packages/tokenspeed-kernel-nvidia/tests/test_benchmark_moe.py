"""Tests the MoE benchmark for the H200, as far as it needs no GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from tokenspeed_kernel.workbench.benchmark import Unsupported, runner
from tokenspeed_kernel_base.cases import Cost, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.workspace import Keeper
from tokenspeed_kernel_nvidia._programs import Program
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.weights import prepare_weights
from tokenspeed_kernel_nvidia.sm90.moe import moe_apply
from tokenspeed_kernel_nvidia.sm90.moe.grouped import launch as grouped
from tokenspeed_kernel_nvidia.sm90.moe.grouped import paired
from tokenspeed_kernel_nvidia.sm90.moe.stream import launch as stream

Programs = Callable[[str], ModuleType]
CPU = torch.device("cpu")


def _small(shapes: ModuleType) -> list[Any]:
    """Returns one shape for each weight format, and a shape whose first token has no expert on this rank."""
    return [
        shapes.Shape(shapes.Model("mxfp4", 8, 4, 96, 64, gpt_oss=True), 5),
        shapes.Shape(shapes.Model("dense", 6, 2, 64, 48, "dense"), 3),
        shapes.Shape(shapes.Model("fp8", 4, 2, 128, 160, "fp8_block"), 7, "fp8"),
        shapes.Shape(shapes.Model("parallel", 3, 2, 64, 32, "dense", of=24), 9),
    ]


def _layers(shapes: ModuleType, shape: Any, count: int = 2) -> list[Any]:
    return [shapes.Layer.drawn(shape, CPU, seed) for seed in range(count)]


@pytest.mark.parametrize("index", range(4))
def test_layers_are_what_models_say(programs: Programs, index: int) -> None:
    shapes = programs("moe_shapes")
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
        assert right.dtype == torch.float64
        torch.testing.assert_close(right.bfloat16(), rounded, rtol=2**-7, atol=1e-5)


def test_routing_is_uniform_and_never_tied(programs: Programs) -> None:
    shapes = programs("moe_shapes")
    model = shapes.GPT_OSS_120B
    logits = shapes.router_logits(Draw(CPU, 1), 4096, model)
    best = logits.topk(model.top_k + 1, dim=-1).values
    assert logits.dtype == torch.bfloat16
    assert (best[:, -2] > best[:, -1]).all()
    chosen = logits.topk(model.top_k, dim=-1).indices.flatten().bincount(minlength=model.experts)
    assert 80 < int(chosen.min()) < 128 < int(chosen.max()) < 180


def test_floors_are_those_of_the_table(programs: Programs) -> None:
    """Asserts that the floors (roofline times) are within 3% of the values in the table. A floor is the time of the weights' bytes,
    or of the arithmetic."""
    shapes = programs("moe_shapes")
    bytes_of_one = 2880 * 2880 * 3 * (0.5 + 1 / 32)
    for experts, us in ((4, 12.2), (128, 389.0)):
        assert shapes.floor_us(Cost(0.0, experts * bytes_of_one), "none") == pytest.approx(us, rel=0.03)
    flops = 6.0 * 8192 * 4 * 2880**2
    assert shapes.floor_us(Cost(flops, 0.0), "none") == pytest.approx(2040, rel=0.01)
    assert shapes.floor_us(Cost(flops, 0.0), "fp8") == pytest.approx(1090, rel=0.01)


@pytest.mark.parametrize("index", range(4))
def test_our_kernels_compute_the_layer(programs: Programs, index: int) -> None:
    """Asserts that the benchmark's call is correct from logits to output, without experts of other ranks. The reference replaces
    the kernel."""
    shapes, errors_against = programs("moe_shapes"), programs("h200_moe").errors_against
    shape = _small(shapes)[index]
    (layer,) = _layers(shapes, shape, 1)
    experts = programs("moe_baselines").of_solution("reference")(shape, layer)
    for batch in shapes.batches(shape, 2, 1, CPU):
        error, row_error = errors_against(shapes.expected(batch, layer))(experts(batch)())
        assert error < 4e-3
        assert row_error < 4e-3


def test_unsupported_calls_are_reported(programs: Programs) -> None:
    shapes, baselines = programs("moe_shapes"), programs("moe_baselines")
    mxfp4, dense, fp8, _ = _small(shapes)
    (layer,) = _layers(shapes, mxfp4, 1)
    with pytest.raises(Unsupported, match="cutedsl"):
        baselines.of_solution("cutedsl")(mxfp4, layer)
    with pytest.raises(Unsupported, match="mxfp4"):
        baselines.tiles("48", dense, layer)
    for name in ("few", "24s", "160"):
        (batch,) = shapes.batches(mxfp4, 1, 1, CPU)
        call = baselines.tiles(name, mxfp4, layer)(batch)
        assert call.args[0] is batch.x
        assert call.keywords.get("columns", 0) == int(name.rstrip("s") if name != "few" else 0)
    everyone = {each.name: each for each in baselines.implementations()}
    assert [each.name for each in everyone.values() if each.ours] == ["ours", "triton"]
    assert [each.name for each in everyone.values() if each.on_demand] == ["flashinfer"]
    for name, shape in (("triton_kernels", dense), ("marlin", fp8), ("vllm_triton", mxfp4), ("humming", dense)):
        with pytest.raises(Unsupported):
            everyone[name].setup(shape, layer)


def test_baselines_are_called_as_declared(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arranges weights with vLLM's own functions, except for those that need a GPU. Fake kernels check the arguments of
    launches."""
    pytest.importorskip("vllm")
    shapes, baselines = programs("moe_shapes"), programs("moe_baselines")
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


def test_padding(programs: Programs) -> None:
    padded = programs("moe_baselines")._padded(torch.ones(2, 3, 5), 4, 8)
    assert padded.shape == (2, 4, 8)
    assert padded.sum() == 30
    assert (padded[:, :3, :5] == 1).all()


def test_an_error_is_seen_where_there_are_no_experts(programs: Programs) -> None:
    errors_against = programs("h200_moe").errors_against
    nothing = torch.zeros(4, 16)
    assert errors_against(nothing)(nothing.bfloat16()) == (0.0, 0.0)
    assert min(errors_against(nothing)(nothing + 0.5)) > 0.1
    some = nothing.clone()
    some[1] = 1.0
    assert errors_against(some)(some) == (0.0, 0.0)
    assert errors_against(some)(some + nothing.index_fill(0, torch.tensor([3]), 1.0))[0] == 1.0
    assert errors_against(some)(some * 1.25)[1] == pytest.approx(0.25)


def test_graphs_hold_whole_turns_of_the_layers(programs: Programs) -> None:
    h200_moe, shapes = programs("h200_moe"), programs("moe_shapes")
    for shape in _small(shapes):
        (layer,) = _layers(shapes, shape, 1)
        in_graph, count = h200_moe._calls_of(shape, layer)
        assert (in_graph, count) == (128, 32)
    huge = shapes.Shape(shapes.Model("long", 8, 4, 96, 64, gpt_oss=True), 1 << 22)
    (layer,) = _layers(shapes, huge, 1)
    assert h200_moe._calls_of(huge, layer) == (4, 4)


def test_layers_are_measured(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, fake_graphs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measures layers model by model. Some implementations are correct. Others fail while weights are arranged, or later."""
    h200_moe, shapes = programs("h200_moe"), programs("moe_shapes")
    monkeypatch.setattr(h200_moe, "_BATCHES", 4)
    monkeypatch.setattr(runner, "IN_GRAPH", 4)
    monkeypatch.setattr(h200_moe, "_LAYERS", 2)

    def raises(shape: Any, layer: Any) -> Any:
        raise ValueError("so")

    who = [
        runner.Implementation("ours", programs("moe_baselines").of_solution("reference"), "", ours=True),
        runner.Implementation("marlin", raises, ""),
        runner.Implementation("humming", lambda shape, layer: lambda batch: lambda: 1 // 0, ""),
    ]
    effort, wanted = runner.Effort(2, 3, 0.0), _small(shapes)
    wanted[1:1] = [shapes.Shape(wanted[0].model, 2)]
    rows: list[Any] = []
    for task in h200_moe.tasks(wanted, who, CPU, effort):
        rows += h200_moe.BENCHMARK.measure(task, who, CPU, effort)
    assert [row["case"] for row in rows] == [shape.name for shape in wanted for _ in who]
    assert [row["status"] for row in rows] == ["measured", "error", "error"] * 5
    assert [row["reason"].partition(":")[0] for row in rows[:3]] == ["", "ValueError", "ZeroDivisionError"]
    arranged = [line.partition(": a layer")[0] for line in capsys.readouterr().out.splitlines()]
    assert arranged == ["mxfp4", "dense", "fp8 fp8", "parallel"]
    ours = rows[0]
    assert (ours["timing"]["median_us"], ours["operator"], ours["tokens"]) == (21.0, "moe.moe_apply", 5)
    assert 4 <= ours["experts"] <= 8
    assert min(ours["floor_us"], ours["prepare_ms"]) > 0
    assert rows[1]["prepare_ms"] is None
    assert "ours 21.00 us" in h200_moe.BENCHMARK.line(rows[:3])


def test_an_implementation_that_changes_the_weights_stops_the_program(programs: Programs) -> None:
    shapes = programs("moe_shapes")
    shape = _small(shapes)[0]

    def changes(shape: Any, layer: Any) -> Any:
        layer.weights.w2_weight[1, 2, 3] ^= 1
        raise ValueError("too late")

    with pytest.raises(RuntimeError, match="marlin has changed"):
        programs("h200_moe").Loaded.of(runner.Implementation("marlin", changes, ""), shape, _layers(shapes, shape), CPU)


def test_shapes_are_listed(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    main = programs("h200_moe").BENCHMARK.main
    ours = ["--baselines", "ours"]
    main([*ours, "--list", "--tokens", "1", "8192"])
    shapes = ["gpt-oss-120b 1", "gpt-oss-120b 8192", "gpt-oss-120b 1 fp8", "gpt-oss-120b 8192 fp8"]
    assert capsys.readouterr().out.splitlines() == [*shapes, "ours"]
    main([*ours, "--list", "--more", "--only", "deepseek.* 4 fp8"])
    assert capsys.readouterr().out.splitlines() == ["deepseek-v3 32 of 256 4 fp8", "ours"]


def test_programs_of_shapes_are_those_of_calls(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts that the programs compiled ahead of time are those programs of the calls that take long to compile."""
    shapes, baselines = programs("moe_shapes"), programs("moe_baselines")
    used: list[Any] = []

    def recorded(program: Program[Any], config: Any) -> Any:
        used.append((program, config))
        return lambda *_: None

    monkeypatch.setattr(Program, "__call__", recorded)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    caches = stream._program_of, grouped._programs_of, paired._programs_of
    for module in (stream, grouped, paired):
        monkeypatch.setattr(module, "sm_count_of", lambda device: 132)
    monkeypatch.setattr(stream, "keeper", Keeper(arena=1, capturing=lambda: False))
    try:
        for model, tokens, activation_dtype in itertools.product(
            (shapes.Model("some", 8, 4, 96, 64), shapes.Model("few", 4, 2, 32, 96), shapes.Model("panels", 6, 2, 64, 128)),
            (1, 20, 80, 900, 5000),
            ("none", "fp8"),
        ):
            shape = shapes.Shape(model, tokens, activation_dtype)
            layer = shapes.Layer.drawn(shape, CPU, 0)
            (batch,) = shapes.batches(shape, 1, 1, CPU)
            used.clear()
            for cache in caches:
                cache.cache_clear()
            weights = prepare_weights(layer.weights, layer.plan)
            moe_apply.moe_apply(batch.x, weights, batch.topk_weights, batch.topk_ids, layer.plan)
            ahead = [(program, config) for program, config in used if program in (stream.stream_program, grouped.gemm_program)]
            assert baselines.programs_of(shape) == [each for each in ahead if not getattr(each[1], "repairs", False)]
            if tokens == 5000:  # CTAs share 16-bit columns only if both sizes are multiples of 64
                shared = activation_dtype == "fp8" or model.name == "panels"
                assert [config.paired for _, config in baselines.programs_of(shape)] == [shared, shared]
    finally:
        for cache in caches:
            cache.cache_clear()


def _row(tokens: int, kernel: str, us: float | None, dtype: str = "") -> dict[str, Any]:
    """Returns the values of a row that the table of `h200_moe_activations` shows."""
    timing = None if us is None else {"median_us": us}
    case = f"gpt-oss-120b {tokens}{dtype}"
    return {
        "case": case, "tokens": tokens, "kernel": kernel, "status": "failed" if us is None else "measured", "timing": timing,
        "relative_error": 1.2e-3, "quantization_error": 4.5e-2,
    }  # fmt: skip


def test_both_dtypes_of_activations_are_in_one_line(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    beside = programs("h200_moe_activations")
    rows = [
        _row(1, "ours", 20.0), _row(8192, "ours", None), _row(1, "ours", 19.0, " fp8"), _row(8192, "ours", 2100.0, " fp8"),
        _row(1, "fewc", 18.0, " fp8"), {**_row(1, "fewc", None), "status": "skipped"},
    ]  # fmt: skip
    head, *table = beside.BENCHMARK.table(rows).splitlines()
    assert head.split()[:2] == ["tokens", "kernel"]
    assert [line.split() for line in table] == [
        ["1", "ours", "20.0", "19.0", "0.950", "1.2e-03", "1.2e-03", "4.5e-02"],
        ["1", "fewc", "-", "18.0", "-", "-", "1.2e-03", "4.5e-02"],
        ["8192", "ours", "failed", "2100.0", "-", "1.2e-03", "1.2e-03", "4.5e-02"],
    ]
    held = {bar["name"]: bar["holds"] for bar in beside.BENCHMARK.judge(rows)}
    assert held["1: fp8 over bfloat16"]
    assert held["gpt-oss-120b 8192 fp8: us"]
    assert held["gpt-oss-120b 8192: us"] is None
    beside.BENCHMARK.main(["--list", "--tokens", "1", "--tiles", "fewc"])
    assert capsys.readouterr().out.splitlines() == ["gpt-oss-120b 1", "gpt-oss-120b 1 fp8", "ours", "fewc"]


def test_programs_of_tiles(programs: Programs) -> None:
    shapes, programs_of = programs("moe_shapes"), programs("moe_baselines").programs_of
    plain, fp8 = (shapes.Shape(shapes.GPT_OSS_120B, 64, dtype) for dtype in ("none", "fp8"))
    assert [config.columns for _, config in programs_of(fp8, "40c")] == [40, 40]
    assert [program for program, _ in programs_of(fp8, "fewc")] == [stream.stream_program]
    assert not programs_of(fp8, "few-narrow")
    ((_, config),) = programs_of(shapes.Shape(shapes.SLICES, 64), "few")
    assert config.narrow
    ((_, changed),) = programs_of(shapes.Shape(shapes.SLICES, 64), "few-narrow")
    assert changed == dataclasses.replace(config, narrow=False)
    assert programs_of(plain, "40c") == programs_of(plain, "triton") == []
    assert [config.inputs for _, config in programs_of(plain, "24s")] == ["parts"] * 2
    for shape, name, columns in ((plain, "288p", 288), (fp8, "144cp", 144)):
        assert [(config.columns, config.paired) for _, config in programs_of(shape, name)] == [(columns, True)] * 2
    assert programs_of(plain, "144cp") == programs_of(fp8, "288p") == programs_of(plain, "24sp") == []
