"""Runs the tests on a gfx950 if this machine has one, otherwise on the emulator, with its sanitizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tokenspeed_kernel_amd import _machine


def _has_gfx950() -> bool:
    if not torch.version.hip or not torch.cuda.is_available():
        return False
    return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0] == "gfx950"


ON_GFX950 = _has_gfx950()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the vendor's marker to tests that use a gfx950, if this machine has one."""
    for item in items:
        if ON_GFX950 and {"gfx950", "emulator"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.amd)


def _need_triton() -> None:
    gap = _machine.triton_gap()
    if gap is not None:
        pytest.skip(gap)


@pytest.fixture
def gfx950() -> Iterator[torch.device]:
    """Returns the device for test tensors. The kernels run on a gfx950 or on the emulator."""
    _need_triton()
    if ON_GFX950:
        yield torch.device("cuda")
        return
    if importlib.util.find_spec("gfx950_emulator") is None:
        pytest.skip("needs a gfx950 or the package gfx950-emulator")
    from gfx950_emulator import emulated_gfx950

    with emulated_gfx950():
        yield torch.device("cpu")


@pytest.fixture
def timing_programs(programs: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    """Returns a function that imports a benchmark of the timing model. The timing model needs Triton and the emulator."""
    _need_triton()
    pytest.importorskip("gfx950_emulator")
    return programs


@pytest.fixture
def emulator() -> Iterator[Any]:
    """Runs kernels on the emulator with counters, even on a machine with a gfx950, because the counts do not depend on the
    device."""
    _need_triton()
    if importlib.util.find_spec("gfx950_emulator") is None:
        pytest.skip("needs the package gfx950-emulator")
    from gfx950_emulator import emulated_gfx950

    with emulated_gfx950(counters=True, sanitize=False) as running:
        yield running
