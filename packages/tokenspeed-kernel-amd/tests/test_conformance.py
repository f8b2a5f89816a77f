"""The core's conformance kit on every kernel of this package: edges of what is declared, strides, bounds, padding, empty calls."""

from __future__ import annotations

import pytest
import torch

from tokenspeed_kernel.workbench.numerics.conformance import Options, conform

from .paging import kernel_of


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["mha_prefill", "mha_extend_with_kvcache", "mha_decode_with_kvcache", "mha_with_kvcache"], ids=lambda mode: mode
)
def test_the_kit_finds_nothing(gfx950: torch.device, mode: str) -> None:
    findings = conform(kernel_of(mode), gfx950, Options(shrink_seconds=0))
    assert [str(finding) for finding in findings if finding.wrong] == []
    assert {"values", "trait edges", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}
