"""Code that the emulators' pytest plugins share. Imports no emulator: PyTorch and Triton are imported when a test uses one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest


def declare(config: pytest.Config, name: str, device: str, block: str) -> None:
    """Declares the marker of an emulator's fixture.

    Args:
        config: pytest's configuration.
        name: name of the fixture and the marker.
        device: the emulated architecture.
        block: the function whose settings the marker takes.
    """
    text = f"{name}(**settings): run the test's kernels on the {device} emulator; settings are those of `{block}`"
    config.addinivalue_line("markers", text)


def put_first(items: list[pytest.Item], name: str) -> None:
    """Adds the fixture to marked tests that do not name it, before their other fixtures, because these may launch kernels too."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and item.get_closest_marker(name) is not None:
            if name in names:
                names.remove(name)
            names.insert(0, name)


def emulated(request: pytest.FixtureRequest, name: str, block: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """Yields the emulator on which a test's kernels run, with the settings of the test's marker."""
    marker = request.node.get_closest_marker(name)
    if marker is not None and marker.args:
        raise pytest.UsageError(f"{request.node.nodeid}: the marker {name} takes keyword arguments only, got {marker.args}")
    with block(**(marker.kwargs if marker is not None else {})) as emulator:
        yield emulator
