"""The emulator as a Triton device, and the ``with`` block in which kernels for gfx950 or gfx942 run on this device."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import _allocation

from gfx950_emulator import machine, parallel, program
from gfx950_emulator.architecture import ARCHITECTURES, Architecture
from gfx950_emulator.constants import WAVE
from gfx950_emulator.memory import GlobalMemory
from gfx950_emulator.trace import InstructionTrace
from kernel_emulation import emulator, triton_driver
from kernel_emulation.emulator import Allocation, Block, Bounds, Edit, allocation_of
from kernel_emulation.triton_driver import Argument, Driver, pack


@dataclass(kw_only=True)
class LaunchReport(emulator.LaunchReport):
    """One executed kernel launch.

    Attributes:
        waves: number of waves per workgroup.
        lds: bytes of LDS per workgroup.
        instructions: number of instructions that the emulator executed. An instruction counts once for all waves in lockstep.
        wave_instructions: number of instructions, counted for every wave, as hardware executes them.
        program: the kernel as bound.
        counters: the `gfx950_emulator.counters.Counters` of the launch, if requested.
    """

    waves: int
    lds: int
    wave_instructions: int
    program: program.Program
    counters: Any = None

    @property
    def resources(self) -> str:
        return f"{self.waves} waves a workgroup, {self.lds} bytes of LDS"


@dataclass(kw_only=True)
class Emulator(emulator.Emulator[LaunchReport]):
    """The result of `emulated`: settings that may be changed between launches, and the list of launches."""

    jobs: int = 1
    batch_lanes: int = machine.BATCH_LANES
    tracer: InstructionTrace | None = None


_block = Block[Emulator]("emulated")


class _Launcher(triton_driver.Launcher):
    """Runs a kernel's launches on the emulator of the active ``with`` block."""

    kind = "amdgcn"

    def launch(self, grid: tuple[int, int, int], arguments: list[Argument]) -> None:
        running = _block.active()
        name = self.metadata.name
        kernel = program.load(running.edited(name, self.text))
        scratch = self._scratch(grid)
        allocations = [*running.extra, *(allocation_of(tensor, label) for label, tensor in scratch)]
        for label, _, value in arguments:
            tensor = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
            if isinstance(tensor, torch.Tensor):
                if tensor.device.type != "cpu":
                    raise ValueError(f"{name}: argument {label} is on {tensor.device}; the emulator works on CPU tensors")
                allocations.append(allocation_of(tensor, label, running.bounds))
        segment = _segment(kernel, grid, self.metadata.num_warps, arguments, [tensor for _, tensor in scratch], name)
        address = int(segment.ctypes.data)
        allocations.append(Allocation(address, address + len(segment), "the kernel's arguments"))
        counters = None
        if running.counters:
            from gfx950_emulator.counters import Counters

            counters = Counters(kernel)
        launch = machine.Launch(
            kernel,
            grid,
            self.metadata.num_warps,
            int(self.metadata.shared),
            segment,
            GlobalMemory(allocations),
            running.sanitize,
            counters,
            running.batch_lanes,
            running.tracer if running.tracer is not None and running.tracer.wants(kernel) else None,
        )
        tally = parallel.execute(launch, running.jobs)
        running.launches.append(
            LaunchReport(
                kernel=name, grid=grid, waves=launch.waves, lds=launch.lds, instructions=tally.dispatched,
                wave_instructions=tally.waves, program=kernel, counters=counters,
            )
        )  # fmt: skip

    def described(self, type_: str, descriptor: Any, index: int) -> Iterable[tuple[str, Any]]:
        """Returns the scalar arguments that the compiled kernel takes for a tensor descriptor: base, shape and strides in 64 bits,
        padding and rounding flags, then shape (in 32 bits) and strides once more.
        """
        from triton.backends import driver as interface

        expand = getattr(interface, "expand_signature", None)
        if expand is not None:
            types = list(expand([type_], None, "tensordesc"))
            values = interface.decompose_descriptor(descriptor)
        else:  # Triton 3.6
            from triton.backends.amd.driver import expand_signature, make_tensordesc_arg

            types = list(expand_signature([type_], None))
            values = list(make_tensordesc_arg(descriptor, None, None))
        return zip(types, values, strict=True)

    def _scratch(self, grid: tuple[int, int, int]) -> list[tuple[str, torch.Tensor]]:
        """Allocates the kernel's global and profile scratch memory. A tensor is empty if the kernel needs no memory of its kind."""
        result = []
        for kind in ("global", "profile"):
            size = getattr(self.metadata, f"{kind}_scratch_size", 0) or 0
            align = getattr(self.metadata, f"{kind}_scratch_align", 1) or 1
            if not size:
                result.append((f"{kind} scratch", torch.empty(0, dtype=torch.uint8)))
                continue
            total = size * grid[0] * grid[1] * grid[2]
            if kind == "global" and not isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
                result.append(("global scratch", _allocation._allocator.get()(total, align, None)))
            else:
                result.append((f"{kind} scratch", torch.zeros(total + align, dtype=torch.uint8)))
        return result


