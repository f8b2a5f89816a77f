"""Tests typed buffer accesses against conversions of single elements, with Python integers and fractions.

Definitions: chapter "Vector memory operations" of the CDNA4 ISA document; names of formats: LLVM's documentation of
AMDGPU modifiers.
"""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import EmulationError, UnknownInstruction

from .isa import MASK32, WAVE, bits_of, implemented, random_lanes, signed

# Data format -> the elements' widths, from the lowest bit on.
DATA = {
    "8": [8], "16": [16], "8_8": [8, 8], "32": [32], "16_16": [16, 16], "10_11_11": [11, 11, 10], "11_11_10": [10, 11, 11],
    "10_10_10_2": [2, 10, 10, 10], "2_10_10_10": [10, 10, 10, 2], "8_8_8_8": [8] * 4, "32_32": [32] * 2, "16_16_16_16": [16] * 4,
    "32_32_32": [32] * 3, "32_32_32_32": [32] * 4,
}  # fmt: skip
NUMBERS = {"UNORM": 0, "SNORM": 1, "USCALED": 2, "SSCALED": 3, "UINT": 4, "SINT": 5, "FLOAT": 7}
COMPONENTS = {"x": 1, "xy": 2, "xyz": 3, "xyzw": 4}
MASKS = [(1 << 64) - 1, 0x5A5A5A5A5A5A5A5A, 0]


def f32(value: Fraction | float) -> int:
    return struct.unpack("<I", struct.pack("<f", float(value)))[0]


def f16(bits32: int) -> int:
    value = struct.unpack("<f", struct.pack("<I", bits32))[0]
    with np.errstate(over="ignore"):
        return int(np.float16(np.float32(value)).view(np.uint16))


def loaded(bits: int, width: int, number: str) -> int:
    """Returns the register of an element, by the definition of its format."""
    if width == 32 or number == "UINT":
        return bits
    if number == "SINT":
        return signed(bits, width) & MASK32
    if number == "FLOAT":
        # sign (16 bits only), 5 bits of exponent with bias 15, mantissa
        mantissa_bits = 10 if width == 16 else width - 5
        exponent, mantissa = bits >> mantissa_bits & 31, bits & ((1 << mantissa_bits) - 1)
        sign = -1 if width == 16 and bits >> 15 else 1
        if exponent == 31:
            return f32(float("nan")) if mantissa else f32(sign * float("inf"))
        scale = Fraction(2) ** (max(exponent, 1) - 15)
        value = scale * (Fraction(mantissa, 1 << mantissa_bits) + (exponent > 0))
        return f32(value) | (1 << 31 if sign < 0 else 0)
    value = Fraction(bits if number.startswith("U") else signed(bits, width))
    if number == "UNORM":
        value /= (1 << width) - 1
    elif number == "SNORM":
        value = max(value / max(1, (1 << (width - 1)) - 1), Fraction(-1))
    return f32(value)


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > 0x7F800000


def known(data: str, number: str) -> bool:
    return number != "FLOAT" or all(width in (10, 11, 16, 32) for width in DATA[data])


FORMATS = [(data, number) for data in DATA for number in NUMBERS if known(data, number)]


def test_every_format_instruction_is_tested() -> None:
    names = {f"{kind}buffer_{way}_format_{d16}{name}" for kind in ("", "t") for way in ("load", "store") for d16 in ("", "d16_")
             for name in COMPONENTS}  # fmt: skip
    assert implemented("format_memory") == names | {f"buffer_{way}_format_d16_hi_x" for way in ("load", "store")}


