"""pytest plugin: runs the kernels of a test on the emulator.

The fixture ``emulated`` yields the `Emulator`; the marker ``emulated`` runs a whole test inside one::

    def test_softmax(emulated):
        softmax[(4,)](x, y, 128)
        assert emulated.launches[-1].waves == 4


    @pytest.mark.emulated
    def test_softmax(): ...


    @pytest.mark.emulated(sanitize=False, counters=True)
    def test_softmax(emulated): ...

The sanitizer is on unless the marker says otherwise. PyTorch and Triton are imported only when a test uses the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gfx950_emulator.driver import Emulator

_MARKER = "emulated(**settings): run the test's kernels on the gfx950 emulator; settings are those of `emulated_gfx950`"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the fixture to marked tests that do not name it, before their other fixtures, which may launch kernels too."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and item.get_closest_marker("emulated") is not None:
            if "emulated" in names:
                names.remove("emulated")
            names.insert(0, "emulated")


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    """The emulator that the test's kernels run on."""
    from gfx950_emulator.driver import emulated_gfx950

    marker = request.node.get_closest_marker("emulated")
    if marker is not None and marker.args:
        raise pytest.UsageError(f"{request.node.nodeid}: the marker emulated takes keyword arguments only, got {marker.args}")
    with emulated_gfx950(**(marker.kwargs if marker is not None else {})) as emulator:
        yield emulator
