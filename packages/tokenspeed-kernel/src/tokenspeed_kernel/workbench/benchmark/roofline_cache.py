"""A device's roofline, measured once and kept in the user's cache directory.

One small file a device, driver and PyTorch. Two processes do not measure at once, for each would see half a device: they take
turns by a lock, and the second finds what the first wrote. A file that cannot be understood counts as none; a directory that
cannot be written means that nothing is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch

from tokenspeed_kernel.workbench.benchmark.roofline import Roofline, measure_roofline
from tokenspeed_kernel_base.config import cache_directory
from tokenspeed_kernel_base.platform import driver_version, platform_of

_FORMAT = 1
# Measuring takes two seconds. Whoever holds the lock for longer is stuck, or the file system has no locks to speak of.
_PATIENCE_S = 30.0


def cached_roofline(
    device: torch.device,
    *,
    remeasure: bool = False,
    directory: Path | None = None,
    measured: Callable[[torch.device], Roofline] = measure_roofline,
) -> Roofline:
    """What `measure_roofline` says, from the cache if it is there.

    Args:
        device: a GPU.
        remeasure: do not look into the cache; what is measured goes there all the same.
        directory: of the cache; the user's if not given.
        measured: what measures.
    """
    if directory is None:
        cache = cache_directory()
        if cache is None:
            return _now(measured, device)
        directory = cache / "roofline"
    key = _key(device)
    file = directory / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    found = None if remeasure else _read(file, key)
    if found is not None:
        return found
    with _locked(file.with_suffix(".lock")) as waited:
        found = _read(file, key) if waited and not remeasure else None
        if found is not None:
            return found
        roofline = _now(measured, device)
        _write(file, key, roofline)
    return roofline


def _now(measured: Callable[[torch.device], Roofline], device: torch.device) -> Roofline:
    return dataclasses.replace(measured(device), date=datetime.now(timezone.utc).isoformat(timespec="seconds"))


def _key(device: torch.device) -> dict[str, str]:
    platform = platform_of(device)
    return {"device": platform.device_name, "driver": driver_version(platform.vendor), "torch": torch.__version__}


def _read(file: Path, key: dict[str, str]) -> Roofline | None:
    """None if there is no such file, or not the right thing in it."""
    try:
        table = json.loads(file.read_text())
        if table["format"] != _FORMAT or table["key"] != key:
            return None
        roofline = Roofline(**table["roofline"])
        rates = [roofline.copy_gb_per_s, roofline.read_gb_per_s, *roofline.tflops.values()]
        return roofline if all(0 < rate < float("inf") for rate in rates) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(file: Path, key: dict[str, str], roofline: Roofline) -> None:
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a home that cannot be written: it is measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"format": _FORMAT, "key": key, "roofline": dataclasses.asdict(roofline)}, indent=2) + "\n")
        beside.replace(file)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Gives whether somebody else held the lock before. Where it cannot be had, things go on without."""
    waited = False
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(file.open("a"))
        except OSError:
            yield False
            return
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = True
                if time.monotonic() > until:
                    break
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield waited
