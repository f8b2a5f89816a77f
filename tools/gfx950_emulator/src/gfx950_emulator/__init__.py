"""An emulator of gfx950 (CDNA4, MI355X) and gfx942 (CDNA3, MI300X) machine code behind a Triton driver: see the README.

Importing the package imports neither PyTorch nor Triton, because pytest imports its plugin in every run. The driver is imported
when it is first used.
"""

from typing import TYPE_CHECKING, Any

from kernel_emulation.errors import EmulationError, SanitizerError, UnknownInstruction

if TYPE_CHECKING:
    from gfx950_emulator.driver import Emulator, LaunchReport, emulated, emulated_gfx942, emulated_gfx950

__version__ = "0.2.0"

_OF_DRIVER = ("Emulator", "LaunchReport", "emulated", "emulated_gfx942", "emulated_gfx950")

__all__ = [
    "EmulationError", "Emulator", "LaunchReport", "SanitizerError", "UnknownInstruction", "__version__", "emulated",
    "emulated_gfx942", "emulated_gfx950",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _OF_DRIVER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gfx950_emulator import driver

    return getattr(driver, name)
