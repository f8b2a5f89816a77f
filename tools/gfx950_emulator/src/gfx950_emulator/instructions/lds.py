"""LDS instructions (DS): reads, writes, transposing reads, atomics, and the lane permutations that use the LDS crossbar.

Definitions: chapter "DS instructions" of AMD's CDNA3 ISA document; transposing reads: CDNA4 ISA document.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.constants import WAVE
from gfx950_emulator.crosslane import swizzle_lanes
from gfx950_emulator.group import Group
from gfx950_emulator.instructions.atomics import apply_in_order, check_aligned, operand_of, write_before
from gfx950_emulator.instructions.vector_memory import Shape, active, write_loaded
from gfx950_emulator.memory import Fault

_READS = {
    "u8": Shape(1), "i8": Shape(1, signed=True), "u16": Shape(2), "i16": Shape(2, signed=True),
    "b32": Shape(4), "b64": Shape(8), "b96": Shape(12), "b128": Shape(16),
    "u8_d16": Shape(1, keeps=True), "u8_d16_hi": Shape(1, high=True, keeps=True),
    "i8_d16": Shape(1, signed=True, keeps=True), "i8_d16_hi": Shape(1, signed=True, high=True, keeps=True),
    "u16_d16": Shape(2, keeps=True), "u16_d16_hi": Shape(2, high=True, keeps=True),
}  # fmt: skip
_WRITES = {
    "b8": Shape(1), "b8_d16_hi": Shape(1, high=True), "b16": Shape(2), "b16_d16_hi": Shape(2, high=True),
    "b32": Shape(4), "b64": Shape(8), "b96": Shape(12), "b128": Shape(16),
}  # fmt: skip


def _offsets(g: Group, row: int, lanes: np.ndarray | None, immediate: int) -> np.ndarray:
    """Returns byte offsets in the workgroup's LDS, int64 [N]: the address register plus the immediate, modulo 2**32."""
    at = g.U[row] if lanes is None else g.U[row][lanes]
    return (at + np.uint32(immediate)).astype(np.int64)


def read_lds(g: Group, bound: Bound, offsets: np.ndarray, lanes: np.ndarray | None, shape: Shape, row: int) -> None:
    """Reads one value per lane from LDS into registers, starting with register ``row``."""
    machine, local = g.machine, g.machine.local
    if machine.counters is not None:
        machine.counters.local_access(bound, g, offsets, shape.size, lanes)
    addresses, inside = local.place(g, offsets, lanes, shape.size, "read")
    if local.shadow is not None:
        local.shadow.read(g, addresses, lanes, shape.size, row)
    values = local.load_small(addresses, shape.size) if shape.size < 4 else local.load(addresses, shape.dwords)
    if inside is not None:
        values = np.where(inside, values, np.uint32(0))
    write_loaded(g, row, values, lanes, shape)


def write_lds(g: Group, bound: Bound, offsets: np.ndarray, lanes: np.ndarray | None, shape: Shape, row: int) -> None:
    """Writes one value per lane to LDS from registers, starting with register ``row``."""
    machine, local = g.machine, g.machine.local
    machine.progress += 1
    if machine.counters is not None:
        machine.counters.local_access(bound, g, offsets, shape.size, lanes)
    addresses, inside = local.place(g, offsets, lanes, shape.size, "write")
    values = g.registers[row : row + shape.dwords]
    if lanes is not None:
        values = values[:, lanes]
    if inside is not None:
        addresses, values = addresses[inside], values[:, inside]
        lanes = (np.arange(g.lanes) if lanes is None else lanes)[inside]
    if shape.high:
        values = values >> np.uint32(16)
    if local.shadow is not None:
        local.shadow.write(g, addresses, lanes, shape.size, row, values)
    if shape.size < 4:
        local.store_small(addresses, values[0], shape.size)
    else:
        local.store(addresses, values)


def _issue(g: Group, bound: Bound) -> None:
    if g.shadow is not None:
        g.queue.issue_local(g, bound)


