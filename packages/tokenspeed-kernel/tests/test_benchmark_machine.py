"""Tests what the benchmark determines about the machine: noise, clocks, and the roofline."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_kernel.workbench.benchmark import (
    Roofline,
    Share,
    Timing,
    cached_roofline,
    machine,
    measure_roofline,
    roofline_cache,
)
from tokenspeed_kernel.workbench.benchmark.machine import GpuState
from tokenspeed_kernel.workbench.benchmark.noise import noise_of, warnings_of
from tokenspeed_kernel.workbench.benchmark.roofline import share_of
from tokenspeed_kernel_base.cases import Cost
from tokenspeed_kernel_base.storage import StorageWarning

# -- noise --------------------------------------------------------------------------------------------------------------------


def said(*rounds: Sequence[float], **options: Any) -> tuple[str, ...]:
    return warnings_of(Timing.of(rounds), **options)


def normal(draw: random.Random, mean: float = 100.0, deviation: float = 1.0, count: int = 60) -> list[float]:
    return [draw.gauss(mean, deviation) for _ in range(count)]


def test_quiet_times_are_not_warned_of() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        assert said(*(normal(draw) for _ in range(7))) == ()
        # A GPU's clock has discrete ticks of 0.03 us, so a two-microsecond kernel takes one of two neighbouring times.
        assert said(*([draw.choice([2.016, 2.048]) for _ in range(60)] for _ in range(7))) == ()


def test_spread_is_from_the_first_to_the_last_decile() -> None:
    noise = noise_of(Timing.of([[float(i) for i in range(90, 111)]]))
    assert noise is not None
    assert noise.spread == pytest.approx(0.16)
    draw = random.Random(0)
    assert said(*(normal(draw, deviation=8) for _ in range(7)))[0].startswith("times spread over 2")


def test_a_drift_is_seen_with_its_sign() -> None:
    draw = random.Random(1)
    falling = [[time - 0.2 * i for i, time in enumerate(normal(draw, deviation=0.2))] for _ in range(7)]
    noise = noise_of(Timing.of(falling))
    assert noise is not None
    assert noise.drift == pytest.approx(-0.085, abs=0.01)
    assert "drifts by -8% within a round" in said(*falling) or "drifts by -9% within a round" in said(*falling)


def test_rounds_that_differ_are_seen() -> None:
    draw = random.Random(2)
    assert said(*(normal(draw, mean, 0.1) for mean in (100, 101, 107))) == ("rounds differ by 7%",)


@pytest.mark.parametrize("share", [0.15, 0.5, 0.85])
def test_two_groups_of_times_are_seen(share: float) -> None:
    draw = random.Random(3)
    mixed = [[draw.gauss(100 if draw.random() < share else 112, 0.5) for _ in range(60)] for _ in range(7)]
    assert any(word.startswith(("two groups of times, 12% apart", "two groups of times, 11% apart")) for word in said(*mixed))


@pytest.mark.parametrize(
    "shape",
    [lambda draw: draw.gauss(100, 10), lambda draw: draw.uniform(80, 120), lambda draw: 90 + draw.expovariate(0.1)],
    ids=["normal", "uniform", "exponential"],
)
def test_one_wide_group_is_not_two(shape: Any) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        noise = noise_of(Timing.of([[shape(draw) for _ in range(60)] for _ in range(7)]))
        assert noise is not None
        assert noise.modes_apart == 0


@given(st.lists(st.lists(st.floats(0.001, 1e7), min_size=1, max_size=30), min_size=1, max_size=8))
def test_any_times_have_a_noise(rounds: list[list[float]]) -> None:
    timing = Timing.of(rounds)
    noise = noise_of(timing)
    if all(len(of_one) == 1 for of_one in rounds):
        assert noise is None
    else:
        assert noise is not None
        assert min(noise.spread, noise.between_rounds, noise.modes_apart) >= 0
    assert all(isinstance(word, str) for word in warnings_of(timing))


def test_old_timings_without_rounds_are_not_judged() -> None:
    assert noise_of(Timing(1.0, 0.5, 9.0, 10)) is None
    assert warnings_of(Timing(1.0, 0.5, 9.0, 10)) == ()


def test_throttle_reasons_are_reported_with_the_slowest_clock() -> None:
    states = [GpuState(1980, 1980, 50, 300.0), GpuState(1500, 1980, 80, 690.0, ("power cap", "thermal slowdown"))]
    assert said([1.0], states=states) == ("power cap and thermal slowdown: 1500 of 1980 MHz",)
    assert said([1.0], states=states[:1]) == ()


def test_a_slower_machine_is_said() -> None:
    assert said([1.0], reference_us=[105.0, 106.0, 50.0], usual_us=100.0) == (
        "the machine was 5% slower than in the rest of the run",
    )
    assert said([1.0], reference_us=[102.0], usual_us=100.0) == ()


# -- clocks -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device with a known UUID, without NVML."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234-56"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return torch.device("cuda", 0)


class FakeNvml(types.ModuleType):
    """NVML with the interface of ``nvidia-ml-py``."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    reasons = 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        self.inited = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1234-56":
            raise self.NVMLError(f"no {uuid}")
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        assert (handle, which, self.inited) == ("handle", 1, True)
        return 1410

    def nvmlDeviceGetMaxClockInfo(self, handle: str, which: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 698500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        (0x0, ()),
        (0x1 | 0x2, ()),
        (0x4, ("power cap",)),
        (0x60, ("thermal slowdown",)),
        (0x88, ("hardware slowdown", "power brake")),
    ],
)
def test_the_monitor_reads_nvml(gpu: torch.device, monkeypatch: pytest.MonkeyPatch, bits: int, said: tuple[str, ...]) -> None:
    nvml = FakeNvml("pynvml")
    nvml.reasons = bits
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monitor = machine.gpu_monitor(gpu)
    assert monitor is not None
    assert monitor() == GpuState(1410, 1980, 61, 698.5, said)


