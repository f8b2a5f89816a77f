"""Timing and its reports. What a clock shows is not tested, only that what is reported follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.benchmark import (
    Metadata,
    Report,
    Row,
    Timing,
    bench_case,
    bench_kernel,
    collect_metadata,
    measure,
    run,
    timing,
)
from tokenspeed_kernel.cases import Case, Cost
from tokenspeed_kernel.registry import KernelRegistry, KernelSpec
from tokenspeed_kernel.version import __version__

# -- timing -------------------------------------------------------------------------------------------------------------------


def test_a_timing_is_the_median_and_the_deciles(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(call: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
        return [float(i) for i in range(100, -1, -1)]

    monkeypatch.setattr(timing, "_cpu_times", times)
    measured = measure(lambda: None, "cpu", budget_s=1e-9)
    assert (measured.median_us, measured.p10_us, measured.p90_us) == (50.0, 10.0, 90.0)


@pytest.mark.parametrize(("call_us", "budget_s", "repeats"), [(1.0, 1.0, 1000), (1e6, 1.0, 10), (1e4, 0.5, 50)])
def test_repeats_follow_the_budget(monkeypatch: pytest.MonkeyPatch, call_us: float, budget_s: float, repeats: int) -> None:
    monkeypatch.setattr(timing, "_cpu_times", lambda call, count, device: [call_us] * count)
    assert measure(lambda: None, "cpu", budget_s=budget_s).repeats == repeats


def test_every_call_is_made_and_the_first_ones_are_not_counted() -> None:
    calls: list[int] = []
    measured = measure(lambda: calls.append(1), "cpu", budget_s=1e-9)
    assert measured.repeats == 10
    assert len(calls) == timing._WARMUP + 3 + measured.repeats
    assert 0 < measured.p10_us <= measured.median_us <= measured.p90_us


@pytest.mark.nvidia
@pytest.mark.amd
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_by_its_own_events() -> None:
    x = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    measured = measure(lambda: x.add_(1), "cuda", budget_s=0.05)
    assert measured.median_us > 10, "half a gigabyte goes in and out; queueing it takes less"


# -- kernels ------------------------------------------------------------------------------------------------------------------


def _double_body(x: Tensor, out: Tensor | None = None) -> Tensor:
    return x * 2


@pytest.fixture
def double(declare: Callable[..., Any]) -> Any:
    function = declare(_double_body, formats=("x",))
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


def test_rates_follow_from_the_cost(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure", lambda call, device, **options: Timing(50.0, 40.0, 60.0, 10))
    rows = bench_kernel(registered(double, lambda x, out: torch.mul(x, 2, out=out)))
    assert [(r.case, r.status) for r in rows] == [("sixty-four", "measured"), ("none", "measured")]
    assert rows[0].timing == Timing(50.0, 40.0, 60.0, 10)
    assert rows[0].tflops == pytest.approx(64e6 / 50e-6 / 1e12)
    assert rows[0].gb_per_s == pytest.approx(64e3 / 50e-6 / 1e9)
    assert rows[1].tflops == 0


def test_an_operator_without_a_cost_has_no_rates(declare: Callable[..., Any]) -> None:
    function = declare(_double_body, formats=("x",))
    function.fake(lambda x: torch.empty_like(x))
    function.cases(lambda: [Case("one", lambda draw: {"x": draw.normal(4)})])
    row = bench_kernel(registered(function, lambda x, out: torch.mul(x, 2, out=out)), budget_s=1e-9)[0]
    assert row.status == "measured"
    assert row.tflops is None
    assert row.gb_per_s is None


def test_large_cases_are_asked_for(double: Any) -> None:
    spec = registered(double, lambda x, out: torch.mul(x, 2, out=out))
    assert [r.case for r in bench_kernel(spec, large=True, budget_s=1e-9)] == ["sixty-four", "none", "large"]


def test_the_kernel_itself_is_timed(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(run, "measure", lambda call, device, **options: (seen.append(call()), Timing(1.0, 1.0, 1.0, 10))[1])
    calls: list[int] = []

    def kernel(x: Tensor, out: Tensor | None) -> Tensor:
        calls.append(x.numel())
        return torch.mul(x, 2, out=out)

    case = double.operator.all_cases()[0]
    bench_case(registered(double, kernel), case, "cpu")
    assert calls[-1] == 64
    assert torch.equal(seen[0], case.build()["x"] * 2)


def test_a_wrong_kernel_is_not_timed(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(run, "measure", never)
    spec = registered(double, lambda x, out: torch.mul(x, 3, out=out))
    row = bench_case(spec, double.operator.all_cases()[0])
    assert row.status == "failed"
    assert "elements beyond tolerance" in row.reason
    assert row.timing is None


def test_a_failure_while_timing_ends_only_that_row(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: Any, device: Any, **options: Any) -> Timing:
        raise MemoryError("nothing left")

    monkeypatch.setattr(run, "measure", fails)
    row = bench_case(registered(double, lambda x, out: torch.mul(x, 2, out=out)), double.operator.all_cases()[0])
    assert (row.status, row.reason) == ("error", "while timing: MemoryError: nothing left")


def test_a_kernel_that_does_not_take_a_case_is_skipped(double: Any) -> None:
    row = bench_kernel(registered(double, lambda x, out: x, traits={"needed": True}))[0]
    assert row.status == "skipped"
    assert "needed" in row.reason


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
    """An environment inside somebody's checkout: the file lies there, and git does not know it."""
    import subprocess

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "run.py").write_text("")
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    assert run._git_commit() == ""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), "add", "run.py"], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "-qm", "one"], check=True)
    clean = run._git_commit()
    assert len(clean) == 40
    (tmp_path / "run.py").write_text("changed")
    assert run._git_commit() == clean + "+"


def test_a_report_as_json() -> None:
    metadata = Metadata(*("" for _ in range(10)))
    rows = (Row("k", "f.m", "c", "measured", "", Timing(1.0, 0.5, 2.0, 10), 3.0, None), Row("k", "f.m", "d", "failed", "why"))
    back = json.loads(Report(metadata, rows).to_json())
    assert back["rows"][0]["timing"] == {"median_us": 1.0, "p10_us": 0.5, "p90_us": 2.0, "repeats": 10}
    assert back["rows"][1]["timing"] is None
    assert set(back["metadata"]) >= {"device", "driver", "torch", "triton", "python", "git_commit", "command", "date"}
    with pytest.raises(ValueError, match="JSON"):
        Report(metadata, (Row("k", "f.m", "c", "measured", tflops=math.nan),)).to_json()
