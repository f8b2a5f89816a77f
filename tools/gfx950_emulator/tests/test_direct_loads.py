"""Tests direct loads from memory to LDS: memory and LDS addresses, inactive lanes and waves, and the time at which the data
arrives.

Addresses: "memory buffer load to LDS" in the CDNA3 and CDNA4 ISA documents.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import SanitizerError

from .isa import MASK32, WAVE, implemented
from .walk import EXECS, Case

# For each load: the number of bytes, and whether the value is signed.
TO_LDS = {"ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True), "dword": (4, False),
          "dwordx3": (12, False), "dwordx4": (16, False)}  # fmt: skip


def test_every_direct_load_is_tested() -> None:
    assert implemented("dma") == {f"global_load_lds_{name}" for name in TO_LDS}


_BEFORE = np.random.default_rng(40).integers(0, 256, 8192, dtype=np.uint8)


def _run_to_lds(case: Case, text: str, m0: object = 0, wait: str = "s_waitcnt vmcnt(0)", **more) -> Snippet:
    return case.run(f"{text}\n{wait}", s={"m0": m0, **more.pop("s", {})}, lds=_BEFORE, **more)


def _lds_after(case: Case, name: str, first: list[int], data_of: Callable[[int], bytes | None]) -> bytes:
    """Returns LDS after a load. Wave w begins at byte first[w]. Lane i writes at i times the size from there; the size counts as at
    least a dword."""
    size, is_signed = TO_LDS[name]
    expected, step = bytearray(_BEFORE.tobytes()), max(4, size)
    for lane in range(case.lanes):
        at = first[lane // WAVE] + lane % WAVE * step
        if case.on[lane] and at + step <= len(expected):
            data = data_of(lane)
            value = int.from_bytes(data, "little", signed=is_signed)
            expected[at : at + step] = (value & (1 << 8 * step) - 1).to_bytes(step, "little")
    return bytes(expected)


def _try_direct_loads(space: str, name: str, mask: int) -> None:
    size = TO_LDS[name][0]
    case = Case(41, 2, mask)
    m0 = np.array([16, 4096])
    text = (
        f"buffer_load_{name} v1, s[4:7], 0 offen offset:8 lds"
        if space == "buffer"
        else f"global_load_lds_{name} v1, s[4:5] offset:8"
    )
    s = _run_to_lds(case, text, m0)
    expected = _lds_after(case, name, [24, 4104], lambda lane: case.before[int(case.offsets[lane]) + 8 :][:size])
    assert s.lds.tobytes() == expected
    assert all(np.array_equal(s.v(i), case.data[i]) for i in case.data)


@pytest.mark.parametrize("name", TO_LDS)
@pytest.mark.parametrize("space", ["buffer", "global"])
def test_direct_loads(space: str, name: str) -> None:
    """M0 and the immediate offset determine the LDS address. The immediate offset is also added to the memory address."""
    for mask in EXECS:
        _try_direct_loads(space, name, mask)


def test_direct_loads_by_full_addresses() -> None:
    case = Case(42)
    addresses = case.address + case.offsets.astype(np.uint64)
    v = {2: (addresses & np.uint64(MASK32)).astype(np.uint32), 3: (addresses >> np.uint64(32)).astype(np.uint32)}
    s = _run_to_lds(case, "global_load_lds_dwordx4 v[2:3], off", 1024, v=v)
    assert s.lds.tobytes() == _lds_after(case, "dwordx4", [1024], lambda lane: case.before[case.offsets[lane] :][:16])


def test_direct_loads_out_of_range() -> None:
    """Dwords outside of the buffer's range arrive as zeros."""
    case = Case(43)
    case.offsets = (np.arange(WAVE) * 16).astype(np.uint32)
    case.offsets[7] = 1 << 31
    records = 40 * 16 + 8

    def data_of(lane: int) -> bytes:
        offset = int(case.offsets[lane])
        return b"".join(case.before[offset + i :][:4] if offset + i + 4 <= records else bytes(4) for i in range(0, 16, 4))

    s = _run_to_lds(case, "buffer_load_dwordx4 v1, s[4:7], 0 offen lds", 0, s={6: records})
    assert s.lds.tobytes() == _lds_after(case, "dwordx4", [0], data_of)


