"""Mutation tests of the emulator. A mutant is a change of the sources that violates one modelled hardware fact. The tests must then
fail.

For every mutant of ``mutants/*.toml``, the package is copied to a temporary folder, and one passage of the copy is replaced. The
tests that the mutant names are then run against the copy. Verdicts:

- killed: a test failed by an assertion, or by an error that the emulator reports (`kernel_emulation.errors`), and passes without
  the mutant.
- survived: the tests passed.
- error: any other outcome, which is inconclusive: the copy cannot be imported, a test cannot be collected, a test crashes in Python
  (NameError, IndexError, ...), or the run takes too long.

Run it as::

    python tools/gfx950_emulator/mutation/run.py --jobs 2 --output tools/gfx950_emulator/mutation/score.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on tomli on these Python versions

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
SOURCE = HERE.parent / "src" / "gfx950_emulator"
TABLE = HERE / "mutants"
# Exception classes by which a test reports a failure. Any other exception means that the mutant is not valid code.
_TELLING = frozenset({"AssertionError", "Failed", "EmulationError", "Fault"})
_SECONDS = 300  # time limit of one run


class MutationError(Exception):
    """The mutants do not match the sources, or a verdict is impossible."""


@dataclass(frozen=True)
class Mutant:
    """One change of the sources.

    Attributes:
        name: the mutant's name, in lower case with hyphens.
        fact: one sentence about the hardware's behaviour, which the mutant violates.
        file: the changed file, relative to the package.
        old, new: a text that must occur exactly once, and its replacement.
        tests: pytest targets of which at least one should fail, relative to the folder of the tests, the cheapest first.
    """

    name: str
    fact: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        return ".".join((SOURCE.name, *Path(self.file).with_suffix("").parts))

    def apply(self, package: Path) -> str:
        """Returns the text of the file with the replacement.

        Raises:
            MutationError: the old text does not occur exactly once.
        """
        text = (package / self.file).read_text()
        count = text.count(self.old)
        if count != 1:
            raise MutationError(f"{self.name}: the old text occurs {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """The verdict on a mutant.

    Attributes:
        verdict: ``"killed"``, ``"survived"`` or ``"error"``.
        test: the first test that failed.
        raised: the class of the exception that the test raised.
        reason: the exception's message, or a description of the problem.
    """

    mutant: Mutant
    verdict: str
    test: str = ""
    raised: str = ""
    reason: str = ""
    seconds: float = 0.0


def load(folder: Path = TABLE) -> list[Mutant]:
    """Returns the mutants of all files of a folder.

    Raises:
        MutationError: a mutant lacks a field or has an unknown one, or two mutants have the same name.
    """
    wanted = {field.name for field in fields(Mutant)}
    mutants: list[Mutant] = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutant"]:
            if entry.keys() != wanted:
                raise MutationError(f"{file.name}: expected the fields {sorted(wanted)}, found {entry}")
            mutants.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MutationError(f"several mutants are called {', '.join(twice)}")
    return mutants


@dataclass(frozen=True)
class Outcome:
    """The result of a pytest run: the witness's report (see witness.py), and the run's duration in seconds."""

    passed: int = 0
    failures: tuple[dict[str, Any], ...] = ()
    broken: tuple[str, ...] = ()
    seconds: float = 0.0


def _run(mutant: Mutant | None, targets: Iterable[str]) -> Outcome:
    """Runs tests against a copy of the package: with the mutant, or unchanged if ``mutant`` is None."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        package = folder / SOURCE.name
        shutil.copytree(SOURCE, package)  # compiled modules too, which stay valid while their sources keep their timestamps
        if mutant is not None:
            changed = package / mutant.file
            changed.write_text(mutant.apply(SOURCE))
            for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*"):
                compiled.unlink()
        return _pytest(folder, SOURCE.name if mutant is None else mutant.module, mutant is not None, targets)


def _pytest(folder: Path, module: str, stop: bool, targets: Iterable[str]) -> Outcome:
    """Runs tests against the copy of the package in a folder; with `stop`, until the first failure."""
    report = folder / "report.json"
    paths = [str(folder), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins would take a quarter of the time
        "MUTATION_ROOT": str(folder),
        "MUTATION_MODULE": module,
        "MUTATION_REPORT": str(report),
    }
    command = [sys.executable, "-m", "pytest", *(["-x"] if stop else []), "-q", "-p", "no:cacheprovider", "-p", "witness"]
    command += [str(TESTS / target) for target in targets]
    begin = time.monotonic()
    try:
        # The folder is the working directory, so that hypothesis stores its examples there.
        process = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(broken=(f"the tests took more than {_SECONDS} seconds",), seconds=time.monotonic() - begin)
    seconds = time.monotonic() - begin
    if not report.exists():
        lines = (process.stdout + process.stderr).strip().splitlines() or ["no output"]
        return Outcome(broken=(f"pytest ended with status {process.returncode}: {lines[-1]}",), seconds=seconds)
    told = json.loads(report.read_text())
    if process.returncode not in (0, 1):
        told["broken"].append(f"pytest ended with status {process.returncode}")
    return Outcome(told["passed"], tuple(told["failures"]), tuple(told["broken"]), seconds)


