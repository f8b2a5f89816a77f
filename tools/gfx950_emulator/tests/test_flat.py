"""Tests flat instructions against a byte-wise walk over the lanes. Each lane accesses global memory, LDS or its scratch memory.

Definition: chapter "Flat memory instructions" of the CDNA4 ISA document. The apertures are the emulator's.
"""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emulator.constants import PRIVATE_APERTURE, SHARED_APERTURE
from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import EmulationError, SanitizerError, UnknownInstruction

from .isa import MASK32, WAVE, bits_of, implemented, random_lanes
from .test_memory import ATOMICS, LOADS, STORES
from .walk import EXECS, loaded, span, stored

KINDS = ("global", "lds", "scratch")
FLAT_ATOMICS = {name: value for name, value in ATOMICS.items() if name not in ("min_f32", "max_f32")}


def test_every_flat_instruction_is_tested() -> None:
    names = {f"flat_load_{name}" for name in LOADS} | {f"flat_store_{name}" for name in STORES}
    assert implemented("flat") == names | {f"flat_atomic_{name}" for name in FLAT_ATOMICS}


class Flat:
    """Lanes with addresses in all three memories: 4 KiB of global memory, 4 KiB of LDS, and 64 bytes of scratch memory per lane."""

    def __init__(self, seed: int, mask: int, kinds: tuple[str, ...] = KINDS, immediate: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.memory = rng.integers(0, 256, 4096, dtype=np.uint8)
        self.lds = rng.integers(0, 256, 4096, dtype=np.uint8)
        self.before = {"global": bytes(self.memory), "lds": bytes(self.lds)}
        self.kind = [kinds[i] for i in rng.integers(0, len(kinds), WAVE)]
        slots = rng.permutation(240)[:WAVE] * 16 + 64
        self.at = [int(slots[lane]) if kind != "scratch" else 16 for lane, kind in enumerate(self.kind)]
        base = {"global": self.memory.ctypes.data, "lds": SHARED_APERTURE, "scratch": PRIVATE_APERTURE}
        self.addresses = np.array([base[k] + a - immediate for k, a in zip(self.kind, self.at, strict=True)], np.uint64)
        self.data = {i: random_lanes(rng) for i in range(8, 12)}
        self.scratch = {i: random_lanes(rng) for i in range(4, 8)}  # the 16 bytes of scratch memory from byte 16 on
        self.on, self.mask, self.immediate = bits_of(mask), mask, immediate

    def run(self, line: str, **more) -> Snippet:
        """Fills scratch memory, runs the line with the lanes of the mask, and reads scratch memory back to v12 to v15."""
        text = f"""scratch_store_dwordx4 off, v[4:7], off offset:16
            s_mov_b32 exec_lo, {self.mask & MASK32:#x}
            s_mov_b32 exec_hi, {self.mask >> 32:#x}
            {line}{f" offset:{self.immediate}" if self.immediate else ""}
            s_waitcnt vmcnt(0) lgkmcnt(0)
            s_mov_b64 exec, -1
            scratch_load_dwordx4 v[12:15], off, off offset:16
            s_waitcnt vmcnt(0)"""
        halves = {2: (self.addresses & np.uint64(MASK32)).astype(np.uint32), 3: (self.addresses >> np.uint64(32)).astype(np.uint32)}
        return Snippet(text, v={**halves, **self.data, **self.scratch}, lds=self.lds, arrays=[self.memory], **more).run()

    def bytes_of(self, lane: int, size: int) -> bytes:
        """Returns the bytes at a lane's address, before the access."""
        if self.kind[lane] == "scratch":
            return b"".join(int(self.scratch[i][lane]).to_bytes(4, "little") for i in range(4, 8))[:size]
        return self.before[self.kind[lane]][self.at[lane] :][:size]

    def check_memory(self, s: Snippet, changed: dict[int, bytes]) -> None:
        """Checks all memories after the access; ``changed`` has the bytes that lanes have stored."""
        expected = {name: bytearray(before) for name, before in self.before.items()}
        for lane in range(WAVE):
            data = changed.get(lane, b"")
            if self.kind[lane] != "scratch":
                expected[self.kind[lane]][self.at[lane] : self.at[lane] + len(data)] = data
                data = b""
            old = b"".join(int(self.scratch[i][lane]).to_bytes(4, "little") for i in range(4, 8))
            found = b"".join(int(s.v(i)[lane]).to_bytes(4, "little") for i in range(12, 16))
            assert found == data + old[len(data) :], lane
        assert bytes(self.memory) == bytes(expected["global"])
        assert bytes(s.lds) == bytes(expected["lds"])


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("name", LOADS)
def test_loads(name: str, sanitize: bool) -> None:
    size = LOADS[name][0]
    for seed, mask in enumerate(EXECS):
        case = Flat(seed, mask, immediate=seed * 3)
        s = case.run(f"flat_load_{name} {span(8, size)}, v[2:3]", sanitize=sanitize, counters=not sanitize)
        for lane in range(WAVE):
            old = [int(case.data[8 + i][lane]) for i in range(max(1, size // 4))]
            expected = loaded(LOADS[name], old, case.bytes_of(lane, size)) if case.on[lane] else old
            assert [int(s.v(8 + i)[lane]) for i in range(len(old))] == expected, (lane, case.kind[lane])
        case.check_memory(s, {})


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("name", STORES)
def test_stores(name: str, sanitize: bool) -> None:
    for seed, mask in enumerate(EXECS):
        case = Flat(seed, mask, immediate=seed * 4)
        s = case.run(f"flat_store_{name} v[2:3], {span(8, STORES[name][0])}", sanitize=sanitize, counters=not sanitize)
        lanes = np.flatnonzero(case.on).tolist()
        case.check_memory(s, {lane: stored(STORES[name], [int(case.data[8 + i][lane]) for i in range(4)]) for lane in lanes})


@pytest.mark.parametrize("name", FLAT_ATOMICS)
def test_atomics(name: str) -> None:
    """Without sc0 nothing is returned; with sc0 lanes of both memories get the old values."""
    function, bits = FLAT_ATOMICS[name]
    size, words = bits // 8, bits // 32
    for seed, mask in enumerate(EXECS):
        for returns in (False, True):
            case = Flat(seed, mask, ("global", "lds"))
            if name.endswith(("f32", "f64", "f16")):  # no infinities and NaN, whose results the document leaves open
                case.memory[:], case.lds[:] = case.memory & 0x3F, case.lds & 0x3F
                case.before = {"global": bytes(case.memory), "lds": bytes(case.lds)}
                case.data = {i: value & np.uint32(0x3F3F3F3F) for i, value in case.data.items()}
            data = span(8, size * (1 if function else 2))
            line = f"flat_atomic_{name} {span(16, size)}, v[2:3], {data} sc0" if returns else f"flat_atomic_{name} v[2:3], {data}"
            s, changed = case.run(line, counters=True), {}
            for lane in range(WAVE):
                old = int.from_bytes(case.bytes_of(lane, size), "little")
                word = [int(case.data[8 + i][lane]) for i in range(4)]
                first, second = (sum(word[words * i + j] << 32 * j for j in range(words)) for i in (0, 1))
                if not case.on[lane]:
                    continue
                new = function(old, first) if function else first if old == second else old
                changed[lane] = new.to_bytes(size, "little")
                if returns:
                    assert sum(int(s.v(16 + j)[lane]) << 32 * j for j in range(words)) == old, lane
            case.check_memory(s, changed)


def test_the_apertures() -> None:
    s = Snippet(
        """s_mov_b64 s[4:5], src_shared_base
        s_mov_b64 s[6:7], src_private_base
        s_mov_b64 s[8:9], src_shared_limit
        s_mov_b32 s10, src_shared_base
        v_mov_b32_e32 v1, src_private_base"""
    ).run()
    assert (s.s64(4), s.s64(6), s.s64(8)) == (SHARED_APERTURE, PRIVATE_APERTURE, SHARED_APERTURE | MASK32)
    assert s.s(10) == 0  # a 32-bit operand reads the lower half
    assert not s.v(1).any()


@pytest.mark.parametrize("wait", ["vmcnt(0)", "lgkmcnt(0)", "vmcnt(1) lgkmcnt(0)"])
def test_a_load_needs_both_counters(wait: str) -> None:
    data = np.zeros(64, np.uint32)
    at = data.ctypes.data
    text = f"flat_load_dword v4, v[2:3]\ns_waitcnt {wait}\nv_mov_b32_e32 v5, v4"
    state = {2: at & MASK32, 3: at >> 32}
    with pytest.raises(SanitizerError, match="v4 is used before an s_waitcnt") as error:
        Snippet(text, v=state, arrays=[data], sanitize=True).run()
    assert error.value.kind == "wait"
    Snippet(text.replace(wait, "vmcnt(0) lgkmcnt(0)"), v=state, arrays=[data], sanitize=True).run()


def test_a_load_completes_in_any_order() -> None:
    """While a flat load is outstanding, vmcnt(1) does not say which of two loads has completed, whichever was issued first."""
    data = np.zeros(64, np.uint32)
    at = data.ctypes.data
    loads = ["flat_load_dword v4, v[2:3]", "global_load_dword v6, v[2:3], off"]
    for order, first in ((loads, "v4"), (loads[::-1], "v6")):
        text = "\n".join((*order, f"s_waitcnt vmcnt(1) lgkmcnt(0)\nv_mov_b32_e32 v5, {first}"))
        with pytest.raises(SanitizerError, match=f"{first} is used before an s_waitcnt"):
            Snippet(text, v={2: at & MASK32, 3: at >> 32}, arrays=[data], sanitize=True).run()


@pytest.mark.parametrize("line", ["flat_load_dword v4, v[2:3]", "flat_store_dword v[2:3], v4"])
@pytest.mark.parametrize(("base", "limit"), [(SHARED_APERTURE, 64), (PRIVATE_APERTURE, 2**31)])
def test_out_of_bounds(line: str, base: int, limit: int) -> None:
    at = base + limit
    v = {2: at & MASK32, 3: at >> 32, 4: 0}
    with pytest.raises(SanitizerError) as error:
        Snippet(line, v=v, s={"exec": 1}, lds=bytes(64), sanitize=True).run()
    assert error.value.kind == "out-of-bounds"


def test_scratch_that_was_never_written() -> None:
    text = "flat_load_dword v4, v[2:3]\ns_waitcnt vmcnt(0) lgkmcnt(0)\nglobal_store_dword v5, v4, s[4:5]"
    data = np.zeros(64, np.uint32)
    s = {4: data.ctypes.data & MASK32, 5: data.ctypes.data >> 32}
    with pytest.raises(SanitizerError) as error:
        Snippet(text, v={2: 16, 3: PRIVATE_APERTURE >> 32, 5: 0}, s=s, arrays=[data], sanitize=True).run()
    assert error.value.kind == "uninitialised"


def test_what_is_not_defined() -> None:
    with pytest.raises(EmulationError, match="of scratch memory has no defined result"):
        Snippet("flat_atomic_add v[2:3], v4", v={2: 0, 3: PRIVATE_APERTURE >> 32, 4: 1}).run()
    with pytest.raises(UnknownInstruction):
        Snippet("flat_load_dword v4, v[2:3] tfe")
