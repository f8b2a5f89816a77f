"""A Triton driver for a device that this machine does not have. Triton compiles for this device and launches nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from tokenspeed_kernel_base.platform import PlatformInfo

# Triton compares a kernel's shared memory with the device's limit. Here the limit is too large to matter: only the real device
# checks.
_PROPERTIES = {"max_shared_mem": 1 << 30, "multiprocessor_count": 1, "warpSize": 32, "max_num_regs": 65536}


class _Launcher:
    """The launcher that Triton makes for each compiled kernel, and calls for each launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        """Ignores the compiled kernel, because it is never launched."""

    def __call__(self, *launch: Any) -> None:
        """Ignores a launch, because there is no device."""


class _Utils:
    """The functions of a Triton driver that load kernels and query the device; this class loads nothing."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return (None, name, 0, 0, 1024)  # module, function, registers, spills, largest CTA

    def unload_module(self, module: Any) -> None:
        """Does nothing, because `load_binary` loads no module."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return _PROPERTIES


class _Driver(DriverBase):  # type: ignore[misc]  # Triton has no types
    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self.utils, self.launcher_cls, self._target = _Utils(), _Launcher, target

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


@contextlib.contextmanager
def no_launches(platform: PlatformInfo) -> Iterator[None]:
    """Inside the block, Triton compiles for a platform and launches nothing."""
    version, nvidia = platform.arch_version, platform.vendor == "nvidia"
    target = GPUTarget("cuda", 10 * version.major + version.minor, 32) if nvidia else GPUTarget("hip", platform.arch, 64)
    config = triton.runtime.driver
    previous = config._active  # reading `active` would initialise a GPU driver
    config.set_active(_Driver(target))
    try:
        yield
    finally:
        config.set_active(previous)
