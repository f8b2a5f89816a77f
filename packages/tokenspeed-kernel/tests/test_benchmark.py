"""Tests timing and benchmark reports. Measured times are not asserted, only the values that reports derive from given times."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.version import __version__
from tokenspeed_kernel.workbench.benchmark import (
    Launch,
    Method,
    Report,
    ReportError,
    Round,
    Row,
    Share,
    Timing,
    appended,
    as_text,
    bench,
    bench_case,
    bench_kernel,
    collect_metadata,
    load_report,
    measure,
    measure_graph,
    metadata,
    run,
    timing,
    write_result,
)
from tokenspeed_kernel.workbench.benchmark.machine import GpuState
from tokenspeed_kernel.workbench.benchmark.roofline import Roofline
from tokenspeed_kernel.workbench.benchmark.timing import captured
from tokenspeed_kernel_base.cases import Case, Cost
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

COMMITTED = Path(__file__).parents[1] / "benchmarks" / "h200.json"

# -- text ---------------------------------------------------------------------------------------------------------------------


def test_keys_that_are_numbers_are_strings_in_a_file() -> None:
    report = {"compared": {0.5: {1: 2}}, "rows": [{0.25: 3}]}
    assert json.loads(as_text(report)) == {"compared": {"0.5": {"1": 2}}, "rows": [{"0.25": 3}]}


# -- timing -------------------------------------------------------------------------------------------------------------------


def test_a_timing_is_the_median_and_the_deciles() -> None:
    made = Timing.of([[float(i) for i in range(100, -1, -1)]])
    assert (made.median_us, made.p10_us, made.p90_us, made.repeats) == (50.0, 10.0, 90.0, 101)
    assert Timing.of([[3.0]]) == Timing(3.0, 3.0, 3.0, 1, (Round(3.0, (3.0,)),))


def test_a_timing_keeps_its_rounds_in_order_and_thins_them_evenly() -> None:
    made = Timing.of([[5.0, 1.0, 3.0], [float(i) for i in range(1000)]])
    assert made.rounds[0] == Round(3.0, (5.0, 1.0, 3.0))
    assert made.rounds[1].median_us == 499.5
    kept = made.rounds[1].samples_us
    assert 32 < len(kept) <= timing._KEPT
    assert len({b - a for a, b in itertools.pairwise(kept)}) == 1
    assert Timing.of([[1234.56789, 1234.56789]]).rounds[0].samples_us == (1234.6, 1234.6)


@pytest.mark.parametrize(("call_us", "budget_s", "repeats"), [(1.0, 1.0, 1000), (1e6, 1.0, 10), (1e4, 0.5, 50)])
def test_repeats_follow_the_budget(monkeypatch: pytest.MonkeyPatch, call_us: float, budget_s: float, repeats: int) -> None:
    monkeypatch.setattr(timing, "_cpu_times", lambda calls, count, *rest: [call_us] * count)
    assert measure(lambda: None, "cpu", budget_s=budget_s).repeats == repeats


def test_every_call_is_made_and_the_first_ones_are_not_counted() -> None:
    calls: list[int] = []
    measured = measure(lambda: calls.append(1), "cpu", budget_s=1e-9)
    assert measured.repeats == 10
    assert len(calls) == timing._WARMUP + 3 + measured.repeats
    assert 0 < measured.p10_us <= measured.median_us <= measured.p90_us


@pytest.mark.parametrize(("expected_us", "warmup"), [(1.0, 3), (20_000.0, 1)])
def test_a_known_duration_is_not_measured_again(expected_us: float, warmup: int) -> None:
    calls: list[int] = []
    timing.sample(lambda: calls.append(1), torch.device("cpu"), budget_s=0, fewest=2, expected_us=expected_us)
    assert len(calls) == warmup + 2


def test_several_calls_take_turns_and_each_is_warmed_up() -> None:
    calls: list[str] = []
    measured = measure([lambda: calls.append("a"), lambda: calls.append("b"), lambda: calls.append("c")], "cpu", budget_s=1e-9)
    assert measured.repeats == 10
    assert calls[:3] == ["a", "b", "c"]
    assert "".join(calls[-10:]) == "abcabcabca"


def test_the_machine_is_inspected_once() -> None:
    looks: list[int] = []
    timing.sample(lambda: None, torch.device("cpu"), budget_s=1e-9, meanwhile=lambda: looks.append(1))
    assert looks == [1]


def test_impossible_timings_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one callable"):
        measure([], "cpu")
    with pytest.raises(ValueError, match="needs a GPU, got cpu"):
        measure(lambda: None, "cpu", cache="cold")
    with pytest.raises(ValueError, match="at least one call and a GPU, got calls=1, device=cpu"):
        measure_graph([lambda: None], "cpu")


class FakeEvent:
    """A stand-in for a CUDA event. The time is the sum of the microseconds in the entries of ``log``."""

    log: list[tuple[str, float]]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = sum(time_us for _, time_us in self.log)

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def device_log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Replaces the GPU functions that timing calls. Returns the log to which the replacements append each operation, with its
    microseconds."""
    log: list[tuple[str, float]] = []
    monkeypatch.setattr(FakeEvent, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: log.append(("wait", 0.0)))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(("spin", cycles / 2e3)))

    class Flushed:
        def zero_(self) -> None:
            log.append(("flush", 130.0))

    monkeypatch.setattr(torch, "empty", lambda *args, **options: Flushed())
    return log


