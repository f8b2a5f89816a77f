"""Finds declarations by importing the modules that contain them.

A package's kernels and operators are declared in its modules, beside each launcher; there is no central table. `import_modules`
imports every module of a package except device modules, whose names end in ``_device``. A launcher's module imports no compiler. It
reaches its device code through `DeviceModule`, which imports the device module at the first launch.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import Any

DEVICE_SUFFIX = "_device"

# The module that applies the compile policy to Triton's compilations, and makes their cache keys the same in all processes.
# `DeviceModule` imports it after a device module has imported Triton.
_TRITON_CACHE = "tokenspeed_kernel_base.triton_cache_device"


def import_modules(package: str) -> list[str]:
    """Imports a package and all its modules, sorted by name, except device modules.

    Returns:
        The names of the imported modules.

    Raises:
        ImportError: a folder holds modules but no ``__init__.py``, so its declarations would be missed.
        Exception: any error of an imported module, unchanged.
    """
    module = importlib.import_module(package)
    names = [package]
    paths = getattr(module, "__path__", ())
    for folder in (entry for path in paths if os.path.isdir(path) for entry in os.scandir(path) if entry.is_dir()):
        files = os.listdir(folder.path)
        if "__init__.py" not in files and any(file.endswith(".py") for file in files):
            raise ImportError(f"{folder.path} holds modules and no __init__.py: add one, with a line that says what they are")
    for info in sorted(pkgutil.iter_modules(paths), key=lambda info: info.name):
        name = f"{package}.{info.name}"
        if info.name.endswith(DEVICE_SUFFIX) or info.name == "__main__":
            continue
        if info.ispkg:
            names += import_modules(name)
        else:
            importlib.import_module(name)
            names.append(name)
    return names


class DeviceModule:
    """A module of device code, imported when the first of its attributes is used.

    ::

        device = DeviceModule(__name__ + "_device")  # mha_prefill_device.py, beside mha_prefill.py

        def mha_prefill(q, k, v, ...):
            device.attend[grid](q, k, v, ...)

    The instance stores each attribute on first use, so later launches find it without a call of this class.
    """

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # introspection tools read such attributes, which must not trigger the import
            raise AttributeError(attribute)
        value = getattr(importlib.import_module(self.__name), attribute)
        if "triton" in sys.modules:
            cache = importlib.import_module(_TRITON_CACHE)
            cache.install()
            cache.settle_keys(value)
        self.__dict__[attribute] = value
        return value

    def __repr__(self) -> str:
        return f"DeviceModule({self.__name!r})"
