"""Tests that each mutant matches the sources and, in a slow test, that the tests detect all mutants."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parent


def _runner() -> ModuleType:
    """Imports mutation/run.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("gfx950_mutation_run", TESTS.parent / "mutation" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module in sys.modules
    spec.loader.exec_module(module)
    return module


run = _runner()
MUTANTS = run.load()


@cache
def _functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_sources(mutant: run.Mutant) -> None:
    original = (run.SOURCE / mutant.file).read_text()
    changed = mutant.apply(run.SOURCE)  # raises an error unless the old text occurs exactly once
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(original)), "the mutant changes no code"
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.name)
    assert re.fullmatch(r"\S[^\n]*\.", mutant.fact), "the fact is one sentence"
    assert mutant.tests
    for target in mutant.tests:
        file, _, function = target.partition("::")
        assert (TESTS / file).is_file(), f"{file} does not exist"
        assert not function or function in _functions(file), f"{target} does not exist"


def test_mutants_differ() -> None:
    changes = [(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS]
    assert len(set(changes)) == len(changes) >= 40


def test_an_old_text_that_occurs_twice_is_refused() -> None:
    mutant = run.Mutant("any", "A fact.", "mfma.py", "import", "export", ("test_mfma.py",))
    with pytest.raises(run.MutationError, match=r"any: .* occurs \d+ times in mfma.py, not once"):
        mutant.apply(run.SOURCE)


@pytest.mark.parametrize(
    ("old", "new", "verdict", "reason"),
    [
        ("from __future__ import annotations", "import no_such_module", "error", "cannot be imported"),
        ("everywhere = np.ones(WAVE, bool)", "everywhere = nowhere", "error", "NameError"),
        ("_LANES >= 32", "_LANES > 31", "survived", "tests passed"),
        ("_LANES >= 32", "_LANES >= 33", "killed", "AssertionError"),
    ],
)
def test_verdicts(old: str, new: str, verdict: str, reason: str) -> None:
    mutant = run.Mutant("any", "A fact.", "crosslane.py", old, new, ("test_lanes.py::test_both_halves_of_row_bcast_31",))
    result = run.judge(mutant)
    assert result.verdict == verdict, result
    assert reason in result.reason


def test_a_test_that_fails_without_the_mutant_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = {"test": "tests/test_a.py::test_fails", "classes": ["AssertionError"], "text": ""}
    monkeypatch.setattr(run, "_run", lambda mutant, targets: run.Outcome(passed=1, failures=(failure,)))
    results = [
        run.Result(mutant, "killed", test)
        for mutant, test in zip(MUTANTS[:2], ("test_a.py::test_fails", "test_a.py::test_b"), strict=True)
    ]
    assert [result.verdict for result in run.without_false_alarms(results)] == ["error", "killed"]
    monkeypatch.setattr(run, "_run", lambda mutant, targets: run.Outcome(passed=1))
    with pytest.raises(run.MutationError, match="of 2 tests 1 passed and 0 failed"):
        run.without_false_alarms(results)


@pytest.mark.slow
def test_all_mutants_are_killed() -> None:
    results = run.run_all(MUTANTS, jobs=os.cpu_count() or 1)
    assert [(r.mutant.name, r.verdict, r.reason) for r in results if r.verdict != "killed"] == []