@pytest.mark.parametrize(("cache", "between"), [(None, "flush"), ("cold", "flush"), ("warm", "spin")])
def test_a_gpu_is_kept_busy_between_calls(device_log: list[tuple[str, float]], cache: Any, between: str) -> None:
    calls = [lambda: device_log.append(("a", 10.0)), lambda: device_log.append(("b", 20.0))]
    looked: list[int] = []
    times = timing.sample(
        calls, torch.device("cuda"), budget_s=1e-9, cache=cache, fewest=4, meanwhile=lambda: looked.append(len(device_log))
    )
    assert times == pytest.approx([10.0, 20.0, 10.0, 20.0])
    names = [name for name, _ in device_log]
    assert names[-9:] == [between, "a", between, "b", between, "a", between, "b", "wait"]
    assert looked == [len(device_log) - 1], "while the device is at work"


def test_a_call_that_launches_nothing_takes_more_than_nothing(device_log: list[tuple[str, float]]) -> None:
    assert timing.sample(lambda: None, torch.device("cuda"), budget_s=1e-9, fewest=4, most=4) == [timing._TICK_US] * 4
    assert {name for name, _ in device_log} == {"flush", "wait"}


def test_the_host_is_timed_without_waiting_for_the_device(device_log: list[tuple[str, float]]) -> None:
    def call() -> None:
        device_log.append(("call", 1e6))
        time.sleep(0.001)

    assert timing.host_time(call, torch.device("cuda"), 5) >= 1000
    assert [name for name, _ in device_log] == ["call", "wait", *["call"] * 5, "wait"]


@pytest.mark.nvidia
@pytest.mark.amd
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_by_its_own_events() -> None:
    x = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    measured = measure(lambda: x.add_(1), "cuda", budget_s=0.05)
    assert measured.median_us > 10, "half a gigabyte goes in and out; queueing it takes less"
    small = torch.ones(1 << 22, dtype=torch.uint8, device="cuda")
    cold, warm = (measure(lambda: small.add_(1), "cuda", budget_s=0.05, cache=cache).median_us for cache in ("cold", "warm"))
    assert warm < cold


# -- kernels ------------------------------------------------------------------------------------------------------------------


def _double_body(x: Tensor, out: Tensor | None = None) -> Tensor:
    return x * 2


@pytest.fixture
def double(declare: Callable[..., Any]) -> Any:
    function = declare(_double_body, formats=("x",), traits={"needed": bool})
    function.fake(lambda x: torch.empty_like(x))
    function.cases(
        lambda: [
            Case("sixty-four", lambda draw: {"x": draw.normal(64)}),
            Case("none", lambda draw: {"x": draw.normal(0)}),
            Case("large", lambda draw: {"x": draw.normal(128)}, large=True),
        ]
    )
    function.cost(lambda x: Cost(flops=1e6 * x.numel(), bytes=1e3 * x.numel()))
    return function


