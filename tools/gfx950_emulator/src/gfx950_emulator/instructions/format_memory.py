"""Buffer loads and stores with format conversion (MTBUF, and MUBUF's format instructions). `gfx950_emulator.buffer_formats` has the
conversions.

Definitions: chapter "Vector memory operations" of AMD's CDNA4 ISA document. ``tbuffer`` instructions name the format. ``buffer``
instructions take format and destination selects from the resource. The range check is for all elements of a lane together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.buffer_formats import BufferFormat, by_code, by_name
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.vector_memory import Shape, active, buffer_address, demand_stored, write_loaded
from gfx950_emulator.memory import Fault

_COMPONENTS = {"x": 1, "xy": 2, "xyz": 3, "xyzw": 4}
_IDENTITY = (4, 5, 6, 7)  # destination selects: R, G, B, A
_NAMES = [
    *(f"tbuffer_{{}}_format_{half}{name}" for half in ("", "d16_") for name in _COMPONENTS),
    *(f"buffer_{{}}_format_{half}{name}" for half in ("", "d16_") for name in _COMPONENTS),
    "buffer_{}_format_d16_hi_x",
]


def _format(site: Site, resource: int) -> Callable[[Group], tuple[BufferFormat, tuple[int, ...]]]:
    """Returns a function that gives the format, and the destination select of each component."""
    if site.mnemonic.startswith("tbuffer"):
        try:
            named = by_name(site.take("format"))
        except ValueError as error:
            raise site.unknown(str(error)) from None
        return lambda g: (named, _IDENTITY)

    def of_resource(g: Group) -> tuple[BufferFormat, tuple[int, ...]]:
        word = g.s32(resource + 3)
        if type(word) is not int:
            raise Fault("resource", "a buffer format that differs between waves is not implemented")
        return by_code(word >> 15 & 15, word >> 12 & 7), tuple(word >> 3 * i & 7 for i in range(4))

    return of_resource


def _narrow(values: np.ndarray, form: BufferFormat) -> np.ndarray:
    """Converts 32-bit results to 16 bits, uint32 [N]: floats to f16, integers to their lowest bits."""
    if form.integer:
        return values & np.uint32(0xFFFF)
    with np.errstate(all="ignore"):
        return values.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)


def _widen(values: np.ndarray, form: BufferFormat) -> np.ndarray:
    """Converts 16-bit data, uint32 [N] with zero upper halves, to the 32 bits that `BufferFormat.encode` takes."""
    if form.integer:
        return values
    return values.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


def _one(form: BufferFormat) -> int:
    return 1 if form.integer else 0x3F800000


def _data(mnemonic: str) -> tuple[int, bool, bool, int]:
    """Returns the number of components, whether they have 16 bits, whether in the upper half, and the number of registers."""
    count, d16 = _COMPONENTS[mnemonic.rsplit("_", 1)[1]], "_d16_" in mnemonic
    return count, d16, "_hi_" in mnemonic, -(-count // 2) if d16 else count


@binder(*(name.format("load") for name in _NAMES))
def _load(site: Site) -> Bound:
    data, vaddr, resource, soffset = site.operands
    count, d16, high, registers = _data(site.mnemonic)
    row, format_of = data.index, _format(site, resource.index)
    address = buffer_address(site, vaddr, resource, soffset)
    shape = Shape(2, high=high, keeps=True) if count == 1 and d16 else Shape(4 * registers)

    def run(g: Group) -> None:
        g.queue.issue_vector(g, bound)
        lanes = active(g)
        if lanes is not None and not len(lanes):
            return
        form, selects = format_of(g)
        at, room = address(g, lanes)
        inside = room >= form.size
        elements = np.zeros((len(at), form.size), np.uint8)
        if inside.any():
            g.machine.memory.check(at[inside], form.size, "load")
            elements[inside] = g.machine.memory.bytes[(at[inside] - g.machine.memory.base)[:, None] + np.arange(form.size)]
        if g.machine.counters is not None:
            g.machine.counters.global_access(bound, g, at, form.size, room, lanes)
        found = form.decode(elements)
        zero, one = np.zeros(len(at), np.uint32), np.full(len(at), _one(form), np.uint32)
        results = []
        for select in selects[:count]:
            if select >= 4:
                value = found[select - 4] if select - 4 < len(found) else zero
                results.append(np.where(inside, value, np.uint32(0)))
            else:
                results.append(one if select == 1 else zero)
        if d16:
            results = [_narrow(value, form) for value in results]
            if count > 1:
                results.append(zero)
                results = [low | upper << np.uint32(16) for low, upper in zip(results[:-1:2], results[1::2], strict=False)]
        write_loaded(g, row, results[0] if shape.size < 4 else np.stack(results), lanes, shape)

    writes, reads = tuple(range(row, row + registers)), site.ids([vaddr, resource, soffset])
    access = Access("global", "load", 4 * registers, "vmcnt")
    bound = Bound(run, writes, (*reads, *writes) if shape.keeps else reads, "vmem", demands=reads, memory=access)
    return bound


@binder(*(name.format("store") for name in _NAMES))
def _store(site: Site) -> Bound:
    data, vaddr, resource, soffset = site.operands
    count, d16, high, registers = _data(site.mnemonic)
    row, format_of = data.index, _format(site, resource.index)
    address = buffer_address(site, vaddr, resource, soffset)

    def run(g: Group) -> None:
        g.queue.issue_vector(g, bound)
        lanes = active(g)
        if lanes is not None and not len(lanes):
            return
        form, selects = format_of(g)
        if len(form.widths) > count or selects[: len(form.widths)] != _IDENTITY[: len(form.widths)]:
            raise Fault("resource", f"{site.mnemonic} to {len(form.widths)} elements, or with destination selects {selects}")
        at, room = address(g, lanes)
        demand_stored(g, row, lanes, room, Shape(4 * registers))
        given = g.registers[row : row + registers]
        given = given if lanes is None else given[:, lanes]
        if d16:
            halves = [given[i // 2] >> np.uint32(16 * (i % 2)) & np.uint32(0xFFFF) for i in range(high, count + high)]
            values = [_widen(half, form) for half in halves]
        else:
            values = list(given)
        inside = room >= form.size
        if g.machine.counters is not None:
            g.machine.counters.global_access(bound, g, at, form.size, room, lanes)
        g.machine.progress += 1
        if inside.any():
            g.machine.memory.check(at[inside], form.size, "store")
            stored = form.encode([value[inside] for value in values[: len(form.widths)]])
            g.machine.memory.bytes[(at[inside] - g.machine.memory.base)[:, None] + np.arange(form.size)] = stored

    reads = site.ids([vaddr, resource, soffset])
    access = Access("global", "store", 4 * registers, "vmcnt")
    bound = Bound(run, (), (*reads, *range(row, row + registers)), "vmem", demands=reads, memory=access)
    return bound
