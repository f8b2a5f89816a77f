"""Runs a bound kernel: fills the machine's launch structure, and converts the machine's errors to Python exceptions."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernel_emulation import emulator
from kernel_emulation.errors import EmulationError, SanitizerError
from sm90_emulator.build import library
from sm90_emulator.program import Program
from sm90_emulator.registers import LANES

_KINDS = ("out-of-bounds", "uninitialised", "misaligned", "overlap", "overwritten", "deadlock")
PATIENCE = 3_000_000
_LATENESS = {"early": 0, "random": 1, "late": 2}


class _Program(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p), ("pool", ctypes.c_void_p), ("constants", ctypes.c_void_p), ("count", ctypes.c_int32),
        ("register_bytes", ctypes.c_int32), ("special", ctypes.c_int32 * 40),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("cluster", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32), ("local_bytes", ctypes.c_uint32), ("registers", ctypes.c_uint32),
        ("resident", ctypes.c_uint32), ("together", ctypes.c_uint32), ("seed", ctypes.c_uint64),
        ("check_uninitialised", ctypes.c_uint32), ("limited_fp8", ctypes.c_uint32), ("lateness", ctypes.c_uint32),
        ("ranges_count", ctypes.c_uint32), ("multiprocessors", ctypes.c_uint32), ("check_overlap", ctypes.c_uint32),
        ("shared_byte", ctypes.c_uint32), ("early", ctypes.c_uint32), ("patience", ctypes.c_uint64),
        ("ranges", ctypes.c_void_p), ("parameters", ctypes.c_void_p), ("parameter_bytes", ctypes.c_uint64),
        ("instructions", ctypes.c_uint64), ("thread_instructions", ctypes.c_uint64), ("wgmmas", ctypes.c_uint64),
        ("copies", ctypes.c_uint64), ("copied_bytes", ctypes.c_uint64), ("rounds", ctypes.c_uint64), ("error_at", ctypes.c_int32),
        ("error_warp", ctypes.c_uint32), ("error_lane", ctypes.c_uint32), ("error_cta", ctypes.c_uint32 * 3),
        ("counts", ctypes.c_void_p),
        ("error", ctypes.c_char * 4096),
    ]  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """The shape of a launch: CTAs, threads per CTA, CTAs per cluster, and bytes of dynamic shared memory.

    ``early``: whether this is a PDL launch, which may start while the preceding kernel still runs.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    early: bool = False


@dataclass
class Settings:
    """Settings of the machine for a launch. See `emulated_sm90`."""

    seed: int = 0
    copies: str = "early"
    uninitialised: bool = False
    limited_fp8_accumulation: bool = False
    resident: int = 132
    together: int = 1
    multiprocessors: int = 132
    check_overlap: bool = True
    shared_byte: int = 0xFF
    counters: bool = False
    patience: int = PATIENCE