def registered(function: Any, impl: Callable[..., Any], **declaration: Any) -> KernelSpec:
    op = function.operator
    spec = KernelSpec("tried", op.family, op.mode, solution="tried", format_signatures=None, **declaration)
    KernelRegistry.get().register(spec, impl)
    return spec


def right(x: Tensor, out: Tensor | None) -> Tensor:
    return torch.mul(x, 2, out=out)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the measurement: every measurement gives the samples 60, 40 and 50 us. Returns the list of the measured calls and
    their options."""
    seen: list[Any] = []

    def fake(calls: Sequence[Callable[[], Any]], device: torch.device, **options: Any) -> list[float]:
        seen.append((calls, options))
        options["meanwhile"]()
        return [60.0, 40.0, 50.0]

    monkeypatch.setattr(run, "sample", fake)
    monkeypatch.setattr(run, "reference_time", lambda device: 100.0)
    return seen


@pytest.mark.usefixtures("clocked")
def test_rates_follow_from_the_cost(double: Any) -> None:
    rows = bench_kernel(registered(double, right), rounds=1)
    assert [(r.case, r.status, r.solution) for r in rows] == [("sixty-four", "measured", "tried"), ("none", "measured", "tried")]
    assert rows[0].timing == Timing(50.0, 42.0, 58.0, 3, (Round(50.0, (60.0, 40.0, 50.0)),))
    assert rows[0].tflops == pytest.approx(64e6 / 50e-6 / 1e12)
    assert rows[0].gb_per_s == pytest.approx(64e3 / 50e-6 / 1e9)
    assert rows[1].tflops == 0
    assert rows[0].reference_us == (100.0,)


def test_an_operator_without_a_cost_has_no_rates(declare: Callable[..., Any]) -> None:
    function = declare(_double_body, formats=("x",))
    function.fake(lambda x: torch.empty_like(x))
    function.cases(lambda: [Case("one", lambda draw: {"x": draw.normal(4)})])
    row = bench_kernel(registered(function, right), budget_s=1e-9)[0]
    assert row.status == "measured"
    assert row.tflops is None
    assert row.gb_per_s is None


def test_large_cases_run_on_request(double: Any) -> None:
    spec = registered(double, right)
    assert [r.case for r in bench_kernel(spec, large=True, budget_s=1e-9)] == ["sixty-four", "none", "large"]


def test_the_kernel_is_timed_without_dispatch(double: Any, clocked: list[Any]) -> None:
    calls: list[int] = []

    def kernel(x: Tensor, out: Tensor | None) -> Tensor:
        calls.append(x.numel())
        return torch.mul(x, 2, out=out)

    case = double.operator.all_cases()[0]
    bench_case(registered(double, kernel), case, "cpu")
    before = len(calls)
    assert torch.equal(clocked[-1][0][0](), case.build()["x"] * 2)
    assert calls[before:] == [64]


def test_rounds_go_over_all_rows_and_build_inputs_anew(double: Any, clocked: list[Any]) -> None:
    order: list[str] = []
    spec = registered(double, right)

    def case(name: str) -> Case:
        return Case(name, lambda draw: (order.append(name), {"x": draw.normal(8)})[1])

    rows = bench([(spec, case("a")), (spec, case("b"))], "cpu", rounds=3, budget_s=0.3)
    assert [row.timing and len(row.timing.rounds) for row in rows] == [3, 3]
    assert order[-4:] == ["a", "b", "a", "b"]
    assert len({calls[0].args[0].data_ptr() for calls, _ in clocked}) > 1
    options = clocked[0][1]
    assert (options["budget_s"], options["fewest"], options["most"]) == (pytest.approx(0.1), 4, 334)


def test_copies_of_the_inputs_are_called_in_turn(double: Any, clocked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, case = registered(double, right), double.operator.all_cases()[0]
    bench_case(spec, case, "cpu", copies=3, rounds=1)
    inputs = [call.args[0] for call in clocked[0][0]]
    assert len({x.data_ptr() for x in inputs}) == 3
    assert all(torch.equal(x, inputs[0]) for x in inputs)
    monkeypatch.setattr(run, "_COPIED_BYTES", 2 * 64 * 4)
    bench_case(spec, case, "cpu", copies=3, rounds=1)
    assert len(clocked[-1][0]) == 2, "no more than fit"


def test_a_method_suits_the_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert run.method_for(cpu) == Method("warm", 0, 1)
    assert run.method_for(gpu) == Method("cold", 0, 1)
    assert run.method_for(gpu, graph_calls=20) == Method("cold", 20, 20)
    assert run.method_for(gpu, graph_calls=20, cache="warm") == Method("warm", 20, 1)
    assert run.method_for(gpu, graph_calls=20, copies=4, rounds=3) == Method("cold", 20, 4, rounds=3)


@pytest.mark.parametrize(("alone_us", "count"), [(46.0, 5), (2000.0, 3), (9000.0, 1)])
def test_in_a_graph_copies_rotate_and_launch_time_is_separate(
    double: Any, monkeypatch: pytest.MonkeyPatch, alone_us: float, count: int
) -> None:
    """Runs on the CPU, with a fake graph and fake clocks. The longer a call takes, the fewer calls the graph has."""
    graphs: list[Any] = []

    def in_graph(calls: Sequence[Callable[[], Any]], device: torch.device, **options: Any) -> list[float]:
        graphs.append((len(calls), options["expected_us"]))
        assert len({call.args[0].data_ptr() for call in calls}) == min(2, len(calls))  # type: ignore[attr-defined]
        return [30.0, 31.0, 32.0]

    monkeypatch.setattr(run, "sample_graph", in_graph)
    monkeypatch.setattr(run, "host_time", lambda call, device, calls: 7.0)
    monkeypatch.setattr(run, "sample", lambda calls, device, **options: [alone_us - 1, alone_us + 1, alone_us])
    monkeypatch.setattr(run, "reference_time", lambda device: 100.0)
    row = bench_case(registered(double, right), double.operator.all_cases()[0], "cpu", graph_calls=5, copies=2, rounds=2)
    assert graphs == [(count, None), (count, 31.0)]
    assert row.timing is not None
    assert row.timing.median_us == 31.0
    assert row.launch == Launch(7.0, alone_us, 31.0)


@pytest.mark.nvidia
@pytest.mark.amd
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_a_kernel_on_a_gpu(cache: Any) -> None:
    op = get_operator("rmsnorm")
    case = next(case for case in op.all_cases() if case.name == "gpt-oss-120b decode 64")
    row = bench_case(KernelRegistry.get().get_by_name("triton_rmsnorm"), case, "cuda", graph_calls=8, cache=cache, budget_s=0.05)
    assert row.status == "measured", row.reason
    assert row.timing is not None
    assert row.launch is not None
    assert row.launch.graph_us == row.timing.median_us
    assert row.launch.graph_us <= row.launch.event_us
    assert row.launch.host_us > 0
    assert len(row.timing.rounds) == len(row.reference_us) == 7
    assert row.state is None or row.state.sm_clock_mhz > 0
    alone = bench_case(KernelRegistry.get().get_by_name("triton_rmsnorm"), case, "cuda", cache=cache, copies=3, budget_s=0.05)
    assert alone.launch is not None
    assert alone.launch.graph_us is None


@pytest.mark.usefixtures("clocked")
def test_the_monitor_is_read_in_every_round(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def read() -> GpuState:
        seen.append(1)
        return GpuState(1980, 1980, 40, 100.0)

    monkeypatch.setattr(run, "gpu_monitor", lambda device: read)
    row = bench_case(registered(double, right), double.operator.all_cases()[0], "cpu", rounds=3)
    assert len(seen) == 3
    assert row.state == GpuState(1980, 1980, 40, 100.0)


def test_a_wrong_kernel_is_not_timed(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(run, "sample", never)
    spec = registered(double, lambda x, out: torch.mul(x, 3, out=out))
    row = bench_case(spec, double.operator.all_cases()[0])
    assert row.status == "failed"
    assert "elements beyond tolerance" in row.reason
    assert row.timing is None


def test_a_failure_while_timing_ends_only_that_row(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(calls: Any, device: Any, **options: Any) -> list[float]:
        if len(calls[0].args[0]) == 64:
            raise MemoryError("nothing left")
        return [1.0, 1.0]

    monkeypatch.setattr(run, "sample", fails)
    first, second = bench_kernel(registered(double, right))
    assert (first.status, first.reason, first.timing) == ("error", "while timing: MemoryError: nothing left", None)
    assert second.status == "measured"


def test_a_kernel_that_does_not_take_a_case_is_skipped(double: Any) -> None:
    row = bench_kernel(registered(double, lambda x, out: x, traits={"needed": True}))[0]
    assert row.status == "skipped"
    assert "needed" in row.reason


@pytest.mark.usefixtures("clocked")
def test_rows_report_throttling_and_slow_machines(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU throttles, and the machine is slow while the third row is measured. The rows must have warnings of both."""
    hot = GpuState(1200, 1980, 85, 700.0, ("power cap",))
    monkeypatch.setattr(run, "gpu_monitor", lambda device: lambda: hot)
    speeds = iter([100.0, 100.0, 110.0] * 2)
    monkeypatch.setattr(run, "reference_time", lambda device: next(speeds))
    rows = bench([(registered(double, right), double.operator.all_cases()[0])] * 3, "cpu", rounds=2)
    held_back = "power cap: 1200 of 1980 MHz"
    spread = "times spread over 32%"
    assert rows[0].warnings == rows[1].warnings == (spread, held_back)
    assert rows[2].warnings == (spread, held_back, "the machine was 10% slower than in the rest of the run")
    assert rows[0].state == hot


