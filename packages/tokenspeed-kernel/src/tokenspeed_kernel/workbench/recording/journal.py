"""Records of calls in one file, which any number of processes add to, and which is readable whenever one of them is killed.

A process appends to a file of its own, a *part*, in ``<file>.parts``. Its lines are what a record is from then on, so the last one
about a record holds; a line that was cut off is not looked at. When the process ends, it adds its part to the file itself, under a
lock, by a copy that is renamed. The file names the parts that are in it. So a part counts once, also if its process was killed
between renaming and deleting. Parts of processes that were killed are added by whoever ends next.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

if os.name == "posix":
    import fcntl

FORMAT = "tokenspeed-kernel shapes"
VERSION = 1
MAX_SAMPLES = 4  # of the values that decide work, a record
_PART, _ASIDE, _LOCK = ".part", ".new", "lock"
# A part is written anew when it has so many lines more than records.
_SUPERSEDED_LINES = 4096

Record = dict[str, Any]


class UnreadableCaptureError(ValueError):
    """A file is not one of records, or of a version that is not known here; the message names it."""


@dataclass
class Contents:
    """What a capture holds.

    Attributes:
        records: a call's description (``operator``, ``kernel``, ``traits``, ``arguments``), its ``count``, and ``work``, see
            `merged_work`.
        dropped: calls that were not recorded, because there were too many different ones, by operator.
    """

    records: list[Record] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def add(self, other: Contents) -> None:
        """Adds counts and work, record by record."""
        known = {identity(record): record for record in self.records}
        for record in other.records:
            mine = known.get(identity(record))
            if mine is None:
                known[identity(record)] = copied = dict(record)
                self.records.append(copied)
            else:
                mine["count"] += record["count"]
                mine["work"] = merged_work(mine["work"], record["work"])
        for operator, count in other.dropped.items():
            self.dropped[operator] = self.dropped.get(operator, 0) + count


def identity(record: Mapping[str, Any]) -> str:
    """What two records of the same call have in common."""
    return json.dumps([record[name] for name in ("operator", "kernel", "traits", "arguments")], sort_keys=True)


def merged_work(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The work of two records of one call.

    ``seen`` is how many calls' values were read, ``samples`` the values of some of them, and ``histograms`` count all values seen:
    under ``name``, by the power of two that a value is at most (0 apart, as ``"0"``).
    """
    samples = list(mine["samples"])
    samples += [sample for sample in other["samples"] if sample not in samples]
    histograms = {name: dict(bins) for name, bins in mine["histograms"].items()}
    for name, bins in other["histograms"].items():
        into = histograms.setdefault(name, {})
        for upper, count in bins.items():
            into[upper] = into.get(upper, 0) + count
    return {"seen": mine["seen"] + other["seen"], "samples": samples[:MAX_SAMPLES], "histograms": histograms}


class Journal:
    """One process's part of a file. Not safe from several threads."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.part = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._path = _parts_of(target) / (self.part + _PART)
        self._superseded = 0
        with _locked(target):
            self._file = self._create(self._path)

    def _create(self, path: Path) -> BinaryIO:
        file = path.open("xb", buffering=0)
        _lock(file)  # for as long as the process lives: others see by it that the part is not theirs to add
        _append(file, [{"format": FORMAT, "version": VERSION, "part": self.part}])
        return file

    def write(self, changed: Mapping[int, Record], known: set[int], dropped: Mapping[str, int]) -> None:
        """Writes down what records are now.

        Args:
            changed: records by number.
            known: numbers of those that were written before: of them only counts and work are. The new ones are added.
            dropped: see `Contents`.

        Raises:
            OSError: it cannot be written; nothing of it is.
        """
        lines: list[dict[str, Any]] = []
        for number, record in changed.items():
            if number in known:
                lines.append({"record": number, "count": record["count"], "work": record["work"]})
            else:
                lines.append({"record": number, **record})
        if dropped:
            lines.append({"dropped": dict(dropped)})
        whole = self._file.tell()
        try:
            _append(self._file, lines)
        except OSError:
            # What comes next must not be joined to half a line.
            self._file.truncate(whole)
            self._file.seek(whole)
            raise
        self._superseded += len(lines) - len(changed.keys() - known)
        known.update(changed)
        if self._superseded > _SUPERSEDED_LINES + len(known):
            self._compact()

    def _compact(self) -> None:
        """Writes the part without what later lines have superseded. Numbers of records stay."""
        records, dropped = _numbered(self._path)
        beside = self._path.with_suffix(_ASIDE)
        with _locked(self.target):  # so that no one takes the file that is left behind for one of a killed process
            file = self._create(beside)
            _append(file, [*({"record": number, **record} for number, record in records.items()), {"dropped": dropped}])
            os.replace(beside, self._path)
            self._file.close()
        self._file, self._superseded = file, 0

    def finish(self) -> None:
        """Adds the part to the file, and parts that killed processes have left."""
        with _locked(self.target):
            merged, contents = _read_whole(self.target)
            done = {self.part, *(path.stem for path in _abandoned(self.target))}
            for part in sorted(done - merged):
                contents.add(_read_part(_parts_of(self.target) / (part + _PART)))
            write(self.target, contents, merged | done)
            for part in merged | done:
                for suffix in (_PART, _ASIDE):
                    (_parts_of(self.target) / (part + suffix)).unlink(missing_ok=True)
            write(self.target, contents)  # whose parts are gone, and need not be named any more
            self._file.close()
            if not any(path.name != _LOCK for path in _parts_of(self.target).iterdir()):
                (_parts_of(self.target) / _LOCK).unlink()
                _parts_of(self.target).rmdir()

    def discard(self) -> None:
        """Forgets the part in a process that has inherited it, whose parent goes on writing to it."""
        self._file.close()


def read(path: Path) -> Contents:
    """What a file and the parts beside it hold, also while processes add to them.

    Raises:
        FileNotFoundError: there is neither the file nor a part of it.
        UnreadableCaptureError: see there.
    """
    with _unchanged(path):
        parts = _part_files(path)
        if not parts and not path.exists():
            raise FileNotFoundError(f"there are no captured shapes at {path}")
        merged, contents = _read_whole(path)
        for part in parts:
            if part.stem not in merged:
                contents.add(_read_part(part))
    return contents


def write(path: Path, contents: Contents, merged: Iterable[str] = ()) -> None:
    """Writes a file such that whoever reads it finds it whole, as it was or as it is.

    Args:
        merged: parts that are in it, and may still lie beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            header = {"format": FORMAT, "version": VERSION, "merged": sorted(merged), "dropped": contents.dropped}
            _append(file, [header, *sorted(contents.records, key=lambda record: -record["count"])])
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


