"""What the portable Triton kernels of all families share on the host. Imports no Triton: declarations use it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from tokenspeed_kernel_base.platform import CapabilityRequirement, platform_of

T = TypeVar("T")

TRITON = CapabilityRequirement(required_features=frozenset({"triton"}))
"""What a portable Triton kernel needs of a platform: that Triton compiles for it, or interprets on it."""

# Where a platform does not say: between the small and the large devices of today.
_TYPICAL_MULTIPROCESSORS = 128


def for_architecture(choices: Mapping[str, T], device: torch.device) -> T:
    """The entry of ``choices`` for a device: by its architecture (``"sm_90"``), else its vendor (``"nvidia"``), else ``"any"``.

    >>> for_architecture({"sm_90": 128, "any": 64}, torch.device("cpu"))
    64
    """
    platform = platform_of(device)
    for key in (platform.arch, platform.vendor):
        if key in choices:
            return choices[key]
    return choices["any"]


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors or compute units of a device; a typical number where that is not known (a pretended platform)."""
    return platform_of(device).sm_count or _TYPICAL_MULTIPROCESSORS


def dense(x: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of which the elements lie one after another: for vectors of which a kernel looks at no stride."""
    return None if x is None else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """``[..., n]`` as ``[rows, n]`` of unit stride in the last axis: a view where the strides allow it, else a copy."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def has_rows(out: Tensor) -> bool:
    """Whether `as_rows` of it is a view, for a tensor that is to be written to."""
    return out.is_contiguous() or (out.dim() == 2 and out.stride(1) == 1)
