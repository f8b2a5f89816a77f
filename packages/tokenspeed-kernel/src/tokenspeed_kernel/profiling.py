"""Seeing the calls: named scopes in a profile, and the shapes that were really run.

Both cost nothing while they are off, because then the dispatcher does not know of them: switching one on makes every call be
decided afresh (see `tokenspeed_kernel.memo`), and deciding is where calls are observed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel import memo
from tokenspeed_kernel.signature import dtype_name

MAX_RECORDS = 10_000

_profiling = False
_captures: tuple[ShapeCapture, ...] = ()
_started: ShapeCapture | None = None  # of them, the one that `start_shape_capture` began
_lock = threading.Lock()


@contextlib.contextmanager
def kernel_scope(family: str, mode: str, dtype: Any, *, kernel_name: str = "", **metrics: object) -> Iterator[None]:
    """A range of this name in the profile of ``torch.profiler`` while profiling is on; nothing otherwise.

    Args:
        family, mode: the operator.
        dtype: shown in the range's name.
        kernel_name: shown in the range's name.
        metrics: shown as the range's arguments.
    """
    if not _profiling:
        yield
        return
    dtype_text = dtype_name(dtype) if isinstance(dtype, torch.dtype) else str(dtype)
    label = f"{family}.{mode}[{dtype_text}]" + (f" {kernel_name}" if kernel_name else "")
    arguments = ", ".join(f"{key}={value}" for key, value in metrics.items())
    with torch.profiler.record_function(label, arguments or None):
        yield


def start_profiling() -> None:
    """Puts every operator call into a `kernel_scope` of its own. Idempotent."""
    global _profiling
    with _lock:
        if not _profiling:
            _profiling = True
            memo.enter_exceptional()


def stop_profiling() -> None:
    """Ends what `start_profiling` began; nothing if it was not begun."""
    global _profiling
    with _lock:
        if _profiling:
            _profiling = False
            memo.leave_exceptional()


def _plain(value: Any) -> Any:
    """An argument as JSON can hold it, without its data."""
    if isinstance(value, torch.Tensor):
        return {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "device": value.device.type}
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(member) for member in value]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: _plain(getattr(value, name)) for name in fields}
    return type(value).__name__


class ShapeCapture:
    """How often each operator ran with each combination of shapes, dtypes and options, and which kernel served it.

    Memory is bounded: after `MAX_RECORDS` distinct combinations, further new ones are only counted, in ``dropped``.
    """

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, dict[str, Any]] = {}
        self._max_records = max_records
        self.dropped = 0

    def record(self, family: str, mode: str, kernel_name: str, arguments: Mapping[str, Any], traits: Mapping[str, Any]) -> None:
        entry: dict[str, Any] = {
            "operator": f"{family}.{mode}",
            "kernel": kernel_name,
            "traits": {name: _plain(value) for name, value in traits.items()},
            "arguments": {name: _plain(value) for name, value in arguments.items()},
        }
        key = json.dumps(entry, sort_keys=True)
        with self._lock:
            if key in self._records:
                self._records[key]["count"] += 1
            elif len(self._records) < self._max_records:
                self._records[key] = {**entry, "count": 1}
            else:
                self.dropped += 1

    def get(self) -> list[dict[str, Any]]:
        """The records, the most frequent first."""
        with self._lock:
            return sorted((dict(r) for r in self._records.values()), key=lambda record: -record["count"])

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self.dropped = 0

    reset = clear

    def dump(self, path: str | Path) -> None:
        """Writes the records, one JSON object a line. The file is whole at any time: it is written aside and renamed."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        try:
            with os.fdopen(handle, "w") as file:
                file.writelines(json.dumps(record) + "\n" for record in self.get())
            os.replace(aside, target)
        except BaseException:
            os.unlink(aside)
            raise


def start_shape_capture() -> ShapeCapture:
    """Records every operator call from now on, in this process. Returns the capture, the one begun before if it still runs."""
    global _started
    with _lock:
        if _started is None:
            _started = _begin()
        return _started


def stop_shape_capture(output_path: str | Path | None = None) -> list[dict[str, Any]]:
    """Ends what `start_shape_capture` began and writes it, if a path is given. Returns the records; none if it was not begun."""
    global _started
    with _lock:
        capture, _started = _started, None
        if capture is None:
            return []
        _end(capture)
    if output_path is not None:
        capture.dump(output_path)
    return capture.get()


@contextlib.contextmanager
def shape_capture(output_path: str | Path | None = None) -> Iterator[ShapeCapture]:
    """Records the calls made while the block runs, by any thread; written to ``output_path`` at its end, if given, also when the
    block raises. Blocks nest, each with a capture of its own."""
    with _lock:
        capture = _begin()
    try:
        yield capture
    finally:
        with _lock:
            _end(capture)
        if output_path is not None:
            capture.dump(output_path)


def _begin() -> ShapeCapture:
    global _captures
    capture = ShapeCapture()
    _captures = (*_captures, capture)
    memo.enter_exceptional()
    return capture


def _end(capture: ShapeCapture) -> None:
    global _captures
    _captures = tuple(c for c in _captures if c is not capture)
    memo.leave_exceptional()


def capture_to_file_at_exit(path: Path) -> None:
    """Records the whole process and writes the file when it ends."""
    start_shape_capture()
    atexit.register(stop_shape_capture, path)


def observing() -> bool:
    """Whether calls have to be observed."""
    return _profiling or bool(_captures)


def observe(
    family: str,
    mode: str,
    kernel_name: str,
    dtype: torch.dtype,
    arguments: Mapping[str, Any],
    traits: Mapping[str, Any],
    call: Callable[..., Any],
) -> Callable[..., Any]:
    """``call`` as it must be made for one call while something observes: recorded, and inside a scope."""
    for capture in _captures:
        capture.record(family, mode, kernel_name, arguments, traits)
    if not _profiling:
        return call

    def scoped(*args: Any) -> Any:
        with kernel_scope(family, mode, dtype, kernel_name=kernel_name):
            return call(*args)

    return scoped
