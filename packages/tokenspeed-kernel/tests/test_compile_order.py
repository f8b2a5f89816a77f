"""Tests what ``ci/compile_triton.py --seconds`` compiles first: kernels that recent commits changed, then others at random."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CI = Path(__file__).parents[3] / "ci"


@pytest.fixture
def compile_order(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _script("compile_order", monkeypatch)


def _script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if not CI.is_dir():
        pytest.skip("this is no checkout")
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module(name)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Makes a repository. Its second commit changes a comment in one file and code in another, and adds a third file."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    _git(root, "init", "--quiet")
    for said, files in (
        ("one", {"prose.py": "X = 1  # one\n", "code.py": '"""One."""\nX = 1\n', "same.py": "X = 1\n"}),
        ("two", {"prose.py": "X = 1  # two\n", "code.py": '"""One."""\nX = 2\n', "new.py": "X = 1\n"}),
    ):
        for name, text in files.items():
            (root / "src" / name).write_text(text)
        _git(root, "add", ".")
        _git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", said)
    return root


def _git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)


def test_code_that_commits_and_edits_changed(compile_order: ModuleType, checkout: Path) -> None:
    source = checkout / "src"
    assert compile_order.changed_files(checkout, "src") == {source / "code.py", source / "new.py"}
    (source / "same.py").write_text("X = 3\n")
    assert compile_order.changed_files(checkout, "src") == {source / "code.py", source / "new.py", source / "same.py"}
    assert compile_order.changed_files(checkout, "other") == frozenset()
    assert len(compile_order.seed(checkout)) == 40


def test_without_history_no_file_counts_as_changed(compile_order: ModuleType, checkout: Path, tmp_path: Path) -> None:
    _git(tmp_path, "clone", "--quiet", "--depth", "1", checkout.as_uri(), "shallow")
    assert compile_order.changed_files(tmp_path / "shallow", "src") == frozenset()
    shutil.rmtree(checkout / ".git")
    assert compile_order.changed_files(checkout, "src") == frozenset()
    assert compile_order.seed(checkout)


def test_kernels_with_changed_files_of_their_own_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with a changed file that no other kernel uses must come first, before kernels of which only the common file
    changed."""
    ordered = _script("compile_triton", monkeypatch).ordered
    common, own = Path("common.py"), Path("own.py")
    sources = {"a": frozenset({Path("a.py")}), "b": frozenset({common}), "c": frozenset({common, own}), "d": frozenset({common})}
    jobs = [(arch, kernel) for kernel in sources for arch in ("sm_90", "gfx950")]
    orders = [ordered(jobs, sources, {common, own}, str(seed)) for seed in range(20)]
    for order in orders:
        assert sorted(order) == sorted(jobs)
        assert {kernel for _, kernel in order[:2]} == {"c"}
        assert {kernel for _, kernel in order[2:6]} == {"b", "d"}
    assert len({tuple(order) for order in orders}) > 1
    unchanged = {tuple(ordered(jobs, sources, frozenset(), str(seed))) for seed in range(20)}
    assert len({order[0] for order in unchanged}) > 2, "every pair must come first in some commit"
