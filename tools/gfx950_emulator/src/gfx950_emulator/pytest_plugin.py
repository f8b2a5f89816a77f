"""pytest plugin: runs the kernels of a test on the emulator.

The fixture ``emulated`` yields the `Emulator`; the marker ``emulated`` runs a whole test on an emulator::

    def test_softmax(emulated):
        softmax[(4,)](x, y, 128)
        assert emulated.launches[-1].waves == 4


    @pytest.mark.emulated
    def test_softmax(): ...


    @pytest.mark.emulated(arch="gfx942", sanitize=False, counters=True)
    def test_softmax(emulated): ...

The sanitizer is on unless the marker says otherwise. PyTorch and Triton are imported only when a test uses the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kernel_emulation import testing

if TYPE_CHECKING:
    from gfx950_emulator.driver import Emulator

_NAME = "emulated"


def pytest_configure(config: pytest.Config) -> None:
    testing.declare(config, _NAME, "gfx950 (or gfx942)", "gfx950_emulator.emulated")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    testing.put_first(items, _NAME)


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    """Yields the emulator on which the test's kernels run."""
    from gfx950_emulator.driver import emulated as block

    yield from testing.emulated(request, _NAME, block)
