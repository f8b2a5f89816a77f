"""A device's roofline, measured once and kept in the user's cache directory.

There is one small file for each device, driver and PyTorch. Two processes do not measure at once, for each would see half a device:
the second waits, and finds what the first wrote.
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
from tokenspeed_kernel_base.platform import driver_version, platform_of
from tokenspeed_kernel_base.storage import locked, replace_file, set_aside

_FORMAT = 1
# Measuring takes two seconds.
_PATIENCE_S = 30.0


def cached_roofline(
    device: torch.device,
    *,
    remeasure: bool = False,
    directory: Path | None = None,
    measured: Callable[[torch.device], Roofline] = measure_roofline,
) -> Roofline:
    """What `measure_roofline` says, from the cache if it is there. Where nothing can be kept, it is measured every time.

    Args:
        device: a GPU.
        remeasure: do not look into the cache; what is measured goes there all the same.
        directory: of the cache; the user's if not given.
        measured: what measures.

    Warns:
        StorageWarning: the file is damaged. It is kept aside, and a new one takes its place.
    """
    cache = cache_directory()
    if directory is None and cache is None:
        return _now(measured, device)
    key = _key(device)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (directory or Path(cache or "", "roofline")) / f"{name}.json"
    found = None if remeasure else _read(file, key)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there is no place for a lock, or somebody holds it for ever
            stack.enter_context(locked(file, _PATIENCE_S))
        found = None if remeasure else _read(file, key)
        if found is None:
            found = _now(measured, device)
            with contextlib.suppress(OSError):
                table = {"format": _FORMAT, "key": key, "roofline": dataclasses.asdict(found)}
                replace_file(file, json.dumps(table, indent=2) + "\n")
        return found


def _now(measured: Callable[[torch.device], Roofline], device: torch.device) -> Roofline:
    return dataclasses.replace(measured(device), date=datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _key(device: torch.device) -> dict[str, str]:
    platform = platform_of(device)
    return {"device": platform.device_name, "driver": driver_version(platform.vendor), "torch": str(torch.__version__)}


def _read(file: Path, key: dict[str, str]) -> Roofline | None:
    """What a file holds; None if there is none, it cannot be read, or it is damaged."""
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
