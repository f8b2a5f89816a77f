"""An emulator of sm_90a (Hopper, H100 and H200) that executes PTX on a CPU: see the README."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernel_emulation.errors import EmulationError, SanitizerError, UnknownInstruction

if TYPE_CHECKING:
    from sm90_emulator.driver import emulated_sm90
    from sm90_emulator.emulator import Emulator
    from sm90_emulator.machine import LaunchReport

__version__ = "0.1.0"

__all__ = ["EmulationError", "Emulator", "LaunchReport", "SanitizerError", "UnknownInstruction", "__version__", "emulated_sm90"]


_MODULES = {"Emulator": "emulator", "LaunchReport": "machine", "emulated_sm90": "driver"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"sm90_emulator.{_MODULES[name]}"), name)
