"""Tests forms of vector instructions: modifiers, parts of registers, other lanes' registers, constants, scalars, inactive lanes.

The other ``test_vector_*`` files test what each instruction computes. This file tests the encodings that vector instructions share
(CDNA4 ISA document, chapters "Vector ALU Operations", SDWA and DPP; LLVM's documentation of AMDGPU operands and modifiers). It also
runs a text line of every form that compilers emit, and checks that every instruction has a test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gfx950_emulator.assembly import parse
from gfx950_emulator.binding import BINDERS, split_encoding
from gfx950_emulator.decode import decode
from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import UnknownInstruction

from . import (
    test_vector_compare,
    test_vector_convert,
    test_vector_division,
    test_vector_float,
    test_vector_integer,
    test_vector_packed,
)
from .isa import implemented
from .oracles import F16, F32, F64, FORMATS, NAN, add, fma, lane_bits, multiply, operands, read_lanes, same, signed, words

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
FILES = (test_vector_compare, test_vector_convert, test_vector_division, test_vector_float, test_vector_integer, test_vector_packed)
CASES = [case for file in FILES for case in getattr(file, "CASES", ())]
FRAME = """form:
{line}
.LBB0_1:
\ts_endpgm
\t.amdhsa_kernel form
\t.amdhsa_next_free_vgpr 1024
\t.amdhsa_accum_offset 512
{descriptor}
\t.end_amdhsa_kernel
"""


def lines_of_forms() -> list[str]:
    text = (Path(__file__).parent / "data" / "forms.txt").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def bind(line: str, **descriptor: int) -> Any:
    directives = "\n".join(f"\t.amdhsa_{name} {value}" for name, value in descriptor.items())
    assembly = parse(FRAME.format(line=f"\t{line}", descriptor=directives))
    return decode(assembly.instructions[0], assembly)


# All of them


def test_no_instruction_lacks_a_test() -> None:
    registered = {name for name in BINDERS if name.startswith("v_")} - implemented("lane", "matrix", "control")
    tested = set().union(*(file.TESTED for file in FILES))
    assert registered == tested


def test_the_assembler_accepts_every_line() -> None:
    """LLVM's assembler for gfx950 accepts the tested lines. So the instructions exist, and have the syntax that compilers emit."""
    lines = [line for case in CASES for line in case.lines] + lines_of_forms()
    assert len(lines) > 2000
    text = "\n".join(("\t.text", ".LBB0_1:", *lines)) + "\n"
    assert _assembled(text)
    assert not _assembled(text + "v_add_f32 v0, v1\n")


def _assembled(text: str) -> bool:
    try:
        from triton.backends.amd.compiler import assemble_amdgcn
    except ImportError:  # before Triton 3.9
        from triton._C.libtriton import amd, llvm

        llvm.init_targets()
        return bool(amd.assemble_amdgcn(text, "gfx950", ""))
    try:
        return bool(assemble_amdgcn(text, "gfx950", ""))
    except RuntimeError:
        return False


def test_every_form_decodes() -> None:
    lines = lines_of_forms()
    assert len({split_encoding(line.split()[0]) for line in lines}) > 400
    for line in lines:
        bind(line)


@pytest.mark.parametrize("lanes", ["all lanes", "some lanes"])
def test_every_vector_form_runs(lanes: str) -> None:
    """Runs every form on random registers. Inactive lanes keep their registers."""
    skipped = implemented("lane", "matrix", "control")
    lines = [line for line in lines_of_forms() if line.startswith("v_") and split_encoding(line.split()[0])[0] not in skipped]
    lines = [line for line in lines if not line.startswith(("v_mfma", "v_cmpx"))]
    assert len(lines) > 700
    rng = np.random.default_rng(1)
    v, a = ({i: rng.integers(0, 1 << 32, 128, np.uint32) for i in range(256)} for _ in range(2))
    s: dict[int | str, Any] = {i: rng.integers(0, 1 << 32, 2, np.uint32) for i in range(100)}
    mask = 0x5A5A5A5AF0F0F0F0 if lanes == "some lanes" else M64
    s["exec"], s["vcc"] = mask, 0x123456789ABCDEF0
    snippet = Snippet("\n".join(lines), v=v, a=a, s=s, waves=2, registers=256).run()
    off = ~np.tile([bool(mask >> lane & 1) for lane in range(64)], 2)
    for i in range(256):
        assert (snippet.v(i)[off] == v[i][off]).all()
        assert (snippet.a(i)[off] == a[i][off]).all()


