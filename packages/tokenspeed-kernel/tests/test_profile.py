"""Tests ranges in profiles, times of calls, and ``tokenspeed-kernel profile``."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run_python

import tokenspeed_kernel
from tokenspeed_kernel.workbench.watching import (
    CallKind,
    CallTimes,
    Times,
    background,
    kernel_scope,
    read_times,
    start_profiling,
    stop_profiling,
    time_calls,
    times,
)
from tokenspeed_kernel.workbench.watching import ranges as range_module
from tokenspeed_kernel_base import config, storage, watch
from tokenspeed_kernel_base.config import ConfigurationError, read_settings
from tokenspeed_kernel_base.operator import get_operator

rmsnorm = tokenspeed_kernel.rmsnorm
X, W = torch.ones(2, 4), torch.ones(4)
KIND = CallKind("norm.rmsnorm", "mine", "float32", "2x4")
CPU = torch.device("cpu")


@pytest.fixture
def profiled() -> Iterator[None]:
    start_profiling()
    yield
    stop_profiling()


def ranges(run: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return [event.name for event in profile.events() if "[" in event.name]


# -- names ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("profiled")
def test_a_range_says_operator_kernel_and_shapes_of_the_operands() -> None:
    op = get_operator("mha_decode_with_kvcache")
    arguments = op.all_cases()[0].build()
    chosen = op.function.explain(**arguments).chosen
    assert chosen is not None
    shapes = ["x".join(map(str, arguments[name].shape)) for name in ("q", "k_cache")]
    dtype = str(arguments["q"].dtype).removeprefix("torch.")
    expected = f"attention.mha_decode_with_kvcache[{dtype}] {chosen.name} {','.join(shapes)}"
    assert ranges(lambda: op.function(**arguments)) == [expected]


@pytest.mark.usefixtures("profiled")
def test_operands_inside_objects_count() -> None:
    op = get_operator("moe_apply")
    arguments = op.all_cases()[0].build()
    weights = arguments["weights"]
    (found,) = [name for name in ranges(lambda: op.function(**arguments)) if name.startswith("moe.")]
    shapes = [arguments["x"].shape, weights.w13_weight.shape, weights.w2_weight.shape]
    assert found.split()[-1] == ",".join("x".join(map(str, shape)) for shape in shapes)


@pytest.mark.usefixtures("profiled")
def test_ranges_of_other_profilers_are_opened_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def scope(name: str) -> Iterator[None]:
        seen.append(f"proton {name}")
        yield
        seen.append("proton end")

    monkeypatch.setattr(range_module, "_MARKS_RANGES", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"nvtx {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("nvtx end"))
    monkeypatch.setitem(sys.modules, "triton.profiler.scope", types.SimpleNamespace(scope=scope))
    with kernel_scope("my", "op", "mxfp4", kernel_name="k", shape="4x4", flops=3):
        seen.append("work")
    name = "my.op[mxfp4] k 4x4"
    assert seen == [f"nvtx {name}", f"proton {name}", "work", "proton end", "nvtx end"]
    seen.clear()
    with pytest.raises(RuntimeError), kernel_scope("my", "op", "mxfp4"):
        raise RuntimeError
    assert seen[-1] == "nvtx end", "also where the work fails"


# -- settings ---------------------------------------------------------------------------------------------------------------------


def python(program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(config.PREFIX)} | environment
    return run_python("-c", textwrap.dedent(program), *words, env=env)


def test_the_setting_is_a_flag_or_a_folder(tmp_path: Path) -> None:
    def found(text: str) -> tuple[bool, Path | None]:
        settings = read_settings({"TOKENSPEED_KERNEL_PROFILE": text})
        return settings.profile, settings.profile_folder

    assert found("1") == (True, None)
    assert found("off") == found("") == (False, None)
    assert found(str(tmp_path)) == (False, tmp_path)
    with pytest.raises(ConfigurationError, match=r"PROFILE must be .*got 'yse'"):
        found("yse")


def test_the_setting_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("profile = true\n")
    assert read_settings({"TOKENSPEED_KERNEL_CONFIG": str(file)}).profile is True
    settings = read_settings({"TOKENSPEED_KERNEL_CONFIG": str(file), "TOKENSPEED_KERNEL_PROFILE": str(tmp_path)})
    assert (settings.profile, settings.profile_folder) == (False, tmp_path), "the environment wins"


def test_profiling_from_the_start(tmp_path: Path) -> None:
    program = """
        import sys, torch, tokenspeed_kernel as tk
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            tk.rmsnorm(torch.ones(2, 4), torch.ones(4))
        print(sum(event.name.startswith("norm.rmsnorm[float32]") for event in profile.events()))
        print([name for name in sys.modules if name.startswith("triton.profiler")])
    """
    assert python(program, TOKENSPEED_KERNEL_PROFILE="1").stdout == "1\n[]\n", "Proton is looked for, and never imported"


def test_a_folder_that_cannot_be_written_to_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(file: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage.os, "fsync", refuse)
    with pytest.raises(ConfigurationError, match=r"cannot be kept in .*Permission denied"):
        time_calls(tmp_path)
    assert not watch.watching()


# -- times ------------------------------------------------------------------------------------------------------------------------

DURATIONS = st.lists(st.floats(0.01, 1e8), min_size=1, max_size=50)


def times_of(durations: list[float]) -> Times:
    times = Times()
    for duration in durations:
        times.add(duration)
    return times


@given(DURATIONS)
def test_a_median_is_right_to_half_a_percent(durations: list[float]) -> None:
    times = times_of(durations)
    assert times.median_us == pytest.approx(statistics.median_low(durations), rel=0.0051)
    assert times.total_us == pytest.approx(sum(durations))
    assert (times.count, times.least_us) == (len(durations), min(durations))


@given(DURATIONS, DURATIONS)
def test_times_of_two_processes_add_up(first: list[float], second: list[float]) -> None:
    merged = Times.from_dict(json.loads(json.dumps(times_of(first).to_dict())))
    merged.merge(times_of(second))
    together = times_of(first + second)
    assert (merged.bins, merged.count, merged.least_us) == (together.bins, together.count, together.least_us)


def test_no_times_have_no_median() -> None:
    assert Times().median_us == 0.0
    assert Times.from_dict(json.loads(json.dumps(Times().to_dict()))) == Times()


class Clock:
    """A stand-in for the host's clock, in seconds. With it, measured times do not depend on the machine's speed."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(times, "time", found)
    return found


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CallTimes]:
    """Makes a recording of call times that is written only when the test requests it."""
    monkeypatch.setattr(times, "_SECONDS_BETWEEN_WRITES", threading.TIMEOUT_MAX)
    found = CallTimes(tmp_path)
    yield found
    atexit.unregister(found.finish)
    background._kept.discard(found)
    found._stop.set()


