"""Finds errors that hardware does not report: uninitialised data, missing waits, races between waves in LDS.

**Registers** (`RegisterShadow`). A register is *watched* while a load into it is outstanding, or while some of its lanes are
uninitialised. Instructions that touch no watched register, nearly all of them, run at full speed. All other instructions run in
`RegisterShadow.around`. It is an error to touch a register whose load was not waited for. Uninitialised lanes propagate to results
that depend on them. An uninitialised lane is an error once it becomes an address, stored data, or the condition of a branch.
Propagation is exact per lane, also through moves across lanes. Any other operation that combines lanes marks the whole wave.

**LDS** (`LocalShadow`). For every byte, the shadow records whether it was ever written, and which waves wrote and read it since the
workgroup's last barrier. If there is no barrier in between, it is a race to read a byte that another wave wrote, or to overwrite a
byte that another wave read or wrote. A barrier does not publish a write that its wave did not wait for. The bytes of a direct load
to LDS are unreadable until the ``s_waitcnt`` that covers the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from gfx950_emulator.binding import Bound, Logic
from gfx950_emulator.constants import EXEC, M0, MASK32, SCALARS, WAVE
from gfx950_emulator.crosslane import dpp_read
from gfx950_emulator.group import Group, all_lanes, no_lanes
from gfx950_emulator.memory import Fault
from gfx950_emulator.operands import SCALAR_BASE, SCC_ID, parse_operand
from gfx950_emulator.outstanding import Deferred, Stored
from gfx950_emulator.program import ALWAYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from gfx950_emulator.local_memory import LocalMemory

    Move = Callable[[np.ndarray], np.ndarray]

_EXEC_IDS = frozenset((SCALAR_BASE + EXEC, SCALAR_BASE + EXEC + 1))
_LANE_WISE = ("s_mov_b64", "s_not_b64")


# The lower half of the 64-bit result of these instructions does not depend on the upper halves of the sources. Compilers may leave
# these upper halves undefined.
_LOW_FROM_LOW = ("v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64", "v_lshlrev_b64")


def name_of(register: int, vgprs: int) -> str:
    """Returns the name of a register, as the assembler writes it."""
    if register == SCC_ID:
        return "scc"
    if register >= SCALAR_BASE:
        index = register - SCALAR_BASE
        return {106: "vcc_lo", 107: "vcc_hi", M0: "m0", EXEC: "exec_lo", EXEC + 1: "exec_hi"}.get(index, f"s{index}")
    return f"v{register}" if register < vgprs else f"a{register - vgprs}"


class RegisterShadow:
    """The sanitizer's state of a group's registers.

    Attributes:
        watch: numbers of the watched registers, and `ALWAYS`.
        pending: for each register, the outstanding loads into it: one, or several after waves reconverged.
        unset: register number -> bool [L], the lanes in which it is uninitialised.
        loaded: set by a read of LDS or scratch memory: for each register, the lanes whose data is uninitialised.
        scratch: dword of scratch memory -> bool [L], uninitialised lanes; a missing dword is uninitialised in all lanes.
    """

    def __init__(self) -> None:
        self.watch: set[int] = {ALWAYS}
        self.pending: dict[int, tuple[Bound, ...]] = {}
        self.unset: dict[int, np.ndarray] = {}
        self.loaded: dict[int, np.ndarray] = {}
        self.scratch: dict[int, np.ndarray] = {}

    @classmethod
    def at_entry(cls, group: Group, scalars: list[int]) -> RegisterShadow:
        """Returns the state at kernel entry: every register except v0, EXEC and the given scalar registers is uninitialised."""
        shadow = cls()
        everywhere = np.ones(group.lanes, bool)
        registers = [*range(1, len(group.U)), *(SCALAR_BASE + i for i in range(SCALARS - 2) if i not in scalars), SCC_ID]
        shadow.unset = dict.fromkeys(registers, everywhere)
        shadow.watch.update(registers)
        return shadow

    # Checks around an instruction

    def around(self, group: Group, bound: Bound, run: Callable[[Group], None]) -> None:
        """Checks an instruction, runs it, and updates the shadow state. Raises `Fault`."""
        if bound.unit == "wait":
            run(group)
            return
        if self.pending:
            self._check_pending(group, bound)
        if bound.demands:
            self.demand(group, bound)
        spread = self._spread(group, bound)
        mask, full = group.mask, group.full or bound.unit == "mfma"
        self.loaded = {}
        run(group)
        memory = bound.memory
        if memory is not None and memory.direction in ("load", "atomic"):
            spread = self.loaded
        for register in bound.writes:
            new = spread.get(register) if isinstance(spread, dict) else spread
            if bound.extra.get("lanes") == "write":
                new = self._after_write_lane(group, bound, register)
            elif register < SCALAR_BASE and not full:
                new = self._where(mask, new, self.unset.get(register))
            self._set(register, new)
            if memory is not None:
                half = bound.extra.get("half")  # a flat operation is complete only if both counters say so
                self.pending[register] = (bound,) if half is None else (bound, half)
                self.watch.add(register)

    @staticmethod
    def _where(mask: np.ndarray, new: np.ndarray | None, old: np.ndarray | None) -> np.ndarray | None:
        """Returns the uninitialised lanes: ``new`` in lanes of the mask, ``old`` in all other lanes. None means no lanes."""
        if new is None:
            return None if old is None else old & ~mask
        return new & mask if old is None else np.where(mask, new, old)

    def _check_pending(self, group: Group, bound: Bound) -> None:
        """Raises `Fault` if the instruction touches a register whose load was not waited for. A vector load may follow another
        vector load into the same register, because vector loads complete in order."""
        for register in (*bound.reads, *bound.writes):
            loads = self.pending.get(register, ())
            in_order = bound.unit == "vmem" and register not in bound.reads and all(load.unit == "vmem" for load in loads)
            if loads and not in_order:
                raise self._not_waited(group, register, loads[0])

    def _set(self, register: int, lanes: np.ndarray | None) -> None:
        if lanes is None or not lanes.any():
            if self.unset.pop(register, None) is not None and register not in self.pending:
                self.watch.discard(register)
        else:
            self.unset[register] = lanes
            self.watch.add(register)

    def _not_waited(self, group: Group, register: int, load: Bound) -> Fault:
        program = group.machine.launch.program
        name = name_of(register, program.assembly.vgprs)
        counter = load.memory.counter if load.memory is not None else "counter"
        source = _describe(group, next((bound for bound in program.bound if bound.extra.get("half") is load), load))
        return Fault("wait", f"{name} is used before an s_waitcnt {counter} covers the load into it: {source}")

    def demand(self, group: Group, bound: Bound) -> None:
        """Raises `Fault` if a value that leaves the wave or determines a branch is uninitialised: a vector register in an active
        lane, or a scalar register."""
        what = "decides the branch" if bound.unit == "branch" else "is an address or stored data"
        for register in bound.demands:
            lanes = self.unset.get(register)
            if lanes is not None:
                self._demand_lanes(group, register, lanes if register >= SCALAR_BASE else lanes & group.mask, what)

    def demand_stored(self, group: Group, register: int, lanes: np.ndarray) -> None:
        """Raises `Fault` if a register is uninitialised in one of the lanes (given by their indices) that store it."""
        unset = self.unset.get(register)
        if unset is not None:
            stored = np.zeros(group.lanes, bool)
            stored[lanes] = True
            self._demand_lanes(group, register, unset & stored, "is stored")

    def spill(self, group: Group, place: int, row: int, count: int, lanes: np.ndarray | None) -> None:
        """Records that ``count`` registers, starting with ``row``, are stored to scratch memory at dword ``place``. ``lanes`` is
        None if all lanes are active.
        """
        on = np.ones(group.lanes, bool) if lanes is None else group.mask
        for i in range(count):
            before = self.scratch.get(place + i, all_lanes(group.lanes))
            self.scratch[place + i] = np.where(on, self._unset_in(group, [row + i]), before)

    def reload(self, group: Group, place: int, row: int, count: int) -> None:
        """Records that registers are loaded from scratch memory; dwords that were never written are uninitialised."""
        self.loaded = {row + i: self.scratch.get(place + i, all_lanes(group.lanes)) for i in range(count)}

    def _demand_lanes(self, group: Group, register: int, unset: np.ndarray, what: str) -> None:
        if unset.any():
            name = name_of(register, group.machine.launch.program.assembly.vgprs)
            lane = int(unset.argmax())
            where = f"lane {lane % WAVE} of wave {int(group.wave[lane // WAVE])}"
            raise Fault("uninitialised", f"{name} was never written in {where}, and {what}")

    def _spread(self, group: Group, bound: Bound) -> np.ndarray | dict[int, np.ndarray] | None:
        """Returns the uninitialised lanes of an instruction's results: one array for all destinations, or one array per
        register."""
        unset = self.unset
        sources = [r for r in bound.reads if r in unset]
        if not sources:
            return None
        lanes = bound.extra.get("lanes")
        if lanes == "read" and sources[0] < SCALAR_BASE:
            return self._of_lane(group, sources[0], np.broadcast_to(bound.extra["lane"](group), group.waves))
        if lanes == "first":
            first = group.mask.reshape(group.waves, WAVE).argmax(axis=1)
            return self._of_lane(group, sources[0], first)
        if "select" in bound.extra:
            return self._of_select(group, bound)
        if "dpp" in bound.extra:
            return self._of_dpp(group, bound)
        if "choice" in bound.extra:
            return self._of_choice(group, bound)
        if "logic" in bound.extra:
            return self._of_logic(group, bound)
        if "parts" in bound.extra:
            return {register: self._unset_in(group, part) for register, part in bound.extra["parts"].items()}
        if bound.moves:
            return self._of_move(group, bound, bound.extra.get("data", bound.reads))
        total = unset[sources[0]]
        for register in sources[1:]:
            total = total | unset[register]
        instruction = _mnemonic(group, bound)
        if instruction.startswith(_LOW_FROM_LOW) and not any(r in unset for r in self._low_sources(group, bound)):
            return dict.fromkeys(bound.writes[1:2], total)
        if bound.unit == "mfma" or (bound.unit in ("salu", "smem") and instruction not in _LANE_WISE):
            total = _whole_waves(group, total)
        elif bound.unit == "valu" and any(w >= SCALAR_BASE for w in bound.writes):
            total = total & group.mask  # compares: bits of inactive lanes are zero
        return total

    def _low_sources(self, group: Group, bound: Bound) -> list[int]:
        """Returns the source registers on which the lower half of a 64-bit result depends."""
        program = group.machine.launch.program
        operands = [parse_operand(text, program.assembly.vgprs) for text in program.instruction_of(bound).operands]
        upper = {operand.ids[1] for operand in operands if operand.count == 2}
        return [register for register in bound.reads if register not in upper]

    def _of_lane(self, group: Group, register: int, lane: np.ndarray) -> np.ndarray:
        chosen = self.unset[register].reshape(group.waves, WAVE)[np.arange(group.waves), lane & 63]
        return np.repeat(chosen, WAVE)

    def _after_write_lane(self, group: Group, bound: Bound, register: int) -> np.ndarray:
        """Returns the state of a register after v_writelane: the written lane gets the state of the scalar, and all other lanes
        keep their state."""
        new = self._unset_in(group, [register]).copy()
        scalar = self._unset_in(group, [r for r in bound.reads if r >= SCALAR_BASE])
        at = np.broadcast_to(bound.extra["lane"](group), group.waves) & 63
        new.reshape(group.waves, WAVE)[np.arange(group.waves), at] = scalar.reshape(group.waves, WAVE).any(axis=1)
        return new

    def _unset_in(self, group: Group, registers: Iterable[int]) -> np.ndarray:
        """Returns the lanes in which any of the registers is uninitialised."""
        total = no_lanes(group.lanes)
        for register in registers:
            if register in self.unset:
                total = total | self.unset[register]
        return total

    def _of_select(self, group: Group, bound: Bound) -> np.ndarray | None:
        first, second, mask = bound.extra["select"]
        none = np.zeros(group.lanes, bool)
        a, b = (next((self.unset[r] for r in o.ids if r in self.unset), none) for o in (first, second))
        choice = next((self.unset[r] for r in mask.ids if r in self.unset), none)
        chosen = group.lane_mask(mask.index) if mask.file == "s" else none
        return np.where(chosen, b, a) | choice

    def _of_dpp(self, group: Group, bound: Bound) -> dict[int, np.ndarray]:
        """Handles DPP: the first source comes from another lane. Lanes that the DPP control excludes keep their state."""
        plan, first, others = bound.extra["dpp"]
        moved, written = dpp_read(group, self._unset_in(group, first).astype(np.uint32), plan)
        unknown = (moved != 0) | self._unset_in(group, others)
        return {register: np.where(written, unknown, self._unset_in(group, [register])) for register in bound.writes}

    def _of_choice(self, group: Group, bound: Bound) -> np.ndarray:
        """Handles a selection by SCC: SCC selects one of two scalars, and the other scalar may be uninitialised."""
        first, second = (self._unset_in(group, ids) for ids in bound.extra["choice"])
        scc = np.repeat(np.broadcast_to(group.scc, group.waves), WAVE)
        return np.where(scc, first, second) | self._unset_in(group, [SCC_ID])

    def _of_logic(self, group: Group, bound: Bound) -> dict[int, np.ndarray]:
        """Handles a logical operation: a result bit is initialised if both operands are initialised, or if one operand alone
        decides the bit: a 0 for and, a 1 for or.
        """
        logic: Logic = bound.extra["logic"]
        unknown_a, unknown_b = (self._unset_in(group, ids) for ids in (logic.first_ids, logic.second_ids))
        unknown = unknown_a | unknown_b
        if logic.decisive_a is not None:
            unknown &= unknown_a | (logic.first(group) != logic.decisive_a)
            unknown &= unknown_b | (logic.second(group) != logic.decisive_b)
        result = dict.fromkeys(logic.result_ids, unknown)
        result[SCC_ID] = _whole_waves(group, unknown)
        for register in logic.saved_ids:  # the previous EXEC
            result[register] = unknown_b
        return result

    def _of_move(self, group: Group, bound: Bound, data: Iterable[int]) -> dict[int, np.ndarray]:
        """Handles a move of bits. Runs the move on a copy of the registers in which the source data are replaced: all ones where a
        lane is uninitialised, 0 where it is initialised. A destination lane is uninitialised if its result in the copy is not 0.

        A scalar source becomes all ones for a wave if any lane of the wave is uninitialised. EXEC is not replaced.
        """
        ghost = Group(group.registers.copy(), group.slot, group.wave, group.machine)
        ghost.s = list(group.s)
        ghost.set_exec(group.mask)
        for register in data:
            lanes = self._unset_in(group, [register])
            if register < SCALAR_BASE:
                ghost.U[register][...] = lanes.astype(np.uint32) * np.uint32(MASK32)
            elif register not in _EXEC_IDS:
                ghost.s[register - SCALAR_BASE] = lanes.reshape(group.waves, WAVE).any(axis=1) * np.int64(MASK32)
        bound.run(ghost)
        return {register: ghost.U[register] != 0 for register in bound.writes if register < SCALAR_BASE}

    # Memory

    def arrived(self, finished: list[Bound | Deferred | Stored]) -> None:
        """Handles operations that a wait has covered: loads are no longer pending, and LDS writes and direct loads have
        completed.
        """
        for bound in finished:
            if not isinstance(bound, Bound):
                continue  # has no destination registers
            for register in bound.writes:
                left = tuple(load for load in self.pending.pop(register, ()) if load is not bound)
                if left:
                    self.pending[register] = left
                elif register not in self.unset:
                    self.watch.discard(register)

    # Divergence and reconvergence

    def select(self, waves: np.ndarray, columns: np.ndarray) -> RegisterShadow:
        part = RegisterShadow()
        part.pending = dict(self.pending)
        part.unset = {r: lanes[columns] for r, lanes in self.unset.items() if lanes[columns].any()}
        part.scratch = {place: lanes[columns] for place, lanes in self.scratch.items()}
        part.watch |= part.pending.keys() | part.unset.keys()
        return part

    @staticmethod
    def join(groups: list[Group]) -> RegisterShadow:
        whole = RegisterShadow()
        for group in groups:
            for register, loads in group.shadow.pending.items():
                known = whole.pending.get(register, ())
                whole.pending[register] = (*known, *(load for load in loads if load not in known))
        for register in {r for g in groups for r in g.shadow.unset}:
            whole.unset[register] = np.concatenate([g.shadow._unset_in(g, [register]) for g in groups])
        for place in {p for g in groups for p in g.shadow.scratch}:
            parts = [g.shadow.scratch.get(place, all_lanes(g.lanes)) for g in groups]
            whole.scratch[place] = np.concatenate(parts)
        whole.watch |= whole.pending.keys() | whole.unset.keys()
        return whole


def _whole_waves(group: Group, lanes: np.ndarray) -> np.ndarray:
    """Returns all lanes of those waves that contain any of the given lanes."""
    return np.repeat(lanes.reshape(group.waves, WAVE).any(axis=1), WAVE)


def _mnemonic(group: Group, bound: Bound) -> str:
    return group.machine.launch.program.mnemonic_of(bound)


def _describe(group: Group, bound: Bound) -> str:
    instruction = group.machine.launch.program.instruction_of(bound)
    return f"{instruction.text} ({instruction.location or f'assembly line {instruction.line}'})"


# Values of `LocalShadow.owner` for a byte, besides 0 (readable by all waves) and wave + 1 (written by the wave since the barrier).
# _NEVER: never written. _FLYING: a direct load in flight will write the byte. _SEVERAL: several waves wrote it since the barrier.
# _UNPUBLISHED: see `LocalShadow`.
_NEVER, _FLYING, _SEVERAL, _UNPUBLISHED = 255, 254, 253, 100


class LocalShadow:
    """The sanitizer's state of the LDS of a batch of workgroups.

    Attributes:
        owner: uint8 per byte, see the constants above. ``_UNPUBLISHED + wave``: the wave wrote the byte before the barrier without
            waiting.
        readers, writers: uint8 [waves, bytes], 1 if a wave read or wrote the byte since the barrier.
    """

    def __init__(self, local: LocalMemory, waves: int) -> None:
        self.local = local
        self.owner = np.full(len(local.bytes), _NEVER, np.uint8)
        self.readers, self.writers = (np.zeros((waves, len(local.bytes)), np.uint8) for _ in range(2))
        self._dirty = False
        self._owner32, self._readers32, self._writers32 = (x.view(np.uint32) for x in (self.owner, self.readers, self.writers))
        self._probe = np.zeros(len(local.bytes), np.uint8)  # scratch array, for one use at a time
        self._probe32 = self._probe.view(np.uint32)

    def _waves(self, group: Group, lanes: np.ndarray | None) -> np.ndarray:
        waves = np.repeat(group.wave, WAVE)
        return waves if lanes is None else waves[lanes]

    def _bytes(self, addresses: np.ndarray, size: int) -> np.ndarray:
        return addresses[:, None] + np.arange(size)

    def _units(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Returns owners and readers, viewed as the largest words that the accesses consist of (dwords or bytes). Also returns the
        indices of these words, int64 [size / word size, N], and the factor that replicates a byte over a word.
        """
        if size >= 4 and not (addresses & 3).any():
            return self._owner32, self._readers32, (addresses >> 2) + np.arange(size // 4)[:, None], 0x01010101
        return self.owner, self.readers, addresses + np.arange(size)[:, None], 1

    def read(
        self, group: Group, addresses: np.ndarray, lanes: np.ndarray | None, size: int, row: int, move: Move | None = None
    ) -> None:
        """Checks a read into registers, starting with ``row``. ``move`` is the permutation of bytes across lanes of a transposing
        read.
        """
        self._alignment(addresses, size)
        self._dirty = True
        waves = self._waves(group, lanes)
        owners, readers, at, repeat = self._units(addresses, size)
        readers[waves, at] = repeat
        found = owners.take(at)
        if not found.any() or ((found == 0) | (found == (waves + 1) * repeat)).all():
            return
        places = self._bytes(addresses, size)
        found = self.owner[places]
        never = found == _NEVER
        bad = (found != 0) & (found != (waves + 1)[:, None]) & ~never
        bad &= (found != _SEVERAL) | (self.writers[waves[:, None], places] == 0)  # a wave may read bytes that it wrote itself, too
        if bad.any():
            lane, byte = (int(x[0]) for x in np.nonzero(bad))
            raise self._conflict(int(found[lane, byte]), "reads", int(waves[lane]), int(places[lane, byte]))
        if move is not None:
            never = move(never * np.uint8(255)) != 0  # all bits of a byte, because an element may be narrower than a byte
        for i in range(max(1, size // 4)):
            unset = np.zeros(group.lanes, bool)
            unset[slice(None) if lanes is None else lanes] = never[:, 4 * i : 4 * i + 4].any(axis=1)
            group.shadow.loaded[row + i] = unset

    def _conflict(self, owner: int, verb: str, wave: int, place: int) -> Fault:
        at = f"LDS byte {place % self.local.stride:#x}"
        if owner == _FLYING:
            return Fault("wait", f"wave {wave} {verb} {at} before an s_waitcnt vmcnt covers the direct load that writes it")
        if owner == _SEVERAL:
            return Fault("race", f"wave {wave} {verb} {at}, which other waves wrote with no barrier between")
        if owner >= _UNPUBLISHED:
            other = owner - _UNPUBLISHED
            return Fault(
                "wait", f"wave {wave} {verb} {at}, which wave {other} wrote without an s_waitcnt lgkmcnt before the barrier"
            )
        return Fault("race", f"wave {wave} {verb} {at}, which wave {owner - 1} wrote with no barrier between")

    @staticmethod
    def _left(addresses: np.ndarray, waves: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Returns the data that each wave leaves in LDS. If several lanes of a wave write to one address, the last lane's data
        remains. The other lanes may write different data, for example a reduction summed in another order.
        """
        _, place = np.unique(waves.astype(np.int64) << 32 | addresses, return_inverse=True)
        last = np.zeros(len(place), np.int64)
        last[place] = np.arange(len(place))
        return data[last[place]]

    def _before_write(self, addresses: np.ndarray, size: int, waves: np.ndarray, data: np.ndarray) -> None:
        """Checks that no other wave has read these bytes since the barrier, and that other waves have written only the same
        ``data``, uint8 [N, size]. Equal data is no race, because waves with replicated values write equal data to the same
        address."""
        owners, readers, at, repeat = self._units(addresses, size)
        found = owners.take(at)
        if found.any() and not ((found == 0) | (found == _NEVER * repeat) | (found == (waves + 1) * repeat)).all():
            places = self._bytes(addresses, size)
            found = self.owner[places]
            bad = (found != 0) & (found != _NEVER) & (found != (waves + 1)[:, None])
            bad &= (found == _FLYING) | (self.local.bytes[places] != self._left(addresses, waves, data))
            if bad.any():
                lane, byte = (int(x[0]) for x in np.nonzero(bad))
                raise self._conflict(int(found[lane, byte]), "writes", int(waves[lane]), int(places[lane, byte]))
        for wave in range(len(readers)):
            others = readers[wave].take(at).any(axis=0)
            if not others.any():
                continue
            others &= waves != wave
            if others.any():
                self._raise_if_read(addresses[others], size, waves[others], wave)

    def _raise_if_read(self, addresses: np.ndarray, size: int, waves: np.ndarray, reader: int) -> None:
        places = self._bytes(addresses, size)
        read = self.readers[reader][places] != 0
        if read.any():
            lane, byte = (int(x[0]) for x in np.nonzero(read))
            at = f"LDS byte {int(places[lane, byte]) % self.local.stride:#x}"
            raise Fault("race", f"wave {int(waves[lane])} writes {at}, which wave {reader} read with no barrier between")

    def write(self, group: Group, addresses: np.ndarray, lanes: np.ndarray | None, size: int, row: int, values: np.ndarray) -> None:
        """Checks a write of ``values``, uint32 [dwords, N], from registers starting with ``row``, before the write happens."""
        self._alignment(addresses, size)
        if not len(addresses):
            return
        self._dirty = True
        waves = self._waves(group, lanes)
        data = np.ascontiguousarray(values.T).view(np.uint8)[:, :size]
        self._before_write(addresses, size, waves, data)
        owners, _, at, repeat = self._units(addresses, size)
        (self._writers32 if repeat > 1 else self.writers)[waves, at] = repeat
        mine, before = (waves + 1) * repeat, owners.take(at)
        owners[at] = mine
        shared = (before != 0) & (before != mine) & (before != _NEVER * repeat) | (owners.take(at) != mine)
        if shared.any():
            self._share(addresses, size, waves, data)
        for i in range(max(1, size // 4)):
            missing = group.shadow.unset.get(row + i)
            if missing is not None:
                missing = missing if lanes is None else missing[lanes]
                self.owner[self._bytes(addresses[missing] + 4 * i, min(size, 4))] = _NEVER
        group.queue.note(Stored(np.arange(group.lanes) if lanes is None else lanes, addresses, size))

    def _share(self, addresses: np.ndarray, size: int, waves: np.ndarray, data: np.ndarray) -> None:
        """Handles bytes that several waves write in this instruction. The waves' data must agree, and all of them count as writers.

        ``data`` is uint8 [N, size]. The owner of a byte is the wave of the last lane, whose data hardware would store.
        """
        owners, _, at, repeat = self._units(addresses, size)
        stored, writers = (self._probe32, self._writers32) if repeat > 1 else (self._probe, self.writers)
        words = np.ascontiguousarray(self._left(addresses, waves, data)).view(stored.dtype).T
        stored[at] = words
        clash = (stored.take(at) != words) & (owners.take(at) != (waves + 1) * repeat)
        if clash.any():
            unit, lane = (int(x[0]) for x in np.nonzero(clash))
            place = int(at[unit, lane]) * (4 if repeat > 1 else 1)
            raise self._conflict(int(self.owner[place]), "writes", int(waves[lane]), place)
        several = np.count_nonzero(writers[:, at], axis=0) > 1
        owners[at[several]] = _SEVERAL * repeat

    def atomic(self, group: Group, addresses: np.ndarray, lanes: np.ndarray | None, size: int) -> None:
        """Records atomics. Atomics do not race with one another, and all waves may read their results."""
        self._alignment(addresses, size)
        places = self._bytes(addresses, size)
        owners = self.owner[places]
        if (owners == _NEVER).any():
            raise Fault("uninitialised", "an LDS atomic works on bytes that were never written")
        waves = self._waves(group, lanes)
        fine = (owners == 0) | (owners == (waves + 1)[:, None])
        if not fine.all():
            lane, byte = (int(x[0]) for x in np.nonzero(~fine))
            raise self._conflict(int(owners[lane, byte]), "changes", int(waves[lane]), int(places[lane, byte]))

    def depart(self, group: Group, entry: Deferred) -> None:
        """Records the start of a direct load to LDS. No wave may read or write its bytes until the load was waited for."""
        if not len(entry.addresses):
            return
        self._dirty = True
        size, waves = 4 * len(entry.values), self._waves(group, None)[entry.columns]
        self._before_write(entry.addresses, size, waves, np.ascontiguousarray(entry.values.T).view(np.uint8))
        owners, _, at, repeat = self._units(entry.addresses, size)
        owners[at] = _FLYING * repeat

    def arrive(self, group: Group, entry: Deferred) -> None:
        waves = self._waves(group, None)[entry.columns]
        owners, _, at, repeat = self._units(entry.addresses, 4 * len(entry.values))
        owners[at] = (waves + 1) * repeat
        self._dirty = True

    def barrier(self, released: list[Group], full: np.ndarray) -> None:
        """Records a barrier of the workgroups in the slots ``full``. A write is readable by all waves if its wave has waited for
        it.
        """
        if not self._dirty:
            return
        stride = self.local.stride
        slots = [slice(None)] if full.all() else [slice(slot, slot + 1) for slot in np.flatnonzero(full)]
        self._dirty = not full.all()
        owner = self.owner.reshape(-1, stride)
        readers, writers = (x.reshape(len(x), -1, stride) for x in (self.readers, self.writers))
        for slot in slots:
            np.putmask(owner[slot], owner[slot] < _FLYING, 0)
            readers[:, slot] = 0
            writers[:, slot] = 0
        for group in released:
            waves = self._waves(group, None)
            for store in group.queue.stored():
                mine = full[store.addresses // stride]
                owners = (_UNPUBLISHED + waves[store.columns[mine]]).astype(np.uint8)
                self.owner[self._bytes(store.addresses[mine], store.size)] = owners[:, None]
                self._dirty = True

    def _alignment(self, addresses: np.ndarray, size: int) -> None:
        """Checks the alignment of LDS accesses. Accesses of up to 8 bytes must be aligned to their size, larger ones to 16 bytes.
        Compilers ensure this because unaligned access mode is off.
        """
        step = {12: 16, 16: 16}.get(size, size)
        wrong = addresses & (step - 1)
        if wrong.any():
            at = int(addresses[int(wrong.argmax())]) % self.local.stride
            raise Fault("misaligned", f"LDS access of {size} bytes at {at:#x}, which is no multiple of {step}")
