"""Tests the benchmark of operator families on a CPU: measured calls, checks of baselines, time limits, and the report's tables."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench.benchmark import Baseline, load_report
from tokenspeed_kernel_base.operator import get_operator

FOLDER = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
# Baselines that are PyTorch functions, each with a small case of its operator.
OF_TORCH = [
    ("gemm.mm", "nvfp4 weight only in tiles of 128x4", "cuBLAS, bfloat16"),
    ("attention.top_k_indices", "equal scores, no lengths", "torch.topk"),
    ("sampling.sample_top_k_top_p", "gpt-oss-120b decode 2, top-k 40, top-p 0.95", "torch"),
    ("sampling.token_logprobs", "gpt-oss-120b decode 2, 20 top tokens", "torch"),
    ("sampling.argmax_with_value", "gpt-oss-120b decode 4, the second of 8 parts", "torch.max"),
    ("kvcache.copy_kv_pages", "gpt-oss-120b, pages part", "torch"),
    ("kvcache.zero_kv_pages", "gpt-oss-120b", "torch"),
]


# A time limit in seconds that no test reaches.
AGES_S = 1e5
AGES = ["--seconds", "100000", "--baseline-seconds", "100000"]


@pytest.fixture
def program(programs: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = programs("measure_families")
    monkeypatch.setattr(module, "_CHECK_S", AGES_S)
    return module


def small(program: ModuleType, operator: str, case: str = "") -> Any:
    """Makes a shape of the benchmark from a small case of an operator, by default from the first."""
    cases = get_operator(operator).all_cases()
    return program.Shape("a family", operator, next(each for each in cases if case in (each.name, "") and not each.large))


def effort(program: ModuleType, rounds: int = 1) -> Any:
    """Returns an effort with short rounds, and time limits that no test reaches."""
    return program.Effort(rounds, 0.001, AGES_S, time.monotonic() + AGES_S)


def test_it_measures_every_family(program: ModuleType) -> None:
    found = program.shapes()
    assert len({shape.name for shape in found}) == len(found)
    assert [shape.family for shape in found[: len(program.FAMILIES)]] == list(program.FAMILIES), "they take turns"
    operators = {shape.operator for shape in found}
    assert {shape.operator for shape in found[: len(operators)]} == operators, "each has its first call before any has its second"
    assert {shape.family for shape in program.shapes(["sampling"])} == {"sampling"}
    assert all(get_operator(shape.operator).has_hook("cost") for shape in found), "rates are of the operator's cost"


@pytest.mark.parametrize(("operator", "case", "name"), OF_TORCH, ids=[operator for operator, _, _ in OF_TORCH])
def test_baselines_are_checked_against_the_reference(program: ModuleType, operator: str, case: str, name: str) -> None:
    who, cost = program.measure(small(program, operator, case), CPU, effort(program))
    (baseline,) = [each for each in who if each.who.name == name]
    assert (baseline.status, baseline.reason, baseline.checked) == ("measured", "", "reference")
    assert len(baseline.rounds) == 1
    assert cost.bytes > 0
    left_out, _ = program.measure(small(program, operator, case), CPU, effort(program, 0), name)
    assert name not in [each.who.name for each in left_out]


def test_a_wrong_result_is_not_timed(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(cache: torch.Tensor, pages: torch.Tensor) -> Any:
        def call() -> None:
            cache.fill_(1.0)

        return call

    false = Baseline("torch", "kvcache.zero_kv_pages", wrong, frozenset({"cache", "pages"}), False, True, "")
    monkeypatch.setattr(program.family_baselines, "torch_zero_pages", false)
    who, _ = program.measure(small(program, "kvcache.zero_kv_pages"), CPU, effort(program))
    assert [(each.who.name, each.status, each.rounds) for each in who if each.who is false] == [("torch", "failed", [])]


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0), ([3.0, 4.5], [3.0, 4.0], 0.1), ([NAN, -INF, 0.0], [NAN, -INF, -0.0], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INF), ([INF, 1.0], [-INF, 1.0], INF), ([1.0, 0.0], [0.0, 0.0], INF), ([1.0], [1.0, 1.0], INF),
    ],
)  # fmt: skip
def test_the_error_of_a_result(program: ModuleType, got: list[float], expected: list[float], error: float) -> None:
    assert program.relative_error(torch.tensor(got), torch.tensor(expected)) == pytest.approx(error)
    assert program.relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == INF


def test_calls_of_a_graph_take_turns_on_copies(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in a graph must use the copies of the inputs in turn. Runs on the CPU, with fake graphs and clocks."""
    graphs: list[Any] = []
    monkeypatch.setattr(program, "captured", lambda calls, device: graphs.append(calls))
    monkeypatch.setattr(program, "sample", lambda calls, device, **options: [100.0])
    op = get_operator("sampling.argmax_with_value")
    arguments = op.complete(small(program, str(op)).case.build(CPU))
    copies = program.copies_of(op, arguments, touched=60e6)
    assert len(copies) == 4
    (implementation,) = [each for each in program.implementations(op, arguments, "") if each.who.name == "torch.max"]
    program.prepare(op, implementation, copies, torch.device("cuda"))
    assert implementation.calls == len(graphs[0]) == 16
    seen = [each["logits"].data_ptr() for each in copies]
    assert len({*seen}) == len(copies)
    assert len({id(call) for call in graphs[0]}) == len(copies)
    for call in graphs[0]:
        call()


