"""Runs the conformance kit on every Gluon kernel: limits of the declared traits, strides, bounds, padding, empty calls.

By default the kit checks one small call of each kernel, without the limits of its traits, because each limit compiles another
kernel. The slow test covers these limits and all cases of the operator.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics.conformance import Options, conform
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.attention._inputs import paged, ragged
from tokenspeed_kernel_base.parameters import NO_LIMIT
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.spec import KernelSpec

from .paging import check_case, kernel_of

_SHAPE = {"heads": 8, "kv_heads": 2}
_CACHE = {**_SHAPE, "page_size": 16, "stale": True}
# The lengths end within pages, blocks and tiles. The long sequences are split, so the merge kernel runs too.
SMALL = {
    "mha_prefill": ragged([3, 0, 20], **_SHAPE),
    "mha_decode_with_kvcache": paged([300, 1, 20], None, **_CACHE),
    "mha_extend_with_kvcache": paged([20, 5], [3, 5], is_causal=True, **_CACHE),
    "mha_with_kvcache": paged([300, 45, 20], [1, 33, 3], running_sums=False, **_CACHE),
}
# The kernels that these calls launch.
LAUNCHED = {
    "mha_prefill": {"mha_prefill_gfx950"},
    "mha_decode_with_kvcache": {"decode_kernel", "merge_kernel"},
    "mha_extend_with_kvcache": {"extend_kernel"},
    "mha_with_kvcache": {"extend_kernel", "decode_kernel", "merge_kernel"},
}
# The conformance kit's checks that must pass for each operator's small call on the emulator. Graph capture needs a GPU.
FOUND_OUT = {"values", "out=", "inputs unchanged", "determinism", "nothing to do", "bounds", "strides", "no waiting"}


def check_small_call(spec: KernelSpec, device: torch.device) -> None:
    """Runs the kit on a kernel with its operator's small call only."""
    case = Case("small", SMALL[spec.mode])
    op = get_operator(spec.operator)
    traits = op.request(op.complete(case.build(device))).traits
    flags = {name: {True} for name, value in traits.items() if value is True}
    findings = conform(dataclasses.replace(spec, traits=flags), device, Options(shrink_seconds=0), [case])
    assert_none_wrong(findings)
    assert {finding.check for finding in findings if finding.status == "passed"} >= FOUND_OUT


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["mha_with_kvcache", *(mode for mode in SMALL if mode != "mha_with_kvcache")])
def test_the_kit_finds_nothing_in_a_small_call(gfx950: torch.device, mode: str) -> None:
    check_small_call(kernel_of(mode), gfx950)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["gfx942"], indirect=True)
@pytest.mark.parametrize("mode", ["mha_decode_with_kvcache", "mha_prefill"])
def test_the_kit_finds_nothing_in_a_small_call_on(gpu: torch.device, arch: str, mode: str) -> None:
    check_small_call(kernel_of(mode, arch), gpu)


@pytest.mark.parametrize("window_left", [NO_LIMIT - 1, pytest.param(2**31 - 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mode",
    [
        "mha_decode_with_kvcache",
        "mha_with_kvcache",
        pytest.param("mha_extend_with_kvcache", marks=pytest.mark.slow),
        pytest.param("mha_prefill", marks=pytest.mark.slow),
    ],
)
def test_windows_beyond_every_sequence(gfx950: torch.device, mode: str, window_left: int) -> None:
    """Positions do not overflow with the largest window that kernels receive, nor with the largest 32-bit window that a caller may
    pass."""
    check_case(gfx950, mode, Case("small", SMALL[mode].vary(window_left=window_left)))


@pytest.mark.parametrize("mode", SMALL)
def test_small_calls_launch_every_kernel(emulator: Any, mode: str) -> None:
    op = get_operator(f"attention.{mode}")
    KernelRegistry.get().get_impl(kernel_of(mode).name)(**op.complete(Case("small", SMALL[mode]).build("cpu")))
    assert {launch.kernel for launch in emulator.launches} == LAUNCHED[mode]


# -- a kernel that is wrong ----------------------------------------------------------------------------------------------------


def _packed(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor's memory that has the same shape and contiguous strides, whatever the tensor's strides are."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def _with_stride_fault(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a faulty launcher, which passes values to its kernel as if they were contiguous."""
    signature = inspect.signature(launch)
    values = "v" if "v" in signature.parameters else "v_cache"

    def wrong(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return launch(**{**given, values: _packed(given[values])})

    wrong.__signature__ = signature  # type: ignore[attr-defined]
    return wrong


@pytest.fixture
def wrong_kernel(request: pytest.FixtureRequest) -> Iterator[KernelSpec]:
    registry, right = KernelRegistry.get(), kernel_of(request.param)
    name = f"wrong_{right.mode}"
    register_kernel(
        right.family,
        right.mode,
        name=name,
        solution="wrong",
        capability=right.capability,
        signatures=right.format_signatures,
        traits=right.traits,
        priority=1,
        tags=right.tags,
    )(_with_stride_fault(registry.get_impl(right.name)))
    yield registry.get_by_name(name)
    registry.unregister(name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrong_kernel", SMALL, indirect=True)
def test_the_kit_finds_a_wrong_stride_in_a_small_call(gfx950: torch.device, wrong_kernel: KernelSpec) -> None:
    with pytest.raises(AssertionError, match=f"wrong_{wrong_kernel.mode}, strides: "):
        check_small_call(wrong_kernel, gfx950)


# -- everything ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "mode"),
    [*(("gfx950", mode) for mode in SMALL), ("gfx942", "mha_decode_with_kvcache"), ("gfx942", "mha_prefill")],
    indirect=["arch"],
)
def test_the_kit_finds_nothing(gpu: torch.device, arch: str, mode: str) -> None:
    findings = conform(kernel_of(mode, arch), gpu, Options(shrink_seconds=0))
    assert_none_wrong(findings)
    assert {"values", "trait edges", "strides", "bounds"} <= {finding.check for finding in findings if finding.status == "passed"}
