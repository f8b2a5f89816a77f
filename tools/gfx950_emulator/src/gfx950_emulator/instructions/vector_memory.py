"""Vector memory: buffer and global instructions.

Addressing follows the chapter on vector memory of AMD's CDNA3 ISA document. A raw buffer's range check is per dword. An access is
out of range if ``inst_offset + voffset >= num_records - soffset``. Loads then return zero, and stores are dropped. A buffer with a
stride is accessed by an index (idxen), and an access is out of range if the index is at least num_records. Swizzled buffers are not
implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Binder, Bound, Site, binder
from gfx950_emulator.constants import WAVE
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.atomics import apply_in_order, check_aligned, operand_of, operations, write_before
from gfx950_emulator.instructions.scalar_values import read32, read64
from gfx950_emulator.memory import Fault, GlobalMemory, signed64
from gfx950_emulator.operands import Operand


@dataclass(frozen=True)
class Shape:
    """The data that a memory instruction transfers for each lane.

    Attributes:
        size: bytes per lane.
        signed: whether a loaded value narrower than a dword is sign-extended.
        high: whether the access uses the upper half of the data register.
        keeps: whether this is a d16 load, which keeps the other half of the register.
    """

    size: int
    signed: bool = False
    high: bool = False
    keeps: bool = False

    @property
    def dwords(self) -> int:
        return max(1, self.size // 4)


TO_LDS: dict[str, Binder] = {}
"""Mnemonic -> binder of a buffer load with the modifier ``lds``; the module `dma` fills this table."""

LOADS = {
    "ubyte": Shape(1), "sbyte": Shape(1, signed=True), "ushort": Shape(2), "sshort": Shape(2, signed=True),
    "dword": Shape(4), "dwordx2": Shape(8), "dwordx3": Shape(12), "dwordx4": Shape(16),
    "ubyte_d16": Shape(1, keeps=True), "ubyte_d16_hi": Shape(1, high=True, keeps=True),
    "sbyte_d16": Shape(1, signed=True, keeps=True), "sbyte_d16_hi": Shape(1, signed=True, high=True, keeps=True),
    "short_d16": Shape(2, keeps=True), "short_d16_hi": Shape(2, high=True, keeps=True),
}  # fmt: skip
STORES = {
    "byte": Shape(1), "byte_d16_hi": Shape(1, high=True), "short": Shape(2), "short_d16_hi": Shape(2, high=True),
    "dword": Shape(4), "dwordx2": Shape(8), "dwordx3": Shape(12), "dwordx4": Shape(16),
}  # fmt: skip


def extend(value: np.ndarray, shape: Shape) -> np.ndarray:
    """Extends loaded values narrower than a dword, zero-extended uint32 [N], to the 32 bits that are written to the register."""
    if not shape.signed:
        return value
    sign = np.uint32(1 << (8 * shape.size - 1))
    return (value ^ sign) - sign


def write_loaded(g: Group, row: int, values: np.ndarray, lanes: np.ndarray | None, shape: Shape) -> None:
    """Writes loaded data, uint32 [dwords, N], or [N] if narrower than a dword, to registers of the loading lanes (None: all
    lanes).
    """
    if shape.size < 4:
        values = extend(values, shape)
        if shape.keeps:
            values = _merge_half(_row(g, row, lanes), values, shape.high)
        values = values[None]
    rows = g.registers[row : row + len(values)]
    if lanes is None:
        rows[...] = values
    else:
        rows[:, lanes] = values


def _merge_half(old: np.ndarray, new: np.ndarray, high: bool) -> np.ndarray:
    """Returns ``old`` with one half replaced by the lower 16 bits of ``new``."""
    if high:
        return (old & np.uint32(0xFFFF)) | new << np.uint32(16)
    return (old & np.uint32(0xFFFF0000)) | (new & np.uint32(0xFFFF))


def active(g: Group) -> np.ndarray | None:
    """Returns the indices of the active lanes; None if all lanes are active."""
    return None if g.full else np.flatnonzero(g.mask)


def _row(g: Group, index: int, lanes: np.ndarray | None) -> np.ndarray:
    return g.U[index] if lanes is None else g.U[index][lanes]


def per_lane(g: Group, value: int | np.ndarray, lanes: np.ndarray | None) -> int | np.ndarray:
    """Returns a scalar operand's value for the given lanes (None: all lanes): one value, or one per lane."""
    if type(value) is int:
        return value
    spread = np.repeat(value, WAVE)
    return spread if lanes is None else spread[lanes]


_STRIDE, _EVERYTHING = 0x3FFF, 1 << 40  # bits of the stride; more bytes than any access has


