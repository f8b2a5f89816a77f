"""pytest plugin: runs the kernels of a test on the emulator.

The fixture ``emulated_hopper`` yields the `Emulator`. The marker ``emulated_hopper`` runs a whole test on an emulator::

    def test_softmax(emulated_hopper):
        softmax(x, out)
        assert emulated_hopper.launches[-1].grid == (4, 1, 1)


    @pytest.mark.emulated_hopper(seed=1, triton=True)
    def test_softmax(): ...

PyTorch and Triton are imported only when a test uses the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kernel_emulation import testing

if TYPE_CHECKING:
    from sm90_emulator.emulator import Emulator

_NAME = "emulated_hopper"


def pytest_configure(config: pytest.Config) -> None:
    testing.declare(config, _NAME, "sm_90", "emulated_sm90")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    testing.put_first(items, _NAME)


@pytest.fixture
def emulated_hopper(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    """Yields the emulator on which the test's kernels run."""
    from sm90_emulator.driver import emulated_sm90

    yield from testing.emulated(request, _NAME, emulated_sm90)
