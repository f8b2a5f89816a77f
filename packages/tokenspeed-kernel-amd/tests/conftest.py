"""Runs the tests on this machine's GPU if it has the architecture, otherwise on the emulator, with its sanitizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_kernel_amd import _machine


def _architecture() -> str:
    """Returns the architecture of this machine's AMD GPU, or an empty string."""
    if not torch.version.hip or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]


ARCHITECTURE = _architecture()
ARCHITECTURES = ("gfx950", "gfx942")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the vendor's marker to tests that use an AMD GPU, if this machine has a suitable one."""
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        wanted = parameters.get("arch") or ("gfx950" if {"gfx950", "emulator"} & names else "none")
        if wanted == ARCHITECTURE:
            item.add_marker(pytest.mark.amd)


def _need_triton() -> None:
    gap = _machine.triton_gap()
    if gap is not None:
        pytest.skip(gap)


def _running_on(arch: str) -> Iterator[torch.device]:
    _need_triton()
    if arch == ARCHITECTURE:
        yield torch.device("cuda")
        return
    if importlib.util.find_spec("gfx950_emulator") is None:
        pytest.skip(f"needs a {arch} or the package gfx950-emulator")
    from gfx950_emulator import emulated

    with emulated(arch):
        yield torch.device("cpu")


@pytest.fixture
def gfx950() -> Iterator[torch.device]:
    """Returns the device for test tensors. The kernels run on a gfx950 or on the emulator."""
    yield from _running_on("gfx950")


@pytest.fixture(params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    """Returns the architecture on which a test runs; a test that uses this fixture runs on each."""
    return str(request.param)


@pytest.fixture
def gpu(arch: str) -> Iterator[torch.device]:
    """Returns the device for test tensors. The kernels run on a GPU of the test's architecture or on the emulator."""
    yield from _running_on(arch)


@pytest.fixture
def timing_programs(programs: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    """Returns a function that imports a benchmark of the timing model. The timing model needs Triton and the emulator."""
    _need_triton()
    pytest.importorskip("gfx950_emulator")
    return programs


def _counting(arch: str) -> Iterator[Any]:
    _need_triton()
    if importlib.util.find_spec("gfx950_emulator") is None:
        pytest.skip("needs the package gfx950-emulator")
    from gfx950_emulator import emulated

    with emulated(arch, counters=True, sanitize=False) as running:
        yield running


@pytest.fixture
def emulator() -> Iterator[Any]:
    """Runs kernels on the emulator with counters, even on a machine with a gfx950, because the counts do not depend on the
    device."""
    yield from _counting("gfx950")


@pytest.fixture
def counting(arch: str) -> Iterator[Any]:
    """Does what `emulator` does, for the test's architecture."""
    yield from _counting(arch)
