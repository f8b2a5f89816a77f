"""Tests vector integer instructions against their definition, lane by lane (CDNA4 ISA document, chapters VOP1, VOP2, VOP3 and
VOP3P)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet

from .oracles import Case, check, lane_bits, operands, read_lanes, signed, words

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def byte(a: int, i: int) -> int:
    return a >> 8 * i & 0xFF


def permuted(a: int, b: int, selector: int) -> int:
    """Returns v_perm_b32's result. S1 holds bytes 0 to 3, and S0 bytes 4 to 7."""
    both, result = a << 32 | b, 0
    for i in range(4):
        choice = byte(selector, i)
        if choice < 8:
            picked = byte(both, choice)
        elif choice < 12:
            picked = 0xFF * (byte(both, {8: 1, 9: 3, 10: 5, 11: 7}[choice]) >> 7)
        else:
            picked = 0 if choice == 12 else 0xFF
        result |= picked << 8 * i
    return result


def bit_field_signed(a: int, offset: int, width: int) -> int:
    offset, width = offset & 31, width & 31
    if width == 0:
        return 0
    return signed((a >> offset) & ((1 << width) - 1), width)


def first_one(a: int, order: range) -> int:
    return next((i for i, bit in enumerate(order) if a >> bit & 1), -1)


def first_sign_change(a: int) -> int:
    bits = a & M32
    return next((i for i in range(1, 32) if bits >> (31 - i) & 1 != bits >> 31), -1)


def limited(low: int, high: int) -> Callable[[int], int]:
    return lambda x: min(max(x, low), high)


def shifted_and_packed(low: int, high: int) -> Callable[[int, int, int], int]:
    limit = limited(low, high)
    return lambda a, b, c: limit(a >> (c & 31)) & 0xFF | (limit(b >> (c & 31)) & 0xFF) << 8


def middle(a: int, b: int, c: int) -> int:
    return sorted((a, b, c))[1]


def sum_of_differences(bits: int) -> Callable[[int, int, int], int]:
    field = (1 << bits) - 1
    return lambda a, b, c: c + sum(abs((a >> at & field) - (b >> at & field)) for at in range(0, 32, bits))


def dot(bits: int, is_signed: bool) -> Callable[[int, int, int], int]:
    def part(x: int, at: int) -> int:
        field = x >> at & ((1 << bits) - 1)
        return signed(field, bits) if is_signed else field

    return lambda a, b, c: c + sum(part(a, at) * part(b, at) for at in range(0, 32, bits))


def low24(a: int) -> int:
    return a & 0xFFFFFF


def signed24(a: int) -> int:
    return signed(a, 24)


def masked_differences(a: int, b: int, c: int) -> int:
    return c + sum(abs(byte(a, i) - byte(b, i)) for i in range(4) if byte(b, i))


def means(a: int, b: int, c: int) -> int:
    return sum((byte(a, i) + byte(b, i) + (byte(c, i) & 1) >> 1) << 8 * i for i in range(4))


