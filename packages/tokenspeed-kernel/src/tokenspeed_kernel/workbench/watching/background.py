"""Base class of watchers that count calls and write the counts to a file.

The file is written periodically, and when the process ends. A forked process writes its own counts.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from pathlib import Path


class Background:
    """Counts of calls in memory, and a thread that periodically writes them to a file. A failed write gives a warning and is
    retried.

    Args:
        path: the file or folder to write to; None to write nothing.
        content: what is counted, for warnings.
        seconds: seconds between two writes. A killed process loses at most the counts of the last ``seconds``.
    """

    def __init__(self, path: Path | None, content: str, seconds: float) -> None:
        self._path, self._content, self._seconds = path, content, seconds
        self._restart()
        if path is not None:
            _kept.add(self)
            # A child forked by multiprocessing exits without running atexit handlers.
            from multiprocessing import util

            util.register_after_fork(self, lambda kept: util.Finalize(kept, Background.finish, (kept,), exitpriority=0))

    def _restart(self) -> None:
        """Resets the counts in memory. Also called in a forked process, because the parent writes the counts from before the
        fork.
        """
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._writer: threading.Thread | None = None

    def write(self) -> None:
        """Writes the counts since the last write to the file.

        Raises:
            OSError: the file cannot be written. The counts stay in memory.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Writes the counts since the last write, and stops the thread. Nothing may be counted afterwards.

        Raises:
            OSError: the file cannot be written.
        """
        self._stop.set()
        if self._path is not None:
            _kept.discard(self)
            self.write()

    def _written_from_now_on(self) -> None:
        """Starts the thread that writes the file, if this process has not started it yet. The caller must hold ``self._lock``."""
        if self._writer is None and self._path is not None:
            self._writer = threading.Thread(target=self._write_on, name=f"tokenspeed-kernel: {self._content}", daemon=True)
            self._writer.start()

    def _write_on(self) -> None:
        stop, failed = self._stop, False
        while not stop.wait(self._seconds):
            try:
                self.write()
                failed = False
            except OSError as error:  # for example a full disk
                if not failed:
                    warnings.warn(f"{self._content} cannot be written to {self._path}: {error}", stacklevel=1)
                failed = True


_kept: weakref.WeakSet[Background] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_kept):
        each._restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
