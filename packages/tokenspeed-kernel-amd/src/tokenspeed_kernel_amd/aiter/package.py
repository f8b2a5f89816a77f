"""Checks package metadata for AITER, and imports AITER when an adapter is first selected."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from importlib import metadata
from types import ModuleType

from tokenspeed_kernel_base.spec import Priority

DISTRIBUTION = "amd-aiter"
# AITER's kernels rank below portable kernels, because the adapters have not been run on hardware.
UNTRIED = Priority.PORTABLE - 1
# The adapters were written from the source of this version. Before 0.1.19, AITER did not pass sinks to the prefill kernel.
NEEDED = (0, 1, 20)


def aiter_gap() -> str | None:
    """Returns the reason why AITER cannot be used; None if it can. Metadata is read once per process."""
    return find_gap()


@functools.cache
def find_gap() -> str | None:
    """Returns the reason why AITER cannot be used; None if it can. Both the distribution amd-aiter and the module ``aiter`` must be
    installed: PyPI's package aiter is an unrelated library of asynchronous iterators."""
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"needs {DISTRIBUTION}"
    if importlib.util.find_spec("aiter") is None:
        return f"needs {DISTRIBUTION}, whose module aiter is not found"
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None or tuple(int(number or 0) for number in numbers.groups()) < NEEDED:
        return f"needs {DISTRIBUTION} >= {'.'.join(map(str, NEEDED))}, this is {version}"
    return None


def load(module: str) -> ModuleType:
    """Imports a module of AITER.

    Raises:
        ImportError: the import failed with any error, which the message names. With an unsupported Triton, AITER itself raises
            ValueError.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ImportError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
