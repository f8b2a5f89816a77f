"""Helpers for the sanitizer's tests: they run snippets under the sanitizer, with registers and memory, and check the reports."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import SanitizerError

from .isa import WAVE

LANES = np.arange(4 * WAVE, dtype=np.uint32)


class Memory:
    """Two arrays of 4 KiB for the instructions. s[4:5] is the address of the first array, and s[4:7] its buffer resource. s[8:9] is
    the address of the second array."""

    def __init__(self) -> None:
        self.x = np.arange(1024, dtype=np.uint32)
        self.y = np.zeros(1024, np.uint32)
        self.scalars = {4: self.x.ctypes.data, 6: 0x7FFFFFFE, 7: 0x27000, 8: self.y.ctypes.data}


def run(text: str, memory: Memory | None = None, **state) -> Snippet:
    """Runs the text with v1 = 4 * lane. Besides v1, only v2 and the registers that the text writes are initialised."""
    memory = memory or Memory()
    waves = state.get("waves", 1)
    vectors = {1: 4 * LANES[: waves * WAVE], 2: LANES[: waves * WAVE] + np.uint32(1000), **state.pop("v", {})}
    scalars = {**memory.scalars, **state.pop("s", {})}
    return Snippet(text, v=vectors, s=scalars, arrays=[memory.x, memory.y], sanitize=True, registers=32, **state).run()


def reported(text: str, kind: str, at: str, match: str | None = None, **state) -> SanitizerError:
    """Asserts that running the text raises a report of this kind. `at` is the beginning of the reported instruction."""
    with pytest.raises(SanitizerError, match=match) as caught:
        run(text, **state)
    assert caught.value.kind == kind
    assert caught.value.instruction.text.startswith(at), caught.value.instruction.text
    assert f"{kind}: " in str(caught.value)
    assert caught.value.instruction.text in str(caught.value)
    return caught.value


FULL = np.zeros(1024, np.uint8)  # initialised LDS; for uninitialised LDS, tests pass its size instead
