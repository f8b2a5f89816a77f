"""What can be done with captured shapes: read them, add them up, and run calls like them.

`tokenspeed_kernel.shape_capture`, or the environment variable ``TOKENSPEED_KERNEL_CAPTURE_SHAPES``, writes the files.
"""

from tokenspeed_kernel.workbench.capture.replay import CapturedCase, ReplayError, load_cases, replay
from tokenspeed_kernel.workbench.capture.store import load, merge
from tokenspeed_kernel.workbench.recording import Contents, UnreadableCaptureError

__all__ = ["CapturedCase", "Contents", "ReplayError", "UnreadableCaptureError", "load", "load_cases", "merge", "replay"]
