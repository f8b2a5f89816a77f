"""Compiles CuteDSL programs for kernel packs. An entry point of the group ``tokenspeed_kernel.packing`` names this module."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tokenspeed_kernel_base.compilation import Caller, Compilation, calling_kernel
from tokenspeed_kernel_base.platform import PlatformInfo
from tokenspeed_kernel_nvidia import _programs
from tokenspeed_kernel_nvidia.program_backend import Backend, Launch, use_backend

COMPILER = _programs.COMPILER


@dataclass(frozen=True)
class _Postponed:
    """A postponed compilation. Calling the object compiles the program into the cache directory that `compiling_into` has set. If a
    pack or the cache has the program already, the call compiles nothing. Returns a `Compilation` with the seconds that this took.

    Attributes:
        program, config: the program and its configuration.
        caller: a kernel's call that needs the program.
    """

    program: _programs.Program[Any]
    config: Any
    caller: Caller = field(compare=False)

    def __call__(self) -> Compilation:
        begun = time.perf_counter()
        self.program.cached(self.config)
        return Compilation(self.program.description(self.config), "CuteDSL", *self.caller, time.perf_counter() - begun)


class _NoLaunches(Backend):
    """A backend that compiles programs for a GPU, as kernel calls need them, and launches nothing.

    Args:
        postpone: function that receives the compilation of each program that is not in the cache. None to compile a program, or to
            load it from a pack, when a call needs it.
    """

    def __init__(self, postpone: Callable[[_Postponed], None] | None) -> None:
        self._postpone = postpone

    def load(self, program: _programs.Program[Any], config: Any) -> Launch:
        """Returns a function that launches nothing. Compiles the program, or lets each call of the function postpone that."""
        postpone = self._postpone
        if postpone is None:
            program.cached(config)
        if postpone is None or program.is_kept(config):
            return _skip

        needed = _Postponed(program, config, calling_kernel() or Caller("", "", ""))

        def needs(*arguments: Any) -> None:
            """Postpones the compilation. Each call that would launch the program does so again, although `load` runs only once, so
            that every call reports the programs that it needs."""
            postpone(needed)

        needs()
        return needs


def _skip(*arguments: Any) -> None:
    """Launches nothing."""


def toolchain() -> list[str]:
    """Returns the versions on which a compiled program depends."""
    return [*_programs.toolchain()]


def is_program(name: str) -> bool:
    """Whether the file of the program cache with this name belongs in a kernel pack."""
    return name.endswith(_programs.SUFFIXES) and not name.startswith(".")


def _default_stream(device: int) -> int:
    return 0


@contextlib.contextmanager
def compiling_into(folder: Path, platform: PlatformInfo, postpone: Callable[[_Postponed], None] | None = None) -> Iterator[None]:
    """Context manager: inside the ``with`` block, programs are compiled into ``folder``, and kernel launches do nothing. Launchers
    keep the functions that launch nothing, so kernels of this process do not run after the block either.

    Args:
        folder: the cache directory.
        platform: the device. It has no effect here, because each program states its architecture.
        postpone: see `tokenspeed_kernel.workbench.packing`.
    """
    os.environ[_programs.VARIABLE] = str(folder)
    # Launchers keep a workspace per stream, so they query the current stream. PyTorch's CPU builds lack the function for this
    # query. The replacement returns 0.
    no_stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _default_stream, create=True)
    with use_backend(_NoLaunches(postpone)), no_stream:
        yield
