"""Kernels in the form that the machine runs: parsed, with every instruction bound."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sm90_emulator import decode, decode_convert, decode_matrix, decode_memory  # noqa: F401  - they declare the binders
from sm90_emulator.assembly import Kernel, Statement, parse
from sm90_emulator.decoder import BINDERS, Decoder
from sm90_emulator.registers import Registers

# The layout of an operation; it must equal the structure in machine.h.
INSTRUCTION = np.dtype(
    [
        ("op", "<u2"), ("negated", "u1"), ("kind", "u1"), ("guard", "<i4"), ("wide", "<i4"), ("target", "<i4"), ("d", "<i4"),
        ("a", "<i4"), ("b", "<i4"), ("c", "<i4"), ("e", "<i4"), ("list", "<i4"), ("count", "<i4"), ("imm", "<i8"), ("more", "<i8"),
        ("imm_other", "<i8"),
    ],
    align=True,
)  # fmt: skip
# Instructions that the emulator ignores, because they are only hints.
_NOTHING = {
    "prefetch", "prefetchu", "discard", "applypriority", "pmevent", "brkpt",
}  # fmt: skip


@dataclass
class Program:
    """A kernel that the machine can run.

    Attributes:
        kernel: the parsed kernel.
        code: one `INSTRUCTION` for each operation of the machine.
        pool: operands of lists in braces.
        registers: the register allocation.
        constants: the bytes of all constants.
        origins: the PTX statement of each operation.
    """

    kernel: Kernel
    code: np.ndarray
    pool: np.ndarray
    registers: Registers
    constants: np.ndarray
    origins: list[Statement]


@lru_cache(maxsize=64)
def load(text: str, name: str) -> Program:
    """Parses and binds a kernel.

    Raises:
        UnknownInstruction: the emulator does not implement an instruction or modifier.
    """
    kernels = parse(text)
    if name not in kernels:
        raise KeyError(f"the module has {', '.join(kernels)}, and not {name}")
    kernel = kernels[name]
    decoder = Decoder(kernel, Registers(kernel))
    starts: list[int] = []
    for statement in kernel.statements:
        starts.append(len(decoder.rows))
        decoder.now = statement
        words = statement.name.split(".")
        if words[0] in _NOTHING:
            continue
        bind = BINDERS.get(words[0])
        if bind is None:
            raise decoder.unknown("unknown instruction")
        bind(decoder, statement, words)
    starts.append(len(decoder.rows))
    if decoder.rows:
        decoder.now = Statement("exit", (), None, kernel.statements[-1].scope, "the end of the kernel")
        decoder.emit("exit")
    code = np.zeros(len(decoder.rows), INSTRUCTION)
    for index, row in enumerate(decoder.rows):
        for key, value in row.items():
            if key != "label":
                code[index][key] = value
        if "label" in row:
            code[index]["target"] = starts[row["label"]]
    pool = np.array(decoder.pool or [0], np.int32)
    return Program(kernel, code, pool, decoder.registers, decoder.registers.constants, decoder.origins)
