"""Diagnoses this installation: platform, versions, settings, plugins, and remedies for problems."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform as _host
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.plugins import PluginFailure, PluginInfo, disabled_plugins, list_plugins, plugin_failures
from tokenspeed_kernel.version import __version__
from tokenspeed_kernel.workbench.tuned import tuned_directory
from tokenspeed_kernel_base import config, packs
from tokenspeed_kernel_base.installation import requirement, wrong_distributions
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.platform import PlatformInfo, current_platform
from tokenspeed_kernel_base.reach import why_unreachable
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import selection_policy


@dataclass(frozen=True)
class Setting:
    """A setting of tokenspeed-kernel that is in effect, and its source: an environment variable, a file or the default."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Finding:
    """A problem of the installation, or a piece of advice.

    Attributes:
        problem: whether the finding is an error, which makes the diagnosis fail. Otherwise it is advice.
        what: a description of the problem, or of the reason for the advice.
        remedy: how to fix the problem.
    """

    problem: bool
    what: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """The complete diagnosis of an installation. ``load_failures``: kernels whose code failed to import, with the traceback."""

    platform: dict[str, Any]
    versions: dict[str, str]
    settings: tuple[Setting, ...]
    plugins: tuple[PluginInfo, ...]
    disabled: tuple[str, ...]
    failures: tuple[PluginFailure, ...]
    load_failures: dict[str, str]
    kernels: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not any(finding.problem for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis as plain values, for JSON."""
        return {"healthy": self.healthy, **dataclasses.asdict(self)}


def diagnose() -> Diagnosis:
    """Examines this process and its installation. Problems become findings, not exceptions."""
    findings: list[Finding] = []
    try:
        config.settings()
    except config.ConfigurationError as error:
        return Diagnosis({}, versions(), (), (), (), (), {}, {}, (Finding(True, str(error), "correct the setting"),))
    findings += [Finding(True, str(wrong), wrong.remedy) for wrong in wrong_distributions()]
    platform = _platform(findings)
    _check_settings(current_platform() if platform else None, findings)
    _check_plugins(findings)
    _check_packs(platform, findings)
    _check_software(platform, findings)
    return Diagnosis(
        platform,
        versions(),
        tuple(_settings()),
        tuple(list_plugins()),
        tuple(disabled_plugins()),
        tuple(plugin_failures()),
        KernelRegistry.get().load_failures(),
        _kernels() if platform else {},
        tuple(sorted(findings, key=lambda finding: not finding.problem)),
    )


def versions() -> dict[str, str]:
    """Returns the versions of this project, of Python, and of the libraries that this project uses."""
    found = {"tokenspeed-kernel": __version__, "python": _host.python_version(), "torch": torch.__version__}
    for package in ("triton", "typer", "rich"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _platform(findings: list[Finding]) -> dict[str, Any]:
    try:
        platform = current_platform()
    except ValueError as error:
        findings.append(Finding(True, str(error), f"correct {config.PREFIX}PLATFORM"))
        return {}
    if platform.pretended:
        advice = f"unset {config.PREFIX}PLATFORM to run kernels"
        findings.append(Finding(False, f"{platform.arch} is pretended: nothing launches", advice))
    return {
        "device": platform.device_name,
        "vendor": platform.vendor,
        "arch": platform.arch,
        "devices": platform.device_count,
        "memory": platform.total_memory,
        "multiprocessors": platform.sm_count,
        "features": sorted(platform.features),
        "emulated": platform.emulated,
        "pretended": platform.pretended,
    }


def _kernels() -> dict[str, int]:
    specs = KernelRegistry.get().list_kernels()
    platform = current_platform()
    return {
        "operators": len(KernelRegistry.get().list_operators()),
        "registered": len(specs),
        "for this platform": sum(spec.capability.satisfied_by(platform) for spec in specs),
    }


def _settings() -> list[Setting]:
    settings = config.settings()
    in_file = str(settings.source) if settings.source else "default"

    def setting(name: str, value: object, default: str, variable: str = "") -> Setting:
        if variable and config.PREFIX + variable in os.environ:
            source = f"environment: {config.PREFIX}{variable}"
        else:
            source = in_file if value else "default"
        return Setting(name, str(value or default), source)

    directory = str(tuned_directory() or "off")
    profile = settings.profile_folder or ("true" if settings.profile else "")
    return [
        setting("objective", settings.objective, "default"),
        setting("platform", settings.platform, "as found", "PLATFORM"),
        setting("disabled_plugins", ", ".join(sorted(settings.disabled_plugins)), "none", "DISABLE_PLUGINS"),
        setting("verbose", "true" if settings.verbose else "", "false", "VERBOSE"),
        setting("tuned", settings.tuned, directory, "TUNED"),
        setting("packs", "off" if settings.packs is None else ", ".join(map(str, settings.packs)), "those installed", "PACKS"),
        setting("compile_policy", settings.compile_policy.removeprefix("allow"), "allow", "COMPILE_POLICY"),
        setting("capture_shapes", settings.capture_path, "off", "CAPTURE_SHAPES"),
        setting("profile", profile, "false", "PROFILE"),
        *(
            Setting(f"override {name}", kernel, f"environment: {config.OVERRIDE_PREFIX}{name}")
            for name, kernel in sorted(settings.env_overrides.items())
        ),
        *(Setting(f"override {f}.{m}", kernel, in_file) for (f, m), kernel in sorted(settings.overrides.items())),
    ]


def _check_settings(platform: PlatformInfo | None, findings: list[Finding]) -> None:
    settings = config.settings()
    try:
        selection_policy()
    except config.ConfigurationError as error:
        findings.append(Finding(True, str(error), "correct the objective"))
    declared = {str(op) for op in operators()}
    modes = {name.replace(".", "_").upper(): name for name in declared}
    wanted = [(config.OVERRIDE_PREFIX + joined, modes.get(joined, ""), k) for joined, k in settings.env_overrides.items()]
    wanted += [(f"{settings.source}: {f}.{m}", f"{f}.{m}", k) for (f, m), k in settings.overrides.items()]
    for source, name, kernel in wanted:
        why = why_unreachable(kernel, name, platform) if name in declared else "no such operator"
        if why is not None:
            findings.append(Finding(True, f"{source} = {kernel}: {why}", "correct or remove the override"))


def _check_plugins(findings: list[Finding]) -> None:
    findings += [
        Finding(
            True,
            f"plugin {failure.name} of {failure.package} {failure.version} failed to load: {failure.error}",
            f"update or remove it, or disable it with {config.PREFIX}DISABLE_PLUGINS={failure.name}",
        )
        for failure in plugin_failures()
    ]
    findings += [
        Finding(True, f"kernel {name} cannot be loaded: {trace.strip().splitlines()[-1]}", "update or remove what it needs")
        for name, trace in KernelRegistry.get().load_failures().items()
    ]
    findings += [
        Finding(True, str(clash), "give one of the two another priority, or disable its plugin")
        for clash in KernelRegistry.get().clashes()
    ]


def _check_packs(platform: dict[str, Any], findings: list[Finding]) -> None:
    used, unused = packs.examined()
    remedy = f"correct {config.PREFIX}PACKS, or build the pack again: tokenspeed-kernel pack build"
    findings += [Finding(True, f"the pack {name} is not used: {why}", remedy) for name, why in unused]
    for name, pack in used:
        arch = pack.manifest.get("arch")
        if platform.get("vendor") not in (None, "cpu") and arch != platform["arch"]:
            what = f"the pack {name} is for {arch}, this is {platform['arch']}"
            findings.append(Finding(False, what, f"build one: tokenspeed-kernel pack build --arch {platform['arch']}"))


# Files that exist on Linux if a GPU driver is loaded, whether or not PyTorch can use the GPU.
_GPU_FILES = {"CUDA": "/proc/driver/nvidia/version", "ROCm": "/sys/module/amdgpu/version"}


def _check_software(platform: dict[str, Any], findings: list[Finding]) -> None:
    if platform.get("vendor") == "cpu" and not platform["pretended"] and not platform["emulated"]:
        for toolkit, file in _GPU_FILES.items():
            if Path(file).exists():
                findings.append(
                    Finding(
                        False,
                        f"there is a GPU driver, but PyTorch {torch.__version__} finds no GPU",
                        f"install a {toolkit} build of PyTorch (https://pytorch.org/get-started), or make the device visible",
                    )
                )
    if platform and "triton" not in platform["features"]:
        on_cpu = platform["vendor"] == "cpu"
        missing = importlib.util.find_spec("triton") is None
        steps = ["pip install triton"] * missing + ["set TRITON_INTERPRET=1 (slow: an interpreter runs them)"] * on_cpu
        findings.append(Finding(False, "portable Triton kernels cannot run here", ", then ".join(steps)))
    if sys.version_info < (3, 11) and importlib.util.find_spec("tomli") is None:
        remedy = f"pip install {requirement('tokenspeed-kernel[tools]')}"
        findings.append(Finding(False, f"{config.PREFIX}CONFIG needs tomli on Python 3.10", remedy))
    if not list_plugins() and platform.get("vendor") in ("nvidia", "amd"):
        findings.append(
            Finding(
                False, "no plugin is loaded: only portable kernels are there", "install the kernel package of the device's vendor"
            )
        )
