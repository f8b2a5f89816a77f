"""Scalar arithmetic: SOP1, SOP2, SOPC, SOPK.

A scalar is an int or, where waves differ, an int64 array (32 bits) or uint64 array (64 bits) with a value per wave in the
same range. The functions below are integer arithmetic that means the same for both; `select` is the exception.
Definitions: CDNA3 ISA document, chapters SOP2, SOPK, SOP1 and SOPC, which CDNA4 shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from gfx950_emulator.constants import EXEC, MASK32
from gfx950_emulator.decode import Bound, Logic, Site, binder, implicit
from gfx950_emulator.group import Group, all_lanes, no_lanes
from gfx950_emulator.operands import SCALAR_BASE, SCC_ID, Operand

MASK64 = (1 << 64) - 1
Value = Any  # int or numpy array, see above


def select(condition: Value, yes: Value, no: Value) -> Value:
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def signed(value: Value) -> Value:
    """32 bits as a signed number."""
    return (value ^ 0x80000000) - 0x80000000


def per_wave(function: Callable[..., int]) -> Callable[..., Value]:
    """Applies a function of ints to arrays too, one wave at a time: for what is rare."""

    def apply(*values: Value) -> Value:
        if any(isinstance(value, np.ndarray) for value in values):
            arrays = np.broadcast_arrays(*values)
            results = [function(*(int(x) for x in row)) for row in zip(*arrays, strict=True)]
            return np.array(results, np.uint64 if max(results) > MASK32 else np.int64)
        return function(*values)

    return apply


def read32(operand: Operand) -> Callable[[Group], Value]:
    if operand.file == "literal":
        constant = int(operand.bits(np.dtype(np.uint32)))
        return lambda g: constant
    index = operand.index
    return lambda g: g.s32(index)


def read64(operand: Operand) -> Callable[[Group], Value]:
    if operand.file == "literal":
        constant = constant64(operand)
        return lambda g: constant
    index = operand.index
    return lambda g: g.s64(index)


def constant64(operand: Operand) -> int:
    """A literal as 64 bits: integers are extended by their sign, hex of 32 bits by zeros, inline floats are double precision."""
    if isinstance(operand.literal, float):
        return int(operand.bits(np.dtype(np.float64)).view(np.uint64))
    return int(operand.literal) & MASK64


def _bound(
    site: Site, run: Callable[[Group], None], *, writes_scc: bool = False, reads_scc: bool = False, stores: int = 1
) -> Bound:
    destinations, sources = site.operands[:stores], site.operands[stores:]
    writes, reads = site.ids(destinations), site.ids(sources)
    return Bound(
        run,
        (*writes, SCC_ID) if writes_scc else writes,
        (*reads, SCC_ID) if reads_scc else reads,
        "salu",
    )


# Two sources, 32 bits: function(a, b) -> (result, scc or None)

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
    # int64 products wrap modulo 2**64, which leaves the lower half right
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
    # These leave SCC alone.
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

    return _bound(site, run, writes_scc=not keeps)


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

    return _bound(site, run, writes_scc=True, reads_scc=True)


# One source, 32 bits


def _ff1(value: int) -> int:
    """Number of the lowest bit that is set, or -1."""
    return (value & -value).bit_length() - 1 if value else MASK32


def _ff0(width: int) -> Callable[[int], int]:
    """Number of the lowest bit that is not set, or -1."""
    return lambda value: _ff1(value ^ ((1 << width) - 1))


def _flbit(width: int) -> Callable[[int], int]:
    """Zeros above the highest bit that is set, or -1."""
    return lambda value: width - value.bit_length() if value else MASK32


def _flbit_signed(width: int) -> Callable[[int], int]:
    """Bits at the top that equal the sign, or -1 if all do."""
    return lambda value: _flbit(width)(value ^ ((1 << width) - 1) if value >> (width - 1) else value)


def _reverse(width: int) -> Callable[[int], int]:
    return lambda value: int(f"{value:0{width}b}"[::-1], 2)


_UNARY32: dict[str, tuple[Callable[[Value], Value], bool]] = {  # function, and whether SCC says that the result is not zero
    "s_mov_b32": (lambda a: a, False),
    "s_not_b32": (lambda a: a ^ MASK32, True),
    "s_abs_i32": (lambda a: abs(signed(a)) & MASK32, True),
    "s_brev_b32": (per_wave(_reverse(32)), False),
    "s_bcnt0_i32_b32": (per_wave(lambda a: 32 - a.bit_count()), True),
    "s_bcnt1_i32_b32": (per_wave(lambda a: a.bit_count()), True),
    "s_ff0_i32_b32": (per_wave(_ff0(32)), False),
    "s_ff1_i32_b32": (per_wave(_ff1), False),
    "s_flbit_i32_b32": (per_wave(_flbit(32)), False),
    "s_flbit_i32": (per_wave(_flbit_signed(32)), False),
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

    return _bound(site, run, writes_scc=sets)


def _chooses(bound: Bound, first: Iterable[int], second: Iterable[int]) -> Bound:
    """Tells the sanitizer that the result is one or the other, as SCC says."""
    return replace(bound, extra={"choice": (tuple(first), tuple(second))})


@binder("s_cmov_b32")
def _cmov(site: Site) -> Bound:
    destination, source = site.operands
    to, a = destination.index, read32(source)

    def run(g: Group) -> None:
        g.set_s32(to, select(g.scc, a(g), g.s32(to)))

    return _chooses(implicit(_bound(site, run, reads_scc=True), reads=destination.ids), source.ids, destination.ids)


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

    return implicit(_bound(site, run), reads=site.ids(site.operands[:1]))


# Immediate of 16 bits (SOPK)


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
    bound = _bound(site, run, writes_scc=name == "s_addk_i32", reads_scc=name == "s_cmovk_i32")
    if name == "s_movk_i32":
        return bound
    bound = implicit(bound, reads=site.operands[0].ids)
    return _chooses(bound, (), site.operands[0].ids) if name == "s_cmovk_i32" else bound


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
    if kind == "cmpk":  # the immediate is extended by its sign or by zeros, as the type says
        value = int(second.literal) & 0xFFFF
        constant = value if type_ == "u32" else ((value ^ 0x8000) - 0x8000) & MASK32
        b = lambda g: constant  # noqa: E731
    else:
        b = read32(second)

    def unsigned_run(g: Group) -> None:
        g.scc = compare(a(g), b(g))

    def signed_run(g: Group) -> None:
        g.scc = compare(signed(a(g)), signed(b(g)))

    return _bound(site, unsigned_run if type_ == "u32" else signed_run, writes_scc=True, stores=0)


@binder("s_cmp_eq_u64", "s_cmp_lg_u64")
def _compare64(site: Site) -> Bound:
    compare = _COMPARES[site.mnemonic.split("_")[2]]
    a, b = read64(site.operands[0]), read64(site.operands[1])

    def run(g: Group) -> None:
        g.scc = compare(a(g), b(g))

    return _bound(site, run, writes_scc=True, stores=0)


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

    return _bound(site, run, writes_scc=True, stores=0)


# 64 bits. Values are lane masks more often than numbers, so logic works on booleans per lane where an operand is one.


def _is_mask(g: Group, operand: Operand) -> bool:
    return operand.file == "s" and (operand.index == EXEC or type(g.s[operand.index]) not in (int, np.ndarray))


def lanes_of(operand: Operand) -> Callable[[Group], np.ndarray]:
    """A function that reads a 64-bit scalar operand as one bool per lane."""
    if operand.file == "literal":
        value = constant64(operand)
        if value == 0:
            return lambda g: no_lanes(g.lanes)
        if value == MASK64:
            return lambda g: all_lanes(g.lanes)
        one = np.unpackbits(np.array([value], np.uint64).view(np.uint8), bitorder="little").view(bool)
        return lambda g: np.tile(one, g.waves)
    index = operand.index
    return lambda g: g.lane_mask(index)


def any_lane(g: Group, lanes: np.ndarray) -> bool | np.ndarray:
    """Whether a wave has a lane: a bool, or one per wave."""
    if g.waves == 1:
        return bool(lanes.any())
    found = lanes.reshape(g.waves, 64).any(axis=1)
    count = int(found.sum())
    return count > 0 if count in (0, g.waves) else found


_LOGIC64: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # on bools, on numbers
    "and": (np.logical_and, lambda a, b: a & b),
    "or": (np.logical_or, lambda a, b: a | b),
    "xor": (np.logical_xor, lambda a, b: a ^ b),
    "andn2": (lambda a, b: a & ~b, lambda a, b: a & (b ^ MASK64)),
    "orn2": (lambda a, b: a | ~b, lambda a, b: a | (b ^ MASK64)),
    "nand": (lambda a, b: ~(a & b), lambda a, b: (a & b) ^ MASK64),
    "nor": (lambda a, b: ~(a | b), lambda a, b: (a | b) ^ MASK64),
    "xnor": (lambda a, b: ~(a ^ b), lambda a, b: a ^ b ^ MASK64),
}
# What one operand must be for the other not to matter, for the first and the second
_DECISIVE = {
    "and": (False, False), "nand": (False, False), "andn2": (False, True), "andn1": (True, False),
    "or": (True, True), "nor": (True, True), "orn2": (True, False), "orn1": (False, True),
}  # fmt: skip


@binder(*(f"s_{name}_b64" for name in _LOGIC64))
def _logic64(site: Site) -> Bound:
    on_lanes, on_numbers = _LOGIC64[site.mnemonic[2:-4]]
    destination, first, second = site.operands
    a, b, lanes_a, lanes_b = read64(first), read64(second), lanes_of(first), lanes_of(second)
    to = destination.index

    def run(g: Group) -> None:
        if to == EXEC or _is_mask(g, first) or _is_mask(g, second):
            lanes = on_lanes(lanes_a(g), lanes_b(g))
            g.set_lane_mask(to, lanes)
            g.scc = any_lane(g, lanes)
        else:
            value = on_numbers(a(g), b(g))
            g.set_s64(to, value)
            g.scc = value != 0

    decisive = _DECISIVE.get(site.mnemonic[2:-4], (None, None))
    logic = Logic(lanes_a, lanes_b, tuple(first.ids), tuple(second.ids), *decisive, tuple(destination.ids))
    return replace(_bound(site, run, writes_scc=True), extra={"logic": logic})


@binder("s_wqm_b64")
def _whole_quads(site: Site) -> Bound:
    """Four lanes side by side are all set if one of them is."""
    destination, first = site.operands
    lanes, to = lanes_of(first), destination.index

    def run(g: Group) -> None:
        result = np.repeat(lanes(g).reshape(-1, 4).any(axis=1), 4)
        g.set_lane_mask(to, result)
        g.scc = any_lane(g, result)

    return _bound(site, run, writes_scc=True)


@binder("s_mov_b64", "s_not_b64")
def _move64(site: Site) -> Bound:
    destination, first = site.operands
    a, lanes, to = read64(first), lanes_of(first), destination.index
    inverts = site.mnemonic == "s_not_b64"

    def run(g: Group) -> None:
        if to == EXEC or _is_mask(g, first):
            value = lanes(g)
            g.set_lane_mask(to, ~value if inverts else value)
            if inverts:
                g.scc = any_lane(g, ~value)
        else:
            number = a(g)
            number = number ^ MASK64 if inverts else number
            g.set_s64(to, number)
            if inverts:
                g.scc = number != 0

    return _bound(site, run, writes_scc=inverts)


_ON_EXEC: dict[str, Callable[..., Any]] = {
    **{name: on_lanes for name, (on_lanes, _) in _LOGIC64.items()},
    "andn1": lambda a, b: ~a & b,
    "orn1": lambda a, b: ~a | b,
}


@binder(*(f"s_{name}_saveexec_b64" for name in _ON_EXEC), "s_andn1_wrexec_b64", "s_andn2_wrexec_b64")
def _change_exec(site: Site) -> Bound:
    """EXEC = S0 op EXEC; SCC = EXEC is not zero; D = EXEC from before (saveexec) or as it is now (wrexec).

    andn1: ~S0 & EXEC; andn2: S0 & ~EXEC; likewise orn1 and orn2.
    """
    name, saves = site.mnemonic.split("_")[1], "saveexec" in site.mnemonic
    on_lanes = _ON_EXEC[name]
    destination, first = site.operands
    lanes, to = lanes_of(first), destination.index

    def run(g: Group) -> None:
        before = g.mask
        after = on_lanes(lanes(g), before)
        g.set_lane_mask(to, before if saves else after)
        g.set_exec(after)
        g.scc = any_lane(g, after)

    exec_ids, to_ids = (SCALAR_BASE + EXEC, SCALAR_BASE + EXEC + 1), tuple(destination.ids)
    result_ids, saved_ids = (exec_ids, to_ids) if saves else ((*exec_ids, *to_ids), ())
    decisive = _DECISIVE.get(name, (None, None))
    logic = Logic(lanes, lambda g: g.mask, tuple(first.ids), exec_ids, *decisive, result_ids, saved_ids)
    return replace(implicit(_bound(site, run, writes_scc=True), exec_ids, exec_ids), extra={"logic": logic})


@binder("s_lshl_b64", "s_lshr_b64", "s_ashr_i64")
def _shift64(site: Site) -> Bound:
    to, a, b = site.operands[0].index, read64(site.operands[1]), read32(site.operands[2])
    name = site.mnemonic

    def one(value: int, amount: int) -> int:
        amount &= 63
        if name == "s_lshl_b64":
            return (value << amount) & MASK64
        if name == "s_ashr_i64" and value >> 63:
            return ((value - (1 << 64)) >> amount) & MASK64
        return value >> amount

    apply = per_wave(one)

    def run(g: Group) -> None:
        value = apply(a(g), b(g))
        g.set_s64(to, value)
        g.scc = value != 0

    return _bound(site, run, writes_scc=True)


@binder("s_bfe_u64", "s_bfe_i64")
def _bfe64(site: Site) -> Bound:
    to, a, b = site.operands[0].index, read64(site.operands[1]), read32(site.operands[2])
    is_signed = site.mnemonic == "s_bfe_i64"

    def one(value: int, control: int) -> int:
        offset, width = control & 63, min((control >> 16) & 0x7F, 64)
        width = min(width, 64 - offset)
        field = (value >> offset) & ((1 << width) - 1)
        return (field | -1 << width) & MASK64 if is_signed and width and field >> (width - 1) else field

    apply = per_wave(one)

    def run(g: Group) -> None:
        value = apply(a(g), b(g))
        g.set_s64(to, value)
        g.scc = value != 0

    return _bound(site, run, writes_scc=True)


_COUNT64: dict[str, Callable[[int], int]] = {
    "s_bcnt1_i32_b64": lambda a: a.bit_count(),
    "s_bcnt0_i32_b64": lambda a: 64 - a.bit_count(),
    "s_ff0_i32_b64": _ff0(64),
    "s_ff1_i32_b64": _ff1,
    "s_flbit_i32_b64": _flbit(64),
    "s_flbit_i32_i64": _flbit_signed(64),
}


@binder(*_COUNT64)
def _count64(site: Site) -> Bound:
    to, a, function = site.operands[0].index, read64(site.operands[1]), per_wave(_COUNT64[site.mnemonic])
    sets = site.mnemonic.startswith("s_bcnt")

    def run(g: Group) -> None:
        value = function(a(g))
        g.set_s32(to, value)
        if sets:
            g.scc = value != 0

    return _bound(site, run, writes_scc=sets)


@binder("s_brev_b64")
def _reverse64(site: Site) -> Bound:
    to, a, function = site.operands[0].index, read64(site.operands[1]), per_wave(_reverse(64))

    def run(g: Group) -> None:
        g.set_s64(to, function(a(g)))

    return _bound(site, run)


@binder("s_bfm_b64")
def _mask64(site: Site) -> Bound:
    """D = as many ones as S0 says, moved up by S1; both modulo 64."""
    to, a, b = site.operands[0].index, read32(site.operands[1]), read32(site.operands[2])
    function = per_wave(lambda width, offset: (((1 << (width & 63)) - 1) << (offset & 63)) & MASK64)

    def run(g: Group) -> None:
        g.set_s64(to, function(a(g), b(g)))

    return _bound(site, run)


@binder("s_bitreplicate_b64_b32")
def _replicate(site: Site) -> Bound:
    """Every bit of S0 twice."""
    to, a = site.operands[0].index, read32(site.operands[1])
    function = per_wave(lambda value: sum(3 << 2 * i for i in range(32) if value >> i & 1))

    def run(g: Group) -> None:
        g.set_s64(to, function(a(g)))

    return _bound(site, run)


@binder("s_cselect_b32")
def _cselect32(site: Site) -> Bound:
    _, first, second = site.operands
    to, a, b = site.operands[0].index, read32(first), read32(second)

    def run(g: Group) -> None:
        scc = g.scc
        if isinstance(scc, np.ndarray):
            g.set_s32(to, np.where(scc, a(g), b(g)))
        else:
            g.set_s32(to, a(g) if scc else b(g))

    return _chooses(_bound(site, run, reads_scc=True), first.ids, second.ids)


@binder("s_cselect_b64", "s_cmov_b64")
def _cselect64(site: Site) -> Bound:
    """s_cmov_b64 leaves the destination alone where SCC is 0."""
    destination, first = site.operands[:2]
    second = site.operands[2] if site.mnemonic == "s_cselect_b64" else destination
    to, a, b, lanes_a, lanes_b = destination.index, read64(first), read64(second), lanes_of(first), lanes_of(second)

    def run(g: Group) -> None:
        scc = g.scc
        if isinstance(scc, np.ndarray):
            per_lane = np.repeat(scc, 64)
            g.set_lane_mask(to, np.where(per_lane, lanes_a(g), lanes_b(g)))
        elif to == EXEC or _is_mask(g, first if scc else second):
            g.set_lane_mask(to, lanes_a(g) if scc else lanes_b(g))
        else:
            g.set_s64(to, a(g) if scc else b(g))

    return _chooses(implicit(_bound(site, run, reads_scc=True), reads=second.ids), first.ids, second.ids)
