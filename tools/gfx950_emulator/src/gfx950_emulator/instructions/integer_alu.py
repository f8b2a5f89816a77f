"""Vector integer arithmetic, logic and moves.

Definitions: chapters VOP1, VOP2, VOP3 and VOP3P of AMD's CDNA4 ISA document. Functions take and return numpy arrays (or numpy
scalars) of the declared types, which wrap as registers do. 16-bit results of instructions with a VOP1 or VOP2 encoding zero the
upper half of the register. 16-bit results of VOP3-only instructions keep the other half; op_sel selects the written half (LLVM,
``GCNSubtarget::zeroesHigh16BitsOfDest``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.formats import next_random
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.scalar_values import lanes_of
from gfx950_emulator.operands import Operand
from gfx950_emulator.vector import (
    F32,
    I16,
    I32,
    I64,
    U16,
    U32,
    U64,
    Form,
    VectorOp,
    bind_vector,
    getter,
    group_write,
    moved_source,
    set_compare,
    source,
    vector_op,
    write_pair64,
)

Array = Any

_31, _8, _3 = np.uint32(31), np.uint32(8), np.uint32(3)
_ONE, _BYTE, _FIFTEEN = np.uint32(1), np.uint32(0xFF), np.uint16(15)


# Moves and logic

for _name in ("v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"):
    vector_op(_name, np.positive, U32, U32, moves=True)
vector_op("v_mov_b64", np.positive, U64, U64, moves=True)
vector_op("v_not_b32", np.invert, U32, U32)
vector_op("v_and_b32", np.bitwise_and, U32, U32, U32)
vector_op("v_or_b32", np.bitwise_or, U32, U32, U32)
vector_op("v_xor_b32", np.bitwise_xor, U32, U32, U32)
vector_op("v_xnor_b32", lambda a, b: ~(a ^ b), U32, U32, U32)
vector_op("v_and_or_b32", lambda a, b, c: (a & b) | c, U32, U32, U32, U32)
vector_op("v_or3_b32", lambda a, b, c: a | b | c, U32, U32, U32, U32)
vector_op("v_bfi_b32", lambda a, b, c: (a & b) | (~a & c), U32, U32, U32, U32)
vector_op("v_prng_b32", next_random, U32, U32)


@binder("v_swap_b32")
def _swap(site: Site) -> Bound:
    a, b = (operand.index for operand in site.operands)

    def run(g: Group) -> None:
        kept = g.U[a].copy()
        group_write(g, a, g.U[b])
        group_write(g, b, kept)

    ids = site.ids(site.operands)
    return Bound(run, ids, ids, moves=True)


@binder("v_cndmask_b32")
def _select(site: Site) -> Bound:
    """Binds v_cndmask: D = S1 if the lane's bit of S2 is set, else S0. neg and abs modify the sign bit, as for float32."""
    first, second, mask = site.operands[1:]
    site.operands.pop()
    modified = any(operand.negate or operand.absolute for operand in (first, second))
    type_ = F32 if modified else U32
    bound = bind_vector(VectorOp(site.mnemonic, lambda a, b, chosen: np.where(chosen, b, a), type_, (type_, type_)), site, mask)
    if not site.encoding.endswith(("sdwa", "dpp")):
        bound.extra["select"] = (first, second, mask)
    return bound


def reverse_bits(a: Array) -> Array:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        by, field = np.uint32(shift), np.uint32(mask)
        a = ((a >> by) & field) | ((a & field) << by)
    return a >> np.uint32(16) | a << np.uint32(16)


vector_op("v_bfrev_b32", reverse_bits, U32, U32)


# v_perm_b32: each byte of the selector picks a byte of {S0, S1} (0 to 3 pick bytes of S1), a sign, 0x00 or 0xff.


Pick = tuple[bool, int, np.uint32]


