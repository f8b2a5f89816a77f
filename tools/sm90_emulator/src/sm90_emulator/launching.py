"""Launches kernels of PTX text directly, without the host code of a compiler."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from kernel_emulation.errors import EmulationError
from sm90_emulator import machine
from sm90_emulator.assembly import Kernel
from sm90_emulator.machine import Geometry, LaunchReport, Settings
from sm90_emulator.memory import Memory
from sm90_emulator.program import load

_ENTRY = re.compile(r"\.entry\s+([$\w]+)")
# The largest dynamic shared memory of a CTA, in bytes.
SHARED_BYTES = 227 * 1024


def pack(kernel: Kernel, arguments: Sequence[int | float]) -> bytes:
    """Packs a kernel's arguments into bytes. Each argument is an integer, an address or a float32.

    Raises:
        TypeError: the number of arguments differs from the kernel's parameters.
    """
    parameters = list(kernel.parameters.values())
    if len(arguments) != len(parameters):
        raise TypeError(f"{kernel.name} takes {len(parameters)} arguments, {len(arguments)} were given")
    packed = bytearray(kernel.parameter_bytes)
    for parameter, value in zip(parameters, arguments, strict=True):
        if isinstance(value, float):
            content = struct.pack("<f", value)
        else:
            content = (int(value) & ((1 << 8 * parameter.size) - 1)).to_bytes(parameter.size, "little")
        if len(content) != parameter.size:
            raise TypeError(f"{parameter.name} of {kernel.name} has {parameter.size} bytes, {value} was given")
        packed[parameter.offset : parameter.offset + parameter.size] = content
    return bytes(packed)


def launch(
    text: str,
    arguments: Sequence[int | float],
    threads: int,
    grid: Sequence[int],
    memory: Memory,
    *,
    cluster: int = 1,
    shared_bytes: int = SHARED_BYTES,
    seed: int = 0,
    copies: str | None = None,
    resident: int = 132,
    uninitialised: bool = False,
    limited_fp8_accumulation: bool = False,
    early: bool = False,
    shared_byte: int = 0xFF,
) -> LaunchReport:
    """Runs the only kernel of a PTX text.

    Args:
        text: the PTX text.
        arguments: the kernel's arguments, one per parameter.
        threads: number of threads per CTA.
        grid: number of CTAs along x, y and z; omitted axes are 1.
        memory: the global memory that the kernel may access.
        cluster: number of CTAs per cluster, along x.
        shared_bytes: bytes of dynamic shared memory.
        early: whether this is a PDL launch, which may start while the preceding kernel still runs.
        shared_byte: the initial value of every byte of shared memory. The default is NaN in all float types.
        seed, copies, resident, uninitialised, limited_fp8_accumulation: see `sm90_emulator.emulated_sm90`.

    Raises:
        EmulationError: the kernel violated a rule of the hardware or waits forever, or the text does not have exactly one kernel.
    """
    names = _ENTRY.findall(text)
    if len(names) != 1:
        raise EmulationError(f"a text with the kernels {', '.join(names) or 'none'}: one is wanted")
    program = load(text, names[0])
    sizes = (*grid, 1, 1)[:3]
    geometry = Geometry((sizes[0], sizes[1], sizes[2]), (threads, 1, 1), (cluster, 1, 1), shared_bytes, early)
    when = copies or ("random" if seed else "early")
    together = min(4, resident) if seed else 1
    settings = Settings(seed, when, uninitialised, limited_fp8_accumulation, resident, together, shared_byte=shared_byte)
    return machine.run(program, geometry, pack(program.kernel, arguments), memory.ranges, settings)
