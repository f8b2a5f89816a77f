"""Counting calls by what they look like."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.workbench.recording.journal import MAX_SAMPLES, Contents, Journal, Record, write
from tokenspeed_kernel_base import watch
from tokenspeed_kernel_base.signature import dtype_name

MAX_RECORDS = 10_000
# Of a list of values, so many are kept in a sample.
_LONGEST_SAMPLE = 1024
# Reading values waits for the device: of each record at most so often.
_SECONDS_BETWEEN_READS = 0.5
# What a killed process loses at most.
_SECONDS_BETWEEN_WRITES = 0.25

Work = Mapping[str, Sequence[int]]


def described(value: Any) -> Any:
    """An argument as JSON can hold it, without its data."""
    if isinstance(value, torch.Tensor):
        told = {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "device": value.device.type}
        return told if value.is_contiguous() else {**told, "stride": list(value.stride())}
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [described(member) for member in value]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: described(getattr(value, name)) for name in fields}
    return type(value).__name__


class ShapeCapture:
    """How often each operator ran with each combination of shapes, dtypes and options, which kernel served it, and the values that
    decide how much work that was.

    Memory is bounded: after ``max_records`` distinct combinations, further new ones are only counted, in ``dropped``.

    Args:
        path: also kept there, as it grows; see `tokenspeed_kernel.workbench.recording.journal`. What is there already is added to.
        max_records: distinct combinations.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, path: str | Path | None = None, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._path = None if path is None else Path(path)
        self._begin()
        self._journal = None if self._path is None else Journal(self._path)
        if self._path is not None:
            _kept.add(self)

    def _begin(self) -> None:
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._writer: threading.Thread | None = None
        self._stop = threading.Event()
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._records: list[Record] = []
        self._read_at: list[float] = []
        self._changed: set[int] = set()
        self._written: set[int] = set()
        self._dropped: dict[str, int] = {}
        self._dropped_written: dict[str, int] = {}

    @property
    def dropped(self) -> int:
        """Calls that were not recorded, because there were too many different ones."""
        with self._lock:
            return sum(self._dropped.values())

    def watch(self, call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """A watcher of calls that counts each one."""
        self.record(f"{call.family}.{call.mode}", call.kernel, call.key, call.arguments, call.traits, call.read_work)
        return run

    def record(
        self,
        operator: str,
        kernel: str,
        key: Hashable,
        arguments: Mapping[str, Any],
        traits: Mapping[str, Any],
        read_work: Callable[[], Work | None] | None = None,
    ) -> None:
        """Counts a call.

        Args:
            operator: ``"family.mode"``.
            kernel: that serves it.
            key: the same for calls of the same description, of one operator.
            read_work: reads the values that decide how much work the call is; may wait for the device. Not called every time, nor
                while a CUDA graph is captured.
        """
        with self._lock:
            if self._writer is None and self._path is not None:
                self._writer = threading.Thread(target=self._write_on, name="tokenspeed-kernel-capture", daemon=True)
                self._writer.start()
            number = self._numbers.get((operator, kernel, key))
            if number is None:
                number = self._new(operator, kernel, key, arguments, traits)
                if number is None:
                    return
            record = self._records[number]
            record["count"] += 1
            self._changed.add(number)
            now = time.monotonic()
            if read_work is None or now < self._read_at[number] or _capturing_graph():
                return
            self._read_at[number] = now + _SECONDS_BETWEEN_READS
        work = read_work()
        if work is not None:
            with self._lock:
                _add_work(record["work"], work)
                self._changed.add(number)

    def _new(
        self, operator: str, kernel: str, key: Hashable, arguments: Mapping[str, Any], traits: Mapping[str, Any]
    ) -> int | None:
        if len(self._records) >= self._max_records:
            self._dropped[operator] = self._dropped.get(operator, 0) + 1
            return None
        number = self._numbers[operator, kernel, key] = len(self._records)
        self._records.append(
            {
                "operator": operator,
                "kernel": kernel,
                "traits": {name: described(value) for name, value in traits.items()},
                "arguments": {name: described(value) for name, value in arguments.items()},
                "count": 0,
                "work": {"seen": 0, "samples": [], "histograms": {}},
            }
        )
        self._read_at.append(0.0)
        return number

    def get(self) -> list[Record]:
        """The records, the most frequent first."""
        with self._lock:
            return sorted(map(_copy, self._records), key=lambda record: -record["count"])

    def clear(self) -> None:
        """Forgets what was counted, but for what is in the file already.

        Raises:
            ValueError: it is kept in a file, where its records have their numbers.
        """
        if self._path is not None:
            raise ValueError("a capture that is kept in a file cannot be cleared")
        with self._lock:
            self._forget()

    reset = clear

    def contents(self) -> Contents:
        """What was recorded, and what was not."""
        records = self.get()
        with self._lock:
            return Contents(records, dict(self._dropped))

    def dump(self, path: str | Path) -> None:
        """Writes what was recorded to a file, in place of what is there. The file is whole at any time."""
        write(Path(path), self.contents())

    # -- in a file -----------------------------------------------------------------------------------------------------------------

    def _write_on(self) -> None:
        stop, failed = self._stop, False
        while not stop.wait(_SECONDS_BETWEEN_WRITES):
            try:
                self.flush()
                failed = False
            except OSError as error:  # the disk may be full; what is counted stays in memory, and is tried again
                if not failed:
                    warnings.warn(f"captured shapes cannot be written to {self._path}: {error}", stacklevel=1)
                failed = True

    def flush(self) -> None:
        """Writes down what has changed, if it is kept in a file.

        Raises:
            OSError: it cannot be written; nothing is lost.
        """
        if self._path is None:
            return
        with self._writing:
            with self._lock:
                changed = {number: _copy(self._records[number]) for number in self._changed}
                dropped = dict(self._dropped) if self._dropped != self._dropped_written else {}
                self._changed.clear()
            try:
                if changed or dropped:
                    self._journal = self._journal or Journal(self._path)
                    self._journal.write(changed, self._written, dropped)
                    self._dropped_written = dropped or self._dropped_written
            except OSError:
                with self._lock:
                    self._changed.update(changed)
                raise

    def finish(self) -> None:
        """Adds what was counted to the file, if it is kept in one. Nothing may be recorded after that.

        Raises:
            OSError: it cannot be written.
        """
        if self._path is None:
            return
        self._stop.set()
        self.flush()
        with self._writing:
            if self._journal is not None:
                self._journal.finish()
                self._journal = None
        _kept.discard(self)

    def _begin_anew(self) -> None:
        """In a process that was forked: what was counted before is its parent's to write."""
        if self._journal is not None:
            self._journal.discard()
            self._journal = None  # until there is something to write
        self._begin()


_kept: weakref.WeakSet[ShapeCapture] = weakref.WeakSet()


def _after_fork() -> None:
    for capture in list(_kept):
        capture._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _copy(record: Record) -> Record:
    """A copy that is not changed by further calls."""
    work = record["work"]
    histograms = {name: dict(bins) for name, bins in work["histograms"].items()}
    return {**record, "work": {**work, "samples": list(work["samples"]), "histograms": histograms}}


def _add_work(total: dict[str, Any], work: Work) -> None:
    """Adds what was read of one call, see `journal.merged_work`. Of the samples the latest stay."""
    sample = {name: _spread(values) for name, values in work.items()}
    if sample not in total["samples"]:
        if len(total["samples"]) == MAX_SAMPLES:
            del total["samples"][1]  # the first stays: it is often the largest
        total["samples"].append(sample)
    total["seen"] += 1
    for name, values in work.items():
        bins = total["histograms"].setdefault(name, {})
        for value in values:
            upper = str(1 << (value - 1).bit_length() if value > 0 else 0)
            bins[upper] = bins.get(upper, 0) + 1


def _spread(values: Sequence[int]) -> list[int]:
    """Values, or so many as a sample may have, from all over."""
    if len(values) <= _LONGEST_SAMPLE:
        return list(values)
    return [values[i * len(values) // _LONGEST_SAMPLE] for i in range(_LONGEST_SAMPLE)]


def _capturing_graph() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
