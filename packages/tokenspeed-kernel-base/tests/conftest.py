"""Fixtures of the base's tests. They declare every operator, and restore process-wide state that a test changes."""

from __future__ import annotations

import pytest

from tokenspeed_kernel_base.discovery import import_modules

import_modules("tokenspeed_kernel_base.ops")


@pytest.fixture(autouse=True)
def _state_is_put_back(state_is_put_back: None) -> None:
    pass
