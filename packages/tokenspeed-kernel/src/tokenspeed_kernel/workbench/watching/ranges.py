"""Marks each operator call as a named range in a profile."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tokenspeed_kernel_base import watch
from tokenspeed_kernel_base.signature import dtype_name

# PyTorch has ranges only in GPU builds. On ROCm its NVTX functions emit ROCTX ranges.
_MARKS_RANGES = torch.version.cuda is not None or torch.version.hip is not None

_profiling = False
_lock = threading.Lock()


@contextlib.contextmanager
def kernel_scope(
    family: str, mode: str, dtype: Any, *, kernel_name: str = "", shape: str = "", **metrics: object
) -> Iterator[None]:
    """Opens a named range while profiling is on; does nothing otherwise.

    These profilers show the range: ``torch.profiler``; Nsight Systems and other profilers that read NVTX; with PyTorch for ROCm,
    rocprof and other profilers that read ROCTX; and Triton's Proton, if a session has been started.

    Args:
        family, mode: the operator's name.
        dtype, kernel_name, shape: parts of the range's name. ``shape`` is the shape of the operands, such as ``"64x2880"``.
        metrics: values that ``torch.profiler`` shows as the range's arguments.
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
            torch.cuda.nvtx.range_push(label)
            ranges.callback(torch.cuda.nvtx.range_pop)
        # If Proton has not been imported, no session has been started, and there is nothing to do.
        proton = getattr(sys.modules.get("triton.profiler.scope"), "scope", None)
        if proton is not None:
            ranges.enter_context(proton(label))
        yield


def start_profiling() -> None:
    """Wraps every operator call in its own `kernel_scope`. Does nothing if profiling is already on."""
    global _profiling
    with _lock:
        if not _profiling:
            _profiling = True
            watch.start(_in_scope)


def stop_profiling() -> None:
    """Ends `start_profiling`; does nothing if profiling is off."""
    global _profiling
    with _lock:
        if _profiling:
            _profiling = False
            watch.stop(_in_scope)


def _in_scope(call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
    dtype, shapes = call.first.dtype, call.operand_shapes

    def scoped(*args: Any) -> Any:
        with kernel_scope(call.family, call.mode, dtype, kernel_name=call.kernel, shape=shapes):
            return run(*args)

    return scoped
