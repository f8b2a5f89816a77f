"""Tests conversions and comparisons of all types against exact arithmetic."""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from sm90_emulator import UnknownInstruction

from .snippets import LANES, lanes

INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
# The number of fraction bits and of exponent bits of each format.
FLOATS = {"f16": (10, 5), "bf16": (7, 8), "f32": (23, 8), "f64": (52, 11)}
BITS = {"f16": 16, "bf16": 16} | {kind: int(kind[1:]) for kind in (*INTEGERS, "f32", "f64")}
DRAW = np.random.default_rng(0)
Number = Fraction | float
ROUNDED: dict[str, Callable[[Fraction], int]] = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}


def value_of(bits: int, kind: str) -> Number:
    """Returns the exact value in a register: a Fraction, or a float for infinity and NaN."""
    if kind in INTEGERS:
        return Fraction(bits - (1 << BITS[kind]) if kind[0] == "s" and bits >> (BITS[kind] - 1) else bits)
    if kind == "bf16":
        bits, kind = bits << 16, "f32"
    (value,) = struct.unpack({"f16": "<e", "f32": "<f", "f64": "<d"}[kind], bits.to_bytes(BITS[kind] // 8, "little"))
    return Fraction(value) if math.isfinite(value) else value


def to_float(x: Number, kind: str, mode: str) -> Number:
    """Rounds a value once to a format."""
    if isinstance(x, float) or not x:
        return x
    fraction, exponents = FLOATS[kind]
    least = 2 - (1 << (exponents - 1))
    exponent = math.floor(math.log2(abs(x.numerator))) - math.floor(math.log2(x.denominator))
    exponent += 1 if abs(x) >= Fraction(2) ** (exponent + 1) else -1 if abs(x) < Fraction(2) ** exponent else 0
    unit = Fraction(2) ** (max(exponent, least) - fraction)
    near = ROUNDED[mode](x / unit) * unit
    most = (2 - Fraction(2) ** -fraction) * Fraction(2) ** (1 - least)
    if abs(near) <= most:
        return near
    finite = mode == "rz" or mode == ("rm" if x > 0 else "rp")
    return (most if finite else math.inf) * (1 if x > 0 else -1)


def to_integer(x: Number, kind: str, mode: str, source: str) -> int:
    least, most = (-(1 << (BITS[kind] - 1)), (1 << (BITS[kind] - 1)) - 1) if kind[0] == "s" else (0, (1 << BITS[kind]) - 1)
    if isinstance(x, float):
        if x == x:
            return most if x > 0 else least
        special = -(1 << (BITS[kind] - 1)) if kind[0] == "s" else 1 << (BITS[kind] - 1)
        return special if source == "f64" or BITS[kind] == 64 else 0
    return min(max(ROUNDED[mode](x), least), most)


def registers(kind: str) -> Any:
    """Returns one value per lane: all magnitudes, ties, out-of-range values, and special values."""
    if kind in INTEGERS:
        edges = [0, 1, 2 ** BITS[kind] - 1, 2 ** (BITS[kind] - 1), 2 ** (BITS[kind] - 1) - 1, 2 ** (BITS[kind] - 1) + 1]
        drawn = [int(DRAW.integers(0, 2**64, dtype=np.uint64)) >> int(DRAW.integers(64 - BITS[kind], 64)) for _ in range(26)]
        return np.array([*edges, *drawn], np.uint64)
    chosen = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        127.5,
        -128.5,
        255.5,
        65504.0,
        65519.9,
        65520.0,
        2.0**31 - 0.5,
        2.0**63,
        -(2.0**63),
    ]
    chosen += [math.inf, -math.inf, math.nan, 3.4e38, 6e-8, 2e-8, 1e-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 - 2.0**-40]
    chosen += [float(DRAW.normal()) * 10.0 ** int(DRAW.integers(-8, 20)) for _ in range(LANES - len(chosen))]
    wide = np.array(chosen)
    with np.errstate(over="ignore"):
        if kind == "f64":
            return wide.view(np.uint64)
        if kind == "f16":
            return wide.astype(np.float16).view(np.uint16).astype(np.uint64)
        return wide.astype(np.float32).view(np.uint32).astype(np.uint64) >> (16 if kind == "bf16" else 0)


def execute(instruction: str, source: Any, from_: str, to: str, room: int) -> Any:
    """Returns the result registers of an instruction for the given source registers. A result has ``room`` bits."""
    before = {8: "cvt.u16.u64 %h0, %d10;", 16: "cvt.u16.u64 %h0, %d10;", 32: "cvt.u32.u64 %r10, %d10;", 64: ""}[BITS[from_]]
    names = {8: "%h{}", 16: "%h{}", 32: "%r{}", 64: "%d{}"}
    operand = names[BITS[from_]].format(0 if BITS[from_] < 32 else 10)
    result = names[room].format({16: 1, 32: 100, 64: 40}[room])
    after = f"cvt.u64.u{room} %d40, {result};" if room < 64 else ""
    return lanes(f"{before} {instruction} {result}, {operand}; {after}", [source], np.uint64)


CONVERSIONS = [(to, source) for to, source in itertools.product((*FLOATS, *INTEGERS), repeat=2) if {to, source} & set(FLOATS)]


@pytest.mark.parametrize(("to", "source"), CONVERSIONS)
def test_every_conversion_rounds_once(to: str, source: str) -> None:
    given = registers(source)
    values = [value_of(int(bits), source) for bits in given]
    room = max(BITS[to], 16)
    for mode in ROUNDED:
        if to in INTEGERS:
            got = execute(f"cvt.{mode}i.{to}.{source}", given, source, to, room)
            wanted = [to_integer(value, to, mode, source) & ((1 << room) - 1) for value in values]
            assert got.tolist() == wanted, mode
            continue
        exact = source in FLOATS and all(f <= g for f, g in zip(FLOATS[source], FLOATS[to], strict=True))
        got = execute(f"cvt.{f'{mode}i.' if to == source else '' if exact else f'{mode}.'}{to}.{source}", given, source, to, room)
        for bits, value in zip(got, values, strict=True):
            result, wanted = value_of(int(bits), to), to_float(value, to, mode)
            if to == source and isinstance(value, Fraction):
                wanted = Fraction(ROUNDED[mode](value))
            assert result == wanted or (result != result and wanted != wanted), (mode, value, result, wanted)


def test_results_in_wider_registers_and_operands_of_wider_registers() -> None:
    negative = np.full(LANES, 2**64 - 7, np.uint64)
    assert (lanes("cvt.s8.s64 %d40, %d10;", [negative], np.int64) == -7).all()
    assert (lanes("cvt.u8.u64 %d40, %d10;", [negative], np.int64) == 249).all()
    assert (lanes("cvt.rzi.s32.f32 %d40, 0fC0F00000;", [], np.int64) == -7).all()
    numbers = np.arange(LANES, dtype=np.uint64) << np.uint64(33) | np.arange(LANES, dtype=np.uint64)
    assert (lanes("cvt.rn.f32.s32 %r100, %d10;", [numbers], np.float32) == np.arange(LANES)).all()


@pytest.mark.parametrize(
    ("instruction", "given", "wanted"),
    [
        ("cvt.sat.s8.s32", -300, -128), ("cvt.sat.u8.s32", -3, 0), ("cvt.sat.u8.s32", 300, 255), ("cvt.sat.s16.u32", 2**31, 32767),
        ("cvt.sat.u16.s32", 70000, 65535), ("cvt.sat.s32.u32", 2**32 - 1, 2**31 - 1), ("cvt.sat.u32.s32", -1, 0),
    ],
)  # fmt: skip
def test_integers_that_saturate(instruction: str, given: int, wanted: int) -> None:
    assert (lanes(f"{instruction} %r100, {given};", [], np.int32) == wanted).all()


@pytest.mark.parametrize(
    ("instruction", "given", "wanted"),
    [
        ("cvt.sat.f32.f32", -1.5, 0.0), ("cvt.sat.f32.f32", 1.5, 1.0), ("cvt.sat.f32.f32", math.nan, 0.0),
        ("cvt.rni.sat.f32.f32", 0.75, 1.0), ("cvt.ftz.f32.f32", 1e-40, 0.0), ("cvt.rpi.ftz.f32.f32", 1e-40, 0.0),
        ("cvt.rpi.f32.f32", 1e-40, 1.0), ("cvt.rn.tf32.f32", 1 + 2.0**-11, 1.0), ("cvt.rna.tf32.f32", 1 + 2.0**-11, 1 + 2.0**-10),
        ("cvt.rz.tf32.f32", 1 + 1.9 * 2.0**-11, 1.0), ("cvt.rn.relu.tf32.f32", -3.0, 0.0),
    ],
)  # fmt: skip
def test_modifiers_of_conversions(instruction: str, given: float, wanted: float) -> None:
    got = lanes(f"{instruction} %r100, %r10;", [np.full(LANES, given, np.float32)], np.float32)
    assert (got == np.float32(wanted)).all()


@pytest.mark.parametrize(("kind", "most"), [("f16", 0x7BFF), ("bf16", 0x7F7F)])
def test_floats_of_sixteen_bits_that_saturate_or_are_not_negative(kind: str, most: int) -> None:
    given = np.full(LANES, np.inf, np.float32), np.full(LANES, -2.0, np.float32)
    got = lanes(f"cvt.rn.satfinite.{kind}x2.f32 %r100, %r10, %r11;", given, np.uint32)
    assert (got == (most << 16 | (0xC000))).all()
    got = lanes(f"cvt.rz.relu.satfinite.{kind}x2.f32 %r100, %r10, %r11;", given, np.uint32)
    assert (got == most << 16).all()


ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def holds(comparison: str, x: Number, y: Number) -> bool:
    """Returns the result of a float comparison, by PTX's definition of ``comparison``."""
    apart = x != x or y != y
    if comparison in ("num", "nan"):
        return apart == (comparison == "nan")
    return apart if apart and comparison not in ORDERED else not apart and ORDERED[comparison[:2]](x, y)


@pytest.mark.parametrize("kind", [*FLOATS, "f16x2", "bf16x2", *INTEGERS[2:]])
def test_every_comparison(kind: str) -> None:
    """Tests results as predicates (`setp`) and as values (`set`)."""
    one = kind.removesuffix("x2")
    x = registers(one)
    y = np.where(np.arange(LANES) % 3 == 0, x, np.roll(x, 5))
    values = [[value_of(int(bits), one) for bits in side] for side in (x, y)]
    names = [*ORDERED, "num", "nan", "equ", "neu", "ltu", "leu", "gtu", "geu"] if one in FLOATS else [*ORDERED]
    if kind.endswith("x2"):
        words = [(np.roll(side, 1) << np.uint64(16) | side).astype(np.uint32) for side in (x, y)]
        operands, load = "%r10, %r11", ""
    else:
        words, operands = [x, y], {16: "%h0, %h1", 32: "%r10, %r11", 64: "%d10, %d11"}[BITS[kind]]
        load = {16: "cvt.u16.u64 %h0, %d10; cvt.u16.u64 %h1, %d11;", 32: "cvt.u32.u64 %r10, %d10; cvt.u32.u64 %r11, %d11;"}.get(
            BITS[kind], ""
        )
    for name in names:
        wanted = np.array([holds(name, a, b) if one in FLOATS else ORDERED[name](a, b) for a, b in zip(*values, strict=True)])
        both = f"{load} setp.{name}.{kind} %p1|%p2, {operands}; selp.b32 %r20, 1, 0, %p1; selp.b32 %r21, 2, 0, %p2;"
        got = lanes(f"{both} add.u32 %r100, %r20, %r21;", words, np.uint32)
        other = np.roll(wanted, 1) if kind.endswith("x2") else ~wanted
        assert (got == wanted + 2 * other).all(), name
        if kind.endswith("x2"):
            true = 0x3C00 if one == "f16" else 0x3F80
            got = lanes(f"set.{name}.{kind}.{kind} %r100, {operands};", words, np.uint32)
            assert (got == true * (wanted + (other.astype(np.int64) << 16))).all(), name
            got = lanes(f"set.{name}.u32.{kind} %r100, {operands};", words, np.uint32)
            assert (got == 0xFFFF * (wanted + (other.astype(np.int64) << 16))).all(), name
        else:
            got = lanes(f"{load} set.{name}.u32.{kind} %r100, {operands};", words, np.uint32)
            assert (got == np.where(wanted, 0xFFFFFFFF, 0)).all(), name
            got = lanes(f"{load} set.{name}.f32.{kind} %r100, {operands};", words, np.float32)
            assert (got == wanted).all(), name


def test_comparisons_that_are_combined_or_flush() -> None:
    tiny = np.full(LANES, 1e-40, np.float32)
    text = "setp.{}.f32 %p1, %r10, 0f00000000; selp.b32 %r100, 1, 0, %p1;"
    assert (lanes(text.format("gt"), [tiny], np.uint32) == 1).all()
    assert (lanes(text.format("gt.ftz"), [tiny], np.uint32) == 0).all()
    combined = "setp.lt.u32 %p2, %r0, 8; set.ge.and.u32.f32 %r100, %r10, 0f00000000, !%p2;"
    assert (lanes(combined, [tiny], np.uint32) == np.where(np.arange(LANES) < 8, 0, 0xFFFFFFFF)).all()


def test_a_register_that_is_too_narrow_or_of_another_kind() -> None:
    for text in ("cvt.u32.u64 %r100, %r10;", "add.u64 %d40, %r10, %d10;", "mov.b32 %r100, %p1;"):
        with pytest.raises(UnknownInstruction, match="is read as"):
            lanes(text, [], np.uint32)
