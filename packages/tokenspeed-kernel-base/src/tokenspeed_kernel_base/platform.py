"""The platforms that kernels run on, and the capabilities that kernels require of them.

Importing this module creates no GPU context. The first request for a platform may create a GPU context.

`CapabilityRequirement.gap` tells selection why a kernel cannot run on a platform. CPU tensors use the CPU's platform even if a GPU
is present (`platform_of`), unless `use_platform` is in force. An emulator that runs GPU code on CPU tensors installs the emulated
platform with `use_platform`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform as _host
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tokenspeed_kernel_base import config, memo
from tokenspeed_kernel_base.names import did_you_mean

VENDORS = frozenset({"nvidia", "amd", "cpu"})


@dataclass(frozen=True, order=True)
class ArchVersion:
    """An architecture's version in its vendor's numbering: sm_90 is ``ArchVersion(9, 0)``, gfx942 and gfx950 are ``(9, 4)`` and
    ``(9, 5)``. Versions of different vendors are not comparable, so a requirement with a version should also name its vendors."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True)
class PlatformInfo:
    """One kind of device, as selection sees it.

    Attributes:
        vendor: ``"nvidia"``, ``"amd"`` or ``"cpu"``.
        arch_version: see `ArchVersion`; ``(0, 0)`` on a CPU.
        device_name: the device's name from its driver.
        arch: the compiler's name for the architecture: ``"sm_90"``, ``"gfx950"``, ``"cpu"``.
        device_count: number of visible devices of this kind.
        total_memory: bytes of one device, 0 if unknown.
        sm_count: SMs, CUs or logical CPU cores of one device, 0 if unknown.
        features: capabilities of the device and the installed software, by name (``"triton"``: Triton kernels run here).
        emulated: whether an emulator replaces the device. Kernels then run on CPU tensors, slowly.
        pretended: whether the device is absent. Selection can then be explained, and launches raise an error.
    """

    vendor: str
    arch_version: ArchVersion
    device_name: str
    arch: str = ""
    device_count: int = 1
    total_memory: int = 0
    sm_count: int = 0
    features: frozenset[str] = field(default_factory=frozenset)
    emulated: bool = False
    pretended: bool = False

    def __post_init__(self) -> None:
        if not self.arch:
            object.__setattr__(self, "arch", _arch_name(self.vendor, self.arch_version))

    @property
    def is_nvidia(self) -> bool:
        return self.vendor == "nvidia"

    @property
    def is_amd(self) -> bool:
        return self.vendor == "amd"

    @property
    def is_cpu(self) -> bool:
        return self.vendor == "cpu"

    def __str__(self) -> str:
        role = " (pretended)" if self.pretended else " (emulated)" if self.emulated else ""
        return f"{self.device_name} [{self.arch}]{role}"


def _arch_name(vendor: str, arch: ArchVersion) -> str:
    if vendor == "nvidia":
        return f"sm_{arch.major}{arch.minor}"
    if vendor == "amd":
        return f"gfx{arch.major}{arch.minor}0"
    return vendor


