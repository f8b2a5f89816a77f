"""Makes the emulator the backend of tokenspeed-kernel-nvidia's programs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm90_emulator import cutedsl
from sm90_emulator.build import cache_directory
from sm90_emulator.emulator import BLOCK
from sm90_emulator.machine import Settings
from tokenspeed_kernel_nvidia._programs import SUFFIXES, Program
from tokenspeed_kernel_nvidia.program_backend import Backend, Launch, use_backend


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


class Recording(_Emulator):
    """The emulator's backend, which also keeps the compiler's last result for reports.

    Attributes:
        last: the result of ``cute.compile`` for the program that was compiled last; None if none was compiled.
    """

    last: Any = None

    def compile(self, build: Callable[[str], Any]) -> Any:
        self.last = super().compile(build)
        return self.last


EMULATOR = _Emulator()


def ptx(program: Program[Any], config: Any) -> str:
    """Returns the PTX of a program. A program that the emulator's cache lacks is compiled, and kept for tests that launch it.

    Args:
        program: a program of tokenspeed-kernel-nvidia.
        config: its configuration.

    Raises:
        RuntimeError: the emulator's cache cannot be written.
    """
    if BLOCK.current is None:
        cutedsl.replace_runtime(Settings.multiprocessors)  # for all later loads of the file, because a library is loaded once
    with use_backend(EMULATOR):
        file = program.file(config)
        if not program.is_kept(config):
            program.cached(config)
    kept = [] if file is None else [path for path in (file.with_name(file.name + suffix) for suffix in SUFFIXES) if path.exists()]
    if not kept:
        raise RuntimeError(f"{program.name} is not kept in {EMULATOR.directory()}")
    return cutedsl.ptx_in(kept[0].read_bytes())
