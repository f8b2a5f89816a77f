"""What is installed: the core's version, and whether the libraries of the command line are there."""

from __future__ import annotations

import sys
from typing import NoReturn

_TOOLS = frozenset({"click", "rich", "typer"})


def version() -> str:
    """That of the core, which is found and not imported."""
    from importlib.util import find_spec
    from runpy import run_path

    spec = find_spec("tokenspeed_kernel")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(run_path(f"{spec.submodule_search_locations[0]}/version.py")["__version__"])


def without(error: ModuleNotFoundError) -> NoReturn:
    """Says what to install where a library of the command line is missing, and exits; raises the error if it is about another."""
    if (error.name or "").partition(".")[0] not in _TOOLS:
        raise error
    from tokenspeed_kernel_base.installation import requirement

    # Not to stdout: with --json nothing but JSON belongs there.
    print(f"The command line needs {error.name}: pip install {requirement('tokenspeed-kernel[tools]')}", file=sys.stderr)
    raise SystemExit(1) from None
