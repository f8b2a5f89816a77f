"""Tests receipts: the kernel of each call, why a better kernel is not eligible, predicted times, and differences between
receipts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline
from tokenspeed_kernel.workbench.models import PRESETS, ModelError, Step, calls_of, model_of
from tokenspeed_kernel.workbench.receipts import Receipt, ReceiptError, Row, differences, read_receipt, receipt
from tokenspeed_kernel.workbench.receipts.text import WIDTH
from tokenspeed_kernel.workbench.watching import shape_capture
from tokenspeed_kernel_base import measured, selection
from tokenspeed_kernel_base.measured import Found, Tuned
from tokenspeed_kernel_base.platform import named_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.selection import GATES, RANKS
from tokenspeed_kernel_base.traits import at_most
from tokenspeed_kernel_command.commands import app

ROOF = Roofline(copy_gb_per_s=1000.0, read_gb_per_s=1000.0, tflops={"bfloat16": 100.0})
ONE_OF_EACH = ("deepseek-v3", "gpt-oss-20b", "llama-3-8b", "qwen3-8b", "qwen3-30b-a3b")
SMALL: dict[str, Any] = {"decode_sizes": (2,), "prefill_sizes": (64,), "context": 128, "platform": named_platform("cpu")}


@pytest.fixture(scope="module")
def llama() -> Receipt:
    return receipt("llama-3-8b", **SMALL, roofline=ROOF)


def _row(found: Receipt, phase: str, role: str, operator: str = "") -> Row:
    return next(row for row in found.rows if (row.phase, row.role) == (phase, role) and operator in row.operator)


@pytest.fixture
def kernel() -> Iterator[Callable[..., None]]:
    """Returns a function that registers a kernel of mm for one test."""
    names: list[str] = []

    def register(name: str, **declared: Any) -> None:
        names.append(name)
        register_kernel("gemm", "mm", name=name, solution="theirs", signatures=None, **declared)(tk.mm.operator.reference)

    yield register
    for name in names:
        KernelRegistry.get().unregister(name)


# -- models --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_call_of_every_model_is_served(name: str) -> None:
    found = receipt(name, **SMALL, roofline=ROOF)
    assert [row.operator for row in found.rows if not row.kernel] == []
    for phase, size in (("decode", (2,)), ("prefill", (64,))):
        rows = [row for row in found.rows if row.phase == phase]
        assert {row.sizes for row in rows} == {size}
        assert {row.predicted_by for row in rows} == {("roofline",)}
        assert any("attention" in row.role for row in rows)
        assert rows[-1].role == "sampling"
    model = model_of(name)
    assert ("experts" in {row.role for row in found.rows}) == (model.experts is not None)
    assert sum(row.times for row in found.rows if row.phase == "decode" and row.role == "output projection") in (
        model.layers,
        2 * model.layers,  # the input is quantised in a call of its own
    )


def test_every_preset_is_a_model() -> None:
    assert {model_of(name).name for name in PRESETS} == set(PRESETS)


def test_a_model_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-8b"]))
    for source in (tmp_path, str(tmp_path / "config.json"), PRESETS["qwen3-8b"]):
        assert replace(model_of(source), name="qwen3-8b") == model_of("qwen3-8b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type must be one of deepseek_v3, gpt_oss, llama"),
        ({"hidden_size": None}, "hidden_size must be a whole number, got None"),
        ({"num_attention_heads": "32"}, "num_attention_heads must be a whole number, got '32'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method must be left out, got 'awq'"),
    ],
)
def test_configurations_that_cannot_be_used(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_of({**PRESETS["llama-3-8b"], **change})


def test_unknown_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"llama-3-8bb is no file, .* mean llama-3-8b\?"):
        model_of("llama-3-8bb")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is no JSON"):
        model_of(tmp_path)
    with pytest.raises(ModelError, match="heads must be a multiple of the 3 ranks, got 32"):
        model_of("llama-3-8b").on_rank(3)


def test_a_rank_has_its_share_of_the_calls() -> None:
    (call,) = (c for c in calls_of(model_of("gpt-oss-20b").on_rank(2), Step("decode", 4)) if c.operator == "moe_apply")
    plan = call.arguments["plan"]
    assert (plan.num_experts, plan.intermediate_size) == (32, 1440)


def test_windows_are_separate_rows() -> None:
    found = receipt("gpt-oss-20b", **SMALL)
    rows = {row.role: row for row in found.rows if row.operator == "attention.mha_decode_with_kvcache"}
    assert {role: (row.times, row.traits["sliding_window"]) for role, row in rows.items()} == {
        "full attention": (12, False),
        "window of 128": (12, True),
    }


@pytest.mark.parametrize(
    ("preset", "change", "windows"),
    [
        ("qwen3-8b", {"use_sliding_window": True, "sliding_window": 4096}, {-1: 28, 4095: 8}),
        ("qwen3-8b", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}, {-1: 30, 4095: 6}),
        ("qwen3-8b", {"use_sliding_window": False, "sliding_window": 4096}, {-1: 36}),
        ("qwen3-8b", {"sliding_window": 4096, "layer_types": ["sliding_attention"] * 36}, {-1: 36}),
        ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 4096}, {4095: 48}),
        ("qwen3-30b-a3b", {"sliding_window": 4096}, {-1: 48}),
        ("gpt-oss-20b", {"layer_types": None}, {-1: 12, 127: 12}),
    ],
)
def test_windows_of_the_layers(preset: str, change: dict[str, Any], windows: dict[int, int]) -> None:
    """The expected numbers are those of transformers' configurations and models."""
    assert dict(model_of({**PRESETS[preset], **change}).windows) == windows