# neg, abs, clamp, omod

SIGNS = {"": lambda x, s: x, "-": lambda x, s: x ^ s, "|": lambda x, s: x & (s - 1), "-|": lambda x, s: x | s}


def modified(sign: str, register: str) -> str:
    return f"-|{register}|" if sign == "-|" else f"|{register}|" if sign == "|" else sign + register


ARITHMETIC: dict[str, tuple[str, int, Callable[..., int | str]]] = {
    "v_add_f32_e64": ("f32", 2, lambda a, b: add(F32, a, b)),
    "v_mul_f16_e64": ("f16", 2, lambda a, b: multiply(F16, a, b)),
    "v_add_f64": ("f64", 2, lambda a, b: add(F64, a, b)),
    "v_fma_f32": ("f32", 3, lambda a, b, c: fma(F32, a, b, c)),
    "v_fma_f64": ("f64", 3, lambda a, b, c: fma(F64, a, b, c)),
    "v_fma_f16": ("f16", 3, lambda a, b, c: fma(F16, a, b, c)),
}


def arithmetic(name: str, signs: tuple[str, ...], tail: str, seed: int) -> tuple[str, list[list[int]], dict[int, np.ndarray]]:
    type_, count, _ = ARITHMETIC[name]
    columns = operands((type_,) * count, 128, seed)
    v = {8 + 4 * i + j: w for i, column in enumerate(columns) for j, w in enumerate(words(column, FORMATS[type_].width))}
    base = ["v[8:9]", "v[12:13]", "v[16:17]"] if type_ == "f64" else ["v8", "v12", "v16"]
    registers = [modified(sign, r) for sign, r in zip(signs, base, strict=False)]
    destination = "v[0:1]" if type_ == "f64" else "v0"
    return f"{name} {', '.join((destination, *registers))} {tail}", columns, v


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("signs", [("-", "", "|"), ("|", "-", ""), ("-|", "|", "-"), ("", "-|", "-|")], ids=str)
def test_signs_of_sources(name: str, signs: tuple[str, ...]) -> None:
    type_, count, oracle = ARITHMETIC[name]
    line, columns, v = arithmetic(name, signs[:count], "", 1)
    got = read_lanes(Snippet(line, v=v, waves=2).run(), 0, max(32, FORMATS[type_].width))
    sign_bit = FORMATS[type_].sign_bit
    for lane in range(128):
        inputs = [SIGNS[sign](column[lane], sign_bit) for sign, column in zip(signs, columns, strict=False)]
        assert same(type_, oracle(*inputs), got[lane]), (line, [hex(x) for x in inputs], hex(got[lane]))


@pytest.mark.parametrize("operand", ["-s4", "|s4|", "-|s4|", "neg(1.0)", "-4.0", "neg(-4.0)", "abs(-4.0)", "neg(3)"])
def test_signs_of_scalars_and_constants(operand: str) -> None:
    values = {"s4": 0xC1234567, "1.0": 0x3F800000, "-4.0": 0xC0800000, "3": 3}
    inner = operand.replace("neg(", "").replace("abs(", "").strip("-|)") if operand != "-4.0" else operand
    inner = "-4.0" if "-4.0" in operand else inner
    bits = values[inner]
    if "|" in operand or "abs" in operand:
        bits &= 0x7FFFFFFF
    if operand.startswith("neg") or (operand.startswith("-") and operand != "-4.0"):
        bits ^= 0x80000000
    (column,) = operands(("f32",), 64, 3)
    got = read_lanes(
        Snippet(f"v_add_f32_e64 v0, {operand}, v8", v={8: np.array(column, np.uint32)}, s={4: 0xC1234567}).run(), 0, 32
    )
    assert all(same("f32", add(F32, bits, x), g) for x, g in zip(column, got, strict=True))