U, I = "u32", "i32"  # noqa: E741
CASES = [
    Case("v_mov_b32", U, (U,), lambda a: a, "_e32"),
    Case("v_mov_b64", "u64", ("u64",), lambda a: a, "_e32"),
    Case("v_not_b32", U, (U,), lambda a: ~a, "_e32"),
    Case("v_and_b32", U, (U, U), lambda a, b: a & b, "_e32"),
    Case("v_or_b32", U, (U, U), lambda a, b: a | b, "_e32"),
    Case("v_xor_b32", U, (U, U), lambda a, b: a ^ b, "_e32"),
    Case("v_xnor_b32", U, (U, U), lambda a, b: ~(a ^ b), "_e32"),
    Case("v_and_or_b32", U, (U, U, U), lambda a, b, c: a & b | c),
    Case("v_or3_b32", U, (U, U, U), lambda a, b, c: a | b | c),
    Case("v_bfi_b32", U, (U, U, U), lambda a, b, c: a & b | ~a & c),
    Case("v_prng_b32", U, (U,), lambda a: a << 1 ^ (197 if a >> 31 else 0), "_e32"),
    Case("v_bfrev_b32", U, (U,), lambda a: int(f"{a:032b}"[::-1], 2), "_e32"),
    Case("v_perm_b32", U, (U, U, U), permuted),
    # Shifts and fields
    Case("v_lshlrev_b32", U, (U, U), lambda a, b: b << (a & 31), "_e32"),
    Case("v_lshrrev_b32", U, (U, U), lambda a, b: b >> (a & 31), "_e32"),
    Case("v_ashrrev_i32", I, (U, I), lambda a, b: b >> (a & 31), "_e32"),
    Case("v_lshlrev_b16", "u16", ("u16", "u16"), lambda a, b: b << (a & 15), "_e32"),
    Case("v_lshrrev_b16", "u16", ("u16", "u16"), lambda a, b: b >> (a & 15), "_e32"),
    Case("v_ashrrev_i16", "i16", ("u16", "i16"), lambda a, b: b >> (a & 15), "_e32"),
    Case("v_lshlrev_b64", "u64", (U, "u64"), lambda a, b: b << (a & 63)),
    Case("v_lshrrev_b64", "u64", (U, "u64"), lambda a, b: b >> (a & 63)),
    Case("v_ashrrev_i64", "i64", (U, "i64"), lambda a, b: b >> (a & 63)),
    Case("v_lshl_or_b32", U, (U, U, U), lambda a, b, c: a << (b & 31) | c),
    Case("v_lshl_add_u32", U, (U, U, U), lambda a, b, c: (a << (b & 31)) + c),
    Case("v_add_lshl_u32", U, (U, U, U), lambda a, b, c: (a + b & M32) << (c & 31)),
    Case("v_lshl_add_u64", "u64", ("u64", U, "u64"), lambda a, b, c: (a << (b & 7)) + c),
    Case("v_alignbit_b32", U, (U, U, U), lambda a, b, c: (a << 32 | b) >> (c & 31)),
    Case("v_alignbyte_b32", U, (U, U, U), lambda a, b, c: (a << 32 | b) >> 8 * (c & 3)),
    Case("v_bfe_u32", U, (U, U, U), lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1)),
    Case("v_bfe_i32", I, (I, U, U), bit_field_signed),
    Case("v_bfm_b32", U, (U, U), lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    Case("v_ashr_pk_i8_i32", "u16", (I, I, U), shifted_and_packed(-128, 127), keeps=True),
    Case("v_ashr_pk_u8_i32", "u16", (I, I, U), shifted_and_packed(0, 255), keeps=True),
    # Addition and multiplication
    Case("v_add_u32", U, (U, U), lambda a, b: a + b, "_e32"),
    Case("v_sub_u32", U, (U, U), lambda a, b: a - b, "_e32"),
    Case("v_subrev_u32", U, (U, U), lambda a, b: b - a, "_e32"),
    Case("v_add_u16", "u16", ("u16", "u16"), lambda a, b: a + b, "_e32"),
    Case("v_sub_u16", "u16", ("u16", "u16"), lambda a, b: a - b, "_e32"),
    Case("v_subrev_u16", "u16", ("u16", "u16"), lambda a, b: b - a, "_e32"),
    Case("v_add_i32", I, (I, I), lambda a, b: a + b),
    Case("v_sub_i32", I, (I, I), lambda a, b: a - b),
    Case("v_add_i16", "i16", ("i16", "i16"), lambda a, b: a + b, keeps=True),
    Case("v_sub_i16", "i16", ("i16", "i16"), lambda a, b: a - b, keeps=True),
    Case("v_mul_lo_u16", "u16", ("u16", "u16"), lambda a, b: a * b, "_e32"),
    Case("v_mad_legacy_u16", "u16", ("u16",) * 3, lambda a, b, c: a * b + c),
    Case("v_mad_legacy_i16", "i16", ("i16",) * 3, lambda a, b, c: a * b + c),
    Case("v_mad_u16", "u16", ("u16",) * 3, lambda a, b, c: a * b + c, keeps=True),
    Case("v_mad_i16", "i16", ("i16",) * 3, lambda a, b, c: a * b + c, keeps=True),
    Case("v_add3_u32", U, (U, U, U), lambda a, b, c: a + b + c),
    Case("v_xad_u32", U, (U, U, U), lambda a, b, c: (a ^ b) + c),
    Case("v_mul_lo_u32", U, (U, U), lambda a, b: a * b),
    Case("v_mul_hi_u32", U, (U, U), lambda a, b: a * b >> 32),
    Case("v_mul_hi_i32", I, (I, I), lambda a, b: a * b >> 32),
    Case("v_mul_u32_u24", U, (U, U), lambda a, b: low24(a) * low24(b), "_e32"),
    Case("v_mul_i32_i24", I, (I, I), lambda a, b: signed24(a) * signed24(b), "_e32"),
    Case("v_mul_hi_u32_u24", U, (U, U), lambda a, b: low24(a) * low24(b) >> 32, "_e32"),
    Case("v_mul_hi_i32_i24", I, (I, I), lambda a, b: signed24(a) * signed24(b) >> 32, "_e32"),
    Case("v_mad_u32_u24", U, (U, U, U), lambda a, b, c: low24(a) * low24(b) + c),
    Case("v_mad_i32_i24", I, (I, I, I), lambda a, b, c: signed24(a) * signed24(b) + c),
    Case("v_mad_u32_u16", U, ("u16", "u16", U), lambda a, b, c: a * b + c),
    Case("v_mad_i32_i16", I, ("i16", "i16", I), lambda a, b, c: a * b + c),
    # Counts
    Case("v_bcnt_u32_b32", U, (U, U), lambda a, b: a.bit_count() + b),
    Case("v_ffbh_u32", I, (U,), lambda a: first_one(a, range(31, -1, -1)), "_e32"),
    Case("v_ffbl_b32", I, (U,), lambda a: first_one(a, range(32)), "_e32"),
    Case("v_ffbh_i32", I, (I,), first_sign_change, "_e32"),
    # Sums of absolute differences and dot products
    Case("v_sad_u8", U, (U, U, U), sum_of_differences(8)),
    Case("v_sad_u16", U, (U, U, U), sum_of_differences(16)),
    Case("v_sad_u32", U, (U, U, U), sum_of_differences(32)),
    Case("v_sad_hi_u8", U, (U, U, U), lambda a, b, c: (sum_of_differences(8)(a, b, 0) << 16) + c),
    Case("v_msad_u8", U, (U, U, U), masked_differences),
    Case("v_lerp_u8", U, (U, U, U), means),
]
for _type in ("i32", "u32", "i16", "u16"):
    CASES += [
        Case(f"v_min_{_type}", _type, (_type,) * 2, min, "_e32"),
        Case(f"v_max_{_type}", _type, (_type,) * 2, max, "_e32"),
        Case(f"v_min3_{_type}", _type, (_type,) * 3, min, keeps=True),
        Case(f"v_max3_{_type}", _type, (_type,) * 3, max, keeps=True),
        Case(f"v_med3_{_type}", _type, (_type,) * 3, middle, keeps=True),
    ]
