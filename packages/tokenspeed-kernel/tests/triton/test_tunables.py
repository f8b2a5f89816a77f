"""Tests that every declared configuration of every portable kernel gives correct results. New kernels need no edit here."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.verify import default_device, refusal
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.platform import current_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import kernel_override
from tokenspeed_kernel_base.spec import KernelSpec

TUNABLE = [spec for spec in KernelRegistry.get().list_kernels() if spec.tunables and spec.solution == "triton"]
INTERPRETED = current_platform().is_cpu


@functools.cache
def cases(kernel: str) -> list[Case]:
    """Returns small cases with 16-bit operands that a kernel supports: all of them, or one if Triton is interpreted."""
    spec = KernelRegistry.get().get_by_name(kernel)
    op = get_operator(spec.operator)
    found = []
    for case in op.all_cases():
        if case.large:
            continue
        arguments = op.complete(case.build(default_device()))
        tensors = [tensor for _, tensor in tensor_arguments(op.parameters, arguments)]
        narrow = tensors[0].dtype in (torch.float16, torch.bfloat16) and all(tensor.numel() for tensor in tensors)
        if narrow and refusal(op, spec, arguments) is None:
            found.append(case)
            if INTERPRETED:
                break
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("spec", "config"),
    [pytest.param(s, c, id=f"{s.name}-{'-'.join(map(str, c.values()))}") for s in TUNABLE for c in s.configurations()],
)
def test_a_configuration_is_right(spec: KernelSpec, config: dict[str, Any]) -> None:
    op = get_operator(spec.operator)
    ran = 0
    for case in cases(spec.name):
        prepared = op.prepared(op.complete(case.build(default_device())), spec)
        if spec.configuration_gap(config, op.request(prepared)) is not None:
            continue
        with kernel_override(spec.family, spec.mode, spec.name, config=config):
            result = verify_case(spec, case)
        assert result.status is Status.PASSED, f"{case.name}: {result.reason}"
        ran += 1
    if not ran:
        pytest.skip("no small case takes it")
