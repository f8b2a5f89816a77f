"""Fixtures for the tests of whole kernels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Returns a random generator whose seed is the test's name, so random values do not depend on other tests."""
    return torch.Generator().manual_seed(sum(request.node.name.encode()))
