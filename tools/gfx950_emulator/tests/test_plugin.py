"""Tests the pytest plugin in a separate pytest process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gfx950_emulator

TESTS = """
import pytest
import torch
import triton
import triton.language as tl
from gfx950_emulator import SanitizerError


@triton.jit
def copy(x_ptr, out_ptr, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def run(n=64):
    x, out = torch.arange(64.0), torch.zeros(n)
    copy[(1,)](x, out, 64, num_warps=1)
    return bool((out == x).all())


def test_fixture(emulated):
    assert run()
    assert [launch.kernel for launch in emulated.launches] == ["copy"]
    assert emulated.sanitize


def test_fixture_of_another_test_is_another(emulated):
    assert emulated.launches == []


@pytest.mark.emulated
def test_marker():
    assert run()
    with pytest.raises(SanitizerError, match="out-of-bounds"):
        run(63)


@pytest.fixture
def made_before():
    return run()


@pytest.mark.emulated
def test_marker_covers_fixtures(made_before):
    assert made_before


@pytest.mark.emulated(sanitize=False, counters=True)
def test_settings(emulated):
    assert run()
    assert not emulated.sanitize
    assert emulated.launches[0].counters.instructions > 0


@pytest.mark.emulated(arch="gfx942")
def test_architecture(emulated):
    assert run()
    assert emulated.launches[0].program.assembly.architecture.name == "gfx942"


@pytest.mark.emulated
class TestClass:
    def test_method(self):
        assert run()


def test_unmarked():
    assert triton.runtime.driver._active is None


@pytest.mark.emulated("positional")
def test_wrong_marker():
    pass


@pytest.mark.emulated(sanitise=True)
def test_wrong_setting():
    pass
"""


def _pytest(path: Path, *arguments: str) -> str:
    """Returns the output of pytest with only this plugin."""
    source = str(Path(gfx950_emulator.__file__).parents[1])
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": source, "COLUMNS": "160"}
    command = [sys.executable, "-m", "pytest", "-p", "gfx950_emulator.pytest_plugin", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_fixture_and_marker(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(TESTS)
    out = _pytest(tmp_path, "-v", "--strict-markers")
    outcomes = dict(re.findall(r"^test_inner\.py::(\S+) (PASSED|FAILED|ERROR) ", out, re.MULTILINE))
    assert outcomes == {
        "test_fixture": "PASSED",
        "test_fixture_of_another_test_is_another": "PASSED",
        "test_marker": "PASSED",
        "test_marker_covers_fixtures": "PASSED",
        "test_settings": "PASSED",
        "test_architecture": "PASSED",
        "TestClass::test_method": "PASSED",
        "test_unmarked": "PASSED",
        "test_wrong_marker": "ERROR",
        "test_wrong_setting": "ERROR",
    }, out
    assert "the marker emulated takes keyword arguments only, got ('positional',)" in out
    assert "sanitise" in out
    assert "Exception ignored" not in out, "kernels that are forgotten after the block must not ask for a GPU's driver"


def test_the_marker_is_declared(tmp_path: Path) -> None:
    out = _pytest(tmp_path, "--markers")
    assert "@pytest.mark.emulated(**settings): run the test's kernels on the gfx950 (or gfx942) emulator" in out


def test_the_plugin_imports_neither_torch_nor_triton(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(
        "import sys\n\n\ndef test_imports():\n    assert not {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
    )
    out = _pytest(tmp_path)
    assert "1 passed" in out, out


def test_the_entry_point_names_the_plugin() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"gfx950_emulator": "gfx950_emulator.pytest_plugin"}
