"""The backend that compiles and launches CuteDSL programs: the GPU, or an emulator inside `use_backend`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Launch = Callable[..., Any]
"""A compiled program: a function of tensors and scalars that launches."""


class Backend:
    """The GPU. An emulator overrides these methods."""

    def directory(self) -> Path | None:
        """The cache directory for this backend's programs; None for that of ``TOKENSPEED_KERNEL_PROGRAMS``. A backend
        with its own directory uses no kernel packs, because their programs are for GPUs."""
        return None

    def compile(self, build: Callable[[str], Any]) -> Any:
        """Compiles a program.

        Args:
            build: calls ``cute.compile`` with these options, in addition to the program's own.

        Returns:
            The result of ``build``.
        """
        return build("")

    def launcher(self, launch: Launch) -> Launch:
        """Wraps a program that was just compiled or loaded from the cache. Callers get the result instead of the program."""
        return launch


_current = Backend()


def current() -> Backend:
    """The backend in force."""
    return _current


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Inside the block, programs are compiled and launched by ``backend``, in all threads.

    Programs that a backend has loaded are kept for the next block with the same backend object. A program that was requested inside
    the block keeps belonging to ``backend`` after the block.
    """
    global _current
    previous, _current = _current, backend
    try:
        yield
    finally:
        _current = previous
