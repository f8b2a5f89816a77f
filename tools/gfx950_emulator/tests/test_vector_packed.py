"""Tests packed instructions against their definition, lane by lane (CDNA4 ISA document, section "Packed Math" and chapter
VOP3P)."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import UnknownInstruction

from .oracles import F16, F32, NAN, Binary, add, fma, lane_bits, multiply, operands, read_lanes, same, signed, words

M16 = 0xFFFF


def choice(form: Binary, largest: bool) -> Callable[[int, int], int | str]:
    def oracle(a: int, b: int) -> int | str:
        if form.is_signalling(a) or form.is_signalling(b) or (form.is_nan(a) and form.is_nan(b)):
            return NAN
        if form.is_nan(a) or form.is_nan(b):
            return b if form.is_nan(a) else a
        return (max if largest else min)(a, b, key=form.key)

    return oracle


def choice_or_nan(largest: bool) -> Callable[..., int | str]:
    def oracle(*numbers: int) -> int | str:
        return NAN if any(F16.is_nan(x) for x in numbers) else (max if largest else min)(*numbers, key=F16.key)

    return oracle


# Operations on both halves of registers: the type, the number of sources, and the result of one half.
HALVES: dict[str, tuple[str, int, Callable[..., int | str]]] = {
    "v_pk_add_f16": ("f16", 2, lambda a, b: add(F16, a, b)),
    "v_pk_mul_f16": ("f16", 2, lambda a, b: multiply(F16, a, b)),
    "v_pk_fma_f16": ("f16", 3, lambda a, b, c: fma(F16, a, b, c)),
    "v_pk_min_f16": ("f16", 2, choice(F16, False)),
    "v_pk_max_f16": ("f16", 2, choice(F16, True)),
    "v_pk_minimum3_f16": ("f16", 3, choice_or_nan(False)),
    "v_pk_maximum3_f16": ("f16", 3, choice_or_nan(True)),
    "v_pk_add_u16": ("u16", 2, operator.add),
    "v_pk_sub_u16": ("u16", 2, operator.sub),
    "v_pk_add_i16": ("i16", 2, operator.add),
    "v_pk_sub_i16": ("i16", 2, operator.sub),
    "v_pk_mul_lo_u16": ("u16", 2, operator.mul),
    "v_pk_mad_u16": ("u16", 3, lambda a, b, c: a * b + c),
    "v_pk_mad_i16": ("i16", 3, lambda a, b, c: a * b + c),
    "v_pk_min_u16": ("u16", 2, min),
    "v_pk_max_u16": ("u16", 2, max),
    "v_pk_min_i16": ("i16", 2, min),
    "v_pk_max_i16": ("i16", 2, max),
    "v_pk_lshlrev_b16": ("u16", 2, lambda a, b: b << (a & 15)),
    "v_pk_lshrrev_b16": ("u16", 2, lambda a, b: b >> (a & 15)),
    "v_pk_ashrrev_i16": ("i16", 2, lambda a, b: b >> (a & 15)),
}
PAIRS: dict[str, tuple[int, Callable[..., int | str]]] = {
    "v_pk_add_f32": (2, lambda a, b: add(F32, a, b)),
    "v_pk_mul_f32": (2, lambda a, b: multiply(F32, a, b)),
    "v_pk_fma_f32": (3, lambda a, b, c: fma(F32, a, b, c)),
}
TESTED = {*HALVES, *PAIRS, "v_pk_fmac_f16", "v_pk_mov_b32"}

# op_sel, op_sel_hi, neg_lo and neg_hi of the first two sources. A third source has the modifiers of the first.
SELECTIONS = [
    ((0, 0), (1, 1), (0, 0), (0, 0)),
    ((1, 0), (0, 1), (0, 0), (0, 0)),
    ((0, 1), (0, 0), (0, 0), (0, 0)),
    ((1, 1), (1, 0), (0, 0), (0, 0)),
    ((0, 0), (1, 1), (1, 0), (0, 1)),
    ((1, 0), (1, 1), (1, 1), (1, 0)),
]


def modifiers(values: tuple[tuple[int, ...], ...], count: int) -> tuple[str, list[tuple[int, ...]]]:
    """Returns the modifiers as text, without those that LLVM omits, and as values for ``count`` sources."""
    full = [(*v, v[0])[:count] for v in values]
    defaults = [(0,) * count, (1,) * count, (0,) * count, (0,) * count]
    names = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    shown = [f"{n}:[{','.join(map(str, v))}]" for n, v, d in zip(names, full, defaults, strict=True) if v != d]
    return " ".join(shown), full


def halves_of(columns: list[list[int]], i: int, lane: int, upper: int) -> int:
    return columns[i][lane] >> 16 if upper else columns[i][lane] & M16


def two(values: list[list[int]]) -> list[int]:
    return [low | high << 16 for low, high in zip(*values, strict=True)]


def half_operands(type_: str, count: int, lanes: int, seed: int) -> list[list[int]]:
    low, high = (operands((type_,) * count, lanes, seed + i) for i in (0, 7))
    return [two([a, b]) for a, b in zip(low, high, strict=True)]


NOT_NEGATED = [i for i, (_, _, neg_lo, neg_hi) in enumerate(SELECTIONS) if not any((*neg_lo, *neg_hi))]
SELECTED_HALVES = [
    (name, i) for name, (type_, _, _) in HALVES.items() for i in range(len(SELECTIONS)) if type_ == "f16" or i in NOT_NEGATED
]


@pytest.mark.parametrize(("name", "selection"), SELECTED_HALVES)
def test_halves(name: str, selection: int) -> None:
    type_, count, oracle = HALVES[name]
    lanes = 192
    text, (op_sel, op_sel_hi, neg_lo, neg_hi) = modifiers(SELECTIONS[selection], count)
    columns = half_operands(type_, count, lanes, selection)
    sources = ["v8", "v12", "v16"][:count]
    scalars: dict = {}
    if selection % 2:  # a scalar register that differs between waves
        sources[1] = "s4"
        columns[1] = [columns[1][lane // 64 * 64 + 1] for lane in range(lanes)]
        scalars[4] = columns[1][::64]
    rng = random.Random(selection)
    on, old = [rng.random() < 0.7 for _ in range(lanes)], [rng.getrandbits(32) for _ in range(lanes)]
    scalars["exec"] = lane_bits(on)
    v = {0: np.array(old, np.uint32)} | {8 + 4 * i: np.array(column, np.uint32) for i, column in enumerate(columns)}
    snippet = Snippet(f"{name} v0, {', '.join(sources)} {text}", v=v, s=scalars, waves=3).run()

    def value(i: int, lane: int, upper: int, negate: int) -> int:
        bits = halves_of(columns, i, lane, upper) ^ (0x8000 if negate else 0)
        return signed(bits, 16) if type_ == "i16" else bits

    for lane, got in enumerate(read_lanes(snippet, 0, 32)):
        if not on[lane]:
            assert got == old[lane]
            continue
        for shift, select, negate in ((0, op_sel, neg_lo), (16, op_sel_hi, neg_hi)):
            inputs = [value(i, lane, select[i], negate[i]) for i in range(count)]
            assert same(type_, oracle(*inputs), got >> shift & M16), (name, text, lane, [hex(x) for x in inputs], hex(got))


@pytest.mark.parametrize("name", ["v_pk_add_u16", "v_pk_sub_u16", "v_pk_add_i16", "v_pk_sub_i16", "v_pk_mad_u16", "v_pk_mad_i16"])
def test_clamp_limits_integers(name: str) -> None:
    type_, count, oracle = HALVES[name]
    low, high = (-0x8000, 0x7FFF) if type_ == "i16" else (0, M16)
    columns = half_operands(type_, count, 128, 3)
    v = {8 + 4 * i: np.array(column, np.uint32) for i, column in enumerate(columns)}
    snippet = Snippet(f"{name} v0, {', '.join(['v8', 'v12', 'v16'][:count])} clamp", v=v, waves=2).run()
    for lane, got in enumerate(read_lanes(snippet, 0, 32)):
        for upper in (0, 1):
            inputs = [halves_of(columns, i, lane, upper) for i in range(count)]
            exact = int(oracle(*(signed(x, 16) if type_ == "i16" else x for x in inputs)))
            assert got >> 16 * upper & M16 == min(max(exact, low), high) & M16


@pytest.mark.parametrize("name", ["v_pk_add_f16", "v_pk_mul_f16", "v_pk_fma_f16", "v_pk_max_f16", "v_pk_add_f32", "v_pk_fma_f32"])
def test_clamp_of_floats(name: str) -> None:
    """clamp limits results to [0, 1]. NaN becomes 0."""
    narrow = name in HALVES
    count, oracle = HALVES[name][1:] if narrow else PAIRS[name]
    form = F16 if narrow else F32
    columns = half_operands("f16", count, 128, 3) if narrow else [two_registers(128, i) for i in range(count)]
    v = {}
    for i, column in enumerate(columns):
        v |= {8 + 4 * i + j: word for j, word in enumerate(words(column, 32 if narrow else 64))}
    registers = ["v0", "v8", "v12", "v16"] if narrow else ["v[0:1]", "v[8:9]", "v[12:13]", "v[16:17]"]
    snippet = Snippet(f"{name} {', '.join(registers[: count + 1])} clamp", v=v, waves=2).run()
    for lane, got in enumerate(read_lanes(snippet, 0, 32 if narrow else 64)):
        for part in (0, 1):
            mask, shift = (1 << form.width) - 1, form.width * part
            plain = oracle(*(column[lane] >> shift & mask for column in columns))
            expected = 0 if plain == NAN or form.negative(int(plain)) else min(int(plain), form.one)
            assert got >> shift & mask == expected


def two_registers(lanes: int, seed: int) -> list[int]:
    low, high = operands(("f32", "f32"), lanes, seed)
    return [a | b << 32 for a, b in zip(low, high, strict=True)]


# An inline constant is 32 bits: an integer is sign-extended, a float16 is in the lower half with zeros above.
CONSTANTS = {"1.0": 0x3C00, "-4.0": 0xC400, "0.5": 0x3800, "5": 5, "-3": 0xFFFFFFFD, "64": 64}


FLOATS = ["v_pk_add_f16", "v_pk_mul_f16"]
WITH_CONSTANTS = [(name, constant) for name in FLOATS for constant in CONSTANTS]
WITH_CONSTANTS += [
    (name, constant) for name in ("v_pk_add_u16", "v_pk_lshlrev_b16", "v_pk_max_i16") for constant in ("5", "-3", "64")
]


@pytest.mark.parametrize(("name", "constant"), WITH_CONSTANTS)
@pytest.mark.parametrize("op_sel_hi", [(0, 1), (1, 1), (1, 0)])
def test_constants_of_halves(name: str, constant: str, op_sel_hi: tuple[int, int]) -> None:
    type_, _, oracle = HALVES[name]
    column = half_operands(type_, 1, 64, 5)[0]
    line = f"{name} v0, {constant}, v8 op_sel_hi:[{op_sel_hi[0]},{op_sel_hi[1]}]"
    snippet = Snippet(line, v={8: np.array(column, np.uint32)}).run()
    columns = [[CONSTANTS[constant]] * 64, column]
    for lane, got in enumerate(read_lanes(snippet, 0, 32)):
        for upper, select in ((0, (0, 0)), (1, op_sel_hi)):
            inputs = [halves_of(columns, i, lane, select[i]) for i in range(2)]
            inputs = [signed(x, 16) for x in inputs] if type_ == "i16" else inputs
            assert same(type_, oracle(*inputs), got >> 16 * upper & M16), (line, inputs, hex(got))


def test_negated_constant() -> None:
    """Tests neg_lo and neg_hi of a constant."""
    line = "v_pk_fma_f16 v0, v8, 1.0, v12 op_sel_hi:[1,0,1] neg_lo:[0,1,0] neg_hi:[0,0,1]"
    snippet = Snippet(line, v={8: 0x40004200, 12: 0x3C003C00}).run()
    assert snippet.v(0)[0] == 0xC000 | 0x3C00 << 16  # -3 + 1, 2 - 1


@pytest.mark.parametrize("limit", [False, True])
@pytest.mark.parametrize("name", ["v_pk_add_f16", "v_pk_mul_f16", "v_pk_fma_f16", "v_pk_fmac_f16"])
def test_overflow_of_halves(name: str, limit: bool) -> None:
    """With MODE.FP16_OVFL, overflowing results become the largest number, and infinite sources stay infinite."""
    text = {"v_pk_fma_f16": "v0, v1, v2, v0", "v_pk_fmac_f16": "v0, v1, v2"}.get(name, "v0, v1, v2")
    mode = f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {int(limit)}\n"
    snippet = Snippet(f"{mode}{name} {text}", v={0: 0, 1: 0x7BFFFBFF, 2: 0x7C007BFF}).run()
    low = 0xFBFF if limit else 0xFC00
    if name == "v_pk_add_f16":
        low = 0  # the lower half adds opposite numbers
    assert snippet.v(0)[0] == low | 0x7C00 << 16


def test_fmac_of_halves() -> None:
    columns = half_operands("f16", 3, 128, 3)
    rng = random.Random(3)
    on = [rng.random() < 0.7 for _ in range(128)]
    v = {8 * i: np.array(column, np.uint32) for i, column in enumerate(columns)}
    snippet = Snippet("v_pk_fmac_f16 v0, v8, v16", v=v, s={"exec": lane_bits(on)}, waves=2).run()
    for lane, got in enumerate(read_lanes(snippet, 0, 32)):
        if not on[lane]:
            assert got == columns[0][lane]
            continue
        for upper in (0, 1):
            c, a, b = (halves_of(columns, i, lane, upper) for i in range(3))
            assert same("f16", fma(F16, a, b, c), got >> 16 * upper & M16)


# Pairs of registers


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("selection", range(len(SELECTIONS)))
@pytest.mark.parametrize("kind", ["vectors", "scalars", "constant", "overlap"])
def test_pairs(name: str, selection: int, kind: str) -> None:
    count, oracle = PAIRS[name]
    lanes = 192
    values = SELECTIONS[selection]
    if kind == "constant":  # a constant is one register
        values = ((values[0][0], 0), (values[1][0], 0), *values[2:])
    text, (op_sel, op_sel_hi, neg_lo, neg_hi) = modifiers(values, count)
    columns = [two_registers(lanes, seed + selection) for seed in range(count)]
    sources, scalars = ["v[8:9]", "v[12:13]", "v[16:17]"][:count], {}
    if kind == "scalars":
        sources[1] = "s[4:5]"
        columns[1] = [columns[1][lane // 64 * 64 + 1] for lane in range(lanes)]
        scalars = {4: [x & 0xFFFFFFFF for x in columns[1][::64]], 5: [x >> 32 for x in columns[1][::64]]}
    elif kind == "constant":
        sources[1] = "-2.0"
        columns[1] = [0xC0000000] * lanes
    destination = 8 if kind == "overlap" else 0
    rng = random.Random(selection)
    on = [rng.random() < 0.7 for _ in range(lanes)] if kind != "vectors" else [True] * lanes
    scalars["exec"] = lane_bits(on)
    v = {0: 1, 1: 2}
    for i, column in enumerate(columns):
        v |= {8 + 4 * i + j: word for j, word in enumerate(words(column, 64))}
    old = columns[0] if kind == "overlap" else [2 << 32 | 1] * lanes
    line = f"{name} v[{destination}:{destination + 1}], {', '.join(sources)} {text}"
    snippet = Snippet(line, v=v, s=scalars, waves=3).run()
    for lane, got in enumerate(read_lanes(snippet, destination, 64)):
        if not on[lane]:
            assert got == old[lane]
            continue
        for part, select, negate in ((0, op_sel, neg_lo), (1, op_sel_hi, neg_hi)):
            inputs = [columns[i][lane] >> 32 * select[i] & 0xFFFFFFFF ^ (0x80000000 if negate[i] else 0) for i in range(count)]
            assert same("f32", oracle(*inputs), got >> 32 * part & 0xFFFFFFFF), (line, lane, [hex(x) for x in inputs], hex(got))


def test_the_upper_half_of_a_constant_is_refused() -> None:
    with pytest.raises(UnknownInstruction, match=r"upper half of the constant 1\.0"):
        Snippet("v_pk_mul_f32 v[0:1], v[2:3], 1.0")


@pytest.mark.parametrize("op_sel", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("operands_", ["v[2:3], v[4:5]", "v[2:3], v[0:1]", "v[0:1], v[0:1]", "s[4:5], v[0:1]", "v[4:5], s[4:5]"])
def test_move_of_pairs(op_sel: tuple[int, int], operands_: str) -> None:
    """The lower result comes from the first source, and the upper result from the second source. Either source may be the
    destination."""
    rng = random.Random(1)
    before = {i: [rng.getrandbits(32) for _ in range(64)] for i in range(6)}
    scalar = [0x11111111, 0xFF800001]
    on = [lane % 3 != 1 for lane in range(64)]
    v = {i: np.array(column, np.uint32) for i, column in before.items()}
    tail = f" op_sel:[{op_sel[0]},{op_sel[1]}]" if any(op_sel) else ""
    snippet = Snippet(f"v_pk_mov_b32 v[0:1], {operands_}{tail}", v=v, s={4: scalar[0], 5: scalar[1], "exec": lane_bits(on)}).run()
    for part, (text, select) in enumerate(zip(operands_.split(", "), op_sel, strict=True)):
        first = int(text[2])
        wanted = [scalar[select]] * 64 if text[0] == "s" else before[first + select]
        got = read_lanes(snippet, part, 32)
        assert got == [w if o else b for w, o, b in zip(wanted, on, before[part], strict=True)]