def counts(folder: Path) -> dict[str, int]:
    return {found.kind.shape: found.host.count for found in read_times(folder)[1]}


def test_calls_are_counted_by_kind(kept: CallTimes, clock: Clock, tmp_path: Path) -> None:
    other = CallKind("norm.rmsnorm", "mine", "float32", "8x4")
    for kind, count in ((KIND, 3), (other, 2)):
        for _ in range(count):
            assert kept.timed(kind, CPU, lambda a, b: a + b)(1, 2) == 3
    kept.timed(KIND, CPU, clock.sleep)(0.02)
    assert counts(tmp_path) == {}, "written now and then, not at once"
    kept.write()
    assert counts(tmp_path) == {"2x4": 4, "8x4": 2}
    (process,), found = read_times(tmp_path)
    assert process.pid == os.getpid()
    assert process.command == tuple(sys.argv)
    first = next(each for each in found if each.kind == KIND)
    assert first.host.total_us == pytest.approx(20_000)
    assert first.host.median_us < 1
    assert first.device.count == 0


def test_a_call_inside_another_is_part_of_it_and_one_that_raises_does_not_count(kept: CallTimes, tmp_path: Path) -> None:
    inner = kept.timed(CallKind("a.b", "k", "int32", "1"), CPU, lambda: None)
    kept.timed(KIND, CPU, inner)()
    with pytest.raises(ZeroDivisionError):
        kept.timed(KIND, CPU, lambda: 1 / 0)()
    kept.timed(KIND, CPU, inner)()
    kept.write()
    assert counts(tmp_path) == {"2x4": 2}


def test_threads_lose_nothing(kept: CallTimes, tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(200):
            kept.timed(KIND, CPU, lambda: None)()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.write()
    assert counts(tmp_path) == {"2x4": 800}


def test_memory_is_bounded(kept: CallTimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "MAX_KINDS", 2)
    for n in (1, 2, 3, 4, 1):
        kept.timed(CallKind("a.b", "k", "int32", str(n)), CPU, lambda: None)()
    kept.write()
    assert counts(tmp_path) == {"1": 2, "2": 1, times.OTHER_SHAPES: 2}


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "foreign.json").write_text("{}")
    with pytest.warns(storage.StorageWarning, match=r"foreign.json .* not hold times .* left out"):
        assert read_times(tmp_path) == ([], [])


