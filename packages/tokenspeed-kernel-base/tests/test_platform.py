"""Tests platforms, and the requirements of kernels. No test needs a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base import platform
from tokenspeed_kernel_base.platform import (
    ArchVersion,
    CapabilityRequirement,
    PlatformInfo,
    cpu_platform,
    current_platform,
    installed_platform,
    named_platform,
    platform_of,
    use_platform,
)


@pytest.mark.parametrize(
    ("name", "vendor", "arch", "label", "device"),
    [
        ("sm_90", "nvidia", (9, 0), "sm_90", "NVIDIA H100"),
        ("sm90", "nvidia", (9, 0), "sm_90", "NVIDIA H100"),
        ("SM_90a", "nvidia", (9, 0), "sm_90", "NVIDIA H100"),
        ("sm_100", "nvidia", (10, 0), "sm_100", "NVIDIA B200"),
        ("sm_103f", "nvidia", (10, 3), "sm_103", "NVIDIA B300"),
        ("sm_120", "nvidia", (12, 0), "sm_120", "sm_120"),
        ("gfx950", "amd", (9, 5), "gfx950", "AMD Instinct MI355X"),
        ("gfx942", "amd", (9, 4), "gfx942", "AMD Instinct MI300X"),
        ("gfx1201", "amd", (12, 0), "gfx1201", "gfx1201"),
        ("gfx90a", "amd", (9, 0), "gfx90a", "gfx90a"),
        ("h100", "nvidia", (9, 0), "sm_90", "NVIDIA H100"),
        ("H200", "nvidia", (9, 0), "sm_90", "NVIDIA H200"),
        ("b200", "nvidia", (10, 0), "sm_100", "NVIDIA B200"),
        ("mi300x", "amd", (9, 4), "gfx942", "AMD Instinct MI300X"),
        ("MI355X", "amd", (9, 5), "gfx950", "AMD Instinct MI355X"),
    ],
)
def test_named_platforms(name: str, vendor: str, arch: tuple[int, int], label: str, device: str) -> None:
    made = named_platform(name)
    assert (made.vendor, made.arch_version, made.arch, made.device_name) == (vendor, ArchVersion(*arch), label, device)
    assert made.pretended
    assert str(made) == f"{device} [{label}] (pretended)"


@pytest.mark.parametrize("name", ["", "h10", "sm_", "sm_9", "gfx", "gfx9", "sm_90 or so", "cpu0"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown platform .*expected .*h100, .*mi355x"):
        named_platform(name)


def test_the_cpu() -> None:
    cpu = cpu_platform()
    assert cpu.is_cpu
    assert not cpu.is_nvidia
    assert not cpu.is_amd
    assert cpu.arch == "cpu"
    assert not cpu.pretended
    assert named_platform("CPU") == dataclasses.replace(cpu, pretended=True)


def test_derived_architecture_names() -> None:
    assert PlatformInfo("nvidia", ArchVersion(10, 0), "d").arch == "sm_100"
    assert PlatformInfo("amd", ArchVersion(9, 5), "d").arch == "gfx950"
    assert PlatformInfo("cpu", ArchVersion(0, 0), "d").arch == "cpu"
    assert PlatformInfo("amd", ArchVersion(9, 4), "d", "gfx942").arch == "gfx942"
    assert str(PlatformInfo("amd", ArchVersion(9, 5), "d", emulated=True)) == "d [gfx950] (emulated)"


def test_versions_are_ordered() -> None:
    assert ArchVersion(8, 9) < ArchVersion(9, 0) < ArchVersion(9, 4) < ArchVersion(10, 0)
    assert str(ArchVersion(10, 3)) == "10.3"


GAPS: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "cpu", None),
    ({}, "sm_90", None),
    ({"vendors": {"nvidia"}}, "gfx950", "needs an NVIDIA device, this is gfx950"),
    ({"vendors": {"nvidia", "amd"}}, "cpu", "needs an AMD or NVIDIA device, this is a CPU"),
    ({"vendors": {"cpu"}}, "cpu", None),
    ({"vendors": {"cpu"}}, "sm_90", "needs a CPU, this is sm_90"),
    ({"vendors": {"cpu", "nvidia"}}, "gfx950", "needs a CPU or NVIDIA device, this is gfx950"),
    ({"min_arch_version": ArchVersion(9, 0)}, "sm_90", None),
    ({"min_arch_version": ArchVersion(9, 0)}, "sm_80", "needs architecture 9.0 or later, this is 8.0 (sm_80)"),
    ({"max_arch_version": ArchVersion(9, 0)}, "sm_90", None),
    ({"max_arch_version": ArchVersion(9, 0)}, "sm_100", "needs architecture 9.0 or earlier, this is 10.0 (sm_100)"),
    ({"min_arch_version": ArchVersion(0, 0)}, "cpu", "needs architecture 0.0 or later, a CPU has none"),
    ({"max_arch_version": ArchVersion(9, 0)}, "cpu", "needs architecture 9.0 or earlier, a CPU has none"),
    ({"min_arch_version": ArchVersion(8, 0), "max_arch_version": ArchVersion(9, 0)}, "cpu",
     "needs architecture 8.0 or later and 9.0 or earlier, a CPU has none"),
    ({"required_features": {"tma", "fp8"}}, "cpu", "needs fp8, tma, which this platform lacks"),
]  # fmt: skip


@pytest.mark.parametrize(("needs", "name", "gap"), GAPS)
def test_gaps(needs: dict[str, Any], name: str, gap: str | None) -> None:
    requirement = CapabilityRequirement(**needs)
    assert requirement.gap(named_platform(name)) == gap
    assert requirement.satisfied_by(named_platform(name)) == (gap is None)


def test_a_vendor_that_there_is_none_of() -> None:
    with pytest.raises(ValueError, match=r"vendors must .*got 'nvida'; .*nvidia\?"):
        CapabilityRequirement(vendors=frozenset({"nvida"}))


def test_only_missing_features_are_named(hopper: PlatformInfo) -> None:
    assert CapabilityRequirement(required_features=frozenset({"tma", "fp8"})).gap(hopper) == "needs fp8, which this platform lacks"


def test_why_triton_is_missing_is_true(monkeypatch: pytest.MonkeyPatch, cpu: PlatformInfo, cdna4: PlatformInfo) -> None:
    needs = CapabilityRequirement(required_features=frozenset({"triton"}))
    monkeypatch.setattr(platform, "_is_installed", lambda package: True)
    assert needs.gap(cpu) == "needs triton, which a CPU can only interpret: set TRITON_INTERPRET=1 before Python starts"
    assert needs.gap(cdna4) is None
    bare = dataclasses.replace(cdna4, features=frozenset())
    assert needs.gap(bare) == "needs triton, which this platform lacks"
    monkeypatch.setattr(platform, "_is_installed", lambda package: False)
    assert needs.gap(cpu) == needs.gap(bare) == "needs triton, which is not installed"


def test_a_probe_runs_last_and_is_distinguished(hopper: PlatformInfo) -> None:
    asked: list[str] = []

    def nothing() -> str | None:
        asked.append("nothing")
        return "needs a compiler, there is none"

    def everything() -> str | None:
        return None

    low = ArchVersion(9, 0)
    assert CapabilityRequirement(low, probe=nothing).gap(hopper) == "needs a compiler, there is none"
    assert CapabilityRequirement(low, probe=everything).gap(hopper) is None
    assert CapabilityRequirement(ArchVersion(9, 5), probe=nothing).gap(hopper).startswith("needs architecture 9.5")  # type: ignore[union-attr]
    assert asked == ["nothing"]
    assert CapabilityRequirement(low, probe=nothing) == CapabilityRequirement(low, probe=nothing)
    assert CapabilityRequirement(low, probe=nothing) != CapabilityRequirement(low, probe=everything)
    assert CapabilityRequirement(low, probe=nothing).overlaps(CapabilityRequirement(low, probe=everything))


def test_bounds_in_the_wrong_order() -> None:
    with pytest.raises(ValueError, match=r"min_arch_version 10.0 is above .* 9.0"):
        CapabilityRequirement(ArchVersion(10, 0), ArchVersion(9, 0))


def test_overlap_means_that_a_platform_exists() -> None:
    versions = [None, ArchVersion(8, 0), ArchVersion(9, 0), ArchVersion(10, 0)]
    vendors = [None, {"nvidia"}, {"amd"}, {"cpu"}, {"cpu", "amd"}]
    requirements = [
        CapabilityRequirement(low, high, frozenset(), v)  # type: ignore[arg-type]
        for low, high, v in itertools.product(versions, versions, vendors)
        if low is None or high is None or low <= high
    ]
    platforms = [cpu_platform()] + [
        PlatformInfo(vendor, arch, "d") for vendor in ("nvidia", "amd", "other") for arch in versions if arch is not None
    ]
    runs_on = [{i for i, p in enumerate(platforms) if r.satisfied_by(p)} for r in requirements]
    for (a, on_a), (b, on_b) in itertools.product(zip(requirements, runs_on, strict=True), repeat=2):
        assert a.overlaps(b) == bool(on_a & on_b), (a, b)


def test_use_platform_refuses_a_name() -> None:
    before = current_platform()
    name: Any = "gfx950"
    message = r"use_platform: platform must be PlatformInfo, got str 'gfx950'; named_platform\('gfx950'\) makes one"
    with pytest.raises(TypeError, match=message), use_platform(name):
        pass
    assert current_platform() is before


def test_use_platform_nests_and_ends(hopper: PlatformInfo, cdna4: PlatformInfo) -> None:
    outside = current_platform()
    with use_platform(hopper):
        assert current_platform() is hopper
        assert platform_of(torch.device("cpu")) is hopper, "CPU tensors too: that is how a simulator works"
        with use_platform(cdna4) as inner:
            assert inner is cdna4
            assert current_platform() is installed_platform() is cdna4
        assert current_platform() is hopper
        with pytest.raises(RuntimeError), use_platform(cdna4):
            raise RuntimeError
        assert current_platform() is hopper
    assert current_platform() == outside
    assert installed_platform() is None


def test_the_platform_of_tensors() -> None:
    assert platform_of(torch.device("cpu")) is cpu_platform()
    with pytest.raises(ValueError, match=r"tensors are on xla:0; expected cpu or cuda"):
        platform_of(torch.device("xla:0"))


def test_a_pretended_platform_from_the_settings(settings_from: Any, hopper: PlatformInfo) -> None:
    settings_from(PLATFORM="gfx950")
    assert current_platform().arch == "gfx950"
    assert current_platform().pretended
    assert platform_of(torch.device("cpu")).arch == "gfx950"
    with use_platform(hopper):
        assert current_platform() is hopper


@pytest.mark.parametrize(
    ("hip", "version", "gcn_arch_name", "vendor", "arch"),
    [
        ("7.0", (9, 5), "gfx950:sramecc+:xnack-", "amd", "gfx950"),
        # On NVIDIA GPUs, PyTorch sets ``gcnArchName`` to the device's name.
        (None, (9, 0), "a gpu", "nvidia", "sm_90"),
    ],
)
def test_gpus_are_described_by_their_properties(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, version: tuple[int, int], gcn_arch_name: str, vendor: str, arch: str
) -> None:
    properties = SimpleNamespace(
        major=version[0], minor=version[1], name="a gpu", gcnArchName=gcn_arch_name, total_memory=7, multi_processor_count=3
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", hip)
    platform._cuda_platform.cache_clear()
    try:
        gpu = current_platform()
        assert (gpu.vendor, gpu.arch, gpu.arch_version) == (vendor, arch, ArchVersion(*version))
        assert (gpu.device_name, gpu.device_count, gpu.total_memory, gpu.sm_count) == ("a gpu", 2, 7, 3)
        assert platform_of(torch.device("cuda", 0)).arch == arch
        assert platform_of(torch.device("cpu")).is_cpu
    finally:
        platform._cuda_platform.cache_clear()
