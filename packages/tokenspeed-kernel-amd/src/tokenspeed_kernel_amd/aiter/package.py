"""Whether AITER is installed, from package metadata; and importing it, when an adapter is first selected."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from importlib import metadata
from types import ModuleType

DISTRIBUTION = "amd-aiter"
# The version whose source the adapters were written from. Before 0.1.19 sinks did not reach the kernel of a prefill.
NEEDED = (0, 1, 20)


def aiter_gap() -> str | None:
    """Why AITER cannot be used, or None where it can. Metadata is read once a process."""
    return find_gap()


@functools.cache
def find_gap() -> str | None:
    """What `aiter_gap` says. The distribution is looked for as well as the module: PyPI has another package named aiter, of
    iterators."""
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
    """A module of AITER.

    Raises:
        ImportError: importing it failed, with whatever error; the message says which. Under a Triton that it was not written for,
            AITER raises ValueError.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ImportError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
