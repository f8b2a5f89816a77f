"""Runs tuners in processes that are killed, and concurrent tuners.

``harness.py kill TURNS`` kills TURNS tuners. ``harness.py together TUNERS ENTRIES`` runs TUNERS tuners at the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lab
import torch

from tokenspeed_kernel.workbench import tuned
from tokenspeed_kernel.workbench.tuned.store import parse_table
from tokenspeed_kernel_base.platform import cpu_platform

DEVICE = tuned.Device.of(cpu_platform())


def made_up(rows: int, kernel: str = "gone") -> tuned.Entry:
    """Returns an entry whose microseconds equal its rows, so a reader can check that the entry is intact."""
    result = tuned.Result(kernel, {"rows": rows}, float(rows), None, "f" * 16)
    traits = {"width": 4, "padding": "x" * 500}
    return tuned.Entry("testing.other", "x: float32", traits, {"rows": rows}, DEVICE, (result,), "", dict(tuned.toolchain()))


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child


def check(path: Path) -> int:
    """Reads the file and asserts that every entry is one that a tuner wrote. Returns the number of entries."""
    entries = parse_table(path.read_bytes()) if path.exists() else []
    for entry in entries:
        if entry.operator == "testing.other":
            assert entry == dataclasses.replace(made_up(entry.sizes["rows"]), results=entry.results)
            assert all(result.us == entry.sizes["rows"] == result.config["rows"] for result in entry.results)
            continue
        rows = entry.sizes["rows"]
        least = {"steady": 400, "growing": 20 * rows}
        assert entry.best.kernel == {2: "growing", 64: "steady"}[rows], entry
        assert all(result.us >= least[result.kernel] for result in entry.results), entry
    return len(entries)


def kill(turns: int) -> None:
    path = tuned.user_table(DEVICE)
    assert path is not None

    def work(writing: int) -> None:
        for rows in range(1, 10_000):
            tuned.record(made_up(rows))
            os.write(writing, b".")
            if rows % 20 == 10:
                lab.tune_all(budget_s=0.01)

    chance = random.Random(turns)
    most = 0
    for _ in range(turns):
        reading, writing = os.pipe()
        child = fork(functools.partial(work, writing))
        os.close(writing)
        for _ in range(chance.randrange(1, 40)):
            os.read(reading, 1)  # an entry was written
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it was still at work"
        most = max(most, check(path))
    assert most > 2, "some were killed after they had written"
    lab.tune_all()
    assert check(path) >= 2
    assert (lab.serving(2), lab.serving(64)) == ("growing", "steady")
    left = sorted(file.name for file in path.parent.iterdir())
    assert left == sorted([path.name, path.name + ".lock"]), left
    print(f"killed {turns} times, {check(path)} entries")


def together(tuners: int, entries: int) -> None:
    path = tuned.user_table(DEVICE)
    assert path is not None

    def work(tuner: int) -> Callable[[], None]:
        def run() -> None:
            lab.tune_all(budget_s=0.05)
            for index in range(entries):
                assert tuned.record(made_up(1 + tuner * entries + index)) == path
                assert tuned.record(made_up(100_000, f"kernel_{tuner}_{index}")) == path
            lab.tune_all(budget_s=0.05)

        return run

    children = [fork(work(tuner)) for tuner in range(tuners)]
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert check(path) == 2 + tuners * entries + 1
    (shared,) = [entry for entry in tuned.read_table(path) if entry.sizes["rows"] == 100_000]
    assert {result.kernel for result in shared.results} == {f"kernel_{t}_{i}" for t in range(tuners) for i in range(entries)}
    print(f"{check(path)} entries of {tuners} tuners, {len(shared.results)} results in one")


if __name__ == "__main__":
    torch.set_num_threads(1)
    lab.use_clock()
    lab.register("steady", "growing")
    {"kill": kill, "together": together}[sys.argv[1]](*map(int, sys.argv[2:]))
