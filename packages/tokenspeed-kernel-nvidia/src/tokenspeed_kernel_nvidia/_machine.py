"""Functions by which launchers query the machine: the installed CuteDSL version, a device's number of SMs, and the number of
clusters that it runs at once. This module does not import CuteDSL."""

from __future__ import annotations

import functools
import importlib
import re
from importlib import metadata
from typing import Any

import torch

from tokenspeed_kernel_base.platform import current_platform

DSL = "nvidia-cutlass-dsl"
NEEDED_DSL = (4, 8)
# PTX of an empty kernel, for the driver's occupancy query.
_NOTHING = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"


@functools.cache
def dsl_gap() -> str | None:
    """Returns why the installed CuteDSL cannot be used; None if it can be used. Reads package metadata only, because importing
    CuteDSL takes long."""
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


def sm_count_of(device: int) -> int:
    """Returns the number of SMs of a device, given PyTorch's device index. A negative index stands for CPU tensors: an emulator
    then runs the kernels, and the result is the number of SMs of the current platform. The current platform can change, so this
    result is not cached."""
    return current_platform().sm_count if device < 0 else _sm_count_of_gpu(device)


@functools.cache
def _sm_count_of_gpu(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def clusters_at_once(device: int, size: int, threads: int, shared_bytes: int) -> int:
    """Returns the number of clusters that a device runs at the same time, with one CTA per SM.

    A cluster runs within one GPC, and a device's GPCs differ in their number of SMs. For example, an H100 has 132 SMs, but runs
    only 15 clusters of eight CTAs, not 16. If the driver returns an error, the result is the number of SMs divided by ``size``, at
    least 1.

    Args:
        device: PyTorch's device index; negative for CPU tensors.
        size: CTAs per cluster.
        threads: threads per CTA.
        shared_bytes: dynamic shared memory per CTA.
    """
    most = max(1, sm_count_of(device) // size)
    return most if device < 0 else _clusters_of_gpu(device, most, size, threads, shared_bytes)


@functools.cache
def _clusters_of_gpu(device: int, most: int, size: int, threads: int, shared_bytes: int) -> int:
    with torch.cuda.device(device):
        found = _clusters_at_once(most, size, threads, shared_bytes)
    return min(found, most) or most


def _clusters_at_once(most: int, size: int, threads: int, shared_bytes: int) -> int:
    """Returns the result of the driver's occupancy query for the current device; 0 if the driver returns an error."""
    # The query needs some loaded function. Only its cluster size, threads and shared memory matter, and the launch sets these.
    driver: Any = importlib.import_module("cuda.bindings.driver")
    error, module = driver.cuModuleLoadData(_NOTHING)
    if error:
        return 0
    _, function = driver.cuModuleGetFunction(module, b"nothing")  # an error here recurs in the occupancy query below
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuFuncSetAttribute(function, attribute, shared_bytes)
    value = driver.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size, 1, 1
    cluster = driver.CUlaunchAttribute()
    cluster.id, cluster.value = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = most * size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = shared_bytes, [cluster], 1
    error, found = driver.cuOccupancyMaxActiveClusters(function, config)
    driver.cuModuleUnload(module)
    return 0 if error else int(found)
