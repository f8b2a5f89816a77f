"""The module that compiles Triton's programs for packs, see `tokenspeed_kernel.workbench.packing`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.platform import PlatformInfo

_cache = DeviceModule("tokenspeed_kernel_base.triton_cache_device")
_driver = DeviceModule("tokenspeed_kernel.workbench.packing.triton_driver_device")

COMPILER = "triton"
# Files of Triton's cache with these endings are intermediate representations, which launches do not need.
_NEEDLESS = (".source", ".ttir", ".ttgir", ".llir")


def toolchain() -> list[str]:
    """Returns the versions and settings on which a compiled program depends."""
    found: list[str] = _cache.toolchain()
    return found


def is_program(name: str) -> bool:
    """Returns whether a file of Triton's cache belongs in a pack. ``__grp__`` files do not, because they list absolute paths."""
    return not name.startswith("__grp__") and not name.endswith(_NEEDLESS)


@contextlib.contextmanager
def compiling_into(folder: Path, platform: PlatformInfo, postpone: object = None) -> Iterator[None]:
    """Inside the ``with`` block, Triton compiles for a platform into a folder, and launches nothing. It postpones nothing, because
    most of its programs compile in less than a second."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    with _driver.no_launches(platform):
        yield