@pytest.mark.parametrize("name", ARITHMETIC)
def test_clamp(name: str) -> None:
    """clamp limits results to [0, 1]. NaN and -0 become 0 (DX10_CLAMP is set)."""
    type_, count, oracle = ARITHMETIC[name]
    form = FORMATS[type_]
    line, columns, v = arithmetic(name, ("", "-", "")[:count], "clamp", 4)
    got = read_lanes(Snippet(line, v=v, waves=2).run(), 0, max(32, form.width))
    for lane in range(128):
        plain = oracle(*(c[lane] ^ (form.sign_bit if i == 1 else 0) for i, c in enumerate(columns)))
        assert got[lane] == (0 if plain == NAN or form.negative(int(plain)) else min(int(plain), form.one))


@pytest.mark.parametrize("name", [name for name in ARITHMETIC if "f16" not in name or "fma" not in name])
@pytest.mark.parametrize(("tail", "factor"), [("mul:2", Fraction(2)), ("mul:4", Fraction(4)), ("div:2", Fraction(1, 2))])
@pytest.mark.parametrize("applies", [False, True])
def test_output_modifier(name: str, tail: str, factor: Fraction, applies: bool) -> None:
    """The output modifier is ignored if MODE.IEEE is set or denormal results are kept, as in every kernel that LLVM compiles for
    Triton. Otherwise, the modifier scales the result, and denormal results and -0 become +0."""
    type_, count, oracle = ARITHMETIC[name]
    form = FORMATS[type_]
    line, columns, v = arithmetic(name, ("",) * count, tail, 5)
    snippet = Snippet("s_nop 0", v=v, waves=2)
    width = "32" if type_ == "f32" else "16_64"
    descriptor = {"ieee_mode": 0, f"float_denorm_mode_{width}": 0} if applies else {}
    with np.errstate(all="ignore"):
        bind(line, **descriptor).run(snippet.group)
    for lane, got in enumerate(read_lanes(snippet, 0, max(32, form.width))):
        expected = oracle(*(column[lane] for column in columns))
        if applies and expected != NAN and not form.is_infinite(int(expected)):
            expected = form.round(form.value(int(expected)) * factor)
            expected = 0 if form.is_denormal(expected) or form.is_zero(expected) else expected
        assert same(type_, expected, got), (line, hex(got))


@pytest.mark.parametrize("descriptor", [{"ieee_mode": 1, "float_denorm_mode_32": 0}, {"ieee_mode": 0, "float_denorm_mode_32": 3}])
def test_output_modifier_is_ignored(descriptor: dict[str, int]) -> None:
    snippet = Snippet("s_nop 0", v={1: 3.0, 2: 4.0})
    bind("v_add_f32_e64 v0, v1, v2 mul:2", **descriptor).run(snippet.group)
    assert snippet.v(0, np.float32)[0] == 7


# op_sel of 16-bit operations

