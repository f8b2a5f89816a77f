"""Conversions between number formats. `gfx950_emulator.formats` has the arithmetic, and facts on rounding, overflow and scales.

Definitions: V_CVT_* in chapters VOP1 and VOP3 of AMD's CDNA4 ISA document. MODE.FP16_OVFL is read when an instruction runs, because
kernels set it. If op_sel places a result in a part of a register, the rest of the register is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gfx950_emulator import formats
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.formats import BF6, BF8, BF16, FP4, FP6, FP8, Format
from gfx950_emulator.group import Group
from gfx950_emulator.operands import Operand
from gfx950_emulator.vector import F16, F32, F64, I16, I32, U16, U32, getter, group_write, per_lane, vector_op

Array = Any
Reader = Callable[[Group], Any]


def _to_integer(low: int, high: int, dtype: type) -> Callable[[Array], Array]:
    """Returns a conversion to an integer type, which rounds towards zero. Out-of-range values saturate; NaN becomes 0."""

    def convert(a: Array) -> Array:
        a = a.astype(np.float64)
        return np.where(np.isnan(a), 0, np.clip(np.trunc(a), low, high)).astype(dtype)

    return convert


def _convert(dtype: type) -> Callable[[Array], Array]:
    return lambda a: a.astype(dtype)


_to_i32, _to_u32 = _to_integer(-(2**31), 2**31 - 1, np.int32), _to_integer(0, 2**32 - 1, np.uint32)
for _name, _type in (("i32", I32), ("u32", U32)):
    vector_op(f"v_cvt_f32_{_name}", _convert(np.float32), F32, _type)
    vector_op(f"v_cvt_f64_{_name}", _convert(np.float64), F64, _type)
for _name, _type in (("f32", F32), ("f64", F64)):
    vector_op(f"v_cvt_i32_{_name}", _to_i32, I32, _type)
    vector_op(f"v_cvt_u32_{_name}", _to_u32, U32, _type)
vector_op("v_cvt_f64_f32", _convert(np.float64), F64, F32)
vector_op("v_cvt_f32_f64", _convert(np.float32), F32, F64)
vector_op("v_cvt_f32_f16", lambda a: formats.f16_to_f32(np.atleast_1d(a).view(np.uint16)), F32, F16)
vector_op("v_cvt_f16_f32", lambda a: formats.f32_to_f16(np.atleast_1d(a)).view(np.float16), F16, F32, overflows=True)
vector_op("v_cvt_f32_bf16", formats.bf16_to_f32, F32, U16)
vector_op("v_cvt_f16_i16", _convert(np.float16), F16, I16)
vector_op("v_cvt_f16_u16", _convert(np.float16), F16, U16, overflows=True)
vector_op("v_cvt_i16_f16", _to_integer(-32768, 32767, np.int16), I16, F16)
vector_op("v_cvt_u16_f16", _to_integer(0, 65535, np.uint16), U16, F16)
vector_op("v_cvt_rpi_i32_f32", lambda a: _to_i32(np.floor(a.astype(np.float64) + 0.5)), I32, F32)
vector_op("v_cvt_flr_i32_f32", lambda a: _to_i32(np.floor(a)), I32, F32)
for _i in range(4):
    vector_op(f"v_cvt_f32_ubyte{_i}", lambda a, _i=_i: ((a >> np.uint32(8 * _i)) & np.uint32(0xFF)).astype(np.float32), F32, U32)


def _pack(low: Array, high: Array) -> Array:
    """Packs two 16-bit values into one register."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def _pack_toward_zero(a: Array, b: Array) -> Array:
    return _pack(*(formats.f32_to_f16(np.atleast_1d(x), toward_zero=True) for x in (a, b)))


def _saturate_bytes(a: Array) -> Array:
    """Saturates the two int16 of a register to two unsigned bytes, packed in 16 bits."""
    low, high = (np.clip(x.astype(np.uint16).view(np.int16), 0, 255).astype(np.uint16) for x in (a, a >> np.uint32(16)))
    return low | high << np.uint16(8)


vector_op("v_cvt_pkrtz_f16_f32", _pack_toward_zero, U32, F32, F32)
vector_op("v_pack_b32_f16", lambda a, b: _pack(a.view(np.uint16), b.view(np.uint16)), U32, F16, F16)
vector_op("v_sat_pk_u8_i16", _saturate_bytes, U16, U32, keeps_high=True)


