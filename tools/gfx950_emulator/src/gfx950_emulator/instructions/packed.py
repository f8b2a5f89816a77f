"""Packed instructions (VOP3P): two operations at once, on halves of registers or on pairs of registers.

For each source, op_sel selects the half that the lower result uses. op_sel_hi (default 1) selects the half that the upper result
uses. neg_lo negates the source of the lower result, and neg_hi the source of the upper result. (CDNA4 ISA document, section "Packed
Math" and chapter VOP3P.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.float_alu import fma16, fma32, maximum, maximum3_or_nan, minimum, minimum3_or_nan
from gfx950_emulator.operands import Operand
from gfx950_emulator.vector import F16, F32, I16, U16, U32, Form, Type, group_write, helper, saturating, source

Array = Any


def _modifiers(site: Site, count: int) -> tuple[tuple[int, ...], ...]:
    """Reads op_sel, op_sel_hi, neg_lo and neg_hi for ``count`` sources."""
    low = tuple(site.take("op_sel", (0,) * count))
    high = tuple(site.take("op_sel_hi", (1,) * count))
    return low, high, tuple(site.take("neg_lo", (0,) * count)), tuple(site.take("neg_hi", (0,) * count))


# Pairs of registers

_PAIRS: dict[str, tuple[Callable[..., Any], int]] = {
    "v_pk_add_f32": (np.add, 2),
    "v_pk_mul_f32": (np.multiply, 2),
    "v_pk_fma_f32": (fma32, 3),
}


_IN_PLACE = """low = {low}
if g.full:
    {high}
    g.F[d][...] = low
else:
    {high_masked}
    np.copyto(g.F[d], low, where=g.mask)"""


def _of_pair(site: Site, operand: Operand, second: int) -> Operand:
    """Returns one register of an operand that is a pair of registers. An inline constant is the lower register's value."""
    if operand.file == "literal":
        if second:
            raise site.unknown(f"op_sel of {site.mnemonic} asks for the upper half of the constant {operand.text}")
        return operand
    if operand.count != 2:
        raise site.unknown(f"{operand.text} is not a pair of registers")
    return replace(operand, index=operand.index + second, count=1)


@binder(*_PAIRS)
def _pairs(site: Site) -> Bound:
    function, count = _PAIRS[site.mnemonic]
    destination, *sources = site.operands
    op_sel, op_sel_hi, neg_lo, neg_hi = _modifiers(site, count)
    clamp = bool(site.take("clamp", False))
    form = Form(fn=function, d=destination.index, e=destination.index + 1)

    def call(select: tuple[int, ...], negate: tuple[int, ...], out: str = "") -> str:
        operands = [_of_pair(site, operand, select[i]) for i, operand in enumerate(sources)]
        modified = [replace(o, negate=bool(negate[i]) != o.negate) for i, o in enumerate(operands)]
        arguments = ", ".join(source(site, form, F32, operand) for operand in modified)
        text = f"fn({arguments}{out})"
        return f"clamp_result({text})" if clamp else text

    if isinstance(function, np.ufunc) and not clamp:
        high, high_masked = (call(op_sel_hi, neg_hi, out) for out in (", out=g.F[e]", ", out=g.F[e], where=g.mask"))
        body = _IN_PLACE.format(low=call(op_sel, neg_lo), high=high, high_masked=high_masked)
    else:
        body = f"write_floats(g, d, {call(op_sel, neg_lo)}, {call(op_sel_hi, neg_hi)})"
    return _bound(site, form.function(body), [zip(sources, select, strict=True) for select in (op_sel, op_sel_hi)])


def _bound(site: Site, run: Callable[[Group], Any], halves: list[Iterable[tuple[Operand, int]]]) -> Bound:
    """Makes the `Bound`, which reads only those registers of the source pairs that some half of the result uses."""
    destination = site.operands[0]
    parts = [site.ids(_of_pair(site, operand, second) for operand, second in half) for half in halves]
    reads = tuple(dict.fromkeys(register for part in parts for register in part))
    return Bound(run, site.ids([destination]), reads, extra={"parts": dict(zip(destination.ids, parts, strict=True))})


@helper
def write_floats(group: Group, row: int, low: Array, high: Array) -> None:
    if group.full:
        group.F[row][...], group.F[row + 1][...] = low, high
    else:
        np.copyto(group.F[row], low, where=group.mask)
        np.copyto(group.F[row + 1], high, where=group.mask)


@binder("v_pk_mov_b32")
def _move_pair(site: Site) -> Bound:
    """Binds v_pk_mov_b32: the lower register of the result is the selected register of S0, the upper register that of S1."""
    destination, first, second = site.operands
    op_sel, _, _, _ = _modifiers(site, 2)
    form = Form(d=destination.index)
    low, high = (source(site, form, U32, _of_pair(site, operand, op_sel[i])) for i, operand in enumerate((first, second)))
    return _bound(site, form.function(f"write_pair(g, d, {low}, {high})"), [[(first, op_sel[0])], [(second, op_sel[1])]])


