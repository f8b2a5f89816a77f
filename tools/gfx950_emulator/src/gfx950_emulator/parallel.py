"""Runs one launch in several processes.

Workgroups are independent of one another unless they use global atomics. So batches of workgroups can run in forked child
processes. A child process sees the tensors as they were before the launch. It records its stores, and the parent process repeats
them. If workgroups store to the same address without atomics, which is a race on hardware too, the last batch wins.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gfx950_emulator import machine
from gfx950_emulator.memory import GlobalMemory
from kernel_emulation.errors import EmulationError


class RecordedMemory(GlobalMemory):
    """Global memory that records stores, in order."""

    def __init__(self, memory: GlobalMemory) -> None:
        super().__init__(memory.allocations)
        self.stores: list[tuple[np.ndarray, np.ndarray, int]] = []

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        super().store(addresses, values)
        self.stores.append((addresses, values.copy(), 0))

    def store_small(self, addresses: np.ndarray, values: np.ndarray, size: int) -> None:
        super().store_small(addresses, values, size)
        self.stores.append((addresses, values.copy(), size))

    def repeat(self, stores: list[tuple[np.ndarray, np.ndarray, int]]) -> None:
        for addresses, values, size in stores:
            if size:
                super().store_small(addresses, values, size)
            else:
                super().store(addresses, values)


def can_divide(launch: machine.Launch) -> bool:
    """Returns whether the launch may be divided among processes: it has several batches, and no global atomics, tracer or
    counters."""
    batches = -(-int(np.prod(launch.grid)) // launch.batch_size)
    atomics = any(
        bound.memory is not None and bound.memory.space in ("global", "flat", "scalar") and bound.memory.direction == "atomic"
        for bound in launch.program.bound
    )
    watched = launch.counters is not None or launch.tracer is not None
    return batches > 1 and not atomics and not watched and hasattr(os, "fork")


def execute(launch: machine.Launch, jobs: int) -> machine.Tally:
    """Executes a launch as `machine.execute` does, but in up to ``jobs`` processes. Raises the first error of a child process."""
    if jobs <= 1 or not can_divide(launch):
        return machine.execute(launch)
    total, size = int(np.prod(launch.grid)), launch.batch_size
    batches = [range(first, min(first + size, total)) for first in range(0, total, size)]
    context = multiprocessing.get_context("fork")
    children = []
    for job in range(min(jobs, len(batches))):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(launch, batches[job::jobs], send), daemon=True)
        process.start()
        send.close()
        children.append((process, receive))
    results = []
    for process, receive in children:
        try:
            results.append(pickle.loads(receive.recv_bytes()))
        except EOFError:
            process.join()
            name = launch.program.assembly.name
            raise RuntimeError(f"a process that executed {name} ended with code {process.exitcode}") from None
        process.join()
    failures = [result for result in results if isinstance(result, EmulationError)]
    if failures:
        raise failures[0]
    memory = RecordedMemory(launch.memory)
    done: dict[int, list[Any]] = {}
    for job, (_, stores) in enumerate(results):
        for i, batch in enumerate(stores):
            done[job + i * jobs] = batch
    for _, batch in sorted(done.items()):
        memory.repeat(batch)
    return sum((tally for tally, _ in results), machine.Tally())


def _child(launch: machine.Launch, batches: list[range], send: Connection) -> None:
    memory = RecordedMemory(launch.memory)
    mine = replace(launch, memory=memory)
    tally, stores = machine.Tally(), []
    try:
        for batch in batches:
            tally += machine.execute(mine, batch)
            stores.append(memory.stores)
            memory.stores = []
        result: object = (tally, stores)
    except EmulationError as error:
        result = error
    send.send_bytes(pickle.dumps(result))
    send.close()
