"""A simple model of time on an MI355X, or on an MI300X for kernels for gfx942.

**Use its results only for ratios between kernels, never as absolute times.**

The model's input is what the emulator executed: the blocks that each wave of a workgroup ran, and the cache lines and LDS cycles
that the counters found for each memory instruction. The results are the times of a workgroup, of a CU with as many workgroups as
fit, and of the grid. `gfx950_emulator.hardware` has all figures and their sources.

The CU (compute unit)
---------------------
- Waves are distributed over 4 SIMDs. Every 4 cycles, a SIMD issues at most one instruction of each category (vector ALU with MFMA,
  vector memory, scalar with scalar memory, LDS, branch). These instructions are from different waves, the oldest wave first. Waits,
  barriers, s_nop and the like take an issue slot of their wave, but no execution unit.
- A wave issues in order. Vector instructions hold their SIMD's ALU for 4 cycles, transcendental ones 8 (16 on MI300X), conversions
  16. MFMAs hold the matrix core for their passes and the issue port for 4 cycles. An instruction that reads the result of a longer
  instruction waits for this result. After an MFMA, it waits 5 issue slots longer (4 on MI300X). An MFMA that accumulates onto
  another MFMA's result waits only for that MFMA's passes.
- LDS: the banks process one phase per cycle, plus the conflict cycles. Each pair of SIMDs has a port, with 128 bytes per cycle (64
  on MI300X) for loads, and 64 for stores and their addresses. Results arrive 48 cycles later (52 on MI300X).
- Vector memory: one address pipeline (4 cycles per instruction), 64 bytes per cycle from L2 and 32 to it (53 and 26 on MI300X).
  Loads fetch whole cache lines. Stores send only the bytes that they write, at most one line per cycle. Latency is interpolated
  between L2 and HBM, by the fraction of lines that the launch touches for the first time in that instruction. The L1 cache is not
  modelled: every line comes from L2.
- s_waitcnt waits for the operations that it names: vector memory and LDS in order, scalar loads all at once. s_barrier waits for
  the waves of the workgroup.
- Not modelled: instruction fetch, register bank conflicts, the queues of LDS and memory pipelines (there is no back-pressure), TLB,
  contention of atomics, launch overhead, clocks that drop under load.

The grid
--------
Workgroups are assigned to the CUs round-robin. The heaviest workgroup is simulated alone, and together with copies of itself. The
times of other workgroups are proportional to the number of instructions that they executed. The time of a CU is the maximum of two
times: of all its workgroups at the rate of full occupancy, and of its heaviest workgroup alone. The time of the grid is the maximum
of its slowest CU's time and the time that HBM needs at peak bandwidth to move every cache line once.

Ideal and achievable
--------------------
`Prediction.seconds` is this ideal time. `Prediction.achievable_seconds` adds unavoidable costs: 2.3 us per launch, and 6.6 TB/s
instead of 8 TB/s for HBM (MI300X: 4.26 instead of 5.3). Both times were compared with times measured on MI355X for the published
attention kernels, at GPT-OSS's 64 heads of 64 and 8 KV heads in bf16 (`hardware.MEASURED`; `benchmarks/timing_model.py` of the AMD
wheel predicts these calls):

==================  ========  ========  ==========
microseconds        measured  ideal     achievable
==================  ========  ========  ==========
decode 16 x 1024    9.74      5.4       10.6
decode 16 x 2048    16.2      9.3       15.7
decode 16 x 4096    25.3      17.7      25.9
decode 16 x 8192    45.3      34.5      46.2
prefill 16 x 1024   317       182       184
prefill 2 x 8192    1462      1127      1129
==================  ========  ========  ==========

For memory-bound kernels, the achievable time has an error of at most 10%. Compute-bound kernels take 1.3 to 1.7 times as long as
either time, because clocks under load and instruction fetch are not modelled. No times measured on MI300X were compared.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gfx950_emulator import hardware as hw
from gfx950_emulator.binding import Bound
from gfx950_emulator.constants import WAVE
from gfx950_emulator.counters import Counters
from gfx950_emulator.occupancy import Occupancy, occupancy

if TYPE_CHECKING:
    from gfx950_emulator.driver import LaunchReport

NOTICE = "Modelled time is for ratios between kernels, never for absolute times."

_CATEGORY = {
    "valu": "valu", "trans": "valu", "mfma": "valu", "vmem": "vmem", "salu": "scalar", "smem": "scalar", "lds": "lds",
    "branch": "branch",
}  # fmt: skip
_CONVERSION = re.compile(
    r"v_cvt_(f32_(i32|u32|f16|fp8|bf8)|(i32|u32|f16)_f32|(rpi|flr)_i32_f32|pk_(fp8|bf8)_f32|pk_f32_(fp8|bf8)|sr_(fp8|bf8)_f32|scalef32_)"
)
# The causes for which a wave may wait, in the order of the result tables.
CAUSES = ("MFMA", "VALU", "scalar", "LDS", "global memory", "scalar memory", "barrier", "issue")
_SATURATED = 0.85  # an execution unit that limits the CU is still idle at times, because of barriers and waves of different lengths
_PENDING = 512  # if there are more pending registers than this, those that are ready are dropped
_UNIT_CAUSE = {"valu": "VALU", "trans": "VALU", "mfma": "MFMA", "vmem": "global memory", "lds": "LDS", "smem": "scalar memory"}


@dataclass(frozen=True)
class Simulation:
    """The result of simulating workgroups on one CU.

    Attributes:
        workgroups: number of workgroups that ran together.
        cycles: cycles until the last wave ended.
        spent: wave-cycles by cause, see `CAUSES`. An instruction's issue time counts for its execution unit, and its waiting time
            for the cause of the wait. The sum is the lifetime of all waves.
        busy: fraction of the cycles that execution units were busy: ``"MFMA"``, ``"VALU"`` (mean of the SIMDs), ``"LDS"``,
            ``"global memory"``.
        simulated: the fraction of the trace that was simulated; cycles are extrapolated from it.
    """

    workgroups: int
    cycles: float
    spent: dict[str, float]
    busy: dict[str, float]
    simulated: float = 1.0

    @property
    def bound_by(self) -> str:
        """The limit of the CU. If an execution unit is busy nearly all the time, the limit is its throughput. Otherwise, the limit
        is the cause on which waves spend most time. If the busiest execution unit is busy at least half of the time, the text also
        names this execution unit, because it is the next limit.
        """
        unit = max(self.busy, key=lambda name: self.busy[name])
        if self.busy[unit] >= _SATURATED:
            return f"{unit} throughput"
        cause = max(self.spent, key=lambda name: self.spent[name])
        latency = f"{cause} latency" if cause in ("MFMA", "LDS", "global memory", "scalar memory") else cause
        if self.busy[unit] < 0.5:
            return latency
        return f"{latency} ({'' if unit == cause else f'{unit} '}{self.busy[unit]:.0%} busy)"


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a launch. Only ratios between kernels are meaningful.

    Attributes:
        kernel: the kernel's name.
        workgroup: the linear id of the simulated workgroup, the heaviest one.
        alone, full: simulations of that workgroup: alone on a CU, and with as many copies of itself as fit and as the grid has.
        occupancy: the occupancy of a CU.
        compute_seconds: the time of the slowest CU.
        memory_seconds: the time that HBM needs to move every cache line once, at peak bandwidth.
        device: the device whose time is predicted.
    """

    kernel: str
    workgroup: int
    alone: Simulation
    full: Simulation
    occupancy: Occupancy
    compute_seconds: float
    memory_seconds: float
    device: hw.Device = hw.MI355X

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def achievable_seconds(self) -> float:
        """The time with the measured HBM bandwidth and the cost of a launch."""
        memory = self.memory_seconds * self.device.hbm_bytes_per_second / self.device.hbm_achieved_bytes_per_second
        return hw.LAUNCH_SECONDS + max(self.compute_seconds, memory)

    @property
    def cycles(self) -> float:
        """The time `seconds` in cycles of the peak clock."""
        return self.seconds * self.device.clock_hz

    @property
    def bound_by(self) -> str:
        """The limit of the launch: HBM bandwidth, or the limit of a CU (`Simulation.bound_by`)."""
        return "HBM bandwidth" if self.memory_seconds >= self.compute_seconds else self.full.bound_by


