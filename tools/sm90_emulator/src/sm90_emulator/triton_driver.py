"""The emulator as the device of Triton's kernels.

Triton queries its driver for the compilation target, loads the binary through it, and calls its launcher with the kernel's
arguments. This driver reports sm_90, loads nothing, and executes the PTX that Triton's cache holds beside the binary, on CPU
tensors.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager

from sm90_emulator.errors import EmulationError
from sm90_emulator.launching import SHARED_BYTES
from sm90_emulator.machine import Geometry
from sm90_emulator.program import Program, load
from sm90_emulator.tensor_maps import tensor_map

Execute = Callable[[Program, Geometry, bytes], None]
"""Runs a kernel, given its launch and the bytes of its parameters."""

# Triton caches compiled kernels per device index; no real device has this index.
_DEVICE = 90
_TF32 = 11  # of `CUtensorMapDataType`
_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}


@functools.lru_cache(maxsize=256)
def _program(digest: str, function: str, kernel: str) -> Program:
    """The bound PTX in Triton's cache for a compiled function."""
    file = function[:150]  # Triton truncates long names to this length
    path = (get_cache_manager(digest).get_group(f"{file}.json") or {}).get(f"{file}.ptx")
    if path is None or not Path(path).exists():
        raise EmulationError(f"Triton's cache has no PTX of {function} ({digest})")
    return load(Path(path).read_text(), kernel)


def _content(kind: str, value: Any, size: int) -> bytes:
    """The bytes of a kernel's parameter, whose type is named as in Triton's signatures."""
    if isinstance(value, bytes):
        return value
    if kind.startswith("*"):
        return struct.pack("<Q", value.data_ptr() if hasattr(value, "data_ptr") else int(value or 0))
    if kind in _FLOATS:
        return struct.pack(_FLOATS[kind], float(value))
    if kind[0] not in "iu":
        raise EmulationError(f"arguments of type {kind}")
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


class _Launcher:
    """Created by Triton for a compiled kernel and called for each launch."""

    def __init__(self, execute: Execute, source: Any, metadata: Any) -> None:
        self._execute = execute
        self._metadata = metadata
        self._signature = list(source.signature.values())
        self._function = source.name

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, launch: Any, enter: Any, leave: Any, *arguments: Any
    ) -> None:
        meta = self._metadata
        program = _program(meta.hash, self._function, meta.name)
        if meta.num_ctas != 1:
            raise EmulationError("programs of Triton that are clusters", kernel=meta.name)
        if min(x, y, z) < 1:
            return
        content = bytearray(program.kernel.parameter_bytes)
        descriptions = iter(getattr(meta, "tensordesc_meta", None) or ())
        pairs = zip(self._signature, arguments, strict=True)
        flat = [pair for kind, value in pairs for pair in _flattened(kind, value, descriptions)]
        parameters = list(program.kernel.parameters.values())
        # Addresses of scratch memory follow a kernel's own parameters. Only device-side descriptors and profilers use it.
        if len(parameters) - len(flat) not in (0, 1, 2) or getattr(meta, "global_scratch_size", None):
            raise EmulationError(f"{len(flat)} arguments for {len(parameters)} parameters", kernel=meta.name)
        for parameter, (kind, value) in zip(parameters, flat, strict=False):
            part = _content(kind, value, parameter.size)
            if len(part) != parameter.size:
                raise EmulationError(f"{parameter.name} has {parameter.size} bytes, a {kind} was given", kernel=meta.name)
            content[parameter.offset : parameter.offset + parameter.size] = part
        geometry = Geometry((int(x), int(y), int(z)), (32 * meta.num_warps, 1, 1), (1, 1, 1), int(meta.shared))
        self._execute(program, geometry, bytes(content))


def _flattened(kind: Any, value: Any, descriptions: Iterator[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The scalars of an argument, which may be a nested tuple. ``descriptions``: the compiler's metadata of descriptors."""
    if isinstance(kind, (tuple, list)):
        for of_kind, of_value in zip(kind, value, strict=True):
            yield from _flattened(of_kind, of_value, descriptions)
    elif kind.startswith("tensordesc"):
        yield "nvTmaDesc", _described(value, next(descriptions))
        yield from (("i32", size) for size in value.shape)
        yield from (("i64", stride) for stride in value.strides)
    elif kind != "constexpr":
        yield kind, value


def _described(descriptor: Any, meta: dict[str, Any]) -> bytes:
    """The tensor map of a descriptor, with the tile sizes and swizzle that the compiler chose."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if meta["fp4_padded"] or meta.get("is_im2col"):
        raise EmulationError("tensor descriptors of padded 4-bit floats, or of convolutions")
    kind = _TF32 if getattr(descriptor, "round_f32_to_tf32", False) else TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    strides = [stride * meta["elem_size"] for stride in descriptor.strides]
    nan = descriptor.padding == "nan"
    return tensor_map(descriptor.base.data_ptr(), kind, descriptor.shape, strides, meta["block_size"], meta["swizzle"], nan)


class _Utils:
    """Loads nothing: launches execute the PTX."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, name, 0, 0, 1024  # module, function, registers, spills, threads of a CTA

    def unload_module(self, module: Any) -> None:
        """Does nothing, because nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, Any]:
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": multiprocessors, "warpSize": 32, "max_num_regs": 65536}


class _Driver(DriverBase):  # type: ignore[misc]  # Triton has no types
    def __init__(self, execute: Execute) -> None:
        super().__init__()
        self.utils = _Utils()
        self.launcher_cls = functools.partial(_Launcher, execute)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return _DEVICE

    def set_current_device(self, device: int) -> None:
        """Does nothing, because there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the emulator compiles no launcher")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the emulator does not measure time")

    def get_empty_cache_for_benchmark(self) -> Any:
        return torch.empty(0)

    def clear_cache(self, cache: Any) -> None:
        """Does nothing, because there is no cache to clear."""


@contextlib.contextmanager
def installed(execute: Execute) -> Iterator[None]:
    """Inside the block, Triton's device is the emulator, and ``execute`` runs the launches."""
    config = triton.runtime.driver
    previous = config._active  # reading `active` would initialise a GPU driver
    config.set_active(_Driver(execute))
    try:
        yield
    finally:
        config.set_active(previous)
