"""Flat instructions: one address space for global memory, LDS and scratch memory.

Definitions: chapter "Flat memory instructions" of AMD's CDNA4 ISA document. Each lane's address decides on its memory: addresses in
the shared aperture are LDS, those in the private aperture are the lane's scratch memory, and all others are global memory. The
document leaves the apertures to the driver; `gfx950_emulator.constants` has those of the emulator, which ``src_shared_base`` and
``src_private_base`` return. A flat instruction counts in vmcnt and in lgkmcnt, and has completed when both counters say so. Flat
instructions complete in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.constants import PRIVATE_APERTURE, SHARED_APERTURE
from gfx950_emulator.group import Group
from gfx950_emulator.instructions import private_memory
from gfx950_emulator.instructions.atomics import apply_in_order, check_aligned, operand_of, write_before
from gfx950_emulator.instructions.lds import read_lds, write_lds
from gfx950_emulator.instructions.vector_memory import ATOMICS, LOADS, STORES, demand_stored, fetch, write_loaded
from gfx950_emulator.memory import Fault
from gfx950_emulator.operands import Operand


@dataclass(frozen=True)
class _Segments:
    """The active lanes of a flat access, by the memory of their address: lane indices, int64 [N], and addresses or offsets."""

    everywhere: tuple[np.ndarray, np.ndarray]
    local: tuple[np.ndarray, np.ndarray]
    private: tuple[np.ndarray, np.ndarray]


def _segments(site: Site, vaddr: Operand) -> Callable[[Group], _Segments]:
    """Returns a function that computes the lanes' addresses, and divides the lanes by memory."""
    immediate = int(site.take("offset", 0))

    def compute(g: Group) -> _Segments:
        lanes = np.flatnonzero(g.mask)
        base = g.pair(vaddr.index)[lanes].view(np.int64)
        aperture, at = base >> 32, base + immediate
        shared, private = aperture == SHARED_APERTURE >> 32, aperture == PRIVATE_APERTURE >> 32
        rest = ~(shared | private)
        return _Segments(
            (lanes[rest], at[rest]),
            (lanes[shared], at[shared] - SHARED_APERTURE),
            (lanes[private], at[private] - PRIVATE_APERTURE),
        )

    return compute


def _issue(g: Group, bound: Bound) -> None:
    g.queue.issue_vector(g, bound)
    if g.shadow is not None:
        g.queue.issue_local(g, bound.extra["half"])


def _bound(run: Callable[[Group], None], direction: str, size: int, **more: tuple[int, ...]) -> Bound:
    """Makes the `Bound` of a flat instruction. ``half`` stands for the instruction in the queue of LDS operations."""
    writes = more.get("writes", ())
    half = Bound(lambda g: None, writes, (), "lds", memory=Access("flat", direction, size, "lgkmcnt"))
    memory = Access("flat", direction, size, "vmcnt")
    return Bound(run, writes, more.get("reads", ()), "vmem", demands=more.get("demands", ()), memory=memory, extra={"half": half})


@binder(*(f"flat_load_{name}" for name in LOADS))
def _load(site: Site) -> Bound:
    shape = LOADS[site.mnemonic.removeprefix("flat_load_")]
    data, vaddr = site.operands
    row, segments = data.index, _segments(site, vaddr)
    allocated = site.assembly.descriptor.get("private_segment_fixed_size", 0)

    def run(g: Group) -> None:
        _issue(g, bound)
        parts = segments(g)  # before a result overwrites the address
        machine, (lanes, at) = g.machine, parts.everywhere
        if len(lanes):
            if machine.counters is not None:
                machine.counters.global_access(bound, g, at, shape.size, None, lanes)
            write_loaded(g, row, fetch(g, at, None, shape), lanes, shape)
        lanes, at = parts.local
        if len(lanes):
            read_lds(g, bound, at, lanes, shape, row)
        lanes, at = parts.private
        if len(lanes):
            private_memory.load_registers(g, at, lanes, shape, row, allocated)

    writes = tuple(range(row, row + shape.dwords))
    reads = site.ids([vaddr])
    bound = _bound(run, "load", shape.size, writes=writes, reads=(*reads, *writes) if shape.keeps else reads, demands=reads)
    return bound


