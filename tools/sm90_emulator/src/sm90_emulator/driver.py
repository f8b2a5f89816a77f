"""The emulator as the device of CuteDSL's programs.

A program compiled by CuteDSL consists of host code and a fat binary. The host code computes the launch and calls CuteDSL's runtime
for everything that needs a device. `native/runtime.c` replaces these functions and forwards launches to this module, which finds
the PTX from which the binary was compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import itertools
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sm90_emulator import machine
from sm90_emulator.build import cache_directory, compiled
from sm90_emulator.errors import EmulationError
from sm90_emulator.machine import Geometry, LaunchReport, Settings
from sm90_emulator.program import Program, load

DEVICE_NAME = "NVIDIA H200"
_MEMORY = 141 * 10**9
_LAUNCH_FAILED = 719
_FATBIN, _ELF = 0xBA55ED50, b"\x7fELF"


@dataclass
class Emulator:
    """The result of `emulated_sm90`.

    Attributes:
        settings: the launch settings; may be changed between launches.
        launches: reports of the launches so far.
        check_bounds: whether accesses of global memory must be inside a tensor that is alive in Python.
    """

    settings: Settings
    check_bounds: bool = True
    launches: list[LaunchReport] = field(default_factory=list)
    error: BaseException | None = None


_active: Emulator | None = None
_libraries: dict[int, str] = {}
_kernels: dict[int, tuple[int, str]] = {}
_handles = itertools.count(1)


def ptx_directory() -> Path:
    """The folder with the PTX of compiled programs, named by the hash of their machine code."""
    return cache_directory() / "ptx"


def keep(cubin: bytes, ptx: str) -> None:
    """Stores the PTX from which a binary was compiled."""
    file = ptx_directory() / f"{hashlib.sha256(cubin).hexdigest()}.ptx"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(ptx)
        part.replace(file)


def cubin_of(image: int) -> bytes:
    """The machine code in a fat binary, or the image itself if it is one."""
    head = ctypes.string_at(image, 16)
    if head[:4] == _ELF:
        return _elf(image)
    magic, _, header, size = struct.unpack("<IHHQ", head)
    if magic != _FATBIN:
        raise EmulationError(f"a binary that begins with {head[:4].hex()} is neither ELF nor a fat binary")
    at, end = image + header, image + header + size
    while at < end:
        kind, _, header, size = struct.unpack("<HHIQ", ctypes.string_at(at, 16))
        if kind == 2 and ctypes.string_at(at + header, 4) == _ELF:
            return ctypes.string_at(at + header, size)
        at += header + size
    raise EmulationError("a fat binary without machine code that is not compressed")


def _elf(image: int) -> bytes:
    head = ctypes.string_at(image, 64)
    (sections,) = struct.unpack_from("<Q", head, 0x28)
    entry, count = struct.unpack_from("<HH", head, 0x3A)
    return ctypes.string_at(image, sections + entry * count)


# -- runtime callbacks -------------------------------------------------------------------------------------------------------------


def _guarded(function: Callable[..., int]) -> Callable[..., int]:
    """Wraps a callback: exceptions cannot pass through C, so they are stored in the emulator until the program returns."""

    @functools.wraps(function)
    def call(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except BaseException as error:
            if _active is not None and _active.error is None:
                _active.error = error
            return _LAUNCH_FAILED

    return call


@_guarded
def _load_library(image: int, library: Any) -> int:
    digest = hashlib.sha256(cubin_of(image)).hexdigest()
    handle = next(_handles)
    _libraries[handle] = digest
    library[0] = handle
    return 0


@_guarded
def _find_kernel(library: int, name: bytes, kernel: Any) -> int:
    handle = next(_handles)
    _kernels[handle] = (library, name.decode())
    kernel[0] = handle
    return 0


@functools.lru_cache(maxsize=256)
def _program(digest: str, name: str) -> Program:
    file = ptx_directory() / f"{digest}.ptx"
    if not file.exists():
        raise EmulationError(f"there is no PTX of {name}: compile it inside `emulated_sm90()`, or with `sm90_emulator.driver.keep`")
    return load(file.read_text(), name)


@_guarded
def _launch_kernel(kernel: int, numbers: Any, shared_bytes: int, arguments: Any) -> int:
    library, name = _kernels[kernel]
    program = _program(_libraries[library], name)
    sizes = tuple(int(numbers[at]) for at in range(9))
    geometry = Geometry(sizes[:3], sizes[3:6], sizes[6:], shared_bytes, bool(numbers[9]))  # type: ignore[arg-type]
    if min(geometry.grid) < 1:
        raise EmulationError(f"a grid of {geometry.grid}", kernel=name)
    packed = bytearray(program.kernel.parameter_bytes)
    for index, parameter in enumerate(program.kernel.parameters.values()):
        packed[parameter.offset : parameter.offset + parameter.size] = ctypes.string_at(arguments[index], parameter.size)
    _execute(program, geometry, bytes(packed))
    return 0


def _execute(program: Program, geometry: Geometry, parameters: bytes) -> None:
    """Runs a kernel with the settings of the enclosing block's emulator, and stores the report.

    Raises:
        EmulationError: there is no such block, or the kernel failed.
    """
    if _active is None:
        raise EmulationError("a kernel that was compiled for the emulator is launched outside `emulated_sm90()`")
    ranges = list(_tensors()) if _active.check_bounds else []
    _active.launches.append(machine.run(program, geometry, parameters, ranges, _active.settings))


def _tensors() -> Iterator[tuple[int, int]]:
    """The memory of all tensors that are alive in Python. Kernels receive plain addresses, so their tensors are not known."""
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor or type(thing) is torch.nn.Parameter:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without memory
                storage = thing.untyped_storage()
                yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


_LoadLibrary = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_FindKernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
_LaunchKernel = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)
)
_callbacks = _LoadLibrary(_load_library), _FindKernel(_find_kernel), _LaunchKernel(_launch_kernel)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The replacement runtime, which takes precedence over CuteDSL's for all libraries that are loaded later."""
    path = compiled("runtime", ("runtime.c",), ("-O2", "-fPIC", "-fvisibility=hidden", "-w"))
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


