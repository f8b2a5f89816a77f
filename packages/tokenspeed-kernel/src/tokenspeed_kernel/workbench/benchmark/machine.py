"""The state of the machine during timing: GPU clocks, throttle reasons, and a reference workload whose time shows their effect."""

from __future__ import annotations

import functools
import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel.workbench.benchmark.timing import sample

# Bits of NVML's clock event reasons that throttle the device. Reasons that are not listed, such as idling and manually set clocks,
# do not throttle.
_HELD_BACK = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "thermal slowdown",
    0x80: "power brake",
}
# The sizes of the reference GEMM. It takes 0.02 ms on an H200 and 0.1 ms on a CPU core: short compared with a measurement, but long
# enough to time.
_GPU_MATRIX, _CPU_MATRIX = 2048, 192


@dataclass(frozen=True)
class GpuState:
    """A GPU's state at one moment. ``held_back``: the reasons for throttling its clock; empty without throttling."""

    sm_clock_mhz: int
    max_sm_clock_mhz: int
    temperature_c: int
    power_w: float
    held_back: tuple[str, ...] = ()


# A function that reads a GPU's state in less than a millisecond, and returns None if that fails.
Monitor = Callable[[], GpuState | None]


def gpu_monitor(device: torch.device) -> Monitor | None:
    """Returns a function that reads a GPU's state. None on a CPU, on a GPU that NVML does not know, or without ``nvidia-ml-py``."""
    if device.type != "cuda" or torch.version.hip:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # missing before torch 2.5 or so
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
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
        except nvml.NVMLError:  # for example, a partition of a GPU has no clock of its own
            return None

    return read if read() is not None else None


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for bit, name in _HELD_BACK.items() if bits & bit))


def reference_time(device: torch.device) -> float:
    """Returns the time of a small GEMM in microseconds. The work is always the same, so the time changes only with the machine."""
    return statistics.median(sample(_reference_workload(device), device, budget_s=0.002, fewest=5, most=20))


@functools.cache
def _reference_workload(device: torch.device) -> Callable[[], Any]:
    n, dtype = (_GPU_MATRIX, torch.bfloat16) if device.type == "cuda" else (_CPU_MATRIX, torch.float32)
    # Random values from a separate generator: a measurement must not change the random numbers of the program.
    draw = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.randn(n, n, generator=draw).to(device, dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)