# -- reports ------------------------------------------------------------------------------------------------------------------


def test_metadata_says_what_was_measured_on_and_with() -> None:
    found = collect_metadata("the command", "cpu")
    assert found.arch == "cpu"
    assert found.torch == torch.__version__
    assert found.tokenspeed_kernel == __version__
    assert found.command == "the command"
    assert datetime.fromisoformat(found.date).tzinfo is not None
    assert all(isinstance(value, str) for value in vars(found).values())


def test_the_commit_of_another_checkout_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this package is installed inside another project's checkout, its files are not tracked there, and reports must name no
    commit."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "metadata.py").write_text("")
    monkeypatch.setattr(metadata, "__file__", str(tmp_path / "metadata.py"))
    assert metadata._git_commit() == ""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), "add", "metadata.py"], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "-qm", "one"], check=True)
    clean = metadata._git_commit()
    assert len(clean) == 40
    (tmp_path / "metadata.py").write_text("changed")
    assert metadata._git_commit() == clean + "+"


FULL = Row(
    "k",
    "f.m",
    "a case [\n1, 2]",
    "measured",
    timing=Timing.of([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]),
    tflops=3.0,
    gb_per_s=4.0,
    solution="triton",
    share=Share(0.5, "memory"),
    launch=Launch(5.0, 6.0, 4.0),
    warnings=("a warning",),
    reference_us=(20.0, 21.0),
    state=GpuState(1200, 1980, 60, 500.0, ("power cap",)),
)


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    here = collect_metadata("the command", "cpu")
    roofline = Roofline(3000.0, 3500.0, {"bfloat16": 700.0}, "2026-01-01")
    report = Report(here, (FULL, Row("k", "f.m", "d", "failed", "why")), roofline, Method("warm", 20, 2, 0.1, 5))
    file = tmp_path / "report.json"
    report.write(file)
    assert load_report(file) == report
    assert [*tmp_path.iterdir()] == [file], "nothing is left beside it"
    text = file.read_text()
    assert json.loads(text)["format"] == 2
    assert sum(line.startswith('    {"kernel"') for line in text.splitlines()) == 2, "a row takes one line"
    short = replace(FULL, timing=FULL.timing and FULL.timing.without_samples())
    Report(here, (short,)).write(file)
    assert load_report(file).rows == (short,)
    assert short.timing
    assert FULL.timing
    assert [each.median_us for each in short.timing.rounds] == [each.median_us for each in FULL.timing.rounds]
    assert "samples_us" in text


