"""What was really called: counted in memory, kept in a file that many processes share. `tokenspeed_kernel.workbench.capture` reads it."""

from tokenspeed_kernel.workbench.recording.journal import Contents, Journal, Record, UnreadableCaptureError, read, write
from tokenspeed_kernel.workbench.recording.recorder import MAX_RECORDS, ShapeCapture, Work, described

__all__ = [
    "MAX_RECORDS",
    "Contents",
    "Journal",
    "Record",
    "ShapeCapture",
    "UnreadableCaptureError",
    "Work",
    "described",
    "read",
    "write",
]