# -- tensors -----------------------------------------------------------------------------------------------------------------------


class _Lent:
    """A CPU tensor exported through DLPack as if on a CUDA device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = torch.utils.dlpack.to_dlpack(self._tensor)  # type: ignore[attr-defined]
        address = _pointer_of(capsule, b"dltensor")
        device = (ctypes.c_int32 * 2).from_address(address + 8)
        device[0], device[1] = 2, 0
        return capsule


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def on_device(value: Any) -> Any:
    """A CPU tensor disguised as a device tensor, as programs require it; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    import tvm_ffi

    return tvm_ffi.from_dlpack(_Lent(value.detach()))


def launching(program: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a compiled program: it takes CPU tensors, and raises the emulator's errors."""

    def launch(*arguments: Any) -> Any:
        emulator = _active
        if emulator is None:
            raise EmulationError("a program that was loaded for the emulator is launched outside `emulated_sm90()`")
        emulator.error = None
        try:
            return program(*map(on_device, arguments))
        except Exception as error:
            if emulator.error is not None:
                raise emulator.error from None
            raise error

    return launch


# -- the block ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def emulated_sm90(
    *,
    seed: int = 0,
    copies: str | None = None,
    uninitialised: bool = False,
    limited_fp8_accumulation: bool = False,
    resident: int = 132,
    together: int | None = None,
    multiprocessors: int = 132,
    check_bounds: bool = True,
    check_overlap: bool = True,
    triton: bool = False,
) -> Iterator[Emulator]:
    """Inside the block, CuteDSL programs for sm_90a, and optionally Triton kernels, are executed on CPU tensors.

    With tokenspeed-kernel-base installed, its platform is an emulated H200, so that operators select and run the same kernels.

    Args:
        seed: 0 runs warps in order. Any other seed schedules warps randomly, for a random number of instructions.
        copies: when asynchronous copies and wgmma are performed: ``"early"``, at issue; ``"late"``, as late as permitted; or
            ``"random"``. None means early with seed 0, otherwise random.
        uninitialised: loads of shared memory that was never written are errors. Otherwise such loads return all ones, which is NaN
            in all float types. Tensor-core loads always return NaN instead of an error, because kernels load more than they use.
        limited_fp8_accumulation: FP8 wgmma accumulates as Hopper's tensor cores do: products are aligned to the largest exponent
            and keep 13 fraction bits.
        resident: the most CTAs that are resident at once. Another CTA starts when no running CTA can proceed.
        together: CTAs that start at once; None means 1 with seed 0, otherwise 4.
        multiprocessors: the number of SMs that the device reports.
        check_bounds: accesses of global memory outside of all tensors are errors.
        check_overlap: in a PDL launch, accesses of memory written by the preceding kernel are errors before `griddepcontrol.wait`.
            Needs ``check_bounds``.
        triton: whether Triton compiles for the emulator too. Triton must be installed.

    Raises:
        RuntimeError: inside another such block, or in a process that uses a GPU, because CuteDSL programs that are loaded later
            would use the emulator instead of CuteDSL's runtime.
        ValueError: ``copies`` is invalid.
    """
    global _active
    if _active is not None:
        raise RuntimeError("emulated_sm90() inside emulated_sm90()")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("emulated_sm90() in a process that uses a GPU: its programs would find the emulator's runtime")
    when = copies or ("random" if seed else "early")
    if when not in ("early", "late", "random"):
        raise ValueError(f'copies must be "early", "late" or "random", got {copies!r}')
    first = together if together is not None else 4 if seed else 1
    overlap = check_overlap and check_bounds
    settings = Settings(seed, when, uninitialised, limited_fp8_accumulation, resident, first, multiprocessors, overlap)
    emulator = Emulator(settings, check_bounds)
    _runtime().sm90_emulator_serve(*_callbacks, multiprocessors)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(torch.cuda, "get_device_properties", lambda _=None: _properties(multiprocessors)))
        stack.enter_context(_replaced(torch.cuda, "get_device_capability", lambda _=None: (9, 0)))
        stack.enter_context(_replaced(torch._C, "_cuda_getCurrentRawStream", lambda _=0: 0))
        if importlib.util.find_spec("tokenspeed_kernel_base") is not None:
            stack.enter_context(_platform(multiprocessors, triton))
        if importlib.util.find_spec("tokenspeed_kernel_nvidia") is not None:
            stack.enter_context(_programs())
        if triton:
            from sm90_emulator import triton_driver

            stack.enter_context(triton_driver.installed(_execute))
        _active = emulator
        try:
            yield emulator
        finally:
            _active = None


