"""The command: ``python -m gfx950_emulator run|stats|trace FILE.py::function``."""

from __future__ import annotations

import sys

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ImportError as error:
    sys.exit(f"the command line needs {error.name}: pip install rich typer")

from gfx950_emulator.command import app

if __name__ == "__main__":
    app(prog_name="python -m gfx950_emulator")
