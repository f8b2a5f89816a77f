"""Scalar stores and atomics. A wave makes one access, which does not depend on its active lanes.

Definitions: chapter "Scalar memory operations" of AMD's CDNA4 ISA document. The lowest two bits of an address are ignored, also by
atomics of 32 bits. Atomics are applied in the order of the waves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.group import Group, agree
from gfx950_emulator.instructions.atomics import apply_in_order, check_aligned
from gfx950_emulator.instructions.scalar_memory import ADDRESS, scalar_offset
from gfx950_emulator.instructions.scalar_values import read64
from gfx950_emulator.instructions.vector_memory import ATOMICS
from gfx950_emulator.memory import signed64
from gfx950_emulator.operands import Operand

_STORES = {"dword": 1, "dwordx2": 2, "dwordx4": 4}
_INTEGER = {name: value for name, value in ATOMICS.items() if not name.startswith("pk_") and "_f" not in name}

# Each wave's address, int64 [W], and the bytes from it to the end of the buffer's range, int64 [W]; None without a buffer.
_Place = tuple[np.ndarray, np.ndarray | None]


def _place(site: Site, base: Operand, offset: Operand) -> Callable[[Group], _Place]:
    """Returns a function that computes the waves' addresses, from a pair of scalar registers or a buffer resource."""
    start, shift = read64(base), scalar_offset(site, offset)

    def compute(g: Group) -> _Place:
        at = np.broadcast_to(np.asarray(shift(g), np.int64), g.waves)
        first, room = start(g), None
        if base.count == 4:
            room = np.broadcast_to(np.asarray(g.s32(base.index + 2), np.int64), g.waves) - at
            first = first & ADDRESS
        return (np.broadcast_to(np.asarray(signed64(first), np.int64), g.waves) + at) & ~3, room

    return compute


def _words(g: Group, first: int, count: int) -> np.ndarray:
    """Returns scalar registers as uint32 [count, W]."""
    return np.stack([np.broadcast_to(np.asarray(g.s32(first + i), np.int64), g.waves) for i in range(count)]).astype(np.uint32)


@binder(*(f"s_{kind}store_{size}" for kind in ("", "buffer_") for size in _STORES))
def _store(site: Site) -> Bound:
    """memory[base + offset] = SDATA. Dwords beyond a buffer's range are dropped."""
    data, base, offset = site.operands
    count = _STORES[site.mnemonic.rsplit("_", 1)[1]]
    place = _place(site, base, offset)

    def run(g: Group) -> None:
        at, room = place(g)
        values, memory = _words(g, data.index, count), g.machine.memory
        g.machine.progress += 1
        for i in range(count):
            inside = np.ones(g.waves, bool) if room is None else room >= 4 * i + 4
            if inside.any():
                memory.store(at[inside] + 4 * i, values[i : i + 1, inside])
        if g.shadow is not None:
            g.queue.issue_local(g, bound)

    reads = (*data.ids, *site.ids([base, offset]))
    bound = Bound(run, (), reads, "smem", demands=reads, memory=Access("scalar", "store", 4 * count, "lgkmcnt"))
    return bound


@binder(*(f"s_{kind}atomic_{name}" for kind in ("", "buffer_") for name in _INTEGER))
def _atomic(site: Site) -> Bound:
    """Binds an atomic. SDATA holds the operand, and for cmpswap the compared value in the registers behind it. With glc, the old
    value replaces the operand."""
    name, bits = _INTEGER[site.mnemonic.split("atomic_")[1]]
    returns = bool(site.take("glc", False))
    data, base, offset = site.operands
    words, row, place = bits // 32, data.index, _place(site, base, offset)
    dtype = np.dtype(f"u{bits // 8}")

    def operand_of(g: Group, first: int) -> np.ndarray:
        return np.ascontiguousarray(_words(g, first, words).T).view(dtype)[:, 0]

    def run(g: Group) -> None:
        at, room = place(g)
        inside = None if room is None else room >= bits // 8
        reached, memory = at if inside is None else at[inside], g.machine.memory
        if len(reached):
            check_aligned(reached, bits // 8)
            memory.check(reached, bits // 8, "atomic")
        compare = operand_of(g, row + words) if name == "cmpswap" else None
        before, changed = apply_in_order(memory.bytes, at - memory.base, inside, name, operand_of(g, row), compare)
        g.machine.progress += changed
        if returns:
            found = before.view(np.uint32).reshape(g.waves, words).astype(np.int64)
            for i in range(words):
                g.set_s32(row + i, agree(found[:, i]))
        if g.shadow is not None:
            g.queue.issue_local(g, bound)

    reads = (*data.ids, *site.ids([base, offset]))
    writes = tuple(data.ids)[:words] if returns else ()
    bound = Bound(run, writes, reads, "smem", demands=reads, memory=Access("scalar", "atomic", bits // 8, "lgkmcnt"))
    return bound