def _short(nodeid: str) -> str:
    """Returns a test's name relative to the folder of the tests."""
    return nodeid.rpartition(f"{TESTS.name}/")[2]


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 160 else f"{line[:157]}..."


def judge(mutant: Mutant) -> Result:
    """Runs the tests of one mutant, and returns the verdict."""
    outcome = _run(mutant, mutant.tests)
    if outcome.broken:
        return Result(mutant, "error", reason=_first_line(outcome.broken[0]), seconds=outcome.seconds)
    if outcome.failures:
        first = outcome.failures[0]
        verdict = "killed" if _TELLING.intersection(first["classes"]) else "error"
        raised, said = first["classes"][0], _first_line(first["text"])
        return Result(mutant, verdict, _short(first["test"]), raised, f"{raised}: {said}", outcome.seconds)
    if not outcome.passed:
        return Result(mutant, "error", reason="no test ran", seconds=outcome.seconds)
    return Result(mutant, "survived", reason=f"{outcome.passed} tests passed", seconds=outcome.seconds)


def run_all(mutants: list[Mutant], jobs: int = 1) -> list[Result]:
    """Judges all mutants, `jobs` of them at a time, and prints each verdict.

    Raises:
        MutationError: a replacement does not fit the sources. Raised before any test runs.
    """
    for mutant in mutants:
        mutant.apply(SOURCE)
    results = []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for result in pool.map(judge, mutants):
            shown = result.test if result.verdict == "killed" else f"{result.test} {result.reason}".strip()
            print(f"{result.verdict:8}  {result.mutant.name:36}  {result.seconds:5.1f} s  {shown}", flush=True)
            results.append(result)
    return without_false_alarms(results)


def without_false_alarms(results: list[Result]) -> list[Result]:
    """Returns the results, with mutants counted as killed only by tests that pass against an unchanged copy of the package.

    Raises:
        MutationError: the tests cannot run in this environment.
    """
    tests = sorted({result.test for result in results if result.verdict == "killed"})
    if not tests:
        return results
    outcome = _run(None, tests)
    failed = {_short(failure["test"]) for failure in outcome.failures}
    if outcome.broken or outcome.passed + len(failed) != len(tests):
        counted = f"of {len(tests)} tests {outcome.passed} passed and {len(failed)} failed"
        raise MutationError("\n".join(["the tests that killed mutants cannot run without one:", *(outcome.broken or [counted])]))
    reason = "the test fails without the mutant, too"
    return [replace(result, verdict="error", reason=reason) if result.test in failed else result for result in results]


def _score(results: list[Result], command: str) -> dict[str, Any]:
    verdicts = [result.verdict for result in results]
    return {
        "command": command,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {
            "gfx950_emulator": re.search(r'__version__ = "(.+)"', (SOURCE / "__init__.py").read_text())[1],
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: version(name) for name in ("numpy", "torch", "triton", "pytest", "hypothesis")},
        },
        "mutants": len(results),
        **{verdict: verdicts.count(verdict) for verdict in ("killed", "survived", "error")},
        "results": [
            {
                "name": r.mutant.name,
                "file": r.mutant.file,
                "fact": r.mutant.fact,
                "verdict": r.verdict,
                "test": r.test,
                "raised": r.raised,
            }
            for r in results
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns 0 if all mutants were killed, 1 if not, 2 if they could not be judged."""
    parser = argparse.ArgumentParser(description="Mutation tests of the emulator.")
    parser.add_argument("--only", metavar="REGEX", default="", help="mutants whose name matches")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write verdicts and versions to this file")
    given = parser.parse_args(arguments)
    try:
        mutants = [mutant for mutant in load() if re.search(given.only, mutant.name)]
        if not mutants:
            raise MutationError(f"no mutant is called like {given.only!r}")
        results = run_all(mutants, given.jobs)
    except MutationError as error:
        print(error, file=sys.stderr)
        return 2
    killed = sum(result.verdict == "killed" for result in results)
    print(f"{killed} of {len(results)} mutants were killed")
    for result in results:
        if result.verdict != "killed":
            print(f"{result.verdict}: {result.mutant.name} ({result.mutant.fact}) {result.reason}")
    if given.output is not None:
        command = f"python run.py --jobs {given.jobs}" + (f" --only {given.only!r}" if given.only else "")
        given.output.write_text(json.dumps(_score(results, command), indent=1) + "\n")
    return 0 if killed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
