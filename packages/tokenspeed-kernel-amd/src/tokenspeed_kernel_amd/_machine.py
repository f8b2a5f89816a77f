"""The installed Triton's version, read from package metadata, and the device's number of CUs (compute units)."""

from __future__ import annotations

import functools
import importlib.util
import re
from importlib import metadata

# Gluon of Triton 3.7 lacks functions for layouts. With 3.8, compiled kernels read LDS before asynchronous copies into it have
# ended.
NEEDED_TRITON = (3, 9)

# Distributions that install the module `triton`: PyPI's, and those that PyTorch builds for its own wheels.
_DISTRIBUTIONS = ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton")


@functools.cache
def triton_version() -> str | None:
    """Returns the installed Triton's version, from package metadata; None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # A Triton built from source may lack package metadata; the module itself has the version.
    import triton

    return str(triton.__version__)


@functools.cache
def triton_gap() -> str | None:
    """Returns the reason why the installed Triton cannot compile this package's Gluon kernels; None if it can."""
    needed = ".".join(map(str, NEEDED_TRITON))
    version = triton_version()
    if version is None:
        return f"needs triton >= {needed}, there is none"
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    if found is None or (int(found[1]), int(found[2] or 0)) < NEEDED_TRITON:
        return f"needs triton >= {needed}, this is {version}"
    return None


@functools.cache
def compute_units(device: int) -> int:
    """Returns the number of CUs (compute units) of a device. ``device`` is Triton's device index."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device)["multiprocessor_count"])


def current_compute_units() -> int:
    """Returns the number of CUs of the current device, on which a kernel launched now would run."""
    from triton.runtime import driver

    return compute_units(driver.active.get_current_device())
