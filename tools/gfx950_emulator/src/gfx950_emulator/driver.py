"""A Triton driver whose device is the emulator.

Triton queries its driver for the compilation target, loads the binary through it, and calls its launcher with the kernel's
arguments. This driver reports gfx950, ignores the binary, finds the assembly text that Triton stored beside it, and executes it on
CPU tensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import struct
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import _allocation
from triton.runtime.cache import get_cache_manager

from gfx950_emulator import machine, parallel, program
from gfx950_emulator.constants import WAVE
from gfx950_emulator.local_memory import LIMIT
from gfx950_emulator.memory import Allocation, GlobalMemory
from gfx950_emulator.trace import InstructionTrace

ARCH = "gfx950"
DEVICE_NAME = "AMD Instinct MI355X"
COMPUTE_UNITS = 256
# Triton caches compiled kernels per device index; no real device has this index.
_DEVICE = 950

Edit = Callable[[str, str], str]
Bounds = Literal["view", "storage"]


@dataclass
class LaunchReport:
    """One kernel launch that was executed.

    Attributes:
        kernel: name.
        grid: workgroups in x, y, z.
        waves: per workgroup.
        lds: bytes of LDS per workgroup.
        instructions: instructions that the emulator executed, each counted once for all waves in lockstep.
        wave_instructions: instructions counted for every wave, as hardware executes them.
        program: the kernel as bound.
        counters: `gfx950_emulator.counters.Counters`, if requested.
    """

    kernel: str
    grid: tuple[int, int, int]
    waves: int
    lds: int
    instructions: int
    wave_instructions: int
    program: program.Program
    counters: Any = None


@dataclass
class Emulator:
    """The result of `emulated_gfx950`: settings that may be changed between launches, and the list of launches."""

    sanitize: bool = True
    counters: bool = False
    jobs: int = 1
    edit: Edit | None = None
    batch_lanes: int = machine.BATCH_LANES
    tracer: InstructionTrace | None = None
    bounds: Bounds = "view"
    launches: list[LaunchReport] = field(default_factory=list)
    extra: list[Allocation] = field(default_factory=list)

    def share(self, tensor: torch.Tensor, name: str = "shared tensor") -> None:
        """Lets kernels access a tensor that is not their argument, for example one whose address is stored in another tensor."""
        self.extra.append(_allocation_of(tensor, name, self.bounds))


_active: ContextVar[Emulator | None] = ContextVar("gfx950_emulator", default=None)


def _allocation_of(tensor: torch.Tensor, name: str, bounds: Bounds = "view") -> Allocation:
    """The byte range of a tensor's elements, or of all of its storage."""
    storage = tensor.untyped_storage()
    start, block = tensor.data_ptr(), storage.data_ptr()
    if bounds == "storage":
        return Allocation(block, block + storage.nbytes(), name, block)
    if tensor.numel() == 0:
        return Allocation(start, start, name)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Allocation(start, start + (last + 1) * tensor.element_size(), name, block)


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _flatten(item, f"{path}[{i}]")
    else:
        yield path, value


def _flatten_signature(signature: Iterable[Any]) -> Iterator[str]:
    for item in signature:
        if isinstance(item, tuple | list):
            yield from _flatten_signature(item)
        else:
            yield item


def _expand_descriptor(argument: Any, type_: str) -> list[tuple[str, Any]]:
    """A host tensor descriptor as the scalar arguments of the compiled kernel on this device: base, shape and strides as 64 bits,
    padding and rounding flags, then shape (32 bits) and strides once more."""
    from triton.backends import driver as interface

    element = type_.split("<", 1)[1].split("[", 1)[0]
    expand = getattr(interface, "expand_signature", None)
    if expand is not None:
        types = list(expand([type_], None, "tensordesc"))
        values = interface.decompose_descriptor(argument)
    else:  # Triton 3.6
        from triton.backends.amd.driver import expand_signature, make_tensordesc_arg

        types = list(expand_signature([type_], None))
        values = list(make_tensordesc_arg(argument, None, None))
    if len(types) != len(values):
        raise TypeError(f"a tensor descriptor of {element} has {len(values)} parts, its signature {len(types)}")
    return list(zip(types, values, strict=True))


_PACK = {
    "i1": "<b", "u1": "<B", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q",
    "fp32": "<f", "f32": "<f", "fp64": "<d", "fp16": "<e",
}  # fmt: skip


