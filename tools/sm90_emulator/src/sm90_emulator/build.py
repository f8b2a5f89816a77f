"""Compiles the emulator's C code once, and keeps the library in the user's cache directory."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "native"
_UNITS = ("emulator.c", "elementwise.c")
_FLAGS = (
    "-O2", "-ftree-vectorize", "-fwrapv", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
    "-fvisibility=hidden", "-w",
)  # fmt: skip


def cache_directory() -> Path:
    """Returns the folder of compiled code and PTX: ``SM90_EMULATOR_CACHE``, or ``sm90_emulator`` in the user's cache directory."""
    if chosen := os.environ.get("SM90_EMULATOR_CACHE"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sm90_emulator"


def _processor() -> str:
    """Returns the processor properties on which `-march=native` depends."""
    try:
        return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return platform.processor()


def _compiler() -> list[str]:
    """Returns the command that runs a C compiler."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise RuntimeError("sm90_emulator needs a C compiler: install cc, gcc or clang, or `pip install ziglang`")


def compiled(name: str, units: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """Compiles C files into a shared library, unless the cache has this library. Returns the library's path."""
    compiler = _compiler()
    digest = hashlib.sha256(f"{compiler} {flags} {_processor()}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    target = cache_directory() / f"{name}.{digest.hexdigest()[:24]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / "library.so"
        command = [*compiler, *flags, "-shared", "-o", str(part), *(str(_SOURCES / unit) for unit in units), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"sm90_emulator does not compile: {' '.join(command)}\n{done.stderr}")
        part.replace(target)
    return target


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the shared library of the emulator's machine, which executes instructions."""
    loaded = ctypes.CDLL(str(compiled("machine", _UNITS, (*_FLAGS, "-march=native"))))
    loaded.operation_name.restype = ctypes.c_char_p
    loaded.run_launch.restype = ctypes.c_int
    return loaded


@functools.cache
def operations() -> dict[str, int]:
    """Maps the name of each operation of the machine to the operation's code."""
    names: dict[str, int] = {}
    while (name := library().operation_name(len(names))) is not None:
        names[name.decode()] = len(names)
    return names
