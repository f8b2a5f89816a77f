"""Checks Hopper machine code for faults of ptxas that tests of numerical results do not reliably find.

A cubin is a 64-bit ELF image; an instruction has 16 bytes.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator, Sequence

_OPERATION = 0x1FF
_WGMMAS = {0x1F0, 0x1F1, 0x1F2, 0x1F3}  # HGMMA, IGMMA, BGMMA, QGMMA; their left operand is in registers or in shared memory
_WARPGROUP, _WAITS = 0x1C5, 1 << 47  # WARPGROUP.ARRIVE; the bit _WAITS makes it WARPGROUP.DEPBAR.LE gsb0, n
_IN_PTX = re.compile(r"\bwgmma\.(mma_async|wait_group)\b")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?(\S+)\s*(.*?)\s*;", re.MULTILINE)
_UNIFORM = re.compile(r"UR(\d+)")
# Patterns for the output of nvdisasm --print-life-ranges: the header, which shows where the columns of the general registers start;
# and an instruction with its row of the table.
_COLUMNS = re.compile(r"//\s\|(\s*# )0")
_RANGES = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*//\s\|([^|]*)", re.MULTILINE)


def sections(image: bytes) -> Iterator[tuple[str, int, int]]:
    """Yields name, offset and size of each section of a 64-bit ELF image."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + entry * index) for index in range(count)]
    names = headers[names_at][4]
    for header in headers:
        begin = names + header[0]
        yield image[begin : image.index(b"\0", begin)].decode(), header[4], header[5]


def serialised(image: bytes, ptx: str) -> bool:
    """Whether ptxas serialised the wgmma instructions of a cubin that was compiled from this PTX. Serialised code waits for each
    wgmma before it starts the next, although the PTX allows several in flight. ptxas -v prints a note about this (C7510 to C7520,
    "Potential Performance Loss"), but compilers that call ptxas discard the note."""
    order = _IN_PTX.findall(ptx)
    if not any(pair == ("mma_async", "mma_async") for pair in itertools.pairwise(order)):
        return False
    code = [image[offset : offset + size] for name, offset, size in sections(image) if name.startswith(".text.")]
    kinds = [kind for part in code for kind in _wgmmas_and_waits(part)]
    return bool(kinds) and all(kinds[i + 1 : i + 2] == ["wait for all"] for i, kind in enumerate(kinds) if kind == "wgmma")


def _wgmmas_and_waits(code: bytes) -> Iterator[str]:
    for low, high in struct.iter_unpack("<QQ", code[: len(code) // 16 * 16]):
        if low & _OPERATION in _WGMMAS:
            yield "wgmma"
        elif low & _OPERATION == _WARPGROUP and low & _WAITS:
            yield "wait for all" if not high >> 8 & 0xFF else "wait for some"


def instructions(text: str) -> list[tuple[str, str]]:
    """Returns the name and the operands of each instruction in a disassembly."""
    return _INSTRUCTION.findall(text)


def unwritten_uniform_registers(instructions: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the sm_90 instructions (name, operands) that read a uniform register which no earlier instruction writes.

    ptxas of CUDA 12.8 sometimes generates such reads for shared-memory descriptors that are loop-invariant.

    >>> unwritten_uniform_registers([("UMOV", "UR4, 0x400"), ("UIADD3", "UR6, UP0, UR6, 0x20, URZ")])
    ['UIADD3 UR6, UP0, UR6, 0x20, URZ: UR6']
    """
    known: set[int] = set()
    found = []
    for name, text in instructions:
        operands = [operand.strip() for operand in text.split(",")]
        writes = name.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX"))
        target = next((i for i, operand in enumerate(operands[:2]) if writes and _UNIFORM.fullmatch(operand)), None)
        reads: set[int] = set()
        for i, operand in enumerate(operands):
            for match in _UNIFORM.finditer(operand):
                if i == target:
                    continue
                first, count = int(match[1]), 1
                if "gdesc[" in operand:
                    # Each of the two descriptors has two registers. A left operand in registers has no descriptor.
                    left = 2 if "gdesc[" not in operands[1] else 0
                    first, count = first + left, 4 - left
                elif f"desc[{match[0]}]" in operand or (".64" in name and name.startswith("U")):
                    count = 2
                reads.update(range(first, first + count))
        if reads - known:
            found.append(f"{name} {text}: {', '.join(f'UR{n}' for n in sorted(reads - known))}")
        known |= reads
        if target is not None:
            first = int(operands[target][2:])
            known.update(range(first, first + (2 if ".64" in name or ".WIDE" in name else 1)))
    return found


def unwritten_general_registers(text: str) -> list[str]:
    """Returns the instructions that read a general register which no earlier instruction writes.

    A first access that nvdisasm marks as both a read and a write is allowed. There are two kinds. An instruction that writes only a
    part of a register also reads the register, for example to combine two 16-bit values. The first MMA that writes an accumulator
    also reads this accumulator, but ignores its value.

    Args:
        text: nvdisasm's output with ``--print-life-ranges --life-range-mode narrow``.

    Raises:
        ValueError: the text has no life ranges.
    """
    found, known = [], set()
    header = _COLUMNS.search(text)
    if header is None:
        raise ValueError("the disassembly has no table of general registers")
    for instruction, table in _RANGES.findall(text):
        for register, mark in enumerate(table[len(header[1]) :]):
            if mark in "^xv" and register not in known:
                known.add(register)
                if mark == "v":
                    found.append(f"{instruction}: R{register}")
    return found