@binder(*(f"ds_read_{name}" for name in _READS))
def _bind_read(site: Site) -> Bound:
    shape = _READS[site.mnemonic.removeprefix("ds_read_")]
    data, address = site.operands
    immediate, row, at = int(site.take("offset", 0)), data.index, address.index

    def run(g: Group) -> None:
        _issue(g, bound)
        lanes = active(g)
        if lanes is None or len(lanes):
            read_lds(g, bound, _offsets(g, at, lanes, immediate), lanes, shape, row)

    writes, reads = tuple(range(row, row + shape.dwords)), site.ids([address])
    return_ = Access("lds", "load", shape.size, "lgkmcnt")
    bound = Bound(run, writes, (*reads, *writes) if shape.keeps else reads, "lds", demands=reads, memory=return_)
    return bound


@binder(*(f"ds_write_{name}" for name in _WRITES))
def _bind_write(site: Site) -> Bound:
    shape = _WRITES[site.mnemonic.removeprefix("ds_write_")]
    address, data = site.operands
    immediate, row, at = int(site.take("offset", 0)), data.index, address.index

    def run(g: Group) -> None:
        _issue(g, bound)
        lanes = active(g)
        if lanes is None or len(lanes):
            write_lds(g, bound, _offsets(g, at, lanes, immediate), lanes, shape, row)

    addressing = site.ids([address])
    reads = (*addressing, *range(row, row + shape.dwords))
    bound = Bound(run, (), reads, "lds", demands=addressing, memory=Access("lds", "store", shape.size, "lgkmcnt"))
    return bound


def _two_offsets(site: Site, element: int) -> tuple[int, int]:
    scale = element * (64 if "st64" in site.mnemonic else 1)
    return int(site.take("offset0", 0)) * scale, int(site.take("offset1", 0)) * scale


@binder("ds_read2_b32", "ds_read2_b64", "ds_read2st64_b32", "ds_read2st64_b64")
def _bind_read2(site: Site) -> Bound:
    element = 8 if site.mnemonic.endswith("b64") else 4
    first, second = _two_offsets(site, element)
    data, address = site.operands
    row, at, shape = data.index, address.index, Shape(element)

    def run(g: Group) -> None:
        _issue(g, bound)
        lanes = active(g)
        if lanes is None or len(lanes):
            offsets = [_offsets(g, at, lanes, immediate) for immediate in (first, second)]  # before a result overwrites the address
            read_lds(g, bound, offsets[0], lanes, shape, row)
            read_lds(g, bound, offsets[1], lanes, shape, row + shape.dwords)

    reads = site.ids([address])
    bound = Bound(
        run,
        tuple(range(row, row + 2 * shape.dwords)),
        reads,
        "lds",
        demands=reads,
        memory=Access("lds", "load", 2 * element, "lgkmcnt"),
    )
    return bound


@binder("ds_write2_b32", "ds_write2_b64", "ds_write2st64_b32", "ds_write2st64_b64")
def _bind_write2(site: Site) -> Bound:
    element = 8 if site.mnemonic.endswith("b64") else 4
    first, second = _two_offsets(site, element)
    address, a, b = site.operands
    at, shape = address.index, Shape(element)

    def run(g: Group) -> None:
        _issue(g, bound)
        lanes = active(g)
        if lanes is None or len(lanes):
            write_lds(g, bound, _offsets(g, at, lanes, first), lanes, shape, a.index)
            write_lds(g, bound, _offsets(g, at, lanes, second), lanes, shape, b.index)

    addressing = site.ids([address])
    bound = Bound(
        run, (), (*addressing, *a.ids, *b.ids), "lds", demands=addressing, memory=Access("lds", "store", 2 * element, "lgkmcnt")
    )
    return bound


# Transposing reads. For each group of 16 lanes, memory holds a block of rows of 16 elements, and every lane reads a fragment of a
# row. With 4 or 6 bits per element a lane reads a whole row of 16 elements, with 8 bits half a row (8), with 16 bits a quarter (4).
# Lane i receives column i.


