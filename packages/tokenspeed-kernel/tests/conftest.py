"""Fixtures of the core's tests. They restore process-wide settings that a test changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenspeed_kernel import plugins
from tokenspeed_kernel.workbench.tuned import tables


@pytest.fixture(autouse=True)
def _state_is_put_back(state_is_put_back: None) -> Iterator[None]:
    times, shipped = dict(tables._measured), list(tables._shipped)
    loaded = dict(plugins._loaded), dict(plugins._failed), set(plugins._disabled), dict(plugins._declared), plugins._filled
    yield
    tables._measured.clear()
    tables._measured.update(times)
    tables._shipped[:] = shipped
    plugins._loaded, plugins._failed, plugins._disabled, plugins._declared, plugins._filled = loaded
