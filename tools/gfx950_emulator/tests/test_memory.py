"""Tests vector memory instructions: buffer, global and scratch accesses, and atomics, against a byte-wise walk over the lanes.

Addresses and range checks: chapter on vector memory of the CDNA3 ISA document; names of modifiers: LLVM's AMDGPU documentation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import EmulationError, SanitizerError, UnknownInstruction

from .isa import MASK32, MASK64, WAVE, atomics, implemented, random_lanes, random_words
from .walk import EXECS, Case, Load, Store, loaded, span, stored

LOADS: dict[str, Load] = {
    "ubyte": (1, False, "all"), "sbyte": (1, True, "all"), "ushort": (2, False, "all"), "sshort": (2, True, "all"),
    "dword": (4, False, "all"), "dwordx2": (8, False, "all"), "dwordx3": (12, False, "all"), "dwordx4": (16, False, "all"),
    "ubyte_d16": (1, False, "low"), "ubyte_d16_hi": (1, False, "high"), "sbyte_d16": (1, True, "low"),
    "sbyte_d16_hi": (1, True, "high"), "short_d16": (2, False, "low"), "short_d16_hi": (2, False, "high"),
}  # fmt: skip
STORES: dict[str, Store] = {
    "byte": (1, 0), "byte_d16_hi": (1, 16), "short": (2, 0), "short_d16_hi": (2, 16),
    "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
}  # fmt: skip


ATOMICS: dict[str, tuple[Callable[[int, int], int] | None, int]] = {  # None means compare and swap
    **{name: (f, 32) for name, f in atomics(32).items()},
    **{(name if name.endswith("f64") else f"{name}_x2"): (f, 64) for name, f in atomics(64).items()},
    "cmpswap": (None, 32),
    "cmpswap_x2": (None, 64),
}


def test_every_memory_instruction_is_tested() -> None:
    spaces = ("buffer", "global")
    names = {f"{space}_load_{name}" for space in spaces for name in LOADS} | {
        f"{space}_store_{n}" for space in spaces for n in STORES
    }
    assert implemented("vector_memory") == names | {f"{space}_atomic_{name}" for space in spaces for name in ATOMICS}
    assert implemented("scratch") == {f"scratch_load_{name}" for name in LOADS} | {f"scratch_store_{name}" for name in STORES}


# Buffers


def _try_buffer_loads(name: str, mask: int) -> None:
    size = LOADS[name][0]
    case = Case(1, 2, mask)
    s = case.run(f"buffer_load_{name} {span(8, size)}, v1, s[4:7], 0 offen\ns_waitcnt vmcnt(0)")
    case.check_load(s, LOADS[name], lambda lane: case.before[case.offsets[lane] :][:size])


@pytest.mark.parametrize("name", LOADS)
def test_buffer_loads(name: str) -> None:
    for mask in EXECS:
        _try_buffer_loads(name, mask)


def _try_buffer_stores(name: str, mask: int) -> None:
    case = Case(2, 2, mask)
    case.run(f"buffer_store_{name} {span(8, STORES[name][0])}, v1, s[4:7], 0 offen")
    case.check_store(STORES[name], lambda lane: (int(case.offsets[lane]), 16))


@pytest.mark.parametrize("name", STORES)
def test_buffer_stores(name: str) -> None:
    for mask in EXECS:
        _try_buffer_stores(name, mask)


_ADDRESSING = [
    # The text of address and modifiers, the soffset in s9, and the lane's offset in bytes as a function of v1 and s9.
    ("v1, s[4:7], s9 offen", 24, lambda v, s: v + s),
    ("v1, s[4:7], 16 offen", 0, lambda v, s: v + 16),
    ("v1, s[4:7], s9 offen offset:20", 4, lambda v, s: v + s + 20),
    ("v1, s[4:7], 0 offen offset:4 sc0 nt sc1", 0, lambda v, s: v + 4),
    ("off, s[4:7], s9 offset:100", 60, lambda v, s: s + 100),
    ("off, s[4:7], 0", 0, lambda v, s: 0),
    ("off, s[4:7], 0 offset:4080", 0, lambda v, s: 4080),
]


@pytest.mark.parametrize(("text", "soffset", "offset"), _ADDRESSING)
@pytest.mark.parametrize("name", ["ubyte", "short_d16_hi", "dword", "dwordx4"])
def test_buffer_addresses(name: str, text: str, soffset: int, offset: Callable[[int, int], int]) -> None:
    size = LOADS[name][0]
    case = Case(3)
    s = case.run(f"buffer_load_{name} {span(8, size)}, {text}\ns_waitcnt vmcnt(0)", s={9: soffset})
    case.check_load(s, LOADS[name], lambda lane: case.before[offset(int(case.offsets[lane]), soffset) :][:size])


@pytest.mark.parametrize("name", ["dword", "short_d16_hi", "byte", "dwordx4"])
def test_buffer_stores_with_offsets_of_all_kinds(name: str) -> None:
    case = Case(4)
    case.run(f"buffer_store_{name} {span(8, STORES[name][0])}, v1, s[4:7], s9 offen offset:24", s={9: 8})
    case.check_store(STORES[name], lambda lane: (int(case.offsets[lane]) + 32, 16))


@pytest.mark.parametrize("records", [0, 1, 63, 64, 70, 76, 77, 100, 4095])
@pytest.mark.parametrize("soffset", [0, 12])
@pytest.mark.parametrize("immediate", [0, 8])
def test_range_check_of_buffer_loads(records: int, soffset: int, immediate: int) -> None:
    """Every dword is checked separately. Dwords out of range read as zero."""
    for name in ("ubyte", "ushort", "short_d16", "dword", "dwordx2", "dwordx4"):
        size = LOADS[name][0]
        case = Case(5)
        case.offsets = (np.arange(WAVE) * (1 if size < 4 else 4) + 20).astype(np.uint32)
        case.offsets[50:] = [records, MASK32, 1 << 31, (1 << 31) - 1, MASK32 - 15, MASK32 - 7, *range(8)]

        def data_of(lane: int, size: int = size, case: Case = case) -> bytes:
            offset = int(case.offsets[lane]) + immediate  # without wrapping at 2**32
            room = records - soffset - offset
            place = soffset + offset
            if size < 4:
                return case.before[place : place + size] if room >= size else bytes(size)
            words = [case.before[place + i : place + i + 4] if room >= i + 4 else bytes(4) for i in range(0, size, 4)]
            return b"".join(words)

        text = f"buffer_load_{name} {span(8, size)}, v1, s[4:7], s9 offen offset:{immediate}\ns_waitcnt vmcnt(0)"
        s = case.run(text, s={6: records, 9: soffset})
        case.check_load(s, LOADS[name], data_of)


@pytest.mark.parametrize("records", [0, 63, 64, 70, 76, 77, 100, 4000])
@pytest.mark.parametrize("soffset", [0, 12])
def test_range_check_of_buffer_stores(records: int, soffset: int) -> None:
    for name in ("byte", "short", "dword", "dwordx2", "dwordx4"):
        size = STORES[name][0]
        case = Case(6)
        case.offsets = (np.arange(WAVE) * max(size, 4)).astype(np.uint32)
        case.offsets[58:] = [MASK32, 1 << 31, (1 << 31) - 1, MASK32 - 15, MASK32 - 7, 2048]

        def place_of(lane: int, size: int = size, case: Case = case) -> tuple[int, int]:
            offset = int(case.offsets[lane])
            room = max(0, records - soffset - offset)
            return soffset + offset if room else 0, (room if room >= size else 0) if size < 4 else room // 4 * 4

        case.run(f"buffer_store_{name} {span(8, size)}, v1, s[4:7], s9 offen", s={6: records, 9: soffset})
        case.check_store(STORES[name], place_of)


def test_buffers_that_differ_between_waves() -> None:
    case = Case(7, 3)
    bases = np.array([case.address, case.address + 32, case.address + 16], np.uint64)
    records, shifts = np.array([4096, 200, 64]), np.array([0, 4, 8])
    case.offsets = np.tile(np.arange(WAVE, dtype=np.uint32) * 4, 3)
    s = case.run("buffer_load_dword v8, v1, s[4:7], s9 offen\ns_waitcnt vmcnt(0)", s={4: bases, 6: records, 9: shifts})

    def data_of(lane: int) -> bytes:
        wave, offset = lane // WAVE, int(case.offsets[lane])
        start = (0, 32, 16)[wave] + int(shifts[wave]) + offset
        return case.before[start : start + 4] if offset + 4 <= records[wave] - shifts[wave] else bytes(4)

    case.check_load(s, LOADS["dword"], data_of)


@pytest.mark.parametrize(("index", "value"), [(5, 0x00040000), (5, 0x80000000), (7, 0x00800000)])
@pytest.mark.parametrize("waves", [1, 2])
def test_resources_that_are_not_implemented(index: int, value: int, waves: int) -> None:
    """Buffer resources with strides, with swizzles, or with the thread id added are rejected."""
    case = Case(8, waves)
    values = np.array([value, 0][:waves]) if index == 7 else np.array([value | case.address >> 32, case.address >> 32][:waves])
    with pytest.raises(EmulationError, match="not implemented"):
        case.run("buffer_load_dword v8, v1, s[4:7], 0 offen", s={index: values})


def test_cache_swizzle_does_not_matter() -> None:
    case = Case(9)
    s = case.run("buffer_load_dword v8, v1, s[4:7], 0 offen\ns_waitcnt vmcnt(0)", s={5: case.address >> 32 | 1 << 30})
    case.check_load(s, LOADS["dword"], lambda lane: case.before[case.offsets[lane] :][:4])


@pytest.mark.parametrize(
    "text",
    [
        "buffer_load_dword v8, s1, s[4:7], 0 offen",
        "buffer_load_dword v8, v1, s[4:7], 0 offen tfe",
        "buffer_load_dwordx2 v1, s[4:7], 0 offen lds",
    ],
)
def test_buffer_forms_that_are_not_implemented(text: str) -> None:
    with pytest.raises(UnknownInstruction):
        Snippet(text)


@pytest.mark.parametrize("offset", [4090, 4096, 70000, (1 << 31) - 24])
@pytest.mark.parametrize(
    "mnemonic", ["buffer_load_dwordx2 v[8:9],", "buffer_store_dwordx2 v[8:9],", "buffer_atomic_add_x2 v[8:9],"]
)
def test_buffer_accesses_outside_all_arrays(mnemonic: str, offset: int) -> None:
    """A buffer's range may be larger than its tensor. Accesses past the tensor are errors."""
    case = Case(10)
    case.offsets[33] = offset
    if "atomic" in mnemonic:
        case.offsets[33] &= ~np.uint32(7)
        case.offsets[33] += np.uint32(8)
    with pytest.raises(SanitizerError, match="past the end of array 0 of 4096 bytes") as caught:
        case.run(f"{mnemonic} v1, s[4:7], 0 offen", s={6: 0x7FFFFFFE})
    assert caught.value.kind == "out-of-bounds"
    assert bytes(case.memory) == case.before