for _count, _bits in ((2, 16), (4, 8), (8, 4)):
    CASES += [
        Case(f"v_dot{_count}_i32_i{_bits}", I, (U, U, I), dot(_bits, True)),
        Case(f"v_dot{_count}_u32_u{_bits}", U, (U, U, U), dot(_bits, False)),
        Case(f"v_dot{_count}c_i32_i{_bits}", I, (U, U), dot(_bits, True), "_e32", accumulates=True),
    ]

ACCUMULATION = {"v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"}
CARRIES = {
    "v_add_co_u32": lambda a, b, carry: (a + b, a + b > M32),
    "v_sub_co_u32": lambda a, b, carry: (a - b, b > a),
    "v_subrev_co_u32": lambda a, b, carry: (b - a, a > b),
    "v_addc_co_u32": lambda a, b, carry: (a + b + carry, a + b + carry > M32),
    "v_subb_co_u32": lambda a, b, carry: (a - b - carry, b + carry > a),
    "v_subbrev_co_u32": lambda a, b, carry: (b - a - carry, a + carry > b),
}
WIDE = {"v_mad_u64_u32", "v_mad_i64_i32"}
TABLES = {"v_bitop3_b32", "v_bitop3_b16"}
TESTED = {case.name for case in CASES} | ACCUMULATION | set(CARRIES) | WIDE | TABLES | {"v_cndmask_b32", "v_swap_b32"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_definition(case: Case) -> None:
    check(case)


CLAMPED = [
    ("v_add_u32_e64", U, (U, U), lambda a, b: a + b),
    ("v_sub_u32_e64", U, (U, U), lambda a, b: a - b),
    ("v_subrev_u32_e64", U, (U, U), lambda a, b: b - a),
    ("v_add_u16_e64", "u16", ("u16", "u16"), lambda a, b: a + b),
    ("v_sub_u16_e64", "u16", ("u16", "u16"), lambda a, b: a - b),
    ("v_add_i32", I, (I, I), lambda a, b: a + b),
    ("v_sub_i32", I, (I, I), lambda a, b: a - b),
    ("v_add_i16", "i16", ("i16", "i16"), lambda a, b: a + b),
    ("v_sub_i16", "i16", ("i16", "i16"), lambda a, b: a - b),
    ("v_mad_u16", "u16", ("u16",) * 3, lambda a, b, c: a * b + c),
    ("v_mad_i16", "i16", ("i16",) * 3, lambda a, b, c: a * b + c),
    ("v_mad_u32_u24", U, (U,) * 3, lambda a, b, c: low24(a) * low24(b) + c),
    ("v_mad_i32_i24", I, (I,) * 3, lambda a, b, c: signed24(a) * signed24(b) + c),
    ("v_dot4_i32_i8", I, (U, U, I), dot(8, True)),
    ("v_dot8_u32_u4", U, (U, U, U), dot(4, False)),
    ("v_dot2_i32_i16", I, (U, U, I), dot(16, True)),
]


@pytest.mark.parametrize(("name", "result", "sources", "exact"), CLAMPED, ids=[case[0] for case in CLAMPED])
def test_clamp_limits_the_exact_result(name: str, result: str, sources: tuple[str, ...], exact: Callable[..., int]) -> None:
    width = int(result[1:])
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if result[0] == "i" else (0, (1 << width) - 1)
    keeps = name in ("v_add_i16", "v_sub_i16", "v_mad_u16", "v_mad_i16")
    check(Case(name, result, sources, lambda *x: limited(low, high)(exact(*x)), tail="clamp", keeps=keeps))


@pytest.mark.parametrize("table", range(256))
def test_bitop3(table: int) -> None:
    """Bit 4a + 2b + c of the table is the result for bits a, b, c."""

    def oracle(width: int) -> Callable[[int, int, int], int]:
        def bits(a: int, b: int, c: int) -> int:
            terms = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1)
            result = 0
            for term in terms:
                result |= term
            return result & ((1 << width) - 1)

        return bits

    line, (a, b, c) = f"v_bitop3_b32 v0, v8, v12, v16 bitop3:{table:#x}", operands((U, U, U), 64, table)
    v = {8: np.array(a, np.uint32), 12: np.array(b, np.uint32), 16: np.array(c, np.uint32)}
    assert read_lanes(Snippet(line, v=v).run(), 0, 32) == [oracle(32)(*x) for x in zip(a, b, c, strict=True)]
    if table % 8 == 5:
        check(Case("v_bitop3_b32", U, (U, U, U), oracle(32), tail=f"bitop3:{table:#x}"), waves=1)
        check(Case("v_bitop3_b16", "u16", ("u16",) * 3, oracle(16), tail=f"bitop3:{table:#x}", keeps=True), waves=1)


