"""Fixtures of the base's tests: every operator is declared, and process-wide state that a test changes is restored."""

from __future__ import annotations

import pytest

from tokenspeed_kernel_base.discovery import import_modules

import_modules("tokenspeed_kernel_base.ops")


@pytest.fixture(autouse=True)
def _state_is_put_back(state_is_put_back: None) -> None:
    pass