class Typed:
    """64 lanes that access elements of ``size`` bytes in random slots of 16 bytes."""

    def __init__(self, seed: int, mask: int = MASKS[0]) -> None:
        rng = np.random.default_rng(seed)
        self.memory = rng.integers(0, 256, 2048, dtype=np.uint8)
        self.before = bytes(self.memory)
        self.offsets = (rng.permutation(120)[:WAVE] * 16 + 16).astype(np.uint32)
        self.data = {i: random_lanes(rng) for i in range(8, 12)}
        self.on, self.mask = bits_of(mask), mask

    def run(self, line: str, word3: int = 0x27000, s: dict | None = None, v: dict | None = None) -> Snippet:
        at = self.memory.ctypes.data
        state = {4: at & MASK32, 5: at >> 32, 6: 2048, 7: word3, "exec": self.mask, **(s or {})}
        vectors = {1: self.offsets, **self.data, **(v or {})}
        return Snippet(f"{line}\ns_waitcnt vmcnt(0)", v=vectors, s=state, arrays=[self.memory], sanitize=True).run()

    def elements(self, lane: int, data: str) -> list[int]:
        widths = DATA[data]
        whole = int.from_bytes(self.before[int(self.offsets[lane]) :][: sum(widths) // 8], "little")
        return [whole >> sum(widths[:i]) & ((1 << width) - 1) for i, width in enumerate(widths)]

    def registers(self, lane: int, data: str, number: str, count: int) -> list[int]:
        found = [loaded(bits, width, number) for bits, width in zip(self.elements(lane, data), DATA[data], strict=True)]
        return (found + [0] * 4)[:count]


def resource(data: str, number: str, selects: tuple[int, ...] = (4, 5, 6, 7)) -> int:
    code = list(DATA).index(data) + 1
    return sum(select << 3 * i for i, select in enumerate(selects)) | NUMBERS[number] << 12 | code << 15


def check(s: Snippet, case: Typed, expected_of) -> None:
    for lane in range(WAVE):
        old = [int(case.data[8 + i][lane]) for i in range(4)]
        expected = expected_of(lane, old) if case.on[lane] else old
        found = [int(s.v(8 + i)[lane]) for i in range(4)]
        assert all(a == b or (is_nan(a) and is_nan(b)) for a, b in zip(found, expected, strict=True)), (lane, found, expected)


@pytest.mark.parametrize(("data", "number"), FORMATS)
def test_loads(data: str, number: str) -> None:
    """Components beyond the format's elements are zero. Formats of the instruction and of the resource agree."""
    for seed, (name, count) in enumerate(COMPONENTS.items()):
        for mask in MASKS:
            registers = "v8" if count == 1 else f"v[8:{7 + count}]"
            case = Typed(seed, mask)
            line = f"{registers}, v1, s[4:7], 0"
            typed = f"tbuffer_load_format_{name} {line} format:[BUF_DATA_FORMAT_{data},BUF_NUM_FORMAT_{number}] offen"
            for s in (case.run(typed), case.run(f"buffer_load_format_{name} {line} offen", resource(data, number))):
                check(s, case, lambda lane, old, c=case, n=count: c.registers(lane, data, number, n) + old[n:])


@pytest.mark.parametrize(("data", "number"), [f for f in FORMATS if 32 not in DATA[f[0]]])
def test_loads_of_16_bits(data: str, number: str) -> None:
    for seed, (name, count) in enumerate(COMPONENTS.items()):
        case, words = Typed(seed), -(-count // 2)
        registers = "v8" if words == 1 else "v[8:9]"
        s = case.run(f"buffer_load_format_d16_{name} {registers}, v1, s[4:7], 0 offen", resource(data, number))

        def expected(lane: int, old: list[int], case: Typed = case, count: int = count, words: int = words) -> list[int]:
            narrow = [x & 0xFFFF if number.endswith("INT") else f16(x) for x in case.registers(lane, data, number, count)]
            if count == 1:  # a single element keeps the upper half
                return [old[0] & 0xFFFF0000 | narrow[0], *old[1:]]
            narrow.append(0)
            return [narrow[2 * i] | narrow[2 * i + 1] << 16 for i in range(words)] + old[words:]

        if number == "FLOAT":
            _check_half_nans(s, case, expected)
        else:
            check(s, case, expected)
    case = Typed(9)
    s = case.run("buffer_load_format_d16_hi_x v8, v1, s[4:7], 0 offen", resource(data, "UINT"))
    check(s, case, lambda lane, old: [old[0] & 0xFFFF | (case.elements(lane, data)[0] & 0xFFFF) << 16, *old[1:]])


def _check_half_nans(s: Snippet, case: Typed, expected_of) -> None:
    """Compares 16-bit halves; the bits of a NaN are not compared."""
    for lane in range(WAVE):
        old = [int(case.data[8 + i][lane]) for i in range(4)]
        for i, wanted in enumerate(expected_of(lane, old)):
            found = int(s.v(8 + i)[lane])
            for shift in (0, 16):
                a, b = found >> shift & 0xFFFF, wanted >> shift & 0xFFFF
                assert a == b or (a & 0x7FFF > 0x7C00 and b & 0x7FFF > 0x7C00), (lane, i)


def test_destination_selects() -> None:
    """The resource says which element a component gets: 0 and 1 are constants."""
    case = Typed(3)
    s = case.run("buffer_load_format_xyzw v[8:11], v1, s[4:7], 0 offen", resource("8_8_8_8", "UINT", (7, 0, 1, 4)))
    check(s, case, lambda lane, old: [case.elements(lane, "8_8_8_8")[3], 0, 1, case.elements(lane, "8_8_8_8")[0]])
    s = case.run("buffer_load_format_xyzw v[8:11], v1, s[4:7], 0 offen", resource("8_8_8_8", "UNORM", (7, 0, 1, 4)))
    real = [[loaded(bits, 8, "UNORM") for bits in case.elements(lane, "8_8_8_8")] for lane in range(WAVE)]
    check(s, case, lambda lane, old: [real[lane][3], 0, f32(1.0), real[lane][0]])


@pytest.mark.parametrize("records", [0, 16, 19, 20, 200, 2048])
def test_the_range_check_is_for_all_elements(records: int) -> None:
    """A load with an element out of range returns zero for all, except for the constant 1."""
    case, word3 = Typed(4), resource("8_8_8_8", "UINT", (4, 5, 6, 1))
    s = case.run("buffer_load_format_xyzw v[8:11], v1, s[4:7], 0 offen", word3, s={6: records})

    def expected(lane: int, old: list[int]) -> list[int]:
        inside = int(case.offsets[lane]) + 4 <= records
        return [x if inside else 0 for x in case.elements(lane, "8_8_8_8")[:3]] + [1]

    check(s, case, expected)


@pytest.mark.parametrize("kind", ["", "d16_"])
@pytest.mark.parametrize(("data", "number"), [(d, n) for d, n in FORMATS if n in ("UINT", "SINT", "UNORM", "SNORM", "FLOAT")])
def test_stores(data: str, number: str, kind: str) -> None:
    """Integers keep their lowest bits. Normalised formats are clamped and rounded to nearest even."""
    widths = DATA[data]
    if (number == "FLOAT" and not set(widths) <= {16, 32}) or (kind and 32 in widths):
        return
    count = len(widths)
    name = "xyzw"[:count]
    for mask in MASKS:
        case, rng = Typed(5, mask), np.random.default_rng(6)
        real = (rng.standard_normal((4, WAVE)) * 0.8).astype(np.float32)
        real[:, :6] = [[0.0, 1.0, -1.0, 2.0, np.nan, -0.25]] * 4
        if not number.endswith("INT") and 32 not in widths:
            case.data = {8 + i: real[i].view(np.uint32) for i in range(4)}
        values = {lane: [int(case.data[8 + i][lane]) for i in range(4)] for lane in range(WAVE)}
        registers = {8 + i: case.data[8 + i] for i in range(4)}
        if kind:
            narrow = [
                case.data[8 + i] & np.uint32(0xFFFF)
                if number.endswith("INT")
                else case.data[8 + i].view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
                for i in range(4)
            ]
            registers = {8: narrow[0] | narrow[1] << np.uint32(16), 9: narrow[2] | narrow[3] << np.uint32(16)}
            if not number.endswith("INT"):
                values = {lane: [f32(float(np.uint16(narrow[i][lane]).view(np.float16))) for i in range(4)] for lane in range(WAVE)}
        used = -(-count // 2) if kind else count
        text = "v8" if used == 1 else f"v[8:{7 + used}]"
        case.run(f"buffer_store_format_{kind}{name} {text}, v1, s[4:7], 0 offen", resource(data, number), v=registers)
        expected = bytearray(case.before)
        for lane in np.flatnonzero(case.on).tolist():
            whole = 0
            for i, width in enumerate(widths):
                whole |= stored(values[lane][i], width, number) << sum(widths[:i])
            at = int(case.offsets[lane])
            expected[at : at + sum(widths) // 8] = whole.to_bytes(sum(widths) // 8, "little")
        assert bytes(case.memory) == bytes(expected)


def stored(bits32: int, width: int, number: str) -> int:
    mask = (1 << width) - 1
    if width == 32 or number.endswith("INT"):
        return bits32 & mask
    if number == "FLOAT":
        return f16(bits32)
    value = struct.unpack("<f", struct.pack("<I", bits32))[0]
    most = mask if number == "UNORM" else (1 << (width - 1)) - 1
    low = 0.0 if number == "UNORM" else -1.0
    exact = Fraction(0 if value != value else min(max(value, low), 1.0)) * most
    return round(exact) & mask  # Python rounds halves to even


def test_the_upper_half_is_stored() -> None:
    case = Typed(7)
    case.run("buffer_store_format_d16_hi_x v8, v1, s[4:7], 0 offen", resource("16", "UINT"))
    expected = bytearray(case.before)
    for lane in range(WAVE):
        at = int(case.offsets[lane])
        expected[at : at + 2] = (int(case.data[8][lane]) >> 16).to_bytes(2, "little")
    assert bytes(case.memory) == bytes(expected)


@pytest.mark.parametrize("offen", [False, True])
@pytest.mark.parametrize("line", ["buffer_load_dword v8", "buffer_load_format_x v8", "tbuffer_load_format_x v8"])
def test_an_index_selects_a_record(line: str, offen: bool) -> None:
    """address = base + soffset + index * stride + offset. An index of at least num_records is out of range."""
    case = Typed(8)
    index = np.random.default_rng(1).integers(0, 60, WAVE).astype(np.uint32)
    offset = np.random.default_rng(2).integers(0, 3, WAVE).astype(np.uint32) * 4
    at, stride, records = case.memory.ctypes.data, 20, 50
    s = {5: at >> 32 | stride << 16, 6: records, 9: 8}
    form = " format:[BUF_DATA_FORMAT_32,BUF_NUM_FORMAT_UINT]" if line.startswith("t") else ""
    vaddr = "v[2:3]" if offen else "v2"
    text = f"{line}, {vaddr}, s[4:7], s9{form} idxen{' offen' if offen else ''} offset:4"
    found = case.run(text, resource("32", "UINT"), s=s, v={2: index, 3: offset})
    for lane in range(WAVE):
        place = 8 + int(index[lane]) * stride + 4 + (int(offset[lane]) if offen else 0)
        expected = int.from_bytes(case.before[place : place + 4], "little") if index[lane] < records else 0
        assert int(found.v(8)[lane]) == expected, lane


@pytest.mark.parametrize(
    ("line", "word3", "said"),
    [
        ("buffer_load_format_x v8, v1, s[4:7], 0 offen", 4, "data format 0"),
        ("buffer_load_format_x v8, v1, s[4:7], 0 offen", resource("8", "UINT") | 6 << 12, "is no buffer format"),
        ("buffer_load_format_x v8, v1, s[4:7], 0 offen", resource("8", "FLOAT"), "float of 8 bits"),
        ("buffer_store_format_x v8, v1, s[4:7], 0 offen", resource("8_8", "UINT"), "to 2 elements"),
        ("buffer_store_format_x v8, v1, s[4:7], 0 offen", resource("8", "UINT", (5, 4, 4, 4)), "destination selects"),
        ("buffer_store_format_x v8, v1, s[4:7], 0 offen", resource("8", "USCALED"), "as uscaled"),
    ],
)
def test_what_the_document_leaves_open(line: str, word3: int, said: str) -> None:
    with pytest.raises(EmulationError, match=said):
        Typed(1).run(line, word3)


def test_forms_that_are_not_implemented() -> None:
    for line in (
        "tbuffer_load_format_x v8, v1, s[4:7], 0 format:[BUF_DATA_FORMAT_INVALID] offen",
        "tbuffer_load_format_x v8, v1, s[4:7], 0 offen tfe",
        "buffer_load_dword v8, v[2:3], s[4:7], 0 offen",
    ):
        with pytest.raises(UnknownInstruction):
            Snippet(line)


def test_the_format_may_be_a_number() -> None:
    """The number has the data format in its lowest four bits. Without a format, it is 8-bit unorm."""
    case = Typed(2)
    s = case.run("tbuffer_load_format_x v8, v1, s[4:7], 0 format:66 offen")
    check(s, case, lambda lane, old: [case.elements(lane, "16")[0], *old[1:]])
    s = case.run("tbuffer_load_format_x v8, v1, s[4:7], 0 offen")
    check(s, case, lambda lane, old: [loaded(case.elements(lane, "8")[0], 8, "UNORM"), *old[1:]])
