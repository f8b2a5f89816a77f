"""32-bit scalar arithmetic: SOP1, SOP2, SOPC, SOPK.

Definitions: CDNA3 ISA document, chapters SOP2, SOPK, SOP1 and SOPC, which CDNA4 shares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950_emulator.binding import Bound, Site, binder, implicit
from gfx950_emulator.constants import MASK32
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.scalar_values import (
    MASK64,
    Value,
    chooses,
    leading_signs,
    leading_zeros,
    lowest_one,
    lowest_zero,
    per_wave,
    read32,
    read64,
    reverse,
    scalar_bound,
    select,
    signed,
)  # fmt: skip

# Instructions with two 32-bit sources: function(a, b) -> (result, scc; None if SCC is not written)

Binary = Callable[[Value, Value], "tuple[Value, Value]"]


def _nonzero(value: Value) -> tuple[Value, Value]:
    return value, value != 0


def _add_u32(a: Value, b: Value) -> tuple[Value, Value]:
    total = a + b
    return total & MASK32, total > MASK32


def _sub_u32(a: Value, b: Value) -> tuple[Value, Value]:
    return (a - b) & MASK32, b > a


def _add_i32(a: Value, b: Value) -> tuple[Value, Value]:
    total = (a + b) & MASK32
    return total, (((a ^ total) & (b ^ total)) >> 31) != 0


def _sub_i32(a: Value, b: Value) -> tuple[Value, Value]:
    difference = (a - b) & MASK32
    return difference, (((a ^ b) & (a ^ difference)) >> 31) != 0


def _bfe_u32(a: Value, b: Value) -> tuple[Value, Value]:
    offset, width = b & 31, (b >> 16) & 0x7F
    return _nonzero((a >> offset) & ((1 << width) - 1) & MASK32)


def _bfe_i32_one(a: int, b: int) -> int:
    offset, width = b & 31, min((b >> 16) & 0x7F, 32)
    if width == 0:
        return 0
    field = (a >> offset) & ((1 << width) - 1)
    if width + offset <= 32 and field >> (width - 1):
        field |= -1 << width
    elif width + offset > 32:  # the field ends with the register: its sign is bit 31
        field = (((a ^ 0x80000000) - 0x80000000) >> offset) & MASK32
    return field & MASK32


def _mul_hi_u32(a: Value, b: Value) -> Value:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        product = np.asarray(a).astype(np.uint64) * np.asarray(b).astype(np.uint64)
        return (product >> 32).astype(np.int64)
    return a * b >> 32


def _mul_lo(a: Value, b: Value) -> Value:
    # int64 products wrap modulo 2**64, but their lower half is right
    return (a * b) & MASK32


def _mul_hi_i32(a: Value, b: Value) -> Value:
    return (signed(a) * signed(b) >> 32) & MASK32


def _shift_add(amount: int) -> Binary:
    def function(a: Value, b: Value) -> tuple[Value, Value]:
        total = (a << amount) + b
        return total & MASK32, total > MASK32

    return function


_BINARY32: dict[str, Binary] = {
    "s_add_u32": _add_u32,
    "s_sub_u32": _sub_u32,
    "s_add_i32": _add_i32,
    "s_sub_i32": _sub_i32,
    "s_min_i32": lambda a, b: (select(signed(a) < signed(b), a, b), signed(a) < signed(b)),
    "s_max_i32": lambda a, b: (select(signed(a) >= signed(b), a, b), signed(a) >= signed(b)),
    "s_min_u32": lambda a, b: (select(a < b, a, b), a < b),
    "s_max_u32": lambda a, b: (select(a >= b, a, b), a >= b),
    "s_and_b32": lambda a, b: _nonzero(a & b),
    "s_or_b32": lambda a, b: _nonzero(a | b),
    "s_xor_b32": lambda a, b: _nonzero(a ^ b),
    "s_andn2_b32": lambda a, b: _nonzero(a & (b ^ MASK32)),
    "s_orn2_b32": lambda a, b: _nonzero(a | (b ^ MASK32)),
    "s_nand_b32": lambda a, b: _nonzero((a & b) ^ MASK32),
    "s_nor_b32": lambda a, b: _nonzero((a | b) ^ MASK32),
    "s_xnor_b32": lambda a, b: _nonzero(a ^ b ^ MASK32),
    "s_lshl_b32": lambda a, b: _nonzero((a << (b & 31)) & MASK32),
    "s_lshr_b32": lambda a, b: _nonzero(a >> (b & 31)),
    "s_ashr_i32": lambda a, b: _nonzero((signed(a) >> (b & 31)) & MASK32),
    "s_bfe_u32": _bfe_u32,
    "s_bfe_i32": lambda a, b: _nonzero(per_wave(_bfe_i32_one)(a, b)),
    "s_absdiff_i32": lambda a, b: _nonzero(abs(signed((a - b) & MASK32)) & MASK32),
    "s_lshl1_add_u32": _shift_add(1),
    "s_lshl2_add_u32": _shift_add(2),
    "s_lshl3_add_u32": _shift_add(3),
    "s_lshl4_add_u32": _shift_add(4),
    # These instructions do not write SCC.
    "s_mul_i32": lambda a, b: (_mul_lo(a, b), None),
    "s_mul_hi_u32": lambda a, b: (_mul_hi_u32(a, b), None),
    "s_mul_hi_i32": lambda a, b: (_mul_hi_i32(a, b), None),
    "s_bfm_b32": lambda a, b: ((((1 << (a & 31)) - 1) << (b & 31)) & MASK32, None),
    "s_pack_ll_b32_b16": lambda a, b: ((a & 0xFFFF) | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b: ((a & 0xFFFF) | (b & 0xFFFF0000), None),
    "s_pack_hh_b32_b16": lambda a, b: (a >> 16 | (b & 0xFFFF0000), None),
}
_KEEPS_SCC = {name for name, function in _BINARY32.items() if function(1, 1)[1] is None}


@binder(*_BINARY32)
def _binary32(site: Site) -> Bound:
    function, keeps = _BINARY32[site.mnemonic], site.mnemonic in _KEEPS_SCC
    destination, a, b = site.operands[0].index, read32(site.operands[1]), read32(site.operands[2])

    def run(g: Group) -> None:
        result, scc = function(a(g), b(g))
        g.set_s32(destination, result)
        if not keeps:
            g.scc = scc

    return scalar_bound(site, run, writes_scc=not keeps)


@binder("s_addc_u32", "s_subb_u32")
def _carry(site: Site) -> Bound:
    destination, a, b = site.operands[0].index, read32(site.operands[1]), read32(site.operands[2])
    adds = site.mnemonic == "s_addc_u32"

    def run(g: Group) -> None:
        x, y = a(g), b(g)
        carry = g.scc.astype(np.int64) if isinstance(g.scc, np.ndarray) else int(g.scc)
        total = x + y + carry if adds else x - y - carry
        g.set_s32(destination, total & MASK32)
        g.scc = total > MASK32 if adds else total < 0

    return scalar_bound(site, run, writes_scc=True, reads_scc=True)


# Instructions with one 32-bit source


_UNARY32: dict[str, tuple[Callable[[Value], Value], bool]] = {  # the function; whether SCC becomes 1 for a nonzero result, else 0
    "s_mov_b32": (lambda a: a, False),
    "s_not_b32": (lambda a: a ^ MASK32, True),
    "s_abs_i32": (lambda a: abs(signed(a)) & MASK32, True),
    "s_brev_b32": (per_wave(reverse(32)), False),
    "s_bcnt0_i32_b32": (per_wave(lambda a: 32 - a.bit_count()), True),
    "s_bcnt1_i32_b32": (per_wave(lambda a: a.bit_count()), True),
    "s_ff0_i32_b32": (per_wave(lowest_zero(32)), False),
    "s_ff1_i32_b32": (per_wave(lowest_one), False),
    "s_flbit_i32_b32": (per_wave(leading_zeros(32)), False),
    "s_flbit_i32": (per_wave(leading_signs(32)), False),
    "s_sext_i32_i8": (lambda a: (((a & 0xFF) ^ 0x80) - 0x80) & MASK32, False),
    "s_sext_i32_i16": (lambda a: (((a & 0xFFFF) ^ 0x8000) - 0x8000) & MASK32, False),
}


@binder(*_UNARY32)
def _unary32(site: Site) -> Bound:
    function, sets = _UNARY32[site.mnemonic]
    destination, a = site.operands[0].index, read32(site.operands[1])

    def run(g: Group) -> None:
        result = function(a(g))
        g.set_s32(destination, result)
        if sets:
            g.scc = result != 0

    return scalar_bound(site, run, writes_scc=sets)


@binder("s_cmov_b32")
def _cmov(site: Site) -> Bound:
    destination, source = site.operands
    to, a = destination.index, read32(source)

    def run(g: Group) -> None:
        g.set_s32(to, select(g.scc, a(g), g.s32(to)))

    return chooses(implicit(scalar_bound(site, run, reads_scc=True), reads=destination.ids), source.ids, destination.ids)


@binder("s_bitset0_b32", "s_bitset1_b32", "s_bitset0_b64", "s_bitset1_b64")
def _bitset(site: Site) -> Bound:
    to, at, wide = site.operands[0].index, read32(site.operands[1]), site.mnemonic.endswith("64")
    mask = MASK64 if wide else MASK32
    places = 63 if wide else 31
    if site.mnemonic.startswith("s_bitset1"):
        apply = per_wave(lambda value, at: value | 1 << (at & places))
    else:
        apply = per_wave(lambda value, at: value & (1 << (at & places) ^ mask))

    def run(g: Group) -> None:
        if wide:
            g.set_s64(to, apply(g.s64(to), at(g)))
        else:
            g.set_s32(to, apply(g.s32(to), at(g)))

    return implicit(scalar_bound(site, run), reads=site.ids(site.operands[:1]))


# Instructions with a 16-bit immediate (SOPK)


@binder("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmovk_i32")
def _immediate(site: Site) -> Bound:
    destination = site.operands[0].index
    constant = ((int(site.operands[1].literal) & 0xFFFF) ^ 0x8000) - 0x8000
    name = site.mnemonic
    word = constant & MASK32

    def move(g: Group) -> None:
        g.set_s32(destination, word)

    def add(g: Group) -> None:
        result, g.scc = _add_i32(g.s32(destination), word)
        g.set_s32(destination, result)

    def multiply(g: Group) -> None:
        g.set_s32(destination, _mul_lo(g.s32(destination), word))

    def conditional(g: Group) -> None:
        g.set_s32(destination, select(g.scc, word, g.s32(destination)))

    run = {"s_movk_i32": move, "s_addk_i32": add, "s_mulk_i32": multiply, "s_cmovk_i32": conditional}[name]
    bound = scalar_bound(site, run, writes_scc=name == "s_addk_i32", reads_scc=name == "s_cmovk_i32")
    if name == "s_movk_i32":
        return bound
    bound = implicit(bound, reads=site.operands[0].ids)
    return chooses(bound, (), site.operands[0].ids) if name == "s_cmovk_i32" else bound


# Compares

_COMPARES: dict[str, Callable[[Value, Value], Value]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


@binder(*(f"s_cmp{k}_{c}_{t}" for k in ("", "k") for c in _COMPARES for t in ("i32", "u32")))
def _compare(site: Site) -> Bound:
    kind, relation, type_ = site.mnemonic.split("_")[1:]
    compare = _COMPARES[relation]
    a, second = read32(site.operands[0]), site.operands[1]
    b: Callable[[Group], Any]
    if kind == "cmpk":  # the immediate is sign- or zero-extended, depending on the type
        value = int(second.literal) & 0xFFFF
        constant = value if type_ == "u32" else ((value ^ 0x8000) - 0x8000) & MASK32
        b = lambda g: constant  # noqa: E731
    else:
        b = read32(second)

    def unsigned_run(g: Group) -> None:
        g.scc = compare(a(g), b(g))

    def signed_run(g: Group) -> None:
        g.scc = compare(signed(a(g)), signed(b(g)))

    return scalar_bound(site, unsigned_run if type_ == "u32" else signed_run, writes_scc=True, stores=0)


@binder("s_cmp_eq_u64", "s_cmp_lg_u64")
def _compare64(site: Site) -> Bound:
    compare = _COMPARES[site.mnemonic.split("_")[2]]
    a, b = read64(site.operands[0]), read64(site.operands[1])

    def run(g: Group) -> None:
        g.scc = compare(a(g), b(g))

    return scalar_bound(site, run, writes_scc=True, stores=0)


@binder("s_bitcmp0_b32", "s_bitcmp1_b32", "s_bitcmp0_b64", "s_bitcmp1_b64")
def _bit_compare(site: Site) -> Bound:
    wide = site.mnemonic.endswith("64")
    a, b = (read64 if wide else read32)(site.operands[0]), read32(site.operands[1])
    wanted = int(site.mnemonic[8])

    if wide:
        bit = per_wave(lambda value, at: value >> (at & 63) & 1)
    else:
        bit = lambda value, at: value >> (at & 31) & 1  # noqa: E731

    def run(g: Group) -> None:
        g.scc = bit(a(g), b(g)) == wanted

    return scalar_bound(site, run, writes_scc=True, stores=0)


@binder("s_cselect_b32")
def _cselect32(site: Site) -> Bound:
    _, first, second = site.operands
    to, a, b = site.operands[0].index, read32(first), read32(second)

    def run(g: Group) -> None:
        scc = g.scc
        if isinstance(scc, np.ndarray):
            chosen: Any = np.where(scc, a(g), b(g))
            g.set_s32(to, chosen)
        else:
            g.set_s32(to, a(g) if scc else b(g))

    return chooses(scalar_bound(site, run, reads_scc=True), first.ids, second.ids)
