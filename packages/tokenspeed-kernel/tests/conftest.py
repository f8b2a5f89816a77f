"""What the tests of the core share: registries of their own, platforms, and a guard against state that leaks between tests."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# What was tuned on this machine must not decide what a test sees. Read when the package is imported, here and in processes started.
os.environ["TOKENSPEED_KERNEL_TUNED"] = "off"

from tokenspeed_kernel import plugins
from tokenspeed_kernel.workbench.tuned import tables
from tokenspeed_kernel_base import config, measured, memo, platform, selection, watch
from tokenspeed_kernel_base import operator as operator_module
from tokenspeed_kernel_base.platform import ArchVersion, PlatformInfo
from tokenspeed_kernel_base.registry import KernelRegistry


@pytest.fixture(autouse=True)
def _state_is_put_back() -> Iterator[None]:
    """Whatever a test sets for the whole process ends with it."""
    registry = KernelRegistry.get()
    kept = (
        dict(registry._specs),
        dict(registry._impls),
        dict(registry._interfaces),
        list(registry._clashes),
        set(registry._private),
    )
    policy, source = selection._policy, measured._source
    times, shipped = dict(tables._measured), list(tables._shipped)
    settings = config._settings
    plugin_state = dict(plugins._loaded), dict(plugins._failed), set(plugins._disabled)
    failures = dict(getattr(registry, "_load_failures", {}))
    yield
    assert memo._exceptions == 0, "the test left an override, a capture or profiling in force"
    assert platform.installed_platform() is None, "the test left a platform in force"
    assert not watch.watching()
    KernelRegistry._instance = registry
    registry._specs, registry._impls, registry._interfaces, registry._clashes, registry._private = kept
    registry._load_failures = failures  # type: ignore[attr-defined]
    selection._policy, measured._source = policy, source
    tables._measured.clear()
    tables._measured.update(times)
    tables._shipped[:] = shipped
    config._settings = settings
    plugins._loaded, plugins._failed, plugins._disabled = plugin_state
    memo.invalidate()


@pytest.fixture
def registry() -> KernelRegistry:
    """An empty registry in place of the process-wide one."""
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
    """Sets environment variables (short names, without the prefix) and reads the settings again."""

    def read(**variables: str) -> config.Settings:
        for name, value in variables.items():
            monkeypatch.setenv(config.PREFIX + name, value)
        return config.reload_settings()

    return read


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two tensors and a plain option, for an operator that takes an object."""

    left: torch.Tensor
    right: torch.Tensor | None
    blocks: tuple[int, ...] = (1,)


_declared = 0


@pytest.fixture
def declare(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Declares operators that exist during one test. ``declare(body, **options)`` gives the public function; the mode is made
    unique, because what PyTorch is told of a custom operator cannot be taken back."""
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
