"""Parses a compiled kernel's assembly text: instructions, labels, kernel descriptor, arguments, source lines.

The grammar is that of LLVM's AMDGPU assembler (llvm.org/docs/AMDGPUUsage.html and AMDGPUOperandSyntax.html), limited to what LLVM
prints. This module executes nothing, and knows no instruction by name. `gfx950_emulator.decode` gives instructions their meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

from gfx950_emulator.architecture import ARCHITECTURES, GFX950, Architecture
from gfx950_emulator.constants import MASK32, code_address


@dataclass(frozen=True)
class Instruction:
    """One instruction as written.

    Attributes:
        index: the instruction's index among the kernel's instructions. Branch targets are such indices.
        mnemonic: ``"v_add_u32_e32"``.
        operands: as written, without modifiers: ``("v0", "v[2:3]", "-v4", "0x10")``.
        modifiers: ``offset:16`` is ``{"offset": 16}``, ``op_sel:[0,1]`` is ``{"op_sel": (0, 1)}``, a bare word maps to True,
            anything else to its text.
        line: line in the assembly text, from 1.
        text: the instruction as written, without comment.
        source: ``(file, line)`` of the kernel's source, from the debug information; None without it.
        location: the source in readable form, with the calls through which it was inlined: ``"a.py:3:4 @[ b.py:5:6 ]"``.
    """

    index: int
    mnemonic: str
    operands: tuple[str, ...]
    modifiers: dict[str, Any]
    line: int
    text: str
    source: tuple[str, int] | None = None
    location: str = ""

    def __hash__(self) -> int:
        return hash((self.index, self.text))

    @property
    def where(self) -> str:
        """A suffix for error messages: ``, at attend.py:12 (assembly line 345): v_add_u32_e32 v0, v1, v2``."""
        return (f", at {self.location}" if self.location else "") + f" (assembly line {self.line}): {self.text}"


@dataclass(frozen=True)
class Argument:
    """One argument in the kernel's argument segment. ``kind`` is LLVM's ``.value_kind``; offset and size are in bytes."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Assembly:
    """The assembly of a compiled kernel; comments describe the fields."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # index of the instruction after each label
    descriptor: dict[str, int]  # .amdhsa_* directives without the prefix
    arguments: tuple[Argument, ...]
    metadata: dict[str, int] = field(default_factory=dict)  # integers of .amdgpu_metadata: vgpr_spill_count and so on
    entry: int = 0
    text: str = ""
    architecture: Architecture = GFX950

    @cached_property
    def vgprs(self) -> int:
        """Number of vector registers that the code may use, from v0, without accumulation registers."""
        accumulation = self.descriptor.get("accum_offset", 0)
        total = self.descriptor.get("next_free_vgpr", 0)
        return min(total, accumulation) if self.agprs else total

    @cached_property
    def agprs(self) -> int:
        """Number of accumulation registers that the code may use, from a0."""
        accumulation = self.descriptor.get("accum_offset", 0)
        return max(0, self.descriptor.get("next_free_vgpr", 0) - accumulation) if accumulation else 0


_LABEL = re.compile(r'^"?([.$\w]+)"?:')
_FILE = re.compile(r'^\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"')
_LOC = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+(\d+)[^;]*(?:;\s*(.*\S))?")
_DIRECTIVE = re.compile(r"^\.amdhsa_(\w+)\s+(\S+)")
_MNEMONIC = re.compile(r"^(?:v|s|ds|t?buffer|global|flat|scratch)_\w+$")
_TARGET = re.compile(r'^\.amdgcn_target\s+"[^"]*-(\w+)(?::[^"]*)?"')  # the last part of the target triple
_KERNEL = re.compile(r"^\.amdhsa_kernel\s+(\S+)")


def parse(text: str) -> Assembly:
    """Parses the assembly text of one kernel.

    Raises:
        ValueError: the text has no kernel, or more than one, or is for an architecture that the emulator does not know. A text
            without a target is for gfx950.
    """
    architecture = GFX950
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    descriptor: dict[str, int] = {}
    symbols: dict[str, int] = {}
    files: dict[int, str] = {}
    source: tuple[str, int] | None = None
    location = ""
    names: list[str] = []
    metadata_lines: list[str] | None = None
    arguments: tuple[Argument, ...] = ()
    metadata: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if metadata_lines is not None:
            if line == ".end_amdgpu_metadata":
                arguments, metadata = _parse_metadata(metadata_lines)
                metadata_lines = None
            else:
                metadata_lines.append(raw)
            continue
        if not line or line.startswith((";", "//")):
            continue
        if line.startswith("."):
            if line.startswith(".loc") and (match := _LOC.match(line)):
                file, at, _, comment = match.groups()
                if int(at):
                    source = (files.get(int(file), "?"), int(at))
                    location = comment or f"{PurePath(source[0]).name}:{at}"
                continue
            if match := _FILE.match(line):
                files[int(match[1])] = str(PurePath(match[2] or "") / match[3])
                continue
            if match := _TARGET.match(line):
                if match[1] not in ARCHITECTURES:
                    raise ValueError(f"the assembly text is for {match[1]}; the emulator knows {', '.join(ARCHITECTURES)}")
                architecture = ARCHITECTURES[match[1]]
                continue
            if match := _KERNEL.match(line):
                names.append(match[1])
                continue
            if match := _DIRECTIVE.match(line):
                descriptor[match[1]] = _evaluate(match[2], symbols)
                continue
            if line.startswith(".set"):
                name, _, value = line[4:].partition(",")
                if re.fullmatch(r"\s*-?\w+\s*", value) and value.strip().lstrip("-").isdigit():
                    symbols[name.strip()] = int(value)
                continue
            if line == ".amdgpu_metadata":
                metadata_lines = []
                continue
        if match := _LABEL.match(line):
            labels[match[1]] = len(instructions)
            line = line[match.end() :].strip()
        instruction = _instruction(line, number, len(instructions), source, location)
        if instruction is not None:
            instructions.append(instruction)
    if len(names) != 1:
        raise ValueError(f"expected the assembly text of one kernel, found {len(names)}: {names}")
    name = names[0]
    resolved, entry = tuple(_resolve(instructions, labels)), labels.get(name, 0)
    return Assembly(name, resolved, labels, descriptor, arguments, metadata, entry, text, architecture)


_RELATIVE = re.compile(r"^(.+)@rel32@(lo|hi)\+\d+$")


def _resolve(instructions: list[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """Replaces symbolic distances to functions by numbers, relative to the result of the last s_getpc_b64."""
    after = 0  # index of the instruction after s_getpc_b64
    resolved = []
    for instruction in instructions:
        if instruction.mnemonic == "s_getpc_b64":
            after = instruction.index + 1
        matches = [_RELATIVE.match(operand) for operand in instruction.operands]
        if any(matches):
            operands = list(instruction.operands)
            for i, match in enumerate(matches):
                if match and match[1].strip('"') in labels:
                    distance = code_address(labels[match[1].strip('"')]) - code_address(after)
                    operands[i] = hex(distance & MASK32 if match[2] == "lo" else distance >> 32 & MASK32)
            instruction = replace(instruction, operands=tuple(operands))
        resolved.append(instruction)
    return resolved


def _evaluate(text: str, symbols: dict[str, int]) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return symbols.get(text, 0)


def _instruction(line: str, number: int, index: int, source: tuple[str, int] | None, location: str) -> Instruction | None:
    body = re.split(r";|//", line, maxsplit=1)[0].strip()
    mnemonic, _, rest = body.replace("\t", " ").partition(" ")
    if not _MNEMONIC.match(mnemonic):
        return None
    operands: list[str] = []
    modifiers: dict[str, object] = {}
    for field_ in _split(rest, ","):
        words = _split(field_, " ")
        if not words:
            continue
        operands.append(words[0])
        for word in words[1:]:
            key, colon, value = word.partition(":")
            modifiers[key] = _modifier(value) if colon else True
    return Instruction(index, mnemonic, tuple(operands), modifiers, number, body.replace("\t", " "), source, location)


def _split(text: str, separator: str) -> list[str]:
    """Splits a text at separators outside brackets, and drops empty parts."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == separator and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    parts.append(current.strip())
    return [part for part in parts if part]