def _properties(multiprocessors: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=DEVICE_NAME, major=9, minor=0, multi_processor_count=multiprocessors, total_memory=_MEMORY, uuid="emulated"
    )


_MISSING = object()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _platform(multiprocessors: int, triton: bool) -> contextlib.AbstractContextManager[Any]:
    from tokenspeed_kernel_base.platform import ArchVersion, PlatformInfo, use_platform

    features = frozenset({"triton"} if triton else ())
    platform = PlatformInfo("nvidia", ArchVersion(9, 0), DEVICE_NAME, "sm_90", 1, _MEMORY, multiprocessors, features, emulated=True)
    return use_platform(platform)


@contextlib.contextmanager
def _programs() -> Iterator[None]:
    """Inside the block, programs of tokenspeed-kernel-nvidia are compiled with their PTX stored, and take CPU tensors."""
    from tokenspeed_kernel_nvidia import _programs as programs

    kind = programs.Program
    compile_, call = kind.compile, kind.__call__

    def compile_and_keep(self: Any, config: Any, options: str = "") -> Any:
        with tempfile.TemporaryDirectory() as folder:
            result = compile_(self, config, f"{options} --keep-cubin --keep-ptx --dump-dir {folder}")
            texts = list(Path(folder).glob("*.ptx"))
            if len(texts) != 1:
                raise EmulationError(f"compiling made {len(texts)} PTX texts")
            keep(bytes(result.__cubin__), texts[0].read_text())
        return result

    wrapped: dict[Any, Any] = {}

    def call_with_tensors(self: Any, config: Any) -> Any:
        found = call(self, config)
        if id(found) not in wrapped:
            wrapped[id(found)] = (found, launching(found))
        return wrapped[id(found)][1]

    variable = programs.VARIABLE
    before = os.environ.get(variable)
    os.environ[variable] = str(cache_directory() / "programs")
    with _replaced(kind, "compile", compile_and_keep), _replaced(kind, "__call__", call_with_tensors):
        try:
            yield
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before
