"""Counts what a launch executed, in total and per instruction: instructions, arithmetic, bytes, cache lines, bank conflicts.

Everything is counted per wave: an instruction that a group of 8 waves runs together counts 8. Instruction counts are derived from
the executions of each basic block, so counting costs nothing per instruction. Memory instructions report their addresses
(`global_access`, `local_access`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import numpy as np

from gfx950_emulator.assembly import Instruction
from gfx950_emulator.bank_conflicts import ConflictCache, phase_count
from gfx950_emulator.binding import Bound, split_encoding
from gfx950_emulator.constants import WAVE
from gfx950_emulator.group import Group
from gfx950_emulator.hardware import CACHE_LINE
from gfx950_emulator.memory import GlobalMemory
from gfx950_emulator.program import Program
from gfx950_emulator.trace import BlockTrace

_LINE_BITS = CACHE_LINE.bit_length() - 1


@dataclass(frozen=True)
class Line:
    """One instruction of the kernel, with its counts; see `Counters` for the columns.

    Attributes:
        instruction, unit: the instruction and its execution unit.
        executions: number of wave-instructions.
        flops: floating-point or integer operations of MFMA instructions.
        accesses: number of wave-instructions that accessed global memory in at least one lane.
        bytes, lines, ideal_lines, fresh_lines: global memory traffic, see `Counters`.
        lds_accesses: number of wave-instructions that accessed LDS; ds_read2 and ds_write2 count twice.
        lds_bytes, lds_cycles, lds_conflicts: LDS traffic, see `Counters`.
    """

    instruction: Instruction
    unit: str
    executions: int
    flops: int
    accesses: int
    bytes: int
    lines: int
    ideal_lines: int
    fresh_lines: int
    lds_accesses: int
    lds_bytes: int
    lds_cycles: int
    lds_conflicts: int


_COLUMNS = tuple(field.name for field in fields(Line) if field.name not in ("instruction", "unit", "executions", "flops"))


class Counters:
    """Counts of one launch.

    Attributes:
        program: the kernel.
        block_runs: for each block, by its first instruction, the number of waves that ran it.
        trace: the blocks that each wave ran, for the timing model.
        columns: counts per instruction of the program, int64, by name:

            accesses: number of wave-instructions that accessed global memory.
            bytes: number of bytes that active lanes loaded or stored in range.
            lines: number of 128-byte cache lines that these bytes touch, counted per wave-instruction.
            ideal_lines: number of cache lines that these bytes would touch if the lanes' data were contiguous and aligned.
            fresh_lines: number of cache lines that no earlier instruction of the launch touched. Stores are recorded separately
                from loads and atomics.
            lds_accesses, lds_bytes: like accesses and bytes, for LDS.
            lds_cycles: cycles of the LDS banks, conflicts included. `lds_conflicts`: the part of these cycles that is due to bank
                conflicts.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.block_runs: dict[int, int] = {}
        self.trace = BlockTrace()
        self.columns = {name: np.zeros(len(program.bound), np.int64) for name in _COLUMNS}
        self._device = program.assembly.architecture.device
        self._conflicts = ConflictCache(self._device)
        self._cache_lines: _CacheLines | None = None

    # Called by memory instructions

    def global_access(
        self, bound: Bound, group: Group, addresses: np.ndarray, size: int, room: np.ndarray | None, lanes: np.ndarray | None
    ) -> None:
        """Counts an access to global memory: a load, store or atomic.

        Args:
            bound: the instruction.
            group: the waves that execute the instruction.
            addresses: int64 [N], byte addresses of the active lanes.
            size: bytes per lane.
            room: int64 [N], bytes from each address to the end of the buffer's range; None without a range.
            lanes: int64 [N], the lanes' indices in the group; None for all lanes.
        """
        waves = (np.arange(group.lanes) if lanes is None else lanes) // WAVE
        if room is not None:
            inside = room >= min(size, 4)
            if not inside.all():
                addresses, waves = addresses[inside], waves[inside]
        if not len(addresses):
            return
        if self._cache_lines is None:
            self._cache_lines = _CacheLines(group.machine.memory)
        cache_lines = self._cache_lines
        first, last = cache_lines.of(addresses), cache_lines.of(addresses + (size - 1))
        owners = waves.astype(np.int64)
        if (first != last).any():
            first, owners = np.concatenate([first, last]), np.concatenate([owners, owners])
        pairs = np.unique(owners << 48 | first)
        lanes_of_wave = np.bincount(waves)
        lanes_of_wave = lanes_of_wave[lanes_of_wave > 0]
        store = bound.memory is not None and bound.memory.direction == "store"
        index, columns = self._index(bound), self.columns
        columns["accesses"][index] += len(lanes_of_wave)
        columns["bytes"][index] += len(addresses) * size
        columns["lines"][index] += len(pairs)
        columns["ideal_lines"][index] += int((-(-lanes_of_wave * size // CACHE_LINE)).sum())
        columns["fresh_lines"][index] += cache_lines.touch(np.unique(first), store)

    def local_access(self, bound: Bound, group: Group, offsets: np.ndarray, size: int, lanes: np.ndarray | None) -> None:
        """Counts an access to LDS.

        Args:
            bound, group, lanes: as in `global_access`.
            offsets: int64 [N], byte offsets in the workgroup's LDS.
            size: bytes per lane.
        """
        access = bound.memory
        direction = "load" if access is None else access.direction
        store = direction != "load" or (access is not None and access.space == "dma")
        whole = np.full(group.lanes, -1, np.int64)
        whole[slice(None) if lanes is None else lanes] = offsets
        by_wave = whole.reshape(-1, WAVE)
        by_wave = by_wave[(by_wave >= 0).any(axis=1)]
        if not len(by_wave):
            return
        conflicts = int(self._conflicts.cycles(by_wave, size, store, direction == "atomic").sum())
        index, columns = self._index(bound), self.columns
        columns["lds_accesses"][index] += len(by_wave)
        columns["lds_bytes"][index] += len(offsets) * size
        columns["lds_conflicts"][index] += conflicts
        columns["lds_cycles"][index] += conflicts + phase_count(size, store, self._device) * len(by_wave)

    def _index(self, bound: Bound) -> int:
        return self.program.instruction_of(bound).index

    # Results

    def executions(self) -> np.ndarray:
        """Returns the number of wave-instructions of each instruction, int64."""
        counts = np.zeros(len(self.program.bound), np.int64)
        for start, runs in self.block_runs.items():
            counts[start : self.program.blocks[start].end] += runs
        return counts

    def lines(self) -> list[Line]:
        """Returns one `Line` for each instruction that ran, in program order."""
        counts, result = self.executions(), []
        for index in np.flatnonzero(counts).tolist():
            bound, executed = self.program.bound[index], int(counts[index])
            operation = bound.extra.get("mfma")
            flops = executed * operation.flops if operation is not None else 0
            columns = {name: int(column[index]) for name, column in self.columns.items()}
            result.append(Line(self.program.assembly.instructions[index], bound.unit, executed, flops, **columns))
        return result

    @property
    def instructions(self) -> int:
        """Total number of wave-instructions."""
        return int(self.executions().sum())

    def by_mnemonic(self) -> Counter[str]:
        """Returns the number of wave-instructions by mnemonic, without encoding suffix."""
        counts: Counter[str] = Counter()
        for line in self.lines():
            counts[split_encoding(line.instruction.mnemonic)[0]] += line.executions
        return counts

    def by_unit(self) -> Counter[str]:
        """Returns the number of wave-instructions by execution unit, as in `Bound.unit`."""
        counts: Counter[str] = Counter()
        for line in self.lines():
            counts[line.unit] += line.executions
        return counts

    def total(self, column: str, direction: str | None = None) -> int:
        """Returns the sum of one column of `columns`.

        Args:
            column: the column's name.
            direction: count only instructions of this `Access.direction`: ``"load"``, ``"store"`` or ``"atomic"``.
        """
        values = self.columns[column]
        if direction is None:
            return int(values.sum())
        chosen = [i for i, b in enumerate(self.program.bound) if b.memory is not None and b.memory.direction == direction]
        return int(values[chosen].sum())

    @property
    def mfma_flops(self) -> int:
        """Number of floating-point (or integer) operations of MFMA instructions."""
        return sum(line.flops for line in self.lines())

    @property
    def memory_bytes(self) -> int:
        """The minimum memory traffic with ideal caches: every loaded or stored cache line once."""
        return self.total("fresh_lines") * CACHE_LINE

    @property
    def coalescing(self) -> float:
        """Coalescing efficiency: the number of cache lines that contiguous data would touch, divided by the number of touched cache
        lines; 1 is best.
        """
        lines = self.total("lines")
        return self.total("ideal_lines") / lines if lines else 1.0


class _CacheLines:
    """Numbers the cache lines of a launch's memory, and records which lines were loaded and which were stored.

    Memory blocks on the device are aligned to cache lines, unlike on the host. Line bounds are therefore relative to the start of
    the block that contains a tensor.
    """

    def __init__(self, memory: GlobalMemory) -> None:
        first: dict[int, int] = {}
        count = 0
        self._starts = np.array([a.start for a in memory.allocations], np.int64)
        self._blocks = np.array([a.block or a.start for a in memory.allocations], np.int64)
        for allocation, block in zip(memory.allocations, self._blocks.tolist(), strict=True):
            # The allocations of one memory block are adjacent.
            before = first.setdefault(block, count)
            count = before + ((allocation.end - 1 - block) >> _LINE_BITS) + 1
        self._first = np.array([first[block] for block in self._blocks.tolist()], np.int64)
        self._seen = np.zeros((2, count), bool)

    def of(self, addresses: np.ndarray) -> np.ndarray:
        """Returns the numbers of the cache lines that contain these byte addresses, int64. Invalid addresses get an arbitrary
        number, because their access will be rejected.
        """
        place = np.maximum(np.searchsorted(self._starts, addresses, "right") - 1, 0)
        lines = self._first[place] + ((addresses - self._blocks[place]) >> _LINE_BITS)
        return lines.clip(0, self._seen.shape[1] - 1)

    def touch(self, lines: np.ndarray, store: bool) -> int:
        """Marks distinct cache lines as loaded or stored. Returns the number of lines that are new."""
        seen = self._seen[int(store)]
        fresh = int(np.count_nonzero(~seen[lines]))
        seen[lines] = True
        return fresh
