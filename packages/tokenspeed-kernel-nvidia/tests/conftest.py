"""Tests that launch kernels take the fixture ``sm90``, and run where there is one."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel_nvidia import _machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "sm90" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nvidia)


@pytest.fixture
def sm90() -> torch.device:
    """The device of the tensors that kernels are launched on."""
    device = torch.device("cuda", 0)
    try:
        _machine.require_sm90("this test", device)
    except RuntimeError as error:
        pytest.skip(str(error))
    return device
