"""Whether this machine runs the kernels: which Triton there is, and which device it compiles for. Imports no Triton by itself."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from importlib import metadata

ARCH = "gfx950"
NEEDED_TRITON = (3, 9)

# Distributions that install the module `triton`: PyPI's, and those that PyTorch builds for its own wheels.
_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")


@functools.cache
def triton_version() -> str | None:
    """The installed Triton's version, from package metadata; None if there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # Built from source without metadata: its module says it.
    import triton

    return str(triton.__version__)


@functools.cache
def triton_gap() -> str | None:
    """Why the installed Triton does not compile the kernels, or None where it does."""
    needed = ".".join(map(str, NEEDED_TRITON))
    version = triton_version()
    if version is None:
        return f"needs triton >= {needed}, there is none"
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    if found is None or (int(found[1]), int(found[2] or 0)) < NEEDED_TRITON:
        return f"needs triton >= {needed}, this is {version}"
    return None


def _active_arch() -> str | None:
    """What Triton's driver compiles for: an architecture's name, or None where there is no device.

    An emulator shows itself here as well: it installs a driver that says gfx950.
    """
    from triton.runtime import driver

    try:
        target = driver.active.get_current_target()
    except RuntimeError:  # Triton's way to say that it found no driver
        return None
    return str(target.arch)


def require_gfx950(function: str) -> None:
    """Raises RuntimeError unless a kernel that is launched now runs on a gfx950.

    Args:
        function: what was called, for the message.
    """
    reason = triton_gap()
    if reason is None:
        arch = _active_arch()
        if arch == ARCH:
            return
        reason = f"runs on {ARCH} (AMD Instinct MI350X, MI355X), this is {_describe(arch)}"
    raise RuntimeError(f"{function} of tokenspeed_kernel_amd {reason}")


def _describe(arch: str | None) -> str:
    if arch is None:
        return f"a machine without a GPU that Triton can use ({sys.platform})"
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a device"
    label = f"sm_{arch}" if arch.isdigit() else arch
    return f"{name} [{label}]"


@functools.cache
def compute_units(device: int) -> int:
    """Compute units of a device, by Triton's number for it."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device)["multiprocessor_count"])


def current_compute_units() -> int:
    """Compute units of the device that a kernel launched now runs on."""
    from triton.runtime import driver

    return compute_units(driver.active.get_current_device())
