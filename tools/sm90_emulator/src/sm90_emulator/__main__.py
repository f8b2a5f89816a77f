"""The command: ``python -m sm90_emulator run|stats FILE.py::function``."""

from __future__ import annotations

from kernel_emulation.main import main

if __name__ == "__main__":
    main("sm90_emulator")