def test_steps_beyond_their_time_limit_are_stopped(program: ModuleType) -> None:
    with pytest.raises(program.OutOfTimeError, match="more than 0 s"), program.within(0.05):
        time.sleep(60.0)


def test_an_error_caused_by_the_timeout_is_a_timeout(program: ModuleType) -> None:
    def compile_slowly() -> None:
        try:
            time.sleep(60.0)
        except program.OutOfTimeError:
            raise RuntimeError("a bug of the compiler's") from None

    with pytest.raises(program.OutOfTimeError, match="more than 0 s") as raised, program.within(0.05):
        compile_slowly()
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="another"), program.within(AGES_S):
        raise RuntimeError("another")


def test_a_report_and_its_tables(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    words = ["--output", str(output), "--site", str(tmp_path), *AGES, "--only", "zero"]
    given = program.options_of(words)
    command = program.command_of(words)
    wanted = [small(program, "zero_kv_pages"), small(program, "rmsnorm_quantize")]
    made = program.run(given, CPU, command, wanted)
    assert str(tmp_path) not in json.dumps(made)
    assert command.endswith("measure_families.py --seconds 100000 --baseline-seconds 100000 --only zero")
    assert made["unmeasured"] == []
    assert json.loads(output.read_text()) == json.loads(json.dumps(made))
    rows = {row.key: row for row in load_report(output).rows}
    quantised = rows["norm.rmsnorm_quantize", wanted[1].case.name, "composed_rmsnorm_quantize"]
    assert quantised.timing is not None

    made["roofline"] = {"copy_gb_per_s": 4000.0, "tflops": {"bfloat16": 700.0}}
    table = importlib.import_module("table")
    assert f"| `rmsnorm_quantize`, {wanted[1].case.name} | composed | " in table.families(made)
    assert f"| `rmsnorm_quantize` | {wanted[1].case.name} | " in table.operators(made)


def test_rows_of_old_names_are_shown_under_those_of_today(program: ModuleType) -> None:
    """Rows that were measured under an operator's old name must be shown under its new name, with a case that the operator has."""
    table = importlib.import_module("table")
    for report in ("h100_families.json", "h200_families.json"):
        for row in json.loads((FOLDER / report).read_text())["rows"]:
            now = table.renamed(row)
            assert {**now, "operator": row["operator"], "case": row["case"]} == row
            if now["operator"] != row["operator"]:
                assert now["case"] in {case.name for case in get_operator(now["operator"]).all_cases()}


def test_checked_results_are_not_checked_again(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report, shape = tmp_path / "checked.json", small(program, "zero_kv_pages")
    program.run(program.options_of([*AGES, "--check", "--commit", "abc", "--output", str(report)]), CPU, "", [shape])
    monkeypatch.setattr(program, "expected_of", None)
    made = program.run(program.options_of([*AGES, "--commit", "abc", "--checked", str(report)]), CPU, "", [shape])
    assert [(row["checked"], row["timing"] is not None) for row in made["rows"] if row["peer"]] == [("before", True)]
    with pytest.raises(ValueError, match="is of commit abc, this is def"):
        program.run(program.options_of(["--commit", "def", "--checked", str(report)]), CPU, "", [shape])


def test_the_run_stops_when_time_is_over(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    given = argparse.Namespace(check=True, seconds=0.0, baseline_seconds=1.0, commit="abc", without="", output=None, checked=[])
    shape = small(program, "zero_kv_pages")
    made = program.run(given, CPU, "command", [shape])
    assert (made["unmeasured"], made["rows"], made["metadata"]["git_commit"]) == ([shape.name], [], "abc")
    assert "0 of 1 calls" in capsys.readouterr().out
