"""Replaces modules that SGLang imports but these tests do not need, such as those for images, notebooks and compiled kernels. Some
cannot be installed without a GPU, and others are large."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, ClassVar

# The top-level packages that are replaced if they are not installed.
ABSENT = ("IPython", "sentencepiece", "torchvision", "torchaudio", "torchao", "sgl_kernel", "flashinfer", "vllm")


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing(metaclass=_AnyName):
    """The value of every attribute of an absent module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


class _Absent(ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """Makes imports of the packages in ``ABSENT`` succeed if the packages are not installed."""
    sys.meta_path.append(_Finder({name for name in ABSENT if importlib.util.find_spec(name) is None}))