@binder("v_cvt_pk_bf16_f32", "v_cvt_pk_f16_f32")
def _pack16(site: Site) -> Bound:
    destination, first, second = site.operands
    a, b, row = getter(site, first, F32), getter(site, second, F32), destination.index
    brain = site.mnemonic == "v_cvt_pk_bf16_f32"

    def run(g: Group) -> None:
        low, high, saturate = per_lane(g, a(g)), per_lane(g, b(g)), g.saturate
        if brain:
            group_write(g, row, formats.pack_bf16(low, high, saturate))
        else:
            group_write(g, row, _pack(formats.f32_to_f16(low, saturate), formats.f32_to_f16(high, saturate)))

    # If a kernel uses only the lower half of the result, compilers write a scalar as second source. This scalar may be undefined,
    # so it does not count as read.
    return Bound(run, site.ids([destination]), site.ids([first] if second.file == "s" else [first, second]))


# fp8, bf8, fp6, bf6, fp4, with and without scales: reading the sources, converting them, and placing the results.

_NARROW = {"fp8": FP8, "bf8": BF8, "fp6": FP6, "bf6": BF6, "fp4": FP4}  # the formats of instructions with scales
_WIDE = ("f32", "f16", "bf16")


def _op_sel(site: Site) -> tuple[int, int, int, int]:
    """Reads op_sel, padded with zeros. Bits 0 and 1 belong to sources; the destination's bit follows the last source's bit."""
    given = tuple(site.take("op_sel", ()))
    return (*given, *(0,) * (4 - len(given)))


def _half(site: Site, op_sel: tuple[int, ...]) -> tuple[int, int]:
    """Returns the half of the destination register that is written: its first bit and its width."""
    return 16 * op_sel[len(site.operands) - 1], 16


def _byte(op_sel: tuple[int, ...]) -> tuple[int, int]:
    return 8 * (op_sel[2] + 2 * op_sel[3]), 8


def _write_part(g: Group, row: int, bits: Array, part: tuple[int, int]) -> None:
    """Writes bits [first, first + width) of a register, and keeps all other bits."""
    first, width = part
    field = np.uint32((1 << width) - 1 << first)
    group_write(g, row, (g.U[row] & ~field) | bits.astype(np.uint32) << np.uint32(first))


def _numbers(site: Site, operand: Operand, wide: str, single: bool) -> Callable[[Group], list[Array]]:
    """Returns a function that reads an operand's values as float32: one value, the two values of a packed register, or the values
    of consecutive registers.
    """
    if operand.count <= 1 and wide == "f32":
        get = getter(site, operand, F32)
        return lambda g: [per_lane(g, get(g))]
    if wide == "f32":
        return lambda g: g.F[operand.index : operand.index + operand.count]
    widen = formats.bf16_to_f32 if wide == "bf16" else formats.f16_to_f32
    if operand.count <= 1:
        halves = [getter(site, operand, U16, high=high) for high in ((0,) if single else (0, 1))]
        return lambda g: [widen(per_lane(g, get(g))) for get in halves]
    rows = slice(operand.index, operand.index + operand.count)
    return lambda g: [widen((row >> np.uint32(by)).astype(np.uint16)) for row in g.U[rows] for by in (0, 16)]


def _exponent(site: Site, operand: Operand) -> Reader:
    """Returns a function that reads the scale byte from a float32 operand."""
    get = getter(site, operand, F32)
    return lambda g: formats.scale_exponent(get(g).view(np.uint32))


# Conversions to narrow formats


def _nearest(form: Format, numbers: list[Array], exponent: Any, saturate: bool) -> list[Array]:
    if exponent is None:
        return [formats.encode(form, x, saturate) for x in numbers]
    return [formats.encode_scaled(form, x, exponent, saturate) for x in numbers]


def _stochastic(random: Array, form: Format, numbers: list[Array], exponent: Any, saturate: bool) -> list[Array]:
    """Rounds stochastically; every value after the first uses the next random number."""
    codes = []
    for i, x in enumerate(numbers):
        random = formats.next_random(random) if i else random
        codes.append(formats.encode_stochastic(form, x, random, 127 if exponent is None else exponent, saturate))
    return codes