class Device:
    """A stand-in for a GPU. Queued work advances ``clock``, in microseconds. Events are complete while ``done`` is True."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: Clock) -> None:
        self.host = host
        self.clock, self.done, self.failed, self.capturing = 0.0, True, False, False
        self.spun: list[int] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.clock

            def query(self) -> bool:
                if device.failed:
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                return device.done

            def synchronize(self) -> None:
                device.done = True

            def elapsed_time(self, end: Any) -> float:
                assert device.done
                return float(end.at - self.at) / 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.spun.append)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def kernel(self, takes_us: float, host_s: float = 1e-6) -> Callable[[], None]:
        def call() -> None:
            self.host.sleep(host_s)
            self.clock += takes_us

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Device:
    return Device(monkeypatch, clock)


def on_device(kept: CallTimes, call: Callable[[], Any], times: int = 1, kind: CallKind = KIND) -> None:
    for _ in range(times):
        kept.timed(kind, torch.device("cuda"), call)()


def test_device_time_of_a_call(kept: CallTimes, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_SPIN_US", "_LONGEST_SPIN_US"):
        monkeypatch.setattr(times, name, 1e5)
    on_device(kept, gpu.kernel(0.0, host_s=0.3))  # a long host time, like that of a compiled function's first call
    on_device(kept, gpu.kernel(40.0, host_s=0.02), times=9)
    kept.finish()
    (found,) = read_times(tmp_path)[1]
    assert (found.host.count, found.device.count) == (10, 9), "the first was not issued while the device spun"
    assert found.device.total_us == pytest.approx(360)
    assert found.device.median_us == pytest.approx(40, rel=0.006)
    assert len(gpu.spun) == 10
    assert gpu.spun[0] == gpu.spun[1] == 1e5 * times._CYCLES_PER_US
    assert all(spun < gpu.spun[0] for spun in gpu.spun[2:]), "then by what it took to issue such a call"


def test_in_a_graph_there_is_nothing_to_time(kept: CallTimes, gpu: Device, tmp_path: Path) -> None:
    gpu.capturing = True
    on_device(kept, gpu.kernel(40.0))
    kept.finish()
    (found,) = read_times(tmp_path)[1]
    assert (found.host.count, found.device.count, gpu.spun) == (1, 0, [])


def test_events_do_not_pile_up(kept: CallTimes, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_SOME_PENDING", 4)
    monkeypatch.setattr(times, "_MAX_PENDING", 8)
    most = 0
    for _ in range(100):
        gpu.done = False
        on_device(kept, gpu.kernel(1.0))
        most = max(most, len(kept._pending))
    assert 4 <= most <= 8
    kept.finish()
    (found,) = read_times(tmp_path)[1]
    assert found.device.total_us == pytest.approx(found.device.count)


def test_a_device_that_failed_does_not_hide_what_was_counted(kept: CallTimes, gpu: Device, tmp_path: Path) -> None:
    on_device(kept, gpu.kernel(1.0))
    gpu.failed = True
    kept._pending.append((kept._of(KIND), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
    kept._read_events(0)
    kept.write()
    assert counts(tmp_path) == {"2x4": 1}
    assert not kept._pending


# -- the command ------------------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, tokenspeed_kernel as tk
x, w = torch.ones(2, 4), torch.ones(4)
for _ in range(30):
    tk.rmsnorm(x, w)
for _ in range(5):
    tk.silu_and_mul(torch.ones(3, 8))
print("the program's own words")
"""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("typer")
    return run_python("-m", "tokenspeed_kernel", "profile", *words)


def run(*words: str) -> Any:
    """Runs the command in this process, which is faster. The program's own output is not captured."""
    testing = pytest.importorskip("typer.testing")
    from tokenspeed_kernel_command.commands import app

    return testing.CliRunner().invoke(app, ["profile", *words])


