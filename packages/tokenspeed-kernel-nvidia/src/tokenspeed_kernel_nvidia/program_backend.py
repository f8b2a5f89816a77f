"""The backend that compiles and launches CuteDSL programs: the GPU, or an emulator inside `use_backend`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Launch = Callable[..., Any]
"""A compiled program: a function of tensors and scalars that launches the kernel."""


class Backend:
    """The backend for GPUs. An emulator subclasses it and overrides these methods."""

    def directory(self) -> Path | None:
        """Returns the cache directory for this backend's programs; None for the directory that ``TOKENSPEED_KERNEL_PROGRAMS``
        names. A backend with its own directory uses no kernel packs, because packs hold programs for GPUs."""
        return None

    def compile(self, build: Callable[[str], Any]) -> Any:
        """Compiles a program.

        Args:
            build: function that calls ``cute.compile``. Its argument is a string of options to add to the program's own.

        Returns:
            The result of ``build``.
        """
        return build("")

    def load(self, program: Any, config: Any) -> Launch:
        """Returns a program for a configuration, from a pack, from the cache, or compiled now.

        Args:
            program: the `_programs.Program`.
            config: its configuration.
        """
        return self.launcher(program.cached(config))

    def launcher(self, launch: Launch) -> Launch:
        """Wraps a program that was just compiled or loaded from the cache. Callers use the returned function instead of the
        program."""
        return launch


_current = Backend()


def current() -> Backend:
    """Returns the backend that currently compiles and launches programs."""
    return _current


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Context manager: inside the ``with`` block, ``backend`` compiles and launches programs, in all threads.

    Programs that a backend has loaded are kept for the next block with the same backend object. A launch function obtained inside
    the block launches on ``backend`` even after the block.
    """
    global _current
    previous, _current = _current, backend
    try:
        yield
    finally:
        _current = previous