@lru_cache(maxsize=4)
def transpose_map(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns two int64 [64, elements]: for each element of each lane's result, the lane that reads the element, and the element's
    index in that lane's data."""
    per_lane = 16 if bits == 6 else 64 // bits
    lane, element = np.meshgrid(np.arange(WAVE), np.arange(per_lane), indexing="ij")
    # The 16 lanes read a block of 16 * per_lane elements, in row-major order of rows of 16 elements: 16 / per_lane lanes
    # read one row. Lane i of the result is column i; its element e is row e.
    lanes_per_row = 16 // per_lane
    block, column = lane // 16 * 16, lane % 16
    return block + element * lanes_per_row + column // per_lane, column % per_lane


def _transposed(read: np.ndarray, bits: int) -> np.ndarray:
    """Transposes the data, uint8 [N, bytes], that all lanes of whole waves have read."""
    size = read.shape[1]
    if bits >= 8:
        elements = read.view(np.uint16 if bits == 16 else np.uint8)
    elif bits == 4:
        elements = np.stack([read & np.uint8(15), read >> np.uint8(4)], axis=-1)
    else:
        elements = np.packbits(np.unpackbits(read, axis=1, bitorder="little").reshape(-1, bits), axis=1, bitorder="little")
    moved = np.ascontiguousarray(elements.reshape(-1, WAVE, 8 * size // bits)[(slice(None), *transpose_map(bits))])
    if bits == 4:
        moved = moved[..., ::2] | moved[..., 1::2] << np.uint8(4)
    elif bits == 6:
        moved = np.packbits(np.unpackbits(moved.reshape(-1, 1), axis=1, count=bits, bitorder="little"), bitorder="little")
    return moved.view(np.uint8).reshape(-1, size)


@binder("ds_read_b64_tr_b16", "ds_read_b64_tr_b8", "ds_read_b64_tr_b4", "ds_read_b96_tr_b6")
def _bind_transposed(site: Site) -> Bound:
    bits = int(site.mnemonic.rsplit("b", 1)[1])
    data, address = site.operands
    immediate, row, at, shape = int(site.take("offset", 0)), data.index, address.index, Shape(12 if bits == 6 else 8)

    def move(read: np.ndarray) -> np.ndarray:
        return _transposed(read, bits)

    def run(g: Group) -> None:
        _issue(g, bound)
        lanes = active(g)
        if lanes is not None:
            on = g.mask.reshape(g.waves, WAVE)
            if (on.any(axis=1) != on.all(axis=1)).any():
                raise Fault("exec", f"{site.mnemonic} with some lanes of a wave switched off has no defined result")
            if not len(lanes):
                return
        machine, local = g.machine, g.machine.local
        offsets = _offsets(g, at, lanes, immediate)
        if machine.counters is not None:
            machine.counters.local_access(bound, g, offsets, shape.size, lanes)
        addresses, inside = local.place(g, offsets, lanes, shape.size, "read")
        if local.shadow is not None:
            local.shadow.read(g, addresses, lanes, shape.size, row, move)
        values = local.load(addresses, shape.dwords)
        if inside is not None:
            values = np.where(inside, values, np.uint32(0))
        moved = move(np.ascontiguousarray(values.T).view(np.uint8))
        write_loaded(g, row, moved.view(np.uint32).T, lanes, shape)

    reads = site.ids([address])
    writes = tuple(range(row, row + shape.dwords))
    bound = Bound(run, writes, reads, "lds", demands=reads, memory=Access("lds", "load", shape.size, "lgkmcnt"))
    return bound


# Atomics

_DS_ATOMICS = {
    "add_u32": "add", "sub_u32": "sub", "inc_u32": "inc", "dec_u32": "dec", "min_i32": "smin", "max_i32": "smax",
    "min_u32": "umin", "max_u32": "umax", "and_b32": "and", "or_b32": "or", "xor_b32": "xor", "add_f32": "add_f32",
    "min_f32": "min_f32", "max_f32": "max_f32", "pk_add_bf16": "pk_add_bf16", "pk_add_f16": "pk_add_f16",
    "add_u64": "add", "sub_u64": "sub", "inc_u64": "inc", "dec_u64": "dec", "min_i64": "smin", "max_i64": "smax",
    "min_u64": "umin", "max_u64": "umax", "and_b64": "and", "or_b64": "or", "xor_b64": "xor", "add_f64": "add_f64",
    "min_f64": "min_f64", "max_f64": "max_f64",
}  # fmt: skip
_DS_RETURNING = {
    **{(f"{n.rsplit('_', 1)[0]}_rtn_{n.rsplit('_', 1)[1]}"): v for n, v in _DS_ATOMICS.items()},
    "wrxchg_rtn_b32": "swap",
    "wrxchg_rtn_b64": "swap",
    "cmpst_rtn_b32": "cmpswap",
    "cmpst_rtn_b64": "cmpswap",
}


@binder(*(f"ds_{name}" for name in (*_DS_ATOMICS, *_DS_RETURNING, "cmpst_b32", "cmpst_b64")))
def _bind_atomic(site: Site) -> Bound:
    """Binds an atomic, which is applied in lane order. ds_cmpst compares the first data operand, and stores the second."""
    name = site.mnemonic.removeprefix("ds_")
    returns = name in _DS_RETURNING
    kind = _DS_RETURNING.get(name) or _DS_ATOMICS.get(name, "cmpswap")
    bits = 64 if name.endswith("64") else 32
    operands = list(site.operands)
    destination = operands.pop(0) if returns else None
    address, data = operands[0], operands[1:]
    immediate, words = int(site.take("offset", 0)), bits // 32
    stored, compared = (data[1], data[0]) if kind == "cmpswap" else (data[0], None)

    def run(g: Group) -> None:
        _issue(g, bound)
        lanes = active(g)
        if lanes is not None and not len(lanes):
            return
        machine, local = g.machine, g.machine.local
        offsets = _offsets(g, address.index, lanes, immediate)
        if machine.counters is not None:
            machine.counters.local_access(bound, g, offsets, bits // 8, lanes)
        addresses, inside = local.place(g, offsets, lanes, bits // 8, "atomic")
        check_aligned(offsets, bits // 8)
        if local.shadow is not None:
            local.shadow.atomic(g, addresses, lanes, bits // 8)
        operand = operand_of(g, stored.index, lanes, words)
        compare = None if compared is None else operand_of(g, compared.index, lanes, words)
        before, changed = apply_in_order(local.bytes, addresses, inside, kind, operand, compare)
        machine.progress += changed
        if destination is not None:
            write_before(g, destination.index, lanes, before)

    reads = (*address.ids, *site.ids(data))
    writes = tuple(range(destination.index, destination.index + words)) if destination is not None else ()
    bound = Bound(run, writes, reads, "lds", demands=reads, memory=Access("lds", "atomic", bits // 8, "lgkmcnt"))
    return bound


# Lane permutations use the LDS crossbar but no memory, and need the same waits as LDS accesses.


@binder("ds_bpermute_b32", "ds_permute_b32")
def _bind_permute(site: Site) -> Bound:
    """Binds both permutations. bpermute: D[lane] = S1[(S0[lane] + offset) / 4 % 64]; an inactive source lane gives zero. permute:
    D[(S0[lane] + offset) / 4 % 64] = S1[lane]; lanes to which no lane sends get zero.
    """
    destination, address, data = site.operands
    immediate, pulls = int(site.take("offset", 0)), site.mnemonic == "ds_bpermute_b32"

    def run(g: Group) -> None:
        _issue(g, bound)
        lane = ((g.U[address.index].astype(np.int64) + immediate) >> 2) & (WAVE - 1)
        wave = np.arange(g.lanes) // WAVE * WAVE
        values = g.U[data.index] if g.full else np.where(g.mask, g.U[data.index], np.uint32(0))
        if pulls:
            result = values.take(wave + lane)
        else:
            result = np.zeros(g.lanes, np.uint32)
            to = (wave + lane) if g.full else (wave + lane)[g.mask]
            result[to] = values if g.full else values[g.mask]
        if g.full:
            g.U[destination.index][...] = result
        else:
            np.copyto(g.U[destination.index], result, where=g.mask)

    reads = site.ids([address, data])
    addressing = site.ids([address])
    bound = Bound(run, site.ids([destination]), reads, "lds", demands=addressing, memory=Access("lds", "permute", 0, "lgkmcnt"),
                  moves=True, extra={"data": site.ids([data])})  # fmt: skip
    return bound


@binder("ds_swizzle_b32")
def _bind_swizzle(site: Site) -> Bound:
    """D[lane] = S0[source of the lane]; an inactive source lane gives zero."""
    destination, data = site.operands
    try:
        source = swizzle_lanes(site.take("offset", 0))
    except ValueError as error:
        raise site.unknown(str(error)) from None

    def run(g: Group) -> None:
        _issue(g, bound)
        values = g.U[data.index] if g.full else np.where(g.mask, g.U[data.index], np.uint32(0))
        result = values.reshape(g.waves, WAVE).take(source, axis=1).reshape(-1)
        if g.full:
            g.U[destination.index][...] = result
        else:
            np.copyto(g.U[destination.index], result, where=g.mask)

    bound = Bound(run, site.ids([destination]), site.ids([data]), "lds", moves=True, memory=Access("lds", "permute", 0, "lgkmcnt"))
    return bound
