"""A byte-wise reference for memory instructions: each lane's loads and stores, and the lanes' test data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950_emulator.snippet import Snippet

from .isa import MASK32, MASK64, WAVE, bits_of, random_lanes

# For each load: the number of bytes, whether the value is signed, and the register bits that it occupies: all bits, or one half
# (the other half is kept).
Load = tuple[int, bool, str]
# For each store: the number of bytes, and the first bit of the register that is stored.
Store = tuple[int, int]
EXECS = [MASK64, 0x00000000FFFFFFFF, 0x8000000000000001, 0x5A5A5A5A5A5A5A5A, 0]


def loaded(kind: Load, old: list[int], data: bytes) -> list[int]:
    """Returns the registers after a load of ``data``."""
    size, is_signed, part = kind
    if size >= 4:
        return [int.from_bytes(data[i : i + 4], "little") for i in range(0, size, 4)]
    value = int.from_bytes(data, "little", signed=is_signed)
    if part == "low":
        return [old[0] & 0xFFFF0000 | value & 0xFFFF]
    if part == "high":
        return [old[0] & 0xFFFF | (value & 0xFFFF) << 16]
    return [value & MASK32]


def stored(kind: Store, registers: list[int]) -> bytes:
    """Returns the bytes that a store of the registers writes."""
    size, first = kind
    whole = b"".join(r.to_bytes(4, "little") for r in registers)
    return whole[first // 8 : first // 8 + size]


def span(first: int, size: int, file: str = "v") -> str:
    """Returns the registers that hold ``size`` bytes, in assembler syntax."""
    count = max(1, size // 4)
    return f"{file}{first}" if count == 1 else f"{file}[{first}:{first + count - 1}]"


class Case:
    """The lanes' state: offsets into 4 KiB of memory, and registers v8 to v11. These registers hold the data to store, or the old
    values before a load."""

    def __init__(self, seed: int, waves: int = 1, exec_mask: int = MASK64) -> None:
        rng = np.random.default_rng(seed)
        self.waves = waves
        self.memory = rng.integers(0, 256, 4096, dtype=np.uint8)
        self.before = bytes(self.memory)
        self.address = self.memory.ctypes.data
        self.lanes = WAVE * waves
        self.data = {i: random_lanes(rng, waves) for i in range(8, 12)}
        self.on = np.tile(bits_of(exec_mask), waves)
        self.exec = exec_mask
        # The lanes' offsets are distinct slots of 16 bytes each, in random order.
        self.offsets = (rng.permutation(240)[: self.lanes] * 16 + 64).astype(np.uint32)

    def run(self, text: str, v: dict | None = None, s: dict | None = None, **more) -> Snippet:
        state = {"exec": self.exec, 4: self.address, 5: self.address >> 32 & 0xFFFF, 6: 4096, 7: 0x27000, **(s or {})}
        vectors = {1: self.offsets, **self.data, **(v or {})}
        return Snippet(text, v=vectors, s=state, waves=self.waves, arrays=[self.memory], registers=12, **more).run()

    def check_load(self, s: Snippet, kind: Load, data_of: Callable[[int], bytes]) -> None:
        """Checks the registers after a load. ``data_of(lane)`` is the data that a lane loads. Inactive lanes keep their
        registers."""
        words = max(1, kind[0] // 4)
        for lane in range(self.lanes):
            old = [int(self.data[8 + i][lane]) for i in range(words)]
            expected = loaded(kind, old, data_of(lane)) if self.on[lane] else old
            assert [int(s.v(8 + i)[lane]) for i in range(words)] == expected, lane
        assert bytes(self.memory) == self.before

    def check_store(self, kind: Store, place_of: Callable[[int], tuple[int, int]]) -> None:
        """Checks the memory after a store. ``place_of(lane)`` is the offset of a lane's store, and the number of its bytes that are
        in bounds."""
        expected = bytearray(self.before)
        for lane in range(self.lanes):
            if self.on[lane]:
                data = stored(kind, [int(self.data[8 + i][lane]) for i in range(4)])
                at, inside = place_of(lane)
                expected[at : at + min(inside, len(data))] = data[: min(inside, len(data))]
        assert bytes(self.memory) == bytes(expected)
