"""Fixtures for the tests of all packages: empty registries, platforms, operators for one test, and a check that a test leaves no
state behind."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# Results that were tuned on this machine must not affect tests. The package reads this variable at import, also in processes that
# tests start.
os.environ["TOKENSPEED_KERNEL_TUNED"] = "off"
sys.path.append(str(Path(__file__).parent))  # tests import processes.py

from tokenspeed_kernel_base import config, lowering, measured, memo, platform, selection, watch
from tokenspeed_kernel_base import operator as operator_module
from tokenspeed_kernel_base import registry as registry_module
from tokenspeed_kernel_base.platform import ArchVersion, PlatformInfo
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

from . import grids
from .grids import Launch
from .interpreting import patch_language_once

# Hypothesis must not limit times: the first call of an operator is slower than later calls, and the machine may be busy.
settings.register_profile("operators", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("operators")

patch_language_once()


@pytest.fixture
def state_is_put_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restores process-wide state after a test: registry, policy, measured results, settings. Fails if the test left an override, a
    platform or a watcher active."""
    registry = KernelRegistry.get()
    declared = list(registry_module._declared.get(request.module.__name__, ()))
    kept = [(name, type(value)(value)) for name, value in vars(registry).items() if isinstance(value, (dict, list, set))]
    policy, source, read = selection._policy, measured._source, config._settings
    yield
    assert memo._exceptions == 0, "the test left an override, a capture or profiling in force"
    assert platform.installed_platform() is None, "the test left a platform in force"
    assert not watch.watching()
    KernelRegistry._instance = registry
    vars(registry).update(kept)
    # All test modules are in one package. Without this line, `register_package` of this package would also register the kernels of
    # earlier tests.
    registry_module._declared[request.module.__name__] = declared
    selection._policy, measured._source, config._settings = policy, source, read
    memo.invalidate()


@pytest.fixture
def registry() -> KernelRegistry:
    """Replaces the process-wide registry by an empty one, and returns it."""
    KernelRegistry.reset()
    return KernelRegistry.get()


@pytest.fixture
def cpu() -> PlatformInfo:
    return PlatformInfo("cpu", ArchVersion(0, 0), "a cpu")


@pytest.fixture
def hopper() -> PlatformInfo:
    return PlatformInfo("nvidia", ArchVersion(9, 0), "a hopper", features=frozenset({"triton", "tma"}))


@pytest.fixture
def cdna4() -> PlatformInfo:
    return PlatformInfo("amd", ArchVersion(9, 5), "a cdna4", features=frozenset({"triton"}))


@pytest.fixture
def settings_from(monkeypatch: pytest.MonkeyPatch) -> Callable[..., config.Settings]:
    """Returns a function that sets environment variables, named without their prefix, and reads the settings again."""

    def read(**variables: str) -> config.Settings:
        for name, value in variables.items():
            monkeypatch.setenv(config.PREFIX + name, value)
        return config.reload_settings()

    return read


def _opcheck(function: Any, arguments: dict[str, Any], *, compiled: bool = False) -> None:
    op = function.operator
    custom_op, flat = function.caller.lowering.choose([arguments[name] for name in op.names])
    tests = ["test_autograd_registration", "test_faketensor"]
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    if not any(t.element_size() == 1 and t.is_floating_point() for t in tensors):
        tests.append("test_schema")  # this test compares values with functions that PyTorch lacks for fp8
    copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    if not compiled and not any(t.isnan().any() for t in lowering.as_list(function(**copies))):
        tests.append("test_aot_dispatch_dynamic")  # this test treats NaN as a difference
    torch.library.opcheck(custom_op, (*flat, None, None), test_utils=tests)


@pytest.fixture(scope="session")
def opcheck() -> Callable[..., None]:
    """Returns ``opcheck(function, arguments)``, which runs PyTorch's own tests of custom operators on a call with all arguments by
    name. With ``compiled=True`` it leaves out the comparison of traced calls with eager ones, for tests that compare compiled
    calls."""
    return _opcheck


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes benchmark programs run calls on the CPU with fake times: 21.5 microseconds and more, and 1.5 for the kernel between
    calls."""
    runner = importlib.import_module("tokenspeed_kernel.workbench.benchmark.runner")

    def sample_graph(calls: Any, device: Any, *, fewest: int, **options: Any) -> list[float]:
        for call in calls:
            call()
        return [1.5] * fewest if len(calls) == runner.BETWEEN else [21.5 + index for index in range(fewest)]

    monkeypatch.setattr(runner, "sample", lambda calls, device, **options: [10.0, 11.0, 12.0])
    monkeypatch.setattr(runner, "sample_graph", sample_graph)
    monkeypatch.setattr(runner, "host_time", lambda call, device, calls: 3.0)


@pytest.fixture
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Returns a function that imports a program of the package's folder ``benchmarks``. Programs can import one another, as they do
    when run as scripts."""
    folder = next(path / "benchmarks" for path in request.path.parents if (path / "benchmarks").is_dir())
    ours = {file.stem for file in folder.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in ours:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def launches_at_scale(monkeypatch: pytest.MonkeyPatch) -> Callable[[KernelSpec, PlatformInfo], list[Launch]]:
    """See `grids.launches_at_scale`."""
    return functools.partial(grids.launches_at_scale, monkeypatch=monkeypatch)


_declared = 0


@pytest.fixture
def declare(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Returns ``declare(body, **options)``, which declares an operator for one test, and returns its public function. Each mode is
    unique, because PyTorch cannot unregister a custom operator."""
    made: list[tuple[str, str]] = []

    def make(body: Callable[..., Any], **options: Any) -> Any:
        global _declared
        _declared += 1
        mode = f"{body.__name__}_{_declared}"
        made.append(("testing", mode))
        return operator_module.operator("testing", mode, **options)(body)

    yield make
    for key in made:
        operator_module._operators.pop(key, None)
