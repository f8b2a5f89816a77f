"""Branches, waits, barriers, and instructions that only affect timing."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gfx950_emulator.access import Access
from gfx950_emulator.binding import Bound, Site, binder
from gfx950_emulator.constants import CODE_BASE, CODE_STEP, EXEC, MODE_DEFAULT, VCC, code_address
from gfx950_emulator.group import Group, agree
from gfx950_emulator.instructions.scalar_values import any_lane, read64
from gfx950_emulator.operands import SCALAR_BASE, SCC_ID, parse_operand


def _nothing(g: Group) -> None:
    """Does nothing: the instruction only affects timing."""


def _negate(value: object) -> object:
    return ~value if isinstance(value, np.ndarray) else not value


_VCC_IDS = (SCALAR_BASE + VCC, SCALAR_BASE + VCC + 1)
_EXEC_IDS = (SCALAR_BASE + EXEC, SCALAR_BASE + EXEC + 1)
_CONDITIONS = {
    "s_cbranch_scc0": (lambda g: _negate(g.scc), (SCC_ID,)),
    "s_cbranch_scc1": (lambda g: g.scc, (SCC_ID,)),
    "s_cbranch_vccz": (lambda g: _negate(any_lane(g, g.lane_mask(VCC))), _VCC_IDS),
    "s_cbranch_vccnz": (lambda g: any_lane(g, g.lane_mask(VCC)), _VCC_IDS),
    "s_cbranch_execz": (lambda g: False if g.full else _negate(any_lane(g, g.mask)), _EXEC_IDS),
    "s_cbranch_execnz": (lambda g: True if g.full else any_lane(g, g.mask), _EXEC_IDS),
}


def _target(site: Site) -> int:
    label = site.instruction.operands[0]
    if label not in site.assembly.labels:
        raise site.unknown(f"branch to {label}, which is no label of this kernel")
    return site.assembly.labels[label]


@binder("s_branch")
def _branch(site: Site) -> Bound:
    return Bound(_nothing, unit="branch", target=_target(site))


@binder(*_CONDITIONS)
def _conditional(site: Site) -> Bound:
    condition, reads = _CONDITIONS[site.mnemonic]
    return Bound(_nothing, reads=reads, unit="branch", target=_target(site), condition=condition, demands=reads)


# Calls. Virtual code addresses are CODE_BASE plus CODE_STEP per instruction, whatever the size of its encoding.


@binder("s_getpc_b64")
def _get_pc(site: Site) -> Bound:
    """D = address of the next instruction."""
    destination, address = site.operands[0], code_address(site.instruction.index + 1)

    def run(g: Group) -> None:
        g.set_s64(destination.index, address)

    return Bound(run, site.ids([destination]), unit="salu")


@binder("s_setpc_b64", "s_swappc_b64")
def _jump(site: Site) -> Bound:
    """PC = S0; swappc also writes the address of the next instruction to D."""
    *returns, source = site.operands
    read, after = read64(source), code_address(site.instruction.index + 1)

    def jump(g: Group) -> object:
        address = read(g)
        if returns:
            g.set_s64(returns[0].index, after)
        if type(address) is int:
            return (address - CODE_BASE) // CODE_STEP
        return (address.astype(np.int64) - CODE_BASE) // CODE_STEP

    ids = site.ids([source])
    return Bound(_nothing, site.ids(returns), ids, "branch", jump=jump, demands=ids)


@binder("s_endpgm")
def _end(site: Site) -> Bound:
    return Bound(_nothing, unit="end")


@binder("s_barrier")
def _barrier(site: Site) -> Bound:
    return Bound(_nothing, unit="barrier")


def _wait_limits(site: Site) -> dict[str, int]:
    """Returns the limit of each counter that an s_waitcnt names, or the limits in the fields of its numeric immediate."""
    limits: dict[str, int] = {}
    for text in (*site.instruction.operands, *site.modifiers):
        if match := re.fullmatch(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", text):
            limits[match[1]] = int(match[2])
        elif re.fullmatch(r"0x[0-9a-f]+|\d+", text):
            number = int(text, 0)
            limits = {"vmcnt": number & 15 | number >> 10 & 0x30, "expcnt": number >> 4 & 7, "lgkmcnt": number >> 8 & 15}
        elif text != "&":
            raise site.unknown(f"wait for {text}")
    site.modifiers.clear()
    return limits


@binder("s_waitcnt")
def _wait(site: Site) -> Bound:
    """Waits until no more than the given number of operations of each counter is outstanding. Exports are not counted."""
    limits = _wait_limits(site)
    vector, scalar = limits.get("vmcnt"), limits.get("lgkmcnt")

    def run(g: Group) -> None:
        if vector is not None:
            g.queue.wait_vector(g, vector)
        if scalar is not None:
            g.queue.wait_local(g, scalar)

    return Bound(run, unit="wait", extra=limits)


@binder(
    "s_nop", "s_setprio", "s_sleep", "s_sethalt", "s_setkill", "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_code_end",
    "s_inst_prefetch", "s_ttracedata", "s_incperflevel", "s_decperflevel", "s_sched_barrier", "s_wakeup", "v_nop",
    "buffer_inv", "buffer_wbl2", "buffer_wbinvl1", "buffer_wbinvl1_vol",
)  # fmt: skip
def _no_operation(site: Site) -> Bound:
    """Binds an instruction without visible effect: caches are coherent in the emulator, and priorities do not matter."""
    site.modifiers.clear()
    return Bound(_nothing, unit="nop")


@binder("s_trap")
def _trap(site: Site) -> Bound:
    def run(g: Group) -> None:
        raise site.unknown("the kernel trapped (an assertion of its source failed)")

    return Bound(run, unit="nop")


@binder("s_memtime", "s_memrealtime")
def _time(site: Site) -> Bound:
    """Binds a read of the clock. The emulated clock counts executed instructions and advances once per basic block."""
    to = site.operands[0].index

    def run(g: Group) -> None:
        g.set_s64(to, g.machine.clock())
        if g.shadow is not None:
            g.queue.issue_local(g, bound)

    bound = Bound(run, site.ids(site.operands[:1]), unit="smem", memory=Access("scalar", "load", 8, "lgkmcnt"))
    return bound


_READABLE: dict[str, Callable[[Group], int | np.ndarray]] = {
    "HW_REG_MODE": lambda g: g.mode,
    "HW_REG_XCC_ID": lambda g: agree(g.machine.xcc_of(g.slot)),
}


@binder("s_getreg_b32")
def _getreg(site: Site) -> Bound:
    """D = bits [offset, offset + size) of a hardware register."""
    first, second = site.instruction.operands
    destination, (name, offset, size) = parse_operand(first, site.assembly.vgprs), _hardware_register(site, second)
    if name not in _READABLE:
        raise site.unknown(f"hardware register {name} is not modelled")
    value, mask = _READABLE[name], (1 << size) - 1

    def run(g: Group) -> None:
        g.set_s32(destination.index, (value(g) >> offset) & mask)

    return Bound(run, tuple(destination.ids), unit="salu")


@binder("s_setreg_imm32_b32", "s_setreg_b32")
def _setreg(site: Site) -> Bound:
    """Binds a write to MODE. The write may change FP16_OVFL (bit 23), which conversions read. Rounding [3:0] and denormals [7:4]
    must not change. All other fields control exceptions and clamping.
    """
    name, offset, size = _hardware_register(site, site.instruction.operands[0])
    text = site.instruction.operands[1]
    if name != "HW_REG_MODE" or not re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", text):
        raise site.unknown(f"writing {name} from {text} is not modelled")
    field = ((1 << size) - 1) << offset
    wanted = (int(text, 0) << offset) & field
    if (wanted ^ MODE_DEFAULT) & field & 0xFF:
        raise site.unknown("rounding other than to nearest even, and flushed denormals, are not modelled")

    def run(g: Group) -> None:
        g.mode = (g.mode & ~field) | wanted

    return Bound(run, unit="salu")


def _hardware_register(site: Site, text: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"hwreg\((\w+)(?:,\s*(\d+),\s*(\d+))?\)", text)
    if match is None:
        raise site.unknown(f"hardware register {text}")
    return match[1], int(match[2] or 0), int(match[3] or 32)