# Global memory


def _try_global_loads(name: str, mask: int) -> None:
    size = LOADS[name][0]
    case = Case(11, 2, mask)
    addresses = case.address + case.offsets.astype(np.uint64)
    v = {2: (addresses & np.uint64(MASK32)).astype(np.uint32), 3: (addresses >> np.uint64(32)).astype(np.uint32)}
    for operands, extra in (("v[2:3], off", 0), ("v[2:3], off offset:12", 12), ("v[2:3], off offset:-60", -60),
                            ("v1, s[4:5]", 0), ("v1, s[4:5] offset:20", 20), ("v1, s[4:5] offset:-64 sc1", -64)):  # fmt: skip
        s = case.run(f"global_load_{name} {span(8, size)}, {operands}\ns_waitcnt vmcnt(0)", v=v)
        case.check_load(s, LOADS[name], lambda lane, extra=extra: case.before[int(case.offsets[lane]) + extra :][:size])


@pytest.mark.parametrize("name", LOADS)
def test_global_loads(name: str) -> None:
    for mask in EXECS:
        _try_global_loads(name, mask)


def _try_global_stores(name: str, form: str, mask: int) -> None:
    size = STORES[name][0]
    case = Case(12, 2, mask)
    addresses = case.address + case.offsets.astype(np.uint64)
    v = {2: (addresses & np.uint64(MASK32)).astype(np.uint32), 3: (addresses >> np.uint64(32)).astype(np.uint32)}
    at, last = ("v[2:3]", "off offset:-4") if form == "flat" else ("v1", "s[4:5] offset:-4")
    case.run(f"global_store_{name} {at}, {span(8, size)}, {last}", v=v)
    case.check_store(STORES[name], lambda lane: (int(case.offsets[lane]) - 4, 16))


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("form", ["flat", "relative"])
def test_global_stores(name: str, form: str) -> None:
    for mask in EXECS:
        _try_global_stores(name, form, mask)