@dataclass(frozen=True)
class CapabilityRequirement:
    """A kernel's requirements of the platform. Every platform, a CPU included, meets an empty requirement.

    Attributes:
        min_arch_version, max_arch_version: inclusive bounds. A platform without an architecture version (a CPU) fails both.
        required_features: names that `PlatformInfo.features` must hold.
        vendors: the vendors whose devices are accepted; None for any.
        probe: returns a reason why this machine cannot run the kernel, such as missing software; None if it can. The probe is
            called last, at every selection, so it should cache its result. Two requirements are equal only if they have the same
            probe. `overlaps` ignores the probe, because on some machine it may succeed.
        min_sms: the smallest number of SMs (or CUs). Platforms whose number is unknown are accepted.
    """

    min_arch_version: ArchVersion | None = None
    max_arch_version: ArchVersion | None = None
    required_features: frozenset[str] = frozenset()
    vendors: frozenset[str] | None = None
    probe: Callable[[], str | None] | None = None
    min_sms: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "required_features", frozenset(self.required_features))
        if self.vendors is not None:
            object.__setattr__(self, "vendors", frozenset(self.vendors))
            for vendor in sorted(self.vendors - VENDORS):
                meant = did_you_mean(vendor, VENDORS)
                raise ValueError(f"vendors must be among {', '.join(sorted(VENDORS))}, got {vendor!r}{meant}")
        if self.min_arch_version and self.max_arch_version and self.min_arch_version > self.max_arch_version:
            raise ValueError(f"min_arch_version {self.min_arch_version} is above max_arch_version {self.max_arch_version}")

    def gap(self, platform: PlatformInfo) -> str | None:
        """Returns why the platform does not meet the requirement; None if the platform meets it."""
        if self.vendors is not None and platform.vendor not in self.vendors:
            return f"needs {_device_of(self.vendors)}, this is {'a CPU' if platform.is_cpu else platform.arch}"
        low, high = self.min_arch_version, self.max_arch_version
        if (low is not None or high is not None) and platform.is_cpu:
            wanted = " and ".join([f"{low} or later"] * (low is not None) + [f"{high} or earlier"] * (high is not None))
            return f"needs architecture {wanted}, a CPU has none"
        if low is not None and platform.arch_version < low:
            return f"needs architecture {low} or later, this is {platform.arch_version} ({platform.arch})"
        if high is not None and platform.arch_version > high:
            return f"needs architecture {high} or earlier, this is {platform.arch_version} ({platform.arch})"
        missing = self.missing_features(platform)
        if missing:
            return _why_missing(missing, platform)
        if 0 < platform.sm_count < self.min_sms:
            return f"needs {self.min_sms} SMs, this has {platform.sm_count}"
        return None if self.probe is None else self.probe()

    def satisfied_by(self, platform: PlatformInfo) -> bool:
        return self.gap(platform) is None

    def missing_features(self, platform: PlatformInfo) -> frozenset[str]:
        return self.required_features - platform.features

    def overlaps(self, other: CapabilityRequirement) -> bool:
        """Whether some platform could meet both requirements."""
        vendors = [r.vendors for r in (self, other) if r.vendors is not None]
        common = frozenset.intersection(*vendors) if vendors else None
        if common is not None:
            bounded = any(r.min_arch_version or r.max_arch_version for r in (self, other))
            if not (common - {"cpu"} if bounded else common):
                return False
        lows = [r.min_arch_version for r in (self, other) if r.min_arch_version is not None]
        highs = [r.max_arch_version for r in (self, other) if r.max_arch_version is not None]
        return not (lows and highs and max(lows) > min(highs))


@functools.cache
def _device_of(vendors: frozenset[str]) -> str:
    """The devices of some vendors in words: ``"an AMD or NVIDIA device"``."""
    if vendors == {"cpu"}:
        return "a CPU"
    article = "a" if "cpu" in vendors and "amd" not in vendors else "an"
    return f"{article} {' or '.join(vendor.upper() for vendor in sorted(vendors))} device"


def _why_missing(features: frozenset[str], platform: PlatformInfo) -> str:
    """The reason, in words, why a platform lacks some required features."""
    if features == {_TRITON} and not _is_installed(_TRITON):
        return "needs triton, which is not installed"
    if features == {_TRITON} and platform.is_cpu:
        return "needs triton, which a CPU can only interpret: set TRITON_INTERPRET=1 before Python starts"
    return f"needs {', '.join(sorted(features))}, which this platform lacks"


_TRITON = "triton"


@functools.cache  # called at every decision; searching for the package takes longer than the rest of a decision
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _software_features(vendor: str) -> frozenset[str]:
    """Features that the installed software adds to a device of this vendor. Packages are found without importing them."""
    features = set()
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")
    if (vendor != "cpu" or interpreted) and _is_installed(_TRITON):
        features.add(_TRITON)
    return frozenset(features)


@functools.cache
def cpu_platform() -> PlatformInfo:
    """The platform of the host's CPU. Under ``TRITON_INTERPRET=1`` it has the feature ``"triton"``, because Triton's interpreter
    runs portable Triton kernels."""
    return PlatformInfo("cpu", ArchVersion(0, 0), _cpu_name(), "cpu", 1, 0, os.cpu_count() or 0, _software_features("cpu"))


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:  # the only source on Linux
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return _host.processor() or _host.machine() or "cpu"


@functools.cache
def _cuda_platform(index: int) -> PlatformInfo:
    properties = torch.cuda.get_device_properties(index)
    arch = ArchVersion(properties.major, properties.minor)
    vendor = "amd" if torch.version.hip else "nvidia"
    return PlatformInfo(
        vendor,
        arch,
        properties.name,
        properties.gcnArchName.split(":")[0] if vendor == "amd" else _arch_name(vendor, arch),
        torch.cuda.device_count(),
        properties.total_memory,
        properties.multi_processor_count,
        _software_features(vendor),
    )


_DRIVER_FILES = {"nvidia": "/sys/module/nvidia/version", "amd": "/sys/module/amdgpu/version"}


@functools.cache
def driver_version(vendor: str) -> str:
    """The version of a vendor's driver, read from Linux's sysfs; empty without a driver."""
    try:
        return Path(_DRIVER_FILES[vendor]).read_text().strip()
    except (KeyError, OSError):
        return ""


