"""Tests the benchmark's measurements, and its errors for invalid options."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gpt_oss import benchmark, breakdown
from gpt_oss.__main__ import app
from gpt_oss.breakdown import break_down, by_family
from gpt_oss.config import preset
from gpt_oss.divergence import divergence_of
from gpt_oss.kernels import portable_only, preferring
from tokenspeed_kernel import mm, register_kernel, rmsnorm
from tokenspeed_kernel.workbench.benchmark import Roofline, load_report
from tokenspeed_kernel_base.registry import KernelRegistry

WORKLOAD = benchmark.Workload(
    "tiny", layers=3, batches=(1, 3), contexts=(20,), decode_steps=4, prefills=((2, 9),), repeats=2, page_size=4
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return benchmark.run(WORKLOAD, torch.float32, "cpu", ("portable", "optimised"), "the command")


def test_it_measures_what_it_says(result: dict[str, Any]) -> None:
    assert [*result["variants"]] == ["portable", "optimised"]
    for measured in result["variants"].values():
        assert [(row["batch"], row["context"]) for row in measured["decode"]] == [(1, 20), (3, 20)]
        for row in measured["decode"]:
            assert row["milliseconds_a_step"] > 0
            assert row["over_bare"] == row["milliseconds_a_step"] / row["milliseconds_bare"]
            assert row["milliseconds_floor"] is None, "there is no roofline here"
            assert 4 <= row["experts_a_layer"] <= min(8, 4 * row["batch"])
        (prefill,) = measured["prefill"]
        assert (prefill["batch"], prefill["tokens"], len(prefill["all_seconds"])) == (2, 9, 2)
        assert prefill["milliseconds_host"] > 0
        served = {row["operator"] for row in measured["kernels"]}
        assert served >= {"attention.mha_prefill", "attention.mha_decode_with_kvcache", "norm.rmsnorm", "moe.rmsnorm_moe_topk"}


def test_the_floor_counts_what_a_step_reads(result: dict[str, Any]) -> None:
    """The expected value is computed by hand for one sequence, whose tokens select 4 of 8 experts."""
    config = preset("tiny").with_layers(3)
    hidden, inner, heads, kv_heads, head_dim, vocab = 128, 96, 8, 2, 32, 258
    qkv = (heads + 2 * kv_heads) * head_dim
    dense = qkv * (hidden + 1) + hidden * (heads * head_dim + 1) + 8 * (hidden + 1)
    # Half a byte per weight, a scale byte per 32 weights, and float32 biases.
    expert = 3 * hidden * inner * 17 / 32 + 4 * (2 * inner + hidden)
    tokens = 20 + 2  # the length halfway through the steps; two of the three layers see 16 tokens
    visible = 2 * min(tokens, config.sliding_window) + tokens
    cache = 2 * visible * kv_heads * head_dim
    wanted = 4 * (3 * dense + cache + vocab * hidden) + 3 * 4 * expert
    assert result["variants"]["optimised"]["decode"][0]["bytes_floor"] == pytest.approx(wanted)


def test_the_result_says_what_it_was_measured_on(result: dict[str, Any]) -> None:
    assert {"device", "torch", "tokenspeed_kernel", "git_commit", "dtype", "date"} <= result["metadata"].keys()
    assert result["metadata"]["command"] == "the command"
    assert result["workload"]["batches"] == (1, 3)


def test_families_of_operators_share_the_time(result: dict[str, Any]) -> None:
    for row in result["variants"]["optimised"]["decode"]:
        families = {each["family"]: each for each in row["families"]}
        assert families.keys() == {"moe", "attention", "norm", "gemm", "embedding", "kvcache"}
        assert sum(each["share_of_time"] for each in row["families"]) == pytest.approx(1)
        # Each of the three layers has three GEMMs (QKV, output, router) and two calls of the family moe (the top-k and
        # `moe_apply`). There is one more GEMM at the end, for the logits.
        assert families["gemm"]["calls"] == 3 * 3 + 1
        assert families["moe"]["calls"] == 3 * 2
        assert families["attention"]["calls"] == families["embedding"]["calls"] == 3
        assert families["kvcache"]["calls"] == 1  # one call computes the slots for all layers
        assert all(each["microseconds"] > 0 and each["share_of_roofline"] is None for each in row["families"])


def test_a_result_names_no_folder_of_the_machine(result: dict[str, Any]) -> None:
    folders = {str(Path(spec.origin.rpartition(":")[0]).parent) for spec in KernelRegistry.get().list_kernels()}
    assert folders, "kernels say where they are declared"
    text = json.dumps(result)
    assert not [folder for folder in folders if folder in text]
    origins = [candidate["origin"] for row in _kernels_of(result) for candidate in row["explanation"]["candidates"]]
    assert any(origin.startswith("tokenspeed_kernel_base/ops/") for origin in origins)


def _kernels_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for measured in result["variants"].values() for row in measured["kernels"]]


def test_a_result_is_a_report_of_kernels(result: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    report = load_report(file)
    assert {row.case for row in report.rows} > {"decode 1 x 20, 3 calls", "decode 3 x 20, 3 calls"}
    by_kernel = {(row.operator, row.kernel): row for row in report.rows}
    assert any(kernel.endswith(" (portable)") for _, kernel in by_kernel)
    product = next(row for row in report.rows if row.operator == "gemm.mm" and not row.kernel.endswith(")"))
    assert product.timing is not None
    assert product.tflops is not None
    assert product.tflops > 0
    assert product.solution == "torch"


def test_a_floor_is_the_larger_of_reading_and_multiplying() -> None:
    """Two GEMMs are compared with a made-up roofline. One GEMM is memory-bound, the other compute-bound."""
    few, many, weight = torch.ones(1, 64), torch.ones(512, 64), torch.ones(64, 64)
    roofline = Roofline(copy_gb_per_s=1.0, read_gb_per_s=2.0, tflops={"float32": 0.001})

    def forward() -> None:
        mm(few, weight)
        mm(many, weight)

    (part,) = break_down(forward, "two products", torch.device("cpu"), roofline)
    reading = 4 * (64 + 64 * 64 + 64) / 2e3
    multiplying = 2 * 512 * 64 * 64 / 1e3
    assert part.calls == 2
    assert part.floor_us == pytest.approx(reading + multiplying)
    (family,) = by_family([part])
    assert family["share_of_roofline"] == pytest.approx((reading + multiplying) / part.total_us)


def test_a_kernel_that_cannot_be_timed_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    real = breakdown.measure

    def failing(calls: Any, device: torch.device, budget_s: float) -> Any:
        if len(calls) == 2:
            raise RuntimeError("this waits for the device")
        return real(calls, device, budget_s=budget_s)

    monkeypatch.setattr(breakdown, "measure", failing)
    x, weight = torch.ones(2, 64), torch.ones(64, 64)

    def forward() -> None:
        mm(rmsnorm(x, torch.ones(64)), weight)
        rmsnorm(x, torch.ones(64))

    timed, untimed = break_down(forward, "three calls", torch.device("cpu"), None)
    assert (timed.family, untimed.family) == ("gemm", "norm")
    assert untimed.row.status == "error"
    assert untimed.row.reason == "while timing: this waits for the device"
    assert [family["share_of_time"] for family in by_family([timed, untimed])] == [1.0, 0.0]


def test_divergence_of_variants() -> None:
    sizes = {"layers": 2, "batches": (), "contexts": (), "prefills": (), "page_size": 4}
    names = ("optimised", "portable", "fp8-cache", "fp8-activations")
    found = benchmark.run(benchmark.Workload("tiny", **sizes), torch.float32, "cpu", names)["variants"]
    own, other = (found[name]["divergence"] for name in ("optimised", "portable"))
    assert own["mean_kl"] < 1e-9, "in float32 shorter pieces make no difference"
    assert other["largest_kl"] == 0, "on a CPU the same kernels serve"
    assert own["same_most_likely"] == other["same_most_likely"] == 1
    for divergence in (own, other):
        assert divergence["mean_kl_with_the_same_experts"] < 1e-9
    for name in ("fp8-cache", "fp8-activations"):
        divergence = found[name]["divergence"]
        assert 0 < divergence["mean_kl"] < 0.1
        assert divergence["mean_kl"] < divergence["largest_kl"]
        assert 0 < divergence["mean_kl_with_the_same_experts"] < 0.01


def test_divergence_is_that_of_the_definition() -> None:
    wanted, logits = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log(), torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    found = divergence_of(logits + 3, wanted)
    assert found["largest_kl"] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert found["mean_kl"] == pytest.approx(found["largest_kl"] / 2)
    assert found["same_most_likely"] == 0.5


def test_it_is_shown_as_tables(result: dict[str, Any]) -> None:
    console = Console(record=True, width=132, file=open("/dev/null", "w"))  # noqa: SIM115
    benchmark.show(result, console)
    text = console.export_text()
    for wanted in (
        "Decode",
        "Prefill",
        "portable",
        "optimised",
        "experts a layer",
        "of the roofline",
        "optimised: next tokens",
        "tiny, 3 layers",
    ):
        assert wanted in text


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ("--batch", "2", "--context", "7", "--decode-steps", "3", "--prefill", "1x5", "--repeats", "1")
    run = CliRunner().invoke(
        app, ["benchmark", "--device", "cpu", "--preset", "tiny", *sizes, "--commit", "abc", "--output", str(output)]
    )
    assert run.exit_code == 0, run.output
    written = json.loads(output.read_text())
    assert not written["workload"]["penalties"]
    assert written["metadata"]["git_commit"] == "abc"
    assert [*written["variants"]] == ["optimised"]
    assert written["workload"]["prefills"] == [[1, 5]]
    assert "tokens/s" in run.output


def test_requests_that_decode_with_penalties() -> None:
    sizes = ("--batch", "2", "--context", "7", "--decode-steps", "3", "--prefill", "1x5", "--repeats", "1")
    with mock.patch.object(benchmark.Engine, "add", autospec=True, side_effect=benchmark.Engine.add) as add:
        run = CliRunner().invoke(app, ["benchmark", "--device", "cpu", "--preset", "tiny", *sizes, "--penalties", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["workload"]["penalties"]
    added = [call.args[1] for call in add.call_args_list]
    assert [(len(request.prompt), request.sampling.counts_tokens) for request in added] == [(7, True)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "huge"), "preset must be 'tiny' or "),
        (("--layers", "10001"), "layers must be an int from 1 to 10000, got 10001"),
        (
            ("--preset", "tiny", "--context", "1000", "--decode-steps", "24"),
            "contexts, decode_steps and prefills must fit the model's context of 1024 tokens, got [1000], 24 and",
        ),
        (("--device", "toaster"), "device must be one that PyTorch can use here, got 'toaster': "),
        (("--batch", "1,two"), "a list of numbers must look like 1,4,16, got '1,two'"),
        (("--batch", "0"), "batches must be a sequence of ints of at least 1, got (0,)"),
        (("--prefill", "1x0"), "prefills must be a sequence of pairs of ints of at least 1, got ((1, 0),)"),
        (("--prefill", "8"), "a list of prefills must look like 1x1024,8x1024, got '8'"),
        (
            ("--preset", "tiny", "--context", "9", "--prefill", "1x9", "--prefer", "mm"),
            "preferred kernels must be registered, got 'mm'",
        ),
        (("--compare", "fast"), "variant must be 'optimised' or 'portable' or 'fp8-cache' or "),
    ],
)
def test_it_says_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    run = CliRunner().invoke(app, ["benchmark", "--device", "cpu", *arguments])
    assert run.exit_code == 2, run.output
    assert f"error: {message}" in run.output


@pytest.mark.parametrize("name", ["decode_steps", "page_size", "repeats"])
def test_impossible_workloads(name: str) -> None:
    for value in (None, 0, -1, 2.5, True, "4", [4]):
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must be an int of at least 1, got "):
            benchmark.Workload(**{"preset": "tiny", name: value})
    with pytest.raises(TypeError, match=r"^seed must be an int, got None"):
        benchmark.Workload("tiny", seed=None)  # type: ignore[arg-type]


@pytest.fixture
def vendors_kernel() -> Iterator[str]:
    """Registers a kernel of a vendor's package, with the highest priority."""

    def kernel(x: Any, weight: Any, eps: Any, residual: Any, out: Any, residual_out: Any) -> Any:
        return x

    register_kernel("norm", "rmsnorm", name="vendors_rmsnorm", solution="theirs", signatures=None, priority=19)(kernel)
    yield "vendors_rmsnorm"
    KernelRegistry.get().unregister("vendors_rmsnorm")


