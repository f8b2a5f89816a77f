"""A Triton driver for a device that this machine does not have. Triton compiles for this device and launches nothing.

Besides machine code, Triton compiles C code for the host with the system's C compiler: its driver, and in some releases a launcher
for each kernel signature. On NVIDIA GPUs this code is compiled here, too, but never loaded, because it needs the GPU's driver.
Otherwise a process would compile this code at its first launches, although all kernels are in a pack.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build

from tokenspeed_kernel_base.platform import PlatformInfo

# Triton compares a kernel's shared memory with the device's limit. Here the limit is too large to matter: only the real device
# checks.
_PROPERTIES = {"max_shared_mem": 1 << 30, "multiprocessor_count": 1, "warpSize": 32, "max_num_regs": 65536}


_LIBCUDA = "libcuda.so.1"


class _Launcher:
    """The launcher that Triton makes for each compiled kernel, and calls for each launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        """Ignores the compiled kernel, because it is never launched."""

    def __call__(self, *launch: Any) -> None:
        """Ignores a launch, because there is no device."""


class _CudaLauncher(_Launcher):
    def __init__(self, source: Any, metadata: Any) -> None:
        """Compiles the launcher's host code. Newer releases of Triton have one launcher for all kernels, as part of the driver."""
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(source, metadata)


class _Utils:
    """The functions of a Triton driver that load kernels and query the device; this class loads nothing."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return ("module", name, 0, 0, 1024)  # module, function, registers, spills, largest CTA

    def unload_module(self, module: Any) -> None:
        """Does nothing, because `load_binary` loads no module."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return _PROPERTIES


class _Driver(DriverBase):  # type: ignore[misc]  # Triton has no types
    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self.utils, self._target = _Utils(), target
        self.launcher_cls = _CudaLauncher if target.backend == "cuda" else _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is launched")


class _Unloaded:
    """Stands for a compiled module of host code, which is not loaded. Nothing calls its functions."""

    def __getattr__(self, name: str) -> None:
        return None


def _unloaded(name: str, path: str) -> _Unloaded:
    return _Unloaded()


@contextlib.contextmanager
def _compiling_host_code() -> Iterator[None]:
    """Inside the block, Triton compiles host code for NVIDIA GPUs, and does not load it.

    On a machine without the GPU's driver, the code is linked to an empty library with the driver's name. So the code finds the
    driver on a machine that has it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "_load_module_from_path", _unloaded))
        try:
            nvidia.library_dirs()
        except AssertionError:  # there is no driver
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(knobs.nvidia.scope())
            stack.enter_context(knobs.build.scope())
            knobs.nvidia.libcuda_path = folder
            knobs.build.impl = _linked_without_driver
            stack.callback(nvidia.library_dirs.cache_clear)
            stack.callback(nvidia.libcuda_dirs.cache_clear)
        nvidia.CudaUtils()
        yield


def _linked_without_driver(
    name: str, source: str, folder: str, library_dirs: list[str], include_dirs: list[str], libraries: list[str]
) -> str:
    """Compiles a module of host code to a shared library that needs the GPU's driver, on a machine without this driver.

    Returns:
        The path of the library.
    """
    stub = Path(folder) / _LIBCUDA
    command = [os.environ.get("CC", "cc"), "-shared", f"-Wl,-soname,{_LIBCUDA}", "-x", "c", "/dev/null", "-o", str(stub)]
    subprocess.run(command, check=True)
    others = [each for each in libraries if each != _LIBCUDA]
    # Without this option, some linkers leave out libraries that define no symbol that is used.
    flags = ["-Wl,--no-as-needed", str(stub)]
    with knobs.build.scope():
        knobs.build.impl = None
        built: str = build._build(name, source, folder, library_dirs, include_dirs, others, flags)
        return built


@contextlib.contextmanager
def no_launches(platform: PlatformInfo) -> Iterator[None]:
    """Inside the block, Triton compiles for a platform and launches nothing."""
    version, nvidia_gpu = platform.arch_version, platform.vendor == "nvidia"
    target = GPUTarget("cuda", 10 * version.major + version.minor, 32) if nvidia_gpu else GPUTarget("hip", platform.arch, 64)
    config = triton.runtime.driver
    previous = config._active  # reading `active` would initialise a GPU driver
    config.set_active(_Driver(target))
    try:
        with _compiling_host_code() if nvidia_gpu else contextlib.nullcontext():
            yield
    finally:
        config.set_active(previous)
