"""The benchmark: what it measures, and what it says of options that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gpt_oss import benchmark
from gpt_oss.__main__ import app
from gpt_oss.config import preset
from gpt_oss.kernels import portable_only
from tokenspeed_kernel import register_kernel, rmsnorm
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
        served = {row["operator"] for row in measured["kernels"]}
        assert served >= {"attention.mha_prefill", "attention.mha_decode_with_kvcache", "norm.rmsnorm", "moe.rmsnorm_moe_topk"}


def test_the_floor_counts_what_a_step_reads(result: dict[str, Any]) -> None:
    """Worked out by hand for one sequence, of which every token chooses 4 of 8 experts."""
    config = preset("tiny").with_layers(3)
    hidden, inner, heads, kv_heads, head_dim, vocab = 128, 96, 8, 2, 32, 258
    qkv = (heads + 2 * kv_heads) * head_dim
    dense = qkv * (hidden + 1) + hidden * (heads * head_dim + 1) + 8 * (hidden + 1)
    expert = 3 * hidden * inner * 17 / 32 + 4 * (2 * inner + hidden)  # half a byte, and a byte for each 32; biases in float32
    tokens = 20 + 2  # halfway through the steps; two of the three layers see 16 of them
    visible = 2 * min(tokens, config.sliding_window) + tokens
    cache = 2 * visible * kv_heads * head_dim
    wanted = 4 * (3 * dense + cache + vocab * hidden) + 3 * 4 * expert
    assert result["variants"]["optimised"]["decode"][0]["bytes_floor"] == pytest.approx(wanted)


def test_the_result_says_what_it_was_measured_on(result: dict[str, Any]) -> None:
    assert {"device", "torch", "tokenspeed_kernel", "git_commit", "dtype", "date"} <= result["metadata"].keys()
    assert result["metadata"]["command"] == "the command"
    assert result["workload"]["batches"] == (1, 3)


def test_it_is_shown_as_tables(result: dict[str, Any]) -> None:
    console = Console(record=True, width=132, file=open("/dev/null", "w"))  # noqa: SIM115
    benchmark.show(result, console)
    text = console.export_text()
    for wanted in ("Decode", "Prefill", "portable", "optimised", "experts a layer", "tiny, 3 layers"):
        assert wanted in text


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ("--batch", "2", "--context", "7", "--decode-steps", "3", "--prefill", "1x5", "--repeats", "1")
    run = CliRunner().invoke(app, ["benchmark", "--device", "cpu", "--preset", "tiny", *sizes, "--output", str(output)])
    assert run.exit_code == 0, run.output
    written = json.loads(output.read_text())
    assert [*written["variants"]] == ["optimised"]
    assert written["workload"]["prefills"] == [[1, 5]]
    assert "tokens/s" in run.output


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
        (("--compare", "fast"), "variant must be 'optimised' or 'portable', got 'fast'"),
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
    """A kernel of somebody else's package, preferred to all others."""

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
