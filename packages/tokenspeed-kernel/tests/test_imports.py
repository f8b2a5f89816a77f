"""What importing the package pulls in, and which module may import which."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import tokenspeed_kernel

ROOT = Path(tokenspeed_kernel.__file__).parent
FORBIDDEN = ["triton", "torch._dynamo", "torch._inductor", "rich", "typer", "click", "tomllib", "numpy.testing", "transformers"]
TOOLS = ["capture", "numerics", "benchmark", "report", "tuning", "cli", "doctor", "__main__"]


def test_importing_the_core_pulls_in_nothing_heavy() -> None:
    program = (
        "import sys, json, torch; before = set(sys.modules); import tokenspeed_kernel; "
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    added, initialised = json.loads(done.stdout)
    assert not initialised, "importing created a GPU context"
    heavy = [m for m in added for f in FORBIDDEN if m == f or m.startswith(f + ".")]
    assert heavy == []
    assert [m for m in added if any(m.startswith(f"tokenspeed_kernel.{tool}") for tool in TOOLS)] == []
    assert done.stderr == ""


def test_the_public_names_exist() -> None:
    assert sorted(tokenspeed_kernel.__all__) == tokenspeed_kernel.__all__
    assert [n for n in tokenspeed_kernel.__all__ if not hasattr(tokenspeed_kernel, n)] == []
    assert [op.mode for op in tokenspeed_kernel.operators() if op.mode not in tokenspeed_kernel.__all__] == []


# -- arrows -----------------------------------------------------------------------------------------------------------------------


@cache
def modules() -> dict[str, Path]:
    named = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["tokenspeed_kernel", *path.relative_to(ROOT).with_suffix("").parts]
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def _imported(name: str, *, at_import: bool) -> set[str]:
    """Modules of the package that a module imports: all, or only those imported when it is imported itself."""
    tree = ast.parse(modules()[name].read_text())
    package = name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if at_import and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(child.test)):
                continue  # for type checkers, or when the module is run as a program
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = (
                    importlib.util.resolve_name("." * child.level + (child.module or ""), package) if child.level else child.module
                )
                found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else str(base) for alias in child.names)
            visit(child)

    visit(tree)
    return {m for m in found if m in modules()} - {name}


def test_there_are_no_import_cycles() -> None:
    graph = {name: _imported(name, at_import=True) for name in modules()}
    state: dict[str, str] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == "done":
            return
        assert state.get(name) != "open", "import cycle: " + " -> ".join((*path[path.index(name) :], name))
        state[name] = "open"
        for other in sorted(graph[name]):
            visit(other, (*path, name))
        state[name] = "done"

    for name in graph:
        visit(name, ())


# Each may import those before it, and none after it.
LAYERS = [
    ["version", "memo"],
    ["config"],
    ["platform", "signature", "traits"],
    ["registry", "checks", "cases", "recording", "call_times"],
    ["explanation", "tuned"],
    ["parameters", "selection", "profiling", "plugins"],
    ["dispatch", "lowering"],
    ["operator"],
    ["ops"],
]


def _layer(name: str) -> int | None:
    part = name.split(".")[1] if "." in name else ""
    return next((i for i, layer in enumerate(LAYERS) if part in layer), None)


@pytest.mark.parametrize("name", [m for m in modules() if _layer(m) is not None and not m.endswith(".__main__")])
def test_arrows_run_one_way(name: str) -> None:
    mine = _layer(name)
    assert mine is not None
    for other in _imported(name, at_import=False):
        if other.split(".")[1:2] == name.split(".")[1:2]:
            continue
        theirs = _layer(other)
        assert theirs is not None, f"{name} imports {other}, a tool"
        assert theirs < mine, f"{name} imports {other}, which is not below it"


def test_every_module_has_its_place() -> None:
    known = {part for layer in LAYERS for part in layer} | {*TOOLS}
    assert {m.split(".")[1] for m in modules() if "." in m} - known == set()


def test_operators_of_a_family_do_not_import_kernels() -> None:
    for name in modules():
        if re.fullmatch(r"tokenspeed_kernel\.ops\.\w+\.triton.*", name):
            assert "tokenspeed_kernel_base.operator" not in _imported(name, at_import=False), name


def test_the_core_names_no_vendor_package() -> None:
    pattern = re.compile(
        r"tokenspeed[_-]kernel[_-](nvidia|amd)|\bflashinfer\b|\baiter\b|\bcutlass\b|\bcutedsl\b|\bdeep_gemm\b", re.I
    )
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert named == []


def test_the_runtimes_only_dependency_is_torch() -> None:
    standard = sys.stdlib_module_names | {"tomllib", "torch", "tokenspeed_kernel"}  # Python 3.10 has no tomllib
    tools = {"rich", "typer", "tomli", "click"}
    for name, path in modules().items():
        third = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                third.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                third.add(str(node.module).split(".")[0])
        allowed = standard | ({"triton"} if ".triton" in name else set())
        allowed |= (
            tools if any(name.startswith(f"tokenspeed_kernel.{tool}") for tool in TOOLS) or name.endswith(".config") else set()
        )
        allowed |= {"jinja2", "matplotlib"} if name.startswith("tokenspeed_kernel.workbench.report.") else set()
        assert third <= allowed, (name, third - allowed)


def test_files_stay_small() -> None:
    long = {str(p.relative_to(ROOT)): n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 620}
    assert long == {}