HALVES: dict[str, tuple[tuple[str, ...], str, Callable[..., int | str]]] = {
    "v_fma_f16": (("f16", "f16", "f16"), "f16", lambda a, b, c: fma(F16, a, b, c)),
    "v_mad_u16": (("u16", "u16", "u16"), "u16", lambda a, b, c: a * b + c),
    "v_min3_i16": (("i16", "i16", "i16"), "i16", min),
    "v_sub_i16": (("i16", "i16"), "i16", lambda a, b: a - b),
    "v_mad_i32_i16": (("i16", "i16", "i32"), "i32", lambda a, b, c: a * b + c),
    "v_pack_b32_f16": (("f16", "f16"), "u32", lambda a, b: a | b << 16),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("scalar", [False, True])
def test_op_sel(name: str, scalar: bool) -> None:
    """op_sel selects the half of each source, and the half that the result is written to. The other half of the destination is
    kept."""
    sources, result, oracle = HALVES[name]
    lanes = 64
    registers = [operands(("u32",), lanes, i)[0] for i in range(3)]
    for i, type_ in enumerate(sources):
        if type_[1:] == "16":
            low, high = operands((type_,) * 2, lanes, i)
            registers[i] = [a | b << 16 for a, b in zip(low, high, strict=True)]
    (old,) = operands(("u32",), lanes, 9)
    if scalar:
        registers[1] = [registers[1][7]] * lanes
    narrow = result[1:] == "16"
    for op_sel in product((0, 1), repeat=len(sources) + 1):
        if (not narrow and op_sel[-1]) or any(o for o, t in zip(op_sel, sources, strict=False) if t[1:] == "32"):
            continue
        names = ["v8", "s4" if scalar else "v12", "v16"][: len(sources)]
        line = f"{name} v0, {', '.join(names)} op_sel:[{','.join(map(str, op_sel))}]"
        v = {0: np.array(old, np.uint32)} | {8 + 4 * i: np.array(column, np.uint32) for i, column in enumerate(registers)}
        got = read_lanes(Snippet(line, v=v, s={4: registers[1][0]}).run(), 0, 32)
        for lane in range(lanes):
            inputs = []
            for i, type_ in enumerate(sources):
                bits = registers[i][lane] if type_[1:] == "32" else registers[i][lane] >> 16 * op_sel[i] & 0xFFFF
                inputs.append(signed(bits, int(type_[1:])) if type_[0] == "i" else bits)
            expected, shift = oracle(*inputs), 16 * op_sel[-1]
            if not narrow:
                assert same(result, expected, got[lane])
                continue
            assert same(result, expected, got[lane] >> shift & 0xFFFF), (line, [hex(x) for x in inputs], hex(got[lane]))
            assert (got[lane] ^ old[lane]) & (0xFFFF0000 >> shift) == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("v_pack_b32_f16 v0, -v1, |v2|", 0xBC00 | 0x7E01 << 16),
        ("v_pack_b32_f16 v0, v1, -v2 op_sel:[1,0,0]", 0x4200 | 0x7E01 << 16),
        ("v_pack_b32_f16 v0, 1.0, v2", 0x3C00 | 0xFE01 << 16),
    ],
)
def test_pack_changes_signs_of_floats(line: str, expected: int) -> None:
    assert Snippet(line, v={1: 0x42003C00, 2: 0x1234FE01}).run().v(0)[0] == expected


# SDWA

PARTS = {
    "DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
}  # fmt: skip
SDWA: dict[str, tuple[tuple[str, ...], str, Callable[..., int | str]]] = {
    "v_mov_b32": (("u32",), "u32", lambda a: a),
    "v_add_u32": (("u32", "u32"), "u32", lambda a, b: a + b & M32),
    "v_lshlrev_b32": (("u32", "u32"), "u32", lambda a, b: b << (a & 31) & M32),
    "v_mul_i32_i24": (("i32", "i32"), "i32", lambda a, b: signed(a, 24) * signed(b, 24)),
    "v_max_i16": (("i16", "i16"), "i16", max),
    "v_mul_lo_u16": (("u16", "u16"), "u16", lambda a, b: a * b & 0xFFFF),
    "v_add_f32": (("f32", "f32"), "f32", lambda a, b: add(F32, a, b)),
    "v_mul_f16": (("f16", "f16"), "f16", lambda a, b: multiply(F16, a, b)),
}


def selected(bits: int, part: str, extend: bool, width: int) -> int:
    shift, size = PARTS[part]
    field = bits >> shift & ((1 << size) - 1)
    return (signed(field, size) if extend else field) & ((1 << width) - 1)


def placed(result: int, old: int, part: str, unused: str) -> int:
    shift, size = PARTS[part]
    field = ((1 << size) - 1) << shift
    if unused == "UNUSED_PRESERVE":
        return old & ~field | result << shift & field
    extended = signed(result, size) if unused == "UNUSED_SEXT" else result & ((1 << size) - 1)
    return extended << shift & M32


