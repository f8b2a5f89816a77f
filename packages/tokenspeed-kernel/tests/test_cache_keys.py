"""Tests that a Triton kernel has the same cache key in every process. Otherwise a pack's programs would not be found."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import defaultdict
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import pytest

from tokenspeed_kernel import KernelRegistry
from tokenspeed_kernel_base.discovery import DEVICE_SUFFIX

triton = pytest.importorskip("triton")

from tokenspeed_kernel_base.triton_cache_device import settle_keys  # noqa: E402  # imports Triton


class Function:
    """Stands for a Triton function. Reading its cache key notes the function's name."""

    computed: ClassVar[list[str]] = []

    def __init__(self, fn: FunctionType) -> None:
        self.fn = fn

    @property
    def cache_key(self) -> str:
        self.computed.append(self.fn.__name__)
        return ""


SOURCE = """
def jit(fn): return Function(fn)

@jit
def constant(): return LIMIT
@jit
def _helper(x): return [constant() for _ in range(x)] and kernel
@jit
def kernel(x): return other.shared(_helper(x))
@jit
def unused(x): return x
def launch(x): kernel[1](x)
"""


@pytest.mark.parametrize("entry", ["kernel", "launch"])
def test_keys_of_callees_are_computed_first(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.setattr(Function, "computed", [])
    other, module = ModuleType("other_device"), ModuleType("kernel_device")
    for each, source in ((other, SOURCE.replace("kernel", "shared").split("@jit")[0]), (module, SOURCE)):
        vars(each).update(Function=Function, other=other)
        exec(source, vars(each))
    exec("@jit\ndef below(): return 1\n@jit\ndef shared(x): return below()", vars(other))
    settle_keys(getattr(module, entry))
    order = Function.computed
    assert sorted(order) == ["_helper", "below", "constant", "kernel", "shared"]
    assert order[-1] == "kernel"
    assert order.index("constant") < order.index("_helper")
    assert order.index("below") < order.index("shared")
    settle_keys(3)
    settle_keys("text")


def device_modules() -> list[ModuleType]:
    """Returns the modules with Triton kernels of all packages that register kernels."""
    found = []
    for name in sorted({spec.package for spec in KernelRegistry.get().list_kernels()}):
        package = importlib.import_module(name)
        for info in pkgutil.walk_packages(package.__path__, f"{name}."):
            file = Path(info.module_finder.path, *info.name.rpartition(".")[2:]).with_suffix(".py")
            if info.name.endswith(DEVICE_SUFFIX) and re.search(r"^@(triton|gluon)\.jit", file.read_text(), re.MULTILINE):
                found.append(importlib.import_module(info.name))
    return found


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
def test_constants_of_one_name_have_one_value() -> None:
    """Triton sorts the constants of a kernel and its callees by name, and constants of one name in several modules by the addresses
    of these modules."""
    from triton.runtime.jit import JITFunction

    modules = device_modules()
    kernels = [each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)]
    assert len(kernels) > 100
    for kernel in kernels:
        settle_keys(kernel)
        values: dict[str, set[Any]] = defaultdict(set)
        for (name, _), (value, _) in kernel.used_global_vals.items():
            if isinstance(value, triton.language.constexpr):
                values[name].add(repr(value))
        assert all(len(each) == 1 for each in values.values()), (kernel.__module__, kernel.__name__, dict(values))