@helper
def write_pair(group: Group, row: int, low: Array, high: Array) -> None:
    """Writes a pair of registers. ``high`` may be a view of the register to which ``low`` is written."""
    high = high.copy()
    np.copyto(group.U[row], low, where=group.mask)
    np.copyto(group.U[row + 1], high, where=group.mask)


# Halves of registers

_HALVES: dict[str, tuple[Callable[..., Any], Type, int]] = {
    "v_pk_add_f16": (np.add, F16, 2),
    "v_pk_mul_f16": (np.multiply, F16, 2),
    "v_pk_fma_f16": (fma16, F16, 3),
    "v_pk_fmac_f16": (fma16, F16, 3),
    "v_pk_min_f16": (minimum, F16, 2),
    "v_pk_max_f16": (maximum, F16, 2),
    "v_pk_minimum3_f16": (minimum3_or_nan, F16, 3),
    "v_pk_maximum3_f16": (maximum3_or_nan, F16, 3),
    "v_pk_add_u16": (np.add, U16, 2),
    "v_pk_sub_u16": (np.subtract, U16, 2),
    "v_pk_add_i16": (np.add, I16, 2),
    "v_pk_sub_i16": (np.subtract, I16, 2),
    "v_pk_mul_lo_u16": (np.multiply, U16, 2),
    "v_pk_mad_u16": (lambda a, b, c: a * b + c, U16, 3),
    "v_pk_mad_i16": (lambda a, b, c: a * b + c, I16, 3),
    "v_pk_min_u16": (np.minimum, U16, 2),
    "v_pk_max_u16": (np.maximum, U16, 2),
    "v_pk_min_i16": (np.minimum, I16, 2),
    "v_pk_max_i16": (np.maximum, I16, 2),
    "v_pk_lshlrev_b16": (lambda a, b: b << (a & np.uint16(15)), U16, 2),
    "v_pk_lshrrev_b16": (lambda a, b: b >> (a & np.uint16(15)), U16, 2),
    "v_pk_ashrrev_i16": (lambda a, b: b >> (a & np.int16(15)), I16, 2),
}
_SATURATING = ("v_pk_add_u16", "v_pk_sub_u16", "v_pk_add_i16", "v_pk_sub_i16", "v_pk_mad_u16", "v_pk_mad_i16")
_OVERFLOWING = ("v_pk_add_f16", "v_pk_mul_f16", "v_pk_fma_f16", "v_pk_fmac_f16")


def _half(site: Site, form: Form, type_: Type, operand: Operand, upper: int, negate: int) -> str:
    """Returns the source text of the expression for one half of a source operand."""
    if operand.file != "literal":
        return source(site, form, type_, replace(operand, negate=bool(negate) != operand.negate), high=upper)
    # An inline constant is in the lower half. The upper half has zeros, or the sign bits of an integer.
    if isinstance(operand.literal, float):
        bits = int(operand.bits(np.dtype(np.uint16)))
    else:
        bits = int(operand.bits(np.dtype(np.uint32)))
    value = np.uint16(bits >> 16 if upper else bits & 0xFFFF).view(type_.dtype)
    return form.add(-value if negate else value)


@binder(*_HALVES)
def _halves(site: Site) -> Bound:
    function, type_, count = _HALVES[site.mnemonic]
    destination, *sources = site.operands
    if site.mnemonic == "v_pk_fmac_f16":
        sources.append(Operand("v", destination.index, 1, text=destination.text))
    op_sel, op_sel_hi, neg_lo, neg_hi = _modifiers(site, count)
    clamp = bool(site.take("clamp", False))
    if clamp and not type_.floating:
        if site.mnemonic not in _SATURATING:
            raise site.unknown(f"clamp of {site.mnemonic} is not implemented")
        function = saturating(function, type_)
    form = Form(fn=function, d=destination.index)

    def call(select: tuple[int, ...], negate: tuple[int, ...]) -> str:
        arguments = ", ".join(_half(site, form, type_, operand, select[i], negate[i]) for i, operand in enumerate(sources))
        text = f"limited(g, fn, {arguments})" if site.mnemonic in _OVERFLOWING else f"fn({arguments})"
        return f"clamp_result({text})" if clamp and type_.floating else text

    body = f"write_halves(g, d, {call(op_sel, neg_lo)}, {call(op_sel_hi, neg_hi)})"
    return Bound(form.function(body), site.ids([destination]), site.ids(sources))


@helper
def write_halves(group: Group, row: int, low: Array, high: Array) -> None:
    upper = np.asarray(high).view(np.uint16).astype(np.uint32) << np.uint32(16)
    group_write(group, row, np.asarray(low).view(np.uint16) | upper)
