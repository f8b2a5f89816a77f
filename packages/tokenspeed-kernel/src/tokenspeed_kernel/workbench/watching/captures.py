"""Captures operator calls: counts them by shapes, dtypes and options."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.workbench.watching.background import Background
from tokenspeed_kernel.workbench.watching.records import Contents, Record, add_to, merged, merged_work, write
from tokenspeed_kernel_base import watch
from tokenspeed_kernel_base.config import ConfigurationError
from tokenspeed_kernel_base.signature import dtype_name

MAX_RECORDS = 10_000
# A sample has at most this many of the values that determine a call's work; of a longer list, evenly spaced values are kept.
_LONGEST_SAMPLE = 1024
# At least this many seconds pass between two reads of a record's values. A read synchronises with the device, so it must be rare.
_SECONDS_BETWEEN_READS = 0.5
_SECONDS_BETWEEN_WRITES = 0.25

Work = Mapping[str, Sequence[int]]


def described(value: Any) -> Any:
    """Describes an argument of a call as JSON values: a tensor by dtype, shape, device and strides, without its elements."""
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


class ShapeCapture(Background):
    """Counts operator calls by shapes, dtypes and options, with the kernel that ran and the values that determine the work.

    Memory is bounded: after ``max_records`` distinct combinations, calls with new combinations have no record, and are only
    counted in ``dropped``.

    Args:
        path: a file to which the records are also added, periodically. Other processes may add to the same file.
        max_records: the largest number of distinct combinations that have a record.

    Raises:
        OSError: the file cannot be written, or is no capture.
    """

    def __init__(self, path: str | Path | None = None, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        if path is not None:
            add_to(Path(path), Contents())
        super().__init__(None if path is None else Path(path), "captured shapes", _SECONDS_BETWEEN_WRITES)

    def _restart(self) -> None:
        super()._restart()
        self._numbers: dict[Hashable, int] = {}
        self._read_at: list[float] = []
        # Two records per combination, by its number: one with all counts, and one with the counts that are not in the file yet.
        self._records: dict[int, Record] = {}
        self._unsaved: dict[int, Record] = {}
        self._dropped: dict[str, int] = {}
        self._unsaved_dropped: dict[str, int] = {}

    @property
    def dropped(self) -> int:
        """The number of calls without a record, because there were already ``max_records`` other combinations."""
        with self._lock:
            return sum(self._dropped.values())

    def watch(self, call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """Counts a call, and returns ``run`` unchanged. This method is the watcher to register, see `watch.start`."""
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
        """Counts a call in the record of its combination of operator, kernel and key.

        Args:
            operator: ``"family.mode"``.
            kernel: the kernel that runs the call.
            key: equal for calls of one operator with the same shapes, dtypes and options.
            arguments, traits: the call's arguments and traits by name. A new record gets a description of them.
            read_work: function that reads the values that determine the call's work, and may synchronise with the device. It is
                called for some of the calls only, and never while a CUDA graph is captured.
        """
        with self._lock:
            self._written_from_now_on()
            number = self._numbers.get((operator, kernel, key))
            if number is None:
                if len(self._records) >= self._max_records:
                    for dropped in (self._dropped, self._unsaved_dropped):
                        dropped[operator] = dropped.get(operator, 0) + 1
                    return
                number = self._numbers[operator, kernel, key] = len(self._records)
                self._records[number] = _new_record(operator, kernel, arguments, traits)
                self._read_at.append(0.0)
            for record in self._copies(number):
                record["count"] += 1
            now = time.monotonic()
            if read_work is None or now < self._read_at[number] or _capturing_graph():
                return
            self._read_at[number] = now + _SECONDS_BETWEEN_READS
        work = read_work()
        if work is not None:
            with self._lock:
                for record in self._copies(number):
                    record["work"] = merged_work(record["work"], _work_of_one(work))

    def _copies(self, number: int) -> list[Record]:
        """Returns the records in which a call is counted: the one with all counts and, if there is a file, the one with the counts
        that are not in the file yet.
        ``number``: the number of the call's combination.
        """
        record = self._records[number]
        if self._path is None:
            return [record]
        if number not in self._unsaved:
            self._unsaved[number] = {**record, "count": 0, "work": _NO_WORK}
        return [record, self._unsaved[number]]

    def get(self) -> list[Record]:
        """Returns the records, those with the most calls first."""
        with self._lock:
            return sorted(map(dict, self._records.values()), key=lambda record: -record["count"])

    def clear(self) -> None:
        """Resets all counts.

        Raises:
            ValueError: the capture is kept in a file, which cannot be reset.
        """
        if self._path is not None:
            raise ValueError("a capture that is kept in a file cannot be cleared")
        self._restart()

    reset = clear

    def contents(self) -> Contents:
        """Returns the records, and the number of dropped calls per operator."""
        records = self.get()
        with self._lock:
            return Contents(records, dict(self._dropped))

    def dump(self, path: str | Path) -> None:
        """Writes the records to a file, replacing it atomically."""
        write(path, self.contents())

    def write(self) -> None:
        assert self._path is not None
        with self._writing:
            with self._lock:
                unsaved, self._unsaved = self._unsaved, {}
                dropped, self._unsaved_dropped = self._unsaved_dropped, {}
            if not unsaved and not dropped:
                return
            try:
                add_to(self._path, Contents([*unsaved.values()], dropped))
            except BaseException:
                with self._lock:
                    for number, record in unsaved.items():
                        self._unsaved[number] = merged(self._unsaved.get(number), record)
                    for operator, count in dropped.items():
                        self._unsaved_dropped[operator] = self._unsaved_dropped.get(operator, 0) + count
                raise


_NO_WORK: dict[str, Any] = {"seen": 0, "samples": [], "histograms": {}}


def _new_record(operator: str, kernel: str, arguments: Mapping[str, Any], traits: Mapping[str, Any]) -> Record:
    return {
        "operator": operator,
        "kernel": kernel,
        "traits": {name: described(value) for name, value in traits.items()},
        "arguments": {name: described(value) for name, value in arguments.items()},
        "count": 0,
        "work": _NO_WORK,
    }


def _work_of_one(work: Work) -> dict[str, Any]:
    """Converts the values that were read from one call to the form in which a record keeps them, see `merged_work`."""
    histograms: dict[str, dict[str, int]] = {}
    for name, values in work.items():
        bins = histograms.setdefault(name, {})
        for value in values:
            upper = str(1 << (value - 1).bit_length() if value > 0 else 0)
            bins[upper] = bins.get(upper, 0) + 1
    return {"seen": 1, "samples": [{name: _thinned(values) for name, values in work.items()}], "histograms": histograms}


def _thinned(values: Sequence[int]) -> list[int]:
    """Returns the values if they are at most `_LONGEST_SAMPLE`, else that many evenly spaced values."""
    if len(values) <= _LONGEST_SAMPLE:
        return list(values)
    return [values[i * len(values) // _LONGEST_SAMPLE] for i in range(_LONGEST_SAMPLE)]


def _capturing_graph() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# -- captures of all calls of a process ----------------------------------------------------------------------------------------

_started: ShapeCapture | None = None  # the capture that `start_shape_capture` began
_lock = threading.Lock()


def start_shape_capture(path: str | Path | None = None) -> ShapeCapture:
    """Records every operator call of this process from now on. Returns the capture; if one already runs, returns that one.

    Args:
        path: a file to which the records are added. Other processes may add to the same file concurrently. Each call is in the file
            within a second, even if the process is killed later. `tokenspeed_kernel.workbench.watching.load` reads the file.

    Raises:
        OSError: the file cannot be written, or is no capture.
    """
    global _started
    with _lock:
        if _started is None:
            _started = ShapeCapture(path)
            watch.start(_started.watch, traced=True)
        return _started


def stop_shape_capture(output_path: str | Path | None = None) -> list[Record]:
    """Ends the capture of `start_shape_capture`, and writes the records to ``output_path`` if given. Returns the records; an empty
    list if no capture runs."""
    global _started
    with _lock:
        capture, _started = _started, None
    if capture is None:
        return []
    watch.stop(capture.watch)
    capture.finish()
    if output_path is not None:
        capture.dump(output_path)
    return capture.get()


@contextlib.contextmanager
def shape_capture(output_path: str | Path | None = None) -> Iterator[ShapeCapture]:
    """Records the calls of all threads while the block runs. Blocks may be nested; each block has its own capture.

    Args:
        output_path: a file to which the records are added, see `start_shape_capture`.
    """
    capture = ShapeCapture(output_path)
    watch.start(capture.watch, traced=True)
    try:
        yield capture
    finally:
        watch.stop(capture.watch)
        capture.finish()


def capture_to_file(path: Path) -> None:
    """Records every operator call of this process in a file, until the process ends.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        start_shape_capture(path)
    except OSError as error:
        raise ConfigurationError(f"shapes cannot be captured to {path}: {error}") from error
    atexit.register(stop_shape_capture)