# -- files ------------------------------------------------------------------------------------------------------------------------


def _parts_of(target: Path) -> Path:
    return target.with_name(target.name + ".parts")


def _part_files(target: Path) -> list[Path]:
    return sorted(_parts_of(target).glob("*" + _PART))


def _append(file: BinaryIO, lines: Iterable[Mapping[str, Any]]) -> None:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    while data:
        data = data[file.write(data) :]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, without one that was cut off at its end."""
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def _checked(path: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    header = lines[0] if lines and isinstance(lines[0], dict) else {}
    if header.get("format") != FORMAT:
        raise UnreadableCaptureError(f"{path} holds no captured shapes: its first line is not that of such a file")
    if header.get("version") != VERSION:
        raise UnreadableCaptureError(f"{path} has version {header.get('version')} of captured shapes, this reads version {VERSION}")
    return header


def _parsed(path: Path) -> list[dict[str, Any]]:
    try:
        return _lines(path)
    except ValueError as error:
        raise UnreadableCaptureError(f"{path} holds no captured shapes: {error}") from None


def _read_whole(path: Path) -> tuple[set[str], Contents]:
    """The names of the parts that are in the file, and what it holds; nothing where there is no file."""
    try:
        lines = _parsed(path)
    except FileNotFoundError:
        return set(), Contents()
    header = _checked(path, lines)
    return set(header["merged"]), Contents(lines[1:], header["dropped"])


def _read_part(path: Path) -> Contents:
    records, dropped = _numbered(path)
    return Contents([*records.values()], dropped)


def _numbered(path: Path) -> tuple[dict[int, Record], dict[str, int]]:
    """A part's records by number, and the calls that it dropped."""
    lines = _parsed(path)
    records: dict[int, Record] = {}
    dropped: dict[str, int] = {}
    if lines:  # else it was killed before its first line
        _checked(path, lines)
    for line in lines[1:]:
        if "dropped" in line:
            dropped = line["dropped"]
        else:
            number = line.pop("record")
            records[number] = {**records.get(number, {}), **line}
    return records, dropped


# -- locks ------------------------------------------------------------------------------------------------------------------------


def _lock(file: BinaryIO, *, wait: bool = True) -> bool:
    """Locks an open file until it is closed; False if another has it and this shall not wait. Elsewhere than on POSIX always."""
    if os.name != "posix":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Alone with a file and its parts, whose folder is made."""
    lock = _parts_of(target) / _LOCK
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = lock.open("ab", buffering=0)
        except FileNotFoundError:  # whoever was here before has just taken the folder away
            continue
        with file:
            _lock(file)
            # ... or the lock itself, while this waited for it.
            if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                yield
                return


@contextlib.contextmanager
def _unchanged(target: Path) -> Iterator[None]:
    """While no part is added to the file. Makes nothing: the folder may be one that this process cannot write to."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            _lock(stack.enter_context((_parts_of(target) / _LOCK).open("rb")))
        yield


def _abandoned(target: Path) -> list[Path]:
    """Parts whose process has ended without adding them."""
    found = []
    for path in _part_files(target):
        with path.open("rb") as file:
            if _lock(file, wait=False):
                found.append(path)
    return found