def test_bitop3_without_a_table_is_zero() -> None:
    assert read_lanes(Snippet("v_bitop3_b32 v0, v1, v2, v3", v={0: 5, 1: 7, 2: 9, 3: 11}).run(), 0, 32) == [0] * 64


@pytest.mark.parametrize(
    "selector", [0x05040100, 0x07060302, 0x03020706, 0x0C0C0004, 0x0D0B0A09, 0x08010203, 0xFF0C0C0C, 0x04050607]
)
@pytest.mark.parametrize("sources", ["v8, v12, s4", "v8, s5, v16", "s5, s5, v16", "s5, v12, 3"])
def test_perm_with_one_selector_for_all_lanes(selector: int, sources: str) -> None:
    a, b = operands((U, U), 64, selector)
    scalar = 0x80FF7F01
    v = {8: np.array(a, np.uint32), 12: np.array(b, np.uint32), 16: selector}
    snippet = Snippet(f"v_perm_b32 v0, {sources}", v=v, s={4: selector, 5: scalar}).run()
    values = {"v8": a, "v12": b, "s4": [selector] * 64, "v16": [selector] * 64, "s5": [scalar] * 64, "3": [3] * 64}
    columns = [values[name] for name in sources.split(", ")]
    assert read_lanes(snippet, 0, 32) == [permuted(*x) for x in zip(*columns, strict=True)]


