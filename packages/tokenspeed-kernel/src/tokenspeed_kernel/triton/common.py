"""Host code shared by the portable Triton kernels of all families. Kernels' declarations use this module too, so it does not import
Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.platform import CapabilityRequirement, platform_of

T = TypeVar("T")

TRITON = CapabilityRequirement(required_features=frozenset({"triton"}))
"""The platform requirement of a portable Triton kernel: Triton compiles for the platform, or interprets on it."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of dense operands that the portable kernels accept."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
"""Dtypes of 8-bit float operands that the portable kernels accept."""

common_device = DeviceModule(__name__ + "_device")
tensor_descriptor = DeviceModule("triton.tools.tensor_descriptor")

# Architectures with PDL (programmatic dependent launch).
_OVERLAPPING = {"sm_90": True, "sm_100": True, "sm_103": True, "sm_120": True, "any": False}

# The SM/CU count that is assumed for a platform that reports none: between today's small and large devices.
_TYPICAL_SM_COUNT = 128


def for_architecture(choices: Mapping[str, T], device: torch.device) -> T:
    """Returns the entry of ``choices`` for a device: by architecture (``"sm_90"``), else vendor (``"nvidia"``), else ``"any"``.

    >>> for_architecture({"sm_90": 128, "any": 64}, torch.device("cpu"))
    64
    """
    platform = platform_of(device)
    for key in (platform.arch, platform.vendor):
        if key in choices:
            return choices[key]
    return choices["any"]


def may_overlap(device: torch.device) -> bool:
    """Whether the device supports PDL: a kernel may launch while the preceding kernel still runs.

    A kernel launched with PDL is compiled with a flag for it and launched with `launch_options`. The kernel calls
    `common_device.start` before it accesses memory that other kernels access.
    """
    return for_architecture(_OVERLAPPING, device)


def launch_options(early: bool) -> dict[str, bool]:
    """Returns the launch options: PDL if ``early``, else none."""
    return {"launch_pdl": True} if early else {}


def sm_count_of(device: torch.device) -> int:
    """Returns the SM/CU count of a device, or a typical count if the count is unknown (an emulated platform)."""
    return platform_of(device).sm_count or _TYPICAL_SM_COUNT


def cdiv(a: int, b: int) -> int:
    """Returns ``a / b`` rounded up, for positive b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the least power of two that is at least n; 1 for n = 0."""
    return 1 << max(n - 1, 0).bit_length()


def sequences_at_once(batch: int, most: int) -> int:
    """Returns how many sequences a program reads at a time when it searches all sequences of a batch: a power of two from 32 to
    ``most``. Fewer than 32 save nothing: a warp reduces 32 integers in a single instruction, and each value is another program.
    """
    return min(most, max(32, next_power_of_2(batch)))


def dense(x: Tensor | None) -> Tensor | None:
    """Returns a contiguous tensor: x itself or a copy. Used for vectors whose strides are not passed to the kernel."""
    return None if x is None else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """Returns ``[..., n]`` as ``[rows, n]`` with unit stride in the last axis: a view if the strides allow it, else a copy."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def has_rows(out: Tensor) -> bool:
    """Whether `as_rows` returns a view of an output tensor, through which a kernel can write, rather than a copy."""
    return out.is_contiguous() or (out.dim() == 2 and out.stride(1) == 1)
