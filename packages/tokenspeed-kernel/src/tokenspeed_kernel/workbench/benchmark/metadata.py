"""What a measurement is made on and with."""

from __future__ import annotations

import platform as _host
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from tokenspeed_kernel.version import __version__
from tokenspeed_kernel.workbench.benchmark.results import Metadata
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.platform import driver_version, platform_of


def collect_metadata(command: str = "", device: torch.device | str | None = None) -> Metadata:
    """What this process would measure on and with.

    Args:
        command: the command line that makes the same measurement again.
        device: where; `default_device` if not given.
    """
    platform = platform_of(default_device() if device is None else torch.device(device))
    return Metadata(
        device=platform.device_name,
        arch=platform.arch,
        driver=driver_version(platform.vendor),
        python=_host.python_version(),
        torch=torch.__version__,
        triton=package_version("triton"),
        tokenspeed_kernel=__version__,
        git_commit=_git_commit(),
        command=command,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def package_version(package: str) -> str:
    """Of an installed distribution; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _git_commit() -> str:
    """The commit of this very code, with ``+`` for local changes; empty if it is not a checkout."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # An environment may lie inside some other project's checkout, whose commit says nothing of this package.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
