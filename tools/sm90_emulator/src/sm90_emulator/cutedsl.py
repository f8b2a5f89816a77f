"""Makes the emulator the device of CuteDSL's programs.

A program that CuteDSL has compiled consists of host code and a fat binary. The host code computes the launch, and calls CuteDSL's
runtime for everything that needs a device. `native/runtime.c` replaces these runtime functions, and forwards launches to this
module. This module finds the PTX from which the binary was compiled.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernel_emulation.errors import EmulationError
from sm90_emulator import addresses
from sm90_emulator.build import cache_directory, compiled
from sm90_emulator.emulator import BLOCK
from sm90_emulator.machine import Geometry
from sm90_emulator.program import load

_LAUNCH_FAILED = 719
_FATBIN, _ELF = 0xBA55ED50, b"\x7fELF"
_libraries: dict[int, str] = {}
_kernels: dict[int, tuple[int, str]] = {}
_handles = itertools.count(1)


def ptx_directory() -> Path:
    """Returns the folder with the PTX of compiled programs. Each file's name is the hash of the program's machine code."""
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
    """Returns the machine code in the fat binary at address ``image``; if ``image`` is machine code itself, returns that."""
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


def ptx_in(library: bytes) -> str:
    """Returns the PTX from which the fat binary inside a compiled program's shared library or object file was compiled.

    Raises:
        EmulationError: there is no fat binary, or its PTX was not kept.
    """
    start = library.find(struct.pack("<I", _FATBIN))
    if start < 0:
        raise EmulationError("a program without a fat binary")
    held = ctypes.create_string_buffer(library, len(library))
    return _text(hashlib.sha256(cubin_of(ctypes.addressof(held) + start)).hexdigest(), "a program")


def _elf(image: int) -> bytes:
    head = ctypes.string_at(image, 64)
    (sections,) = struct.unpack_from("<Q", head, 0x28)
    entry, count = struct.unpack_from("<HH", head, 0x3A)
    return ctypes.string_at(image, sections + entry * count)


# -- runtime callbacks -------------------------------------------------------------------------------------------------------------


def _guarded(function: Callable[..., int]) -> Callable[..., int]:
    """Wraps a callback from C. Exceptions cannot pass through C code, so they are stored in the emulator until the program
    returns.
    """

    @functools.wraps(function)
    def call(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except BaseException as error:
            running = BLOCK.current
            if running is not None and running.error is None:
                running.error = error
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
def _text(digest: str, name: str) -> str:
    file = ptx_directory() / f"{digest}.ptx"
    if not file.exists():
        raise EmulationError(f"there is no PTX of {name}: compile it inside `emulated_sm90()`, or use `sm90_emulator.cutedsl.keep`")
    return file.read_text()


@_guarded
def _launch_kernel(kernel: int, numbers: Any, shared_bytes: int, arguments: Any) -> int:
    library, name = _kernels[kernel]
    text = _text(_libraries[library], name)
    sizes = tuple(int(numbers[at]) for at in range(9))
    geometry = Geometry(sizes[:3], sizes[3:6], sizes[6:], shared_bytes, bool(numbers[9]))  # type: ignore[arg-type]
    if min(geometry.grid) < 1:
        raise EmulationError(f"a grid of {geometry.grid}", kernel=name)
    kernel_of_text = load(text, name).kernel
    packed = bytearray(kernel_of_text.parameter_bytes)
    for index, parameter in enumerate(kernel_of_text.parameters.values()):
        packed[parameter.offset : parameter.offset + parameter.size] = ctypes.string_at(arguments[index], parameter.size)
    BLOCK.active().run(text, name, geometry, bytes(packed))
    return 0


_LoadLibrary = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_FindKernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
_LaunchKernel = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)
)
_callbacks = _LoadLibrary(_load_library), _FindKernel(_find_kernel), _LaunchKernel(_launch_kernel)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Loads the replacement of CuteDSL's runtime. Libraries that are loaded later use the replacement instead of CuteDSL's
    runtime."""
    path = compiled("runtime", ("runtime.c",), ("-O2", "-fPIC", "-fvisibility=hidden", "-w"))
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def replace_runtime(multiprocessors: int) -> None:
    """Makes CuteDSL's programs use this module's functions instead of a GPU. Programs that are loaded earlier are not affected."""
    _runtime().sm90_emulator_serve(*_callbacks, multiprocessors)


# -- tensors -----------------------------------------------------------------------------------------------------------------------


class _Lent:
    """A CPU tensor that DLPack exports as if it were on a CUDA device."""

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
    """Returns a CPU tensor disguised as a device tensor, because programs require one; returns any other value unchanged."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    import tvm_ffi

    addresses.add(value)
    return tvm_ffi.from_dlpack(_Lent(value.detach()))


def launching(program: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a compiled program. The wrapper takes CPU tensors, and raises the emulator's errors."""

    def launch(*arguments: Any) -> Any:
        running = BLOCK.active()
        running.error = None
        try:
            return program(*map(on_device, arguments))
        except Exception as error:
            if running.error is not None:
                raise running.error from None
            raise error

    return launch