def predict(report: LaunchReport, *, device: hw.Device | None = None, max_instructions: int = 300_000) -> Prediction:
    """Predicts the time of a launch that was executed with counters.

    Args:
        report: the launch's report.
        device: the device whose constants the model uses, by default the emulated one. `gfx950_emulator.ranges` has others.
        max_instructions: the largest number of wave-instructions to simulate; the time of a longer trace is extrapolated.

    Raises:
        ValueError: the launch was executed without counters, or a workgroup does not fit on a CU.
    """
    counters: Counters | None = report.counters
    if counters is None:
        raise ValueError(f"{report.kernel} was executed without counters: use emulated_gfx950(counters=True)")
    fits = occupancy(report.program.assembly, report.waves, report.lds)
    if not fits.workgroups:
        raise ValueError(f"a workgroup of {report.kernel} does not fit on a compute unit: its {fits.limiter} allow none")
    device = device or report.program.assembly.architecture.device
    costs = instruction_costs(counters, device)
    weights = {start: sum(costs[i].weight for i in range(start, block.end)) for start, block in report.program.blocks.items()}
    work = counters.trace.work(weights)
    heaviest = min(work, key=lambda workgroup: (-work[workgroup], workgroup))
    traces = instructions_of(counters, heaviest)
    units = device.compute_units
    per_unit = Counter(workgroup % units for workgroup in work)
    resident = min(fits.workgroups, max(per_unit.values()))
    alone = simulate(costs, [traces], max_instructions)
    full = alone if resident == 1 else simulate(costs, [traces] * resident, max_instructions)
    load: dict[int, float] = {}
    for workgroup, amount in work.items():
        load[workgroup % units] = load.get(workgroup % units, 0.0) + amount / work[heaviest]
    # A CU with fewer workgroups than fit runs them all together. Its time is between the two simulated times.
    cycles = max(max(alone.cycles, total * _rate(alone, full, min(resident, per_unit[unit]))) for unit, total in load.items())
    return Prediction(
        report.kernel,
        heaviest,
        alone,
        full,
        fits,
        cycles / device.clock_hz,
        counters.memory_bytes / device.hbm_bytes_per_second,
        device,
    )


