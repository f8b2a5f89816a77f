"""Helpers for the instruction tests: corner-case values, and the list of implemented instructions."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

import gfx950_emulator.instructions  # noqa: F401  (registers the binders)
from gfx950_emulator.binding import BINDERS

WAVE = 64
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
SPECIAL32 = (
    0, 1, 2, 31, 32, 63, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x55555555, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, MASK32,
)  # fmt: skip
SPECIAL64 = (
    0, 1, 63, MASK32, 1 << 32, (1 << 32) - 2, 1 << 31, 0x5555555555555555, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, MASK64 - 1,
    MASK64,
)  # fmt: skip


def implemented(*families: str) -> set[str]:
    """Returns the mnemonics, without encoding suffix, that modules of `gfx950_emulator.instructions` bind."""
    modules = {f"gfx950_emulator.instructions.{family}" for family in families}
    return {mnemonic for mnemonic, binder in BINDERS.items() if binder.__module__ in modules}


def signed(value: int, bits: int = 32) -> int:
    """Converts bits to a two's complement number."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def random_words(rng: np.random.Generator, count: int, bits: int = 32) -> list[int]:
    """Returns random integers of all magnitudes: all bit lengths are equally frequent."""
    return [int(rng.integers(0, 1 << 63)) * 2 + int(rng.integers(2)) >> int(rng.integers(64 - bits, 64)) for _ in range(count)]


def random_lanes(rng: np.random.Generator, waves: int = 1) -> np.ndarray:
    """Returns a random uint32 per lane."""
    return rng.integers(0, 1 << 32, WAVE * waves, dtype=np.uint32)


def bits_of(mask: int) -> np.ndarray:
    """Converts 64 bits to one bool per lane."""
    return np.array([mask >> lane & 1 for lane in range(WAVE)], bool)


# Definitions of atomics


def _bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def _add_bf16(a: int, b: int) -> int:
    """Returns the sum of two bf16 values: added in float32, and rounded to bf16, to nearest even."""
    total = np.float32(_bf16(a)) + np.float32(_bf16(b))
    bits = struct.unpack("<I", struct.pack("<f", total))[0]
    if np.isnan(total):
        return bits >> 16 | 0x40
    kept, rest = bits >> 16, bits & 0xFFFF
    return kept + (rest > 0x8000 or (rest == 0x8000 and kept & 1))


def _add_f16(a: int, b: int) -> int:
    x, y = (struct.unpack("<e", struct.pack("<H", v))[0] for v in (a, b))
    try:
        return struct.unpack("<H", struct.pack("<e", x + y))[0]
    except OverflowError:
        return 0x7C00 if x + y > 0 else 0xFC00


def _halves(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda a, b: function(a & 0xFFFF, b & 0xFFFF) | function(a >> 16, b >> 16) << 16


def _float(function: Callable[[float, float], float], bits: int) -> Callable[[int, int], int]:
    code, number = ("<I", "<f") if bits == 32 else ("<Q", "<d")
    kind = np.float32 if bits == 32 else np.float64

    def apply(a: int, b: int) -> int:
        x, y = (kind(struct.unpack(number, struct.pack(code, v))[0]) for v in (a, b))
        return struct.unpack(code, struct.pack(number, function(x, y)))[0]

    return apply


def atomics(bits: int) -> dict[str, Callable[[int, int], int]]:
    """Returns the definitions of atomics from the ISA document's pseudocode. A definition maps the old value (a) and the operand
    (b) to the stored value."""
    mask = (1 << bits) - 1
    return {
        "swap": lambda a, b: b,
        "add": lambda a, b: a + b & mask,
        "sub": lambda a, b: a - b & mask,
        "smin": lambda a, b: b if signed(b, bits) < signed(a, bits) else a,
        "smax": lambda a, b: b if signed(b, bits) >= signed(a, bits) else a,
        "umin": lambda a, b: b if b < a else a,
        "umax": lambda a, b: b if b >= a else a,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
        f"add_f{bits}": _float(lambda x, y: x + y, bits),
        f"min_f{bits}": _float(lambda x, y: y if y < x else x, bits),
        f"max_f{bits}": _float(lambda x, y: y if y > x else x, bits),
        **({"pk_add_bf16": _halves(_add_bf16), "pk_add_f16": _halves(_add_f16)} if bits == 32 else {}),
    }
