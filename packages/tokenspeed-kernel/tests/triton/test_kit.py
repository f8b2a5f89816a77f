"""Runs the conformance kit on every portable Triton kernel: edges of declared traits, strides, bounds, padding, empty calls.

By default, the kit runs one small case of each kernel, with all its changes. On a GPU and in slow tests, it runs all cases and all
edges of traits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics import default_device
from tokenspeed_kernel.workbench.numerics.conformance import Finding, Options, conform
from tokenspeed_kernel.workbench.numerics.conformance.runner import CHECKS
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel.workbench.numerics.verify import refusal
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import tensor_arguments
from tokenspeed_kernel_base.platform import current_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_package
from tokenspeed_kernel_base.spec import KernelSpec

# The kit runs one process. Kernels between processes would wait for other ranks, so worlds/test_comm.py tests them.
# Declarations for another vendor are left out: the same launchers have declarations for all vendors.
VENDOR = current_platform().vendor
KERNELS = [
    spec
    for spec in KernelRegistry.get().list_kernels()
    if spec.solution == "triton" and spec.family != "comm" and VENDOR in (spec.capability.vendors or {VENDOR})
]
QUICK = Options(shrink_seconds=0, leave_out=frozenset({"trait edges"}))  # cases at trait edges have the largest declared sizes
each_kernel = pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)


def small_case(spec: KernelSpec) -> Case:
    """Returns a small nonempty case that a kernel supports. Cases with few axes of one element are preferred, because such axes
    cannot show wrong strides; among these, the smallest case."""
    op = get_operator(spec.operator)
    found = []
    for case in op.all_cases():
        if not case.large:
            arguments = op.complete(case.build(default_device()))
            tensors = [tensor for _, tensor in tensor_arguments(op.parameters, arguments)]
            usable = all(tensor.numel() for tensor in tensors) and tensors[0].dim() > 1
            if usable and refusal(op, spec, arguments) is None and _does_something(op, arguments):
                single = sum(size == 1 for tensor in tensors for size in tensor.shape)
                found.append((single, sum(tensor.numel() for tensor in tensors), case))
    return min(found, key=lambda entry: entry[:2])[2]


def _does_something(op: Operator[Any, Any], arguments: dict[str, Any]) -> bool:
    """Whether the call changes a tensor that it may write to, or writes to none. False, for example, for a store to a cache if
    every token is padding."""
    before = [arguments[name].clone() for name in op.mutates if arguments[name] is not None]
    if not before:
        return True
    op.reference(*arguments.values())
    after = [arguments[name] for name in op.mutates if arguments[name] is not None]
    return not all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, after, strict=True))


def passed(findings: list[Finding]) -> set[str]:
    return {finding.check for finding in findings if finding.status == "passed"}


# These kernels take half a minute to minutes in the interpreter, because even their smallest case has many tiles.
MINUTES = {
    "triton_gated_delta_rule_prefill", "triton_moe_apply_mxfp4", "triton_rmsnorm_qkv_rope_128", "triton_rmsnorm_qkv_rope_32",
    "triton_rmsnorm_qkv_rope_64", "triton_sample_top_k_top_p", "triton_ssd_prefill", "triton_verify_draft_probs",
}  # fmt: skip


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, id=spec.name, marks=[pytest.mark.slow] * (spec.name in MINUTES)) for spec in KERNELS]
)
def test_the_kit_finds_nothing_in_a_small_case(spec: KernelSpec) -> None:
    findings = conform(spec, default_device(), QUICK, [small_case(spec)])
    assert_none_wrong(findings)
    assert {"values", "strides", "bounds"} <= passed(findings)


@pytest.mark.slow
@each_kernel
def test_the_kit_finds_nothing(spec: KernelSpec) -> None:
    findings = conform(spec, default_device(), Options(shrink_seconds=0))
    assert_none_wrong(findings)
    assert {"values", "strides", "bounds"} <= passed(findings)


def test_batch_invariance_with_scales_in_tiles() -> None:
    """In the layout of tiles, rows of a batch share a tile of scales. So the check must compare dequantised values instead of
    scales."""
    spec = KernelRegistry.get().get_by_name("triton_rmsnorm_quantize_mxfp8")
    tiles = tk.Quantization.mxfp8(scale_layout="128x4")
    case = Case("a few", lambda draw: {"x": draw.normal(5, 32), "weight": draw.normal(32), "quantization": tiles})
    batches = "batch invariance"
    findings = conform(spec, default_device(), Options(shrink_seconds=0, leave_out=frozenset(CHECKS) - {batches}), [case])
    assert_none_wrong(findings)
    assert batches in passed(findings)


# -- a kernel with a fault, written for the test
# -----------------------------------------------------------------------------------------------

LAUNCHER = """
import torch
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.platform import CapabilityRequirement
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.signature import format_signatures

device_code = DeviceModule(__name__ + "_device")


@register_kernel(
    "norm",
    "rmsnorm",
    name="planted_rmsnorm",
    solution="planted",
    capability=CapabilityRequirement(required_features=frozenset({"triton"})),
    signatures=format_signatures("x", "dense", {torch.float16, torch.bfloat16, torch.float32}),
    priority=Priority.REFERENCE + 1,
)
def rmsnorm(x, weight, eps=1e-5, residual=None, out=None, residual_out=None):
    rows = x.reshape(-1, x.shape[-1])
    made = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.numel():
        strides = (*rows.stride(), weight.stride(0))
        device_code.rmsnorm_kernel[(rows.shape[0],)](rows, weight, made, eps, rows.shape[1], *strides, BLOCK=1024)
    made = made.view(x.shape)
    return made if out is None else out.copy_(made)
"""
DEVICE_CODE = """
import triton
import triton.language as tl


@triton.jit
def rmsnorm_kernel(x, weight, out, eps, hidden, row_stride, column_stride, weight_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = 0.0
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * row_stride + column * column_stride, mask=column < hidden, other=0.0).to(tl.float32)
        squares += tl.sum(value * value)
    inverse = tl.rsqrt(squares / hidden + eps)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        value = tl.load(x + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + column * weight_stride, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * hidden + column, (value * inverse * scale).to(out.dtype.element_ty), mask=inside)
"""
Planted = Callable[[str], KernelSpec]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """Returns a function that writes a package with one kernel of the given device code, and registers the kernel."""

    def make(device_code: str) -> KernelSpec:
        name = f"planted_{tmp_path.name}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "rmsnorm.py").write_text(LAUNCHER)
        (tmp_path / name / "rmsnorm_device.py").write_text(device_code)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        (spec,) = register_package(name)
        return spec

    return make


def test_two_files_are_a_kernel(planted: Planted) -> None:
    spec = planted(DEVICE_CODE)
    findings = conform(spec, default_device(), QUICK, [small_case(spec)])
    assert_none_wrong(findings)
    assert {"values", "strides", "bounds"} <= passed(findings)


@pytest.mark.parametrize(
    ("right", "fault"),
    [("row * row_stride", "row * hidden"), ("column * column_stride", "column"), ("column * weight_stride", "column")],
)
def test_a_stride_fault_is_found_in_the_small_case(planted: Planted, right: str, fault: str) -> None:
    assert right in DEVICE_CODE
    spec = planted(DEVICE_CODE.replace(right, fault))
    findings = conform(spec, default_device(), QUICK, [small_case(spec)])
    assert [finding.check for finding in findings if finding.wrong] == ["strides"]
