"""Tests that the grids of the largest calls are within the driver's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenspeed_kernel  # noqa: F401  (declares the kernels)
from tokenspeed_kernel_base.platform import PlatformInfo, current_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

KERNELS = [spec for spec in KernelRegistry.get().list_kernels() if spec.solution == "gluon"]


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_every_grid_fits(
    spec: KernelSpec, gfx950: torch.device, launches_at_scale: Callable[[KernelSpec, PlatformInfo], list[Any]]
) -> None:
    launches = launches_at_scale(spec, current_platform())
    assert [launch for launch in launches if not launch.fits("amd")] == []