def _rate(alone: Simulation, full: Simulation, workgroups: int) -> float:
    """Returns the cycles per workgroup if ``workgroups`` workgroups run together on a CU. The total time is interpolated linearly
    between the simulation of one workgroup alone and that of a full CU."""
    if full.workgroups == 1:
        return alone.cycles
    step = (full.cycles - alone.cycles) / (full.workgroups - 1)
    return (alone.cycles + step * (workgroups - 1)) / workgroups


# Instruction costs


@dataclass(frozen=True)
class Cost:
    """An instruction's cost in the simulation.

    Attributes:
        category: issue category; empty for instructions that need no execution unit.
        cause: the cause in `Simulation.spent` to which the instruction's issue time counts.
        turns: number of issue slots that the instruction takes from its wave.
        valu, mfma: cycles for which the instruction holds its SIMD's vector ALU or matrix core.
        latency: cycles until the instruction's register results can be read, if more than one issue slot; otherwise 0.
        reads, writes: registers for whose results the instruction may have to wait.
        chained: for an MFMA, the registers of C and D.
        banks, port: cycles of LDS banks and of the SIMD pair's port.
        pipeline: cycles of the vector memory pipeline.
        counter: ``"vmcnt"`` or ``"lgkmcnt"`` if the instruction increments one of these. `delay`: cycles until the counter
            decrements.
        scalar: whether the instruction is a scalar load, which may overtake other operations.
        wait: the limits (vmcnt, lgkmcnt) of s_waitcnt; None for a counter that it does not name.
        kind: ``"barrier"``, ``"end"``, ``"wait"`` or empty.
    """

    category: str = ""
    cause: str = "issue"
    turns: int = 1
    valu: int = 0
    mfma: int = 0
    latency: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    chained: frozenset[int] = frozenset()
    banks: float = 0.0
    port: float = 0.0
    pipeline: float = 0.0
    counter: str = ""
    delay: float = 0.0
    scalar: bool = False
    wait: tuple[int | None, int | None] = (None, None)
    kind: str = ""

    @property
    def weight(self) -> float:
        """The instruction's weight, in cycles, in the total work of a workgroup."""
        return max(self.turns * hw.SLOT, self.valu, self.mfma, self.banks, self.pipeline)


