"""Fixtures of the package's tests. Tests that launch kernels use the fixture ``sm90``, and run only on a machine with an sm_90
device."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator

import pytest
import torch

import tokenspeed_kernel_nvidia
from tokenspeed_kernel_base import ops
from tokenspeed_kernel_base.platform import current_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec
from tokenspeed_kernel_nvidia import _machine
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER

from .flashinfer_stand_in import source_reader

# Kernels name their operators by strings. Declare all operators here, so that no test file depends on another file's imports.
for _module in pkgutil.walk_packages(ops.__path__, ops.__name__ + "."):
    importlib.import_module(_module.name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test with the parameter ``cutedsl_kernel`` once for each CuteDSL kernel. The parameter is the kernel's name."""
    if "cutedsl_kernel" in metafunc.fixturenames:
        with every_kernel() as registry:
            names = sorted(spec.name for spec in registry.list_kernels() if spec.solution == "cutedsl")
        metafunc.parametrize("cutedsl_kernel", names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "sm90" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nvidia)


@pytest.fixture
def sm90() -> torch.device:
    """Returns the sm_90 device of the tests' tensors."""
    reason = CUTEDSL_HOPPER.gap(current_platform())
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda", 0)


@contextlib.contextmanager
def every_kernel() -> Iterator[KernelRegistry]:
    """Registers this package's kernels inside the block, as if CuteDSL were installed. Yields the registry."""
    registry = KernelRegistry.get()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_machine, "dsl_gap", lambda: None)
        with registry.transaction() as added:
            tokenspeed_kernel_nvidia.register()
        yield registry
    for spec in added:
        registry.unregister(spec.name)


@pytest.fixture
def registered() -> Iterator[KernelRegistry]:
    """Yields the registry of `every_kernel`."""
    with every_kernel() as registry:
        yield registry


@pytest.fixture
def source() -> Callable[[str], str]:
    """Returns a function that reads FlashInfer's source files."""
    found = source_reader()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def flashinfer_kernels() -> Iterator[dict[str, KernelSpec]]:
    """Yields FlashInfer's kernels as the package declares them. Before and after the test, this package's kernels are
    unregistered."""
    registry = KernelRegistry.get()
    installed = _unregister_all(registry)
    tokenspeed_kernel_nvidia.register()
    yield {spec.name: spec for spec in registry.list_kernels() if spec.solution == "flashinfer"}
    _unregister_all(registry)
    if installed:
        tokenspeed_kernel_nvidia.register()


def _unregister_all(registry: KernelRegistry) -> bool:
    """Unregisters this package's kernels. Returns whether any kernel was registered."""
    names = [spec.name for spec in registry.list_kernels() if spec.solution in ("cutedsl", "flashinfer")]
    for name in names:
        registry.unregister(name)
    return bool(names)
