"""Tests the import rules of every package in the repository, and which modules the import of each package loads. A module's rules
follow from its location, so a new module needs no edit here."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import tokenspeed_kernel
from tokenspeed_kernel_base.config import PREFIX
from tokenspeed_kernel_base.discovery import DEVICE_SUFFIX
from tokenspeed_kernel_base.ops.quantization.aliases import ALIASES

PACKAGES = Path(__file__).parents[2]
TOOLS = PACKAGES.parent / "tools"
BASE, CORE = "tokenspeed_kernel_base", "tokenspeed_kernel"
COMPILERS = frozenset({"triton", "cutlass", "cuda", "tvm_ffi", "flashinfer", "aiter"})
HEAVY = sorted(
    {*COMPILERS, "torch._dynamo", "torch._inductor", "rich", "typer", "click", "tomllib", "numpy.testing", "transformers"}
)


@cache
def modules(folder: Path = PACKAGES) -> dict[str, Path]:
    """Returns the paths of all modules of the packages in a folder, by module name."""
    named = {}
    for root in sorted(init.parent for init in folder.glob("*/src/*/__init__.py")):
        for path in sorted(root.rglob("*.py")):
            parts = [root.name, *path.relative_to(root).with_suffix("").parts]
            named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


@cache
def with_tools() -> dict[str, Path]:
    """Returns the paths of all modules of the repository, tools included, by module name."""
    return {**modules(), **modules(TOOLS)}


@cache
def imports(name: str, *, at_import: bool = False) -> frozenset[str]:
    """Returns the modules that a module imports, including imports inside functions; with ``at_import``, without those."""
    path = with_tools()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if at_import and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(child.test)):
                continue  # imports for type checkers, or for a module that runs as a program
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                relative = "." * child.level + (child.module or "")
                base = importlib.util.resolve_name(relative, package) if child.level else str(child.module)
                found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in with_tools() else base for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return frozenset(found - {name})


def imports_of_ours(name: str) -> list[str]:
    return sorted(imports(name) & modules().keys())


def third_parties(name: str, *, at_import: bool = False) -> set[str]:
    ours = {module.partition(".")[0] for module in modules()}
    return {top for m in imports(name, at_import=at_import) if (top := m.partition(".")[0]) not in sys.stdlib_module_names | ours}


# -- arrows -----------------------------------------------------------------------------------------------------------------------

# Areas of the repository, and the areas that each may import besides itself. All other modules belong to packages of kernels.
ALLOWED = {
    "framework": set[str](),
    "operators": {"framework"},
    "core": {"framework", "operators"},
    "workbench": {"framework", "core"},
    "entry": {"framework", "operators", "core", "workbench"},
}
KERNELS = {"framework", "operators"}


def area(name: str) -> str:
    wheel, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    if wheel == f"{CORE}_command":
        return "entry"
    if wheel == BASE:
        return "operators" if part == "ops" else "framework"
    if wheel != CORE:
        return wheel
    if part in ("", "__main__") or rest.endswith(".__main__"):
        return "entry"
    return "workbench" if part == "workbench" else "core"


def test_imports_follow_the_layers() -> None:
    """Each module may import only the areas that ``ALLOWED`` lists for its area; a package of kernels only ``KERNELS``."""
    wrong = []
    for name in modules():
        mine = area(name)
        allowed = {mine} | ALLOWED.get(mine, KERNELS)
        wrong += [
            f"{name} ({mine}) imports {other} ({area(other)}); it may import {', '.join(sorted(allowed))}"
            for other in imports_of_ours(name)
            if area(other) not in allowed
        ]
    assert not wrong, "\n".join(wrong)


def _cycles() -> Iterator[str]:
    """Yields one import cycle for each module that is part of a cycle."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield " -> ".join((*path[path.index(name) :], name))
        elif name not in done:
            for other in sorted(imports(name) & with_tools().keys()):
                yield from visit(other, (*path, name))
            done.add(name)

    for name in with_tools():
        yield from visit(name, ())


def test_there_are_no_import_cycles() -> None:
    """Tests packages and tools. Imports inside functions count: a deferred cycle is still a cycle."""
    cycles = [*_cycles()]
    assert not cycles, "import cycles; what both sides need belongs into a module that imports neither:\n" + "\n".join(cycles)