def instruction_costs(counters: Counters, device: hw.Device | None = None) -> list[Cost]:
    """Returns the cost of each instruction of a program, from the instruction and from the counters of its memory accesses.
    ``device``: see `predict`."""
    executions = counters.executions()
    device = device or counters.program.assembly.architecture.device
    return [_cost(counters, index, bound, int(executions[index]), device) for index, bound in enumerate(counters.program.bound)]


def _cost(counters: Counters, index: int, bound: Bound, executions: int, device: hw.Device) -> Cost:
    instruction, unit = counters.program.assembly.instructions[index], bound.unit
    mnemonic = instruction.mnemonic
    if unit in ("barrier", "end"):
        return Cost(cause="barrier" if unit == "barrier" else "issue", kind=unit)
    if unit == "wait":
        return Cost(kind="wait", wait=(bound.extra.get("vmcnt"), bound.extra.get("lgkmcnt")))
    if unit == "nop":
        return Cost(turns=_idle_turns(mnemonic, instruction.operands))
    cause = _UNIT_CAUSE.get(unit, "scalar")
    common: dict[str, Any] = {"category": _CATEGORY[unit], "cause": cause, "reads": bound.reads, "writes": bound.writes}
    if unit in ("valu", "trans"):
        busy = _vector_cycles(mnemonic, unit, device.transcendental_cycles, device.conversion_cycles)
        return Cost(**common, valu=busy, latency=busy if busy > hw.SLOT else 0)
    if unit == "mfma":
        operation = bound.extra["mfma"]
        first = operation.a_registers + operation.b_registers
        chained = frozenset(bound.reads[first : first + operation.c_registers])
        passes = hw.SLOT * operation.passes
        latency = passes + hw.SLOT * device.mfma_result_slots
        return Cost(**common, valu=hw.SLOT, mfma=passes, latency=latency, chained=chained)
    if unit == "branch":
        return Cost(**common, turns=hw.BRANCH_SLOTS)
    memory = bound.memory
    if memory is None:
        return Cost(**common)
    found = {name: int(column[index]) / max(executions, 1) for name, column in counters.columns.items()}
    banks, port = _lds_cycles(bound, found, device)
    if unit == "lds":
        return Cost(**common, banks=banks, port=port, counter="lgkmcnt", delay=device.lds_latency)
    if unit == "smem":
        return Cost(**common, counter="lgkmcnt", delay=device.scalar_cache_miss, scalar=True)
    # Scratch accesses have no line counts. The lanes' dwords are interleaved, so waves access whole lines, which stay in L2.
    lines = memory.size * WAVE / hw.CACHE_LINE if memory.space == "scratch" else found["lines"]
    if memory.direction == "store":
        # A store sends the bytes that it writes, and one request for each cache line.
        delay: float = device.l2_latency
        cycles: float = max(lines, memory.size * WAVE / device.l2_write_bytes_per_cycle)
    else:
        fresh = found["fresh_lines"] / lines if lines else 0.0
        delay = device.l2_latency + fresh * (device.hbm_latency - device.l2_latency)
        cycles = lines * hw.CACHE_LINE / device.l2_read_bytes_per_cycle
    pipeline = max(hw.ADDRESS_CYCLES, cycles)
    return Cost(**common, banks=banks, pipeline=pipeline, counter="vmcnt", delay=delay)


