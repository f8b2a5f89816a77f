"""Caches a device's roofline in the user's cache directory, so that the roofline is measured only once.

There is one small file per device, driver and PyTorch version. Two processes never measure at the same time, because they would
share the device's bandwidth. The second process waits, then reads the first process's result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, measure_roofline
from tokenspeed_kernel.workbench.plain import from_plain
from tokenspeed_kernel_base.config import cache_directory
from tokenspeed_kernel_base.platform import PlatformInfo, driver_version, platform_of
from tokenspeed_kernel_base.storage import locked, replace_file, set_aside

_FORMAT = 1
# Seconds to wait for another process. A measurement takes two seconds.
_PATIENCE_S = 30.0


def cached_roofline(
    device: torch.device,
    *,
    remeasure: bool = False,
    directory: Path | None = None,
    measured: Callable[[torch.device], Roofline] = measure_roofline,
) -> Roofline:
    """Returns the result of `measure_roofline`, from the cache if possible. Without a cache directory, every call measures.

    Args:
        device: the GPU to measure.
        remeasure: whether to measure again and update the cache.
        directory: the cache directory; the user's if not given.
        measured: the function that measures the roofline if the cache has no result.

    Warns:
        StorageWarning: the file is damaged. The damaged file is set aside and replaced.
    """
    key = _key(platform_of(device))
    file = _file(key, directory)
    if file is None:
        return _now(measured, device)
    found = None if remeasure else _read(file, key)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the lock file cannot be created, or waiting for the lock timed out
            stack.enter_context(locked(file, _PATIENCE_S))
        found = None if remeasure else _read(file, key)
        if found is None:
            found = _now(measured, device)
            with contextlib.suppress(OSError):
                table = {"format": _FORMAT, "key": key, "roofline": dataclasses.asdict(found)}
                replace_file(file, json.dumps(table, indent=2) + "\n")
        return found


def kept_roofline(platform: PlatformInfo, directory: Path | None = None) -> Roofline | None:
    """Returns the cached roofline of a device of this machine; None if none is cached, or if this machine does not have the
    device.
    """
    key = _key(platform)
    file = None if platform.is_cpu or platform.pretended or platform.emulated else _file(key, directory)
    return None if file is None else _read(file, key)


def _file(key: dict[str, str], directory: Path | None) -> Path | None:
    cache = cache_directory()
    if directory is None and cache is None:
        return None
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return (directory or Path(cache or "", "roofline")) / f"{name}.json"


def _now(measured: Callable[[torch.device], Roofline], device: torch.device) -> Roofline:
    return dataclasses.replace(measured(device), date=datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _key(platform: PlatformInfo) -> dict[str, str]:
    return {"device": platform.device_name, "driver": driver_version(platform.vendor), "torch": str(torch.__version__)}


def _read(file: Path, key: dict[str, str]) -> Roofline | None:
    """Reads a cached roofline for ``key`` from a file; None if the file is absent, unreadable or damaged."""
    try:
        table = json.loads(file.read_bytes())
        if (table["format"], table["key"]) != (_FORMAT, key):
            raise ValueError("it is of another format, or of another device")
        roofline = from_plain(Roofline, table["roofline"])
        if not all(0 < rate < float("inf") for rate in (roofline.copy_gb_per_s, roofline.read_gb_per_s, *roofline.tflops.values())):
            raise ValueError("a rate is no positive number")
        return roofline
    except OSError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        set_aside(file, f"the roofline in {file} is damaged, and measured again: {error}")
        return None
