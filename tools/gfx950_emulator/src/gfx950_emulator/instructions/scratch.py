"""Scratch memory: private memory per lane, for spilled registers and for arrays.

Spills use addresses that are equal in all lanes: a scalar register, an immediate. Arrays use a vector register as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.group import Group
from gfx950_emulator.instructions import private_memory
from gfx950_emulator.instructions.scalar_values import read32
from gfx950_emulator.instructions.vector_memory import LOADS, STORES, Shape, active, per_lane, write_loaded
from gfx950_emulator.memory import Fault
from gfx950_emulator.operands import Operand


def _place(site: Site, vaddr: Operand, saddr: Operand, size: int) -> Callable[[Group], int]:
    """Returns a function that computes the offset of the access in each lane's scratch memory. The function raises `Fault` if the
    ``size`` bytes are out of bounds."""
    immediate = int(site.take("offset", 0))
    base = read32(saddr) if saddr.file != "off" else lambda g: 0
    allocated = site.assembly.descriptor.get("private_segment_fixed_size", 0)

    def compute(g: Group) -> int:
        start = base(g)
        if type(start) is not int:
            raise site.unknown("a scratch address that differs between waves is not implemented")
        at = start + immediate
        if at < 0 or (allocated and at + size > allocated):
            raise Fault("out-of-bounds", f"scratch access of {size} bytes at {at:#x}; a lane has {allocated} bytes")
        return at

    return compute


def _places(site: Site, vaddr: Operand, saddr: Operand) -> Callable[[Group, np.ndarray], np.ndarray]:
    """Returns a function that computes the offsets of an access by a vector register, int64 [N], in the scratch memory of the
    given lanes: the register, plus a scalar register, plus an immediate, modulo 2**32."""
    immediate = int(site.take("offset", 0))
    base = read32(saddr) if saddr.file != "off" else lambda g: 0

    def compute(g: Group, lanes: np.ndarray) -> np.ndarray:
        at = g.U[vaddr.index][lanes].astype(np.int64) + per_lane(g, base(g), lanes) + immediate
        return at & 0xFFFFFFFF

    return compute


def _dwords(at: int, size: int) -> int:
    """Returns the number of dwords that the bytes [at, at + size) touch."""
    return (at % 4 + size + 3) // 4


def _bytes(words: np.ndarray) -> np.ndarray:
    """Views dwords of lanes, uint32 [count, N], as bytes of each lane, uint8 [N, 4 count]."""
    return np.ascontiguousarray(words.T).view(np.uint8)


@binder(*(f"scratch_load_{name}" for name in LOADS))
def _load(site: Site) -> Bound:
    shape = LOADS[site.mnemonic.split("_load_")[1]]
    data, vaddr, saddr = site.operands
    if vaddr.file != "off":
        return _load_by_lane(site, shape, data, vaddr, saddr)
    row, place = data.index, _place(site, vaddr, saddr, shape.size)

    def run(g: Group) -> None:
        g.queue.issue_vector(g, bound)
        at, lanes = place(g), active(g)
        columns = g.columns() if lanes is None else g.columns()[lanes]
        words = g.machine.scratch_rows(at, _dwords(at, shape.size))[:, columns]
        if g.shadow is not None:
            g.shadow.reload(g, at // 4, row, shape.dwords)
        if at % 4 or shape.size < 4:
            padded = np.zeros((len(columns), 4 * shape.dwords), np.uint8)
            padded[:, : shape.size] = _bytes(words)[:, at % 4 : at % 4 + shape.size]
            words = padded.view(np.uint32).T
        write_loaded(g, row, words[0] if shape.size < 4 else words, lanes, shape)

    writes, reads = tuple(range(row, row + shape.dwords)), site.ids([vaddr, saddr])
    access = Access("scratch", "load", shape.size, "vmcnt")
    bound = Bound(run, writes, (*reads, *writes) if shape.keeps else reads, "vmem", demands=reads, memory=access)
    return bound


@binder(*(f"scratch_store_{name}" for name in STORES))
def _store(site: Site) -> Bound:
    shape = STORES[site.mnemonic.split("_store_")[1]]
    vaddr, data, saddr = site.operands
    if vaddr.file != "off":
        return _store_by_lane(site, shape, data, vaddr, saddr)
    row, place = data.index, _place(site, vaddr, saddr, shape.size)

    def run(g: Group) -> None:
        g.queue.issue_vector(g, bound)
        at, lanes = place(g), active(g)
        columns = g.columns() if lanes is None else g.columns()[lanes]
        rows = g.machine.scratch_rows(at, _dwords(at, shape.size))
        values = g.registers[row : row + shape.dwords]
        if lanes is not None:
            values = values[:, lanes]
        if shape.high:
            values = values >> np.uint32(16)
        if g.shadow is not None:
            g.shadow.spill(g, at // 4, row, shape.dwords, lanes)
        if at % 4 or shape.size < 4:
            merged = _bytes(rows[:, columns])
            merged[:, at % 4 : at % 4 + shape.size] = _bytes(values)[:, : shape.size]
            values = merged.view(np.uint32).T
        rows[:, columns] = values

    addressing = site.ids([vaddr, saddr])
    access = Access("scratch", "store", shape.size, "vmcnt")
    bound = Bound(run, (), (*data.ids, *addressing), "vmem", demands=addressing, memory=access)
    return bound


def _load_by_lane(site: Site, shape: Shape, data: Operand, vaddr: Operand, saddr: Operand) -> Bound:
    return _by_lane(site, shape, data, vaddr, saddr, private_memory.load_registers)


def _store_by_lane(site: Site, shape: Shape, data: Operand, vaddr: Operand, saddr: Operand) -> Bound:
    return _by_lane(site, shape, data, vaddr, saddr, private_memory.store_registers)


def _by_lane(site: Site, shape: Shape, data: Operand, vaddr: Operand, saddr: Operand, move: Callable[..., None]) -> Bound:
    """Binds an access whose lanes have different offsets. ``move``: `load_registers` or `store_registers`."""
    row, places = data.index, _places(site, vaddr, saddr)
    allocated = site.assembly.descriptor.get("private_segment_fixed_size", 0)

    def run(g: Group) -> None:
        g.queue.issue_vector(g, bound)
        lanes = np.flatnonzero(g.mask)
        if len(lanes):
            move(g, places(g, lanes), lanes, shape, row, allocated)

    loads = move is private_memory.load_registers
    registers, addressing = tuple(range(row, row + shape.dwords)), site.ids([vaddr, saddr])
    reads = (*addressing, *registers) if shape.keeps or not loads else addressing
    access = Access("scratch", "load" if loads else "store", shape.size, "vmcnt")
    bound = Bound(run, registers if loads else (), reads, "vmem", demands=addressing, memory=access)
    return bound