@lru_cache(maxsize=256)
def _permutation(selector: int) -> tuple[tuple[Pick, ...], tuple[Pick, ...], np.uint32]:
    """Compiles a selector of v_perm_b32 to masked shifts (source is S0?, left shift, mask), signs (source is S0?, bit, mask) and
    constant bits.
    """
    masks: dict[tuple[bool, int], int] = {}
    signs: dict[tuple[bool, int], int] = {}
    constant = 0
    for i in range(4):
        choice, field = selector >> (8 * i) & 0xFF, 0xFF << (8 * i)
        if choice < 8:
            key = (choice >= 4, 8 * (i - choice % 4))
            masks[key] = masks.get(key, 0) | field
        elif choice < 12:  # the sign of bytes 1, 3, 5, 7
            key = (choice >= 10, 15 if choice % 2 == 0 else 31)
            signs[key] = signs.get(key, 0) | field
        elif choice > 12:
            constant |= field
    return (
        tuple((first, shift, np.uint32(mask)) for (first, shift), mask in masks.items()),
        tuple((first, bit, np.uint32(mask)) for (first, bit), mask in signs.items()),
        np.uint32(constant),
    )


def _permute(a: Array, b: Array, selector: int) -> Array:
    shifts, signs, result = _permutation(selector)
    for first, shift, mask in shifts:
        x = a if first else b
        moved = x << np.uint32(shift) if shift >= 0 else x >> np.uint32(-shift)
        result = result | (moved & mask)
    for first, bit, mask in signs:
        result = result | (((a if first else b) >> np.uint32(bit)) & _ONE) * mask
    return result


def byte_permute(a: Array, b: Array, selector: Array) -> Array:
    if selector.ndim == 0:
        return _permute(a, b, int(selector))
    if (selector == selector[0]).all():
        return _permute(a, b, int(selector[0]))
    a, b, selector = np.broadcast_arrays(a, b, selector)
    result = np.empty(selector.shape, np.uint32)
    for choice in np.unique(selector):
        lanes = selector == choice
        result[lanes] = _permute(a[lanes], b[lanes], int(choice))
    return result


vector_op("v_perm_b32", byte_permute, U32, U32, U32, U32)

# Bitwise functions of two inputs b and c, in the order of their truth tables: bit 2b + c of a table is the value for (b, c).
_OF_TWO = (
    "", "~(b | c)", "~b & c", "~b", "b & ~c", "~c", "b ^ c", "~(b & c)",
    "b & c", "~(b ^ c)", "c", "~b | c", "b", "b | ~c", "b | c", "",
)  # fmt: skip


@lru_cache(maxsize=256)
def bit_table(table: int) -> Callable[[Array, Array, Array], Array]:
    """Returns the bitwise function of three inputs that has this truth table: its value for (a, b, c) is bit 4a + 2b + c of the
    table."""
    off, on = table & 15, table >> 4  # the tables for a = 0 and for a = 1
    for_off, for_on = _OF_TWO[off], _OF_TWO[on]
    if off == on:
        text = for_on or ("~" if on else "") + "(a ^ a)"
    elif off == on ^ 15:
        text = f"a ^ ({for_off})" if for_off else ("~a" if off else "a")
    elif off in (0, 15):
        text = f"~a | ({for_on})" if off else f"a & ({for_on})"
    elif on in (0, 15):
        text = f"a | ({for_off})" if on else f"~a & ({for_off})"
    else:
        text = f"(a & ({for_on})) | (~a & ({for_off}))"
    return eval(f"lambda a, b, c: {text}")


@binder("v_bitop3_b32", "v_bitop3_b16")
def _bitop3(site: Site) -> Bound:
    table = int(site.take("bitop3", 0))
    type_ = U32 if site.mnemonic.endswith("b32") else U16
    return bind_vector(VectorOp(site.mnemonic, bit_table(table), type_, (type_,) * 3, keeps_high=True), site)


# Shifts and bit fields. Shift amounts are taken modulo the width of the shifted value.