@binder(*(f"flat_store_{name}" for name in STORES))
def _store(site: Site) -> Bound:
    shape = STORES[site.mnemonic.removeprefix("flat_store_")]
    vaddr, data = site.operands
    row, segments = data.index, _segments(site, vaddr)
    allocated = site.assembly.descriptor.get("private_segment_fixed_size", 0)

    def values_of(g: Group, lanes: np.ndarray) -> np.ndarray:
        values = g.registers[row : row + shape.dwords][:, lanes]
        return values >> np.uint32(16) if shape.high else values

    def run(g: Group) -> None:
        _issue(g, bound)
        parts = segments(g)
        machine, (lanes, at) = g.machine, parts.everywhere
        if len(lanes):
            demand_stored(g, row, lanes, None, shape)
            machine.progress += 1
            if machine.counters is not None:
                machine.counters.global_access(bound, g, at, shape.size, None, lanes)
            if shape.size < 4:
                machine.memory.store_small(at, values_of(g, lanes)[0], shape.size)
            else:
                machine.memory.store(at, values_of(g, lanes))
        lanes, at = parts.local
        if len(lanes):
            write_lds(g, bound, at, lanes, shape, row)
        lanes, at = parts.private
        if len(lanes):
            private_memory.store_registers(g, at, lanes, shape, row, allocated)

    reads = site.ids([vaddr])
    bound = _bound(run, "store", shape.size, reads=(*reads, *range(row, row + shape.dwords)), demands=reads)
    return bound


@binder(*(f"flat_atomic_{name}" for name in ATOMICS if name not in ("min_f32", "max_f32")))
def _atomic(site: Site) -> Bound:
    """Binds an atomic of global memory and LDS. Compilers expand atomics of private memory, so these are an error."""
    name, bits = ATOMICS[site.mnemonic.removeprefix("flat_atomic_")]
    returns = bool(site.take("sc0", False) or site.take("glc", False))
    operands = list(site.operands)
    destination = operands.pop(0) if returns else None
    vaddr, data = operands
    words, row, segments = bits // 32, data.index, _segments(site, vaddr)

    def apply(g: Group, cells: np.ndarray, places: np.ndarray, lanes: np.ndarray, inside: np.ndarray | None) -> None:
        compare = operand_of(g, row + words, lanes, words) if name == "cmpswap" else None
        before, changed = apply_in_order(cells, places, inside, name, operand_of(g, row, lanes, words), compare)
        g.machine.progress += changed
        results.append((lanes, before))

    results: list[tuple[np.ndarray, np.ndarray]] = []

    def run(g: Group) -> None:
        _issue(g, bound)
        parts, machine = segments(g), g.machine
        results.clear()
        lanes, at = parts.everywhere
        if len(lanes):
            if machine.counters is not None:
                machine.counters.global_access(bound, g, at, bits // 8, None, lanes)
            check_aligned(at, bits // 8)
            machine.memory.check(at, bits // 8, "atomic")
            apply(g, machine.memory.bytes, at - machine.memory.base, lanes, None)
        lanes, at = parts.local
        if len(lanes):
            if machine.counters is not None:
                machine.counters.local_access(bound, g, at, bits // 8, lanes)
            addresses, inside = machine.local.place(g, at, lanes, bits // 8, "atomic")
            check_aligned(at, bits // 8)
            if machine.local.shadow is not None:
                machine.local.shadow.atomic(g, addresses, lanes, bits // 8)
            apply(g, machine.local.bytes, addresses, lanes, inside)
        if len(parts.private[0]):
            raise Fault("resource", f"{site.mnemonic} of scratch memory has no defined result")
        if destination is not None:  # after all operands were read
            for some, before in results:
                write_before(g, destination.index, some, before)

    reads = site.ids([vaddr, data])
    writes = tuple(range(destination.index, destination.index + words)) if destination is not None else ()
    bound = _bound(run, "atomic", bits // 8, writes=writes, reads=reads, demands=reads)
    return bound
