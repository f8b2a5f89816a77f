"""Files of captured calls: records of calls, their counts, and the values that determined their work.

A capture is one SQLite file (see `tokenspeed_kernel_base.storage`). Any number of processes may add to the file concurrently. The
file stays consistent if one of these processes is killed, and can be copied like any file. Captures of earlier releases were JSON
lines, and are not supported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed_kernel_base.storage import DamagedFileError, Database, part_of, set_aside

MAX_SAMPLES = 4  # a record keeps the values that determine the work of at most this many calls
_CONTENT, _VERSION = "tkca", 2
_DROPPED = "dropped "

Record = dict[str, Any]


class UnreadableCaptureError(OSError, ValueError):
    """A file is no capture, or a capture of another release. The message names the file."""


@dataclass
class Contents:
    """The contents of a capture.

    Attributes:
        records: one per kind of call, with the call's description (``operator``, ``kernel``, ``traits``, ``arguments``), its
            ``count``, and its ``work``, see `merged_work`.
        dropped: number of calls per operator that were not recorded because there were too many distinct calls.
    """

    records: list[Record] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def add(self, other: Contents) -> None:
        """Adds the counts and the work of another capture's records to the records of the same calls, and adds its other
        records.
        """
        records = {_key(record): record for record in self.records}
        for record in other.records:
            key = _key(record)
            records[key] = merged(records.get(key), record)
        self.records = [*records.values()]
        for operator, count in other.dropped.items():
            self.dropped[operator] = self.dropped.get(operator, 0) + count


def _key(record: Mapping[str, Any]) -> str:
    """Returns a hash of a record's operator, kernel, traits and arguments. Records of the same kind of call have equal hashes."""
    described = json.dumps([record[name] for name in ("operator", "kernel", "traits", "arguments")], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def merged(mine: Record | None, other: Record) -> Record:
    """Merges two records of the same kind of call."""
    if mine is None:
        return other
    return {**mine, "count": mine["count"] + other["count"], "work": merged_work(mine["work"], other["work"])}


def merged_work(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the work of two records of one kind of call.

    The work of a record describes the values that determine how much its calls compute. ``seen`` is the number of calls whose
    values were read. ``samples`` has the values of a few of these
    calls: of the first call, which often has the largest values, and of the latest calls. ``histograms`` counts all values that
    were read, by name and bin. A value's bin is the smallest power of two that is not below the value (``"0"`` for 0).
    """
    samples = [*mine["samples"], *(sample for sample in other["samples"] if sample not in mine["samples"])]
    if len(samples) > MAX_SAMPLES:
        samples = [samples[0], *samples[1 - MAX_SAMPLES :]]
    histograms = {name: dict(bins) for name, bins in mine["histograms"].items()}
    for name, bins in other["histograms"].items():
        into = histograms.setdefault(name, {})
        for upper, count in bins.items():
            into[upper] = into.get(upper, 0) + count
    return {"seen": mine["seen"] + other["seen"], "samples": samples, "histograms": histograms}


# -- files ---------------------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Contents:
    """Reads a capture, the most frequent calls first. Other processes may add to the file meanwhile, or may have been killed.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableCaptureError: the file is no capture.
    """
    try:
        rows = Database(Path(path), _CONTENT, _VERSION).read()
    except FileNotFoundError:
        raise FileNotFoundError(f"there are no captured shapes at {path}") from None
    except DamagedFileError as error:
        raise _unreadable(Path(path), error) from None
    dropped = {key.removeprefix(_DROPPED): count for key, count in rows.items() if key.startswith(_DROPPED)}
    records = [record for key, record in rows.items() if not key.startswith(_DROPPED)]
    return Contents(sorted(records, key=lambda record: -record["count"]), dropped)


def add_to(path: Path, contents: Contents) -> None:
    """Adds the contents of a capture to a file. If this function raises an error, it has added nothing. Other processes may add to
    the file concurrently.

    A damaged capture is renamed with a warning, and a new file is begun.

    Raises:
        UnreadableCaptureError: the file is no capture, and is left unchanged.
        OSError: the file cannot be written.
    """
    database = Database(path, _CONTENT, _VERSION)
    try:
        _add_to(database, contents)
    except DamagedFileError as error:
        if "malformed" not in str(error):
            raise _unreadable(path, error) from None
        set_aside(path, f"captured shapes of {path} are damaged: {error}")
        _add_to(database, contents)


def _add_to(database: Database, contents: Contents) -> None:
    with database.changing() as rows:
        for record in contents.records:
            key = _key(record)
            rows.put(key, merged(rows.get(key), record))
        for operator, count in contents.dropped.items():
            rows.put(_DROPPED + operator, (rows.get(_DROPPED + operator) or 0) + count)


def write(path: str | Path, contents: Contents) -> None:
    """Writes the contents of a capture to a file, replacing an existing file."""
    part = part_of(Path(path))
    try:
        add_to(part, contents)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def merge(paths: Iterable[str | Path], output: str | Path) -> Contents:
    """Merges captures, and writes the result to ``output``, replacing an existing file.

    Raises:
        FileNotFoundError, UnreadableCaptureError: see `load`. In these cases nothing is written.
    """
    total = Contents()
    for path in paths:
        total.add(load(path))
    write(output, total)
    return total


def _unreadable(path: Path, error: Exception) -> UnreadableCaptureError:
    beginning = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        beginning = file.read(64)
    if b"tokenspeed-kernel shapes" in beginning:
        return UnreadableCaptureError(f"{path} is a capture of an older release, which this one does not read: capture again")
    return UnreadableCaptureError(f"{path} holds no captured shapes: {error}")
