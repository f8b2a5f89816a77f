"""Binds comparisons and conversions, for all types.

Comparisons and conversions are families of instructions: comparisons of any type, and conversions between any two types with one of
several roundings. Frequent conversions have their own operation. Other conversions go through float64, which represents all types
exactly except 64-bit integers.
"""

from __future__ import annotations

import re

from sm90_emulator.assembly import Statement, bits_of
from sm90_emulator.build import operations
from sm90_emulator.decoder import Decoder, binder
from sm90_emulator.registers import room_of

_INTEGERS = re.compile(r"[sub](8|16|32|64)")
_COMBINED = {"and": 1, "or": 2, "xor": 3}
# Comparisons of unsigned integers, and the comparisons of which they are aliases.
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
# The codes of rounding modes; they must equal those in numbers.h.
_ROUNDINGS = {"rn": 0, "rni": 0, "rz": 1, "rzi": 1, "rm": 2, "rmi": 2, "rp": 3, "rpi": 3, "rna": 4}
_TO_ODD, _SPECIAL = 5, 8
_TRUE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}


# -- comparisons -------------------------------------------------------------------------------------------------------------------


@binder("setp")
def _set_predicate(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    targets = [decoder.write(name.strip()) for name in statement.operands[0].split("|")]
    comparison, combined, kind = _comparison(decoder, words[1:-1]), _combined(decoder, statement, words), words[-1]
    (x, *more_x), (y, *more_y) = _halves(decoder, statement, kind, words)
    if more_x:  # packed operands: one predicate per packed element
        for target, a, b in zip(targets, (x, *more_x), (y, *more_y), strict=True):
            decoder.emit(_compares(comparison, kind), d=target, a=a, b=b, **combined)
        return
    if len(targets) > 1:
        combined["target"] = targets[1]
    decoder.emit(_compares(comparison, kind), d=targets[0], a=x, b=y, **combined)


@binder("set")
def _set(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    """Binds `set`, which writes the result of a comparison as a value: 1.0 for a float, all bits set for an integer."""
    *modifiers, to, kind = words[1:]
    comparison, combined = _comparison(decoder, modifiers), _combined(decoder, statement, words)
    number = to.removesuffix("x2")
    xs, ys = _halves(decoder, statement, kind, words)
    true = decoder.registers.constant(_TRUE.get(number, 0xFFFF if len(xs) > 1 else 0xFFFFFFFF), room_of("b32"))
    results = []
    for x, y in zip(xs, ys, strict=True):
        held, result = decoder.registers.temporary("pred"), decoder.registers.temporary("b32")
        decoder.emit(_compares(comparison, kind), d=held, a=x, b=y, **combined)
        decoder.emit("selp_32", d=result, a=true, b=decoder.registers.constant(0, room_of("b32")), c=held)
        results.append(result)
    if len(results) > 1:
        decoder.emit("pack_32", d=decoder.write(statement.operands[0]), a=results[0], b=results[1])
    else:
        _put(decoder, statement.operands[0], results[0], number)


def _comparison(decoder: Decoder, words: list[str]) -> str:
    """Returns the comparison operator, which is the first modifier."""
    comparison, *modifiers = words
    if set(modifiers) - {"ftz", *_COMBINED}:
        raise decoder.unknown(f"modifier {', '.join(modifiers)}")
    return comparison


def _combined(decoder: Decoder, statement: Statement, words: list[str]) -> dict[str, int]:
    """Returns the operation's fields for the predicate with which the comparison's result is combined."""
    how = next((_COMBINED[word] for word in words if word in _COMBINED), 0)
    if not how:
        return {}
    place, negated = decoder.predicate(statement.operands[3])
    return {"kind": how, "c": place, "more": negated}


def _halves(decoder: Decoder, statement: Statement, kind: str, words: list[str]) -> tuple[list[int], list[int]]:
    """Returns the registers of the compared values; a register of a packed type holds two values, which are unpacked first."""
    places = [decoder.read(operand, kind) for operand in statement.operands[1:3]]
    if kind.endswith("x2"):
        return _unpacked(decoder, places[0]), _unpacked(decoder, places[1])
    if kind == "f32" and "ftz" in words:
        places = [_emitted(decoder, "ftz_f32", place, "f32") for place in places]
    return [places[0]], [places[1]]


def _unpacked(decoder: Decoder, place: int) -> list[int]:
    return [_emitted(decoder, name, place, "b16") for name in ("low_of_32", "high_of_32")]


def _compares(comparison: str, kind: str) -> str:
    """Returns the name of the machine's operation for a comparison."""
    kind = kind.removesuffix("x2")
    if not _INTEGERS.fullmatch(kind):
        return f"{comparison}_{kind}"
    comparison = _UNSIGNED.get(comparison, comparison)
    return f"{comparison}_{bits_of(kind)}" if comparison in ("eq", "ne") else f"{comparison}_{kind}"


# -- conversions -------------------------------------------------------------------------------------------------------------------


@binder("cvt")
def _convert(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    to, source = words[-2:]
    given = set(words[1:-2])
    target, *operands = statement.operands
    if given - {*_ROUNDINGS, "relu", "sat", "satfinite", "ftz"}:
        raise decoder.unknown(f"modifier {', '.join(sorted(given))}")
    if source.endswith("x2") or to in ("e4m3x2", "e5m2x2"):
        _convert_eight_bits(decoder, statement, to, source, given)
    elif _INTEGERS.fullmatch(to) and _INTEGERS.fullmatch(source):
        _put(decoder, target, *_resized(decoder, decoder.read(operands[0], source), to, source, given))
    elif not to.endswith("x2"):
        _put(decoder, target, _converted(decoder, decoder.read(operands[0], source), to, source, given), to)
    else:
        places = [decoder.read(operand, source) for operand in operands]
        if given == {"rn"}:
            decoder.emit(f"cvt_{to}_{source}", d=decoder.write(target), a=places[0], b=places[1])
            return
        high, low = (_converted(decoder, place, to.removesuffix("x2"), source, given) for place in places)
        decoder.emit("pack_32", d=decoder.write(target), a=low, b=high)


def _convert_eight_bits(decoder: Decoder, statement: Statement, to: str, source: str, given: set[str]) -> None:
    """Converts other floats to two 8-bit floats, which always saturate; or converts two 8-bit floats to other floats."""
    if given - {"rn", "satfinite", "relu"}:
        raise decoder.unknown()
    name = f"cvt_{'relu_' if 'relu' in given and source == 'f32' else ''}{to}_{source}"
    kind = {"e4m3x2": "b16", "e5m2x2": "b16"}.get(source, source)
    places = [decoder.read(operand, kind) for operand in statement.operands[1:]]
    target, zero = decoder.write(statement.operands[0]), decoder.registers.constant(0, room_of("b32"))
    if name.startswith("cvt_relu") or "relu" not in given:
        decoder.emit(name, d=target, **dict(zip("ab", places, strict=False)))
    elif source == "f16x2":
        positive = decoder.registers.temporary("b32")
        decoder.emit("max_nan_f16x2", d=positive, a=places[0], b=zero)
        decoder.emit(name, d=target, a=positive)
    else:
        decoder.emit(name, d=target, a=places[0])
        decoder.emit("max_nan_f16x2", d=target, a=target, b=zero)


def _emitted(decoder: Decoder, name: str, place: int, kind: str, **fields: int) -> int:
    """Emits an operation on one operand. Returns the new register that holds the result."""
    result = decoder.registers.temporary(kind)
    decoder.emit(name, d=result, a=place, **fields)
    return result


def _converted(decoder: Decoder, place: int, to: str, source: str, given: set[str]) -> int:
    """Emits the conversion of a value to another type; at least one of the types is a float. Returns the register of the result."""
    if given <= {"rn"} and f"cvt_{to}_{source}" in operations():
        return _emitted(decoder, f"cvt_{to}_{source}", place, to)
    if (to, source, given) == ("tf32", "f32", {"rna"}):
        return _emitted(decoder, "cvt_rna_tf32_f32", place, "b32")
    rounding = next((_ROUNDINGS[word] for word in given if word in _ROUNDINGS), 0)
    wide = place
    if "ftz" in given and source == "f32":
        wide = _emitted(decoder, "ftz_f32", wide, "f32")
    if source in ("s64", "u64"):  # float64 may not represent the integer, so the integer is converted directly, with one rounding
        wide = _emitted(decoder, f"cvt_f64_{source}", wide, "f64", more=rounding if to == "f64" else _TO_ODD)
    elif source != "f64":
        wide = _emitted(decoder, f"cvt_f64_{source}", wide, "f64")
    if _INTEGERS.fullmatch(to):
        special = _SPECIAL if source == "f64" or bits_of(to) == 64 else 0
        return _emitted(decoder, f"narrow_{to}", wide, to, more=rounding | special)
    if not given.isdisjoint({"rni", "rzi", "rmi", "rpi"}):
        wide = _emitted(decoder, "whole_f64", wide, "f64", more=rounding)
    for word in ("sat", "relu"):
        if word in given:
            wide = _emitted(decoder, f"{word}_f64", wide, "f64")
    if to == "f64":
        return wide
    narrow = _emitted(decoder, f"narrow_{to}", wide, to, more=rounding | (_SPECIAL if "satfinite" in given else 0))
    return _emitted(decoder, "ftz_f32", narrow, "f32") if "ftz" in given and to == "f32" else narrow


def _resized(decoder: Decoder, place: int, to: str, source: str, given: set[str]) -> tuple[int, str]:
    """Emits the resizing of an integer. Returns its register, and the type that determines its extension: the narrower of the
    two.
    """
    if given == {"sat"}:
        wide = place if bits_of(source) == 64 else _emitted(decoder, f"widen_{source}_64", place, "b64")
        place = _emitted(decoder, f"sat_{source[0]}64", wide, "b64", more=bits_of(to) | (to[0] == "s") << 8)
        source = f"{source[0]}64"
    elif given:
        raise decoder.unknown()
    if bits_of(source) == 64 and bits_of(to) < 64:
        place = _emitted(decoder, "low_of_64", place, "b32")
    return place, to if bits_of(to) <= bits_of(source) else source


def _put(decoder: Decoder, operand: str, place: int, kind: str) -> None:
    """Emits the write of a value to a register; the value is extended if the register is wider."""
    target, room, bits = decoder.write(operand), bits_of(decoder.declared(operand)), bits_of(kind)
    if bits == room or (bits, room) == (64, 64):
        name = "low_of_32" if bits == 16 else f"mov_{bits}"
    else:
        name = f"widen_{'s' if kind[0] == 's' else 'u'}{bits}_{room}"
    decoder.emit(name, d=target, a=place)
