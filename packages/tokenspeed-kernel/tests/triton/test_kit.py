"""The conformance kit on every portable Triton kernel: edges of what is declared, strides, bounds, padding, empty calls."""

from __future__ import annotations

import pytest

import tokenspeed_kernel  # noqa: F401  (its operators register their kernels)
from tokenspeed_kernel.workbench.numerics import default_device
from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel_base.registry import KernelRegistry, KernelSpec

KERNELS = [spec for spec in KernelRegistry.get().list_kernels() if spec.solution == "triton"]


@pytest.mark.slow
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_the_kit_finds_nothing(spec: KernelSpec) -> None:
    findings = conform(spec, default_device(), Options(shrink_seconds=0))
    assert [str(finding) for finding in findings if finding.wrong] == []
    assert {"values", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}
