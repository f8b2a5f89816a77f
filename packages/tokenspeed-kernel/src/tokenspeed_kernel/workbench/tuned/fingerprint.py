"""Identifies what a kernel's measured time depends on: a hash of the kernel's source, and the versions of the software that
compiles it.

The source is found by the module's name, without importing the module or its packages.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import torch

# Kernels of every package use the helpers in the operators' modules, so these modules are part of the hash. The rest of the
# framework (the registry, the selector) does not affect the code that a kernel runs.
_OPERATORS = "tokenspeed_kernel_base.ops"


@functools.cache
def source_fingerprint(module: str) -> str:
    """Returns a hash of a module and of the modules that it imports, see `source_files`.

    The hash is computed once per process, because a process keeps running the code that it imported before a file changed.

    Returns:
        16 hexadecimal digits; empty if the module's source cannot be found.
    """
    found = source_files(module)
    if not found:
        return ""
    digest = hashlib.sha256()
    for name in sorted(found):
        content = found[name].read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def source_files(module: str) -> dict[str, Path]:
    """Returns the files of a module, and of all modules of the same package that it imports directly or indirectly, by module name.

    These include device code that a launcher reaches through `DeviceModule`, and modules of the operators' declarations that the
    launcher imports. They include a package's ``__init__`` if something other than a module is imported from it. For a module
    outside any package, they include modules in the same folder. Empty if the module's source cannot be found.
    """
    own = _locate(module)
    if own is None:
        return {}
    package = module.partition(".")[0]
    alone = own.parent if module == package and own.name != "__init__.py" else None
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _locate(name)
        related = (
            name == package or name.startswith((package + ".", _OPERATORS + ".")) or (path is not None and path.parent == alone)
        )
        if path is None or not related or name in found:
            continue
        found[name] = path
        waiting += _imports(name, path)
    return found


@functools.cache
def toolchain() -> dict[str, str]:
    """Returns the versions of the software that compiles kernels: PyTorch, and Triton if it is installed."""
    try:
        return {"torch": torch.__version__, "triton": metadata.version("triton")}
    except metadata.PackageNotFoundError:
        return {"torch": torch.__version__}


@functools.cache
def _locate(module: str) -> Path | None:
    """Returns the file of a module; None for a module without a file."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        path = Path(loaded)
        return path if path.is_file() else None
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # for example __main__ of an interactive session
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin is not None and Path(spec.origin).is_file() else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest)
        candidates = [base.with_name(base.name + ".py"), base / "__init__.py", *sorted(base.parent.glob(f"{base.name}.*.so"))]
        for path in candidates:
            if path.is_file():
                return path
    return None


def _imports(module: str, path: Path) -> list[str]:
    """Returns the names of the modules that a module imports, by ``import`` or as a `DeviceModule`, anywhere in its source."""
    if path.suffix != ".py":
        return []
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # the selector reports that the module cannot be loaded; its text still counts for the fingerprint
        return []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "DeviceModule" and len(node.args) == 1:
            found.append(_device_module(module, node.args[0]))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:  # a relative import beyond the top level, which would not load either
                    continue
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.append(inner if _locate(inner) is not None else base)
    return found


def _device_module(module: str, argument: ast.expr) -> str:
    """Returns the name of the device module that a ``DeviceModule`` call refers to; empty if the call has another form.

    ``argument``: the call's argument: ``__name__ + "_device"`` in the module, or ``"package.module_device"``.
    """
    prefix = ""
    if isinstance(argument, ast.BinOp) and isinstance(argument.op, ast.Add) and ast.unparse(argument.left) == "__name__":
        prefix, argument = module, argument.right
    return prefix + argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ""
