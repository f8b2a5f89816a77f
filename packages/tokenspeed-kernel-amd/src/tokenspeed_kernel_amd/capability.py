"""Requirements of this package's kernels, as data: a range of GPU architectures and the software that must be installed.

A new architecture needs one more function in this module, and a folder for its kernels. ARCHITECTURE.md lists the folder's
contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenspeed_kernel_amd._machine import triton_gap
from tokenspeed_kernel_amd.aiter.package import aiter_gap
from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement

Probe = Callable[[], str | None]


def cdna3_to_cdna4(*, features: Iterable[str] = (), probe: Probe | None = None) -> CapabilityRequirement:
    """Returns a requirement that gfx942 and gfx950 meet (AMD Instinct MI300 and MI350 series).

    Args:
        features: names that the platform's features must include, for example ``"triton"``.
        probe: returns the reason why this machine cannot run the kernel, or None, see `CapabilityRequirement`. The probe must read
            only package metadata, and import neither Triton nor AITER.
    """
    return CapabilityRequirement(ArchVersion(9, 4), ArchVersion(9, 5), frozenset(features), frozenset({"amd"}), probe)


def cdna3(*, features: Iterable[str] = (), probe: Probe | None = None) -> CapabilityRequirement:
    """Returns a requirement that only gfx942 meets (AMD Instinct MI300X and MI325X). The arguments are those of
    `cdna3_to_cdna4`."""
    return CapabilityRequirement(ArchVersion(9, 4), ArchVersion(9, 4), frozenset(features), frozenset({"amd"}), probe)


def cdna4(*, features: Iterable[str] = (), probe: Probe | None = None) -> CapabilityRequirement:
    """Returns a requirement that only gfx950 meets (AMD Instinct MI350X and MI355X). The arguments are those of
    `cdna3_to_cdna4`."""
    return CapabilityRequirement(ArchVersion(9, 5), ArchVersion(9, 5), frozenset(features), frozenset({"amd"}), probe)


# Required by the Gluon kernels.
GLUON_CDNA3 = cdna3(features={"triton"}, probe=triton_gap)
GLUON_CDNA4 = cdna4(features={"triton"}, probe=triton_gap)
# Required by the AITER kernels.
AITER = cdna3_to_cdna4(probe=aiter_gap)
