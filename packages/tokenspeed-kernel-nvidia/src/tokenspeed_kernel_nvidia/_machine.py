"""Whether this machine compiles and runs the kernels: which CuteDSL there is, and which device. Imports no CuteDSL."""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata

import torch

ARCH = (9, 0)
DSL = "nvidia-cutlass-dsl"
NEEDED_DSL = (4, 8)


@functools.cache
def dsl_gap() -> str | None:
    """Why the installed CuteDSL does not do, or None where it does. From package metadata."""
    needed = f"needs {DSL} >= {'.'.join(map(str, NEEDED_DSL))}"
    try:
        version = metadata.version(DSL)
    except metadata.PackageNotFoundError:
        return f"{needed}, there is none"
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    if found is None or (int(found[1]), int(found[2] or 0)) < NEEDED_DSL:
        return f"{needed}, this is {version}"
    try:
        metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError:
        return "needs apache-tvm-ffi, there is none"
    return None


@functools.cache
def capability_of(device: int) -> tuple[int, int]:
    """Compute capability of a device, by PyTorch's number for it."""
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


@functools.cache
def multiprocessors(device: int) -> int:
    """Streaming multiprocessors of a device, by PyTorch's number for it."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def require_sm90(function: str, device: torch.device) -> None:
    """Raises RuntimeError unless kernels can be launched on a device.

    Args:
        function: what was called, for the message.
        device: where its arguments lie.
    """
    reason = dsl_gap()
    if reason is None:
        if device.type == "cuda" and torch.version.cuda and capability_of(device.index) == ARCH:
            return
        reason = f"runs on sm_90 (NVIDIA H100, H200), {_describe(device)}"
    raise RuntimeError(f"{function} of tokenspeed_kernel_nvidia {reason}")


def _describe(device: torch.device) -> str:
    if not torch.cuda.is_available():
        return f"this is a machine without a GPU that PyTorch can use ({sys.platform})"
    if device.type != "cuda":
        return f"these tensors are on {device}"
    properties = torch.cuda.get_device_properties(device)
    label = f"sm_{properties.major}{properties.minor}" if torch.version.cuda else str(properties.gcnArchName)
    return f"this is {properties.name} [{label}]"