def _pack(type_: str, value: Any) -> bytes:
    if type_.startswith("*"):
        pointer = value.data_ptr() if hasattr(value, "data_ptr") else int(value or 0)
        return struct.pack("<Q", pointer)
    if type_ == "bf16":
        return struct.pack("<f", float(value))[2:]
    if type_ == "i1":
        value = int(bool(value))
    return struct.pack(_PACK[type_], value)


class _Launcher:
    """Created by Triton for a compiled kernel and called for each launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.metadata = metadata
        self.names = list(getattr(source.fn, "arg_names", []))
        self.signature = list(source.signature.values())
        self.text = _assembly_text(metadata.hash, source.name)

    def __call__(self, grid_x, grid_y, grid_z, stream, function, kernel_metadata, launch_metadata, enter, leave, *args) -> None:
        emulator = _active.get()
        if emulator is None:
            raise RuntimeError("a kernel that was compiled for the emulator is launched outside `emulated_gfx950()`")
        grid = (int(grid_x), int(grid_y), int(grid_z))
        if min(grid) <= 0:
            return
        if enter is not None:
            enter(launch_metadata)
        emulator.launches.append(self._launch(emulator, grid, args))
        if leave is not None:
            leave(launch_metadata)

    def _launch(self, emulator: Emulator, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> LaunchReport:
        name = self.metadata.name
        text = self.text if emulator.edit is None else emulator.edit(name, self.text)
        kernel = program.load(text)
        pairs = self._pairs(arguments)
        scratch = self._scratch(grid)
        allocations = [*emulator.extra, *(_allocation_of(tensor, label) for label, tensor in scratch)]
        for label, (_, value) in pairs:
            if isinstance(value, torch.Tensor) or (hasattr(value, "base") and isinstance(value.base, torch.Tensor)):
                tensor = value if isinstance(value, torch.Tensor) else value.base
                if tensor.device.type != "cpu":
                    raise ValueError(f"{name}: argument {label} is on {tensor.device}; the emulator works on CPU tensors")
                allocations.append(_allocation_of(tensor, label, emulator.bounds))
        values, memory = [item for _, item in pairs], [tensor for _, tensor in scratch]
        segment = _segment(kernel, grid, self.metadata.num_warps, values, memory, name)
        address = int(segment.ctypes.data)
        allocations.append(Allocation(address, address + len(segment), "the kernel's arguments"))
        counters = None
        if emulator.counters:
            from gfx950_emulator.counters import Counters

            counters = Counters(kernel)
        launch = machine.Launch(
            kernel,
            grid,
            self.metadata.num_warps,
            int(self.metadata.shared),
            segment,
            GlobalMemory(allocations),
            emulator.sanitize,
            counters,
            emulator.batch_lanes,
            emulator.tracer if emulator.tracer is not None and emulator.tracer.wants(kernel) else None,
        )
        tally = parallel.execute(launch, emulator.jobs)
        return LaunchReport(name, grid, launch.waves, launch.lds, tally.dispatched, tally.waves, kernel, counters)

    def _pairs(self, arguments: tuple[Any, ...]) -> list[tuple[str, tuple[str, Any]]]:
        """(label, (type, value)) of every scalar or pointer that the kernel takes, in order."""
        pairs = []
        for i, (signature, argument) in enumerate(zip(self.signature, arguments, strict=True)):
            label = f"argument {self.names[i]}" if i < len(self.names) else f"argument {i}"
            types = list(_flatten_signature([signature]))
            values = list(_flatten(argument)) if isinstance(signature, tuple | list) else [("", argument)]
            for type_, (path, value) in zip(types, values, strict=True):
                if type_ == "constexpr":
                    continue
                if type_.startswith("tensordesc"):
                    pairs += [(label + path, item) for item in _expand_descriptor(value, type_)]
                else:
                    pairs.append((label + path, (type_, value)))
        return pairs

    def _scratch(self, grid: tuple[int, int, int]) -> list[tuple[str, torch.Tensor]]:
        """Global and profile scratch memory; None if the kernel needs none."""
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
    values: list[tuple[str, Any]],
    scratch: list[torch.Tensor],
    name: str,
) -> np.ndarray:
    """The kernel's argument segment, by the offsets in the code object's metadata."""
    size = kernel.assembly.descriptor.get("kernarg_size", 0)
    segment = np.zeros(max(size, 16) + 64, np.uint8)
    start = -segment.ctypes.data % 64
    segment = segment[start : start + max(size, 16)]
    explicit = [a for a in kernel.assembly.arguments if not a.kind.startswith("hidden")]
    packed = [_pack(type_, value) for type_, value in values]
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


@lru_cache(maxsize=256)
def _assembly_text(hash_: str, name: str) -> str:
    """The assembly text in Triton's cache for a compiled function of this name, whatever its name in the text."""
    file = name[:150]  # Triton truncates long names to this length
    group = get_cache_manager(hash_).get_group(f"{file}.json") or {}
    path = group.get(f"{file}.amdgcn")
    if path is None or not Path(path).exists():
        raise RuntimeError(f"Triton's cache has no assembly text of {name} ({hash_})")
    return Path(path).read_text()