@pytest.mark.parametrize("sanitize", [False, True])
def test_waves_switched_off_by_m0(sanitize: bool) -> None:
    """Waves that M0 disables load nothing, whatever their addresses are."""
    case = Case(44, 3)
    case.offsets[WAVE : 2 * WAVE] = 1 << 20
    m0 = np.array([256, 0x7FFFFFFF, 2048])
    s = _run_to_lds(case, "buffer_load_dword v1, s[4:7], 0 offen offset:4 lds", m0, sanitize=sanitize, s={6: 0x7FFFFFFE})
    data = {lane: case.before[int(case.offsets[lane]) + 4 :][:4] for lane in range(case.lanes)}
    expected = bytearray(_BEFORE.tobytes())
    for lane in (*range(WAVE), *range(2 * WAVE, 3 * WAVE)):
        at = (260, 0, 2052)[lane // WAVE] + 4 * (lane % WAVE)
        expected[at : at + 4] = data[lane]
    assert s.lds.tobytes() == bytes(expected)
    s = _run_to_lds(case, "buffer_load_dword v1, s[4:7], 0 offen lds", 0x7FFFFFFF, sanitize=sanitize)
    assert s.lds.tobytes() == _BEFORE.tobytes()
    assert s.group.queue.vector == []


def test_direct_loads_beyond_lds() -> None:
    """Lanes beyond the allocation are dropped. The sanitizer reports such lanes, unless the whole wave is far out of range."""
    case = Case(45)
    s = _run_to_lds(case, "global_load_lds_dword v1, s[4:5]", 8192 - 128)
    assert s.lds.tobytes() == _lds_after(case, "dword", [8192 - 128], lambda lane: case.before[case.offsets[lane] :][:4])
    with pytest.raises(SanitizerError, match="the workgroup has 8192 bytes"):
        _run_to_lds(case, "global_load_lds_dword v1, s[4:5]", 8192 - 128, sanitize=True)


def test_direct_loads_from_outside() -> None:
    case = Case(46)
    case.offsets[9] = 4096
    with pytest.raises(SanitizerError, match="past the end of array 0"):
        _run_to_lds(case, "global_load_lds_dword v1, s[4:5]")


@pytest.mark.parametrize("outstanding", range(5))
def test_data_arrives_with_the_wait_that_covers_it(outstanding: int) -> None:
    """There are three direct loads among ordinary loads. A direct load has arrived when a wait permits only later operations to be
    outstanding."""
    case = Case(47)
    text = """
        s_mov_b32 m0, 0
        global_load_lds_dword v1, s[4:5]
        global_load_dword v8, v1, s[4:5]
        s_mov_b32 m0, 0x400
        buffer_load_dword v1, s[4:7], 0 offen lds
        global_store_dword v1, v9, s[4:5]
        s_mov_b32 m0, 0x800
        global_load_lds_dword v1, s[4:5]
    """
    s = _run_to_lds(case, text, wait=f"s_waitcnt vmcnt({outstanding})")
    words, old = case.before, _BEFORE.tobytes()
    first = b"".join(words[o : o + 4] for o in case.offsets)
    third = b"".join(int(x).to_bytes(4, "little") for x in case.data[9])  # the old contents
    landed = {0: first if outstanding <= 4 else old[:256], 1024: first if outstanding <= 2 else old[1024:1280],
              2048: third if outstanding == 0 else old[2048:2304]}  # fmt: skip
    expected = bytearray(old)
    for at, data in landed.items():
        expected[at : at + 256] = data
    assert s.lds.tobytes() == bytes(expected)
    assert len(s.group.queue.vector) == outstanding


def test_without_a_wait_nothing_arrives() -> None:
    case = Case(48)
    s = _run_to_lds(case, "global_load_lds_dword v1, s[4:5]", wait="s_waitcnt lgkmcnt(0) vmcnt(1)")
    assert s.lds.tobytes() == _BEFORE.tobytes()


def test_direct_loads_of_waves_that_part_and_meet() -> None:
    """One half of the waves issues one more load before all waves reconverge. A later wait counts each wave's loads from its newest
    load."""
    case, out = Case(49, 2), np.zeros(2 * WAVE, np.uint32)
    case.offsets = (np.arange(2 * WAVE) * 4).astype(np.uint32)
    text = """
        v_lshlrev_b32_e32 v2, 2, v0
        s_mov_b32 m0, s12
        global_load_lds_dword v1, s[4:5]
        s_cmp_eq_u32 s13, 0
        s_cbranch_scc1 .Lmeet
        s_add_u32 m0, s12, 0x400
        global_load_lds_dword v1, s[4:5] offset:1024
        .Lmeet:
        s_waitcnt vmcnt(1)
        ds_read_b32 v3, v2
        s_waitcnt lgkmcnt(0)
        global_store_dword v2, v3, s[14:15]
        s_waitcnt vmcnt(0)
    """
    s = {12: np.array([0, 256]), 13: np.array([0, 1]), 14: out.ctypes.data, 15: out.ctypes.data >> 32}
    state = {4: case.address, 5: case.address >> 32, **s}
    done = Snippet(text, v={1: case.offsets}, s=state, waves=2, arrays=[case.memory, out], lds=_BEFORE, registers=8).run()
    first = np.frombuffer(case.before, np.uint32)
    assert out[:WAVE].tolist() == _BEFORE.view(np.uint32)[:WAVE].tolist(), "wave 0 may leave its only load outstanding"
    assert out[WAVE:].tolist() == first[WAVE : 2 * WAVE].tolist(), "wave 1 loaded once more, so its first load has arrived"
    assert done.lds[:256].tobytes() == case.before[:256]
    assert done.lds[2304:2560].tobytes() == case.before[1280:1536]
