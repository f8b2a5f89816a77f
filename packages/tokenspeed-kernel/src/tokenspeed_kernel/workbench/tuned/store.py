"""Tables of tuned results on disk. A writer locks the file and merges its entries into it, so concurrent writers lose no
results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenspeed_kernel.workbench.tuned.entries import FORMAT, Entry
from tokenspeed_kernel_base.storage import locked, replace_file, set_aside, warn_once


class CorruptTableError(ValueError):
    """A file is not a valid table of tuned results."""


def parse_table(text: bytes) -> list[Entry]:
    """Parses the content of a table's file. Raises CorruptTableError for anything that `format_table` does not write."""
    try:
        table = json.loads(text)
        if not isinstance(table, dict) or table.get("format") != FORMAT or not isinstance(table.get("entries"), list):
            raise ValueError(f"it is no table of format {FORMAT}")
        return [Entry.from_dict(entry) for entry in table["entries"]]
    except (ValueError, RecursionError) as error:  # undecodable bytes and wrong JSON are ValueErrors
        raise CorruptTableError(str(error)) from None


def format_table(entries: Iterable[Entry]) -> str:
    """Formats a table with one line per entry, so that versions of a shipped table can be compared by ``git diff``."""
    listed = sorted(entries, key=lambda entry: (str(entry.device), entry.key))
    lines = ",\n".join(json.dumps(entry.to_dict(), allow_nan=False) for entry in listed)
    return f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n'


def read_table(path: Path, *, keep_corrupt: bool = True) -> list[Entry]:
    """Reads the entries of a table's file. Returns an empty list for a file that is absent, unreadable or corrupt.

    Args:
        path: the file.
        keep_corrupt: whether to rename a corrupt file to ``*.corrupt`` for inspection; a new file can then replace it.

    Warns:
        StorageWarning: the file cannot be read or is corrupt; once per process.
    """
    try:
        return parse_table(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        warn_once(f"tuned results of {path} cannot be read: {error}")
    except CorruptTableError as error:
        if keep_corrupt:
            with contextlib.suppress(OSError), locked(path):
                return _read_locked(path)
        warn_once(f"tuned results of {path} are corrupt and not used: {error}")
    return []


def _read_locked(path: Path) -> list[Entry]:
    """Reads the entries of a table's file while this process holds the file's lock. A corrupt file is renamed."""
    try:
        return parse_table(path.read_bytes())
    except FileNotFoundError:
        return []
    except CorruptTableError as error:
        set_aside(path, f"tuned results of {path} are corrupt and not used: {error}")
        return []


def save_entry(path: Path, entry: Entry) -> bool:
    """Writes an entry to a table's file, replacing the entry with the same device and key.

    Results of other kernels in the replaced entry are kept, provided that both were measured with the same driver and toolchain.

    Returns:
        Whether the entry was written.

    Warns:
        StorageWarning: the file cannot be written; once per process and reason.
    """

    def put(entries: list[Entry]) -> list[Entry]:
        same = [e for e in entries if (e.device, e.key) == (entry.device, entry.key)]
        others = [e for e in entries if (e.device, e.key) != (entry.device, entry.key)]
        return [*others, entry.merged_onto(same[0]) if same else entry]

    return _rewrite(path, put)


def remove_entries(path: Path, keep: Callable[[Entry], bool]) -> int:
    """Removes the entries of a table's file for which ``keep`` returns False. Returns the number of removed entries.

    Warns:
        StorageWarning: the file cannot be written; it is unchanged then, and the result is 0.
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
        with locked(path):
            replace_file(path, format_table(change(_read_locked(path))))
    except OSError as error:
        warn_once(f"tuned results are not kept: {path} cannot be written: {error}")
        return False
    return True
