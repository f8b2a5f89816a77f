"""Runs every test that needs an NVIDIA GPU, divided into parts that fit a time limit, and records the outcomes.

    python ci/gpu_suite.py --part 1/2
    python ci/gpu_suite.py --part 2/2

A hash of a test's name determines the part that runs the test. So slow tests are spread evenly over the parts. The outcomes of each
part are added to `gpu_suite.json`; a part of another commit or machine starts a new record. Parts may run concurrently, each on its
own GPU. All workers and parts share compiled code through the caches on disk. No test starts after the time limit. Tests that still
run 30 s after the limit are recorded as hanging, and the process ends.

The script needs the packages of this repository, CuteDSL, pytest and pytest-xdist beside the machine's PyTorch and Triton. A
failure's message is truncated to 20 lines; `--full` names a file for the whole messages. The exit status is 0 if no test failed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fcntl
import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "ci" / "gpu_suite.json"
TESTS = ("packages", "tools/gpt_oss/tests")
LINES = 20  # failure messages are truncated to this many lines
SLOW_S = 15  # a test that takes longer is slow; the record lists the slow tests
SLOWEST = 12  # number of slowest files in the record
# Programs that take up to a minute to compile. Several processes compile these programs before the tests. Otherwise tests would
# wait for one another's compilations.
SLOW_PROGRAMS = ("moe.grouped.launch.gemm_program",)
# Tests whose names begin so may take minutes. Each worker starts with some of these tests and of the tests that were slow in the
# last record, longest first. Otherwise a slow test may begin when all other tests are done.
SLOW_TESTS = ("test_the_kit_finds_nothing", "test_a_configuration_is_right", "test_a_gpu_runs_from_a_pack")
SLOW_VARIABLE = "GPU_SUITE_SLOW"  # this environment variable passes the last record's slow tests to the workers, as JSON
GRACE_S = 30  # seconds that running tests have after the time limit to finish


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option ``--part``. This file is also a pytest plugin, which each worker loads."""
    parser.addoption("--part", default="1/1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps only the tests that belong to the part, and orders them. pytest-xdist gives each worker an equal number of consecutive
    tests, and the order lets each worker start with slow tests. Workers that run out of tests take tests from other workers.
    """
    part, parts = map(int, config.getoption("--part").split("/"))
    kept = [zlib.crc32(item.nodeid.encode()) % parts == part - 1 for item in items]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept, strict=True) if not keep])
    mine = [item for item, keep in zip(items, kept, strict=True) if keep]
    recorded = json.loads(os.environ.get(SLOW_VARIABLE, "{}"))
    seconds = {item: recorded.get(item.nodeid, 2 * SLOW_S if item.name.startswith(SLOW_TESTS) else 0) for item in mine}
    slow = sorted((item for item in mine if seconds[item]), key=lambda item: -seconds[item])
    others = iter([item for item in mine if not seconds[item]])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items.clear()
    for worker in range(workers):  # neighbouring tests stay on one worker, because they use the same programs
        items += slow[worker::workers]
        items += itertools.islice(others, max(0, (worker + 1) * len(mine) // workers - len(items)))
    items += others


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> Iterator[None]:
    """Ends a worker whose CUDA context is lost, because all further tests of this worker would fail. pytest-xdist then starts
    another worker, and counts the test as failed a second time."""
    yield  # the other hooks first send the test's outcome
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


class Suite:
    """A pytest plugin for the controlling process. It counts outcomes, and stops the tests at the time limit.

    Args:
        part: ``"k/n"``.
        seconds: the time limit.
        full: file for the whole message of each failure. Messages are written at once, so that an interrupted run keeps them.
        save: function that writes the record; called when tests hang.
    """

    session: pytest.Session | None = None
    collected: int | None = None  # number of the part's tests

    def __init__(self, part: str, seconds: float, full: Path | None, save: Callable[[], None]) -> None:
        self.part, self.full = part, full
        self.running: dict[str, None] = {}
        self._save, self._ended = save, threading.Event()
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.outcomes, self.reasons = collections.Counter[str](), collections.Counter[str]()
        self.durations: dict[str, float] = collections.defaultdict(float)
        self.failures: list[str] = []
        if full is not None:
            full.write_text("")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] += report.duration
        if report.failed:
            name, whole = f"{report.nodeid} ({report.when})", report.longreprtext
            self.failures.append(name)
            if self.full is not None:
                with self.full.open("a") as file:
                    file.write(f"==== {name}\n{whole}\n\n")
            lines = whole.splitlines()
            if len(lines) > LINES:
                report.longrepr = "\n".join([f"... {len(lines) - LINES + 1} lines before", *lines[1 - LINES :]])
            report.sections.clear()
        if report.when == "call" or not report.passed:
            self.outcomes["xfailed" if hasattr(report, "wasxfail") else report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[_kind_of(report.longrepr[2].removeprefix("Skipped: "))] += 1

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)
        if time.monotonic() > self.deadline and self.session is not None:
            self.session.shouldstop = "the time limit of the part"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session
        threading.Thread(target=self._end_what_hangs, daemon=True).start()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.collected = session.testscollected
        self._ended.set()

    def _end_what_hangs(self) -> None:
        """Waits for the end of the session until `GRACE_S` after the deadline. Then ends the process if tests still run."""
        if not self._ended.wait(self.deadline + GRACE_S - time.monotonic()):
            self._save()
            print(f"ended while these tests ran: {', '.join(self.running)}", flush=True)
            os._exit(1)

    @property
    def complete(self) -> bool:
        """Whether all tests of the part have run. The last tests may end after the time limit."""
        return self.collected is not None and len(self.durations) >= self.collected

    def result(self, command: str) -> dict[str, Any]:
        """Returns the part's outcomes, as an item of the record."""
        files = collections.Counter[str]()
        for name, seconds in self.durations.items():
            files[name.partition("::")[0]] += seconds
        return {
            "part": self.part,
            "command": command,
            "complete": self.complete,
            "seconds": round(time.monotonic() - self.started),
            "tests": dict(sorted(self.outcomes.items())),
            "failures": sorted(self.failures),
            "hanging": sorted(self.running),
            "skips": dict(self.reasons.most_common()),
            "slow": {name: round(taken) for name, taken in collections.Counter(self.durations).most_common() if taken > SLOW_S},
            "slowest_files": {name: round(seconds) for name, seconds in files.most_common(SLOWEST)},
        }


def _kind_of(reason: str) -> str:
    """Shortens the reason of a skipped test if the gate "formats" or "traits" rejected the case, because hundreds of such reasons
    differ only in details. Returns other reasons unchanged.
    """
    gate = reason.partition(":")[0]
    return f"the kernel does not declare the case's {gate}" if gate in ("formats", "traits") else reason


def warm_up(workers: int) -> float:
    """Compiles the slow programs into the cache on disk, and the test files to byte code. Returns the duration in seconds."""
    began = time.monotonic()
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "nvidia", *TESTS]
    # Errors of this collection are ignored, because the tests' own collection reports them.
    with subprocess.Popen(collect, cwd=ROOT, stdout=subprocess.DEVNULL):
        for words in SLOW_PROGRAMS:
            command = [sys.executable, "-m", "tokenspeed_kernel_nvidia.warmup", words, "--every", "--jobs", str(workers)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def described(commit: str | None) -> dict[str, Any]:
    """Returns the metadata of the machine and the commit, as in benchmark reports."""
    from tokenspeed_kernel.workbench.benchmark.metadata import collect_metadata

    found = dataclasses.asdict(collect_metadata())
    kept = {name: found[name] for name in ("device", "driver", "python", "torch", "triton")}
    return {"commit": commit or found["git_commit"], **kept}


def added(record: Path, part: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with a part added or replaced. Parts of another commit, another machine or another number of parts are
    dropped."""
    kept: list[dict[str, Any]] = []
    if record.exists():
        before = json.loads(record.read_text())
        if all(before.get(name) == value for name, value in where.items()):
            kept = before["parts"]
    division = part["part"].partition("/")[2]
    parts = [p for p in kept if p["part"] != part["part"] and p["part"].partition("/")[2] == division]
    parts = sorted([*parts, part], key=lambda p: int(p["part"].partition("/")[0]))
    total = sum((collections.Counter(p["tests"]) for p in parts), collections.Counter[str]())
    whole = len(parts) == int(division) and all(p["complete"] for p in parts)
    return {
        **where,
        "whole": whole,
        "seconds": sum(p["seconds"] for p in parts),
        "tests": dict(sorted(total.items())),
        "parts": parts,
    }


def slow_tests_of(record: Path) -> dict[str, int]:
    """Returns the seconds of each slow test of a record; nothing if there is no record."""
    parts = json.loads(record.read_text())["parts"] if record.exists() else []
    return {name: seconds for part in parts for name, seconds in part.get("slow", {}).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", metavar="K/N", help="which part of how many")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 4) - 2))
    parser.add_argument("--seconds", type=float, default=560, help="time limit: no further test is begun after it")
    parser.add_argument("--commit", help="of this tree, where it is no checkout")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--full", type=Path, help="file for the whole messages of failures")
    parser.add_argument("rest", nargs="*", help="further arguments for pytest, behind --")
    chosen = parser.parse_args()
    # The record names files without their folders, because folders differ between machines.
    words = [Path(word).name if Path(word) in (chosen.record, chosen.full) else word for word in sys.argv[1:]]
    command = shlex.join(["python", "ci/gpu_suite.py", *words])

    def save() -> None:
        with Path(__file__).open() as lock:  # another part may end at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = added(chosen.record, suite.result(command), described(chosen.commit))
            chosen.record.write_text(json.dumps(record, indent=1) + "\n")

    os.environ[SLOW_VARIABLE] = json.dumps(slow_tests_of(RECORD))
    suite = Suite(chosen.part, chosen.seconds, chosen.full, save)
    print(f"compiled the slow programs in {warm_up(chosen.workers):.0f} s", flush=True)
    options = f"-m nvidia -n {chosen.workers} --dist worksteal -q --tb=short --show-capture=no -rfE".split()
    options += ["-p", Path(__file__).stem, "--part", chosen.part]
    status = pytest.main([*map(str, map(ROOT.joinpath, TESTS)), f"--rootdir={ROOT}", *options, *chosen.rest], plugins=[suite])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        return int(status)
    save()
    print(json.dumps(dict(suite.outcomes)), "complete" if suite.complete else "stopped at the time limit")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
