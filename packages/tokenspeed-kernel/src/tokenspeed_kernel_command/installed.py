"""Reads the version of the installed core, and reports libraries that the command line needs and that are not installed."""

from __future__ import annotations

import sys
from typing import NoReturn

_TOOLS = frozenset({"click", "rich", "typer"})


def version() -> str:
    """Returns the core's version without importing the core."""
    from importlib.util import find_spec
    from runpy import run_path

    spec = find_spec("tokenspeed_kernel")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(run_path(f"{spec.submodule_search_locations[0]}/version.py")["__version__"])


def without(error: ModuleNotFoundError) -> NoReturn:
    """Prints which package to install for a missing library that the command line needs, and exits the program. Raises ``error``
    again if it is about another module."""
    if (error.name or "").partition(".")[0] not in _TOOLS:
        raise error
    from tokenspeed_kernel_base.installation import requirement

    # The message goes to stderr, because with --json only JSON belongs on stdout.
    print(f"The command line needs {error.name}: pip install {requirement('tokenspeed-kernel[tools]')}", file=sys.stderr)
    raise SystemExit(1) from None
