"""What a kernel was when it was measured: a hash of its source, and the versions of what compiles it.

A kernel is found by the name of its module, and nothing is imported to read it: not the module, and not its packages.
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

# Kernels of the core share helpers there. What lies outside (the registry, the selector) does not change what a kernel runs.
_CORE_KERNELS = "tokenspeed_kernel_base.ops"


@functools.cache
def source_fingerprint(module: str) -> str:
    """A hash of a module and of every module of its package that it imports, directly or through others.

    A package's ``__init__`` counts where something is imported from it that is not a module. For the core's kernels the package is
    `tokenspeed_kernel_base.ops`; for a module in no package, the modules beside it count. Read once in a process: what was imported
    before a file changed is what runs.

    Returns:
        16 hexadecimal digits; empty where the module's source is not to be found.
    """
    own = _locate(module)
    if own is None:
        return ""
    package = _CORE_KERNELS if module.startswith(_CORE_KERNELS + ".") else module.partition(".")[0]
    alone = own.parent if module == package and own.name != "__init__.py" else None
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _locate(name)
        related = name == package or name.startswith(package + ".") or (path is not None and path.parent == alone)
        if path is None or not related or name in found:
            continue
        found[name] = path
        waiting += _imports(name, path)
    digest = hashlib.sha256()
    for name in sorted(found):
        content = found[name].read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


@functools.cache
def toolchain() -> dict[str, str]:
    """Versions of what kernels are built with: PyTorch, and Triton where it is installed."""
    try:
        return {"torch": torch.__version__, "triton": metadata.version("triton")}
    except metadata.PackageNotFoundError:
        return {"torch": torch.__version__}


@functools.cache
def _locate(module: str) -> Path | None:
    """The file of a module; None where there is none."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded is not None:
        path = Path(loaded)
        return path if path.is_file() else None
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # __main__ of an interactive session
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
    """Names of the modules that a module imports, wherever in its source."""
    if path.suffix != ".py":
        return []
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # it cannot be loaded, and the selector says so; its text is its fingerprint all the same
        return []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:  # beyond the top: it does not load either
                    continue
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.append(inner if _locate(inner) is not None else base)
    return found
