"""Finds the files with recent changes, which a compilation with a time limit compiles first. A seed determines the order of all
other files."""

from __future__ import annotations

import ast
import datetime
import subprocess
from pathlib import Path

_COMMITS = 20


def changed_files(root: Path, folder: str) -> frozenset[Path]:
    """Returns the Python files of a folder whose code was changed by uncommitted edits or by the newest commits on the first-parent
    line.

    Changes of comments and docstrings do not count. In a shallow checkout, the result has the changes since its oldest commit.
    Without a history, as in a checkout of one commit or a folder that git does not know, no committed file counts as changed.
    """
    commits = _git(root, "rev-list", "--first-parent", f"--max-count={_COMMITS + 1}", "HEAD").split()
    if not commits:
        return frozenset()
    changed = _git(root, "diff", "--name-only", "--diff-filter=d", commits[-1], "--", f"{folder}/*.py").splitlines()
    return frozenset(
        root / name for name in changed if _code((root / name).read_text()) != _code(_git(root, "show", f"{commits[-1]}:{name}"))
    )


def seed(root: Path) -> str:
    """Returns the commit's hash, so every commit has another order; without git, the date."""
    return _git(root, "rev-parse", "HEAD").strip() or datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.dump(tree)


def _git(root: Path, *arguments: str) -> str:
    """Returns the output of a git command; an empty text if git is not installed or fails."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
