"""Tests scalar stores and atomics against the definitions of the CDNA4 ISA document (chapter "Scalar memory operations")."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import EmulationError, SanitizerError

from .isa import MASK32, atomics, implemented, random_words

INTEGER = {
    **{name: (f, 32) for name, f in atomics(32).items() if "_f" not in name and not name.startswith("pk_")},
    **{f"{name}_x2": (f, 64) for name, f in atomics(64).items() if "_f" not in name},
    "cmpswap": (None, 32),
    "cmpswap_x2": (None, 64),
}
KINDS = {"": "s[4:5]", "buffer_": "s[4:7]"}


def test_every_scalar_store_is_tested() -> None:
    stores = {f"s_{kind}store_{size}" for kind in KINDS for size in ("dword", "dwordx2", "dwordx4")}
    assert implemented("scalar_stores") == stores | {f"s_{kind}atomic_{name}" for kind in KINDS for name in INTEGER}


def state(memory: np.ndarray, records: int = 1 << 20) -> dict:
    at = memory.ctypes.data
    return {4: at & MASK32, 5: at >> 32 & 0xFFFF, 6: records, 7: 0x27000}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "data"), [("dword", "s20"), ("dwordx2", "s[20:21]"), ("dwordx4", "s[20:23]")])
@pytest.mark.parametrize("offset", ["0x40", "m0", "m0 offset:0x10"])
def test_stores(kind: str, size: str, data: str, offset: str) -> None:
    """Every wave stores once, to its own address. EXEC does not matter, and the lowest two bits of the offset are ignored."""
    count, words = {"dword": 1, "dwordx2": 2, "dwordx4": 4}[size], np.arange(7, 11, dtype=np.int64)
    memory = np.zeros(256, np.uint32)
    shifts = np.array([0x83, 0x101, 0x182])
    values = {20 + i: np.array([100 * w + int(words[i]) for w in range(3)]) for i in range(4)}
    Snippet(
        f"s_{kind}store_{size} {data}, {KINDS[kind]}, {offset} glc\ns_waitcnt lgkmcnt(0)",
        s={**state(memory), **values, "m0": shifts, "exec": 0},
        waves=3,
        arrays=[memory],
        sanitize=True,
    ).run()
    expected = np.zeros(256, np.uint32)
    for wave in range(3):
        shift = {"0x40": 0x40, "m0": int(shifts[wave]), "m0 offset:0x10": int(shifts[wave]) + 0x10}[offset]
        expected[shift // 4 : shift // 4 + count] = [int(values[20 + i][wave]) for i in range(count)]
    assert memory.tolist() == expected.tolist()


def test_dwords_beyond_a_buffer_are_dropped() -> None:
    for records in (0, 15, 16, 19, 20, 24):
        memory = np.zeros(16, np.uint32)
        s = {**state(memory, records), 20: 1, 21: 2, 22: 3, 23: 4}
        Snippet("s_buffer_store_dwordx4 s[20:23], s[4:7], 0xc", s=s, arrays=[memory]).run()
        kept = max(0, min(4, (records - 12) // 4))
        assert memory.tolist() == [0] * 3 + [1, 2, 3, 4][:kept] + [0] * (13 - kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INTEGER)
def test_atomics(name: str, kind: str) -> None:
    function, bits = INTEGER[name]
    words, rng = bits // 32, np.random.default_rng(len(name))
    data = f"s[20:{20 + words * (1 if function else 2) - 1}]" if words * (1 if function else 2) > 1 else "s20"
    for old, operand in zip(random_words(rng, 12, bits), random_words(rng, 12, bits), strict=True):
        for compare in (old, operand) if function is None else (0,):
            for returns in (False, True):
                memory = np.array([old], np.uint64).view(np.uint32).copy()
                both = operand | compare << bits
                s = {20 + i: both >> 32 * i & MASK32 for i in range(4)}
                line = f"s_{kind}atomic_{name} {data}, {KINDS[kind]}, 0x0{' glc' if returns else ''}\ns_waitcnt lgkmcnt(0)"
                snippet = Snippet(line, s={**state(memory), **s, "exec": 0}, arrays=[memory], sanitize=True).run()
                new = function(old, operand) if function else operand if old == compare else old
                assert int(memory.view(np.uint64)[0]) == new | (old >> bits << bits)
                found = sum(int(snippet.s(20 + i)) << 32 * i for i in range(words))
                assert found == (old if returns else operand)


def test_waves_in_order() -> None:
    """Every wave of the workgroup adds once, and gets the sum of the waves before it."""
    memory = np.zeros(4, np.uint32)
    s = Snippet(
        "s_atomic_add s20, s[4:5], 0x4 glc", s={**state(memory), 20: np.array([1, 10, 100])}, waves=3, arrays=[memory]
    ).run()
    assert memory.tolist() == [0, 111, 0, 0]
    assert list(s.s(20)) == [0, 1, 11]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("s_atomic_add_x2 s[20:21], s[4:5], 0x4", "misaligned"),
        ("s_atomic_add s20, s[4:5], 0x100", "out-of-bounds"),
        ("s_store_dword s20, s[4:5], 0x100", "out-of-bounds"),
    ],
)
def test_errors(line: str, kind: str) -> None:
    memory = np.zeros(8, np.uint64)
    with pytest.raises(SanitizerError) as error:
        Snippet(line, s={**state(memory), 20: 1, 21: 0}, arrays=[memory]).run()
    assert error.value.kind == kind
    assert isinstance(error.value, EmulationError)


def test_a_result_needs_a_wait() -> None:
    memory = np.zeros(8, np.uint32)
    text = "s_atomic_add s20, s[4:5], 0x4 glc\ns_mov_b32 s8, s20"
    with pytest.raises(SanitizerError, match="s20 is used before an s_waitcnt lgkmcnt"):
        Snippet(text, s={**state(memory), 20: 1}, arrays=[memory], sanitize=True).run()
