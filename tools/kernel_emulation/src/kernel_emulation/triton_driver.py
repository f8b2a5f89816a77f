"""A Triton driver whose device is an emulator.

Triton queries its driver for the compilation target, loads the binary through the driver, and calls the driver's launcher with the
kernel's arguments. This driver reports the emulated target and ignores the binary. It finds the assembly text that Triton stored
beside the binary, and the emulator executes this text on CPU tensors.
"""

from __future__ import annotations

import abc
import contextlib
import re
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager

from kernel_emulation.errors import EmulationError

_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}

Argument = tuple[str, str, Any]
"""A kernel argument: a label for messages, the type as in Triton's signatures, and the value."""


def pack(type_: str, value: Any) -> bytes:
    """Returns the bytes of a scalar or pointer argument. A value that is bytes already is returned unchanged."""
    if isinstance(value, bytes):
        return value
    if type_.startswith("*"):
        return struct.pack("<Q", value.data_ptr() if hasattr(value, "data_ptr") else int(value or 0))
    if type_ == "bf16":
        return struct.pack("<f", float(value))[2:]
    if type_ in _FLOATS:
        return struct.pack(_FLOATS[type_], float(value))
    if re.fullmatch(r"[iu]\d+", type_) is None:
        raise EmulationError(f"arguments of type {type_}")
    size = max(int(type_[1:]), 8) // 8
    content = int(bool(value)) if type_ == "i1" else int(value)
    return (content & ((1 << 8 * size) - 1)).to_bytes(size, "little")


@lru_cache(maxsize=256)
def compiled_text(digest: str, function: str, kind: str) -> str:
    """Returns the text (PTX or assembly) of a compiled function in Triton's cache. The kernel may have another name in the text.

    Args:
        digest: the hash of the function's metadata.
        function: the function's name.
        kind: the suffix of the text's file: ``"ptx"`` or ``"amdgcn"``.
    """
    file = function[:150]  # Triton truncates long names to this length
    path = (get_cache_manager(digest).get_group(f"{file}.json") or {}).get(f"{file}.{kind}")
    if path is None or not Path(path).exists():
        raise EmulationError(f"Triton's cache has no {kind} of {function} ({digest})")
    return Path(path).read_text()


class Launcher(abc.ABC):
    """Launches a compiled kernel on the emulator. Triton creates a launcher for each kernel, and calls the launcher for each
    launch.

    Attributes:
        kind: the suffix of the text's file in Triton's cache.
        metadata: the compiler's metadata of the kernel.
        text: the text that the emulator executes.
    """

    kind: str

    def __init__(self, source: Any, metadata: Any) -> None:
        self.metadata = metadata
        self.text = compiled_text(metadata.hash, source.name, self.kind)
        self._names = list(getattr(source.fn, "arg_names", []))
        self._signature = list(source.signature.values())

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, launch: Any, enter: Any, leave: Any, *arguments: Any
    ) -> None:
        grid = (int(x), int(y), int(z))
        if min(grid) <= 0:
            return
        if enter is not None:
            enter(launch)
        self.launch(grid, list(self._scalars(arguments)))
        if leave is not None:
            leave(launch)

    @abc.abstractmethod
    def launch(self, grid: tuple[int, int, int], arguments: list[Argument]) -> None:
        """Runs the kernel.

        Args:
            grid: the number of workgroups or CTAs in x, y, z; none is 0.
            arguments: every scalar or pointer that the kernel takes, in order.
        """

    @abc.abstractmethod
    def described(self, type_: str, descriptor: Any, index: int) -> Iterable[tuple[str, Any]]:
        """Returns the types and values of the kernel parameters that a tensor descriptor becomes. ``index``: the descriptor's
        number in the launch."""

    def _scalars(self, arguments: tuple[Any, ...]) -> Iterator[Argument]:
        descriptors = 0
        for at, (type_, value) in enumerate(zip(self._signature, arguments, strict=True)):
            label = f"argument {self._names[at] if at < len(self._names) else at}"
            for path, one_type, one in _flattened(type_, value, label):
                if one_type.startswith("tensordesc"):
                    yield from ((path, *part) for part in self.described(one_type, one, descriptors))
                    descriptors += 1
                else:
                    yield path, one_type, one


def _flattened(type_: Any, value: Any, label: str) -> Iterator[Argument]:
    """Yields the elements of a kernel argument, which may be a nested tuple. Constants are left out."""
    if isinstance(type_, (tuple, list)):
        for at, (of_type, of_value) in enumerate(zip(type_, value, strict=True)):
            yield from _flattened(of_type, of_value, f"{label}[{at}]")
    elif type_ != "constexpr":
        yield label, type_, value


class _Utils:
    """The functions of a device that Triton requires of a driver."""

    def __init__(self, properties: dict[str, Any]) -> None:
        self._properties = properties

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        # Module, function, registers, spills, largest workgroup. If the module is None, a deleted kernel does not ask the currently
        # active driver, which may be None, to unload it.
        return (None, name, 0, 0, 1024)

    def unload_module(self, module: Any) -> None:
        """Does nothing, because nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return self._properties


class Driver(DriverBase):  # type: ignore[misc]  # Triton has no types
    """Triton's view of an emulated device.

    Args:
        launcher: the class that runs the device's kernels.
        target: the target that Triton compiles for.
        device: an index that no real device has, because Triton caches compiled kernels per device index.
        capability: the device's version.
        properties: the device's properties, as Triton names them.
    """

    def __init__(
        self, launcher: type[Launcher], target: GPUTarget, device: int, capability: tuple[int, int], properties: dict[str, Any]
    ) -> None:
        super().__init__()
        self.utils = _Utils(properties)
        self.launcher_cls = launcher
        self._target, self._device, self._capability = target, device, capability

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None:
        """Does nothing, because there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return self._capability

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
def installed(driver: Driver) -> Iterator[None]:
    """Inside the block, ``driver`` is Triton's active driver."""
    config = triton.runtime.driver
    previous = config._active  # reading `active` would initialise a GPU driver
    config.set_active(driver)
    try:
        yield
    finally:
        config.set_active(previous)
