"""The hardware and software of a measurement."""

from __future__ import annotations

import platform as _host
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.version import __version__
from tokenspeed_kernel.workbench.benchmark.results import Metadata, as_text
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.platform import driver_version, platform_of
from tokenspeed_kernel_base.storage import replace_file


def collect_metadata(command: str = "", device: torch.device | str | None = None) -> Metadata:
    """Describes the hardware and software of this process.

    Args:
        command: the command line that repeats the measurement.
        device: the device; `default_device` if not given.
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


def write_result(file: Path | None, device: torch.device | str | None = None, *, command: str = "", **values: Any) -> None:
    """Writes a program's measured values with the hardware and software; does nothing without a file.

    Args:
        file: the JSON file.
        device: the measured device; `default_device` if not given.
        command: the command line that repeats the measurement; this process's command line if omitted.
        values: the measured values by name.
    """
    if file is not None:
        metadata = asdict(collect_metadata(command or shlex.join(["python", *sys.argv]), device))
        replace_file(file, as_text({"metadata": metadata, **values}))


def package_version(package: str) -> str:
    """Returns the version of a distribution; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _git_commit() -> str:
    """Returns the commit of this code, with ``+`` for local changes; empty if the code is not in a checkout."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # A virtual environment may lie inside another project's checkout, whose commit does not describe this package.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
