"""Compiles every CuteDSL program in every configuration, without a GPU, and reports the SM resources of each configuration.

    python ci/compile_cutedsl.py --kernel decode --arch sm_90

The exit status is 1 if a program does not compile or uses local memory (stack or register spills), or if ptxas serialised its wgmma
instructions.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import machine_code

from tokenspeed_kernel_nvidia import warmup
from tokenspeed_kernel_nvidia._programs import Program
from tokenspeed_kernel_nvidia.program_backend import use_backend

# Attribute types in the ELF section .nv.info. The value of a _SIZED_VALUE attribute is the function's symbol and a number.
_SIZED_VALUE = 4
_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One configuration of a program.

    Attributes:
        name: the name from `warmup.describe`.
        registers: registers per thread at launch, before setmaxnreg.
        local_bytes: bytes of stack per thread in local memory, spills included.
        shared_bytes: bytes of shared memory per CTA; None if the number is not a constant in the host code.
        code_bytes: size of the kernel's code in bytes.
        seconds: compile time.
        serialised: whether the machine code waits for each wgmma before it starts the next.
        error: why the compilation failed; empty if it succeeded.
    """

    name: str
    registers: int = 0
    local_bytes: int = 0
    shared_bytes: int | None = None
    code_bytes: int = 0
    seconds: float = 0.0
    serialised: bool = False
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.name}\n  does not compile: {self.error}"
        shared = "?" if self.shared_bytes is None else f"{self.shared_bytes:6}"
        facts = f"{self.registers:3} registers  {shared} B shared  {self.local_bytes:3} B local  {self.code_bytes:6} B code"
        return f"{facts}  {self.seconds:5.1f} s  {self.name}"


def _numbers(image: bytes) -> dict[int, int]:
    """Returns the largest value of each attribute in the section .nv.info."""
    found: dict[int, int] = {}
    for name, offset, size in machine_code.sections(image):
        at, end = (offset, offset + size) if name == ".nv.info" else (0, 0)
        while at < end:
            form, attribute, length = struct.unpack_from("<BBH", image, at)
            at += 4
            if form == _SIZED_VALUE:
                if length == 8:
                    found[attribute] = max(found.get(attribute, 0), struct.unpack_from("<I", image, at + 4)[0])
                at += length
    return found


def _shared_bytes(host: str) -> int | None:
    """Returns the dynamic shared memory of a launch in bytes, from the host code: a constant in the third field of the launch
    options. None if the host code has no such constant.
    """
    stored = re.search(
        r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : .*array<3 x i32>, array<3 x i32>, i64.*\n\s*llvm\.store (%\d+), \1", host
    )
    if stored is None:
        return None
    constants = re.findall(rf"{stored[2]} = llvm\.mlir\.constant\((\d+) : i64\)", host[: stored.start()])
    return int(constants[-1]) if constants else None


def _built(program: Program[Any], config: Any, keep: bool) -> Any:
    """Compiles a program. If ``keep``, the sm_90 emulator's cache gets the program, so that the emulator's tests do not compile it
    again. A program that this cache has is compiled nevertheless, because the cache has no report of the compiler."""
    if not keep:
        with tempfile.TemporaryDirectory() as folder:
            return program.compile(config, f"--keep-cubin --keep-ptx --dump-dir {folder}")
    from sm90_emulator.programs import Recording

    backend = Recording()
    with use_backend(backend):
        program.cached(config)
        return backend.last or program.compile(config)


def _compile(program: Program[Any], config: Any, keep: bool) -> Compiled:
    name = warmup.describe(program, config)
    begun = time.perf_counter()
    try:
        compiled = _built(program, config, keep)
    except Exception as error:  # the error is reported with the other results
        return Compiled(name, error=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - begun
    image, ptx = bytes(compiled.__cubin__), str(compiled.__ptx__)
    numbers = _numbers(image)
    return Compiled(
        name,
        registers=numbers[_REGISTERS],
        local_bytes=max(numbers.get(_FRAME, 0), numbers.get(_STACK, 0)),
        shared_bytes=_shared_bytes(str(compiled.ir_module)),
        code_bytes=sum(size for section, _, size in machine_code.sections(image) if section.startswith(".text.")),
        seconds=seconds,
        serialised=machine_code.serialised(image, ptx),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="WORD", help="only programs whose line has this; repeatable"
    )
    parser.add_argument("--arch", default="", help="only for this architecture: sm_90")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--each", action="store_true", help="of each program the first configuration only")
    parser.add_argument("--keep", action="store_true", help="also write the programs to the cache of the package sm90-emulator")
    options = parser.parse_args(arguments)
    selection = [
        (program, config) for program, config in warmup.select(options.kernel, every=True) if program.arch.startswith(options.arch)
    ]
    if options.each:
        selection = [*{program.name: (program, config) for program, config in reversed(selection)}.values()]
    if not selection:
        parser.error("no program has that in its line; `python -m tokenspeed_kernel_nvidia.warmup --list` shows them")
    begun = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = []
        for result in pool.map(functools.partial(_compile, keep=options.keep), *zip(*selection, strict=True)):
            print(result, flush=True)
            results.append(result)
    broken = [result for result in results if result.error]
    local = [result for result in results if result.local_bytes]
    serialised = [result for result in results if result.serialised]
    seconds = time.perf_counter() - begun
    print(
        f"{len(results)} configurations in {seconds:.0f} s: {len(broken)} do not compile, {len(local)} use local memory, "
        f"{len(serialised)} have serialised wgmma instructions"
    )
    for result in local:
        print(f"  {result.local_bytes} B local: {result.name}")
    for result in serialised:
        print(f"  serialised: {result.name}")
    return 1 if broken or local or serialised else 0


if __name__ == "__main__":
    sys.exit(main())
