"""What the tests of the base share: every operator is declared, and what tests set for the whole process is put back."""

from __future__ import annotations

import pytest

from tokenspeed_kernel_base.discovery import import_modules

import_modules("tokenspeed_kernel_base.ops")


@pytest.fixture(autouse=True)
def _state_is_put_back(state_is_put_back: None) -> None:
    pass