def _segment(
    kernel: program.Program,
    grid: tuple[int, int, int],
    waves: int,
    values: list[Argument],
    scratch: list[torch.Tensor],
    name: str,
) -> np.ndarray:
    """Writes the arguments to a kernel argument segment, at the offsets in the code object's metadata."""
    size = kernel.assembly.descriptor.get("kernarg_size", 0)
    segment = np.zeros(max(size, 16) + 64, np.uint8)
    start = -segment.ctypes.data % 64
    segment = segment[start : start + max(size, 16)]
    explicit = [a for a in kernel.assembly.arguments if not a.kind.startswith("hidden")]
    packed = [pack(type_, value) for _, type_, value in values]
    missing = len(explicit) - len(packed)
    if not 0 <= missing <= len(scratch):
        raise RuntimeError(f"{name} takes {len(explicit)} arguments, {len(packed)} were passed")
    packed += [struct.pack("<Q", tensor.data_ptr() if tensor.numel() else 0) for tensor in scratch[:missing]]
    for argument, data in zip(explicit, packed, strict=True):
        if argument.size != len(data):
            raise RuntimeError(f"{name}: the argument at offset {argument.offset} has {argument.size} bytes, not {len(data)}")
        segment[argument.offset : argument.offset + argument.size] = np.frombuffer(data, np.uint8)
    hidden = {
        **{f"hidden_block_count_{axis}": ("<I", grid[i]) for i, axis in enumerate("xyz")},
        **{f"hidden_group_size_{axis}": ("<H", (waves * WAVE, 1, 1)[i]) for i, axis in enumerate("xyz")},
        **{f"hidden_remainder_{axis}": ("<H", 0) for axis in "xyz"},
        **{f"hidden_global_offset_{axis}": ("<Q", 0) for axis in "xyz"},
        "hidden_grid_dims": ("<H", 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1),
    }
    for argument in kernel.assembly.arguments:
        if argument.kind in hidden:
            form, value = hidden[argument.kind]
            segment[argument.offset : argument.offset + argument.size] = np.frombuffer(struct.pack(form, value), np.uint8)
    return segment


def _driver(architecture: Architecture) -> Driver:
    arch, device = architecture.name, architecture.device
    properties = {
        "max_shared_mem": device.lds_bytes, "multiprocessor_count": device.compute_units, "arch": arch, "warpSize": WAVE,
        "max_num_regs": 512, "sm_clock_rate": round(device.clock_hz / 1000), "mem_clock_rate": 2_000_000, "mem_bus_width": 8192,
        "cooperativeLaunch": 1,
    }  # fmt: skip
    # Triton caches compiled kernels per device index. No real device has this index: 950 or 942.
    index = int(arch.removeprefix("gfx"))
    return Driver(_Launcher, GPUTarget("hip", arch, WAVE), index, architecture.version, properties)


@contextlib.contextmanager
def emulated(
    arch: str = "gfx950",
    *,
    sanitize: bool = True,
    counters: bool = False,
    jobs: int = 1,
    edit: Edit | None = None,
    batch_lanes: int = machine.BATCH_LANES,
    tracer: InstructionTrace | None = None,
    bounds: Bounds = "view",
) -> Iterator[Emulator]:
    """Compiles Triton and Gluon kernels for an architecture and executes them on CPU tensors, inside the ``with`` block.

    If tokenspeed-kernel-base is installed, its platform inside the block is an emulated MI355X (gfx950) or MI300X (gfx942).
    Operators then select and run the same kernels as on this device.

    Args:
        arch: ``"gfx950"`` or ``"gfx942"``.
        sanitize: whether to check for races, missing waits, uninitialised data and more (`gfx950_emulator.sanitizer`). Accesses
            beyond the tensors that a kernel received are errors regardless of this setting.
        counters: whether to count instructions, bytes, bank conflicts and cache lines, for `LaunchReport.counters`.
        jobs: number of processes among which workgroups are divided. Global atomics, counters or a tracer force one process.
        edit: ``edit(kernel_name, text)`` returns the assembly text to execute instead.
        batch_lanes: the largest number of lanes that are executed together; affects only speed.
        tracer: called with each instruction of one wave.
        bounds: which bytes of a tensor argument a kernel may access: ``"view"``, from its first to its last element, or
            ``"storage"``, all of the underlying memory, as on a GPU. ``"storage"`` is for kernels that use padding which their
            caller allocated and sliced off.

    Raises:
        RuntimeError: this block is inside another such block.
        ValueError: ``arch`` is not one of the two architectures, or ``bounds`` is neither ``"view"`` nor ``"storage"``.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    architecture = ARCHITECTURES[arch]
    running = Emulator(
        sanitize=sanitize, counters=counters, jobs=jobs, edit=edit, batch_lanes=batch_lanes, tracer=tracer, bounds=bounds
    )
    device = architecture.device
    platform = emulator.platform(
        "amd", architecture.version, device.name, arch, device.memory_bytes, device.compute_units, frozenset({"triton"})
    )
    with _block.entered(running), platform, triton_driver.installed(_driver(architecture)):
        yield running


emulated_gfx950 = partial(emulated, "gfx950")
emulated_gfx942 = partial(emulated, "gfx942")