def _idle_turns(mnemonic: str, operands: tuple[str, ...]) -> int:
    """Returns the number of issue slots of an instruction that only delays its wave (CDNA3 ISA document, S_NOP: up to 16 slots;
    S_SLEEP: 64 cycles each).
    """
    if mnemonic in ("s_nop", "s_sleep") and operands:
        amount = int(operands[0], 0)
        return amount + 1 if mnemonic == "s_nop" else max(1, amount * 64 // hw.SLOT)
    return 1


@lru_cache(maxsize=1024)
def _vector_cycles(mnemonic: str, unit: str, transcendental: int, conversion: int) -> int:
    if unit == "trans":
        return hw.TRANSCENDENTAL_F64_CYCLES if "_f64" in mnemonic else transcendental
    return conversion if _CONVERSION.match(mnemonic) else hw.VALU_CYCLES


def _lds_cycles(bound: Bound, found: dict[str, float], device: hw.Device) -> tuple[float, float]:
    """Returns the average cycles of the LDS banks and of the port, per execution of an instruction."""
    memory = bound.memory
    if memory is not None and memory.direction == "permute":
        # Data passes the port once in each direction, and passes the crossbar like 4-byte reads.
        return 1.0, hw.LDS_PORT_ADDRESS_CYCLES + 4 * WAVE / device.lds_port_store_bytes
    size = found["lds_bytes"]
    if memory is not None and memory.direction == "load":
        return found["lds_cycles"], max(hw.LDS_PORT_ADDRESS_CYCLES, size / device.lds_port_load_bytes)
    return found["lds_cycles"], hw.LDS_PORT_ADDRESS_CYCLES + size / device.lds_port_store_bytes


def instructions_of(counters: Counters, workgroup: int) -> list[list[int]]:
    """Returns, for each wave of a workgroup, the indices of the instructions that the wave executed, in order."""
    spans = {start: range(start, block.end) for start, block in counters.program.blocks.items()}
    waves = counters.trace.waves_of(workgroup)
    return [[index for start in waves[wave] for index in spans[start]] for wave in sorted(waves)]


# The simulation


@dataclass
class _Wave:
    """A wave, at some instruction of its trace."""

    number: int
    simd: int
    workgroup: int
    trace: list[int]
    at: int = 0
    free: float = 0.0  # earliest time at which the wave can issue its next instruction
    last: float = 0.0  # the time up to which the wave's time is accounted for
    # register -> (ready at, ready at for an MFMA that accumulates, cause of wait)
    pending: dict[int, tuple[float, float, str]] = field(default_factory=dict)
    vector: deque[float] = field(default_factory=deque)  # completion times of outstanding vector memory operations, oldest first
    local: deque[tuple[float, bool]] = field(default_factory=deque)  # LDS and scalar operations: (done at, a scalar load?)


class _Unit:
    """The state of a simulated CU that runs workgroups."""

    def __init__(self, costs: list[Cost], workgroups: list[list[list[int]]]) -> None:
        self.costs = costs
        self.waves: list[_Wave] = []
        for workgroup, traces in enumerate(workgroups):
            for trace in traces:
                number = len(self.waves)
                self.waves.append(_Wave(number, number % hw.SIMDS, workgroup, trace))
        self.slots: list[dict[str, float]] = [
            dict.fromkeys(("valu", "vmem", "scalar", "lds", "branch"), 0.0) for _ in range(hw.SIMDS)
        ]
        self.valu, self.mfma = [0.0] * hw.SIMDS, [0.0] * hw.SIMDS
        self.banks, self.ports, self.pipeline = 0.0, [0.0] * hw.LDS_PORTS, 0.0
        self.busy = dict.fromkeys(("MFMA", "VALU", "LDS", "global memory"), 0.0)
        self.spent = dict.fromkeys(CAUSES, 0.0)
        self.alive = Counter(wave.workgroup for wave in self.waves)
        self.arrived: dict[int, list[tuple[_Wave, float]]] = {}
        self.end = 0.0

    def earliest(self, wave: _Wave, cost: Cost) -> tuple[float, str]:
        """Returns the earliest time at which a wave can issue its next instruction, and the cause of the wait."""
        time, cause = wave.free, "issue"
        if wave.pending:
            # MFMA results are written in order, so a result register may be overwritten at once.
            for register in cost.reads if cost.mfma else (*cost.reads, *cost.writes):
                entry = wave.pending.get(register)
                if entry is None:
                    continue
                ready, early, why = entry
                if cost.mfma and register in cost.chained:
                    ready = early
                if ready > time:
                    time, cause = ready, why
        if cost.kind == "wait":
            return self._waited(wave, cost, time, cause)
        if cost.counter == "vmcnt" and len(wave.vector) >= hw.VMCNT_LIMIT and wave.vector[0] > time:
            time, cause = wave.vector[0], "global memory"
        elif cost.counter == "lgkmcnt" and len(wave.local) >= hw.LGKMCNT_LIMIT and wave.local[0][0] > time:
            time, cause = wave.local[0][0], "LDS"
        if cost.category:
            simd = wave.simd
            slot = self.slots[simd][cost.category]
            if slot > time:
                time, cause = slot, "issue"
            if cost.valu and self.valu[simd] > time:
                time, cause = self.valu[simd], "VALU"
            if cost.mfma and self.mfma[simd] > time:
                time, cause = self.mfma[simd], "MFMA"
        return time, cause

    def _waited(self, wave: _Wave, cost: Cost, time: float, cause: str) -> tuple[float, str]:
        vector, local = cost.wait
        if vector is not None and len(wave.vector) > vector:
            done = wave.vector[len(wave.vector) - vector - 1]
            if done > time:
                time, cause = done, "global memory"
        if local is not None and len(wave.local) > local:
            # Scalar loads return in any order. So while a scalar load is outstanding, only a wait for all operations is meaningful.
            finished = list(wave.local)[: len(wave.local) - local]
            for done, scalar in finished:
                if done > time:
                    time, cause = done, "scalar memory" if scalar else "LDS"
        return time, cause

    def issue(self, wave: _Wave, cost: Cost, time: float, cause: str) -> None:
        """Issues a wave's next instruction at a time that is a multiple of a slot."""
        wave.at += 1
        self.spent[cause] += time - wave.last
        wave.free = wave.last = time + cost.turns * hw.SLOT
        self.spent[cost.cause] += cost.turns * hw.SLOT
        if len(wave.pending) > _PENDING:
            wave.pending = {register: entry for register, entry in wave.pending.items() if entry[0] > time}
        if cost.category:
            self._occupy(wave, cost, time)
        elif cost.kind == "wait":
            self._retire(wave, cost)
        if cost.latency:
            entry = (time + cost.latency, time + (cost.mfma or cost.latency), cost.cause)
            wave.pending.update(dict.fromkeys(cost.writes, entry))

    def _retire(self, wave: _Wave, cost: Cost) -> None:
        vector, local = cost.wait
        while vector is not None and len(wave.vector) > vector:
            wave.vector.popleft()
        while local is not None and len(wave.local) > local:
            wave.local.popleft()

    def _occupy(self, wave: _Wave, cost: Cost, time: float) -> None:
        simd = wave.simd
        self.slots[simd][cost.category] = time + hw.SLOT
        if cost.valu:
            self.valu[simd] = time + cost.valu
            self.busy["VALU"] += cost.valu
        if cost.mfma:
            self.mfma[simd] = time + cost.mfma
            self.busy["MFMA"] += cost.mfma
        done = time
        if cost.pipeline:
            start = max(time, self.pipeline)
            self.pipeline = done = start + cost.pipeline
            self.busy["global memory"] += cost.pipeline
        if cost.banks or cost.port:
            # Banks and ports are separate queues; an access is done when both have processed it.
            port = simd * hw.LDS_PORTS // hw.SIMDS
            self.banks, self.ports[port] = max(time, self.banks) + cost.banks, max(time, self.ports[port]) + cost.port
            self.busy["LDS"] += max(cost.banks, cost.port / hw.LDS_PORTS)
            done = max(done, self.banks, self.ports[port])
        if cost.counter == "vmcnt":
            done += cost.delay
            if wave.vector and wave.vector[-1] > done:
                done = wave.vector[-1]  # operations complete in order
            wave.vector.append(done)
            if len(wave.vector) > hw.VMCNT_LIMIT:
                wave.vector.popleft()
        elif cost.counter == "lgkmcnt":
            wave.local.append((done + cost.delay, cost.scalar))
            if len(wave.local) > hw.LGKMCNT_LIMIT:
                wave.local.popleft()

    def run(self, max_instructions: int) -> int:
        """Runs until all waves ended or ``max_instructions`` were issued; returns the number of issued instructions."""
        queue = [(0.0, wave.number) for wave in self.waves]
        issued = 0
        while queue and issued < max_instructions:
            key, number = heapq.heappop(queue)
            wave = self.waves[number]
            cost = self.costs[wave.trace[wave.at]]
            time, cause = self.earliest(wave, cost)
            time = -(-time // hw.SLOT) * hw.SLOT
            if time > key:
                heapq.heappush(queue, (time, number))
                continue
            self.issue(wave, cost, time, cause)
            issued += 1
            if cost.kind == "barrier":
                self.arrived.setdefault(wave.workgroup, []).append((wave, wave.free))
                self._release(wave.workgroup, queue)
            elif cost.kind == "end" or wave.at == len(wave.trace):
                self.end = max(self.end, wave.free)
                self.alive[wave.workgroup] -= 1
                self._release(wave.workgroup, queue)
            else:
                heapq.heappush(queue, (wave.free, number))
        # The memory pipeline may still hold stores, or loads for which no wave waits.
        self.end = max(self.end, self.pipeline, *(wave.free for wave in self.waves))
        return issued

    def _release(self, workgroup: int, queue: list[tuple[float, int]]) -> None:
        arrived = self.arrived.get(workgroup, [])
        if not arrived or len(arrived) < self.alive[workgroup]:
            return
        together = max(time for _, time in arrived)
        for wave, time in arrived:
            self.spent["barrier"] += together - time
            wave.free = wave.last = together
            if wave.at < len(wave.trace):
                heapq.heappush(queue, (together, wave.number))
            else:
                self.alive[workgroup] -= 1
        self.arrived[workgroup] = []


def simulate(costs: list[Cost], workgroups: list[list[list[int]]], max_instructions: int = 300_000) -> Simulation:
    """Simulates workgroups on one CU.

    Args:
        costs: the cost of each instruction of the program.
        workgroups: for each workgroup, for each of its waves, the instructions that the wave executes.
        max_instructions: number of instructions after which the time is extrapolated.
    """
    unit = _Unit(costs, workgroups)
    issued = unit.run(max_instructions)
    share = issued / max(1, sum(len(wave.trace) for wave in unit.waves))
    cycles = max(unit.end, 1.0)
    busy = {name: float(value) / cycles / (hw.SIMDS if name in ("MFMA", "VALU") else 1) for name, value in unit.busy.items()}
    spent = {name: float(value) / share for name, value in unit.spent.items()}
    return Simulation(len(workgroups), cycles / share, spent, busy, round(share, 6))
