"""What the launchers and kernels that several architectures share need to know of an architecture."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_base.discovery import DeviceModule


@dataclass(frozen=True)
class Architecture:
    """An architecture. Launchers pass its device functions to shared kernels, as compile-time constants.

    Attributes:
        paged: device module whose function ``attend`` computes attention of a tile of query rows to a range of a paged cache, see
            `gfx950.attention.paged_device.attend`.
    """

    paged: DeviceModule
