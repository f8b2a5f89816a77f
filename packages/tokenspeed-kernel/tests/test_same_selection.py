"""Runs ``ci/same_selection.py`` with few processes and one operator: fresh processes must select the same kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "ci" / "same_selection.py"


@pytest.mark.slow
def test_fresh_processes_select_the_same_kernels() -> None:
    command = [sys.executable, str(PROGRAM), "--processes", "3", "--operator", "rmsnorm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 processes made the same " in done.stdout
