"""Finding declarations by importing the modules that make them.

A package's kernels and operators are declared in its modules, one beside each launcher, and nowhere else: there is no table to add
them to. `import_modules` imports every module of a package but device code, whose name ends in ``_device``: a launcher's module
imports no compiler, and gets at its device code through `DeviceModule`, which imports it at the first launch.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from typing import Any

DEVICE_SUFFIX = "_device"


def import_modules(package: str) -> list[str]:
    """Imports a package and every module in it, in order of their names, but device code.

    Returns:
        Their names.

    Raises:
        ImportError: a folder holds modules and is no package, so that nothing in it would be found.
        Whatever a module raises; its traceback names file and line.
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

    Attributes that were used once are found without a further call, so that a launch pays nothing for it.
    """

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked by tools that look at every object, for which nothing is to be imported
            raise AttributeError(attribute)
        value = getattr(importlib.import_module(self.__name), attribute)
        self.__dict__[attribute] = value
        return value

    def __repr__(self) -> str:
        return f"DeviceModule({self.__name!r})"
