"""Binds an instruction as written, with the binders that the instruction families registered."""

from __future__ import annotations

import gfx950_emulator.instructions  # noqa: F401  (registers the binders)
from gfx950_emulator.assembly import Assembly, Instruction
from gfx950_emulator.binding import BINDERS, Bound, Site


def decode(instruction: Instruction, assembly: Assembly) -> Bound:
    """Binds one instruction.

    Raises:
        UnknownInstruction: the architecture lacks the instruction, or mnemonic, operand or modifier is not implemented. The message
            names instruction, line and kernel.
    """
    site = Site(instruction, assembly)
    if site.architecture.lacks.fullmatch(site.mnemonic):
        raise site.unknown(f"{site.architecture.name} has no instruction {instruction.mnemonic}")
    function = BINDERS.get("v_mfma" if site.mnemonic.startswith("v_mfma") else site.mnemonic)
    if function is None:
        raise site.unknown(f"instruction {instruction.mnemonic} is not implemented")
    bound = function(site)
    site.done()
    return bound