def _signed(value: int | np.ndarray) -> int | np.ndarray:
    return value if type(value) is int else np.asarray(value).astype(np.int64)


def _is_set(value: int | np.ndarray, bits: int) -> bool:
    """Returns whether any of the bits ``bits`` is set in any wave's value."""
    return bool(value & bits) if type(value) is int else bool((value & bits).any())


def _check_negative(offset: np.ndarray, room: np.ndarray) -> None:
    """Reports negative offsets from the buffer's base, because the range check silently drops these accesses. An offset of exactly
    -2**31 is allowed, because compilers use it to disable lanes.
    """
    wrong = (offset > np.uint32(1 << 31)) & (room <= 0)
    if wrong.any():
        at = int(offset[wrong][0]) - (1 << 32)
        raise Fault("out-of-bounds", f"buffer access at offset {at}, before the buffer: it reads zero, or writes nothing")


def buffer_address(
    site: Site, vaddr: Operand, resource: Operand, soffset: Operand
) -> Callable[[Group, np.ndarray | None], tuple[np.ndarray, np.ndarray]]:
    """Returns a function that computes two int64 [N]: each lane's address, and the number of bytes from the address to the end of
    the buffer's range. This number may be negative.
    """
    idxen, offen, immediate = bool(site.take("idxen", False)), bool(site.take("offen", False)), int(site.take("offset", 0))
    base, records, flags = read64(resource), resource.index + 2, resource.index + 3
    scalar = read32(soffset)
    if vaddr.file != ("v" if idxen or offen else "off") or vaddr.count != (idxen + offen):
        raise site.unknown(f"{vaddr.text} does not hold the address of {'idxen ' * idxen}{'offen' * offen}")
    at_offset = vaddr.index + idxen

    def compute(g: Group, lanes: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        start, limit, shift, flag = base(g), g.s32(records), scalar(g), g.s32(flags)
        if _is_set(start, 0x8000 << 48):
            raise Fault("resource", "swizzled buffer resource is not implemented")
        if not idxen and _is_set(start, _STRIDE << 48):  # bit 62, cache swizzle, does not affect addresses
            raise Fault("resource", f"buffer resource with a stride ({start >> 48}), accessed without an index, is not implemented")
        if _is_set(flag, 1 << 23):  # ADD_TID_ENABLE
            raise Fault("resource", "buffer resource that adds the thread id is not implemented")
        stride = per_lane(g, _signed(start >> 48 & _STRIDE), lanes)
        start = signed64(start & (1 << 48) - 1)
        count = g.lanes if lanes is None else len(lanes)
        offset = _row(g, at_offset, lanes).astype(np.int64) if offen else np.zeros(count, np.int64)
        if immediate:
            offset += immediate
        shift = per_lane(g, shift, lanes)
        room = per_lane(g, limit, lanes) - shift - offset
        if g.shadow is not None and offen:
            _check_negative(_row(g, at_offset, lanes), room)
        address = offset + (per_lane(g, start, lanes) + shift)
        if idxen:
            index = _row(g, vaddr.index, lanes).astype(np.int64)
            address += index * stride
            room = np.where(np.asarray(stride) == 0, room, np.where(index < per_lane(g, limit, lanes), _EVERYTHING, 0))
        return address, room

    return compute


def global_address(site: Site, vaddr: Operand, saddr: Operand) -> Callable[[Group, np.ndarray | None], tuple[np.ndarray, None]]:
    """Returns a function that computes each lane's address, int64 [N]. The address is a 64-bit register pair, or a scalar base plus
    a 32-bit offset.
    """
    immediate = int(site.take("offset", 0))
    if saddr.file == "off":

        def flat(g: Group, lanes: np.ndarray | None) -> tuple[np.ndarray, None]:
            address = g.pair(vaddr.index).view(np.int64)
            if lanes is not None:
                address = address[lanes]
            return (address + immediate if immediate else address), None

        return flat
    base = read64(saddr)

    def relative(g: Group, lanes: np.ndarray | None) -> tuple[np.ndarray, None]:
        start = per_lane(g, signed64(base(g)), lanes)
        return _row(g, vaddr.index, lanes).astype(np.int64) + start + immediate, None

    return relative


def _parts(site: Site, data_first: bool) -> tuple[Operand, Callable, list[Operand]]:
    """Splits the operands into the data operand, the address function, and the address operands. Buffer instructions always name
    the data first.
    """
    is_buffer = site.mnemonic.startswith("buffer")
    addressing = list(site.operands)
    data = addressing.pop(0 if data_first or is_buffer else 1)
    address = buffer_address(site, *addressing) if is_buffer else global_address(site, *addressing)
    return data, address, addressing


@binder(*(f"{space}_load_{name}" for space in ("buffer", "global") for name in LOADS))
def _load(site: Site) -> Bound:
    shape = LOADS[site.mnemonic.split("_load_")[1]]
    if site.take("lds"):
        if site.mnemonic not in TO_LDS:
            raise site.unknown(f"{site.mnemonic} cannot load to LDS")
        return TO_LDS[site.mnemonic](site)
    begins_swap = _begins_swap(site)
    data, address, addressing = _parts(site, data_first=True)
    row, dwords = data.index, shape.dwords

    def run(g: Group) -> None:
        g.queue.issue_vector(g, bound)
        lanes = active(g)
        if lanes is not None and not len(lanes):
            return
        at, room = address(g, lanes)
        values = _load_partly(g.machine.memory, at) if begins_swap else fetch(g, at, room, shape)
        if g.machine.counters is not None:
            g.machine.counters.global_access(bound, g, at, shape.size, room, lanes)
        write_loaded(g, row, values, lanes, shape)

    reads = site.ids(addressing)
    writes = tuple(range(row, row + dwords))
    bound = Bound(run, writes, (*reads, *writes) if shape.keeps else reads, "vmem", demands=reads,
                  memory=Access("global", "load", shape.size, "vmcnt"))  # fmt: skip
    return bound


def fetch(g: Group, at: np.ndarray, room: np.ndarray | None, shape: Shape) -> np.ndarray:
    """Loads data with a buffer's range check: uint32 [dwords, N], or [N] if narrower than a dword."""
    memory = g.machine.memory
    if room is not None and int(room.min()) < shape.size:
        if shape.size < 4:
            inside = room >= shape.size
            values = np.zeros(len(at), np.uint32)
            if inside.any():
                values[inside] = memory.load_small(at[inside], shape.size)
            return values
        values = np.zeros((shape.dwords, len(at)), np.uint32)
        for i in range(shape.dwords):  # the range check is separate for each dword
            inside = room >= 4 * i + 4
            if inside.any():
                values[i, inside] = memory.load(at[inside] + 4 * i, 1)[0]
        return values
    return memory.load_small(at, shape.size) if shape.size < 4 else memory.load(at, shape.dwords)


@binder(*(f"{space}_store_{name}" for space in ("buffer", "global") for name in STORES))
def _store(site: Site) -> Bound:
    shape = STORES[site.mnemonic.split("_store_")[1]]
    data, address, addressing = _parts(site, data_first=False)
    row, dwords = data.index, shape.dwords

    def run(g: Group) -> None:
        g.queue.issue_vector(g, bound)
        lanes = active(g)
        if lanes is not None and not len(lanes):
            return
        at, room = address(g, lanes)
        demand_stored(g, row, lanes, room, shape)
        values = g.registers[row : row + dwords]
        if lanes is not None:
            values = values[:, lanes]
        if shape.high:
            values = values >> np.uint32(16)
        machine = g.machine
        if machine.counters is not None:
            machine.counters.global_access(bound, g, at, shape.size, room, lanes)
        machine.progress += 1
        if room is not None and int(room.min()) < shape.size:
            if shape.size < 4:
                inside = room >= shape.size
                if inside.any():
                    machine.memory.store_small(at[inside], values[0][inside], shape.size)
                return
            for i in range(dwords):
                inside = room >= 4 * i + 4
                if inside.any():
                    machine.memory.store(at[inside] + 4 * i, values[i : i + 1, inside])
        elif shape.size < 4:
            machine.memory.store_small(at, values[0], shape.size)
        else:
            machine.memory.store(at, values)

    reads = site.ids(addressing)
    access = Access("global", "store", shape.size, "vmcnt")
    bound = Bound(run, (), (*reads, *range(row, row + dwords)), "vmem", demands=reads, memory=access)
    return bound


def demand_stored(g: Group, row: int, lanes: np.ndarray | None, room: np.ndarray | None, shape: Shape) -> None:
    """Checks that stored data is initialised. Lanes beyond a buffer's range store nothing, and are not checked."""
    if g.shadow is None or g.shadow.watch.isdisjoint(range(row, row + shape.dwords)):
        return
    stored = np.arange(g.lanes) if lanes is None else lanes
    for i in range(shape.dwords):
        inside = stored if room is None else stored[room >= min(4 * i + 4, shape.size)]
        g.shadow.demand_stored(g, row + i, inside)


# Atomics

ATOMICS: dict[str, tuple[str, int]] = {}
for _name in operations(32):
    ATOMICS[_name] = (_name, 32)
for _name in operations(64):
    ATOMICS[_name if _name.endswith("f64") else f"{_name}_x2"] = (_name, 64)
ATOMICS |= {"cmpswap": ("cmpswap", 32), "cmpswap_x2": ("cmpswap", 64)}


@binder(*(f"{space}_atomic_{name}" for space in ("buffer", "global") for name in ATOMICS))
def _atomic(site: Site) -> Bound:
    """Binds an atomic. With sc0 it returns the old value: global atomics to a separate destination operand, buffer atomics to the
    data operand. Without sc0 it returns nothing.
    """
    name, bits = ATOMICS[site.mnemonic.split("_atomic_")[1]]
    returns = bool(site.take("sc0", False) or site.take("glc", False))
    is_buffer = site.mnemonic.startswith("buffer")
    destination = site.operands[0] if returns else None
    if returns and not is_buffer:
        site.operands.pop(0)
    data, address, addressing = _parts(site, data_first=False)
    words, row, swaps_if_equal = bits // 32, data.index, name == "cmpswap"
    halves = bits == 32 and (swaps_if_equal or name.startswith("pk_"))

    def run(g: Group) -> None:
        g.queue.issue_vector(g, bound)
        lanes = active(g)
        if lanes is not None and not len(lanes):
            return
        machine = g.machine
        at, room = address(g, lanes)
        if machine.counters is not None:
            machine.counters.global_access(bound, g, at, bits // 8, room, lanes)
        inside = None if room is None else room >= bits // 8
        reached = at if inside is None else at[inside]
        operand = operand_of(g, row, lanes, words)
        compare = operand_of(g, row + words, lanes, words) if swaps_if_equal else None
        changeable = None
        if len(reached):
            check_aligned(reached, bits // 8)
            if halves:
                changeable = _bits_of_tensors(machine.memory, at, inside, operand, *([] if compare is None else [compare]))
            else:
                machine.memory.check(reached, bits // 8, "atomic")
        before, changed = apply_in_order(machine.memory.bytes, at - machine.memory.base, inside, name, operand, compare, changeable)
        machine.progress += changed
        if destination is not None:
            write_before(g, destination.index, lanes, before)

    reads = (*site.ids(addressing), *data.ids)
    writes = tuple(range(destination.index, destination.index + words)) if destination is not None else ()
    bound = Bound(run, writes, reads, "vmem", demands=reads, memory=Access("global", "atomic", bits // 8, "vmcnt"))
    return bound


# 16-bit atomics. The hardware has only packed atomics and compare-and-swap of dwords. So compilers add zero to the other 16-bit
# element of a dword; or they load the dword and swap it with the other element unchanged. If a tensor has an odd number of
# elements, or begins in the middle of a dword, the other element is outside of the tensor. Hardware permits this, so the bounds
# check must permit it too.


def _bits_of_tensors(memory: GlobalMemory, at: np.ndarray, inside: np.ndarray | None, *operands: np.ndarray) -> np.ndarray | None:
    """Returns a mask of those bits of each dword that are inside a tensor, uint32 [N]; None means all bits. Raises `Fault` if none
    of a dword's bits are inside, or if an operand has a bit set outside.
    """
    whole = memory.contains(at, 4)
    if inside is not None:
        whole |= ~inside
    if whole.all():
        return None
    halves = memory.contains(at, 2) * np.uint32(0xFFFF) | memory.contains(at + 2, 2) * np.uint32(0xFFFF0000)
    bits = np.where(whole, np.uint32(0xFFFFFFFF), halves)
    bad = bits == 0
    for operand in operands:
        bad |= (operand & ~bits) != 0
    if bad.any():
        memory.check(at[bad], 4, "atomic")
    return bits


def _begins_swap(site: Site) -> bool:
    """Returns whether a load reads the initial comparison value of a later dword compare-and-swap at the same address."""
    if site.mnemonic != "global_load_dword":
        return False
    found, address, *rest = site.instruction.operands
    offset = site.instruction.modifiers.get("offset", 0)
    for other in site.assembly.instructions:
        if other.mnemonic == "global_atomic_cmpswap" and other.modifiers.get("offset", 0) == offset:
            *_, at, data, base = other.operands
            if [at, base] == [address, *rest] and data.endswith(f":{found.removeprefix('v')}]"):
                return True
    return False


def _load_partly(memory: GlobalMemory, at: np.ndarray) -> np.ndarray:
    """Loads a dword from each address, uint32 [1, N], with zeros in those 16 bits that are outside of a tensor."""
    bits = None if (at & 3).any() else _bits_of_tensors(memory, at, None)
    return memory.load(at, 1) if bits is None else memory.dwords.take((at - memory.base) >> 2)[None] & bits
