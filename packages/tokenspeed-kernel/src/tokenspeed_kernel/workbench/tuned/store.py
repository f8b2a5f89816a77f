"""Tables on disk. A file is read whole or not at all, and written aside and renamed, so that it is whole at any moment. Writers
take a lock beside it and merge what they have into what is there, so that two of them lose nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenspeed_kernel.workbench.tuned.entries import FORMAT, Entry

# A writer holds the lock for milliseconds.
_LOCK_SECONDS = 10.0
_warned: set[tuple[str, str]] = set()
_thread_lock = threading.Lock()


class TunedTableWarning(UserWarning):
    """A table of tuned results could not be read or written; kernels are chosen, or measured, without it."""


def warn_once(path: Path, message: str) -> None:
    if (str(path), message) not in _warned:
        _warned.add((str(path), message))
        warnings.warn(message, TunedTableWarning, stacklevel=3)


class CorruptTableError(ValueError):
    """A file is not a table."""


def parse_table(text: bytes) -> list[Entry]:
    """The entries of a file. Raises CorruptTableError for anything that `format_table` does not write."""
    try:
        table = json.loads(text)
        if not isinstance(table, dict) or table.get("format") != FORMAT or not isinstance(table.get("entries"), list):
            raise ValueError(f"it is no table of format {FORMAT}")
        return [Entry.from_dict(entry) for entry in table["entries"]]
    except (ValueError, RecursionError) as error:  # undecodable bytes and wrong JSON are ValueErrors
        raise CorruptTableError(str(error)) from None


def format_table(entries: Iterable[Entry]) -> str:
    """One line an entry, so that versions of a shipped table can be compared."""
    listed = sorted(entries, key=lambda entry: (str(entry.device), entry.key))
    lines = ",\n".join(json.dumps(entry.to_dict(), allow_nan=False) for entry in listed)
    return f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n'


def read_table(path: Path, *, keep_corrupt: bool = True) -> list[Entry]:
    """The entries of a file; none where there is no file, or it cannot be read, or is corrupt.

    Args:
        path: the file.
        keep_corrupt: rename a corrupt file to ``*.corrupt``, so that it can be looked at and a new one takes its place.

    Warns:
        TunedTableWarning: it cannot be read or is corrupt; once in a process.
    """
    try:
        return parse_table(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        warn_once(path, f"tuned results of {path} cannot be read: {error}")
    except CorruptTableError as error:
        kept = ""
        if keep_corrupt:
            with contextlib.suppress(OSError), _locked(path):
                kept = _set_aside(path)
        warn_once(path, f"tuned results of {path} are corrupt and not used: {error}" + (f"; kept as {kept}" if kept else ""))
    return []


def _set_aside(path: Path) -> str:
    """Renames a file that is corrupt; what is there may be another by now. To be called under the lock."""
    try:
        parse_table(path.read_bytes())
    except FileNotFoundError:
        return ""
    except CorruptTableError:
        aside = path.with_name(path.name + ".corrupt")
        path.replace(aside)
        return str(aside)
    return ""


def save_entry(path: Path, entry: Entry) -> bool:
    """Puts an entry into a file, in place of the one of its device and key. Results of other kernels in that are kept if they were
    measured with the same driver and toolchain.

    Returns:
        Whether it was written.

    Warns:
        TunedTableWarning: it cannot be written; once in a process for each reason.
    """

    def put(entries: list[Entry]) -> list[Entry]:
        same = [e for e in entries if (e.device, e.key) == (entry.device, entry.key)]
        others = [e for e in entries if (e.device, e.key) != (entry.device, entry.key)]
        return [*others, entry.merged_onto(same[0]) if same else entry]

    return _rewrite(path, put)


def remove_entries(path: Path, keep: Callable[[Entry], bool]) -> int:
    """Takes out the entries of a file that are not to be kept; how many those were.

    Warns:
        TunedTableWarning: the file cannot be written; then it is as it was, and the answer 0.
    """
    removed = 0

    def drop(entries: list[Entry]) -> list[Entry]:
        nonlocal removed
        kept = [entry for entry in entries if keep(entry)]
        removed = len(entries) - len(kept)
        return kept

    return removed if path.exists() and _rewrite(path, drop) else 0


def _rewrite(path: Path, change: Callable[[list[Entry]], list[Entry]]) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # of a writer that was killed: only the lock's holder has one
                leftover.unlink(missing_ok=True)
            try:
                entries = parse_table(path.read_bytes())
            except FileNotFoundError:
                entries = []
            except CorruptTableError as error:
                warn_once(path, f"tuned results of {path} are corrupt and not used: {error}; kept as {_set_aside(path)}")
                entries = []
            beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                with beside.open("w") as file:
                    file.write(format_table(change(entries)))
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
    except OSError as error:
        warn_once(path, f"tuned results are not kept: {path} cannot be written: {error}")
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a table, against threads and processes. It ends with its holder, however that ends.

    Raises:
        OSError: it cannot be had.
    """
    with _thread_lock, path.with_name(path.name + ".lock").open("a") as file:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another process holds {file.name} for {_LOCK_SECONDS:g} s") from None
                time.sleep(0.005)
        yield