vector_op("v_lshlrev_b32", lambda a, b: b << (a & _31), U32, U32, U32)
vector_op("v_lshrrev_b32", lambda a, b: b >> (a & _31), U32, U32, U32)
vector_op("v_ashrrev_i32", lambda a, b: b >> (a & _31).astype(np.int32), I32, U32, I32)
vector_op("v_lshlrev_b16", lambda a, b: b << (a & _FIFTEEN), U16, U16, U16)
vector_op("v_lshrrev_b16", lambda a, b: b >> (a & _FIFTEEN), U16, U16, U16)
vector_op("v_ashrrev_i16", lambda a, b: b >> (a & _FIFTEEN).astype(np.int16), I16, U16, I16)
vector_op("v_lshlrev_b64", lambda a, b: b << (a & np.uint32(63)).astype(np.uint64), U64, U32, U64)
vector_op("v_lshrrev_b64", lambda a, b: b >> (a & np.uint32(63)).astype(np.uint64), U64, U32, U64)
vector_op("v_ashrrev_i64", lambda a, b: b >> (a & np.uint32(63)).astype(np.int64), I64, U32, I64)
vector_op("v_lshl_or_b32", lambda a, b, c: (a << (b & _31)) | c, U32, U32, U32, U32)
vector_op("v_lshl_add_u32", lambda a, b, c: (a << (b & _31)) + c, U32, U32, U32, U32)
vector_op("v_add_lshl_u32", lambda a, b, c: (a + b) << (c & _31), U32, U32, U32, U32)
vector_op("v_lshl_add_u64", lambda a, b, c: (a << (b & np.uint32(7)).astype(np.uint64)) + c, U64, U64, U32, U64)


def _wide(a: Array) -> Array:
    return a.astype(np.uint64)


def align_bits(a: Array, b: Array, c: Array) -> Array:
    return ((_wide(a) << np.uint64(32) | _wide(b)) >> (c & _31).astype(np.uint64)).astype(np.uint32)


vector_op("v_alignbit_b32", align_bits, U32, U32, U32, U32)
vector_op("v_alignbyte_b32", lambda a, b, c: align_bits(a, b, (c & _3) * _8), U32, U32, U32, U32)


def extract_unsigned(a: Array, b: Array, c: Array) -> Array:
    return (a >> (b & _31)) & ((_ONE << (c & _31)) - _ONE)


def extract_signed(a: Array, b: Array, c: Array) -> Array:
    """Returns bits [offset, offset + width), sign-extended. The sign of a field that reaches past bit 31 is bit 31."""
    offset, width = (b & _31).astype(np.int32), (c & _31).astype(np.int32)
    shifted = a >> offset
    up = np.int32(32) - width
    field = np.where(offset + width < 32, (shifted << up) >> up, shifted)
    return np.where(width == 0, np.int32(0), field)


vector_op("v_bfe_u32", extract_unsigned, U32, U32, U32, U32)
vector_op("v_bfe_i32", extract_signed, I32, I32, U32, U32)
vector_op("v_bfm_b32", lambda a, b: ((_ONE << (a & _31)) - _ONE) << (b & _31), U32, U32, U32)


def _shift_and_pack(low: int, high: int) -> Callable[[Array, Array, Array], Array]:
    """Returns a function that shifts two int32 right, saturates each to a byte, and packs both bytes into 16 bits."""

    def function(a: Array, b: Array, c: Array) -> Array:
        by = (c & _31).astype(np.int32)
        first, second = (np.clip(x >> by, low, high).astype(np.uint16) & np.uint16(0xFF) for x in (a, b))
        return first | second << np.uint16(8)

    return function


vector_op("v_ashr_pk_i8_i32", _shift_and_pack(-128, 127), U16, I32, I32, U32, keeps_high=True)
vector_op("v_ashr_pk_u8_i32", _shift_and_pack(0, 255), U16, I32, I32, U32, keeps_high=True)

# Addition and multiplication