def test_where_nothing_knows_there_is_no_monitor(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.gpu_monitor(torch.device("cpu")) is None
    assert machine.gpu_monitor(gpu) is None
    nvml = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="other"))
    assert machine.gpu_monitor(gpu) is None, "a partition, which NVML does not know by this name"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace())
    assert machine.gpu_monitor(gpu) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert machine.gpu_monitor(gpu) is None


def test_the_reference_workload_leaves_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    machine._reference_workload.cache_clear()
    assert machine.reference_time(torch.device("cpu")) > 0
    assert torch.equal(torch.get_rng_state(), state)


# -- roofline -----------------------------------------------------------------------------------------------------------------

RATES = {"bfloat16": 700.0, "float8_e4m3fn": 1400.0, "float32": 50.0}
ROOFLINE = Roofline(4000.0, 4500.0, RATES)
BF16, FP8, PACKED = torch.bfloat16, torch.float8_e4m3fn, torch.uint8


@pytest.mark.parametrize(
    ("gflop", "mb", "operands", "share"),
    [
        (1, 450, [BF16], Share(1.0, "memory")),
        (70, 4.5, [BF16, BF16], Share(1.0, "bfloat16")),
        (70, 4.5, [BF16, FP8], Share(1.0, "bfloat16")),
        (70, 4.5, [FP8, PACKED], Share(0.5, "float8_e4m3fn")),
        (5, 4.5, [torch.float32, BF16], Share(1.0, "float32")),
        (70, 45, [PACKED], Share(0.1, "memory")),
        (70, 45, [], Share(0.1, "memory")),
        (0, 0, [BF16], Share(0.0, "memory")),
    ],
)
def test_the_fraction_is_that_of_the_nearer_limit(gflop: float, mb: float, operands: list[torch.dtype], share: Share) -> None:
    found = share_of(Cost(gflop * 1e9, mb * 1e6), 100.0, operands, ROOFLINE)
    assert found.bound == share.bound
    assert found.part == pytest.approx(share.part)


def test_a_cpu_has_no_roofline() -> None:
    with pytest.raises(ValueError, match="measured on a GPU, got cpu"):
        measure_roofline("cpu")


@pytest.mark.nvidia
@pytest.mark.amd
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_measured_roofline_is_plausible() -> None:
    found = measure_roofline("cuda")
    assert found.read_gb_per_s > 100
    assert found.copy_gb_per_s > 100
    assert {"bfloat16", "float16", "float32"} <= {*found.tflops}
    assert found.tflops["bfloat16"] > found.tflops["float32"]


# -- the roofline's cache
# ----------------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


