"""Runs ``ci/same_selection.py`` with few processes and one operator: fresh processes must select the same kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "ci" / "same_selection.py"


@pytest.mark.slow
def test_fresh_processes_select_the_same_kernels(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, str(PROGRAM), "--processes", "3", "--operator", "rmsnorm", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 processes made the same " in done.stdout
    found = json.loads(output.read_text())
    assert found["processes"] == 3
    assert found["operators"] == 1
    assert found["selections"] > len(found["platforms"])


def test_a_server_makes_the_arguments_of_all_cases() -> None:
    """Without its processes, a server has imported no operator yet."""
    program = "import same_selection; print(len(same_selection._arguments_of_cases(['rmsnorm'])))"
    done = subprocess.run([sys.executable, "-c", program], cwd=PROGRAM.parent, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 5
