"""The machines that the kernels of this package run on, as data: a range of architectures, and the software that they need.

A new architecture is one more function here, and a folder of its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenspeed_kernel_amd._machine import triton_gap
from tokenspeed_kernel_amd.aiter.package import aiter_gap
from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement

Probe = Callable[[], str | None]


def cdna3_to_cdna4(*, features: Iterable[str] = (), probe: Probe | None = None) -> CapabilityRequirement:
    """gfx942 and gfx950: AMD Instinct MI300 and MI350 series.

    Args:
        features: names that the platform's features must hold, for example ``"triton"``.
        probe: see `CapabilityRequirement`. It reads package metadata only, and imports neither Triton nor AITER.
    """
    return CapabilityRequirement(ArchVersion(9, 4), ArchVersion(9, 5), frozenset(features), frozenset({"amd"}), probe)


def cdna4(*, features: Iterable[str] = (), probe: Probe | None = None) -> CapabilityRequirement:
    """gfx950: AMD Instinct MI350X and MI355X. Arguments are those of `cdna3_to_cdna4`."""
    return CapabilityRequirement(ArchVersion(9, 5), ArchVersion(9, 5), frozenset(features), frozenset({"amd"}), probe)


# What kernels in Gluon need.
GLUON_CDNA4 = cdna4(features={"triton"}, probe=triton_gap)
# What AITER's kernels need.
AITER = cdna3_to_cdna4(probe=aiter_gap)
