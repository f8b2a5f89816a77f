"""Direct loads from global memory to LDS: ``buffer_load ... lds`` and ``global_load_lds``.

A lane's data goes to ``M0 + inst_offset + lane * size`` in LDS (CDNA3 and CDNA4 ISA documents, "memory buffer load to LDS").
The write to LDS is deferred until the ``s_waitcnt`` that covers the load (`gfx950_emulator.outstanding`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.constants import M0, WAVE
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.vector_memory import TO_LDS, Shape, buffer_address, extend, fetch, global_address, per_lane
from gfx950_emulator.local_memory import LocalMemory
from gfx950_emulator.memory import Fault
from gfx950_emulator.operands import SCALAR_BASE
from gfx950_emulator.outstanding import Deferred

_SHAPES = {
    "ubyte": Shape(1), "sbyte": Shape(1, signed=True), "ushort": Shape(2), "sshort": Shape(2, signed=True),
    "dword": Shape(4), "dwordx3": Shape(12), "dwordx4": Shape(16),
}  # fmt: skip


def _buffer_to_lds(site: Site) -> Bound:
    """Binds ``buffer_load_dword v1, s[4:7], 0 offen lds``, which has no data register."""
    return _bind(site, _SHAPES[site.mnemonic.removeprefix("buffer_load_")], buffer_address(site, *site.operands))


TO_LDS.update(dict.fromkeys((f"buffer_load_{name}" for name in _SHAPES), _buffer_to_lds))


@binder(*(f"global_load_lds_{name}" for name in _SHAPES))
def _global_to_lds(site: Site) -> Bound:
    shape = _SHAPES[site.mnemonic.removeprefix("global_load_lds_")]
    return _bind(site, shape, global_address(site, *site.operands))


def _bind(site: Site, shape: Shape, address: Callable) -> Bound:
    immediate = int(site.instruction.modifiers.get("offset", 0))  # added to the global address and to the LDS address
    if shape.size > site.architecture.widest_direct_load:
        raise site.unknown(f"{site.architecture.name} has no direct loads to LDS of {shape.size} bytes a lane")
    limit = site.architecture.device.lds_bytes
    step = max(4, shape.size)  # a byte or a short occupies a dword of LDS

    def run(g: Group) -> None:
        machine, local = g.machine, g.machine.local
        columns = np.arange(g.lanes) if g.full else np.flatnonzero(g.mask)
        first = per_lane(g, g.s32(M0), columns) + immediate
        offsets = first + columns % WAVE * step
        inside = offsets + step <= local.size
        if not inside.all():
            if local.shadow is not None:
                _check_switched_off(local, limit, np.broadcast_to(first, len(columns))[~inside], step)
            columns, offsets = columns[inside], offsets[inside]
        if not len(columns):
            g.queue.issue_vector(g, bound)
            return
        at, room = address(g, columns if len(columns) < g.lanes else None)
        values = fetch(g, at, room, shape)
        if machine.counters is not None:
            machine.counters.global_access(bound, g, at, shape.size, room, columns)
            machine.counters.local_access(bound, g, offsets, step, columns)
        if shape.size < 4:
            values = extend(values, shape)[None]
        entry = Deferred(bound, columns, local.bases(g)[columns] + offsets, values)
        g.queue.issue_vector(g, entry)
        if local.shadow is not None:
            local.shadow.depart(g, entry)

    reads = (*site.ids(site.operands), SCALAR_BASE + M0)
    bound = Bound(run, (), reads, "vmem", demands=reads, memory=Access("dma", "load", shape.size, "vmcnt"))
    return bound


def _check_switched_off(local: LocalMemory, limit: int, first: np.ndarray, size: int) -> None:
    """Reports writes beyond the LDS allocation, which hardware drops. An M0 beyond any LDS size is not reported, because compilers
    use it to disable a wave's loads.
    """
    meant = first >= limit
    if not meant.all():
        at = int(first[~meant][0])
        raise Fault(
            "out-of-bounds", f"direct load to LDS of {size} bytes a lane from {at:#x} on; the workgroup has {local.size} bytes"
        )
