"""Checks package metadata for FlashInfer, and imports FlashInfer when an adapter is first selected."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

DISTRIBUTION = "flashinfer-python"
# The adapters were written from the source of this version. Older versions lack, among other things, the decode's counter buffer.
NEEDED = (0, 7, 2)


@functools.cache
def gap() -> str | None:
    """Returns the reason why FlashInfer cannot be used; None if it can."""
    wanted = f"{DISTRIBUTION} >= {'.'.join(map(str, NEEDED))}"
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"needs {wanted}"
    if importlib.util.find_spec("flashinfer") is None:
        return f"needs {DISTRIBUTION}, whose module flashinfer is not found"
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None or tuple(int(number or 0) for number in numbers.groups()) < NEEDED:
        return f"needs {wanted}, this is {version}"
    return None


def load(module: str, function: str) -> Callable[..., Any]:
    """Imports a function of FlashInfer.

    Raises:
        ImportError: the import failed with any error, which the message names. The kernel is then excluded, with a warning.
    """
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise ImportError(f"{module}.{function} cannot be imported: {type(error).__name__}: {error}") from error
    return found
