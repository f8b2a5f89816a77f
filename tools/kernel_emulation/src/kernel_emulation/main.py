"""Starts an emulator's command line. Imports no third-party library itself, so that it can name a missing library."""

from __future__ import annotations

import sys
from importlib import import_module


def main(package: str) -> None:
    """Runs ``app`` of the package's module ``command``."""
    for library in ("rich", "typer"):
        try:
            import_module(library)
        except ImportError:
            sys.exit(f"the command line needs {library}: pip install rich typer")
    import_module(f"{package}.command").app(prog_name=f"python -m {package}")
