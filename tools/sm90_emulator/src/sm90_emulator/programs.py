"""Makes the emulator the backend of tokenspeed-kernel-nvidia's programs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm90_emulator import cutedsl
from sm90_emulator.build import cache_directory
from tokenspeed_kernel_nvidia.program_backend import Backend, Launch


class _Emulator(Backend):
    """A backend that compiles programs and stores their PTX. Its loaded programs take CPU tensors, and run on the emulator."""

    def directory(self) -> Path:
        return cache_directory() / "programs"

    def compile(self, build: Callable[[str], Any]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            result = build(f"--keep-cubin --keep-ptx --dump-dir {folder}")
            cutedsl.keep(bytes(result.__cubin__), str(result.__ptx__))
        return result

    def launcher(self, launch: Launch) -> Launch:
        return cutedsl.launching(launch)


EMULATOR = _Emulator()
