"""64-bit scalar arithmetic: SOP1, SOP2 and SOPC on register pairs, and instructions that change EXEC.

Most values are lane masks, so logic works on one bool per lane if an operand is a lane mask.
Definitions: CDNA3 ISA document, chapters SOP2, SOP1 and SOPC, which CDNA4 shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gfx950_emulator.binding import Bound, Logic, Site, binder, implicit
from gfx950_emulator.constants import EXEC
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.scalar_values import (
    MASK64,
    any_lane,
    chooses,
    is_mask,
    lanes_of,
    leading_signs,
    leading_zeros,
    lowest_one,
    lowest_zero,
    per_wave,
    read32,
    read64,
    reverse,
    scalar_bound,
)  # fmt: skip
from gfx950_emulator.operands import SCALAR_BASE

_LOGIC64: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # name -> the operation on bools per lane, and on integers
    "and": (np.logical_and, lambda a, b: a & b),
    "or": (np.logical_or, lambda a, b: a | b),
    "xor": (np.logical_xor, lambda a, b: a ^ b),
    "andn2": (lambda a, b: a & ~b, lambda a, b: a & (b ^ MASK64)),
    "orn2": (lambda a, b: a | ~b, lambda a, b: a | (b ^ MASK64)),
    "nand": (lambda a, b: ~(a & b), lambda a, b: (a & b) ^ MASK64),
    "nor": (lambda a, b: ~(a | b), lambda a, b: (a | b) ^ MASK64),
    "xnor": (lambda a, b: ~(a ^ b), lambda a, b: a ^ b ^ MASK64),
}
# For each logical operation: the value of the first and of the second operand that alone decides the result
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
        if to == EXEC or is_mask(g, first) or is_mask(g, second):
            lanes = on_lanes(lanes_a(g), lanes_b(g))
            g.set_lane_mask(to, lanes)
            g.scc = any_lane(g, lanes)
        else:
            value = on_numbers(a(g), b(g))
            g.set_s64(to, value)
            g.scc = value != 0

    decisive: tuple[bool | None, bool | None] = _DECISIVE.get(site.mnemonic[2:-4], (None, None))
    logic = Logic(lanes_a, lanes_b, tuple(first.ids), tuple(second.ids), *decisive, tuple(destination.ids))
    return replace(scalar_bound(site, run, writes_scc=True), extra={"logic": logic})


@binder("s_wqm_b64")
def _whole_quads(site: Site) -> Bound:
    """Sets all four lanes of a quad if any of them is set."""
    destination, first = site.operands
    lanes, to = lanes_of(first), destination.index

    def run(g: Group) -> None:
        result = np.repeat(lanes(g).reshape(-1, 4).any(axis=1), 4)
        g.set_lane_mask(to, result)
        g.scc = any_lane(g, result)

    return scalar_bound(site, run, writes_scc=True)


@binder("s_mov_b64", "s_not_b64")
def _move64(site: Site) -> Bound:
    destination, first = site.operands
    a, lanes, to = read64(first), lanes_of(first), destination.index
    inverts = site.mnemonic == "s_not_b64"

    def run(g: Group) -> None:
        if to == EXEC or is_mask(g, first):
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

    return scalar_bound(site, run, writes_scc=inverts)


_ON_EXEC: dict[str, Callable[..., Any]] = {
    **{name: on_lanes for name, (on_lanes, _) in _LOGIC64.items()},
    "andn1": lambda a, b: ~a & b,
    "orn1": lambda a, b: ~a | b,
}


@binder(*(f"s_{name}_saveexec_b64" for name in _ON_EXEC), "s_andn1_wrexec_b64", "s_andn2_wrexec_b64")
def _change_exec(site: Site) -> Bound:
    """EXEC = S0 op EXEC; SCC = (EXEC is not zero); D = the previous EXEC (saveexec) or the new EXEC (wrexec).

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
    decisive: tuple[bool | None, bool | None] = _DECISIVE.get(name, (None, None))
    logic = Logic(lanes, lambda g: g.mask, tuple(first.ids), exec_ids, *decisive, result_ids, saved_ids)
    return replace(implicit(scalar_bound(site, run, writes_scc=True), exec_ids, exec_ids), extra={"logic": logic})


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

    return scalar_bound(site, run, writes_scc=True)


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

    bound = scalar_bound(site, run, writes_scc=True)
    control = site.operands[2]
    if control.file == "literal" and (int(control.literal) & 63) + (int(control.literal) >> 16 & 0x7F) <= 32:
        # The field lies in the lower half. Compilers may leave the upper half undefined.
        upper = site.operands[1].ids[1:]
        bound = replace(bound, reads=tuple(register for register in bound.reads if register not in upper))
    return bound


_COUNT64: dict[str, Callable[[int], int]] = {
    "s_bcnt1_i32_b64": lambda a: a.bit_count(),
    "s_bcnt0_i32_b64": lambda a: 64 - a.bit_count(),
    "s_ff0_i32_b64": lowest_zero(64),
    "s_ff1_i32_b64": lowest_one,
    "s_flbit_i32_b64": leading_zeros(64),
    "s_flbit_i32_i64": leading_signs(64),
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

    return scalar_bound(site, run, writes_scc=sets)


@binder("s_brev_b64")
def _reverse64(site: Site) -> Bound:
    to, a, function = site.operands[0].index, read64(site.operands[1]), per_wave(reverse(64))

    def run(g: Group) -> None:
        g.set_s64(to, function(a(g)))

    return scalar_bound(site, run)


@binder("s_bfm_b64")
def _mask64(site: Site) -> Bound:
    """D = S0 set bits, shifted left by S1; both amounts modulo 64."""
    to, a, b = site.operands[0].index, read32(site.operands[1]), read32(site.operands[2])
    function = per_wave(lambda width, offset: (((1 << (width & 63)) - 1) << (offset & 63)) & MASK64)

    def run(g: Group) -> None:
        g.set_s64(to, function(a(g), b(g)))

    return scalar_bound(site, run)


@binder("s_bitreplicate_b64_b32")
def _replicate(site: Site) -> Bound:
    """D = every bit of S0 repeated twice."""
    to, a = site.operands[0].index, read32(site.operands[1])
    function = per_wave(lambda value: sum(3 << 2 * i for i in range(32) if value >> i & 1))

    def run(g: Group) -> None:
        g.set_s64(to, function(a(g)))

    return scalar_bound(site, run)


@binder("s_cselect_b64", "s_cmov_b64")
def _cselect64(site: Site) -> Bound:
    """Binds s_cselect_b64, and s_cmov_b64, which keeps the destination if SCC is 0."""
    destination, first = site.operands[:2]
    second = site.operands[2] if site.mnemonic == "s_cselect_b64" else destination
    to, a, b, lanes_a, lanes_b = destination.index, read64(first), read64(second), lanes_of(first), lanes_of(second)

    def run(g: Group) -> None:
        scc = g.scc
        if isinstance(scc, np.ndarray):
            per_lane = np.repeat(scc, 64)
            g.set_lane_mask(to, np.where(per_lane, lanes_a(g), lanes_b(g)))
        elif to == EXEC or is_mask(g, first if scc else second):
            g.set_lane_mask(to, lanes_a(g) if scc else lanes_b(g))
        else:
            g.set_s64(to, a(g) if scc else b(g))

    return chooses(implicit(scalar_bound(site, run, reads_scc=True), reads=second.ids), first.ids, second.ids)