@pytest.mark.parametrize("name", [name for name, (size, _, _) in LOADS.items() if size > 1])
def test_addresses_without_alignment(name: str) -> None:
    size = LOADS[name][0]
    case = Case(13)
    case.offsets = case.offsets + np.arange(WAVE, dtype=np.uint32) % 13
    s = case.run(f"global_load_{name} {span(8, size)}, v1, s[4:5]\ns_waitcnt vmcnt(0)")
    case.check_load(s, LOADS[name], lambda lane: case.before[case.offsets[lane] :][:size])
    if (store := name.replace("ushort", "short")) in STORES:
        case.offsets = (np.arange(WAVE, dtype=np.uint32) * 17) + np.uint32(1)
        case.run(f"global_store_{store} v1, {span(8, size)}, s[4:5]")
        case.check_store(STORES[store], lambda lane: (int(case.offsets[lane]), 16))


def test_scalar_bases_that_differ_between_waves() -> None:
    case = Case(14, 3)
    bases = np.array([case.address - 64 + 8 * i for i in range(3)], np.uint64)
    s = case.run("global_load_dwordx2 v[8:9], v1, s[12:13] offset:40\ns_waitcnt vmcnt(0)", s={12: bases})
    case.check_load(s, LOADS["dwordx2"], lambda lane: case.before[int(case.offsets[lane]) - 24 + 8 * (lane // WAVE) :][:8])


def test_a_vector_offset_is_unsigned_and_the_sum_wraps() -> None:
    """The base is the address minus (2**32 - 4), so the offset that reaches the address is 2**32 - 4."""
    case = Case(15)
    case.offsets = np.full(WAVE, MASK32 - 3, np.uint32)
    s = case.run("global_load_dword v8, v1, s[12:13] offset:8\ns_waitcnt vmcnt(0)", s={12: case.address - (1 << 32) + 4 & MASK64})
    case.check_load(s, LOADS["dword"], lambda lane: case.before[8:12])


@pytest.mark.parametrize("address", [0, 64, MASK64, MASK64 - 7, 1 << 63, (1 << 63) - 4, 1 << 47])
@pytest.mark.parametrize("size", ["ubyte", "dword", "dwordx4"])
def test_wild_addresses(address: int, size: str) -> None:
    case = Case(16)
    v = {2: address & MASK32, 3: address >> 32}
    with pytest.raises(SanitizerError) as caught:
        case.run(f"global_load_{size} {span(8, LOADS[size][0])}, v[2:3], off", v=v)
    assert caught.value.kind == "out-of-bounds"
    with pytest.raises(SanitizerError):
        case.run(f"global_load_{size} {span(8, LOADS[size][0])}, v1, s[12:13]", s={12: np.array([address | 1 << 64], object)})


def test_the_message_of_an_access_out_of_bounds() -> None:
    case = Case(17)
    for offset, message in ((4093, "reaches 1 bytes past the end of array 0"), (4100, "is 4 bytes past the end of array 0")):
        case.offsets[5] = offset
        with pytest.raises(SanitizerError, match=message):
            case.run("global_load_dword v8, v1, s[4:5]")
    case.offsets[5] = 8
    with pytest.raises(SanitizerError, match=r"load of 4 bytes at 0x.* 24 bytes before array 0"):
        case.run("global_load_dword v8, v1, s[4:5] offset:-32")
    with pytest.raises(SanitizerError, match="no tensor was passed"):
        Snippet("global_load_dword v8, v1, s[4:5]", v={1: 0}, s={4: 64}).run()


def test_an_access_across_two_arrays() -> None:
    """Two arrays that are adjacent in memory are separate tensors. An access across their border is an error."""
    memory = np.zeros(64, np.uint8)
    first, second = memory[:32], memory[32:]
    offsets = np.where(np.arange(WAVE) == 9, 28, 40).astype(np.uint32)
    text = "global_load_dwordx2 v[2:3], v1, s[4:5]"
    with pytest.raises(SanitizerError, match="past the end of array 0"):
        Snippet(text, v={1: offsets}, s={4: memory.ctypes.data}, arrays=[first, second]).run()
    Snippet(text, v={1: offsets}, s={4: memory.ctypes.data}, arrays=[first, memory]).run()


def test_accumulation_registers_are_loaded_and_stored() -> None:
    case = Case(18)
    s = case.run(
        "global_load_dwordx2 a[2:3], v1, s[4:5]\ns_waitcnt vmcnt(0)\nbuffer_store_dwordx2 a[2:3], v1, s[4:7], 0 offen offset:8"
    )
    words = [case.before[o : o + 8] for o in case.offsets]
    assert [int(s.a(2)[i]) | int(s.a(3)[i]) << 32 for i in range(WAVE)] == [int.from_bytes(w, "little") for w in words]
    assert all(bytes(case.memory[o + 8 : o + 16]) == w for o, w in zip(case.offsets, words, strict=True))


def test_lanes_that_store_to_one_place() -> None:
    """If lanes store to the same address, the last lane's value remains."""
    case = Case(19, 2)
    case.offsets[...] = 128
    case.run("global_store_dwordx2 v1, v[8:9], s[4:5]")
    assert bytes(case.memory[128:136]) == b"".join(int(case.data[i][-1]).to_bytes(4, "little") for i in (8, 9))


# Atomics


def _operands(name: str, rng: np.random.Generator) -> list[int]:
    """Returns 128 operands for lanes: ordinary values for floating point, otherwise arbitrary bits."""
    bits = ATOMICS[name][1]
    if "f16" in name and "pk" in name:
        special = [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7BFF, 0x0001, 0x3C00]
        low, high = (np.r_[special, rng.normal(size=121).astype(np.float16).view(np.uint16)] for _ in range(2))
        return [int(a) | int(b) << 16 for a, b in zip(low, rng.permutation(high), strict=True)]
    if "bf16" in name:
        special = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F7F, 0x3F80, 0x0080]
        low, high = (np.r_[special, rng.normal(size=121).astype(np.float32).view(np.uint32) >> 16] for _ in range(2))
        return [int(a) | int(b) << 16 for a, b in zip(low, rng.permutation(high), strict=True)]
    if "_f" in name:
        kind, code = (np.float32, np.uint32) if bits == 32 else (np.float64, np.uint64)
        special = [0.0, -0.0, np.inf, -np.inf, 1e30, -1e30, 5e-39]
        return [int(x) for x in np.r_[special, rng.normal(size=121)].astype(kind).view(code)]
    values = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 5]
    return values + random_words(rng, 122, bits)


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("space", ["buffer", "global"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name: str, space: str, returns: bool) -> None:
    """An atomic is applied lane by lane, in lane order. Several lanes have the same address. Lanes that are inactive or out of a
    buffer's range do nothing."""
    function, bits = ATOMICS[name]
    rng = np.random.default_rng(20)
    size, words, mask = bits // 8, bits // 32, 0xFFFFFFFFFFFFFF7E
    case = Case(21, 2, mask)
    operands = _operands(name, rng)
    for place in range(16):
        case.memory[place * size : (place + 1) * size] = list(operands[(place * 5) % 128].to_bytes(size, "little"))
    memory = bytearray(case.memory)
    records = 15 * size if space == "buffer" else 4096
    case.offsets = (rng.integers(0, 16, 128) * size).astype(np.uint32)
    data = {8 + i: np.array([x >> 32 * i & MASK32 for x in operands], np.uint32) for i in range(words)}
    if function is None:  # half of the lanes compare with the contents
        compared = [int.from_bytes(memory[o : o + size], "little") if lane % 2 else 7 for lane, o in enumerate(case.offsets)]
        data |= {8 + words + i: np.array([x >> 32 * i & MASK32 for x in compared], np.uint32) for i in range(words)}
    registers = span(8, 4 * words * (1 if function else 2))
    keep = random_lanes(rng, 2)
    if space == "buffer":
        text = f"buffer_atomic_{name} {registers}, v1, s[4:7], 0 offen{' sc0' if returns else ''}"
    else:
        text = f"global_atomic_{name} {span(2, size) + ', ' if returns else ''}v1, {registers}, s[4:5]{' sc0' if returns else ''}"
    s = case.run(f"{text}\ns_waitcnt vmcnt(0)", v={2: keep, 3: keep, **data}, s={6: records})
    returned = {}
    for lane in range(128):
        at = int(case.offsets[lane])
        if not case.on[lane]:
            continue
        old = int.from_bytes(memory[at : at + size], "little")
        if space == "buffer" and at + size > records:
            old = 0
        else:
            new = function(old, operands[lane]) if function else operands[lane] if old == compared[lane] else old
            memory[at : at + size] = new.to_bytes(size, "little")
        returned[lane] = old
    assert bytes(case.memory) == bytes(memory)
    into = 8 if space == "buffer" else 2
    for i in range(words):
        before = data[8 + i] if space == "buffer" else keep
        expected = [returned[n] >> 32 * i & MASK32 if returns and n in returned else int(before[n]) for n in range(128)]
        assert s.v(into + i).tolist() == expected


@pytest.mark.parametrize("name", ["add", "add_x2", "cmpswap", "pk_add_bf16"])
def test_atomics_without_alignment(name: str) -> None:
    case = Case(22)
    case.offsets[3] += np.uint32(ATOMICS[name][1] // 16)
    with pytest.raises(SanitizerError, match="no multiple of") as caught:
        case.run(f"global_atomic_{name} v1, v[8:11], s[4:5]")
    assert caught.value.kind == "misaligned"


@pytest.mark.parametrize("text", ["buffer_atomic_add v8, v1, s[4:7], 0 offen", "global_atomic_add v1, v8, s[4:5]"])
def test_atomics_with_all_lanes_off(text: str) -> None:
    case = Case(23, exec_mask=0)
    case.run(text)
    assert bytes(case.memory) == case.before


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("name", ["pk_add_bf16", "pk_add_f16"])
def test_packed_atomics_at_the_edges_of_a_tensor(name: str, returns: bool) -> None:
    """If zero is added to the half of a dword that is outside of the tensor, this half is unchanged and reads as zero."""
    add = ATOMICS[name][0]
    assert add is not None
    memory = np.random.default_rng(24).integers(0x3C00, 0x4400, 8, dtype=np.uint16)
    inside = memory[1:5]  # begins and ends in the middle of a dword
    one = 0x3F80 if name == "pk_add_bf16" else 0x3C00
    operands = [one << 16, one | one << 16, one]
    before = memory.view(np.uint32).tolist()
    text = f"global_atomic_{name} {'v3, ' if returns else ''}v1, v2, s[4:5]{' sc0' if returns else ''}\ns_waitcnt vmcnt(0)"

    def run(values: list[int]) -> Snippet:
        lanes = {1: [0, 4, 8], 2: values}
        v = {i: np.array([*x, *[0] * 61], np.uint32) for i, x in lanes.items()}
        return Snippet(text, v={**v, 3: 0}, s={4: memory.ctypes.data, "exec": 7}, arrays=[inside], registers=4).run()

    s = run(operands)
    bits = [0xFFFF0000, MASK32, 0xFFFF]
    expected = [old & ~m & MASK32 | add(old & m, x) & m for old, x, m in zip(before, operands, bits, strict=False)]
    assert memory.view(np.uint32).tolist() == [*expected, before[3]]
    if returns:
        assert s.v(3)[:3].tolist() == [old & m for old, m in zip(before, bits, strict=False)]
    for lane in (0, 2):
        both = [one | one << 16 if i == lane else x for i, x in enumerate(operands)]
        with pytest.raises(SanitizerError, match="atomic of 4 bytes") as caught:
            run(both)
        assert caught.value.kind == "out-of-bounds"


def test_a_loop_of_compare_and_swap_at_the_edge_of_a_tensor() -> None:
    """The loop's first load reads a whole dword. Half of the dword may be outside of the tensor if the loop writes this half back
    unchanged."""
    memory = np.array([5, 7, 9, 11], np.uint16)
    loop = """
        global_load_dword v5, v[2:3], off
        s_waitcnt vmcnt(0)
        {change}
        global_atomic_cmpswap v6, v[2:3], v[4:5], off sc0
        s_waitcnt vmcnt(0)
    """

    def run(change: str) -> Snippet:
        at = memory.ctypes.data + 4
        v = {2: at & MASK32, 3: at >> 32, 4: 0, 5: 0, 6: 0}
        return Snippet(loop.format(change=change), v=v, s={"exec": 1}, arrays=[memory[:3]], registers=8).run()

    s = run("v_add_u32_e32 v4, 1, v5")
    assert memory.tolist() == [5, 7, 10, 11]
    assert (int(s.v(5)[0]), int(s.v(6)[0])) == (9, 9)
    with pytest.raises(SanitizerError, match="atomic of 4 bytes") as caught:
        run("v_add_u32_e32 v4, 0x10000, v5")
    assert caught.value.kind == "out-of-bounds"
    with pytest.raises(SanitizerError, match="load of 4 bytes"):
        run("v_add_u32_e32 v4, 1, v5\nglobal_load_dword v7, v[2:3], off")


def test_minimum_of_a_nan_leaves_memory_alone() -> None:
    memory = np.array([np.nan, 1.0, -0.0, 0.0], np.float32)
    offsets = (np.arange(WAVE) % 4 * 4).astype(np.uint32)
    data = np.array([1.0, np.nan, 0.0, -0.0] * 16, np.float32)
    for name in ("min_f32", "max_f32"):
        before = memory.view(np.uint32).tolist()
        Snippet(f"global_atomic_{name} v1, v2, s[4:5]", v={1: offsets, 2: data}, s={4: memory.ctypes.data}, arrays=[memory]).run()
        assert memory.view(np.uint32).tolist() == before


# Scratch


@pytest.mark.parametrize("at", [0, 4, 8, 5, 7, 100])
@pytest.mark.parametrize("name", LOADS)
def test_scratch(name: str, at: int) -> None:
    """No lane sees another lane's stores to scratch. Bytes are read back at any alignment."""
    size = LOADS[name][0]
    case = Case(24, 2, 0xFFFF00000000FFFF)
    stored = {i: random_lanes(np.random.default_rng(25 + i), 2) for i in range(4)}
    store = f"s_mov_b64 s[20:21], exec\ns_mov_b64 exec, -1\nscratch_store_dwordx4 off, v[4:7], off offset:{at & ~3}\n"
    store += f"scratch_store_dwordx2 off, v[5:6], s9 offset:{(at & ~3) + 6}\ns_mov_b64 exec, s[20:21]\n"
    s = case.run(
        f"{store}scratch_load_{name} {span(8, size)}, off, s9 offset:{at - 10}\ns_waitcnt vmcnt(0)",
        v={4 + i: stored[i] for i in range(4)},
        s={9: 10},
    )

    def data_of(lane: int) -> bytes:
        words = [int(stored[i][lane]).to_bytes(4, "little") for i in range(4)]
        image = bytearray(b"".join(words) + bytes(16))
        image[16:24] = words[1] + words[2]
        return bytes(image[at & 3 :][:size])

    case.check_load(s, LOADS[name], data_of)


@pytest.mark.parametrize("at", [8, 9, 11])
@pytest.mark.parametrize("name", STORES)
def test_scratch_stores(name: str, at: int) -> None:
    size = STORES[name][0]
    case = Case(26, 1, 0xAAAAAAAAFFFF0000)
    text = f"""
        s_mov_b64 s[20:21], exec
        s_mov_b64 exec, -1
        scratch_store_dwordx4 off, v[2:5], off offset:8
        scratch_store_dwordx4 off, v[2:5], off offset:24
        s_mov_b64 exec, s[20:21]
        scratch_store_{name} off, {span(8, size)}, off offset:{at}
        s_mov_b64 exec, -1
        scratch_load_dwordx4 v[2:5], off, off offset:8
        scratch_load_dword v6, off, off offset:24
        s_waitcnt vmcnt(0)
    """
    fill = {2 + i: random_lanes(np.random.default_rng(30 + i)) for i in range(4)}
    s = case.run(text, v=fill)
    for lane in range(WAVE):
        image = bytearray(b"".join(int(fill[i][lane]).to_bytes(4, "little") for i in (2, 3, 4, 5, 2)))
        if case.on[lane]:
            data = stored(STORES[name], [int(case.data[8 + i][lane]) for i in range(4)])
            image[at - 8 : at - 8 + size] = data
        assert b"".join(int(s.v(i)[lane]).to_bytes(4, "little") for i in range(2, 7)) == bytes(image)


def test_scratch_follows_waves_that_part() -> None:
    """Waves diverge between a store to scratch and the load. Every lane reads its own data."""
    values, out = random_lanes(np.random.default_rng(27), 4), np.zeros(4 * WAVE, np.uint32)
    text = """
        scratch_store_dword off, v1, off offset:16
        s_cmp_eq_u32 s4, 0
        s_cbranch_scc1 .Lmeet
        v_mov_b32_e32 v1, 0
        scratch_load_dword v2, off, off offset:16
        s_waitcnt vmcnt(0)
        v_add_u32_e32 v2, 1, v2
        scratch_store_dword off, v2, off offset:16
        .Lmeet:
        scratch_load_dword v3, off, off offset:16
        s_waitcnt vmcnt(0)
        v_lshlrev_b32_e32 v4, 2, v0
        global_store_dword v4, v3, s[2:3]
    """
    kinds = np.array([0, 1, 1, 0])
    s = {2: out.ctypes.data, 3: out.ctypes.data >> 32, 4: kinds}
    for sanitize in (False, True):
        Snippet(text, v={1: values}, s=s, waves=4, arrays=[out], registers=8, sanitize=sanitize).run()
        assert np.array_equal(out, values + np.repeat(kinds, WAVE).astype(np.uint32))


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("name", LOADS)
def test_scratch_loads_by_vector_address(name: str, sanitize: bool) -> None:
    """Each lane has its own address: a vector register, plus a scalar register, plus an immediate."""
    size, rng = LOADS[name][0], np.random.default_rng(7)
    data = {i: random_lanes(rng) for i in range(4, 12)}
    at = (rng.integers(0, 16 // size, WAVE) * size).astype(np.uint32)
    for mask in EXECS:
        s = Snippet(
            f"""scratch_store_dwordx4 off, v[4:7], off offset:32
            s_mov_b32 exec_lo, {mask & MASK32:#x}
            s_mov_b32 exec_hi, {mask >> 32:#x}
            scratch_load_{name} {span(8, size)}, v1, s9 offset:12
            s_waitcnt vmcnt(0)""",
            v={1: at, **data},
            s={9: 20},
            sanitize=sanitize,
        ).run()
        for lane in range(WAVE):
            octets = b"".join(int(data[i][lane]).to_bytes(4, "little") for i in range(4, 8))
            old = [int(data[8 + i][lane]) for i in range(max(1, size // 4))]
            expected = loaded(LOADS[name], old, octets[int(at[lane]) :][:size]) if mask >> lane & 1 else old
            assert [int(s.v(8 + i)[lane]) for i in range(len(old))] == expected, lane


@pytest.mark.parametrize("name", STORES)
def test_scratch_stores_by_vector_address(name: str) -> None:
    size, rng = STORES[name][0], np.random.default_rng(8)
    data = {i: random_lanes(rng) for i in range(4, 12)}
    at = (rng.integers(0, 16 // size, WAVE) * size).astype(np.uint32)
    for mask in EXECS:
        s = Snippet(
            f"""scratch_store_dwordx4 off, v[4:7], off offset:32
            s_mov_b32 exec_lo, {mask & MASK32:#x}
            s_mov_b32 exec_hi, {mask >> 32:#x}
            scratch_store_{name} v1, {span(8, size)}, off offset:32
            s_mov_b64 exec, -1
            scratch_load_dwordx4 v[12:15], off, off offset:32
            s_waitcnt vmcnt(0)""",
            v={1: at, **data},
            sanitize=True,
        ).run()
        for lane in range(WAVE):
            octets = bytearray(b"".join(int(data[i][lane]).to_bytes(4, "little") for i in range(4, 8)))
            if mask >> lane & 1:
                octets[int(at[lane]) : int(at[lane]) + size] = stored(STORES[name], [int(data[8 + i][lane]) for i in range(4)])
            assert b"".join(int(s.v(i)[lane]).to_bytes(4, "little") for i in range(12, 16)) == octets, lane


def test_scratch_before_its_begin() -> None:
    with pytest.raises(SanitizerError, match="scratch access of 4 bytes at -0x4"):
        Snippet("scratch_load_dword v1, off, off offset:-4").run()