def test_a_program_writes_its_values(tmp_path: Path) -> None:
    write_result(None, "cpu", rows=[])
    write_result(tmp_path / "result.json", "cpu", command="python program.py", rows=[{"us": 1.5}], mean=2.0)
    table = json.loads((tmp_path / "result.json").read_text())
    assert (table["rows"], table["mean"], table["metadata"]["command"]) == ([{"us": 1.5}], 2.0, "python program.py")


def test_committed_reports_hold_medians_and_spread() -> None:
    """Committed reports must not contain the samples themselves."""
    files = [file for part in ("packages", "tools") for file in COMMITTED.parents[3].glob(f"{part}/*/benchmarks/*.json")]
    assert COMMITTED in files
    for file in files:
        assert '"samples_us": [' not in file.read_text().replace('"samples_us": []', ""), file


def test_a_report_is_json_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Report(collect_metadata("", "cpu"), (Row("k", "f.m", "c", "measured", tflops=math.nan),)).write(tmp_path / "report.json")


def test_the_committed_report_still_loads() -> None:
    """The committed report ``h200.json`` has format 1: no format number, no rounds, and a roofline with three rates."""
    table = json.loads(COMMITTED.read_text())
    report = load_report(COMMITTED)
    assert [row.kernel for row in report.rows] == [row["kernel"] for row in table["rows"]]
    timed = [row for row in report.rows if row.timing]
    assert [row.timing.median_us for row in timed if row.timing] == [r["timing"]["median_us"] for r in table["rows"] if r["timing"]]
    assert timed[0].timing is not None
    assert timed[0].timing.rounds == ()
    assert report.method is None
    assert report.roofline is not None
    assert report.roofline.copy_gb_per_s == table["roofline"]["copy_gb_per_s"]


