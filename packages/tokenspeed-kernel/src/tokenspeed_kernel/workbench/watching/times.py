"""How long calls take, counted by operator, kernel and shapes, while a program runs as it always does.

Memory is bounded, however long the program runs: of each kind of call the times go into bins that are 1% wide, so a median is
right to half of that, and the counts of several processes add up. Each process keeps a file of its own in one folder, replaced
every second and when the process ends: what a killed process loses is that second.

On a GPU a call is timed by events on its stream. Where the device waits for the host to launch, as it does when a program
issues one small kernel after another, the time between two events would be that of the host. So the device spins while the host
issues a call, and a call whose issuing took longer than that (the first one, which is compiled) does not count there.
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
# At most so many kinds of calls are counted apart. The shapes of further ones are ignored.
MAX_KINDS = 10_000
OTHER_SHAPES = "other shapes"
_BINS_PER_E = 1 / math.log(1.01)
_SECONDS_BETWEEN_WRITES = 1.0
# From so many calls on whose events have not been read, reading them is tried; from so many on, it waits for the device.
_SOME_PENDING, _MAX_PENDING = 32, 1024
# How long the device spins: twice what it takes to issue such a call, between these two. No device's clock is faster.
_CYCLES_PER_US = 2500
_FIRST_SPIN_US, _LONGEST_SPIN_US = 100.0, 2000.0


@dataclass(frozen=True)
class CallKind:
    """What calls have in common that are counted together. ``shape`` is that of the operands, ``dtype`` the first one's."""

    operator: str
    kernel: str
    dtype: str
    shape: str


@dataclass
class Times:
    """Times of calls, in microseconds: how many, their sum, the least, and how many in each bin; bin i begins at 1.01**i us."""

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
        """The middle of the median's bin; 0 if there are no times."""
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
    """Times of one kind of calls: until each returned to its caller, and on the device.

    ``device`` has fewer calls than ``host``, none on a CPU or in a CUDA graph: see this module's beginning.
    """

    kind: CallKind
    host: Times = field(default_factory=Times)
    device: Times = field(default_factory=Times)

    def merge(self, other: CallTime) -> None:
        self.host.merge(other.host)
        self.device.merge(other.device)


@dataclass(frozen=True)
class Process:
    """One process of a profiled program, ``seconds`` after it began to be profiled."""

    pid: int
    command: tuple[str, ...]
    seconds: float


class CallTimes(Background):
    """Times of the calls of this process, kept in a file of a folder that other processes may share.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "times of calls", _SECONDS_BETWEEN_WRITES)
        self.write()
        atexit.register(self.finish)

    def _restart(self) -> None:
        super()._restart()
        assert self._place is not None
        self._file = self._place / f"{os.getpid()}-{uuid4().hex}.json"
        self._found: dict[CallKind, CallTime] = {}
        self._pending: deque[tuple[CallTime, Any, Any]] = deque()
        self._started = time.monotonic()
        self._local = threading.local()

    def watch(self, call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
        """A watcher of calls that times each one."""
        kind = CallKind(f"{call.family}.{call.mode}", call.kernel, dtype_name(call.first.dtype), call.operand_shapes)
        return self.timed(kind, call.first.device, run)

    def timed(self, kind: CallKind, device: torch.device, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, whose time is counted. A call made inside another is part of that one; one that raises does not count."""

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
        """What it returns, and the microseconds until it did."""
        start = time.perf_counter_ns()
        result = call(*args)
        host_us = (time.perf_counter_ns() - start) / 1e3
        with self._lock:
            found.host.add(host_us)
        return result, host_us

    def _run_on_device(self, found: CallTime, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        spin_us = min(2 * found.host.least_us, _LONGEST_SPIN_US) if found.host.count > 1 else _FIRST_SPIN_US
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(spin_us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]
        begin.record()
        result, host_us = self._run(found, call, args)
        end.record()
        if host_us < spin_us:
            with self._lock:
                self._pending.append((found, begin, end))
        # Not in the thread that writes: looking at events would spoil the capture of a graph, even one in another thread.
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
        """Takes the times of calls that the device has finished, and waits for so many of them."""
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
            except RuntimeError:  # the device has failed, which the program will notice
                self._pending.clear()

    def write(self) -> None:
        with self._writing:
            with self._lock:
                process = {"pid": os.getpid(), "command": sys.argv, "seconds": time.monotonic() - self._started}
                calls = to_list(self._found.values())
            replace_file(self._file, json.dumps({"format": FORMAT, "version": VERSION, "process": process, "calls": calls}))

    def finish(self) -> None:
        """Waits for the device, and writes for the last time."""
        self._read_events(len(self._pending))
        super().finish()


def to_list(found: Iterable[CallTime]) -> list[Any]:
    """As JSON can hold it."""
    return [[vars(each.kind), each.host.to_dict(), each.device.to_dict()] for each in found]


def read_times(folder: Path) -> tuple[list[Process], list[CallTime]]:
    """What the processes that kept times in a folder did, the longest-running first, and their calls added up. A file of something
    else is left out.

    Warns:
        StorageWarning: for each file that is left out.
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


_times: CallTimes | None = None  # those that `time_calls` began
_lock = threading.Lock()


def time_calls(folder: Path) -> None:
    """Counts the times of every operator call from now until the process ends, in a folder that other processes may share.

    Raises:
        ConfigurationError: nothing can be written there.
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
