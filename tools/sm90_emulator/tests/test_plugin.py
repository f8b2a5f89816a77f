"""Tests the pytest plugin, in a separate pytest process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_emulation
import sm90_emulator

TESTS = """
import pytest
import torch


def test_fixture(emulated_hopper):
    assert torch.cuda.get_device_capability() == (9, 0)
    assert emulated_hopper.launches == []


@pytest.fixture
def made_before():
    return torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.emulated_hopper(multiprocessors=8)
def test_marker_covers_fixtures(made_before):
    assert made_before == 8


@pytest.mark.emulated_hopper(seed=3, counters=True)
def test_settings(emulated_hopper):
    assert emulated_hopper.counters
    assert emulated_hopper.machine.seed == 3


@pytest.mark.emulated_hopper(3)
def test_wrong_marker():
    pass


@pytest.mark.emulated_hopper(sede=3)
def test_wrong_setting():
    pass
"""


def _pytest(path: Path, *arguments: str) -> str:
    """Returns the output of pytest with only this plugin."""
    sources = os.pathsep.join(str(Path(str(package.__file__)).parents[1]) for package in (sm90_emulator, kernel_emulation))
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": sources, "COLUMNS": "160"}
    command = [sys.executable, "-m", "pytest", "-p", "sm90_emulator.pytest_plugin", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_fixture_and_marker(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(TESTS)
    out = _pytest(tmp_path, "-v", "--strict-markers")
    outcomes = dict(re.findall(r"^test_inner\.py::(\S+) (PASSED|FAILED|ERROR) ", out, re.MULTILINE))
    assert outcomes == {
        "test_fixture": "PASSED",
        "test_marker_covers_fixtures": "PASSED",
        "test_settings": "PASSED",
        "test_wrong_marker": "ERROR",
        "test_wrong_setting": "ERROR",
    }, out
    assert "the marker emulated_hopper takes keyword arguments only, got (3,)" in out


def test_the_plugin_declares_its_marker_and_imports_no_torch(tmp_path: Path) -> None:
    program = "import sys; import sm90_emulator.pytest_plugin; assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert "@pytest.mark.emulated_hopper(**settings): run the test's kernels on the sm_90 emulator" in _pytest(
        tmp_path, "--markers"
    )


def test_the_entry_point_names_the_plugin() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"sm90_emulator": "sm90_emulator.pytest_plugin"}