# -- why not, and how long -----------------------------------------------------------------------------------------------------


def test_sizes_with_one_outcome_share_a_row_and_say_why_not_the_better_kernel(kernel: Any) -> None:
    kernel("for_few_rows", priority=19, traits={"m": at_most(8)})
    found = receipt("llama-3-8b", **{**SMALL, "decode_sizes": (16, 1, 4, 64)}, roofline=ROOF)
    few, many = (row for row in found.rows if (row.phase, row.role) == ("decode", "output projection"))
    assert (few.sizes, few.kernel, few.solution) == ((1, 4), "for_few_rows", "theirs")
    assert many.sizes == (16, 64)
    (passed, *_) = many.passed
    assert (passed.kernel, passed.gate, passed.rank, passed.reason) == ("for_few_rows", "traits", "", "m=16 is not at most 8")
    (second,) = few.passed
    assert (second.kernel, second.gate, second.rank) == (many.kernel, "", "priority")
    assert all(passed.gate in (*GATES, "") and passed.rank in (*RANKS, "") for row in found.rows for passed in row.passed)


def test_without_a_kernel_the_row_says_so(kernel: Any) -> None:
    with tk.kernel_override("gemm", "mm", "reference_mm"):
        assert _row(receipt("llama-3-8b", **SMALL), "decode", "lm head").kernel == "reference_mm"
    kernel("elsewhere", capability=tk.CapabilityRequirement(vendors=frozenset({"amd"})))
    with tk.kernel_override("gemm", "mm", "elsewhere"):
        row = _row(receipt("llama-3-8b", **SMALL), "decode", "lm head")
    assert row.kernel == ""
    assert "kernel_override requests elsewhere, which fails the platform gate" in row.reason


def test_times_come_from_the_roofline_at_least(llama: Receipt) -> None:
    row = _row(llama, "decode", "final norm")
    read_and_written = 2 * 4096 * 2 * (2 + 2) + 2 * 4096  # x and residual, each read and written, and the weight
    assert row.predicted_us == (pytest.approx(read_and_written / 1000e3),)
    assert row.predicted_by == ("roofline",)
    assert "at least " in str(llama)


def test_times_come_from_a_table_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tables:
        @staticmethod
        def has_results(operator: str, platform: Any) -> bool:
            return operator == "gemm.mm"

        @staticmethod
        def find(operator: str, formats: Any, traits: Any, buckets: Any, platform: Any) -> Found:
            return Found({"reference_mm": Tuned(1.5)}) if operator == "gemm.mm" else Found()

    monkeypatch.setattr(measured, "_source", Tables)
    row = _row(receipt("llama-3-8b", **SMALL, roofline=ROOF), "decode", "lm head")
    assert (row.kernel, row.predicted_us, row.predicted_by) == ("reference_mm", (1.5,), ("table",))


