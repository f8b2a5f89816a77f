"""Named ranges in a profile, one for each operator call."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tokenspeed_kernel_base import watch
from tokenspeed_kernel_base.signature import dtype_name

# PyTorch has ranges only where it is built for a GPU. On ROCm, those that it calls NVTX are ROCTX.
_MARKS_RANGES = torch.version.cuda is not None or torch.version.hip is not None

_profiling = False
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


def _in_scope(call: watch.Call, run: Callable[..., Any]) -> Callable[..., Any]:
    dtype, shapes = call.first.dtype, call.operand_shapes

    def scoped(*args: Any) -> Any:
        with kernel_scope(call.family, call.mode, dtype, kernel_name=call.kernel, shape=shapes):
            return run(*args)

    return scoped
