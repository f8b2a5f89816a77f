"""Tests that the grids of the largest calls are within the driver's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.platform import PlatformInfo, named_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

KERNELS = [
    spec
    for op in operators()
    # Communication kernels launch at most as many CTAs as fit on the device.
    for spec in (KernelRegistry.get().get_for_operator(op.family, op.mode) if op.family != "comm" else ())
    if spec.solution == "triton"
]
# Kernels that accept at most 16, or 512, tokens, and have no large calls.
FEW = {"triton_rmsnorm_moe_topk", "triton_mm_dequantised_more_fp8", "triton_mm_dequantised_more_mx"}


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("gfx950", marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_every_grid_fits(spec: KernelSpec, arch: str, launches_at_scale: Callable[[KernelSpec, PlatformInfo], list[Any]]) -> None:
    platform = named_platform(arch)
    if platform.vendor not in (spec.capability.vendors or {platform.vendor}):
        pytest.skip("declared for another vendor")
    launches = launches_at_scale(spec, platform)
    assert launches or spec.name in FEW
    assert [launch for launch in launches if not launch.fits(platform.vendor)] == []