@pytest.mark.parametrize("name", SDWA)
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"])
@pytest.mark.parametrize("to", PARTS)
def test_sdwa(name: str, unused: str, to: str) -> None:
    types, result, oracle = SDWA[name]
    width, integer = int(types[0][1:]), types[0][0] != "f"
    rng = random.Random(len(name) + len(to))
    lanes = 64
    columns = [operands(("f32" if t == "f32" else "u32",), lanes, i)[0] for i, t in enumerate(types)]
    if width == 16:
        columns = [[a | b << 16 for a, b in zip(*operands((t, t), lanes, i), strict=True)] for i, t in enumerate(types)]
    (old,) = operands(("u32",), lanes, 8)
    on = [lane % 5 != 2 for lane in range(lanes)]
    v = {0: np.array(old, np.uint32)} | {8 + 4 * i: np.array(column, np.uint32) for i, column in enumerate(columns)}
    for _ in range(4):
        parts = [rng.choice(list(PARTS)) for _ in types]
        extend = [integer and rng.random() < 0.5 for _ in types]
        texts = [f"sext({r})" if e else r for r, e in zip(("v8", "v12"), extend, strict=False)]
        selects = " ".join(f"src{i}_sel:{part}" for i, part in enumerate(parts))
        line = f"{name}_sdwa v0, {', '.join(texts)} dst_sel:{to} dst_unused:{unused} {selects}"
        got = read_lanes(Snippet(line, v=v, s={"exec": lane_bits(on)}).run(), 0, 32)
        for lane in range(lanes):
            if not on[lane]:
                assert got[lane] == old[lane]
                continue
            inputs = [selected(c[lane], p, e, width) for c, p, e in zip(columns, parts, extend, strict=True)]
            exact = oracle(*(signed(x, width) if result[0] == "i" else x for x in inputs))
            if exact == NAN:
                if (to, unused) == ("DWORD", "UNUSED_PAD"):
                    assert same(result, NAN, got[lane])
                continue
            bits = int(exact) & ((1 << width) - 1)
            assert got[lane] == placed(bits, old[lane], to, unused), (line, [hex(x) for x in inputs], hex(bits), hex(got[lane]))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "v_and_b32_sdwa v0, sext(v1), s4 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:DWORD",
            0xFFFFFF83 & 0x12345678,
        ),
        ("v_and_b32_sdwa v0, s4, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD", 0x1234 & 0x4200837F),
        ("v_add_u32_sdwa v0, s4, s4 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_0", 0xF0 << 16),
        ("v_cvt_f32_f16_sdwa v0, |v2| dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1", 0x40400000),
        ("v_cvt_f32_f16_sdwa v0, -v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0", 0x3F800000),
        ("v_add_f32_sdwa v0, -|v3|, v3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD", 0xC0000000),
        ("v_add_f32_sdwa v0, v4, v4 clamp dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD", 0x3F800000),
    ],
)
def test_sdwa_of_other_operands(line: str, expected: int) -> None:
    snippet = Snippet(line, v={1: 0x4200837F, 2: 0xC200BC00, 3: 0xBF800000, 4: 0x3F800000}, s={4: 0x12345678}).run()
    assert snippet.v(0).tolist() == [expected] * 64


# DPP: the first source comes from another lane

CONTROLS: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[1,0,3,2]": lambda lane: lane ^ 1,
    "quad_perm:[3,3,0,1]": lambda lane: lane & ~3 | (3, 3, 0, 1)[lane & 3],
    "row_shr:1": lambda lane: lane - 1 if lane % 16 >= 1 else None,
    "row_shr:8": lambda lane: lane - 8 if lane % 16 >= 8 else None,
    "row_shl:3": lambda lane: lane + 3 if lane % 16 < 13 else None,
    "row_ror:8": lambda lane: lane & ~15 | (lane - 8) % 16,
    "row_half_mirror": lambda lane: lane & ~7 | 7 - lane % 8,
    "row_mirror": lambda lane: lane & ~15 | 15 - lane % 16,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "row_newbcast:5": lambda lane: lane & ~15 | 5,
}
DPP: dict[str, tuple[str, int, Callable[..., int | str], str]] = {
    "v_add_f32_dpp v0, v8, v12": ("f32", 2, lambda a, b: add(F32, a, b), ""),
    "v_max_i32_dpp v0, v8, v12": ("i32", 2, max, ""),
    "v_sub_f32_dpp v0, -v8, |v12|": ("f32", 2, lambda a, b: add(F32, a ^ 0x80000000, b & 0x7FFFFFFF ^ 0x80000000), ""),
    "v_mul_lo_u16_dpp v0, v8, v12": ("u16", 2, lambda a, b: a * b & 0xFFFF, ""),
    "v_fmac_f32_dpp v0, v8, v12": ("f32", 2, lambda a, b, c: fma(F32, a, b, c), "accumulates"),
    "v_cvt_f32_i32_dpp v0, v8": ("i32", 1, lambda a: F32.round(Fraction(a)), ""),
    "v_mov_b32_dpp v0, v8": ("u32", 1, lambda a: a, ""),
}


