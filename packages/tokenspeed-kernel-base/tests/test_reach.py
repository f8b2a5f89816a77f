"""Tests the reasons why no call can select a kernel that is requested by name."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_kernel_base.platform import CapabilityRequirement, PlatformInfo
from tokenspeed_kernel_base.reach import why_unreachable
from tokenspeed_kernel_base.registry import KernelRegistry, register_kernel
from tokenspeed_kernel_base.spec import KernelSpec


def _register(name: str, mode: str = "rmsnorm", **declared: Any) -> None:
    register_kernel("norm", mode, name=name, solution="theirs", signatures=None, **declared)(lambda x: x)


@pytest.fixture(autouse=True)
def kernels(registry: KernelRegistry) -> None:
    _register("plain")
    _register("for_amd", priority=7, capability=CapabilityRequirement(vendors=frozenset({"amd"})))
    _register("asked_for", priority=6, only_by_name="it is slow")
    _register("private", priority=5)
    _register("plain_rows", "layernorm")
    registry.publish(["private"], False)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("plain", None),
        ("asked_for", None),
        ("for_amd", "for_amd cannot run on a cpu [cpu]: needs an AMD device, this is a CPU"),
        ("plian", "no kernel named plian; did you mean plain?"),
        ("plain_rows", "plain_rows implements norm.layernorm, not norm.rmsnorm; did you mean plain?"),
    ],
)
def test_why_no_call_can_select_a_kernel(cpu: PlatformInfo, kernel: str, reason: str | None) -> None:
    assert why_unreachable(kernel, "norm.rmsnorm", cpu) == reason


def test_private_kernels_serve_no_call_of_the_core(cpu: PlatformInfo) -> None:
    reason = why_unreachable("private", "norm.rmsnorm", cpu)
    assert reason is not None
    assert reason.startswith("private is private to the functions of ")


def test_requirements_of_an_unknown_platform_are_not_tested() -> None:
    assert why_unreachable("for_amd", "norm.rmsnorm") is None


def test_a_preference_does_not_reach_kernels_that_must_be_named(cpu: PlatformInfo) -> None:
    reason = why_unreachable("asked_for", "norm.rmsnorm", cpu, by_name=False)
    assert reason == "asked_for is eligible only for calls that name it: it is slow"


def test_a_kernel_that_failed_to_load(registry: KernelRegistry, cpu: PlatformInfo) -> None:
    registry.register(KernelSpec("broken", "norm", "rmsnorm", "theirs", format_signatures=None, priority=3), "nowhere:f")
    with pytest.warns(UserWarning, match="broken"):
        assert registry.load_or_leave_out("broken") is None
    assert str(why_unreachable("broken", "norm.rmsnorm", cpu)).startswith("broken cannot be loaded: ImportError")
