"""Code that the tests of FlashInfer's adapters share: access to FlashInfer's source, if available, and stand-in modules for
FlashInfer."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tokenspeed_kernel_base.platform import named_platform, use_platform
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_nvidia.flashinfer import package as _package

Function = Callable[..., Any]
Body = Callable[[dict[str, Any]], Any]


@functools.cache
def source_reader() -> Callable[[str], str] | str:
    """Returns a function that reads a source file of FlashInfer 0.7.2 or a post-release. The source is the installed package, or
    the wheel that TOKENSPEED_FLASHINFER_WHEEL names. If there is no source, returns the reason as text. Does not import FlashInfer.
    """
    wheel = os.environ.get("TOKENSPEED_FLASHINFER_WHEEL")
    if wheel is not None:
        archive = zipfile.ZipFile(wheel)
        version = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA")).split("-")[1].partition(".dist")[0]

        def read(name: str) -> str:
            return archive.read(name).decode()

    else:
        try:
            distribution = metadata.distribution(_package.DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return "needs flashinfer-python 0.7.2, installed or as a wheel that TOKENSPEED_FLASHINFER_WHEEL names"
        version = distribution.version

        def read(name: str) -> str:
            return Path(str(distribution.locate_file(name))).read_text()

    return read if version.partition(".post")[0] == "0.7.2" else f"needs flashinfer-python 0.7.2, this is {version}"


def declared(source: str, function: str) -> str:
    """Returns the signature of a function in a module's source, without annotations."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function]
    for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    return f"({ast.unparse(found.args)})"


def unparsed(signature: str) -> str:
    """Returns a signature in the notation of `declared`."""
    (function,) = ast.parse(f"def function{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return f"({ast.unparse(function.args)})"


def with_signature(
    text: str, read: str, names: Mapping[str, Any] | None = None
) -> Callable[[Callable[[dict[str, Any]], Any]], Function]:
    """Returns a decorator of ``body``. The decorated function has the real function's signature, and passes its arguments to
    ``body`` as a dict.

    Args:
        text: the signature.
        read: the parameters that the stand-in supports; a call must leave all others at their defaults.
        names: values of the names that occur in the defaults.
    """
    namespace: dict[str, Any] = dict(names or {})
    exec(f"def function{text}: ...", namespace)
    signature = inspect.signature(namespace["function"])
    known = set(read.split())

    def decorate(body: Body) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            unknown = {p for p, v in bound.arguments.items() if p not in known and v is not signature.parameters[p].default}
            assert not unknown, f"the stand-in does not know {unknown}"
            bound.apply_defaults()
            return body(bound.arguments)

        return call

    return decorate


@contextlib.contextmanager
def installed(
    monkeypatch: pytest.MonkeyPatch, functions: Mapping[str, Function], arch: str, called: Callable[[str], None]
) -> Iterator[None]:
    """Replaces FlashInfer's functions by the given functions, which are keyed by full name. Tensors are on the CPU, and the device
    pretends to have the architecture ``arch``.

    Args:
        called: receives the name of each function that is called.
    """

    def telling(name: str, function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            called(name)
            return function(*args, **kwargs)

        return call

    for path in dict.fromkeys(["flashinfer", *(name.rpartition(".")[0] for name in functions)]):
        module = ModuleType(path)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, path, module)
    for name, function in functions.items():
        module_name, _, last = name.rpartition(".")
        monkeypatch.setattr(sys.modules[module_name], last, telling(name, function), raising=False)
    monkeypatch.setattr(_package, "gap", lambda: None)
    forget_adapters()
    with use_platform(replace(named_platform(arch), pretended=False, emulated=True)):
        yield
    forget_adapters()


def fixtures(functions: Mapping[str, Function], arch: str, calls: list[str], family: str) -> tuple[Any, Any]:
    """Returns two fixtures. The first fixture installs the stand-in on an architecture, and appends the names of called functions
    to ``calls``. The second fixture returns the family's kernels by name.
    """

    @pytest.fixture
    def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        calls.clear()
        with installed(monkeypatch, functions, arch, calls.append):
            yield

    @pytest.fixture
    def specs(flashinfer_kernels: dict[str, KernelSpec]) -> dict[str, KernelSpec]:
        return {name: spec for name, spec in flashinfer_kernels.items() if spec.family == family}

    return flashinfer, specs


def forget_adapters() -> None:
    """Unloads the adapters, because each adapter keeps the function that it found when it was imported."""
    for name in [name for name in sys.modules if name.startswith("tokenspeed_kernel_nvidia.flashinfer.")]:
        parent, _, last = name.rpartition(".")
        if last.endswith("_device"):
            del sys.modules[name]
            delattr(sys.modules[parent], last)
