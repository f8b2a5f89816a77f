"""Scalar loads: kernel arguments, and values that the compiler proves to be uniform in a wave.

Addresses follow the chapter on scalar memory of AMD's CDNA3 ISA document: their lowest two bits are ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.group import Group, agree
from gfx950_emulator.instructions.scalar_values import Value, read32, read64
from gfx950_emulator.memory import signed64
from gfx950_emulator.operands import Operand

_COUNTS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}
ADDRESS = (1 << 48) - 1  # bits of a buffer resource that hold the base address


def scalar_offset(site: Site, operand: Operand) -> Callable[[Group], Value]:
    """Returns a function that reads an offset: an unsigned scalar register or a signed 21-bit immediate, plus a further immediate
    (``s4 offset:0x10``).
    """
    immediate = int(site.take("offset", 0))
    if operand.file == "literal":
        constant = int(operand.literal) + immediate
        return lambda g: constant
    register = read32(operand)
    return lambda g: register(g) + immediate


def _bound(site: Site, load: Callable[[Group], None], count: int) -> Bound:
    """Makes the `Bound` of a scalar load, which ``load`` executes."""

    def run(g: Group) -> None:
        load(g)
        if g.shadow is not None:
            g.queue.issue_local(g, bound)

    reads = site.ids(site.operands[1:])
    access = Access("scalar", "load", 4 * count, "lgkmcnt")
    bound = Bound(run, tuple(site.operands[0].ids), reads, "smem", demands=reads, memory=access)
    return bound


def _destination(site: Site, count: int) -> int:
    destination = site.operands[0]
    if destination.file != "s" or destination.count != count:
        raise site.unknown(f"{site.mnemonic} writes {count} scalar registers, not {destination.text}")
    return destination.index


@binder(*(f"s_load_{size}" for size in _COUNTS))
def _load(site: Site) -> Bound:
    """D = memory[SBASE + SOFFSET + immediate]."""
    count = _COUNTS[site.mnemonic.removeprefix("s_load_")]
    to, base, offset = _destination(site, count), read64(site.operands[1]), scalar_offset(site, site.operands[2])

    def load(g: Group) -> None:
        at = signed64(base(g)) + offset(g)
        if type(at) is int:
            g.s[to : to + count] = g.machine.memory.read_scalars(signed64(at) & ~3, count)
            return
        values = g.machine.memory.load(at & ~3, count).astype(np.int64)
        for i in range(count):
            g.s[to + i] = agree(values[i])

    return _bound(site, load, count)


@binder(*(f"s_buffer_load_{size}" for size in _COUNTS))
def _buffer_load(site: Site) -> Bound:
    """Binds a scalar load through a buffer resource. Every dword beyond the buffer's range reads as zero."""
    count = _COUNTS[site.mnemonic.removeprefix("s_buffer_load_")]
    to, resource = _destination(site, count), site.operands[1]
    base, records, offset = read64(resource), resource.index + 2, scalar_offset(site, site.operands[2])

    def load(g: Group) -> None:
        start, limit, at = base(g) & ADDRESS, g.s32(records), offset(g)
        if type(start) is int and type(limit) is int and type(at) is int:
            first = start + at & ~3
            inside = max(0, min(count, (limit - at) // 4)) if at >= 0 else 0
            values = g.machine.memory.read_scalars(first, inside) if inside else []
            g.s[to : to + count] = values + [0] * (count - inside)
            return
        start, limit, at = (np.broadcast_to(np.asarray(x).astype(np.int64), g.waves) for x in (start, limit, at))
        for i in range(count):
            within = (at >= 0) & (at + 4 * i + 4 <= limit)
            value = np.zeros(g.waves, np.int64)
            if within.any():
                value[within] = g.machine.memory.load((start + at & ~3)[within] + 4 * i, 1)[0]
            g.s[to + i] = agree(value)

    return _bound(site, load, count)
