"""Tests every Triton kernel in a captured CUDA graph, on every small case of its operator. New kernels and operators need no edit
here.

Needs a GPU. `tokenspeed_kernel.workbench.numerics.conformance.graphs` documents the replays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed_kernel.workbench.numerics.conformance.graphs import replay_faults
from tokenspeed_kernel.workbench.numerics.verify import default_device, refusal
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.platform import current_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

PLATFORM = current_platform()
ON_GPU = not PLATFORM.is_cpu and not PLATFORM.pretended and not PLATFORM.emulated

pytestmark = pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")


def _runs() -> Iterator[Any]:
    """Yields each kernel with each small case that it supports."""
    for op in operators() if ON_GPU else []:
        drawn = [(case, op.complete(case.build(default_device()))) for case in op.all_cases() if not case.large]
        for spec in KernelRegistry.get().get_for_operator(op.family, op.mode):
            if spec.solution == "triton" and spec.capability.gap(PLATFORM) is None:
                for case, arguments in drawn:
                    if refusal(op, spec, arguments) is None:
                        yield pytest.param(spec, case, marks=getattr(pytest.mark, PLATFORM.vendor), id=f"{spec.name}-{case.name}")


@pytest.mark.parametrize(("spec", "case"), [*_runs()])
def test_a_graph_replays_a_kernel(spec: KernelSpec, case: Case) -> None:
    try:
        faults = replay_faults(spec, case, default_device())
    except LookupError as refused:
        pytest.skip(str(refused))
    assert faults == []


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
def test_some_kernel_is_captured() -> None:
    assert [*_runs()]