def _modifier(value: str) -> object:
    if value.startswith("["):
        return tuple(map(_number_or_name, value.strip("[]").split(",")))
    return _number_or_name(value)


def _number_or_name(value: str) -> int | str:
    try:
        return int(value, 0)
    except ValueError:
        return value


def _parse_metadata(lines: list[str]) -> tuple[tuple[Argument, ...], dict[str, int]]:
    """Returns the kernel's arguments and its integer properties, from the YAML that LLVM writes (one key per line)."""
    arguments: list[Argument] = []
    properties: dict[str, int] = {}
    current: dict[str, str] = {}
    inside = False

    def close() -> None:
        if ".offset" in current:
            arguments.append(Argument(int(current[".offset"]), int(current[".size"]), current[".value_kind"]))
        current.clear()

    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text.removeprefix("- ") == ".args:":
            inside, arguments_indent = True, indent + len(text) - len(text.removeprefix("- "))
            continue
        if inside and (indent > arguments_indent or (indent == arguments_indent and text.startswith("- "))):
            # An argument begins with a dash, at the indentation of .args or deeper.
            if text.startswith("- "):
                close()
                text = text[2:]
            key, _, value = text.partition(":")
            current[key.strip()] = value.strip()
            continue
        if inside:
            close()
            inside = False
        key, _, value = text.removeprefix("- ").strip().partition(":")
        if key.startswith(".") and value.strip().lstrip("-").isdigit():
            properties[key[1:]] = int(value)
    close()
    return tuple(arguments), properties