class Counter:
    """A stand-in for the measurement of the roofline. It measures nothing, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, device: torch.device) -> Roofline:
        self.calls += 1
        return Roofline(1000.0 + self.calls, 2000.0, RATES)


def test_it_is_measured_once(tmp_path: Path) -> None:
    counter = Counter()
    first = cached_roofline(CPU, directory=tmp_path / "new", measured=counter)
    assert first.date
    assert cached_roofline(CPU, directory=tmp_path / "new", measured=counter) == first
    assert counter.calls == 1
    again = cached_roofline(CPU, directory=tmp_path / "new", measured=counter, remeasure=True)
    assert again.copy_gb_per_s == 1002.0
    assert cached_roofline(CPU, directory=tmp_path / "new", measured=counter) == again
    assert {file.suffix for file in (tmp_path / "new").iterdir()} == {".json", ".lock"}


@pytest.mark.parametrize("what", ["device", "driver", "torch"])
def test_another_machine_is_measured_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    counter = Counter()
    cached_roofline(CPU, directory=tmp_path, measured=counter)
    key = roofline_cache._key(roofline_cache.platform_of(CPU))
    monkeypatch.setattr(roofline_cache, "_key", lambda platform: {**key, what: "other"})
    cached_roofline(CPU, directory=tmp_path, measured=counter)
    assert counter.calls == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace("1001.0", "-1"),
        lambda text: text.replace("1001.0", '"fast"'),
        lambda text: text.replace("1001.0", "NaN"),
        lambda text: text.replace("copy_gb_per_s", "copies"),
        lambda text: json.dumps({**json.loads(text), "key": {}}),
        lambda text: json.dumps({**json.loads(text), "roofline": 7}),
    ],
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, damage: Any) -> None:
    counter = Counter()
    cached_roofline(CPU, directory=tmp_path, measured=counter)
    file = next(tmp_path.glob("*.json"))
    text = file.read_text()
    assert damage(text) != text
    file.write_text(damage(text))
    with pytest.warns(StorageWarning, match=f"roofline in {file} .*kept as {file}.corrupt"):
        cached_roofline(CPU, directory=tmp_path, measured=counter)
    assert counter.calls == 2
    assert file.with_name(file.name + ".corrupt").read_text() == damage(text)
    assert json.loads(file.read_text())["roofline"]["copy_gb_per_s"] == 1002.0


def test_bytes_that_are_no_text_count_as_none(tmp_path: Path) -> None:
    counter = Counter()
    cached_roofline(CPU, directory=tmp_path, measured=counter)
    next(tmp_path.glob("*.json")).write_bytes(b"\xff\xfe{")
    with pytest.warns(StorageWarning, match="is damaged"):
        cached_roofline(CPU, directory=tmp_path, measured=counter)
    assert counter.calls == 2


def test_a_home_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's folder would be below a regular file, so even root cannot create it."""
    (tmp_path / "file").write_text("")
    counter = Counter()
    for _ in range(2):
        assert cached_roofline(CPU, directory=tmp_path / "file" / "below", measured=counter).tflops == RATES
    assert counter.calls == 2

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cached_roofline(CPU, measured=counter).tflops == RATES


def test_it_is_stored_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached_roofline(CPU, measured=Counter())
    assert len([*(tmp_path / "tokenspeed_kernel" / "roofline").glob("*.json")]) == 1


def _slow(device: torch.device) -> Roofline:
    time.sleep(0.3)
    return Roofline(float(os.getpid()), 2000.0, RATES)


def _in_a_process(folder: Path, answers: Any) -> None:
    answers.put(cached_roofline(CPU, directory=folder, measured=_slow).copy_gb_per_s)


def test_two_processes_measure_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_in_a_process, args=(tmp_path, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    assert len(set(found)) == 1


def test_a_lock_that_is_never_given_back_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_cache, "_PATIENCE_S", 0.2)
    counter, held, release = Counter(), threading.Event(), threading.Event()

    def stuck(device: torch.device) -> Roofline:
        held.set()
        release.wait()
        return ROOFLINE

    thread = threading.Thread(target=lambda: cached_roofline(CPU, directory=tmp_path, measured=stuck))
    thread.start()
    try:
        held.wait()
        assert cached_roofline(CPU, directory=tmp_path, measured=counter).copy_gb_per_s == 1001.0
    finally:
        release.set()
        thread.join()