# Common device names -> the device's architecture and full name. `named_platform` names an architecture's platform after its first
# device here.
_DEVICES = {
    "a100": ("sm_80", "NVIDIA A100"),
    "l40s": ("sm_89", "NVIDIA L40S"),
    "h100": ("sm_90", "NVIDIA H100"),
    "h200": ("sm_90", "NVIDIA H200"),
    "b200": ("sm_100", "NVIDIA B200"),
    "b300": ("sm_103", "NVIDIA B300"),
    "mi300x": ("gfx942", "AMD Instinct MI300X"),
    "mi325x": ("gfx942", "AMD Instinct MI325X"),
    "mi355x": ("gfx950", "AMD Instinct MI355X"),
    "mi350x": ("gfx950", "AMD Instinct MI350X"),
}


def named_platform(name: str) -> PlatformInfo:
    """Makes a pretended platform from the name of an architecture (``"cpu"``, ``"sm_90"``, ``"sm90"``, ``"sm_90a"``, ``"gfx950"``)
    or of a device (``"h100"``, ``"mi355x"``).

    The platform's features are those that the installed software would add to such a device. Nothing is launched.

    >>> named_platform("gfx950").arch_version
    ArchVersion(major=9, minor=5)
    """
    text = name.strip().lower()
    if text == "cpu":
        return replace(cpu_platform(), pretended=True)
    named = _DEVICES.get(text)
    text = named[0] if named else text
    if match := re.fullmatch(r"sm_?(\d+)(\d)[af]?", text):
        vendor, arch, label = "nvidia", ArchVersion(int(match[1]), int(match[2])), f"sm_{match[1]}{match[2]}"
    elif match := re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", text):
        vendor, arch, label = "amd", ArchVersion(int(match[1]), int(match[2], 16)), text
    else:
        known = f"cpu, sm_<version> (sm_90), gfx<version> (gfx950), {', '.join(_DEVICES)}"
        raise ValueError(f"unknown platform {name!r}; expected one of {known}")
    device = named[1] if named else next((device for arch_name, device in _DEVICES.values() if arch_name == label), label)
    return PlatformInfo(vendor, arch, device, label, features=_software_features(vendor), pretended=True)


_installed: PlatformInfo | None = None


def current_platform() -> PlatformInfo:
    """The platform that this process selects kernels for.

    In order of precedence: the platform installed by `use_platform`, the pretended platform of ``TOKENSPEED_KERNEL_PLATFORM``, the
    current GPU, the CPU.
    """
    forced = _forced_platform()
    if forced is not None:
        return forced
    if torch.cuda.is_available():
        return _cuda_platform(torch.cuda.current_device())
    return cpu_platform()


def platform_of(device: torch.device) -> PlatformInfo:
    """The platform for tensors on this device: the CPU's for CPU tensors, else that of `current_platform`.

    Raises:
        ValueError: no kernel runs on devices of this type.
    """
    forced = _forced_platform()
    if forced is not None:
        return forced
    if device.type == "cuda":
        return _cuda_platform(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return cpu_platform()
    raise ValueError(f"tensors are on {device}; expected cpu or cuda (ROCm devices are called cuda by PyTorch)")


def _forced_platform() -> PlatformInfo | None:
    if _installed is not None:
        return _installed
    pretended = config.settings().platform
    if not pretended:
        return None
    try:
        return named_platform(pretended)
    except ValueError as error:
        raise config.ConfigurationError(f"{config.PREFIX}PLATFORM or platform in the file: {error}") from None


def installed_platform() -> PlatformInfo | None:
    """The platform that `use_platform` installed; None outside its block."""
    return _installed


@contextlib.contextmanager
def use_platform(platform: PlatformInfo) -> Iterator[PlatformInfo]:
    """Makes `current_platform` return ``platform`` inside the block, for the whole process.

    Tests use the block, and so do emulators, which run a device's kernels on CPU tensors (``emulated=True``). Decisions made
    outside the block are not used inside, and vice versa. For a pretended platform, calls are checked and explained, but launch
    nothing::

        with use_platform(named_platform("gfx950")):
            print(rmsnorm.explain(x, weight))  # the kernel that an MI355X would run

    Raises:
        TypeError: ``platform`` is not a `PlatformInfo`; `named_platform` makes one from a name.
    """
    global _installed
    if not isinstance(platform, PlatformInfo):
        remedy = f"; named_platform({platform!r}) makes one" if isinstance(platform, str) else ""
        raise TypeError(f"use_platform: platform must be PlatformInfo, got {type(platform).__name__} {platform!r}{remedy}")
    previous, _installed = _installed, platform
    memo.invalidate()
    try:
        yield platform
    finally:
        _installed = previous
        memo.invalidate()