@pytest.mark.parametrize("name", CARRIES)
@pytest.mark.parametrize("encoding", ["_e32", "_e64"])
@pytest.mark.parametrize("first", ["v8", "s4", "-3"])
def test_carries(name: str, encoding: str, first: str) -> None:
    waves, lanes = 2, 128
    rng = random.Random(3)
    a, b = operands((U, U), lanes, 11)
    if first == "s4":
        a = [a[lane // 64 * 64 + 3] for lane in range(lanes)]
    elif first == "-3":
        a = [0xFFFFFFFD] * lanes
    on, carry = ([rng.random() < 0.6 for _ in range(lanes)] for _ in range(2))
    pair, carry_in = ("vcc", "vcc") if encoding == "_e32" else ("s[10:11]", "s[12:13]")
    takes = "c_co" in name or "b_co" in name.replace("sub_co", "") or "brev_co" in name.replace("subrev", "")
    line = f"{name}{encoding} v0, {pair}, {first}, v12" + (f", {carry_in}" if takes else "")
    bits = lane_bits(carry)
    s = {"exec": lane_bits(on), "vcc": bits, 12: [x & M32 for x in bits], 13: [x >> 32 for x in bits], 4: [a[0], a[64]]}
    snippet = Snippet(line, v={0: 77, 8: np.array(a, np.uint32), 12: np.array(b, np.uint32)}, s=s, waves=waves).run()
    wanted = [CARRIES[name](x, y, int(c)) for x, y, c in zip(a, b, carry, strict=True)]
    assert read_lanes(snippet, 0, 32) == [w[0] & M32 if o else 77 for w, o in zip(wanted, on, strict=True)]
    assert snippet.lanes("vcc" if encoding == "_e32" else 10).tolist() == [o and w[1] for w, o in zip(wanted, on, strict=True)]


CARRY_FORMS = {
    "v_add_co_u32_sdwa v0, vcc, v8, sext(v12) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_3": (
        "v_add_co_u32",
        lambda a, b, lane: (a[lane] >> 16, signed(b[lane] >> 24, 8) & M32),
    ),
    "v_subrev_co_u32_sdwa v0, vcc, v8, v12 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:DWORD": (
        "v_subrev_co_u32",
        lambda a, b, lane: (a[lane] & 0xFF, b[lane]),
    ),
    "v_addc_co_u32_dpp v0, vcc, v8, v12, vcc row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1": (
        "v_addc_co_u32",
        lambda a, b, lane: (a[lane - 1] if lane % 16 else 0, b[lane]),
    ),
    "v_sub_co_u32_dpp v0, vcc, v8, v12 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf": (
        "v_sub_co_u32",
        lambda a, b, lane: (a[lane ^ 1], b[lane]),
    ),
}


@pytest.mark.parametrize("line", CARRY_FORMS)
def test_carries_of_parts_and_of_other_lanes(line: str) -> None:
    name, pick = CARRY_FORMS[line]
    a, b = operands((U, U), 64, 21)
    carry = [lane % 5 < 2 for lane in range(64)]
    v = {8: np.array(a, np.uint32), 12: np.array(b, np.uint32)}
    snippet = Snippet(line, v=v, s={"vcc": lane_bits(carry)}).run()
    wanted = [CARRIES[name](*pick(a, b, lane), int(carry[lane])) for lane in range(64)]
    assert read_lanes(snippet, 0, 32) == [w[0] & M32 for w in wanted]
    assert snippet.lanes("vcc").tolist() == [w[1] for w in wanted]


@pytest.mark.parametrize("name", sorted(WIDE))
@pytest.mark.parametrize("sources", ["v8, v12, v[16:17]", "v8, s4, v[16:17]", "s4, v12, 0", "v8, 17, s[6:7]", "v8, v12, -5"])
def test_products_added_in_64_bits(name: str, sources: str) -> None:
    """The second destination is bit 64 of the 65-bit sum, signed or unsigned."""
    lanes = 192
    narrow, wide = ("i32", "i64") if name == "v_mad_i64_i32" else ("u32", "u64")
    a, b, c = operands((narrow, narrow, wide), lanes, len(sources))
    rng = random.Random(2)
    on = [rng.random() < 0.7 for _ in range(lanes)]
    per_wave = [b[5], b[70], b[135]]
    wide_scalar = 0x9000000012345678
    columns = {
        "v8": a, "v12": b, "v[16:17]": c, "s4": [per_wave[lane // 64] for lane in range(lanes)], "s[6:7]": [wide_scalar] * lanes,
        "0": [0] * lanes, "17": [17] * lanes, "-5": [-5 & M64] * lanes,
    }  # fmt: skip
    x, y, z = (columns[text] for text in sources.split(", "))
    v = {8: np.array(a, np.uint32), 12: np.array(b, np.uint32), 0: 1, 1: 2}
    v |= {16 + i: word for i, word in enumerate(words(c, 64))}
    s = {"exec": lane_bits(on), 4: per_wave, 6: wide_scalar & M32, 7: wide_scalar >> 32}
    snippet = Snippet(f"{name} v[0:1], s[10:11], {sources}", v=v, s=s, waves=3).run()
    if narrow == "i32":
        x, y, z = [signed(p, 32) for p in x], [signed(p, 32) for p in y], [signed(p, 64) for p in z]
    exact = [p * q + r for p, q, r in zip(x, y, z, strict=True)]
    assert read_lanes(snippet, 0, 64) == [e & M64 if o else 2 << 32 | 1 for e, o in zip(exact, on, strict=True)]
    assert snippet.lanes(10).tolist() == [bool(o and e >> 64 & 1) for e, o in zip(exact, on, strict=True)]


FLIPPED = {"": lambda x: x, "-": lambda x: x ^ 0x80000000, "|": lambda x: x & 0x7FFFFFFF, "-|": lambda x: x | 0x80000000}


@pytest.mark.parametrize("first", ["v8", "-v8", "|v8|", "-|v8|", "s4", "1.0", "-7"])
@pytest.mark.parametrize("second", ["v12", "-v12", "|v12|", "0"])
def test_cndmask(first: str, second: str) -> None:
    """The result is S1 if the lane's bit is set, otherwise S0. Modifiers change the sign bit, whatever the operand's type."""
    a, b = operands((U, U), 128, 4)
    rng = random.Random(5)
    on, choice = ([rng.random() < 0.6 for _ in range(128)] for _ in range(2))
    columns = {"v8": a, "v12": b, "s4": [0xFF800001] * 128, "1.0": [0x3F800000] * 128, "-7": [0xFFFFFFF9] * 128, "0": [0] * 128}

    def column(text: str) -> list[int]:
        if text in columns:
            return columns[text]
        prefix = text[: text.index("v")]
        return [FLIPPED[prefix](x) for x in columns[text.strip("-|")]]

    bits = lane_bits(choice)
    s = {"exec": lane_bits(on), 4: 0xFF800001, 10: [x & M32 for x in bits], 11: [x >> 32 for x in bits]}
    line = f"v_cndmask_b32_e64 v0, {first}, {second}, s[10:11]"
    snippet = Snippet(line, v={0: 5, 8: np.array(a, np.uint32), 12: np.array(b, np.uint32)}, s=s, waves=2).run()
    rows = zip(column(first), column(second), choice, on, strict=True)
    assert read_lanes(snippet, 0, 32) == [(y if c else x) if o else 5 for x, y, c, o in rows]


@pytest.mark.parametrize(
    ("line", "pick"),
    [
        ("v_cndmask_b32_e32 v0, v8, v12, vcc", lambda old, a, b, c: b if c else a),
        (
            "v_cndmask_b32_sdwa v0, v8, v12, vcc dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1",
            lambda old, a, b, c: ((b >> 16 if c else a) & 0xFF) << 8,
        ),
        (
            "v_cndmask_b32_sdwa v0, v8, v12, vcc dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:DWORD",
            lambda old, a, b, c: old & 0xFFFF | ((b if c else a >> 24) & 0xFFFF) << 16,
        ),
    ],
    ids=["e32", "sdwa pad", "sdwa preserve"],
)
def test_cndmask_by_vcc(line: str, pick: Callable[..., int]) -> None:
    old, a, b = operands((U, U, U), 64, 9)
    choice = [lane % 5 < 2 for lane in range(64)]
    v = {0: np.array(old, np.uint32), 8: np.array(a, np.uint32), 12: np.array(b, np.uint32)}
    snippet = Snippet(line, v=v, s={"vcc": lane_bits(choice)}).run()
    assert read_lanes(snippet, 0, 32) == [pick(*row) for row in zip(old, a, b, choice, strict=True)]


def test_cndmask_with_a_source_of_another_lane() -> None:
    a, b = operands((U, U), 64, 1)
    choice = [lane % 5 < 2 for lane in range(64)]
    line = "v_cndmask_b32_dpp v0, v8, v12, vcc row_shr:1 row_mask:0xf bank_mask:0xf"
    snippet = Snippet(line, v={0: 3, 8: np.array(a, np.uint32), 12: np.array(b, np.uint32)}, s={"vcc": lane_bits(choice)}).run()
    wanted = [3 if lane % 16 == 0 else b[lane] if choice[lane] else a[lane - 1] for lane in range(64)]
    assert read_lanes(snippet, 0, 32) == wanted


def test_swap() -> None:
    a, b = operands((U, U), 64, 2)
    on = [lane % 3 == 1 for lane in range(64)]
    v = {1: np.array(a, np.uint32), 2: np.array(b, np.uint32)}
    snippet = Snippet("v_swap_b32 v1, v2", v=v, s={"exec": lane_bits(on)}).run()
    assert read_lanes(snippet, 1, 32) == [y if o else x for x, y, o in zip(a, b, on, strict=True)]
    assert read_lanes(snippet, 2, 32) == [x if o else y for x, y, o in zip(a, b, on, strict=True)]
    full = Snippet("v_swap_b32 v1, v2", v=v).run()
    assert (read_lanes(full, 1, 32), read_lanes(full, 2, 32)) == (b, a)


def test_accumulation_registers() -> None:
    (a,) = operands((U,), 64, 2)
    on = [lane % 3 == 1 for lane in range(64)]
    text = """
    v_accvgpr_write_b32 a1, v1
    v_accvgpr_mov_b32 a2, a1
    v_accvgpr_read_b32 v2, a2
    v_accvgpr_write_b32 a3, 7
    v_accvgpr_write_b32 a4, s4
    """
    snippet = Snippet(
        text, v={1: np.array(a, np.uint32), 2: 9}, a={1: 6, 2: 7, 3: 8}, s={"exec": lane_bits(on), 4: 0x80000001}
    ).run()
    assert read_lanes(snippet, 2, 32) == [x if o else 9 for x, o in zip(a, on, strict=True)]
    for index, value, old in ((1, a, 6), (2, a, 7), (3, [7] * 64, 8), (4, [0x80000001] * 64, 0)):
        assert snippet.a(index).tolist() == [x if o else old for x, o in zip(value, on, strict=True)]
