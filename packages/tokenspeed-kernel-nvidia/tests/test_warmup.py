"""Tests ahead-of-time compilation: the list of programs, the selection from this list, and the output. The tests compile stand-ins
for programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tokenspeed_kernel_nvidia
from tokenspeed_kernel_base import compilation
from tokenspeed_kernel_nvidia import _machine, _programs, warmup

PACKAGE = Path(tokenspeed_kernel_nvidia.__file__).parent


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replaces this package's programs by two stand-ins, one of which has a configuration that does not compile. Returns the list
    of compiled configurations."""
    monkeypatch.setenv(_programs.VARIABLE, str(tmp_path))
    done: list[Any] = []

    class Pretended(_programs.Program[Any]):
        def is_kept(self, config: Any) -> bool:
            return (self.name, config) in done

        def __call__(self, config: Any) -> Any:
            if config == "broken":
                raise RuntimeError("no such instruction")
            compilation.start(self.name, "Made-up").finish()
            done.append((self.name, config))

    def first(config: Any) -> Any: ...

    def second(config: Any) -> Any: ...

    made = [Pretended(first, "sm_90a", lambda: ["wide", "narrow"]), Pretended(second, "sm_100a", lambda: ["wide", "broken"])]
    monkeypatch.setattr(warmup, "programs", lambda: made)
    return done


def test_every_program_is_found() -> None:
    """Asserts that the programs of all modules that declare one are found, without the compiler."""
    declaring = [path for path in PACKAGE.rglob("*.py") if re.search(r"^@program\(", path.read_text(), re.MULTILINE)]
    found = warmup.programs()
    assert {program._declaration.__module__.rpartition(".")[2] for program in found} == {path.stem for path in declaring}
    assert [program.name for program in found] == sorted(program.name for program in found)


def test_configurations_are_values() -> None:
    """Asserts that a program's configurations differ from one another, and that a second call of `configs()` returns equal ones.
    Configurations determine file names, and are pickled for other processes."""
    for program in warmup.programs():
        configs = program.configs()
        assert len({repr(config) for config in configs}) == len(configs) == len(set(configs))
        assert list(program.configs()) == list(configs)
        assert all("0x" not in repr(config) for config in configs)


def test_selecting_by_words(two: list[Any]) -> None:
    assert len(warmup.select()) == 4
    assert [config for _, config in warmup.select(["wide"])] == ["wide", "wide"]
    ((program, config),) = warmup.select(["sm_90a", "narrow"])
    assert warmup.describe(program, config).endswith("first sm_90a narrow")
    assert not warmup.select(["absent"])


def test_programs_of_kernels_eligible_by_name_are_compiled_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(config: Any) -> Any: ...

    made = _programs.program(arch="sm_90a", configs=lambda: ["usual", "seldom"], usual=lambda: ["usual"])(kernel)
    monkeypatch.setattr(warmup, "programs", lambda: [made])
    assert [config for _, config in warmup.select()] == ["usual"]
    assert [config for _, config in warmup.select(every=True)] == ["usual", "seldom"]


