"""Tests tuners that are killed and concurrent tuners: no entry may be lost or wrong."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from processes import Process, start_python

from tokenspeed_kernel.workbench.watching import load

HARNESS = Path(__file__).parent / "lab_modules" / "harness.py"


CALLS = 2000
CALLING = f"import torch, tokenspeed_kernel as tk; x = torch.ones(2, 8); [tk.silu_and_mul(x) for _ in range({CALLS})]"


def start(program: list[str], **variables: Path) -> Process | subprocess.Popen[str]:
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return start_python(*program, stdout=subprocess.PIPE, env=environment)


def finish(process: Process | subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = process.stdout.read()
    assert process.wait() == 0
    return said


def run(folder: Path, *words: str) -> str:
    return finish(start([str(HARNESS), *words], TOKENSPEED_KERNEL_TUNED=folder))


@pytest.mark.parametrize("turns", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_tuner_that_is_killed_leaves_a_table(tmp_path: Path, turns: int) -> None:
    assert run(tmp_path / "tuned", "kill", str(turns)).startswith(f"killed {turns} times")


@pytest.mark.parametrize(("tuners", "entries"), [(2, 25), pytest.param(4, 100, marks=pytest.mark.slow)])
def test_tuners_at_the_same_time_lose_nothing(tmp_path: Path, tuners: int, entries: int) -> None:
    done = run(tmp_path / "tuned", "together", str(tuners), str(entries))
    assert done == f"{3 + tuners * entries} entries of {tuners} tuners, {tuners * entries} results in one\n"


@pytest.mark.slow
def test_two_tuners_and_four_captures_in_one_folder(tmp_path: Path) -> None:
    turns = 10
    tuners = start([str(HARNESS), "together", "2", "150"], TOKENSPEED_KERNEL_TUNED=tmp_path)
    for _ in range(turns):
        for process in [start(["-c", CALLING], TOKENSPEED_KERNEL_CAPTURE_SHAPES=tmp_path / "shapes") for _ in range(4)]:
            finish(process)
    assert finish(tuners) == f"{3 + 2 * 150} entries of 2 tuners, {2 * 150} results in one\n"
    assert [record["count"] for record in load(tmp_path / "shapes").records] == [4 * CALLS * turns]
