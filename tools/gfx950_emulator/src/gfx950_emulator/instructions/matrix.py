"""MFMA instructions. `gfx950_emulator.mfma` and `gfx950_emulator.smfmac` have the arithmetic and the element layouts."""

from __future__ import annotations

import numpy as np

from gfx950_emulator import mfma, smfmac
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.group import Group
from gfx950_emulator.vector import U32, getter


@binder("v_mfma")  # stands for all MFMAs, see decode
def _bind(site: Site) -> Bound:
    """D = A x B + C for every wave. The hardware ignores EXEC: inactive lanes take part, and their registers are written."""
    try:
        operation = mfma.bind_mfma(site.instruction.mnemonic, dict(site.modifiers), site.architecture)
    except ValueError as error:
        raise site.unknown(str(error)) from None
    site.modifiers.clear()
    destination, a, b, c, *scales = site.operands
    for operand, count in ((destination, operation.c_registers), (a, operation.a_registers), (b, operation.b_registers)):
        if operand.count != count:
            raise site.unknown(f"{operand.text} has {operand.count} registers, {site.mnemonic} takes {count} here")
    # C may be an inline constant. An integer is the bits of every element, a float is the value of every element.
    constant = c.literal if c.file == "literal" else None
    scale_of = [getter(site, scale, U32) for scale in scales]
    d0, d1, a0, a1, b0, b1, c0, c1 = (x for o in (destination, a, b, c) for x in (o.index, o.index + o.count))

    def run(g: Group) -> None:
        registers = g.registers
        addend = registers[c0:c1] if constant is None else constant
        if scale_of:
            spread = [np.ascontiguousarray(np.broadcast_to(get(g), (g.lanes,))) for get in scale_of]
            registers[d0:d1] = operation.compute(registers[a0:a1], registers[b0:b1], addend, *spread)
        else:
            registers[d0:d1] = operation.compute(registers[a0:a1], registers[b0:b1], addend)

    return Bound(run, site.ids([destination]), site.ids([a, b, c, *scales]), "mfma", extra={"mfma": operation})


@binder(*smfmac.MNEMONICS)
def _bind_sparse(site: Site) -> Bound:
    """D += A x B for every wave, with A's elements at the positions that the last operand holds. EXEC is ignored here too."""
    try:
        operation = smfmac.bind_smfmac(site.mnemonic, dict(site.modifiers), site.architecture)
    except ValueError as error:
        raise site.unknown(str(error)) from None
    site.modifiers.clear()
    destination, a, b, positions = site.operands
    counts = operation.c_registers, operation.a_registers, operation.b_registers, 1
    for operand, count in zip(site.operands, counts, strict=True):
        if operand.count != count:
            raise site.unknown(f"{operand.text} has {operand.count} registers, {site.mnemonic} takes {count} here")
    d0, d1, a0, a1, b0, b1 = (x for o in (destination, a, b) for x in (o.index, o.index + o.count))
    at = positions.index

    def run(g: Group) -> None:
        registers = g.registers
        registers[d0:d1] = operation.compute(registers[a0:a1], registers[b0:b1], registers[d0:d1], registers[at])

    return Bound(run, site.ids([destination]), site.ids([a, b, destination, positions]), "mfma", extra={"mfma": operation})
