"""Compiles CuteDSL programs for kernel packs. An entry point of the group ``tokenspeed_kernel.packing`` names this module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tokenspeed_kernel_base.platform import PlatformInfo
from tokenspeed_kernel_nvidia import _programs
from tokenspeed_kernel_nvidia.program_backend import Backend, Launch, use_backend

COMPILER = _programs.COMPILER


class _NoLaunches(Backend):
    """A backend that compiles and loads programs as for a GPU, and launches nothing."""

    def launcher(self, launch: Launch) -> Launch:
        def skip(*arguments: Any) -> None:
            """Launches nothing."""

        return skip


def toolchain() -> list[str]:
    """Returns the versions on which a compiled program depends."""
    return [*_programs.toolchain()]


def is_program(name: str) -> bool:
    """Whether the file of the program cache with this name belongs in a kernel pack."""
    return name.endswith(_programs.SUFFIXES) and not name.startswith(".")


def _default_stream(device: int) -> int:
    return 0


@contextlib.contextmanager
def compiling_into(folder: Path, platform: PlatformInfo) -> Iterator[None]:
    """Context manager: inside the ``with`` block, programs are compiled into ``folder``, and kernel launches do nothing. Launchers
    keep the functions that launch nothing, so kernels of this process do not run after the block either."""
    os.environ[_programs.VARIABLE] = str(folder)
    # Launchers keep a workspace per stream, so they query the current stream. PyTorch's CPU builds lack the function for this
    # query. The replacement returns 0.
    no_stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _default_stream, create=True)
    with use_backend(_NoLaunches()), no_stream:
        yield
