"""Binds tensor-core instructions, and the loads and stores of their fragments."""

from __future__ import annotations

import re

from sm90_emulator.assembly import Statement
from sm90_emulator.decoder import Decoder, binder, elements

# The codes of element types and accumulator types; they must equal those in matrices.h.
_KINDS = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "s8": 5, "u8": 6}
_SUMS = {"f32": 0, "f16": 1, "s32": 2}
_ELEMENT_BYTES = (2, 2, 4, 1, 1, 1, 1)
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)")
_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.(\w+)\.(\w+)\.(\w+)\.(\w+)")


@binder("wgmma")
def _warpgroup(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    if words[1] == "fence":
        decoder.emit("wgmma_fence")
    elif words[1] == "commit_group":
        decoder.emit("wgmma_commit")
    elif words[1] == "wait_group":
        decoder.emit("wgmma_wait", imm=int(statement.operands[0], 0))
    else:
        _product(decoder, statement)


def _product(decoder: Decoder, statement: Statement) -> None:
    shape = _WGMMA.fullmatch(statement.name)
    if shape is None or shape[3] not in _SUMS or shape[4] not in _KINDS or shape[5] not in _KINDS:
        raise decoder.unknown()
    columns, depth = int(shape[1]), int(shape[2])
    sums, left, right = _SUMS[shape[3]], _KINDS[shape[4]], _KINDS[shape[5]]
    if depth * _ELEMENT_BYTES[left] != 32:
        raise decoder.unknown("depth")
    results, first, second, adds, *numbers = statement.operands
    places = [decoder.write(target) for target in elements(results)]
    if len(places) != columns // 8 * (2 if sums == 1 else 4):
        raise decoder.unknown(f"{len(places)} sums")
    in_registers = first.startswith("{")
    fields: dict[str, int] = {"b": decoder.read(second, "b64"), "c": decoder.predicate(adds)[0]}
    if adds.startswith("!"):
        raise decoder.unknown()
    if in_registers:
        places += [decoder.read(source, "b32") for source in elements(first)]
    else:
        fields["a"] = decoder.read(first, "b64")
    signs = [int(number, 0) for number in numbers] or [1, 1]
    across = signs[2:]
    if len(across) == 1:  # A is in registers
        across = [0, *across]
    a_across, b_across = across or (0, 0)
    more = columns | left << 9 | right << 13 | sums << 17 | in_registers << 20 | a_across << 21 | b_across << 22
    more |= (signs[0] == -1) << 23 | (signs[1] == -1) << 24
    decoder.emit("wgmma", more=more, **fields, **decoder.listed(places))


@binder("mma")
def _warp(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    shape = _MMA.fullmatch(statement.name)
    if shape is None or shape[2] not in _SUMS or shape[3] not in _KINDS or shape[4] not in _KINDS or shape[2] != shape[5]:
        raise decoder.unknown()
    kind = {"f32": "f32", "f16": "b32", "s32": "s32"}[shape[2]]
    results = [decoder.write(target) for target in elements(statement.operands[0])]
    left, right = ([decoder.read(source, "b32") for source in elements(operand)] for operand in statement.operands[1:3])
    before = [decoder.read(source, kind) for source in elements(statement.operands[3])]
    if int(shape[1]) * _ELEMENT_BYTES[_KINDS[shape[3]]] != 16 * len(right) or len(left) != 2 * len(right):
        raise decoder.unknown("fragments")
    listed = decoder.listed([*results, *left, *right, *before])
    listed["count"] = len(left) | len(right) << 8 | len(results) << 16
    decoder.emit("mma", more=8 | _KINDS[shape[3]] << 9 | _KINDS[shape[4]] << 13 | _SUMS[shape[2]] << 17, **listed)


@binder("ldmatrix")
def _load(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    _check_shape(decoder, words)
    places = [decoder.write(target) for target in elements(statement.operands[0])]
    decoder.emit("ldmatrix", kind=int("trans" in words), **decoder.listed(places), **decoder.address(statement.operands[1]))


@binder("stmatrix")
def _store(decoder: Decoder, statement: Statement, words: list[str]) -> None:
    _check_shape(decoder, words)
    places = [decoder.read(source, "b32") for source in elements(statement.operands[1])]
    decoder.emit("stmatrix", kind=int("trans" in words), **decoder.listed(places), **decoder.address(statement.operands[0]))


def _check_shape(decoder: Decoder, words: list[str]) -> None:
    if "m8n8" not in words or words[-1] != "b16":
        raise decoder.unknown()