def _narrow(site: Site, form: Format, read: Reader, random: Reader | None, exponent: Reader | None) -> Bound:
    """Converts one, two or 32 values to a narrow format, and writes them to a byte or half of a register, or to six registers."""
    destination = site.operands[0]
    row = destination.index
    op_sel = _op_sel(site)

    def codes_of(g: Group) -> list[Array]:
        scale = None if exponent is None else exponent(g)
        encode = _nearest if random is None else partial(_stochastic, per_lane(g, random(g)))
        return encode(form, read(g), scale, g.saturate)

    if destination.count == 6:

        def run_packed(g: Group) -> None:
            for i, word in enumerate(formats.pack6(np.stack(codes_of(g)))):
                group_write(g, row + i, word)

        return Bound(run_packed, site.ids([destination]), site.ids(site.operands[1:]))
    pairs_of_bytes = form.bits == 8 and random is None
    part = _half(site, op_sel) if pairs_of_bytes or form.bits == 16 else _byte(op_sel)

    def run(g: Group) -> None:
        first, *second = codes_of(g)
        bits = first.astype(np.uint32)
        if second:
            bits = bits | second[0].astype(np.uint32) << np.uint32(form.bits)
        _write_part(g, row, bits, part)

    return Bound(run, site.ids([destination]), site.ids(site.operands[1:]))


