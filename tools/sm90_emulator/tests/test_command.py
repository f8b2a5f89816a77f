"""Tests the command line, with launches of PTX text."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra cli")

from typer.testing import CliRunner, Result

from sm90_emulator.command import app

KERNELS = '''
import torch

from sm90_emulator.emulator import BLOCK
from sm90_emulator.launching import pack
from sm90_emulator.machine import Geometry
from sm90_emulator.program import load

PTX = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry doubles(.param .u64 out, .param .u32 count) {
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %d<3>;
    ld.param.u64 %d0, [out]; ld.param.u32 %r1, [count]; mov.u32 %r0, %tid.x;
    setp.ge.u32 %p1, %r0, %r1; @%p1 bra end;
    mad.wide.u32 %d1, %r0, 4, %d0; add.u32 %r2, %r0, %r0; st.global.b32 [%d1], %r2;
    end: ret;
}
"""


def launch(out, count):
    parameters = pack(load(PTX, "doubles").kernel, [out.data_ptr(), count])
    BLOCK.active().run(PTX, "doubles", Geometry((1, 1, 1), (64, 1, 1)), parameters)


def works():
    out = torch.zeros(40, dtype=torch.int32)
    launch(out, 40)
    assert out.tolist() == [2 * i for i in range(40)]


def fails():
    launch(torch.zeros(40, dtype=torch.int32), 41)


def beyond_a_view():
    launch(torch.zeros(40, dtype=torch.int32)[:8], 9)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Writes a file with kernels. After the test, the command's changes to the interpreter's state are undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "ptx_of_a_test.py"
    path.write_text(KERNELS)
    yield path
    sys.modules.pop(path.stem, None)


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_run_lists_launches_and_repeats_them(file: Path) -> None:
    result = _invoke("run", f"{file}::works", "--seeds", "3", "--copies", "late", "--uninitialised")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("doubles  grid 1 x 1 x 1, 2 warps a CTA, 0 bytes of shared memory, ") == 1
    assert re.findall(r"1 launches in .* s with seed (\d), nothing", result.stdout) == ["0", "1", "2"]


def test_run_reports_errors(file: Path) -> None:
    result = _invoke("run", f"{file}::fails")
    assert result.exit_code == 1
    assert "out-of-bounds: " in result.stderr
    assert "in kernel doubles: st.global.b32 [%d1], %r2" in result.stderr


@pytest.mark.parametrize(("bounds", "code"), [("storage", 0), ("view", 1)])
def test_bounds_of_views(file: Path, bounds: str, code: int) -> None:
    assert _invoke("run", f"{file}::beyond_a_view", "--bounds", bounds).exit_code == code


def test_stats_counts_warps_and_lanes(file: Path) -> None:
    result = _invoke("stats", f"{file}::works", "--top", "20")
    assert result.exit_code == 0, result.output
    assert re.search(r"st\.global\.b32 \[%d1\], %r2 +2 +\S+% +20\n", result.stdout)  # 40 threads: warps of 32 and 8 lanes
    assert re.search(r"setp\.ge\.u32 %p1, %r0, %r1 +2 +\S+% +32\n", result.stdout)
    assert re.search(r"\bld +4 ", result.stdout)
    assert _invoke("stats", f"{file}::works", "-k", "triples").exit_code == 1


def test_wrong_copies(file: Path) -> None:
    assert _invoke("run", f"{file}::works", "--copies", "never").exit_code == 2


def test_as_a_module(file: Path) -> None:
    command = [sys.executable, "-m", "sm90_emulator", "run", f"{file}::works"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 launches" in done.stdout
