"""Times the calls of a running program, by operator, kernel and shapes.

Memory is bounded, however long the program runs. The times of each kind of call are counted in bins that are 1% wide. So a median
is accurate to 0.5%, and the counts of several processes can be added. Each process has its own file in a common folder. The process
replaces this file every second and when it ends, so a killed process loses at most one second.

On a GPU, events on the call's stream measure the device time. A program that launches one small kernel after another makes the
device wait for the host. Two events would then measure the host's time. So the device spins while the host issues a call. A call
gets no device time if issuing took longer than the spin, for example because the call was compiled.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from tokenspeed_kernel.workbench.watching.background import Background
from tokenspeed_kernel_base import watch
from tokenspeed_kernel_base.config import ConfigurationError
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_base.storage import StorageWarning, replace_file

FORMAT, VERSION = "tokenspeed-kernel call times", 2
# At most this many kinds of calls are counted separately. Calls of further kinds are counted without their shapes.
MAX_KINDS = 10_000
OTHER_SHAPES = "other shapes"
_BINS_PER_E = 1 / math.log(1.01)
_SECONDS_BETWEEN_WRITES = 1.0
# When _SOME_PENDING calls have events that were not read yet, the events of finished calls are read. When _MAX_PENDING calls have
# such events, the host also waits for the first half of these calls.
_SOME_PENDING, _MAX_PENDING = 32, 1024
# Before a call, the device spins for twice the shortest time in which the host issued a call of this kind, at most
# _LONGEST_SPIN_US; before the first two calls, for _FIRST_SPIN_US. No device's clock is faster than _CYCLES_PER_US.
_CYCLES_PER_US = 2500
_FIRST_SPIN_US, _LONGEST_SPIN_US = 100.0, 2000.0


@dataclass(frozen=True)
class CallKind:
    """A kind of calls, whose times are counted together. ``shape``: shapes of the operands. ``dtype``: dtype of the first
    operand.
    """

    operator: str
    kernel: str
    dtype: str
    shape: str


@dataclass
class Times:
    """Times of calls in microseconds: the number of calls, the times' sum and minimum, and the number of calls per bin.

    Bin i has the times from 1.01**i to 1.01**(i+1) us.
    """

    count: int = 0
    total_us: float = 0.0
    least_us: float = math.inf
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, time_us: float) -> None:
        self.count += 1
        self.total_us += time_us
        self.least_us = min(self.least_us, time_us)
        index = math.floor(math.log(max(time_us, 1e-3)) * _BINS_PER_E)
        self.bins[index] = self.bins.get(index, 0) + 1

    def merge(self, other: Times) -> None:
        self.count += other.count
        self.total_us += other.total_us
        self.least_us = min(self.least_us, other.least_us)
        for index, count in other.bins.items():
            self.bins[index] = self.bins.get(index, 0) + count

    @property
    def median_us(self) -> float:
        """The median time in microseconds, as the middle of the bin with the median; 0 if there are no times."""
        passed = 0
        for index in sorted(self.bins):
            passed += self.bins[index]
            if 2 * passed >= self.count:
                return math.exp((index + 0.5) / _BINS_PER_E)
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total_us": self.total_us, "least_us": self.least_us if self.count else 0.0, "bins": self.bins}

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Times:
        bins = {int(index): int(count) for index, count in table["bins"].items()}
        return cls(int(table["count"]), float(table["total_us"]), float(table["least_us"]) if bins else math.inf, bins)


@dataclass
class CallTime:
    """Times of one kind of call. ``host``: until the call returned to its caller. ``device``: on the device.

    ``device`` counts fewer calls than ``host``, because some calls get no device time: see the module's docstring. Calls on a CPU
    and calls captured in a CUDA graph never get a device time.
    """

    kind: CallKind
    host: Times = field(default_factory=Times)
    device: Times = field(default_factory=Times)

    def merge(self, other: CallTime) -> None:
        self.host.merge(other.host)
        self.device.merge(other.device)


@dataclass(frozen=True)
class Process:
    """One process of a profiled program. ``seconds``: how long the process has been profiled."""

    pid: int
    command: tuple[str, ...]
    seconds: float


class CallTimes(Background):
    """Times of the operator calls of this process. They are kept in a file of this process, in a folder that other processes may
    also use.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "times of calls", _SECONDS_BETWEEN_WRITES)
        self.write()
        atexit.register(self.finish)

    def _restart(self) -> None:
        super()._restart()
        assert self._path is not None
        self._file = self._path / f"{os.getpid()}-{uuid4().hex}.json"
        self._found: dict[CallKind, CallTime] = {}
        self._pending: deque[tuple[CallTime, Any, Any]] = deque()
        self._started = time.monotonic()
        self._local = threading.local()

    def watch(self, call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """Times a call. This method is the watcher to register, see `watch.start`."""
        kind = CallKind(f"{call.family}.{call.mode}", call.kernel, dtype_name(call.first.dtype), call.operand_shapes)
        return self.timed(kind, call.first.device, run)

    def timed(self, kind: CallKind, device: torch.device, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``call`` so that its time is counted. An operator call made inside another one counts as part of the outer call. A
        call that raises an error is not counted."""

        def run(*args: Any) -> Any:
            if getattr(self._local, "inside", False):
                return call(*args)
            self._local.inside = True
            try:
                found = self._of(kind)
                if device.type == "cuda":
                    with torch.cuda.device(device):
                        if not torch.cuda.is_current_stream_capturing():
                            return self._run_on_device(found, call, args)
                return self._run(found, call, args)[0]
            finally:
                self._local.inside = False

        return run

    def _run(self, found: CallTime, call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, float]:
        """Runs ``call``, and adds its host time to ``found``. Returns the result of ``call``, and the host time in microseconds."""
        start = time.perf_counter_ns()
        result = call(*args)
        host_us = (time.perf_counter_ns() - start) / 1e3
        with self._lock:
            found.host.add(host_us)
        return result, host_us

    def _run_on_device(self, found: CallTime, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        spin_us = min(2 * found.host.least_us, _LONGEST_SPIN_US) if found.host.count > 1 else _FIRST_SPIN_US
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(spin_us * _CYCLES_PER_US))
        begin.record()
        result, host_us = self._run(found, call, args)
        end.record()
        if host_us < spin_us:
            with self._lock:
                self._pending.append((found, begin, end))
        # The writer thread must not read events, because a query would invalidate a graph capture, even in another thread.
        if len(self._pending) >= _SOME_PENDING:
            self._read_events(len(self._pending) // 2 if len(self._pending) >= _MAX_PENDING else 0)
        return result

    def _of(self, kind: CallKind) -> CallTime:
        with self._lock:
            self._written_from_now_on()
            if kind not in self._found:
                if len(self._found) >= MAX_KINDS:
                    kind = CallKind(kind.operator, kind.kernel, kind.dtype, OTHER_SHAPES)
                return self._found.setdefault(kind, CallTime(kind))
            return self._found[kind]

    def _read_events(self, waited_for: int) -> None:
        """Reads the device times of calls that the device has finished. First waits until the device has finished the first
        ``waited_for`` of the pending calls.
        """
        with self._lock:
            try:
                while self._pending:
                    found, begin, end = self._pending[0]
                    if waited_for > 0:
                        end.synchronize()
                        waited_for -= 1
                    elif not end.query():
                        return
                    found.device.add(begin.elapsed_time(end) * 1e3)
                    self._pending.popleft()
            except RuntimeError:  # the device has failed; the program itself will get the error
                self._pending.clear()

    def write(self) -> None:
        with self._writing:
            with self._lock:
                process = {"pid": os.getpid(), "command": sys.argv, "seconds": time.monotonic() - self._started}
                calls = to_list(self._found.values())
            replace_file(self._file, json.dumps({"format": FORMAT, "version": VERSION, "process": process, "calls": calls}))

    def finish(self) -> None:
        """Waits until the device has finished all timed calls, and writes the file for the last time."""
        self._read_events(len(self._pending))
        super().finish()


def to_list(found: Iterable[CallTime]) -> list[Any]:
    """Converts times to JSON values."""
    return [[vars(each.kind), each.host.to_dict(), each.device.to_dict()] for each in found]


def read_times(folder: Path) -> tuple[list[Process], list[CallTime]]:
    """Reads the files of all profiled processes in a folder.

    Returns:
        The processes, the one that was profiled longest first, and the times of each kind of call in all processes together.

    Warns:
        StorageWarning: a file holds no times, and is skipped.
    """
    processes, total = [], dict[CallKind, CallTime]()
    for path in sorted(folder.glob("*.json")):
        try:
            table = json.loads(path.read_text())
            if (table["format"], table["version"]) != (FORMAT, VERSION):
                raise ValueError(f"it is {table['format']} {table['version']}")
            processes.append(Process(table["process"]["pid"], tuple(table["process"]["command"]), table["process"]["seconds"]))
            found = [
                CallTime(CallKind(**call), Times.from_dict(host), Times.from_dict(device)) for call, host, device in table["calls"]
            ]
        except (ValueError, TypeError, KeyError) as error:
            warnings.warn(f"{path} does not hold times of calls, and is left out: {error!r}", StorageWarning, stacklevel=2)
            continue
        for times in found:
            total.setdefault(times.kind, CallTime(times.kind)).merge(times)
    return sorted(processes, key=lambda process: -process.seconds), [*total.values()]


_times: CallTimes | None = None  # the instance that `time_calls` created
_lock = threading.Lock()


def time_calls(folder: Path) -> None:
    """Times every operator call from now until the process ends. Other processes may write their times to the same folder.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    global _times
    with _lock:
        if _times is not None:
            return
        try:
            _times = CallTimes(folder)
        except OSError as error:
            raise ConfigurationError(f"times of calls cannot be kept in {folder}: {error}") from error
        watch.start(_times.watch)
