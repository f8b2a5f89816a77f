"""The command: ``python -m gfx950_emulator run|stats|trace FILE.py::function``."""

from __future__ import annotations

from kernel_emulation.main import main

if __name__ == "__main__":
    main("gfx950_emulator")
