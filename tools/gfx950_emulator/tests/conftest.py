"""Fixtures for the tests of whole kernels."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A random generator seeded by the test's name alone, so that it does not depend on other tests."""
    return torch.Generator().manual_seed(sum(request.node.name.encode()))
