"""Declares the platforms of this package's kernels. A platform is a range of architectures, and a probe of required packages.

A new architecture needs one more function in this module, and a folder for its kernels. ARCHITECTURE.md lists the folder's
contents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement
from tokenspeed_kernel_nvidia import _machine
from tokenspeed_kernel_nvidia.flashinfer import package

Probe = Callable[[], str | None]


def between(first: tuple[int, int], last: tuple[int, int], probe: Probe | None = None) -> CapabilityRequirement:
    """Requires an NVIDIA GPU of an architecture from ``first`` to ``last``.

    Args:
        first, last: inclusive, as (major, minor).
        probe: see `CapabilityRequirement`. The probe reads package metadata only, and imports neither CuteDSL nor FlashInfer.
    """
    return CapabilityRequirement(ArchVersion(*first), ArchVersion(*last), vendors=frozenset({"nvidia"}), probe=probe)


def hopper(probe: Probe | None = None) -> CapabilityRequirement:
    """Requires sm_90: H100, H200."""
    return between((9, 0), (9, 0), probe)


def blackwell(probe: Probe | None = None) -> CapabilityRequirement:
    """Requires sm_100 or sm_103: B200, B300."""
    return between((10, 0), (10, 3), probe)


def blackwell_workstation(probe: Probe | None = None) -> CapabilityRequirement:
    """Requires sm_120 or sm_121: RTX PRO 6000, GB10."""
    return between((12, 0), (12, 1), probe)


def with_sms(requirement: CapabilityRequirement, least: int) -> CapabilityRequirement:
    """Returns a requirement of, additionally, at least this many SMs. A platform whose number of SMs is unknown meets it."""
    return dataclasses.replace(requirement, min_sms=least)


def cutedsl_gap() -> str | None:
    """Returns why the installed CuteDSL cannot compile this package's kernels; None if it can."""
    return _machine.dsl_gap()


def flashinfer_gap() -> str | None:
    """Returns why FlashInfer cannot be used; None if it can be used."""
    return package.gap()


# The requirements of CuteDSL kernels for Hopper.
CUTEDSL_HOPPER = hopper(cutedsl_gap)
