"""What watchers that keep a file have in common: it is written now and then, when the process ends, and by each forked process."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from pathlib import Path


class Background:
    """Counts in memory, which a thread writes to a file now and then. A failure is warned of, and tried again.

    Args:
        place: the file or folder; None to write nothing.
        content: what a warning calls it.
        seconds: between two writes: what a killed process loses at most.
    """

    def __init__(self, place: Path | None, content: str, seconds: float) -> None:
        self._place, self._content, self._seconds = place, content, seconds
        self._restart()
        if place is not None:
            _kept.add(self)
            # A child that multiprocessing has forked ends without what atexit knows.
            from multiprocessing import util

            util.register_after_fork(self, lambda kept: util.Finalize(kept, Background.finish, (kept,), exitpriority=0))

    def _restart(self) -> None:
        """Begins at nothing. Also in a forked process: what was counted before is its parent's to write."""
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._writer: threading.Thread | None = None

    def write(self) -> None:
        """Writes what has changed.

        Raises:
            OSError: it cannot be written; nothing is lost.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Writes for the last time. Nothing may be counted after that.

        Raises:
            OSError: it cannot be written.
        """
        self._stop.set()
        if self._place is not None:
            _kept.discard(self)
            self.write()

    def _written_from_now_on(self) -> None:
        """Starts the thread at the first count of this process. To be called under the lock."""
        if self._writer is None and self._place is not None:
            self._writer = threading.Thread(target=self._write_on, name=f"tokenspeed-kernel: {self._content}", daemon=True)
            self._writer.start()

    def _write_on(self) -> None:
        stop, failed = self._stop, False
        while not stop.wait(self._seconds):
            try:
                self.write()
                failed = False
            except OSError as error:  # the disk may be full
                if not failed:
                    warnings.warn(f"{self._content} cannot be written to {self._place}: {error}", stacklevel=1)
                failed = True


_kept: weakref.WeakSet[Background] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_kept):
        each._restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
