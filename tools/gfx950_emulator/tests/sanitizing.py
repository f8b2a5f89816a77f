"""Runs snippets under the sanitizer, for its tests: registers and memory, and checks of the report."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import SanitizerError

from .isa import WAVE

LANES = np.arange(4 * WAVE, dtype=np.uint32)


class Memory:
    """Two arrays for the instructions: 4 KiB, addressed by s[4:5] and the buffer s[4:7], and 4 KiB at s[8:9]."""

    def __init__(self) -> None:
        self.x = np.arange(1024, dtype=np.uint32)
        self.y = np.zeros(1024, np.uint32)
        self.scalars = {4: self.x.ctypes.data, 6: 0x7FFFFFFE, 7: 0x27000, 8: self.y.ctypes.data}


def run(text: str, memory: Memory | None = None, **state) -> Snippet:
    """Runs with v1 = 4 * lane. Besides v1, only v2 and the registers that the text writes are initialised."""
    memory = memory or Memory()
    waves = state.get("waves", 1)
    vectors = {1: 4 * LANES[: waves * WAVE], 2: LANES[: waves * WAVE] + np.uint32(1000), **state.pop("v", {})}
    scalars = {**memory.scalars, **state.pop("s", {})}
    return Snippet(text, v=vectors, s=scalars, arrays=[memory.x, memory.y], sanitize=True, registers=32, **state).run()


def reported(text: str, kind: str, at: str, match: str | None = None, **state) -> SanitizerError:
    """Asserts that running the text raises a report of this kind at this instruction (its first words)."""
    with pytest.raises(SanitizerError, match=match) as caught:
        run(text, **state)
    assert caught.value.kind == kind
    assert caught.value.instruction.text.startswith(at), caught.value.instruction.text
    assert f"{kind}: " in str(caught.value)
    assert caught.value.instruction.text in str(caught.value)
    return caught.value


FULL = np.zeros(1024, np.uint8)  # initialised LDS; an int instead of an array means uninitialised LDS