def test_the_list_shows_missing_programs(two: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert warmup.main(["wide", "--arch", "sm_90a", "--jobs", "1"]) == 0
    assert "1 compiled, 0 kept before, 0 failed" in capsys.readouterr().out
    assert warmup.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["kept", "to", "to", "to"]
    assert len(two) == 1


def test_what_multiplies_programs_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Config:
        dtype: str
        width: int
        paged: bool = False

    def kernel(config: Config) -> Any: ...

    configs = [Config(dtype, width) for dtype in ("bfloat16", "float16") for width in (64, 128, 256)]
    made = _programs.program(arch="sm_90a", configs=lambda: configs)(kernel)
    monkeypatch.setattr(warmup, "programs", lambda: [made])
    assert warmup.main(["--count"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"     6  {made.name}: width 3, dtype 2", "     6  in all"]
    assert warmup.main(["--count", "width=64"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"     2  {made.name}: dtype 2", "     2  in all"]


def test_the_compile_policy_of_calls_does_not_apply(two: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with compilation.compile_policy("forbid"):
        assert warmup.main(["wide", "--arch", "sm_90a", "--jobs", "1"]) == 0
    assert "1 compiled" in capsys.readouterr().out


def test_a_failure_is_reported_and_the_rest_is_compiled(two: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert warmup.main(["--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "3 compiled, 0 kept before, 1 failed" in said
    assert "RuntimeError: no such instruction" in said
    assert len(two) == 3
    assert warmup.main(["wide", "--jobs", "1"]) == 0
    assert "0 compiled, 2 kept before, 0 failed" in capsys.readouterr().out


def test_words_that_match_no_program(two: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        warmup.main(["absent"])
    assert "no configuration has all these words" in capsys.readouterr().err


def test_nothing_is_compiled_that_cannot_be_kept(two: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_programs.VARIABLE, "off")
    with pytest.raises(RuntimeError, match="not kept here: set TOKENSPEED_KERNEL_PROGRAMS"):
        list(warmup.warm_up(warmup.select(), jobs=1))


# A program with six configurations. From the third on, a compilation does not end while the test holds a pipe open. Such a
# compilation has a partial file, and a linker process that would write another file.
SLOW = """
import os, subprocess, sys
from tokenspeed_kernel_base.storage import part_of
from tokenspeed_kernel_nvidia import _programs, warmup

class Slow(_programs.Program):
    def is_kept(self, config):
        return (_programs.cache_directory() / str(config)).exists()

    def __call__(self, config):
        file = _programs.cache_directory() / str(config)
        if config > 2:
            part_of(file).write_text("half")
            subprocess.run([sys.executable, os.environ["LINKER"], f"{part_of(file)}.so"])
        file.write_text("whole")

def slow(config): ...

slow = Slow(slow, "sm_90a", lambda: [1, 2, 3, 4, 5, 6])

def run(jobs):
    warmup.programs = lambda: [slow]
    sys.exit(warmup.main(["--jobs", jobs]))
"""
LINKER = """
import os, pathlib, sys
pathlib.Path(os.environ["LINKING"], str(os.getpid())).touch()
open(os.environ["HELD"]).read()
open(sys.argv[1], "w")
"""


def test_an_interrupted_run_says_how_far_it_came(
    two: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def enough(*_: Any) -> None:
        raise KeyboardInterrupt

    (first, second) = warmup.programs()
    monkeypatch.setattr(
        type(second), "__call__", lambda self, config: two.append((self.name, config)) if self is first else enough()
    )
    assert warmup.main(["--jobs", "1"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [["1", "of", "4"], ["2", "of", "4"]]
    assert lines[2:] == ["", "interrupted after 2 of 4, which are kept; the same command goes on with the rest"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("whole_group", [True, False], ids=["Ctrl-C", "kill -INT"])
def test_an_interrupted_run_leaves_neither_processes_nor_parts(tmp_path: Path, whole_group: bool) -> None:
    (tmp_path / "slowly.py").write_text(SLOW)
    (tmp_path / "linker.py").write_text(LINKER)
    cache, linking, held = (tmp_path / name for name in ("cache", "linking", "held"))
    cache.mkdir()
    linking.mkdir()
    os.mkfifo(held)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    variables = {"LINKER": str(tmp_path / "linker.py"), "LINKING": str(linking), "HELD": str(held)}
    variables |= {_programs.VARIABLE: str(cache), "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "-c", "import slowly; slowly.run('2')"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A process that a shell started in the background ignores SIGINT, and its children inherit this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    holder = os.open(held, os.O_RDWR)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert [line.split()[:3] for line in lines] == [["1", "of", "6"], ["2", "of", "6"]]
    while len([*linking.iterdir()]) < 2:
        time.sleep(0.05)
    assert len([*cache.glob(".*.part")]) == 2
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    out, error = process.communicate()  # returns when all processes that inherited stdout, also linkers, have ended
    os.close(holder)
    assert process.returncode == 130
    assert "interrupted after 2 of 6, which are kept; the same command goes on with the rest" in out
    assert "Traceback" not in error
    assert {file.name for file in cache.iterdir()} == {"1", "2"}


@pytest.mark.slow
@pytest.mark.skipif(_machine.dsl_gap() is not None, reason=str(_machine.dsl_gap()))
def test_processes_compile_for_one_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(_programs.VARIABLE, str(tmp_path))
    selection = [(program, program.configs()[0]) for program in warmup.programs()]
    outcomes = list(warmup.warm_up(selection, jobs=2))
    assert [outcome.error for outcome in outcomes] == [""] * len(selection)
    assert all(outcome.seconds > 0 for outcome in outcomes)
    assert all(program.is_kept(config) for program, config in selection)