@pytest.mark.parametrize("text", DPP)
@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(
    "masks", ["row_mask:0xf bank_mask:0xf", "row_mask:0xa bank_mask:0xf", "row_mask:0xf bank_mask:0x3 bound_ctrl:1"]
)
@pytest.mark.parametrize("lanes", ["all lanes", "some lanes"])
def test_dpp(text: str, control: str, masks: str, lanes: str) -> None:
    """A lane without a source is not written, or its source is 0 with bound_ctrl. An inactive lane is not a source."""
    type_, count, oracle, kind = DPP[text]
    rng = random.Random(len(control))
    width = int(type_[1:])
    columns = [operands((type_,), 128, i)[0] for i in range(2)]
    (old,) = operands(("f32" if kind else "u32",), 128, 4)
    on = [lanes == "all lanes" or rng.random() < 0.7 for _ in range(128)]
    v = {0: np.array(old, np.uint32), 8: np.array(columns[0], np.uint32), 12: np.array(columns[1], np.uint32)}
    line = f"{text} {control} {masks}"
    got = read_lanes(Snippet(line, v=v, s={"exec": lane_bits(on)}, waves=2).run(), 0, 32)
    row_mask, bank_mask = (int(masks.split(key)[1].split()[0], 16) for key in ("row_mask:", "bank_mask:"))
    result = "f32" if "cvt" in text else type_
    for at in range(128):
        lane = at % 64
        source = CONTROLS[control](lane)
        present = source is not None and on[at - lane + source]
        enabled = row_mask >> lane // 16 & bank_mask >> lane % 16 // 4 & 1
        if not (on[at] and enabled and (present or "bound_ctrl" in masks)):
            assert got[at] == old[at], (line, lane)
            continue
        inputs = [columns[0][at - lane + source] if present else 0, columns[1][at]][:count]
        inputs = [signed(x, width) if type_[0] == "i" else x for x in inputs]
        assert same(result, oracle(*inputs, *([old[at]] if kind else [])), got[at]), (
            line,
            lane,
            [hex(x) for x in inputs],
            hex(got[at]),
        )


@pytest.mark.parametrize("lanes", ["all lanes", "some lanes"])
def test_dpp_of_64_bits(lanes: str) -> None:
    low, high = operands(("u32", "u32"), 64, 4)
    on = [lanes == "all lanes" or lane % 3 > 0 for lane in range(64)]
    v = {0: 1, 1: 2, 8: np.array(low, np.uint32), 9: np.array(high, np.uint32)}
    line = "v_mov_b64_dpp v[0:1], v[8:9] row_newbcast:3 row_mask:0xf bank_mask:0xf"
    snippet = Snippet(line, v=v, s={"exec": lane_bits(on)}).run()
    sources = [lane & ~15 | 3 for lane in range(64)]
    written = [on[lane] and on[sources[lane]] for lane in range(64)]
    for part, column, before in ((0, low, 1), (1, high, 2)):
        assert read_lanes(snippet, part, 32) == [column[s] if w else before for s, w in zip(sources, written, strict=True)]


def test_dpp_of_a_sum_in_64_bits() -> None:
    a, b, c = operands(("f64",) * 3, 64, 2)
    v = {base + i: w for base, column in ((0, c), (8, a), (12, b)) for i, w in enumerate(words(column, 64))}
    snippet = Snippet("v_fmac_f64_dpp v[0:1], v[8:9], v[12:13] row_newbcast:9 row_mask:0xf bank_mask:0xf", v=v).run()
    for lane, got in enumerate(read_lanes(snippet, 0, 64)):
        assert same("f64", fma(F64, a[lane & ~15 | 9], b[lane], c[lane]), got)


# Constants and scalar registers

INLINE = {0.5: 0x3800, -0.5: 0xB800, 1.0: 0x3C00, -1.0: 0xBC00, 2.0: 0x4000, -2.0: 0xC000, 4.0: 0x4400, -4.0: 0xC400}


