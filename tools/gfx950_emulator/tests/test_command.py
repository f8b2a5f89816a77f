"""Tests the command line in this process, or in a new process if the start of the interpreter matters."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from gfx950_emulator.trace import InstructionTrace, Written

pytest.importorskip("typer", reason="the command line needs the extra cli")

from typer.testing import CliRunner, Result

from gfx950_emulator.command import app

KERNELS = """
import torch
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, out_ptr, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x + x, mask=at < n)


@triton.jit
def beyond(x_ptr, out_ptr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def works():
    x, out = torch.arange(300, dtype=torch.float32), torch.empty(300)
    double[(2,)](x, out, 300, 256)
    assert torch.equal(out, 2 * x)
    double[(1,)](x, out, 256, 256)


def fails():
    x, out = torch.ones(256), torch.empty(255)
    beyond[(1,)](x, out, 256)


def claims():
    assert 1 == 2, "one is not two"


def launches_nothing():
    pass


def takes(x, y, z=1):
    pass
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a file with kernels. After the test, the command's changes to the interpreter's state are undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "kernels_of_a_test.py"
    path.write_text(KERNELS)
    yield path
    sys.modules.pop(path.stem, None)


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_run_lists_launches(file: Path) -> None:
    result = _invoke("run", f"{file}::works")
    assert result.exit_code == 0, result.output
    assert "double  grid 2 x 1 x 1, 4 waves a workgroup" in result.stdout
    assert re.search(r"2 launches in .* s, nothing to complain of", result.stdout)


def test_run_sanitizes(file: Path) -> None:
    result = _invoke("run", f"{file}::fails")
    assert result.exit_code == 1
    assert "out-of-bounds" in result.stderr
    assert "argument out_ptr" in result.stderr
    assert f"{file.name}:17" in result.stderr


def test_a_failing_assertion_ends_the_command(file: Path) -> None:
    result = _invoke("run", f"{file}::claims")
    assert result.exit_code == 1
    assert "AssertionError: one is not two" in result.stderr
    assert "command.py" not in result.stderr


def test_stats_of_gfx942(file: Path) -> None:
    result = _invoke("stats", f"{file}::works", "--arch", "gfx942")
    assert result.exit_code == 0, result.output
    assert "grid on 304 units" in result.stdout
    assert "at 2.1 GHz" in result.stdout


def test_stats_counts_and_models(file: Path) -> None:
    result = _invoke("stats", f"{file}::works", "--top", "5")
    assert result.exit_code == 0, result.output
    out = result.stdout
    assert out.count("Modelled time: bound by") == 2
    assert out.count("Modelled time is for ratios between kernels, never for absolute times.") == 2
    assert "load 1200 (1280 in cache lines), store 1200" in out
    assert re.search(r"occupancy\s+8 waves a SIMD: 8 workgroups a compute unit", out)
    assert re.search(rf"buffer_load_dword .*{file.name}:10", out)
    assert re.search(rf"{file.name}:11:\d+", out)


def test_stats_of_chosen_kernels(file: Path) -> None:
    assert _invoke("stats", f"{file}::works", "-k", "double").exit_code == 0
    result = _invoke("stats", f"{file}::works", "-k", "triple")
    assert result.exit_code == 1
    assert "no kernel with 'triple' in its name was launched" in result.stderr
    assert "no kernel was launched" in _invoke("stats", f"{file}::launches_nothing").stderr


def test_trace_prints_what_a_wave_does(file: Path) -> None:
    result = _invoke("trace", f"{file}::works", "--float", "--lanes", "0,5", "-g", "1", "-w", "0")
    assert result.exit_code == 0, result.output
    # Workgroup 1 has the elements from 256 on, of which 44 are below the limit of 300.
    assert re.search(r"v_add_f32.*v\d+=512,522", result.stdout)
    assert "s_endpgm" in result.stdout
    assert result.stdout.count("\ndouble") + result.stdout.startswith("double") == 1, "the second launch has no workgroup 1"
    shown = [line for line in result.stdout.splitlines() if re.match(r"\s+\d+  [sv]_", line)]
    assert len(shown) > 10


def test_trace_stops_at_its_limit(file: Path) -> None:
    result = _invoke("trace", f"{file}::works", "-n", "3")
    assert result.exit_code == 0
    assert "stopped at 3 instructions" in result.stdout
    assert len(re.findall(r"^\s+\d+  \w+_", result.stdout, re.MULTILINE)) == 3


def test_trace_of_nobody(file: Path) -> None:
    result = _invoke("trace", f"{file}::works", "-w", "9")
    assert result.exit_code == 1
    assert "nothing ran as wave 9 of workgroup 0" in result.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{file}", "expected FILE.py::FUNCTION"),
        ("{file}::", "expected FILE.py::FUNCTION"),
        ("{file}x::works", "there is no file"),
        ("{file}::absent", "has no function absent; it has works, fails"),
        ("{file}::takes", "takes takes arguments (x, y)"),
    ],
)
def test_wrong_targets(file: Path, target: str, message: str) -> None:
    result = _invoke("run", target.format(file=file))
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.stderr)


@pytest.mark.parametrize("lanes", ["a", "0,64", ""])
def test_wrong_lanes(file: Path, lanes: str) -> None:
    result = _invoke("trace", f"{file}::works", "--lanes", lanes)
    assert result.exit_code == 2
    assert "lanes" in result.stderr


def test_a_file_that_cannot_be_imported(tmp_path: Path, file: Path) -> None:
    broken = tmp_path / "broken_file_of_a_test.py"
    broken.write_text("import a_module_that_is_not_there\n")
    result = _invoke("run", f"{broken}::works")
    sys.modules.pop(broken.stem, None)
    assert result.exit_code == 1
    assert "No module named 'a_module_that_is_not_there'" in result.stderr


def test_as_a_module(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gfx950_emulator", "run", f"{file}::works"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 launches" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_module('gfx950_emulator', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"the command line needs {missing}: pip install rich typer")


def test_the_tracer_sees_registers_of_its_wave_only() -> None:
    seen: list[tuple[str, int, list[Written]]] = []
    tracer = InstructionTrace(
        lambda p, i, on, written: seen.append((p.assembly.instructions[i].mnemonic, on, written)), wave=1, lanes=(0, 63)
    )
    text = "v_add_u32_e32 v1, v0, v0\ns_mov_b32 s4, s5\nv_cmp_gt_u32_e32 vcc, 3, v0\ns_mov_b64 exec, 7\nv_mov_b32_e32 v1, 9"
    Snippet(text, v={0: np.arange(128), 1: 0}, s={5: np.array([11, 22])}, waves=2, tracer=tracer).run()
    assert seen == [
        ("v_add_u32_e32", 64, [Written("v1", (128, 254))]),
        ("s_mov_b32", 64, [Written("s4", (22,))]),
        ("v_cmp_gt_u32_e32", 64, [Written("vcc_lo", (0,)), Written("vcc_hi", (0,))]),
        ("s_mov_b64", 3, [Written("exec_lo", (7,)), Written("exec_hi", (0,))]),
        ("v_mov_b32_e32", 3, [Written("v1", (9, 254))]),
        ("s_endpgm", 3, []),
    ]
