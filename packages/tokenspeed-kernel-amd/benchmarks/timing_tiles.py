"""The modelled time of a prefill, from the cost of its query tiles.

A small prefill is executed in which each workgroup computes at most one tile. The costs of its tiles give the compute time of a
large prefill, whose tiles are distributed among the CUs as the kernel distributes them. A ``case`` is a `timing_model.Case`.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cycles:
    """Cycles of the workgroups of a prefill.

    Attributes:
        idle: cycles of a workgroup without a tile.
        busy: cycles of a workgroup with one tile, by the tile's index in its sequence.
    """

    idle: float
    busy: list[float]

    def tile(self, place: int) -> float:
        """Returns the cycles that a tile adds to a workgroup. For indices beyond the executed ones, the cycles are extrapolated."""
        last, middle = len(self.busy) - 1, len(self.busy) // 2
        beyond = max(0, place - last)
        step = (self.busy[last] - self.busy[middle]) / (last - middle) if beyond else 0.0
        return self.busy[min(place, last)] - self.idle + beyond * step


@dataclass(frozen=True)
class Tiles:
    """The cost of the query tiles of a prefill.

    Attributes:
        rows: number of queries per tile.
        resident: number of workgroups that fit on a CU.
        alone: cycles of a workgroup that runs alone on a CU.
        together: cycles per workgroup if as many copies as fit run on one CU.
    """

    rows: int
    resident: int
    alone: Cycles
    together: Cycles


def tiles_of(case: Any, launch: Any, fits: Any, device: Any) -> tuple[Tiles, Any]:
    """Returns the cost of a launch's tiles, and the simulation of the longest tiles together on one CU.

    Args:
        case: the call, which has so few tiles that no workgroup computes two, and some workgroups compute none.
        launch: the launch.
        fits: the occupancy: how many workgroups of the launch fit on a CU.
        device: the device with the model's constants, a `gfx950_emulator.hardware.Device`.
    """
    from gfx950_emulator import timing

    counters = launch.counters
    costs = timing.instruction_costs(counters, device)
    spans = {start: costs[start : block.end] for start, block in launch.program.blocks.items()}
    work = counters.trace.work({start: sum(cost.weight for cost in some) for start, some in spans.items()})
    products = counters.trace.work({start: sum(cost.mfma for cost in some) for start, some in spans.items()})
    order = sorted(work, key=lambda workgroup: (work[workgroup], workgroup))
    busy = [workgroup for workgroup in order if products[workgroup]]
    columns = case.sequences * case.heads
    rows = case.length * columns // len(busy)
    places = case.length // rows
    if rows * places != case.length or places * columns != len(busy) or len(busy) == len(order):
        found = f"{len(busy)} of {len(order)} workgroups have MMAs"
        raise RuntimeError(f"{launch.kernel}: {found}, for {columns} columns of {case.length} queries: not one tile each")
    alone, together = [], []
    for chosen in (order[0], *(busy[place * columns + columns // 2] for place in range(places))):
        traces = timing.instructions_of(counters, chosen)
        alone.append(timing.simulate(costs, [traces]).cycles)
        full = timing.simulate(costs, [traces] * fits.workgroups)
        together.append(full.cycles / fits.workgroups)
    return Tiles(rows, fits.workgroups, Cycles(alone[0], alone[1:]), Cycles(together[0], together[1:])), full


def own_tiles(case: Any, tiles: Tiles, workers: int) -> dict[int, list[int]]:
    """Returns the indices of each workgroup's tiles, in the order in which `gfx950/attention/prefill_device.py` computes them.

    Each XCD computes its own heads. The tiles of an XCD, those with most keys first, are assigned to its CUs in rounds. Every
    second round assigns in reverse order. The workgroups of a CU handle the CU's rounds alternately.
    """
    from gfx950_emulator import hardware as hw

    xcds = math.gcd(case.heads, 8)
    columns, workers = case.sequences * case.heads // xcds, workers // xcds
    count = case.length // tiles.rows
    units = min(workers, hw.MI355X.compute_units // xcds)
    found: dict[int, list[int]] = {}
    for worker in range(workers):
        unit, turn, mine = worker % units, worker // units, []
        while (rank := turn * units + (unit if turn % 2 == 0 else units - 1 - unit)) < count * columns:
            mine.append(count - 1 - rank // columns)
            turn += workers // units
        found |= {worker * xcds + xcd: mine for xcd in range(xcds)}
    return found


def prefill_seconds(case: Any, tiles: Tiles, own_order: bool, device: Any) -> float:
    """Returns the compute time of a prefill on the whole device in seconds: the time of the CU with the most work."""
    units = device.compute_units
    count = case.length // tiles.rows
    if own_order:
        xcds = math.gcd(case.heads, 8)
        most, each = count * case.sequences * case.heads // xcds, units // xcds
        workers = xcds * min(most, each) * min(tiles.resident, -(-most // each))
        alone, load = [0.0] * units, [0.0] * units
        for workgroup, places in own_tiles(case, tiles, workers).items():
            unit = workgroup % units
            alone[unit] = max(alone[unit], tiles.alone.idle + sum(map(tiles.alone.tile, places)))
            load[unit] += tiles.together.idle + sum(map(tiles.together.tile, places))
    else:
        # A CU starts as many workgroups as fit, or fewer if there are not enough tiles.
        each = min(tiles.resident, -(-count * case.sequences * case.heads // units))
        loads = [(each * tiles.together.idle, unit) for unit in range(units)]
        alone = [0.0] * units
        for place in reversed(range(count)):
            for _ in range(case.sequences * case.heads):
                least, unit = heapq.heappop(loads)
                alone[unit] = max(alone[unit], tiles.alone.idle + tiles.alone.tile(place))
                heapq.heappush(loads, (least + tiles.together.tile(place), unit))
        load = [cycles for cycles, _ in sorted(loads, key=lambda entry: entry[1])]
    return max(map(max, alone, load)) / device.clock_hz
