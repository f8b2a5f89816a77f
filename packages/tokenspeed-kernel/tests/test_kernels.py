"""Compares every registered kernel with the reference, on every case of its operator. New kernels and operators need no edit here.

On a machine with a GPU, all kernels for it run on the GPU, with large cases, under the vendor's marker. On other machines, kernels
that a CPU can run are run. All other kernels are skipped, with the missing requirement.
"""

from __future__ import annotations

import functools
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.covering import INTERPRETATION, covering
from tokenspeed_kernel.workbench.numerics.verify import default_device, refusal, refusal_of
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.explanation import Request
from tokenspeed_kernel_base.operator import Operator, get_operator, operators
from tokenspeed_kernel_base.ops.comm.pretended import as_rank_of
from tokenspeed_kernel_base.platform import current_platform, use_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import KernelSpec

PLATFORM = current_platform()
ON_GPU = not PLATFORM.is_cpu and not PLATFORM.pretended and not PLATFORM.emulated
KERNELS = [spec for op in operators() for spec in KernelRegistry.get().get_for_operator(op.family, op.mode)]


def _marks(spec: KernelSpec) -> list[pytest.MarkDecorator]:
    if ON_GPU:
        return [getattr(pytest.mark, PLATFORM.vendor)]
    vendors = spec.capability.vendors
    if spec.capability.gap(PLATFORM) is None or vendors is None:
        return []
    return [getattr(pytest.mark, vendor) for vendor in sorted(vendors)]


# Triton's interpreter takes seconds for many cases, which GPUs and the emulators run, too.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _drawn(op: Operator[Any, Any], case: Case) -> dict[str, Any]:
    """Returns a case's arguments, from which the eligibility of a kernel follows. It does not depend on values, so large cases have
    meta tensors."""
    return op.complete(case.build("meta" if case.large else "cpu"))


@functools.cache
def _request(operator: str, name: str) -> Request:
    op = get_operator(operator)
    case = next(case for case in op.all_cases() if case.name == name)
    with use_platform(PLATFORM):  # the platform does not follow from meta tensors
        return op.request(_drawn(op, case))


def _runs() -> Iterator[Any]:
    """Yields each kernel with each case that it supports. A kernel that cannot run here appears once, to be skipped with the
    reason.

    On a GPU, all cases appear, and the test skips those that the kernel rejects. So the workers divide the time to draw cases.
    In the interpreter, cases are slow if they add nothing to the covering cases of the kernels that have the same launcher module.
    """
    registry = KernelRegistry.get()
    for op in operators():
        cases = [case for case in op.all_cases() if ON_GPU or not case.large]
        drawn = {} if ON_GPU else {case.name: _drawn(op, case) for case in cases}
        taken: dict[KernelSpec, list[Case]] = {}
        related: dict[str, list[KernelSpec]] = defaultdict(list)
        for spec in registry.get_for_operator(op.family, op.mode):
            if spec.capability.gap(PLATFORM) is not None:
                yield pytest.param(spec, cases[0], marks=_marks(spec), id=f"{spec.name}-{cases[0].name}")
                continue
            # If a case needs several processes, only these processes can find out whether a kernel rejects the case.
            taken[spec] = [case for case in cases if ON_GPU or case.world_size > 1 or refusal(op, spec, drawn[case.name]) is None]
            if INTERPRETED and spec.solution == "triton":
                related[registry.get_impl(spec.name).__module__].append(spec)
        fast: dict[KernelSpec, Collection[Case]] = {**taken}
        for group in related.values():
            fast |= covering({spec: {case: drawn[case.name] for case in taken[spec]} for spec in group}, INTERPRETATION)
        for spec, possible in taken.items():
            for case in possible:
                marks = [*_marks(spec), *([] if case in fast[spec] else [pytest.mark.slow])]
                yield pytest.param(spec, case, marks=marks, id=f"{spec.name}-{case.name}")


with use_platform(PLATFORM):  # on an emulator, the platform does not follow from the tensors
    RUNS = [*_runs()]


@pytest.mark.parametrize(("spec", "case"), RUNS)
def test_a_kernel_agrees_with_the_reference(spec: KernelSpec, case: Case) -> None:
    if ON_GPU and case.world_size == 1:
        refused = refusal_of(get_operator(spec.operator), spec, _request(spec.operator, case.name))
        if refused is not None:
            pytest.skip(": ".join(refused))
    result = verify_case(spec, case, default_device())
    if case.large and ON_GPU:
        torch.cuda.empty_cache()  # other processes may use the device
    if result.status is Status.SKIPPED:
        pytest.skip(result.reason)
    assert result.status is Status.PASSED, f"{result.reason}\n{result.traceback}"
    assert result.comparisons, "something was compared"


@pytest.mark.parametrize("spec", [pytest.param(spec, marks=_marks(spec), id=spec.name) for spec in KERNELS])
def test_some_case_reaches_a_kernel(spec: KernelSpec) -> None:
    """Some case of the operator must be eligible for each kernel that can run here. Otherwise the kernel would be untested."""
    gap = spec.capability.gap(PLATFORM)
    if gap is not None:
        pytest.skip(gap)
    op = get_operator(spec.operator)
    refusals = Counter[str]()
    for case in sorted(op.all_cases(), key=lambda c: c.large):
        with as_rank_of(case.world_size), use_platform(PLATFORM):
            refused = refusal(op, spec, _drawn(op, case))
        if refused is None:
            return
        refusals[": ".join(refused)] += 1
    listed = "\n".join(f"  {count} cases: {why}" for why, count in refusals.most_common(12))
    pytest.fail(f"no case of {op} reaches {spec.name}; add one. The most frequent refusals:\n{listed}", pytrace=False)


@pytest.mark.parametrize("op", operators(), ids=str)
def test_an_operator_has_kernels_and_cases(op: Operator[Any, Any]) -> None:
    assert any(spec.universal for spec in KernelRegistry.get().get_for_operator(op.family, op.mode))
    assert [case for case in op.all_cases() if not case.large]
    for case in op.all_cases():
        if case.large:
            _drawn(op, case)  # on a GPU, all cases are built when this module is imported