@pytest.mark.parametrize("value", INLINE)
def test_inline_floats_take_the_operand_type(value: float) -> None:
    text = f"""
    v_mov_b32 v0, {value}
    v_mov_b64 v[2:3], {value}
    v_fma_f16 v4, {value}, 1.0, v10
    v_add_f64 v[6:7], v[8:9], {value}
    """
    snippet = Snippet(text, v={4: 0, 8: 0, 9: 0, 10: 0x8000}).run()
    assert snippet.v(0, np.float32)[0] == value
    assert snippet.v64(2, np.float64)[0] == value
    assert snippet.v(4)[0] == INLINE[value]
    assert snippet.v64(6, np.float64)[0] == value


@pytest.mark.parametrize(
    ("line", "index", "width", "expected"),
    [
        ("v_mov_b32 v0, 0.15915494", 0, 32, 0x3E22F983),
        ("v_add_f64 v[0:1], v[8:9], 0.15915494309189532", 0, 64, 0x3FC45F306DC9C882),
        ("v_mul_f16 v0, 0.15915494, v5", 0, 32, 0x3118),
        ("v_mov_b32 v0, 64", 0, 32, 64),
        ("v_mov_b32 v0, -16", 0, 32, 0xFFFFFFF0),
        ("v_mov_b32 v0, 0xdeadbeef", 0, 32, 0xDEADBEEF),
        ("v_mov_b64 v[0:1], -1", 0, 64, M64),
        ("v_mov_b64 v[0:1], 17", 0, 64, 17),
        ("v_lshl_add_u64 v[0:1], v[8:9], 0, -3", 0, 64, M64 - 2),
        ("v_lshl_add_u64 v[0:1], v[6:7], 0, 0x80000001", 0, 64, 0x80000001),  # an unsigned literal is extended by zeros
        ("v_add_f64 v[0:1], v[8:9], 0x3ff80000", 0, 64, 0x3FF80000_00000000),  # a literal is the upper half of float64
        ("v_add_f64 v[0:1], v[8:9], 1", 0, 64, 1),  # an integer constant gives the bits
        ("v_add_f32 v0, 1, v8", 0, 32, 1),
        ("v_mul_f16 v0, 0x4200, v5", 0, 32, 0x4200),
        ("v_mul_lo_u16 v0, 0x1234, v9", 0, 32, 0),
        ("v_add_u16 v0, 0xffff8001, v8", 0, 32, 0x8001),
        ("v_add_u16 v0, -2, v8", 0, 32, 0xFFFE),
        ("v_mul_f32 v0, 0x42280000, v4", 0, 32, 0x42280000),
        ("v_cmp_eq_i64 vcc, -1, v[6:7]\n v_cndmask_b32 v0, 0, 1, vcc", 0, 32, 0),
        ("v_cvt_f32_i32 v0, 0xffffff00", 0, 32, 0xC3800000),
        ("v_ashrrev_i64 v[0:1], 4, 0xf0000000", 0, 64, 0xFFFFFFFF_FF000000),  # a signed literal is extended by its sign
    ],
)
def test_constants(line: str, index: int, width: int, expected: int) -> None:
    snippet = Snippet(line, v={4: 1.0, 5: 0x3C00, 6: 0, 7: 0, 8: 0, 9: 0}).run()
    assert read_lanes(snippet, index, width)[0] == expected


SPECIAL_REGISTERS = ["vcc_lo", "vcc_hi", "exec_lo", "exec_hi", "m0", "s7"]


@pytest.mark.parametrize("name", SPECIAL_REGISTERS)
def test_special_scalar_registers_as_sources(name: str) -> None:
    """Vector instructions read VCC, EXEC and M0 as sources. The registers are uniform, or differ between waves."""
    vcc, exec_ = [0x0123456789ABCDEF, 0xFEDCBA9876543210], [M64, M64 - 2]
    values = {
        "vcc_lo": [x & M32 for x in vcc], "vcc_hi": [x >> 32 for x in vcc], "exec_lo": [x & M32 for x in exec_],
        "exec_hi": [x >> 32 for x in exec_], "m0": [5, 5], "s7": [9, 0x80000000],
    }  # fmt: skip
    s = {"vcc": vcc, "exec": exec_, "m0": 5, 7: [9, 0x80000000]}
    snippet = Snippet(f"v_add_u32_e32 v0, {name}, v1", v={1: 1}, s=s, waves=2).run()
    lanes = snippet.v(0).reshape(2, 64)
    assert [int(lanes[wave][7]) for wave in range(2)] == [x + 1 & M32 for x in values[name]]