@binder("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
def _pack8(site: Site) -> Bound:
    """Converts two float32 to two 8-bit values in one half of the destination."""
    _, first, second = site.operands
    a, b = (_numbers(site, operand, "f32", True) for operand in (first, second))
    return _narrow(site, site.architecture.formats[site.mnemonic.split("_")[3]], lambda g: [*a(g), *b(g)], None, None)


@binder("v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32", "v_cvt_sr_f16_f32", "v_cvt_sr_bf16_f32")
def _round_stochastically(site: Site) -> Bound:
    """Rounds one float32 stochastically with the random bits of S1, to a byte or half of the destination."""
    form = {**site.architecture.formats, "f16": formats.F16, "bf16": BF16}[site.mnemonic.split("_")[3]]
    _, value, random = site.operands
    return _narrow(site, form, _numbers(site, value, "f32", True), getter(site, random, U32), None)


_PACKED_SOURCES = [f"v_cvt_scalef32_pk_{narrow}_{wide}" for narrow, wide in product(("fp8", "bf8", "fp4"), _WIDE)]
_PACKED_SOURCES += [f"v_cvt_scalef32_pk32_{narrow}_{wide}" for narrow, wide in product(("fp6", "bf6"), ("f16", "bf16"))]
_PACKED_SOURCES += [f"v_cvt_scalef32_2xpk16_{narrow}_f32" for narrow in ("fp6", "bf6")]


@binder(*_PACKED_SOURCES)
def _narrow_scaled(site: Site) -> Bound:
    """Converts values, divided by the scale in the last source, to a narrow format. If there are two float32 sources, their values
    alternate in the result.
    """
    narrow, wide = site.mnemonic.split("_")[4:]
    *sources, scale = site.operands[1:]
    reads = [_numbers(site, operand, wide, False) for operand in sources]

    def read(g: Group) -> list[Array]:
        numbers = [of(g) for of in reads]
        return [x for both in zip(*numbers, strict=True) for x in both] if len(numbers) == 2 else numbers[0]

    return _narrow(site, _NARROW[narrow], read, None, _exponent(site, scale))


_STOCHASTIC = [f"v_cvt_scalef32_sr_{narrow}_{wide}" for narrow, wide in product(("fp8", "bf8"), _WIDE)]
_STOCHASTIC += [f"v_cvt_scalef32_sr_pk_fp4_{wide}" for wide in _WIDE]
_STOCHASTIC += [f"v_cvt_scalef32_sr_pk32_{narrow}_{wide}" for narrow, wide in product(("fp6", "bf6"), _WIDE)]


@binder(*_STOCHASTIC)
def _narrow_stochastic(site: Site) -> Bound:
    """Converts as `_narrow_scaled` does, but rounds stochastically, with the random bits of S1."""
    narrow, wide = site.mnemonic.split("_")[-2:]
    _, value, random, scale = site.operands
    read = _numbers(site, value, wide, single="_pk" not in site.mnemonic)
    return _narrow(site, _NARROW[narrow], read, getter(site, random, U32), _exponent(site, scale))


# Conversions from narrow formats


def _store_wide(g: Group, row: int, numbers: list[Array], wide: str) -> None:
    """Stores values in consecutive registers, two 16-bit values per register."""
    if wide == "f32":
        for i, x in enumerate(numbers):
            group_write(g, row + i, x.view(np.uint32))
        return
    for i in range(0, len(numbers), 2):
        low, high = numbers[i : i + 2]
        packed = formats.pack_bf16(low, high) if wide == "bf16" else _pack(formats.f32_to_f16(low), formats.f32_to_f16(high))
        group_write(g, row + i // 2, packed)


@binder("v_cvt_f32_fp8", "v_cvt_f32_bf8", "v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
def _widen(site: Site) -> Bound:
    """Converts one byte, or the two bytes of one register half, to float32. SDWA selects the byte or the half."""
    if site.encoding.endswith("dpp"):
        raise site.unknown(f"DPP of {site.mnemonic} is not implemented")
    form = site.architecture.formats[site.mnemonic.split("_")[-1]]
    destination, source = site.operands
    pair = "_pk_" in site.mnemonic
    select = str(site.take("src0_sel", "DWORD"))
    if site.take("dst_sel", "DWORD") != "DWORD":
        raise site.unknown(f"dst_sel of {site.mnemonic} is not implemented")
    site.take("dst_unused")
    first = (16 if pair else 8) * (int(select[-1]) if select[-1].isdigit() else 0)
    get, row = getter(site, source, U32), destination.index
    shifts = [np.uint32(first), np.uint32(first + 8)] if pair else [np.uint32(first)]

    def run(g: Group) -> None:
        bits = per_lane(g, get(g))
        _store_wide(g, row, [formats.decode(form, (bits >> by) & np.uint32(0xFF)) for by in shifts], "f32")

    return Bound(run, site.ids([destination]), site.ids([source]))


_SCALED_PAIRS = [f"v_cvt_scalef32_pk_{wide}_{narrow}" for narrow, wide in product(("fp8", "bf8", "fp4"), _WIDE)]
_SCALED_32 = [f"v_cvt_scalef32_pk32_{wide}_{narrow}" for narrow, wide in product(("fp6", "bf6"), _WIDE)]
_SCALED_SINGLE = [f"v_cvt_scalef32_{wide}_{narrow}" for narrow, wide in product(("fp8", "bf8"), ("f32", "f16"))]


@binder(*_SCALED_PAIRS)
def _widen_pair(site: Site) -> Bound:
    """Converts two values to a wider format and multiplies them by the scale in S1. For fp8 and bf8, op_sel[0] selects the half of
    the source; for fp4, op_sel[1:0] selects the byte.
    """
    wide, narrow = site.mnemonic.split("_")[4:]
    form = _NARROW[narrow]
    destination, source, scale = site.operands
    op_sel, row, get, exponent = _op_sel(site), destination.index, getter(site, source, U32), _exponent(site, scale)
    first = 16 * op_sel[0] if form.bits == 8 else 8 * (op_sel[0] + 2 * op_sel[1])
    mask, shifts = np.uint32((1 << form.bits) - 1), (np.uint32(first), np.uint32(first + form.bits))

    def run(g: Group) -> None:
        bits, by = per_lane(g, get(g)), exponent(g)
        _store_wide(g, row, [formats.decode_scaled(form, (bits >> shift) & mask, by) for shift in shifts], wide)

    return Bound(run, site.ids([destination]), site.ids([source, scale]))


@binder(*_SCALED_32)
def _widen_32(site: Site) -> Bound:
    """Converts the 32 values of six registers to a wider format and multiplies them by the scale in S1."""
    wide, narrow = site.mnemonic.split("_")[4:]
    form = _NARROW[narrow]
    destination, source, scale = site.operands
    exponent = _exponent(site, scale)

    def run(g: Group) -> None:
        codes = formats.unpack6(np.stack(g.U[source.index : source.index + 6]))
        _store_wide(g, destination.index, list(formats.decode_scaled(form, codes, exponent(g))), wide)

    return Bound(run, site.ids([destination]), site.ids([source, scale]))


@binder(*_SCALED_SINGLE)
def _widen_single(site: Site) -> Bound:
    """Converts the byte that op_sel[1:0] selects to a wider format and multiplies it by the scale in S1. A float16 result goes to
    the half that op_sel selects.
    """
    wide, narrow = site.mnemonic.split("_")[3:]
    form = _NARROW[narrow]
    destination, source, scale = site.operands
    op_sel, row, get, exponent = _op_sel(site), destination.index, getter(site, source, U32), _exponent(site, scale)
    shift = np.uint32(8 * (op_sel[0] + 2 * op_sel[1]))
    part = _half(site, op_sel) if wide == "f16" else (0, 32)

    def run(g: Group) -> None:
        value = formats.decode_scaled(form, (per_lane(g, get(g)) >> shift) & np.uint32(0xFF), exponent(g))
        if wide == "f32":
            group_write(g, row, value.view(np.uint32))
        else:
            _write_part(g, row, formats.f32_to_f16(value), part)

    return Bound(run, site.ids([destination]), site.ids([source, scale]))