def profile_of(program: str, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    done = command("--json", "--", sys.executable, str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_table_of_a_program(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    done = command("--output", str(tmp_path / "out.json"), "--", sys.executable, str(file), "--output", "of the program")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "the program's own words"
    assert lines[2].split()[:5] == ["operator", "kernel", "dtype", "shape", "calls"]
    rows = {line.split()[0]: line.split() for line in lines[3:5]}
    assert rows["norm.rmsnorm"][2:5] == ["float32", "2x4", "30"]
    assert rows["activation.silu_and_mul"][2:5] == ["float32", "3x8", "5"]
    assert "one process" in lines[-1]
    assert "35 calls of 2 kinds" in lines[-1]
    kept = json.loads((tmp_path / "out.json").read_text())
    assert (kept["format"], kept["version"], kept["exit_code"]) == ("tokenspeed-kernel profile", 1, 0)
    assert kept["metadata"]["command"].endswith("--output 'of the program'")
    assert kept["metadata"]["torch"] == torch.__version__
    calls = {each["operator"]: each for each in kept["calls"]}
    assert calls["norm.rmsnorm"]["calls"] == 30
    assert calls["norm.rmsnorm"]["kernel"] == rmsnorm.explain(X, W).chosen.name
    assert calls["norm.rmsnorm"]["host_us"] >= 30 * 0.5 * calls["norm.rmsnorm"]["host_median_us"] > 0
    assert sum(each["share"] for each in kept["calls"]) == pytest.approx(1)
    assert [p.name for p in tmp_path.glob(".*")] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_all_processes_of_a_program_count(tmp_path: Path) -> None:
    program = """
        import multiprocessing as mp, os, subprocess, sys
        import torch, tokenspeed_kernel as tk
        x, w = torch.ones(2, 4), torch.ones(4)
        def work(n):
            for _ in range(n):
                tk.rmsnorm(x, w)
        if __name__ == "__main__":
            print("with --json, a program's own words go to stderr")
            work(3)
            for method in ("fork", "spawn"):
                process = mp.get_context(method).Process(target=work, args=(10,))
                process.start(); process.join()
                assert process.exitcode == 0
            work(2)
    """
    found = profile_of(program, tmp_path)
    assert [each["calls"] for each in found["calls"]] == [25]
    assert len({process["pid"] for process in found["processes"]}) >= 3


# Waits until the process's file has all calls of the program above.
UNTIL_WRITTEN = """
import os, signal, time
from tokenspeed_kernel.workbench.watching import read_times
while sum(found.host.count for found in read_times(tk.settings().profile_folder)[1]) < 35:
    time.sleep(0.01)
"""


def test_counts_before_a_kill_are_kept(tmp_path: Path) -> None:
    program = PROGRAM + UNTIL_WRITTEN + "os.kill(os.getpid(), signal.SIGKILL)"
    done = run("--", sys.executable, "-c", program)
    assert done.exit_code == 128 + signal.SIGKILL
    assert "35 calls of 2 kinds" in done.stdout


def test_the_exit_code_is_the_programs(tmp_path: Path) -> None:
    done = run("--sort", "calls", "--top", "1", "--", sys.executable, "-c", PROGRAM + "sys.exit(7)")
    assert done.exit_code == 7
    assert "norm.rmsnorm" in done.stdout
    assert "... and 1 more; --top 0 shows all" in done.stdout
    assert "35 calls" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="interrupts a process group")
def test_an_interrupted_program_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    program = PROGRAM + "import signal; print('ready', flush=True); signal.pause()"
    whole = [sys.executable, "-m", "tokenspeed_kernel", "profile", "--", sys.executable, "-c", program]
    process = subprocess.Popen(
        whole,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in a shell's background inherit an ignored SIGINT
    )
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        pass
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert "35 calls of 2 kinds" in out


def test_nothing_to_show_is_said(tmp_path: Path) -> None:
    assert "did not import tokenspeed_kernel" in run("--", sys.executable, "-c", "print(1)").stdout
    assert "called no operator" in run("--", sys.executable, "-c", "import tokenspeed_kernel").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "no-such-program"], "no-such-program cannot be run: No such file or directory"),
        (["--output", "absent/out.json", "--", "true"], "there is no folder absent"),
        (["--sort", "size", "--", "true"], "'size' is not one of"),
        ([], "Missing argument"),
    ],
)
def test_impossible_options_are_rejected(words: list[str], said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_rows_of_a_gpu_are_ordered_by_it(
    kept: CallTimes, clock: Clock, gpu: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer")
    profile = importlib.import_module("tokenspeed_kernel.workbench.cli.profile")
    on_device(kept, gpu.kernel(40.0), times=3)
    on_device(kept, gpu.kernel(500.0), times=2, kind=CallKind("gemm.mm", "slow", "bfloat16", "8x8"))
    for _ in range(10):
        kept.timed(CallKind("norm.rmsnorm", "on the host", "float32", "8x8"), CPU, clock.sleep)(0.001)
    kept.finish()
    processes, found = read_times(tmp_path)
    table = profile._table(["program"], 0, processes, profile._sorted(found, None))
    assert [each["kernel"] for each in table["calls"]] == ["slow", "mine", "on the host"]
    assert table["calls"][0]["device_us"] == pytest.approx(1000)
    assert [each["share"] for each in table["calls"]] == [pytest.approx(1000 / 1120), pytest.approx(120 / 1120), None]
    profile._print(processes, profile._sorted(found, "host"), top=1)
    printed = capsys.readouterr().out
    assert "on the host" in printed
    assert "... and 2 more" in printed
