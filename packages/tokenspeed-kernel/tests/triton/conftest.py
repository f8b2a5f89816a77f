"""The tests in this folder run Triton kernels, on a GPU or in Triton's interpreter.

On machines with neither, modules are skipped before they import device code. On a GPU each test has the vendor's marker: ``-m
nvidia`` runs these tests on an NVIDIA GPU, and ``-m "not nvidia"`` skips them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tokenspeed_kernel_base.platform import current_platform

PLATFORM = current_platform()
ON_GPU = not PLATFORM.is_cpu and not PLATFORM.pretended and not PLATFORM.emulated


class _Skipped(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("Triton runs on a GPU, or under TRITON_INTERPRET=1")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if "triton" in PLATFORM.features:
        return None  # pytest collects the module as usual
    return _Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest calls this function with the items of the whole session, so items of other folders are left alone."""
    here = Path(__file__).parent
    for item in items:
        if ON_GPU and here in item.path.parents:
            item.add_marker(getattr(pytest.mark, PLATFORM.vendor))