@dataclass(kw_only=True)
class LaunchReport(emulator.LaunchReport):
    """The report of a launch.

    Attributes:
        geometry: grid, block, cluster and shared memory.
        instructions: number of warp instructions; an instruction that only some lanes of a warp execute counts once.
        thread_instructions: number of thread instructions.
        products: number of wgmma instructions, counted once per warp.
        copied_bytes: number of bytes that bulk copies wrote to shared memory.
        counts: how many warps executed each instruction of ``program``, and how many threads, if requested.
    """

    geometry: Geometry
    thread_instructions: int
    products: int
    copied_bytes: int
    program: Program = field(repr=False)
    counts: np.ndarray[Any, Any] | None = field(default=None, repr=False)

    @property
    def resources(self) -> str:
        warps = -(-math.prod(self.geometry.block) // LANES)
        cluster = math.prod(self.geometry.cluster)
        shared = self.program.kernel.static_bytes + self.geometry.shared_bytes
        return f"{warps} warps a CTA, {shared} bytes of shared memory" + (f", clusters of {cluster}" if cluster > 1 else "")


def run(
    program: Program,
    geometry: Geometry,
    parameters: bytes,
    ranges: Sequence[tuple[int, int]] | None = None,
    settings: Settings | None = None,
) -> LaunchReport:
    """Runs a kernel to its end.

    Args:
        program: the kernel.
        geometry: the shape of the launch.
        parameters: the bytes of all parameters, in the kernel's layout.
        ranges: the accessible global memory, as (begin, end) addresses; None for all memory.
        settings: the launch settings.

    Raises:
        SanitizerError: the kernel violated a rule of the hardware, or waits forever.
    """
    settings = settings or Settings()
    kernel = program.kernel
    threads = geometry.block[0] * geometry.block[1] * geometry.block[2]
    for grid, cluster in zip(geometry.grid, geometry.cluster, strict=True):
        if grid < 1 or grid % cluster:
            raise EmulationError(f"a grid of {geometry.grid} in clusters of {geometry.cluster}", kernel=kernel.name)
    if not 0 < threads <= 1024:
        raise EmulationError(f"{threads} threads in a CTA", kernel=kernel.name)
    # Without ranges, the machine checks no global access. If no memory is accessible, pass one empty range above all memory.
    limits = np.array([] if ranges is None else merged(ranges) or [(2**64 - 1, 2**64 - 1)], np.uint64).reshape(-1)
    place = np.zeros(len(parameters) + 128, np.uint8)
    start = -place.ctypes.data % 64
    place[start : start + len(parameters)] = np.frombuffer(parameters, np.uint8)
    counts = np.zeros((len(program.code), 2), np.uint64) if settings.counters else None
    registers = program.registers
    bound = _Program(
        program.code.ctypes.data, program.pool.ctypes.data, program.constants.ctypes.data, len(program.code), registers.size,
        (ctypes.c_int32 * 40)(*registers.special),
    )  # fmt: skip
    launch = _Launch(
        grid=geometry.grid, block=geometry.block, cluster=geometry.cluster,
        shared_bytes=kernel.static_bytes + geometry.shared_bytes, local_bytes=kernel.local_bytes, registers=kernel.registers,
        resident=settings.resident, together=settings.together, seed=settings.seed,
        check_uninitialised=settings.uninitialised, limited_fp8=settings.limited_fp8_accumulation,
        lateness=_LATENESS[settings.copies],
        ranges_count=len(limits) // 2, multiprocessors=settings.multiprocessors, check_overlap=settings.check_overlap,
        shared_byte=settings.shared_byte, early=geometry.early, patience=settings.patience, ranges=limits.ctypes.data,
        parameters=place.ctypes.data + start, parameter_bytes=len(parameters),
        counts=None if counts is None else counts.ctypes.data,
    )  # fmt: skip
    if library().size_of(2) != ctypes.sizeof(_Launch) or library().size_of(0) != program.code.dtype.itemsize:
        raise RuntimeError("the compiled machine and this module disagree about structures")
    if library().run_launch(ctypes.byref(bound), ctypes.byref(launch)):
        raise _error(program, launch)
    return LaunchReport(
        kernel=kernel.name, grid=geometry.grid, geometry=geometry, instructions=launch.instructions,
        thread_instructions=launch.thread_instructions, products=launch.wgmmas, copied_bytes=launch.copied_bytes, program=program,
        counts=counts,
    )  # fmt: skip


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges sorted, with adjacent and overlapping ranges merged."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def _error(program: Program, launch: _Launch) -> SanitizerError:
    text = launch.error.decode(errors="replace")
    kind = next((kind for kind in _KINDS if text.startswith(kind)), "deadlock" if text.startswith("no progress") else "error")
    message = re.sub(r"@(\d+)", lambda found: repr(program.origins[int(found[1])].text), text).removeprefix(f"{kind}: ")
    instruction = None
    if launch.error_at >= 0:
        instruction = program.origins[launch.error_at]
        message += f"\n  in CTA ({', '.join(map(str, launch.error_cta))}), warp {launch.error_warp}"
    return SanitizerError(kind, message, program.kernel.name, instruction)
