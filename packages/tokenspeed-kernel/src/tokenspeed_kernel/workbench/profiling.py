"""Seeing the calls: named scopes in a profile, and the shapes that were really run.

Both cost nothing while they are off: each is a watcher of calls, see `tokenspeed_kernel_base.watch`. How captured shapes are kept is
`tokenspeed_kernel.workbench.recording`, what can be done with them `tokenspeed_kernel.workbench.capture`.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tokenspeed_kernel.workbench.call_times import CallKind, CallTimes
from tokenspeed_kernel.workbench.recording import Record, ShapeCapture
from tokenspeed_kernel_base import watch
from tokenspeed_kernel_base.config import ConfigurationError, Settings
from tokenspeed_kernel_base.signature import FormatSignature, dtype_name

# Without a GPU in mind PyTorch is built without ranges. On ROCm, those that it calls NVTX are ROCTX.
_MARKS_RANGES = torch.version.cuda is not None or torch.version.hip is not None

_profiling = False
_times: CallTimes | None = None
_started: ShapeCapture | None = None  # of them, the one that `start_shape_capture` began
_lock = threading.Lock()


@contextlib.contextmanager
def kernel_scope(
    family: str, mode: str, dtype: Any, *, kernel_name: str = "", shape: str = "", **metrics: object
) -> Iterator[None]:
    """A range of this name while profiling is on; nothing otherwise.

    It is seen by whichever profiler looks: ``torch.profiler``; those that read NVTX (Nsight Systems) or, with PyTorch for ROCm,
    ROCTX (rocprof); and Triton's Proton, if a session of it has been started.

    Args:
        family, mode: the operator.
        dtype, kernel_name, shape: shown in the range's name; ``shape`` is that of what is worked on, ``"64x2880"``.
        metrics: shown as the range's arguments by ``torch.profiler``.
    """
    if not _profiling:
        yield
        return
    dtype_text = dtype_name(dtype) if isinstance(dtype, torch.dtype) else str(dtype)
    label = " ".join(filter(None, (f"{family}.{mode}[{dtype_text}]", kernel_name, shape)))
    arguments = ", ".join(f"{key}={value}" for key, value in metrics.items())
    with contextlib.ExitStack() as ranges:
        ranges.enter_context(torch.profiler.record_function(label, arguments or None))
        if _MARKS_RANGES:
            torch.cuda.nvtx.range_push(label)  # type: ignore[no-untyped-call]
            ranges.callback(torch.cuda.nvtx.range_pop)
        # Whoever has started a session has imported it.
        proton = getattr(sys.modules.get("triton.profiler.scope"), "scope", None)
        if proton is not None:
            ranges.enter_context(proton(label))
        yield


def start_profiling() -> None:
    """Puts every operator call into a `kernel_scope` of its own. Idempotent."""
    global _profiling
    with _lock:
        if not _profiling:
            _profiling = True
            watch.start(_in_scope)


def stop_profiling() -> None:
    """Ends what `start_profiling` began; nothing if it was not begun."""
    global _profiling
    with _lock:
        if _profiling:
            _profiling = False
            watch.stop(_in_scope)


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
        watch.start(_timed)


def start_shape_capture(path: str | Path | None = None) -> ShapeCapture:
    """Records every operator call from now on, in this process. Returns the capture, the one begun before if it still runs.

    Args:
        path: a file that the records are added to, which other processes may do at the same time. What has been captured is there
            a second later, also if the process is killed; `tokenspeed_kernel.workbench.capture.load` reads it.

    Raises:
        OSError: nothing can be written there.
    """
    global _started
    with _lock:
        if _started is None:
            _started = _begin(path)
        return _started


def stop_shape_capture(output_path: str | Path | None = None) -> list[Record]:
    """Ends what `start_shape_capture` began and writes it, if a path is given. Returns the records; none if it was not begun."""
    global _started
    with _lock:
        capture, _started = _started, None
        if capture is None:
            return []
        _end(capture)
    capture.finish()
    if output_path is not None:
        capture.dump(output_path)
    return capture.get()


@contextlib.contextmanager
def shape_capture(output_path: str | Path | None = None) -> Iterator[ShapeCapture]:
    """Records the calls made while the block runs, by any thread. Blocks nest, each with a capture of its own.

    Args:
        output_path: see `start_shape_capture`.
    """
    with _lock:
        capture = _begin(output_path)
    try:
        yield capture
    finally:
        with _lock:
            _end(capture)
        capture.finish()


def _begin(path: str | Path | None) -> ShapeCapture:
    capture = ShapeCapture(path)
    watch.start(capture.watch)
    return capture


def _end(capture: ShapeCapture) -> None:
    watch.stop(capture.watch)


def capture_to_file(path: Path) -> None:
    """Records the whole process.

    Raises:
        ConfigurationError: nothing can be written there.
    """
    try:
        start_shape_capture(path)
    except OSError as error:
        raise ConfigurationError(f"shapes cannot be captured to {path}: {error}") from error
    atexit.register(stop_shape_capture)


def _timed(call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
    assert _times is not None
    first = next(iter(call.tensors.values()))
    kind = CallKind(f"{call.family}.{call.mode}", call.kernel, dtype_name(first.dtype), _shape_of(call.signature, call.tensors))
    return _times.timed(kind, first.device, run)


def _in_scope(call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
    first, shape = next(iter(call.tensors.values())), _shape_of(call.signature, call.tensors)

    def scoped(*args: Any) -> Any:
        with kernel_scope(call.family, call.mode, first.dtype, kernel_name=call.kernel, shape=shape):
            return run(*args)

    return scoped


def _shape_of(signature: FormatSignature, tensors: Mapping[str, torch.Tensor]) -> str:
    """The shapes of the operands that make the signature, each once, in the order of the parameters: ``"64x64x64,8x64"``."""
    roles = {role for role, _ in signature.roles}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        _, of_object, attribute = name.rpartition(".")
        # Of an object w13_weight comes first of what belongs to the role w13.
        role = attribute.partition("_")[0] if of_object else name
        if role in roles:
            found.setdefault(role, tensor)
    operands = found.values() or [*tensors.values()][:1]
    shapes = ["x".join(map(str, tensor.shape)) for tensor in operands]
    return ",".join(dict.fromkeys(shapes))


def begin(settings: Settings) -> None:
    """Watches calls as the settings say, from the import of the package on."""
    if settings.capture_path is not None:
        capture_to_file(settings.capture_path)
    if settings.profile:
        start_profiling()
    if settings.profile_folder is not None:
        time_calls(settings.profile_folder)