@pytest.mark.parametrize("pair", ["vcc", "exec", "s[6:7]"])
def test_pairs_of_scalar_registers_as_sources(pair: str) -> None:
    s = {"vcc": [5 << 33, M64], "exec": [M64, M64 >> 1], 6: [1, 0xFFFFFFFF], 7: [0x80000000, 3]}
    values = {"vcc": s["vcc"], "exec": s["exec"], "s[6:7]": [1 | 0x80000000 << 32, 0xFFFFFFFF | 3 << 32]}[pair]
    snippet = Snippet(f"v_lshrrev_b64 v[0:1], v2, {pair}", v={2: np.arange(128)}, s=s, waves=2).run()
    got = read_lanes(snippet, 0, 64)
    assert got[:64] == [values[0] >> lane for lane in range(64)]
    assert got[64:127] == [values[1] >> lane for lane in range(63)]


def test_uniform_operands_in_every_kind_of_instruction() -> None:
    """If an instruction's operands are uniform, every lane receives the result."""
    text = """
    v_add_f32_e64 v0, s4, s4
    v_perm_b32 v1, s5, s5, s5
    v_fma_f32 v2, s4, s4, s4
    v_fma_f64 v[4:5], s[6:7], s[6:7], 1.0
    v_bfe_i32 v6, s5, 4, 8
    v_max3_f32 v7, s4, s4, 0
    v_med3_f32 v8, s4, 1.0, 2.0
    v_cvt_f16_f32 v9, s4
    v_cmp_lt_f32_e64 s[8:9], s4, 4.0
    v_cndmask_b32_e64 v10, 1, 2, s[8:9]
    v_mad_u64_u32 v[12:13], vcc, s5, s5, 7
    v_exp_f32 v14, s4
    v_pk_mul_f32 v[16:17], s[4:5], s[4:5]
    v_pk_add_u16 v18, s5, s5
    v_cvt_pk_bf16_f32 v19, s4, s4
    v_sin_f32 v20, s4
    v_bitop3_b32 v21, s5, s5, s5 bitop3:0x55
    v_div_fixup_f32 v22, s4, s4, s4
    v_ffbh_u32 v23, s5
    v_ldexp_f32 v24, s4, s10
    """
    snippet = Snippet(text, s={4: 0x40400000, 5: 0x03020100, 6: 0, 7: 0x40000000, 10: 2}, waves=2).run()
    expected = {
        0: 0x40C00000, 1: 0x03020100, 2: 0x41400000, 4: 0, 5: 0x40140000, 6: 0x10, 7: 0x40400000, 8: 0x40000000, 9: 0x4200, 10: 2,
        12: 0x03020100**2 + 7 & M32, 13: 0x03020100**2 + 7 >> 32, 14: 0x41000000, 16: 0x41100000, 18: 0x06040200, 19: 0x40404040,
        20: 0, 21: 0xFCFDFEFF, 22: 0x40400000, 23: 6, 24: 0x41400000,
    }  # fmt: skip
    for index, value in expected.items():
        assert snippet.v(index).tolist() == [value] * 128, index


# Rejected instructions


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("v_add_u32_e64 v0, -v1, v2", "modifier of floating point"),
        ("v_mul_lo_u32 v0, v1, v2 clamp", "clamp of v_mul_lo_u32 is not implemented"),
        ("v_add_f32 v0, v1", "takes 2 sources, not 1"),
        ("v_add_f64 v[0:1], v2, v[4:5]", "not the pair of registers"),
        ("v_add_f32 v0, v1, off", "cannot be read"),
        ("v_add_f32 v0, v1, v2 row_shr:1", "modifier row_shr"),
        ("v_pk_max_i16 v0, v1, v2 clamp", "clamp of v_pk_max_i16"),
        ("v_frobnicate_b32 v0, v1", "v_frobnicate_b32 is not implemented"),
        ("v_add_co_u32_dpp v0, vcc, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf", "leaves lanes out"),
    ],
)
def test_unknown_forms_are_errors(line: str, reason: str) -> None:
    with pytest.raises(UnknownInstruction, match=reason) as caught:
        bind(line)
    assert line in str(caught.value)
