"""Records which kernels the current sources are known to compile, so that CI compiles only kernels that have changed since.

``ci/compiled.json`` stores a digest of the sources of each pair of architecture and kernel that compiled whole, without a failure.
A recorded pair has changed if the digest of its sources differs now, or if another compiler is installed. Comments and docstrings
change no digest.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

RECORD = Path(__file__).with_name("compiled.json")
_DIGITS = 16
Job = tuple[str, str]  # architecture, kernel


def digest(files: Iterable[Path], root: Path) -> str:
    """Returns a digest of the code of Python files, without comments and docstrings. The order of the files is ignored."""
    code = "".join(f"{path.relative_to(root).as_posix()}\n{_code(path.read_text())}\n" for path in sorted(set(files)))
    return hashlib.sha256(code.encode()).hexdigest()[:_DIGITS]


def read(path: Path, versions: str) -> dict[Job, str]:
    """Returns the recorded digests; none if there is no record. Digests of another compiler's record are empty, so that they differ
    from all others."""
    record = json.loads(path.read_text()) if path.exists() else {"versions": versions, "compiled": {}}
    same = record["versions"] == versions
    return {(arch, kernel): found if same else "" for kernel, archs in record["compiled"].items() for arch, found in archs.items()}


def write(path: Path, versions: str, digests: Mapping[Job, str]) -> None:
    compiled: dict[str, dict[str, str]] = {}
    for (arch, kernel), found in sorted(digests.items(), key=lambda item: (item[0][1], item[0][0])):
        compiled.setdefault(kernel, {})[arch] = found
    path.write_text(json.dumps({"versions": versions, "compiled": compiled}, indent=1) + "\n")


def chosen(
    jobs: Sequence[Job], digests: Mapping[str, str], recorded: Mapping[Job, str], *, changed: bool, unrecorded: bool
) -> list[Job]:
    """Returns the pairs to compile.

    Args:
        jobs: the pairs to choose from.
        digests: the digest of each kernel's current sources.
        recorded: the result of `read`.
        changed: whether to compile recorded pairs that have changed.
        unrecorded: whether to compile pairs without a record.
    """

    def wanted(job: Job) -> bool:
        return recorded[job] != digests[job[1]] and changed if job in recorded else unrecorded

    return [job for job in jobs if wanted(job)]


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    """Returns whether a statement is a string alone, such as a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