def test_portable_is_the_core_alone(vendors_kernel: str) -> None:
    def chosen() -> str:
        found = rmsnorm.explain(torch.ones(1, 4), torch.ones(4)).chosen
        assert found is not None
        return found.name

    assert chosen() == vendors_kernel
    with portable_only():
        assert chosen() != vendors_kernel
    assert chosen() == vendors_kernel


def test_preferred_kernels_serve_while_they_are_preferred() -> None:
    def chosen() -> tuple[str, int]:
        found = rmsnorm.explain(torch.ones(1, 4), torch.ones(4)).chosen
        assert found is not None
        return found.name, found.priority

    register_kernel("norm", "rmsnorm", name="last_rmsnorm", solution="theirs", signatures=None, priority=1)(
        rmsnorm.operator.reference
    )
    try:
        before = chosen()
        with preferring(["last_rmsnorm"]):
            assert chosen()[0] == "last_rmsnorm"
        assert chosen() == before
        assert KernelRegistry.get().get_by_name("last_rmsnorm").priority == 1
        with (
            pytest.raises(ValueError, match="must be registered, got 'none'"),
            preferring(["none"]),
        ):
            pass
        KernelRegistry.get().unregister("last_rmsnorm")
        register_kernel("norm", "rmsnorm", name="last_rmsnorm", solution="theirs", signatures=None, only_by_name="it is slow")(
            rmsnorm.operator.reference
        )
        with pytest.warns(UserWarning, match="no call can select: .* name it: it is slow"), preferring(["last_rmsnorm"]):
            pass
    finally:
        KernelRegistry.get().unregister("last_rmsnorm")
