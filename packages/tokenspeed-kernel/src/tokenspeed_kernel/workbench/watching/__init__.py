"""Watches a program's operator calls: named ranges in a profile, times, captures of shapes, and replays of captured calls.

Ranges, times and captures are watchers, see `tokenspeed_kernel_base.watch`. They cost nothing while they are off.
"""

from tokenspeed_kernel.workbench.watching.captures import (
    ShapeCapture,
    capture_to_file,
    described,
    shape_capture,
    start_shape_capture,
    stop_shape_capture,
)
from tokenspeed_kernel.workbench.watching.ranges import kernel_scope, start_profiling, stop_profiling
from tokenspeed_kernel.workbench.watching.records import Contents, Record, UnreadableCaptureError, load, merge
from tokenspeed_kernel.workbench.watching.replay import ReplayError, load_cases, replay
from tokenspeed_kernel.workbench.watching.times import CallKind, CallTime, CallTimes, Process, Times, read_times, time_calls
from tokenspeed_kernel_base.config import Settings

__all__ = [
    "CallKind",
    "CallTime",
    "CallTimes",
    "Contents",
    "Process",
    "Record",
    "ReplayError",
    "ShapeCapture",
    "Times",
    "UnreadableCaptureError",
    "begin",
    "described",
    "kernel_scope",
    "load",
    "load_cases",
    "merge",
    "read_times",
    "replay",
    "shape_capture",
    "start_profiling",
    "start_shape_capture",
    "stop_profiling",
    "stop_shape_capture",
    "time_calls",
]


def begin(settings: Settings) -> None:
    """Starts the watchers that the settings enable. Called when the package is imported."""
    if settings.capture_path is not None:
        capture_to_file(settings.capture_path)
    if settings.profile:
        start_profiling()
    if settings.profile_folder is not None:
        time_calls(settings.profile_folder)