def _reversed_difference(a: Array, b: Array) -> Array:
    return b - a


def _multiply_add(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


for _suffix, _type in (("u32", U32), ("u16", U16)):
    vector_op(f"v_add_{_suffix}", np.add, _type, _type, _type, saturates=True)
    vector_op(f"v_sub_{_suffix}", np.subtract, _type, _type, _type, saturates=True)
    vector_op(f"v_subrev_{_suffix}", _reversed_difference, _type, _type, _type, saturates=True)
for _suffix, _type in (("i32", I32), ("i16", I16)):
    vector_op(f"v_add_{_suffix}", np.add, _type, _type, _type, saturates=True, keeps_high=True)
    vector_op(f"v_sub_{_suffix}", np.subtract, _type, _type, _type, saturates=True, keeps_high=True)
vector_op("v_mul_lo_u16", np.multiply, U16, U16, U16)
vector_op("v_mad_legacy_u16", _multiply_add, U16, U16, U16, U16)
vector_op("v_mad_legacy_i16", _multiply_add, I16, I16, I16, I16)
vector_op("v_mad_u16", _multiply_add, U16, U16, U16, U16, saturates=True, keeps_high=True)
vector_op("v_mad_i16", _multiply_add, I16, I16, I16, I16, saturates=True, keeps_high=True)
vector_op("v_add3_u32", lambda a, b, c: a + b + c, U32, U32, U32, U32)
vector_op("v_xad_u32", lambda a, b, c: (a ^ b) + c, U32, U32, U32, U32)
vector_op("v_mul_lo_u32", np.multiply, U32, U32, U32)
vector_op("v_mul_hi_u32", lambda a, b: (_wide(a) * _wide(b) >> np.uint64(32)).astype(np.uint32), U32, U32, U32)
vector_op("v_mul_hi_i32", lambda a, b: (a.astype(np.int64) * b.astype(np.int64) >> np.int64(32)).astype(np.int32), I32, I32, I32)


def _low24(a: Array) -> Array:
    return a & 0xFFFFFF


def _signed24(a: Array) -> Array:
    return ((a & 0xFFFFFF) ^ 0x800000) - 0x800000


vector_op("v_mul_u32_u24", lambda a, b: _low24(a) * _low24(b), U32, U32, U32)
vector_op("v_mul_i32_i24", lambda a, b: _signed24(a) * _signed24(b), I32, I32, I32)
vector_op("v_mul_hi_u32_u24", lambda a, b: (_wide(_low24(a)) * _wide(_low24(b)) >> np.uint64(32)).astype(np.uint32), U32, U32, U32)
vector_op(
    "v_mul_hi_i32_i24",
    lambda a, b: (_signed24(a).astype(np.int64) * _signed24(b).astype(np.int64) >> np.int64(32)).astype(np.int32),
    I32, I32, I32,
)  # fmt: skip
vector_op("v_mad_u32_u24", lambda a, b, c: _low24(a) * _low24(b) + c, U32, U32, U32, U32, saturates=True)
vector_op("v_mad_i32_i24", lambda a, b, c: _signed24(a) * _signed24(b) + c, I32, I32, I32, I32, saturates=True)
vector_op("v_mad_u32_u16", lambda a, b, c: a.astype(np.uint32) * b.astype(np.uint32) + c, U32, U16, U16, U32)
vector_op("v_mad_i32_i16", lambda a, b, c: a.astype(np.int32) * b.astype(np.int32) + c, I32, I16, I16, I32)

# Minimum and maximum


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


for _suffix, _type in (("i32", I32), ("u32", U32), ("i16", I16), ("u16", U16)):
    vector_op(f"v_min_{_suffix}", np.minimum, _type, _type, _type)
    vector_op(f"v_max_{_suffix}", np.maximum, _type, _type, _type)
    _three = (_type,) * 4
    vector_op(f"v_min3_{_suffix}", lambda a, b, c: np.minimum(np.minimum(a, b), c), *_three, keeps_high=True)
    vector_op(f"v_max3_{_suffix}", lambda a, b, c: np.maximum(np.maximum(a, b), c), *_three, keeps_high=True)
    vector_op(f"v_med3_{_suffix}", _median, *_three, keeps_high=True)

# Bit counts

vector_op("v_bcnt_u32_b32", lambda a, b: np.bitwise_count(a).astype(np.uint32) + b, U32, U32, U32)


def first_high(a: Array) -> Array:
    """Returns the number of leading zeros; -1 for 0."""
    length = np.frexp(a.astype(np.float64))[1]  # exact: float64 holds 32 bits
    return np.where(a == 0, -1, 32 - length).astype(np.int32).view(np.uint32)


def first_low(a: Array) -> Array:
    """Returns the number of trailing zeros; -1 for 0."""
    lowest = a & (~a + _ONE)
    length = np.frexp(lowest.astype(np.float64))[1]
    return np.where(a == 0, -1, length - 1).astype(np.int32).view(np.uint32)


def first_high_signed(a: Array) -> Array:
    """Returns the number of leading bits after the sign bit that equal the sign; -1 if all do."""
    return first_high((a ^ (a >> np.int32(31))).view(np.uint32))


vector_op("v_ffbh_u32", first_high, U32, U32)
vector_op("v_ffbl_b32", first_low, U32, U32)
vector_op("v_ffbh_i32", first_high_signed, U32, I32)

# Sums of absolute differences and dot products of packed values


def _part(a: Array, at: int, bits: int) -> Array:
    return (a >> np.uint32(at)) & np.uint32((1 << bits) - 1)


def _difference(a: Array, b: Array) -> Array:
    return np.maximum(a, b) - np.minimum(a, b)


def _differences(bits: int) -> Callable[[Array, Array, Array], Array]:
    def function(a: Array, b: Array, c: Array) -> Array:
        for at in range(0, 32, bits):
            c = c + _difference(_part(a, at, bits), _part(b, at, bits))
        return c

    return function


def _masked_differences(a: Array, b: Array, c: Array) -> Array:
    """Returns the sum of absolute differences of bytes, plus c, without bytes whose reference (S1) is zero."""
    for at in range(0, 32, 8):
        x, y = _part(a, at, 8), _part(b, at, 8)
        c = c + np.where(y == 0, np.uint32(0), _difference(x, y))
    return c


def _mean_of_bytes(a: Array, b: Array, c: Array) -> Array:
    """Returns the mean of bytes: for each byte (S0 + S1 + the lowest bit of S2) / 2."""
    result = np.uint32(0)
    for at in range(0, 32, 8):
        result = result | (_part(a, at, 8) + _part(b, at, 8) + _part(c, at, 1)) >> _ONE << np.uint32(at)
    return result


_sad8 = _differences(8)
vector_op("v_sad_u8", _sad8, U32, U32, U32, U32)
vector_op("v_sad_u16", _differences(16), U32, U32, U32, U32)
vector_op("v_sad_u32", lambda a, b, c: _difference(a, b) + c, U32, U32, U32, U32)
vector_op("v_sad_hi_u8", lambda a, b, c: (_sad8(a, b, np.uint32(0)) << np.uint32(16)) + c, U32, U32, U32, U32)
vector_op("v_msad_u8", _masked_differences, U32, U32, U32, U32)
vector_op("v_lerp_u8", _mean_of_bytes, U32, U32, U32, U32)


def _dot(bits: int, signed: bool) -> Callable[[Array, Array, Array], Array]:
    """Returns a dot product of packed values, plus c. The function also takes int64, for clamp; the packed values are then in the
    lower 32 bits.
    """
    field, sign = (1 << bits) - 1, 1 << (bits - 1)

    def part(x: Array, at: int) -> Array:
        value = (x >> x.dtype.type(at)) & x.dtype.type(field)
        return (value ^ x.dtype.type(sign)) - x.dtype.type(sign) if signed else value

    def function(a: Array, b: Array, c: Array) -> Array:
        for at in range(0, 32, bits):
            c = c + part(a, at) * part(b, at)
        return c

    return function


for _count, _bits in ((2, 16), (4, 8), (8, 4)):
    vector_op(f"v_dot{_count}_i32_i{_bits}", _dot(_bits, True), I32, I32, I32, I32, saturates=True)
    vector_op(f"v_dot{_count}_u32_u{_bits}", _dot(_bits, False), U32, U32, U32, U32, saturates=True)
    vector_op(f"v_dot{_count}c_i32_i{_bits}", _dot(_bits, True), I32, I32, I32, I32, saturates=True, accumulates=True)

# Carries: a sum, and a carry bit per lane in a pair of scalar registers


def _two_sources(site: Site, first: Operand, second: Operand) -> Callable[[Group], tuple[Array, Array]]:
    """Returns a function that reads two sources. Rejects encodings that may leave a part of the register, or active lanes,
    unwritten."""
    form, moved = Form(), ""
    lines: list[str] = []
    if site.encoding.endswith("dpp"):
        moved = moved_source(site, form, lines, first, U32)
        plan = form.values["plan"]
        if not (plan.total or (plan.zero and plan.enabled.all())):
            raise site.unknown(f"DPP of {site.mnemonic} that leaves lanes out is not implemented")
    selects = [str(site.take(f"src{i}_sel", "")) for i in range(2)] if site.encoding == "sdwa" else ["", ""]
    site.take("dst_unused")
    if site.take("dst_sel", "DWORD") != "DWORD":
        raise site.unknown(f"dst_sel of {site.mnemonic} is not implemented")
    x = source(site, form, U32, first, select=selects[0], moved=moved)
    y = source(site, form, U32, second, select=selects[1])
    return form.function("\n".join((*lines, f"return {x}, {y}")))


@binder("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
def _carry(site: Site) -> Bound:
    name = site.mnemonic
    destination, carry_out, *sources = site.operands
    read = _two_sources(site, sources[0], sources[1])
    carry_in = lanes_of(sources[2]) if len(sources) > 2 else None
    adds, reverse, row, to = "add" in name, "rev" in name, destination.index, carry_out.index

    def run(g: Group) -> None:
        a, b = read(g)
        x, y = (_wide(b), _wide(a)) if reverse else (_wide(a), _wide(b))
        total = x + y if adds else x - y
        if carry_in is not None:
            carry = carry_in(g).astype(np.uint64)
            total = total + carry if adds else total - carry
        # negative results wrap to large uint64 values, so their upper 32 bits are not zero
        group_write(g, row, total.astype(np.uint32))
        set_compare(g, to, (total >> np.uint64(32)) != 0)

    return Bound(run, site.ids([destination, carry_out]), site.ids(sources))


@binder("v_mad_u64_u32", "v_mad_i64_i32")
def _multiply_add_wide(site: Site) -> Bound:
    """D = S0 * S1 + S2 in 64 bits. Also writes bit 64 of the sum, which is its carry or its sign."""
    signed = site.mnemonic == "v_mad_i64_i32"
    destination, carry_out, *sources = site.operands
    narrow, wide = (I32, I64) if signed else (U32, U64)
    a, b, c = (getter(site, operand, type_) for operand, type_ in zip(sources, (narrow, narrow, wide), strict=True))
    dtype = wide.dtype

    def run(g: Group) -> None:
        product, addend = a(g).astype(dtype) * b(g).astype(dtype), c(g)
        total = product + addend
        if signed:
            overflow = ((product ^ total) & (addend ^ total)) < 0
            top = (total < 0) ^ overflow
        else:
            top = total < addend
        write_pair64(g, destination.index, total)
        set_compare(g, carry_out.index, top)

    return Bound(run, site.ids([destination, carry_out]), site.ids(sources))
