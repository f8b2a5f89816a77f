"""Reading captures, and making one of several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenspeed_kernel.workbench.recording import Contents, read, write


def load(path: str | Path) -> Contents:
    """What was captured to a file, also while processes add to it or after they were killed.

    Raises:
        FileNotFoundError: nothing was.
        UnreadableCaptureError: the file holds something else.
    """
    return read(Path(path))


def merge(paths: Iterable[str | Path], output: str | Path) -> Contents:
    """Adds up captures, and writes the sum in place of what ``output`` held.

    Raises:
        FileNotFoundError, UnreadableCaptureError: see `load`; nothing has been written then.
    """
    total = Contents()
    for path in paths:
        total.add(load(path))
    write(Path(output), total)
    return total
