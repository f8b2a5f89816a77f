"""An emulator of sm_90a (Hopper, H100 and H200) that executes PTX on a CPU: see the README."""

from typing import TYPE_CHECKING, Any

from sm90_emulator.errors import EmulationError, UnknownInstruction

if TYPE_CHECKING:
    from sm90_emulator.driver import Emulator, emulated_sm90
    from sm90_emulator.machine import LaunchReport

__version__ = "0.1.0"

__all__ = ["EmulationError", "Emulator", "LaunchReport", "UnknownInstruction", "__version__", "emulated_sm90"]


def __getattr__(name: str) -> Any:
    if name not in ("Emulator", "LaunchReport", "emulated_sm90"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sm90_emulator import driver

    return getattr(driver, name)