def test_nothing_is_predicted_where_nothing_was_measured() -> None:
    found = receipt("llama-3-8b", **SMALL)
    assert {us for row in found.rows for us in row.predicted_us} == {None}
    assert " us" not in str(found)


# -- processes -----------------------------------------------------------------------------------------------------------------


def test_a_process_and_its_captured_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_made", {})  # other tests may have made selections
    hidden = 4242  # no other test uses this size
    with shape_capture(tmp_path / "calls"):
        for _ in range(2):
            tk.rmsnorm(torch.ones(3, hidden), torch.ones(hidden))
    (row,) = (row for row in tk.receipt().rows if row.traits.get("hidden") == hidden)
    assert (row.phase, row.operator, row.kernel, row.sizes) == ("process", "norm.rmsnorm", "reference_rmsnorm", ())
    (captured,) = receipt(calls=tmp_path / "calls").rows
    assert (captured.times, captured.kernel, captured.traits) == (2, "reference_rmsnorm", row.traits)


# -- files, differences, pages -------------------------------------------------------------------------------------------------


def test_a_receipt_survives_its_file(llama: Receipt, tmp_path: Path) -> None:
    llama.save(tmp_path / "a.json")
    assert read_receipt(tmp_path / "a.json").to_dict() == llama.to_dict()
    assert differences(read_receipt(tmp_path / "a.json"), llama) == []
    (tmp_path / "b.json").write_text('{"format": 0}')
    with pytest.raises(ReceiptError, match="no receipt of format 1"):
        read_receipt(tmp_path / "b.json")


def test_differences(llama: Receipt, kernel: Any) -> None:
    kernel("better", priority=19)
    now = receipt("llama-3-8b", **SMALL, roofline=replace(ROOF, copy_gb_per_s=500.0, read_gb_per_s=500.0), page_size=16)
    now = replace(now, versions={**now.versions, "torch": "9"})
    found = differences(llama, now)
    assert [(d.kind, d.what, d.after) for d in found if d.kind in ("version", "setting")] == [
        ("version", "torch", "9"),
        ("setting", "page_size", "16"),
    ]
    kernels = {d.what: (d.sizes, d.before, d.after) for d in found if d.kind == "kernel"}
    before = _row(llama, "decode", "lm head").kernel
    assert kernels["decode gemm.mm, lm head"] == ((2,), before, "better")
    assert {d.why.split(":")[0] for d in found if d.kind == "kernel"} == {f"{before} now"}
    assert any(d.kind == "time" and d.what == "decode norm.rmsnorm, final norm" for d in found)


def test_the_text_fits_a_terminal(llama: Receipt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_made", {})  # other tests may have filled it
    for hidden in (64, 100_000):
        tk.rmsnorm(torch.ones(3, hidden), torch.ones(hidden))
    lines = [*str(llama).splitlines(), *str(tk.receipt()).splitlines()]
    assert max(map(len, lines)) <= WIDTH == 100


def test_the_page_has_every_kernel_and_needs_no_other_file(llama: Receipt) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from tokenspeed_kernel.workbench.report.receipt import render_receipt

    page = render_receipt(llama).replace("<wbr>", "")
    assert all(name in page for name in llama.kernels)
    assert "http" not in page.replace("http-equiv", "")


def test_the_command(tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["receipt", *words])

    small = ("--platform", "cpu", "--batch", "2", "--tokens", "64", "--context", "128")
    done = run("llama-3-8b", *small, "--output", str(tmp_path / "a.json"))
    assert done.exit_code == 0
    assert "gemm.mm (lm head)" in done.output
    assert json.loads(run("llama-3-8b", *small, "--json").output)["subject"] == "llama-3-8b"
    assert run("diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")).output == "the receipts are equal\n"
    for words, message in (
        ((), "name one model"),
        (("nosuch",), "no preset"),
        (("diff", "a"), "diff takes two receipts, got 1"),
        (("diff", "absent", "absent"), "No such file"),
        (("llama-3-8b", "--dtype", "int4"), "no dtype 'int4'"),
        (("llama-3-8b", "--output", "a.txt"), "must end in .json or .html"),
        (("llama-3-8b", "--ranks", "3"), "must be a multiple of the 3 ranks"),
    ):
        failed = run(*words)
        assert failed.exit_code == 2, words
        assert message in failed.output, failed.output
