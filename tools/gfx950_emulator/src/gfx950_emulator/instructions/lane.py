"""Instructions that move data between lanes, and between lanes and scalar registers."""

from __future__ import annotations

import numpy as np

from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.constants import MASK32, WAVE
from gfx950_emulator.group import Group, agree
from gfx950_emulator.instructions.scalar_values import read32
from gfx950_emulator.memory import Fault
from gfx950_emulator.vector import U32, getter, group_write


@binder("v_readfirstlane_b32")
def _read_first(site: Site) -> Bound:
    """D = S0 of the lowest active lane (lane 0 if none is active)."""
    to, row = site.operands[0].index, site.operands[1].index

    def run(g: Group) -> None:
        values = g.by_wave(row)
        if g.full:
            first = values[:, 0]
        else:
            first = values[np.arange(g.waves), g.mask.reshape(g.waves, WAVE).argmax(axis=1)]
        g.set_s32(to, agree(first.astype(np.int64)))

    return Bound(run, site.ids(site.operands[:1]), site.ids(site.operands[1:]), extra={"lanes": "first"})


@binder("v_readlane_b32")
def _read_lane(site: Site) -> Bound:
    """D = S0[lane S1], whether or not that lane is active."""
    to, row, lane = site.operands[0].index, site.operands[1].index, read32(site.operands[2])

    def run(g: Group) -> None:
        at = lane(g)
        values = g.by_wave(row)
        chosen = values[:, at & 63] if type(at) is int else values[np.arange(g.waves), at & 63]
        g.set_s32(to, agree(chosen.astype(np.int64)))

    return Bound(run, site.ids(site.operands[:1]), site.ids(site.operands[1:]), extra={"lanes": "read", "lane": lane})


@binder("v_writelane_b32")
def _write_lane(site: Site) -> Bound:
    """D[lane S1] = S0, whether or not that lane is active; all other lanes keep their values."""
    row, value, lane = site.operands[0].index, read32(site.operands[1]), read32(site.operands[2])

    def run(g: Group) -> None:
        at = lane(g)
        rows = g.by_wave(row)
        if type(at) is int:
            rows[:, at & 63] = value(g)
        else:
            rows[np.arange(g.waves), at & 63] = value(g)

    return Bound(run, site.ids(site.operands[:1]), site.ids(site.operands), extra={"lanes": "write", "lane": lane})


@binder("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _swap(site: Site) -> Bound:
    """Exchanges half of the lanes of one register with half of the lanes of another register.

    permlane32 exchanges lanes 32 to 63 of D with lanes 0 to 31 of S0. permlane16 exchanges the odd rows of 16 lanes of D with the
    even rows of S0. (CDNA4 ISA document, V_PERMLANE16_SWAP_B32 and V_PERMLANE32_SWAP_B32.)
    """
    size = 32 if "32_swap" in site.mnemonic else 16
    a, b = site.operands[0].index, site.operands[1].index
    if site.take("bound_ctrl") is not None or site.take("fi") is not None:
        raise site.unknown("bound_ctrl and fi of permlane swaps are not implemented")

    def run(g: Group) -> None:
        shape = (g.waves, WAVE // (2 * size), 2, size)
        first, second = g.U[a].reshape(shape), g.U[b].reshape(shape)
        if g.full:
            kept = first[:, :, 1].copy()
            first[:, :, 1] = second[:, :, 0]
            second[:, :, 0] = kept
            return
        mask = g.mask.reshape(shape)
        on = mask[:, :, 1]  # the lanes of D that change; their partners are lanes of S0
        if (on != mask[:, :, 0]).any():
            raise Fault("exec", f"{site.mnemonic} between lanes that are on and lanes that are off has no defined result")
        from_first, from_second = first[:, :, 1].copy(), second[:, :, 0].copy()
        np.copyto(first[:, :, 1], from_second, where=on)
        np.copyto(second[:, :, 0], from_first, where=on)

    ids = site.ids(site.operands)
    return Bound(run, ids, ids, moves=True)


_LOWER = (np.uint64(1) << np.arange(WAVE, dtype=np.uint64)) - np.uint64(1)  # for each lane, a mask of the lanes below it


@binder("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _masked_count(site: Site) -> Bound:
    """D = S1 + the number of set bits of S0 below this lane, counted in the lower or upper 32 lanes."""
    to = site.operands[0].index
    bits, add = (getter(site, operand, U32) for operand in site.operands[1:])
    shift = np.uint64(32 if site.mnemonic == "v_mbcnt_hi_u32_b32" else 0)
    below = (_LOWER >> shift & np.uint64(MASK32)).astype(np.uint32)

    def run(g: Group) -> None:
        count = np.bitwise_count(bits(g) & np.tile(below, g.waves)).astype(np.uint32) + add(g)
        group_write(g, to, count)

    return Bound(run, site.ids(site.operands[:1]), site.ids(site.operands[1:]))
