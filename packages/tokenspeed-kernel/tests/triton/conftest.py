"""Tests of device code by itself: on a GPU or interpreted. Elsewhere their modules are skipped before they import any of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tokenspeed_kernel_base.platform import current_platform


class _Skipped(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("Triton runs on a GPU, or under TRITON_INTERPRET=1")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if "triton" in current_platform().features:
        return None  # an ordinary module
    return _Skipped.from_parent(parent, path=module_path)