def test_only_device_code_imports_a_compiler() -> None:
    """Only modules of device code may import a compiler at import time. All other modules are imported when a package is scanned
    for kernels."""
    wrong = {
        name: sorted(found)
        for name in modules()
        if not name.endswith(DEVICE_SUFFIX) and (found := third_parties(name, at_import=True) & COMPILERS)
    }
    listed = [f"{name} imports {', '.join(found)}" for name, found in wrong.items()]
    assert not wrong, f"move what needs the compiler into a module whose name ends in {DEVICE_SUFFIX}:\n" + "\n".join(listed)


# -- other packages ---------------------------------------------------------------------------------------------------------------


def _required(distribution: str, *, extras: bool) -> set[str]:
    """Returns the distributions that a distribution requires."""
    listed = metadata.requires(distribution) or []
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in listed if extras or "extra ==" not in line}


def test_torch_is_the_only_dependency_at_run_time() -> None:
    """Only the workbench and the command line may import packages of an extra; the exception is the TOML parser before Python 3.11.
    Other modules may import PyTorch and compilers."""
    assert _required("tokenspeed-kernel-base", extras=False) == {"torch"}
    assert _required("tokenspeed-kernel", extras=False) == {"torch", BASE}
    tools = _required("tokenspeed-kernel", extras=True)
    wrong = []
    for name in modules():
        if area(name) in ALLOWED:
            extra = area(name) == "workbench" or name.startswith(f"{CORE}_command.")
            allowed = {"torch", "tomllib"} | (tools if extra else {"tomli"})
            wrong += [f"{name} imports {other}" for other in third_parties(name) - allowed - COMPILERS]
    assert not wrong, "\n".join(wrong)


def test_the_core_names_no_vendor_package() -> None:
    pattern = re.compile(
        r"tokenspeed[_-]kernel[_-](nvidia|amd)|\bflashinfer\b|\baiter\b|\bcutlass\b|\bcutedsl\b|\bdeep_gemm\b", re.I
    )
    named = [
        f"{path.relative_to(PACKAGES)}:{number}: {line.strip()}"
        for name, path in modules().items()
        if area(name) in ALLOWED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not named, "\n".join(named)


def test_files_stay_small() -> None:
    long = {name: count for name, path in modules().items() if (count := len(path.read_text().splitlines())) > 620}
    assert not long, "split these files; none should have more than 600 lines"


# -- modules that an import loads ----------------------------------------------------------------------------------------------


def test_importing_the_core_pulls_in_nothing_heavy() -> None:
    program = (
        "import sys, json, torch; before = set(sys.modules); import tokenspeed_kernel; "
        "print(json.dumps([sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))"
    )
    environment = {**os.environ, PREFIX + "DISABLE_PLUGINS": "*"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    added, initialised = json.loads(done.stdout)
    assert not initialised, "importing created a GPU context"
    heavy = [m for m in added for f in HEAVY if m == f or m.startswith(f + ".")]
    assert heavy == []
    assert done.stderr == ""


def test_the_public_names_exist() -> None:
    names = tokenspeed_kernel.__all__
    assert len(set(names)) == len(names)
    assert [n for n in names if not hasattr(tokenspeed_kernel, n)] == []
    declared = tokenspeed_kernel.operators()
    assert [op.mode for op in declared if getattr(tokenspeed_kernel, op.mode) is not op.function] == []
    modes = [op.mode for op in declared]
    assert [mode for mode in modes if mode not in names] == []
    others = [n for n in names if n not in modes and n not in ALIASES]
    assert others == sorted(others)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("linear_plan", "linear.plan"),
        ("linear_process_weights", "linear.prepare"),
        ("moe_plan", "moe_apply.plan"),
        ("moe_process_weights", "moe_apply.prepare"),
    ],
)
def test_deprecated_steps_call_the_current_ones(name: str, instead: str) -> None:
    """A deprecated function must warn, and its errors must have the name by which it was called."""
    with (
        pytest.warns(DeprecationWarning, match=f"{name} is deprecated: use {instead}"),
        pytest.raises((TypeError, ValueError), match=f"^{name}: "),
    ):
        getattr(tokenspeed_kernel, name)(None, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{BASE}.selection", "framework"),
        (f"{BASE}.ops.norm.rmsnorm", "operators"),
        (f"{CORE}.plugins", "core"),
        (f"{CORE}.workbench.numerics", "workbench"),
        (f"{CORE}.workbench.numerics.__main__", "entry"),
        (CORE, "entry"),
        (f"{CORE}_command.commands", "entry"),
        ("some_kernels.sm90.attention", "some_kernels"),
    ],
)
def test_areas(name: str, expected: str) -> None:
    assert area(name) == expected
