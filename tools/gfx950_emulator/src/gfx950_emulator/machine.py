"""Executes a kernel's workgroups in batches. Waves with the same control flow form a group, and execute in lockstep.

**Lockstep.** All waves of a batch of workgroups begin as one group. A divergent branch splits the group; groups at the same
instruction are joined again. The group that is furthest behind (smallest program counter) runs first. So other groups wait where
control flow joins.

**Barriers.** A wave that reaches ``s_barrier`` waits until every other wave of its workgroup has reached a barrier or ended.

**Spinning.** A group that executes many backward branches is checked at regular intervals. If its state equals that of the previous
check, and nothing was stored in between, the group waits for a store of another wave, and other groups run first. If all remaining
groups spin, nothing can wake them, and the launch ends with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

import numpy as np

from gfx950_emulator.assembly import Instruction
from gfx950_emulator.constants import FP16_OVFL, MODE_DEFAULT, WAVE
from gfx950_emulator.group import Group
from gfx950_emulator.hardware import XCDS
from gfx950_emulator.local_memory import LocalMemory
from gfx950_emulator.memory import Fault, GlobalMemory
from gfx950_emulator.program import Block, Program
from kernel_emulation.errors import EmulationError, SanitizerError

# Target number of lanes per batch: large enough that numpy's overhead per call is small compared with its cost per lane.
BATCH_LANES = 4096
# User SGPRs in order, with the number of registers of each (llvm.org/docs/AMDGPUUsage.html, "SGPR register set up order")
_USER_SGPRS = (
    ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2), ("dispatch_id", 2),
    ("flat_scratch_init", 2), ("private_segment_size", 1),
)  # fmt: skip
_SLICE = 8192  # number of backward branches after which other runnable groups are scheduled
_SPIN_CHECK = 512  # number of backward branches from one check for a spinning group to the next


@dataclass(frozen=True)
class Tally:
    """Counts of executed instructions.

    Attributes:
        dispatched: number of executed instructions; an instruction counts once for all waves of its group.
        waves: number of executed instructions; an instruction counts once per wave.
    """

    dispatched: int = 0
    waves: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.dispatched + other.dispatched, self.waves + other.waves)


@dataclass
class Launch:
    """A kernel launch.

    Attributes:
        program: the kernel.
        grid: number of workgroups in x, y, z.
        waves: number of waves per workgroup.
        lds: bytes of LDS per workgroup.
        kernarg: the kernel argument segment, uint8; the kernel receives its address.
        memory: global memory, with the tensors of the launch.
        counters: `gfx950_emulator.counters.Counters`, or None.
        tracer: the `gfx950_emulator.trace.InstructionTrace` for this launch, or None.
    """

    program: Program
    grid: tuple[int, int, int]
    waves: int
    lds: int
    kernarg: np.ndarray
    memory: GlobalMemory
    sanitize: bool = True
    counters: Any = None
    batch_lanes: int = BATCH_LANES
    tracer: Any = None

    @property
    def batch_size(self) -> int:
        """Number of workgroups that are executed together."""
        return max(1, self.batch_lanes // (self.waves * WAVE))


@dataclass
class Machine:
    """State that groups share while a batch of workgroups runs."""

    launch: Launch
    memory: GlobalMemory
    local: LocalMemory
    waves_per_group: int
    workgroups: np.ndarray  # linear workgroup id of each slot
    counters: Any
    mode: int = MODE_DEFAULT  # initial MODE of waves
    progress: int = 0  # increased by every store
    executed: int = 0  # number of executed instructions; an instruction counts once for all waves of its group
    executed_by_waves: int = 0
    _scratch: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint32))

    def clock(self) -> int:
        return self.executed

    def xcc_of(self, slots: np.ndarray) -> np.ndarray:
        """Returns the XCC ids of workgroups, which are dispatched to the XCDs round-robin."""
        return self.workgroups[slots] % XCDS

    def scratch_rows(self, offset: int, dwords: int) -> np.ndarray:
        """Returns a view of the scratch memory of all lanes of the batch: uint32 [dwords, lanes]."""
        first = offset // 4
        if first + dwords > len(self._scratch):
            lanes = len(self.workgroups) * self.waves_per_group * WAVE
            grown = np.zeros((first + dwords + 16, lanes), np.uint32)
            grown[: len(self._scratch)] = self._scratch[:, :lanes] if self._scratch.size else 0
            self._scratch = grown
        return self._scratch[first : first + dwords]


def execute(launch: Launch, workgroups: range | None = None) -> Tally:
    """Runs all or some of the launch's workgroups; tensors are written in place.

    Raises:
        SanitizerError, UnknownInstruction, EmulationError: see `kernel_emulation.errors`.
    """
    total = int(np.prod(launch.grid))
    todo = workgroups if workgroups is not None else range(total)
    size = launch.batch_size
    stalled: list[Batch] = []
    tally = Tally()
    for first in range(0, len(todo), size):
        batch = Batch(launch, np.array(todo[first : first + size], np.int64))
        if batch.run():
            tally += batch.tally
        else:
            stalled.append(batch)
    # Workgroups that wait for workgroups of later batches continue after those batches have run.
    while stalled:
        before = [batch.machine.progress for batch in stalled]
        finished = [batch for batch in stalled if batch.run()]
        tally = sum((batch.tally for batch in finished), tally)
        if not finished and before == [batch.machine.progress for batch in stalled]:
            raise stalled[0].deadlock()
        stalled = [batch for batch in stalled if batch not in finished]
    return tally


class Batch:
    """Workgroups that run together, and the groups that their waves form."""

    def __init__(self, launch: Launch, workgroups: np.ndarray) -> None:
        self.launch = launch
        self.program = launch.program
        local = LocalMemory(len(workgroups), launch.lds, self.program.assembly.architecture)
        self.machine = Machine(launch, launch.memory, local, launch.waves, workgroups, launch.counters)
        descriptor = self.program.assembly.descriptor
        if descriptor.get("fp16_overflow"):
            self.machine.mode |= FP16_OVFL
        group = self._first_group(workgroups)
        if launch.sanitize:
            from gfx950_emulator.sanitizer import LocalShadow, RegisterShadow

            local.shadow = LocalShadow(local, launch.waves)
            group.shadow = RegisterShadow.at_entry(group, self.initialised)
        self.ready: list[Group] = [group]
        self.waiting: list[Group] = []  # groups at a barrier
        self.later: list[Group] = []  # groups that were preempted after many loop iterations, because others could run
        self.spinning: list[tuple[Group, int, int]] = []  # (group, value of `progress` that the group saw, end of its loop)
        self.alive = np.full(len(workgroups), launch.waves)
        counters = launch.counters
        self._block_runs: dict[int, int] = {} if counters is None else counters.block_runs
        self._trace = None if counters is None else counters.trace

    def _first_group(self, workgroups: np.ndarray) -> Group:
        """Makes the group of all waves, with registers as hardware leaves them at entry (llvm.org/docs/AMDGPUUsage.html, "Initial
        Kernel Execution State").
        """
        launch, descriptor = self.launch, self.program.assembly.descriptor
        count, waves = len(workgroups), launch.waves
        registers = np.zeros((max(self.program.vectors, 1), count * waves * WAVE), np.uint32)
        slot, wave = np.repeat(np.arange(count), waves), np.tile(np.arange(waves), count)
        group = Group(registers, slot, wave, self.machine)
        thread = np.tile(np.arange(waves * WAVE, dtype=np.uint32), count)
        registers[0] = thread  # work-item id x; y and z are 0 in bits 10 and 20
        if not descriptor.get("user_sgpr_kernarg_segment_ptr"):
            raise EmulationError("the kernel takes no argument segment", self.program.assembly.name)
        initialised, at = [], 0
        for name, size in _USER_SGPRS:
            if not descriptor.get(f"user_sgpr_{name}"):
                continue
            if name == "kernarg_segment_ptr":
                group.set_s64(at, int(launch.kernarg.ctypes.data))
                initialised += [at, at + 1]
            at += size
        # Hardware may preload arguments into the remaining user SGPRs. The code at the entry point loads these arguments again, for
        # firmware that does not preload. So the emulator need not preload arguments.
        at = descriptor.get("user_sgpr_count", at)
        x, y, _ = launch.grid
        ids = (workgroups % x, workgroups // x % y, workgroups // (x * y))
        for axis, values in zip("xyz", ids, strict=True):
            if descriptor.get(f"system_sgpr_workgroup_id_{axis}", axis == "x"):
                values = np.repeat(values, waves)
                group.s[at] = int(values[0]) if (values == values[0]).all() else values.astype(np.int64)
                initialised.append(at)
                at += 1
        self.initialised = initialised
        group.pc = self.program.assembly.entry
        return group

    # Scheduling

    def run(self) -> bool:
        """Runs until all waves ended, or until the remaining waves wait for values that no wave of the batch will store.

        Returns:
            Whether all waves ended.
        """
        self.ready += [group for group, *_ in self.spinning]
        self.spinning.clear()
        with np.errstate(all="ignore"):
            while self.ready or self.later or self.waiting or self.spinning:
                self._wake()
                if not self.ready:
                    self.ready, self.later = self.later, self.ready
                if not self.ready:
                    if self.spinning:
                        return False
                    raise self._stuck()
                self.ready.sort(key=lambda g: -g.pc)
                group = self.ready.pop()
                same = [g for g in self.ready if (g.pc, g.mode) == (group.pc, group.mode)]
                if same:
                    self.ready = [g for g in self.ready if g not in same]
                    group = Group.join([group, *same])
                self._run_group(group, min((g.pc for g in self.ready), default=None))
        return True

    def _wake(self) -> None:
        """Resumes the spinning groups if something was stored since they were found to spin."""
        progress = self.machine.progress
        self.ready += [g for g, seen, _ in self.spinning if seen != progress]
        self.spinning = [entry for entry in self.spinning if entry[1] == progress]

    @property
    def tally(self) -> Tally:
        return Tally(self.machine.executed, self.machine.executed_by_waves)

    def deadlock(self) -> SanitizerError:
        polls = [self._poll(group.pc, end) for group, _, end in self.spinning]
        places = ", ".join(sorted({self._where(poll) for poll in polls}))
        message = f"{sum(g.waves for g, *_ in self.spinning)} waves wait for a value that nobody stores; they stand at {places}"
        return self._sanitizer_error("deadlock", message, polls[0])

    def _poll(self, start: int, end: int) -> int:
        """Returns the index of the instruction with which a spin loop polls memory: the loop's first memory read; without reads,
        its first instruction."""
        for index in range(start, end):
            memory = self.program.bound[index].memory
            if memory is not None and memory.direction in ("load", "atomic") and memory.space != "scratch":
                return index
        return start

    def _stuck(self) -> SanitizerError:
        places = ", ".join(sorted({self._where(g.pc - 1) for g in self.waiting}))
        message = f"a barrier that not all waves of the workgroup reach; waves wait at {places}"
        return self._sanitizer_error("barrier-divergence", message, self.waiting[0].pc - 1)

    def _where(self, index: int) -> str:
        instruction = self.program.assembly.instructions[index]
        return instruction.location or f"assembly line {instruction.line}"

    def _run_group(self, group: Group, horizon: int | None) -> None:
        """Runs a group until it reaches or passes another group's program counter (``horizon``), reaches a barrier, or ends."""
        blocks, machine, runs = self.program.blocks, self.machine, self._block_runs
        sanitize, trace, tracer = group.shadow is not None, self._trace, self.launch.tracer
        back, seen = 0, None
        while True:
            block = blocks[group.pc]
            start = block.start
            if tracer is not None:
                self._run_traced(group, block, tracer)
            elif sanitize:
                self._run_checked(group, block)
            else:
                operations = iter(block.body)
                try:
                    for operation in operations:
                        operation(group)
                except Fault as fault:
                    raise self._error(fault, start + len(block.body) - length_hint(operations) - 1) from None
            machine.executed += block.end - start
            machine.executed_by_waves += (block.end - start) * group.waves
            runs[start] = runs.get(start, 0) + group.waves
            if trace is not None:
                trace.block(start, group)
            close = block.close
            if close is None:
                group.pc = block.next
                if horizon is not None and group.pc >= horizon:
                    self.ready.append(group)
                    return
                continue
            unit = close.unit
            if unit == "branch":
                target: Any = close.target  # None for a jump through a register
                if close.jump is not None:
                    to = close.jump(group)
                    if isinstance(to, np.ndarray):
                        self._scatter(group, to, block.end - 1)
                        return
                    group.pc = self._entered(to, block.end - 1)
                elif close.condition is None:
                    group.pc = target
                else:
                    if sanitize:
                        self._demand(group, block.end - 1)
                    taken = close.condition(group)
                    if isinstance(taken, np.ndarray):
                        if taken.all() or not taken.any():
                            taken = bool(taken[0])
                        else:
                            self._split(group, taken, target, block.next)
                            return
                    group.pc = target if taken else block.next
                if group.pc <= start:
                    back += 1
                    if back % _SPIN_CHECK == 0:
                        state = (start, machine.progress, group.registers.tobytes(), _scalars(group))
                        if state == seen:
                            self.spinning.append((group, machine.progress, block.end))
                            return
                        seen = state
                    if back == _SLICE and (horizon is not None or self.later):
                        self.later.append(group)
                        return
                if horizon is not None and group.pc >= horizon:
                    self.ready.append(group)
                    return
            elif unit == "barrier":
                group.pc = block.next
                self.waiting.append(group)
                self._release()
                return
            else:  # s_endpgm
                machine.progress += 1
                np.subtract.at(self.alive, group.slot, 1)
                self._release()
                return

    def _entered(self, target: int, index: int) -> int:
        if target not in self.program.blocks:
            instruction = self.program.assembly.instructions[index]
            raise EmulationError("a jump to where no code begins", self.program.assembly.name, instruction)
        return target

    def _scatter(self, group: Group, targets: np.ndarray, index: int) -> None:
        """Splits a group whose waves jump to different targets into one group per target."""
        for target in np.unique(targets):
            part = group.select(np.flatnonzero(targets == target))
            part.pc = self._entered(int(target), index)
            self.ready.append(part)

    def _split(self, group: Group, taken: np.ndarray, target: int, following: int) -> None:
        for waves, pc in ((np.flatnonzero(taken), target), (np.flatnonzero(~taken), following)):
            part = group.select(waves)
            part.pc = pc
            self.ready.append(part)

    def _release(self) -> None:
        """Releases the waves of a workgroup when all of its live waves have reached a barrier."""
        if not self.waiting:
            return
        arrived = np.zeros(len(self.alive), np.int64)
        for group in self.waiting:
            np.add.at(arrived, group.slot, 1)
        full = (arrived == self.alive) & (arrived > 0)
        if not full.any():
            return
        still = []
        released: list[Group] = []
        for group in self.waiting:
            go = full[group.slot]
            if go.all():
                released.append(group)
            elif not go.any():
                still.append(group)
            else:
                released.append(group.select(np.flatnonzero(go)))
                still.append(group.select(np.flatnonzero(~go)))
        self.waiting = still
        self._check_barriers(released, full)
        if self.machine.local.shadow is not None:
            self.machine.local.shadow.barrier(released, full)
        self.ready += released

    def _check_barriers(self, released: list[Group], full: np.ndarray) -> None:
        """Checks that no wave of a released workgroup has ended. Waves may wait at different barrier instructions, because hardware
        only counts arrivals. Pipelines in which half of the waves run one barrier ahead rely on this.
        """
        if self.launch.sanitize and (self.alive[full] != self.launch.waves).any():
            message = "a wave of the workgroup ended without this barrier"
            raise self._sanitizer_error("barrier-divergence", message, released[0].pc - 1)

    # Checks

    def _run_checked(self, group: Group, block: Block) -> None:
        shadow, bound = group.shadow, self.program.bound
        watch = shadow.watch
        index = block.start
        try:
            for run, touched, index in block.checked:
                if watch.isdisjoint(touched):
                    run(group)
                else:
                    shadow.around(group, bound[index], run)
        except Fault as fault:
            raise self._error(fault, index) from None

    def _run_traced(self, group: Group, block: Block, tracer: Any) -> None:
        """Runs a block, and passes each executed instruction to the tracer."""
        shadow, index = group.shadow, block.start
        try:
            for run, touched, index in block.checked:
                if shadow is None or shadow.watch.isdisjoint(touched):
                    run(group)
                else:
                    shadow.around(group, self.program.bound[index], run)
                tracer.instruction(self.program, group, index)
        except Fault as fault:
            raise self._error(fault, index) from None
        if block.close is not None:
            tracer.instruction(self.program, group, block.end - 1)

    def _demand(self, group: Group, index: int) -> None:
        bound = self.program.bound[index]
        if not group.shadow.watch.isdisjoint(bound.demands):
            try:
                group.shadow.demand(group, bound)
            except Fault as fault:
                raise self._error(fault, index) from None

    def _error(self, fault: Fault, index: int) -> EmulationError:
        instruction = self.program.assembly.instructions[index]
        if fault.kind in ("exec", "resource"):
            return EmulationError(str(fault), self.program.assembly.name, instruction)
        return self._sanitizer_error(fault.kind, str(fault), index)

    def _sanitizer_error(self, kind: str, message: str, index: int) -> SanitizerError:
        instruction: Instruction = self.program.assembly.instructions[index]
        return SanitizerError(kind, message, self.program.assembly.name, instruction)


def _scalars(group: Group) -> tuple[object, ...]:
    values: list[object] = []
    for index, value in enumerate(group.s):
        if type(value) is int:
            values.append(value)
        else:
            read = group.s32(index) if index < 126 else 0
            values.append(read if type(read) is int else read.tobytes())
    return (*values, group.mask.tobytes())