class _Utils:
    """The device functions that Triton requires."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        # module, function, registers, spills, largest workgroup; the launcher reports registers and spills from the assembly.
        # Without a module, a deleted kernel does not ask the then active driver, which may be none, to unload it.
        return (None, name, 0, 0, 1024)

    def unload_module(self, module: Any) -> None:
        """Does nothing, because nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return {
            "max_shared_mem": LIMIT, "multiprocessor_count": COMPUTE_UNITS, "arch": ARCH, "warpSize": WAVE,
            "max_num_regs": 512, "sm_clock_rate": 2_400_000, "mem_clock_rate": 2_000_000, "mem_bus_width": 8192,
            "cooperativeLaunch": 1,
        }  # fmt: skip


class EmulatorDriver(DriverBase):
    """Triton's view of the emulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = _Utils()
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return _active.get() is not None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", ARCH, WAVE)

    def get_current_device(self) -> int:
        return _DEVICE

    def set_current_device(self, device: int) -> None:
        """Does nothing, because there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return (9, 5)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the emulator compiles no launcher")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the emulator does not measure time; see its timing model")

    def get_empty_cache_for_benchmark(self) -> Any:
        return torch.empty(0)

    def clear_cache(self, cache: Any) -> None:
        """Does nothing, because there is no cache to clear."""


@contextlib.contextmanager
def emulated_gfx950(
    *,
    sanitize: bool = True,
    counters: bool = False,
    jobs: int = 1,
    edit: Edit | None = None,
    batch_lanes: int = machine.BATCH_LANES,
    tracer: InstructionTrace | None = None,
    bounds: Bounds = "view",
) -> Iterator[Emulator]:
    """Inside the block, Triton and Gluon kernels are compiled for gfx950 and executed on CPU tensors.

    With tokenspeed-kernel-base installed, its platform is an emulated MI355X, so that operators select and run the same kernels.

    Args:
        sanitize: check for races, missing waits, uninitialised data and more (`gfx950_emulator.sanitizer`). Accesses beyond the
            tensors that a kernel was passed are errors with or without it.
        counters: count instructions, bytes, bank conflicts and cache lines, for `LaunchReport.counters`.
        jobs: processes among which workgroups are divided; global atomics, counters or a tracer force one process.
        edit: ``edit(kernel_name, text)`` returns the assembly text to execute instead.
        batch_lanes: the most lanes that are executed together; affects only speed.
        tracer: receives each instruction of one wave.
        bounds: the bytes of a tensor argument that a kernel may access: ``"view"``, from its first to its last element, or
            ``"storage"``, all of the underlying memory, as on a GPU. The latter is for kernels that rely on padding which their
            caller allocated and sliced off.

    Raises:
        RuntimeError: inside another such block.
        ValueError: ``bounds`` is neither of these.
    """
    if bounds not in get_args(Bounds):
        raise ValueError(f"bounds must be one of {', '.join(get_args(Bounds))}, got {bounds!r}")
    if _active.get() is not None:
        raise RuntimeError("emulated_gfx950() inside emulated_gfx950()")
    emulator = Emulator(sanitize, counters, jobs, edit, batch_lanes, tracer, bounds)
    config = triton.runtime.driver
    previous = config._active  # reading `active` would initialise a GPU driver
    token = _active.set(emulator)
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("tokenspeed_kernel_base") is not None:
            stack.enter_context(_platform())
        config.set_active(EmulatorDriver())
        try:
            yield emulator
        finally:
            config.set_active(previous)
            _active.reset(token)


def _platform() -> contextlib.AbstractContextManager[Any]:
    from tokenspeed_kernel_base.platform import ArchVersion, PlatformInfo, use_platform

    memory = 288 * 2**30
    features = frozenset({"triton"})
    platform = PlatformInfo("amd", ArchVersion(9, 5), DEVICE_NAME, ARCH, 1, memory, COMPUTE_UNITS, features, emulated=True)
    return use_platform(platform)
