"""Tests the marker ``sampled``, which the repository's `conftest.py` implements."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest
long = pytest.mark.slow

@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [*range(9), pytest.param(9, marks=long)])
def test_many(n): pass

@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", range(4))
def test_one(n): pass

@pytest.mark.sampled(5)
@pytest.mark.parametrize("n", range(2))
def test_few(n): pass

@pytest.mark.parametrize("n", range(2))
def test_all(n): pass
"""


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("not slow", {"many": [0, 4, 8], "one": [0], "few": [0, 1], "all": [0, 1]}),
        ("slow", {"many": [1, 2, 3, 5, 6, 7, 9], "one": [1, 2, 3]}),
    ],
)
def test_the_other_cases_are_slow(tmp_path: Path, expression: str, wanted: dict[str, list[int]]) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    sampled(n)\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", expression, "-p", "no:cacheprovider"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    names = [f"test_it.py::test_{name}[{n}]" for name, numbers in wanted.items() for n in numbers]
    assert [line for line in shown.splitlines() if "::" in line] == names
