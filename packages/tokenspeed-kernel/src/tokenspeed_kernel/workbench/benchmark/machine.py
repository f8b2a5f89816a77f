"""What the machine does while kernels are timed on it: clocks, what holds them back, and a workload that tells of both."""

from __future__ import annotations

import functools
import importlib
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel.workbench.benchmark.timing import sample

# Bits of NVML's clock event reasons that mean less speed than the device has. Idle and clocks set by hand are none.
_HELD_BACK = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "thermal slowdown",
    0x80: "power brake",
}
# Beside what is measured, these must take no time, and be long enough to be timed: 0.02 ms on an H200, 0.1 ms on a CPU core.
_GPU_MATRIX, _CPU_MATRIX = 2048, 192


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment. ``held_back`` says what keeps its clock below what it can do; empty if nothing does."""

    sm_clock_mhz: int
    max_sm_clock_mhz: int
    temperature_c: int
    power_w: float
    held_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Monitor:
    """Reads the state of a GPU; None if that fails. ``quick``: in less than a millisecond."""

    read: Callable[[], GpuState | None]
    quick: bool


def gpu_monitor(device: torch.device) -> Monitor | None:
    """What reads a GPU's state, or None where nothing can: on a CPU, on a GPU that NVML does not know, without NVIDIA's tools.

    It asks NVML if the package ``nvidia-ml-py`` is there, and the program ``nvidia-smi`` otherwise, which takes some 50 ms a time.
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # since torch 2.5 or so
    if uuid is None:
        return None
    for make in (_nvml_monitor, _smi_monitor):
        monitor = make(f"GPU-{uuid}")
        if monitor is not None and monitor.read() is not None:
            return monitor
    return None


def _nvml_monitor(uuid: str) -> Monitor | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None

    def read() -> GpuState | None:
        try:
            return GpuState(
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            )
        except nvml.NVMLError:  # a partition of a GPU has no clock of its own
            return None

    return Monitor(read, quick=True)


# The second name of the reasons is the older one; each driver knows at least one.
_QUERIES = tuple(
    f"clocks.sm,clocks.max.sm,temperature.gpu,power.draw,clocks_{name}_reasons.active" for name in ("event", "throttle")
)


def _smi_monitor(uuid: str) -> Monitor | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None

    def read() -> GpuState | None:
        for query in _QUERIES:
            command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", uuid]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
            except (OSError, subprocess.SubprocessError):
                return None
            if done.returncode == 0:
                return _parsed(done.stdout)
        return None

    return Monitor(read, quick=False)


def _parsed(line: str) -> GpuState | None:
    """One line of nvidia-smi's; None if the device does not say some of it."""
    try:
        clock, most, temperature, power, reasons = line.strip().split(", ")
        return GpuState(int(clock), int(most), int(temperature), float(power), _reasons(int(reasons, 16)))
    except ValueError:
        return None


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for bit, name in _HELD_BACK.items() if bits & bit))


def reference_time(device: torch.device) -> float:
    """Microseconds of a small product of matrices: the same work every time, so that what changes is the machine."""
    return statistics.median(sample(_reference_workload(device), device, budget_s=0.002, fewest=5, most=20))


@functools.cache
def _reference_workload(device: torch.device) -> Callable[[], Any]:
    n, dtype = (_GPU_MATRIX, torch.bfloat16) if device.type == "cuda" else (_CPU_MATRIX, torch.float32)
    # Random, but not from the process's generators: measuring must not change what a program draws.
    draw = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.randn(n, n, generator=draw).to(device, dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)