def test_two_runs_become_one_report() -> None:
    here, method = collect_metadata("the command", "cpu"), Method(rounds=2)
    other = Row("other", "f.m", "c", "measured", timing=Timing.of([[1.0]]))
    failed = Row("k", "f.m", "d", "failed", "why")
    passed = Row("k", "f.m", "d", "measured", timing=Timing.of([[1.0]]))
    again = replace(FULL, timing=Timing.of([[4.0, 5.0], [6.0, 7.0, 8.0]]), warnings=("a warning", "another"), reference_us=(22.0,))
    joined = appended(Report(here, (FULL, failed), None, method), Report(here, (again, passed, other), None, method))
    assert [row.key for row in joined.rows] == [FULL.key, failed.key, other.key]
    assert joined.rows[1] == failed, "once wrong is wrong"
    assert appended(Report(here, (passed,), None, method), Report(here, (failed,), None, method)).rows == (failed,)
    row = joined.rows[0]
    assert row.timing is not None
    assert [of_one.median_us for of_one in row.timing.rounds] == [2.0, 3.0, 4.5, 7.0]
    assert (row.timing.median_us, row.timing.repeats) == (4.0, 11)
    assert (row.warnings, row.reference_us) == (("a warning", "another"), (20.0, 21.0, 22.0))
    assert again.timing is not None
    assert row.tflops == pytest.approx(3.0 * again.timing.median_us / 4.0)
    assert row.share == Share(pytest.approx(0.5 * again.timing.median_us / 4.0), "memory")


@pytest.mark.parametrize("name", ["device", "driver", "torch", "git_commit"])
def test_runs_of_different_things_are_not_put_together(name: str) -> None:
    here = collect_metadata("the command", "cpu")
    with pytest.raises(ValueError, match=f"{name} was .* and is another"):
        appended(Report(here, (), None, Method()), Report(replace(here, **{name: "another"}), (), None, Method()))
    with pytest.raises(ValueError, match="timed otherwise"):
        appended(Report(here, (), None, Method()), Report(here, (), None, Method(rounds=3)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "Expecting value"),
        ("[]", "no rows and metadata"),
        ('{"format": 3, "rows": [], "metadata": {}}', "its format is 3, this release knows 1 and 2"),
        ('{"rows": [], "metadata": {}}', "missing"),
        ('{"rows": [7], "metadata": {}}', "is no benchmark report"),
    ],
)
def test_files_that_are_not_reports_are_rejected(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ReportError, match=said) as caught:
        load_report(file)
    assert str(file) in str(caught.value)


def test_a_graph_keeps_the_tensors_that_its_calls_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the call owns the tensors that a baseline's setup makes. If the graph did not keep the call, the tensors would be freed,
    and replays would read freed memory."""

    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    made = torch.ones(3)
    seen = weakref.ref(made)
    replay = captured([functools.partial(torch.sum, made)], torch.device("cuda"))
    del made
    assert seen() is not None
    replay()
    del replay
    assert seen() is None
