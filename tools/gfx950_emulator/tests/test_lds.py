"""Tests LDS instructions: reads, writes, transposing reads, atomics, permutations. Definitions are from the CDNA3 and CDNA4 ISA
documents.

The oracle walks over bytes and lanes. For the transposing reads it also transposes a whole matrix.
"""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emulator.architecture import ARCHITECTURES
from gfx950_emulator.local_memory import LocalMemory
from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import EmulationError, SanitizerError, UnknownInstruction

from .isa import MASK32, MASK64, WAVE, atomics, bits_of, implemented, random_lanes, random_words
from .walk import EXECS, Load, Store, loaded, span

READS: dict[str, Load] = {
    "u8": (1, False, "all"), "i8": (1, True, "all"), "u16": (2, False, "all"), "i16": (2, True, "all"), "b32": (4, False, "all"),
    "b64": (8, False, "all"), "b96": (12, False, "all"), "b128": (16, False, "all"), "u8_d16": (1, False, "low"),
    "u8_d16_hi": (1, False, "high"), "i8_d16": (1, True, "low"), "i8_d16_hi": (1, True, "high"), "u16_d16": (2, False, "low"),
    "u16_d16_hi": (2, False, "high"),
}  # fmt: skip
WRITES: dict[str, Store] = {
    "b8": (1, 0), "b8_d16_hi": (1, 16), "b16": (2, 0), "b16_d16_hi": (2, 16), "b32": (4, 0), "b64": (8, 0),
    "b96": (12, 0), "b128": (16, 0),
}  # fmt: skip
TWICE = {"2_b32": (4, 4), "2_b64": (8, 8), "2st64_b32": (4, 256), "2st64_b64": (8, 512)}  # bytes, and bytes per unit of an offset
_KINDS = {
    "add": ("u32", "u64"), "sub": ("u32", "u64"), "inc": ("u32", "u64"), "dec": ("u32", "u64"), "smin": ("i32", "i64"),
    "smax": ("i32", "i64"), "umin": ("u32", "u64"), "umax": ("u32", "u64"), "and": ("b32", "b64"), "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}  # fmt: skip
ATOMICS: dict[str, tuple[str, int]] = {  # maps the name without ds_ and rtn to operation and bits
    **{f"{kind.removeprefix('s').removeprefix('u') if kind.endswith(('min', 'max')) else kind}_{type_}": (kind, int(type_[1:]))
       for kind, types in _KINDS.items() if kind != "sub" for type_ in types},
    "sub_u32": ("sub", 32), "sub_u64": ("sub", 64),
    **{f"{name}_f{bits}": (f"{name}_f{bits}", bits) for name in ("add", "min", "max") for bits in (32, 64)},
    "pk_add_bf16": ("pk_add_bf16", 32), "pk_add_f16": ("pk_add_f16", 32),
    "wrxchg_b32": ("swap", 32), "wrxchg_b64": ("swap", 64), "cmpst_b32": ("cmpst", 32), "cmpst_b64": ("cmpst", 64),
}  # fmt: skip
TRANSPOSING = {"ds_read_b64_tr_b16": 16, "ds_read_b64_tr_b8": 8, "ds_read_b96_tr_b6": 6, "ds_read_b64_tr_b4": 4}
PERMUTING = {"ds_permute_b32", "ds_bpermute_b32", "ds_swizzle_b32"}


def _returning(name: str) -> str:
    operation, type_ = name.rsplit("_", 1)
    return f"{operation}_rtn_{type_}"


def test_every_lds_instruction_is_tested() -> None:
    names = {f"ds_read_{name}" for name in READS} | {f"ds_write_{name}" for name in WRITES}
    names |= {f"ds_{way}{name}" for way in ("read", "write") for name in TWICE}
    names |= {f"ds_{name}" for name in ATOMICS if not name.startswith("wrxchg")} | {f"ds_{_returning(name)}" for name in ATOMICS}
    assert implemented("lds") == names | TRANSPOSING.keys() | PERMUTING


_SIZE = 4096


class Case:
    """The lanes' state: offsets into 4 KiB of LDS, and registers v8 to v11. These registers hold the data to write, or the old
    values before a read."""

    def __init__(self, seed: int, waves: int = 1, mask: int = MASK64, offsets: np.ndarray | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.waves, self.lanes, self.mask = waves, WAVE * waves, mask
        self.on = np.tile(bits_of(mask), waves)
        self.lds = rng.integers(0, 256, _SIZE, dtype=np.uint8).tobytes()
        self.data = {i: random_lanes(rng, waves) for i in range(8, 12)}
        places = rng.permutation(_SIZE // 16 - 8)[: self.lanes] * 16
        self.offsets = (places if offsets is None else offsets).astype(np.uint32)

    def run(self, text: str, v: dict | None = None, **more) -> Snippet:
        vectors = {1: self.offsets, **self.data, **(v or {})}
        return Snippet(text, v=vectors, s={"exec": self.mask}, waves=self.waves, lds=self.lds, registers=16, **more).run()

    def read(self, at: int, size: int) -> bytes:
        """Returns the result of an LDS read, which is zero if any byte is beyond the allocation."""
        return self.lds[at : at + size] if 0 <= at <= _SIZE - size else bytes(size)

    def words(self, lane: int) -> bytes:
        return b"".join(int(self.data[i][lane]).to_bytes(4, "little") for i in range(8, 12))


def _check_read(case: Case, s: Snippet, name: str, immediate: int) -> None:
    size = READS[name][0]
    for lane in range(case.lanes):
        old = [int(case.data[8 + i][lane]) for i in range(max(1, size // 4))]
        at = int(case.offsets[lane]) + immediate & MASK32
        expected = loaded(READS[name], old, case.read(at, size)) if case.on[lane] else old
        assert [int(s.v(8 + i)[lane]) for i in range(len(old))] == expected, lane
    assert s.lds.tobytes() == case.lds


# Reads and writes


@pytest.mark.parametrize("name", READS)
def test_reads(name: str) -> None:
    for mask in EXECS:
        for immediate in (0, 48):
            case = Case(1, 3, mask)
            modifier = f" offset:{immediate}" if immediate else ""
            s = case.run(f"ds_read_{name} {span(8, READS[name][0])}, v1{modifier}\ns_waitcnt lgkmcnt(0)")
            _check_read(case, s, name, immediate)


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str) -> None:
    for mask in EXECS:
        size, first = WRITES[name]
        for immediate in (0, 48):
            case = Case(2, 3, mask)
            modifier = f" offset:{immediate}" if immediate else ""
            s = case.run(f"ds_write_{name} v1, {span(8, size)}{modifier}\ns_waitcnt lgkmcnt(0)")
            expected = bytearray(case.lds)
            for lane in np.flatnonzero(case.on):
                at = int(case.offsets[lane]) + immediate
                expected[at : at + size] = case.words(lane)[first // 8 : first // 8 + size]
            assert s.lds.tobytes() == bytes(expected)


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_addresses_without_alignment(name: str) -> None:
    offsets = np.arange(WAVE) * 33 + 1
    case = Case(3, offsets=offsets)
    if name in READS:
        _check_read(case, case.run(f"ds_read_{name} {span(8, READS[name][0])}, v1\ns_waitcnt lgkmcnt(0)"), name, 0)
        return
    size, first = WRITES[name]
    s = case.run(f"ds_write_{name} v1, {span(8, size)}")
    expected = bytearray(case.lds)
    for lane, at in enumerate(offsets):
        expected[at : at + size] = case.words(lane)[first // 8 : first // 8 + size]
    assert s.lds.tobytes() == bytes(expected)


@pytest.mark.parametrize("name", READS)
def test_reads_beyond_the_allocation_are_zero(name: str) -> None:
    size = READS[name][0]
    offsets = np.full(WAVE, _SIZE)
    offsets[:12] = [
        _SIZE - 16,
        _SIZE - size,
        _SIZE - size + 1,
        _SIZE - 1,
        _SIZE,
        1 << 16,
        1 << 31,
        MASK32,
        MASK32 - 15,
        MASK32 - 31,
        0,
        4,
    ]
    for immediate in (0, 16):  # the sum wraps at 2**32
        case = Case(4, offsets=offsets)
        modifier = f" offset:{immediate}" if immediate else ""
        _check_read(case, case.run(f"ds_read_{name} {span(8, size)}, v1{modifier}\ns_waitcnt lgkmcnt(0)"), name, immediate)


@pytest.mark.parametrize("name", WRITES)
def test_writes_beyond_the_allocation_are_dropped(name: str) -> None:
    size, first = WRITES[name]
    offsets = np.arange(WAVE) * 16 + 64
    offsets[:6] = [_SIZE - size, _SIZE, _SIZE + 4, 1 << 31, MASK32 - 15, 1 << 16]
    case = Case(5, 1, MASK64 - (1 << 40), offsets=offsets)
    s = case.run(f"ds_write_{name} v1, {span(8, size)} offset:0")
    expected = bytearray(case.lds)
    for lane in np.flatnonzero(case.on):
        if offsets[lane] + size <= _SIZE:
            at = int(offsets[lane])
            expected[at : at + size] = case.words(lane)[first // 8 : first // 8 + size]
    assert s.lds.tobytes() == bytes(expected)


@pytest.mark.parametrize("offsets", [(0, 1), (3, 0), (7, 7), (255, 254)])
@pytest.mark.parametrize("name", TWICE)
def test_two_at_a_time(name: str, offsets: tuple[int, int]) -> None:
    """The instructions access two offsets from one address. Beyond the allocation, reads return zero and writes are dropped."""
    for mask in EXECS:
        size, unit = TWICE[name]
        modifiers = "".join(f" offset{i}:{offset}" for i, offset in enumerate(offsets) if offset)
        places = np.random.default_rng(6).permutation(128)[:WAVE] * 8
        case = Case(7, 1, mask, offsets=places)
        s = case.run(f"ds_read{name} {span(8, 2 * size)}, v1{modifiers}\ns_waitcnt lgkmcnt(0)")
        for lane in range(WAVE):
            at = [int(places[lane]) + offset * unit for offset in offsets]
            read = b"".join(case.read(a, size) for a in at)
            expected = read if case.on[lane] else case.words(lane)[: 2 * size]
            assert b"".join(int(s.v(8 + i)[lane]).to_bytes(4, "little") for i in range(size // 2)) == expected, lane
        s = case.run(f"ds_write{name} v1, {span(8, size)}, {span(10, size)}{modifiers}")
        expected = bytearray(case.lds)
        for i, offset in enumerate(offsets):
            for lane in np.flatnonzero(case.on):
                at = int(places[lane]) + offset * unit
                if at + size <= _SIZE:
                    expected[at : at + size] = case.words(lane)[8 * i : 8 * i + size]
        assert s.lds.tobytes() == bytes(expected)


def test_results_that_overwrite_the_address() -> None:
    case = Case(8)
    s = case.run("ds_read2_b32 v[1:2], v1 offset0:1 offset1:3\ns_waitcnt lgkmcnt(0)")
    for lane, at in enumerate(case.offsets):
        assert [int(s.v(i)[lane]) for i in (1, 2)] == [int.from_bytes(case.read(int(at) + 4 * k, 4), "little") for k in (1, 3)]
    s = case.run("ds_read_b64 v[0:1], v1 offset:8\ns_waitcnt lgkmcnt(0)")
    assert s.v64(0).tolist() == [int.from_bytes(case.read(int(at) + 8, 8), "little") for at in case.offsets]


def test_accumulation_registers() -> None:
    case = Case(9)
    s = case.run("ds_read2_b64 a[2:5], v1 offset1:1\ns_waitcnt lgkmcnt(0)\nds_write_b96 v1, a[3:5] offset:1024")
    words = [case.read(int(at), 16) for at in case.offsets]
    assert all(b"".join(int(s.a(2 + i)[n]).to_bytes(4, "little") for i in range(4)) == word for n, word in enumerate(words))
    expected = bytearray(case.lds)
    for at, word in zip(case.offsets, words, strict=True):
        if at + 1024 + 12 <= _SIZE:
            expected[at + 1024 : at + 1036] = word[4:]
    assert s.lds.tobytes() == bytes(expected)


def test_lanes_that_write_to_one_place() -> None:
    """If lanes write to the same address, the last lane's value remains."""
    case = Case(10, 2, offsets=np.full(2 * WAVE, 160))
    s = case.run("ds_write_b64 v1, v[8:9]")
    assert s.lds[160:168].tobytes() == case.words(2 * WAVE - 1)[:8]


def test_workgroups_have_lds_of_their_own() -> None:
    local = LocalMemory(3, 100)
    assert local.stride % 16 == 0
    assert local.stride >= 100
    group = type("Group", (), {"slot": np.array([2, 0]), "lds": None})()
    assert local.bases(group).tolist() == [2 * local.stride] * WAVE + [0] * WAVE


@pytest.mark.parametrize(("arch", "limit"), [("gfx950", 160 * 1024), ("gfx942", 64 * 1024)])
def test_workgroups_have_at_most_the_lds_of_a_cu(arch: str, limit: int) -> None:
    assert LocalMemory(1, limit, ARCHITECTURES[arch]).size == limit
    with pytest.raises(ValueError, match=f"{limit + 1} bytes of LDS; {arch} has {limit}"):
        LocalMemory(1, limit + 1, ARCHITECTURES[arch])


# Transposing reads


def _words(mnemonic: str) -> int:
    return 3 if TRANSPOSING[mnemonic] == 6 else 2


def _received(s: Snippet, lane: int, mnemonic: str) -> int:
    """Returns the bits of a lane's registers from v2 on as one integer. The first element is in the lowest bits."""
    return sum(int(s.v(2 + i)[lane]) << 32 * i for i in range(_words(mnemonic)))


def _element(memory: bytes, index: int, bits: int) -> int:
    """Returns an element of packed data, whose first element is in the lowest bits."""
    return int.from_bytes(memory, "little") >> index * bits & (1 << bits) - 1


@pytest.mark.parametrize("mnemonic", TRANSPOSING)
def test_lane_map_of_transposing_reads(mnemonic: str) -> None:
    """Each group of 16 lanes reads 8 or 12 bytes per lane. In rows of 16 elements, lane i of the group receives column i."""
    bits, size = TRANSPOSING[mnemonic], 4 * _words(mnemonic)
    case = Case(20, 2)
    offset = 16
    s = case.run(f"{mnemonic} v[2:{1 + _words(mnemonic)}], v1 offset:{offset}\ns_waitcnt lgkmcnt(0)")
    for lane in range(case.lanes):
        group, column = lane // 16 * 16, lane % 16
        rows = b"".join(case.read(int(case.offsets[group + i]) + offset, size) for i in range(16))  # row-major, 16 elements a row
        expected = [_element(rows, row * 16 + column, bits) << row * bits for row in range(8 * size // bits)]
        assert _received(s, lane, mnemonic) == sum(expected), lane


def test_lane_maps_element_by_element() -> None:
    """Tests the same lane maps as formulas: for 16-bit elements four interleaved 4 x 4 transposes, for 8-bit elements two
    interleaved 8 x 8 transposes."""
    tags16 = np.arange(WAVE * 4, dtype=np.uint16)  # lane * 4 + element
    s = Snippet("ds_read_b64_tr_b16 v[2:3], v1", v={1: np.arange(WAVE) * 8}, lds=tags16.tobytes(), registers=4).run()
    got = s.v64(2).view(np.uint16).reshape(WAVE, 4)
    for lane in range(WAVE):
        for element in range(4):
            source = lane // 16 * 16 + 4 * element + lane % 16 // 4
            assert got[lane, element] == source * 4 + lane % 4
    lanes8 = np.repeat(np.arange(WAVE), 8).astype(np.uint8)
    s = Snippet("ds_read_b64_tr_b8 v[2:3], v1", v={1: np.arange(WAVE) * 8}, lds=lanes8.tobytes(), registers=4).run()
    from_lane = s.v64(2).view(np.uint8).reshape(WAVE, 8)
    elements8 = np.tile(np.arange(8), WAVE).astype(np.uint8)
    s = Snippet("ds_read_b64_tr_b8 v[2:3], v1", v={1: np.arange(WAVE) * 8}, lds=elements8.tobytes(), registers=4).run()
    from_element = s.v64(2).view(np.uint8).reshape(WAVE, 8)
    for lane in range(WAVE):
        for element in range(8):
            assert from_lane[lane, element] == lane // 16 * 16 + 2 * element + lane % 16 // 8
            assert from_element[lane, element] == lane % 8


def test_lane_maps_of_small_elements() -> None:
    """Sixteen elements of 4 or 6 bits per lane are transposed across 16 lanes: element e of lane i is element i of lane e."""
    for mnemonic in ("ds_read_b64_tr_b4", "ds_read_b96_tr_b6"):
        bits, words = TRANSPOSING[mnemonic], _words(mnemonic)
        values = np.random.default_rng(24).integers(0, 1 << bits, (WAVE, 16))
        packed = b"".join(sum(int(value) << bits * i for i, value in enumerate(lane)).to_bytes(16, "little") for lane in values)
        s = Snippet(f"{mnemonic} v[2:{1 + words}], v1", v={1: np.arange(WAVE) * 16}, lds=packed, registers=8).run()
        for lane in range(WAVE):
            expected = [int(values[lane // 16 * 16 + e, lane % 16]) << bits * e for e in range(16)]
            assert _received(s, lane, mnemonic) == sum(expected), (mnemonic, lane)


@pytest.mark.parametrize("mnemonic", [name for name, bits in TRANSPOSING.items() if bits >= 8])
def test_a_matrix_transposed(mnemonic: str) -> None:
    """LDS has a matrix with rows of 16 elements. Every group of 16 lanes reads some rows and receives columns."""
    bits = TRANSPOSING[mnemonic]
    per_lane = 64 // bits
    matrix = np.random.default_rng(21).integers(0, 1 << bits, (4 * per_lane, 16)).astype(f"u{bits // 8}")
    s = Snippet(f"{mnemonic} v[2:3], v1", v={1: np.arange(WAVE) * 8}, lds=matrix.tobytes(), registers=4).run()
    got = s.v64(2).view(matrix.dtype).reshape(4, 16, per_lane)
    for group in range(4):
        assert np.array_equal(got[group], matrix[group * per_lane : (group + 1) * per_lane].T)


@pytest.mark.parametrize("mnemonic", TRANSPOSING)
def test_transposing_reads_with_lanes_off(mnemonic: str) -> None:
    """A wave with no active lane keeps its registers. A wave with some active lanes is an error."""
    case = Case(22, 3)
    registers = range(8, 8 + _words(mnemonic))
    instruction = f"{mnemonic} v[8:{registers[-1]}], v1"
    text = f"s_mov_b64 exec, s[4:5]\n{instruction}"
    masks = np.array([MASK64, 0, MASK64], object)
    whole = case.run(instruction)
    some = Snippet(text, v={1: case.offsets, **case.data}, s={4: masks}, waves=3, lds=case.lds, registers=16).run()
    on = np.repeat([True, False, True], WAVE)
    for i in registers:
        assert np.array_equal(some.v(i), np.where(on, whole.v(i), case.data[i]))
    none = Snippet(text, v={1: case.offsets, **case.data}, s={4: 1 << 64}, waves=3, lds=case.lds, registers=16)
    none.group.set_s64(4, 0)
    assert np.array_equal(none.run().v(8), case.data[8])
    with pytest.raises(EmulationError, match="no defined result"):
        Snippet(text, v={1: 0}, s={4: MASK64 - 1}, lds=64, registers=16).run()


def test_transposing_reads_beyond_the_allocation() -> None:
    offsets = np.arange(WAVE) * 8
    offsets[5] = _SIZE
    case = Case(23, offsets=offsets)
    s = case.run("ds_read_b64_tr_b16 v[2:3], v1")
    rows = b"".join(case.read(int(at), 8) for at in offsets[:16])
    assert int(s.v64(2)[4]).to_bytes(8, "little") == b"".join(rows[(row * 16 + 4) * 2 :][:2] for row in range(4))
    assert rows[40:48] == bytes(8)


# Atomics


def _operand_bits(name: str, bits: int, rng: np.random.Generator) -> list[int]:
    if name.startswith("pk_add"):
        kind = np.float16 if name.endswith("_f16") else np.float32
        halves = rng.normal(size=256).astype(kind).view(np.uint16 if kind is np.float16 else np.uint32)
        values = halves if kind is np.float16 else halves >> 16
        return [int(a) | int(b) << 16 for a, b in values.reshape(-1, 2)]
    if name.endswith(("_f32", "_f64")):
        kind = np.float32 if bits == 32 else np.float64
        special = [0.0, -0.0, np.inf, -np.inf, 1e30, -1e30]
        return [int(x) for x in np.r_[special, rng.normal(size=122)].astype(kind).view(np.uint32 if bits == 32 else np.uint64)]
    return [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 5, *random_words(rng, 122, bits)]


@pytest.mark.parametrize(
    ("name", "returns"), [(name, True) for name in ATOMICS] + [(name, False) for name in ATOMICS if not name.startswith("wrxchg")]
)
def test_atomics(name: str, returns: bool) -> None:
    """An atomic is applied lane by lane, in lane order. Several lanes have the same address. Beyond the allocation, nothing is
    written and zero is returned."""
    for mask in (MASK64, 0xFFFFFFFFFFFFFF7E):
        kind, bits = ATOMICS[name]
        function = atomics(bits).get(kind)
        size, words = bits // 8, bits // 32
        rng = np.random.default_rng(30)
        operands, other = _operand_bits(name, bits, rng), random_words(rng, 128, bits)
        case = Case(31, 2, mask, offsets=rng.integers(0, 12, 128) * size)
        case.offsets[[9, 77]] = _SIZE
        memory = bytearray(b"".join(operands[i * 7].to_bytes(size, "little") for i in range(16)) + case.lds[16 * size :])
        case.lds = bytes(memory)
        if kind == "cmpst":  # the first operand is compared; half of the lanes compare with the initial contents
            operands = [int.from_bytes(memory[o : o + size], "little") if n % 2 else 7 for n, o in enumerate(case.offsets)]
        data = {8 + i: np.array([x >> 32 * i & MASK32 for x in operands], np.uint32) for i in range(words)}
        data |= {12 + i: np.array([x >> 32 * i & MASK32 for x in other], np.uint32) for i in range(words)}
        keep = random_lanes(rng, 2)
        target = f"{span(2, size)}, " if returns else ""
        second = f", {span(12, size)}" if kind == "cmpst" else ""
        mnemonic = _returning(name) if returns else name
        s = case.run(
            f"ds_{mnemonic} {target}v1, {span(8, size)}{second} offset:{2 * size}\ns_waitcnt lgkmcnt(0)",
            v={2: keep, 3: keep, **data},
        )
        returned = {}
        for lane in np.flatnonzero(case.on):
            at = int(case.offsets[lane]) + 2 * size
            returned[lane] = 0
            if at + size <= _SIZE:
                old = int.from_bytes(memory[at : at + size], "little")
                new = function(old, operands[lane]) if function else other[lane] if old == operands[lane] else old
                memory[at : at + size] = new.to_bytes(size, "little")
                returned[lane] = old
        assert s.lds.tobytes() == bytes(memory)
        for i in range(words):
            expected = [returned[n] >> 32 * i & MASK32 if returns and n in returned else int(keep[n]) for n in range(128)]
            assert s.v(2 + i).tolist() == expected


@pytest.mark.parametrize("name", ["add_u32", "add_u64", "cmpst_rtn_b64"])
def test_atomics_without_alignment(name: str) -> None:
    operands = {"add_u32": "v1, v2", "add_u64": "v1, v[2:3]", "cmpst_rtn_b64": "v[6:7], v1, v[2:3], v[4:5]"}[name]
    with pytest.raises(SanitizerError, match="no multiple of") as caught:
        Snippet(f"ds_{name} {operands}", v={1: np.where(np.arange(WAVE) == 3, 6, 0)}, lds=64).run()
    assert caught.value.kind == "misaligned"


def test_atomics_with_all_lanes_off() -> None:
    s = Snippet("ds_add_u32 v1, v2", v={1: 0, 2: 1}, s={"exec": 0}, lds=64).run()
    assert not s.lds.any()


# Permutations


@pytest.mark.parametrize("immediate", [0, 4, 252])
@pytest.mark.parametrize("mnemonic", ["ds_bpermute_b32", "ds_permute_b32"])
def test_permutations(mnemonic: str, immediate: int) -> None:
    """bpermute reads from the addressed lane, and permute writes to it. The lane is bits [7:2] of the address. Inactive lanes
    neither send nor receive."""
    for mask in EXECS:
        rng = np.random.default_rng(40)
        addresses = rng.integers(0, 1 << 32, 2 * WAVE, dtype=np.uint32)
        addresses[:8] = [0, 3, 4, 252, 255, 256, MASK32, 128]
        data, keep, on = random_lanes(rng, 2), random_lanes(rng, 2), bits_of(mask)
        modifier = f" offset:{immediate}" if immediate else ""
        s = Snippet(f"{mnemonic} v3, v1, v2{modifier}\ns_waitcnt lgkmcnt(0)", v={1: addresses, 2: data, 3: keep}, s={"exec": mask},
                    waves=2, registers=4).run()  # fmt: skip
        for wave in range(2):
            address, value, old = (x[wave * WAVE : (wave + 1) * WAVE].tolist() for x in (addresses, data, keep))
            result = [0] * WAVE
            for lane in range(WAVE):
                other = (address[lane] + immediate) // 4 % WAVE
                if mnemonic == "ds_bpermute_b32" and on[other]:
                    result[lane] = value[other]
                elif mnemonic == "ds_permute_b32" and on[lane]:
                    result[other] = value[lane]
            expected = [r if o else x for r, o, x in zip(result, on, old, strict=True)]
            assert s.v(3)[wave * WAVE : (wave + 1) * WAVE].tolist() == expected


def test_permutation_over_its_own_address() -> None:
    data = random_lanes(np.random.default_rng(41))
    s = Snippet("ds_bpermute_b32 v1, v1, v2", v={1: (63 - np.arange(WAVE)) * 4, 2: data}).run()
    assert np.array_equal(s.v(1), data[::-1])


def _swizzle_source(offset: int, lane: int) -> int:
    """Returns the source lane of DS_SWIZZLE_B32 by the ISA document: FFT, rotation, permutation of four lanes, or masks on the
    lane's five bits."""
    low, mask = lane & 31, offset & 31
    if offset >= 0xE000:
        source = int(f"{low:05b}"[::-1], 2) >> bin(mask).count("1") | low & mask
    elif offset >= 0xC000:
        rotate = offset >> 5 & 31
        source = low & mask | (low + (-rotate if offset >> 10 & 1 else rotate)) & ~mask & 31
    elif offset & 0x8000:
        return lane & ~3 | offset >> 2 * (lane & 3) & 3
    else:
        source = (low & mask | offset >> 5 & 31) ^ offset >> 10
    return source | lane & 32


_SWIZZLES = [
    ("swizzle(QUAD_PERM,0,1,2,3)", 0x80E4), ("swizzle(QUAD_PERM,3,1,0,2)", 0x8087), ("swizzle(SWAP,1)", 1 << 10 | 31),
    ("swizzle(SWAP,16)", 16 << 10 | 31), ("swizzle(SWAP,8)", 8 << 10 | 31), ("swizzle(REVERSE,4)", 3 << 10 | 31),
    ("swizzle(REVERSE,32)", 31 << 10 | 31), ("swizzle(BROADCAST,8,3)", 3 << 5 | 24), ("swizzle(BROADCAST,32,31)", 31 << 5),
    ('swizzle(BITMASK_PERM,"01pip")', 2 << 10 | 8 << 5 | 7), ('swizzle(BITMASK_PERM, "pppii")', 3 << 10 | 31),
    ("swizzle(FFT,0)", 0xE000), ("swizzle(FFT,5)", 0xE005), ("swizzle(ROTATE,0,5)", 0xC000 | 5 << 5),
    ("swizzle(ROTATE,1,3)", 0xC000 | 1 << 10 | 3 << 5), ("65535", 0xFFFF), ("0x8123", 0x8123), ("49249", 0xC061),
    ("0x1c1f", 0x1C1F), ("0", 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "offset"), _SWIZZLES)
def test_swizzles(text: str, offset: int) -> None:
    for mask in (MASK64, 0x0F0F0F0F5A5A5A5A):
        rng = np.random.default_rng(42)
        data, keep, on = random_lanes(rng, 2), random_lanes(rng, 2), bits_of(mask)
        s = Snippet(f"ds_swizzle_b32 v2, v1 offset:{text}", v={1: data, 2: keep}, s={"exec": mask}, waves=2, registers=4).run()
        for lane in range(2 * WAVE):
            source = _swizzle_source(offset, lane % WAVE)
            value = int(data[lane // WAVE * WAVE + source]) if on[source] else 0
            assert s.v(2)[lane] == (value if on[lane % WAVE] else keep[lane]), lane


def test_swizzle_without_an_offset() -> None:
    """The assembler omits an offset of 0. With this offset, all lanes read lane 0 of their half of the wave."""
    data = random_lanes(np.random.default_rng(43))
    s = Snippet("ds_swizzle_b32 v2, v1", v={1: data}).run()
    assert s.v(2).tolist() == [int(data[0])] * 32 + [int(data[32])] * 32


@pytest.mark.parametrize("text", ["swizzle(TWIST,3)", "turn(1)"])
def test_swizzles_that_do_not_exist(text: str) -> None:
    with pytest.raises(UnknownInstruction, match="swizzle"):
        Snippet(f"ds_swizzle_b32 v2, v1 offset:{text}")
