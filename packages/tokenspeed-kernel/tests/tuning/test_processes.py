"""Tuners that are killed in the middle, and tuners at the same time: nothing is lost, nothing is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent / "lab_modules" / "harness.py"


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "TOKENSPEED_KERNEL_TUNED": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(HARNESS), *words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("turns", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_tuner_that_is_killed_leaves_a_table(tmp_path: Path, turns: int) -> None:
    assert run(tmp_path / "tuned", "kill", str(turns)).startswith(f"killed {turns} times")


@pytest.mark.parametrize(("tuners", "entries"), [(2, 25), pytest.param(4, 100, marks=pytest.mark.slow)])
def test_tuners_at_the_same_time_lose_nothing(tmp_path: Path, tuners: int, entries: int) -> None:
    done = run(tmp_path / "tuned", "together", str(tuners), str(entries))
    assert done == f"{3 + tuners * entries} entries of {tuners} tuners, {tuners * entries} results in one\n"
