"""What the tests of whole kernels share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator of random numbers that depends on the test's name alone, not on which others run."""
    return torch.Generator().manual_seed(sum(request.node.name.encode()))
