"""Compiles every Triton kernel for GPUs that this machine does not have, and reports the SM/CU resources of each kernel.

Launchers run as on the device, on the tensors of the operators' cases. Triton's launch function is replaced by one that compiles
and never launches. So every kernel is compiled in exactly the configurations that the cases use. Tensors of large cases have
uninitialised values.

    python ci/compile_triton.py --arch sm_90 --arch gfx950 --kernel decode

``ci/compiled.json`` records pairs of architecture and kernel that compiled whole. ``--changed`` compiles only recorded pairs whose
sources or whose compiler have changed since, ``--unrecorded`` only pairs without a record; both may be given. ``--record`` adds the
pairs that this run compiled whole to the record. ``--seconds`` sets a time limit.

The exit status is 1 in these cases: a kernel does not compile, or needs too much shared memory; operands of a wgmma may be
overwritten while the wgmma is in flight; ptxas serialised wgmma instructions; machine code reads uninitialised registers; a kernel
spills. ``ci/allowances.toml`` lists what is tolerated of serialised instructions and spilled bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import compile_record
import machine_code
from compile_record import Job

# The largest shared memory per CTA, in bytes, by architecture.
ARCHITECTURES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536, "gfx950": 163_840}
ALLOWANCES = Path(__file__).with_name("allowances.toml")
ROOT = Path(__file__).resolve().parents[1]
SOLUTION = "triton"
# The fields of a work item: architecture; kernel; whether large cases are left out; the folder for generated code, or None; a
# pattern of case names; the time at which to stop.
_Work = tuple[str, str, bool, "Path | None", str, float]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One device function in one configuration.

    Attributes:
        arch: the architecture that the function was compiled for.
        kernel: the registered kernel whose launcher launches the function.
        function: the name of the device function.
        configuration: the constexpr arguments, and the first digits of the compiled function's hash.
        case: the first case that uses this configuration.
        warps: warps per CTA.
        registers: registers per thread; on AMD vector registers, accumulation registers included.
        spilled_bytes: bytes of local memory per thread, for spills and stack.
        sgpr_spills: scalar registers spilled to vector lanes (AMD).
        shared_bytes: bytes of shared memory per CTA.
        seconds: compile time.
    """

    arch: str
    kernel: str
    function: str
    configuration: str
    case: str
    warps: int
    registers: int
    spilled_bytes: int
    sgpr_spills: int
    shared_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case for which the launcher or the compiler raised an error."""

    arch: str
    kernel: str
    case: str
    error: str


def main() -> int:
    options = _parse()
    if options.record and (options.small or options.case):
        raise SystemExit("--record needs all cases, so it excludes --small and --case")
    jobs = [(arch, kernel) for kernel in _kernels(options.kernel) for arch in options.arch or ARCHITECTURES]
    digests = {kernel: compile_record.digest(_sources(kernel), ROOT) for kernel in {kernel for _, kernel in jobs}}
    recorded = compile_record.read(compile_record.RECORD, _compiler())
    if options.changed or options.unrecorded:
        jobs = compile_record.chosen(jobs, digests, recorded, changed=options.changed, unrecorded=options.unrecorded)
        if not jobs:
            print(f"Nothing to compile: {compile_record.RECORD.name} has {len(recorded)} pairs of architecture and kernel.")
            return 0
    compiled: list[Compiled] = []
    failures: list[Failure] = []
    whole: set[Job] = set()
    began = time.monotonic()
    end = began + options.seconds
    # Each pair of kernel and architecture is compiled in its own process, because Triton keeps state per process, and the end of a
    # process releases its memory.
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        idle = threading.Semaphore(options.jobs)
        work = ((arch, kernel, options.small, options.dump, options.case, end) for arch, kernel in jobs)
        for job, done, missed, complete in pool.imap_unordered(_compile, _until(end, idle, work)):
            idle.release()
            compiled += done
            failures += missed
            whole |= {job} if complete else set()
    compiled.sort(key=lambda c: (c.kernel, c.function, c.arch, c.configuration))
    _print(compiled, every=options.every)
    excess = _beyond_allowance(compiled)
    for failure in sorted(failures, key=lambda f: (f.kernel, f.arch, f.case)):
        print(f"FAILED {failure.kernel} for {failure.arch}, case {failure.case!r}: {failure.error}")
    for row in excess:
        print(
            f"SPILLS {row.function} ({row.kernel}) on {row.arch}: {row.spilled_bytes} bytes a thread, more than {ALLOWANCES.name} "
            f"allows, {row.configuration}, case {row.case!r}"
        )
    if options.json:
        rows = {"versions": _versions(), "compiled": [dataclasses.asdict(c) for c in compiled]}
        options.json.write_text(json.dumps({**rows, "failures": [dataclasses.asdict(f) for f in failures]}, indent=1))
    kernels = len({kernel for _, kernel in jobs})
    print(
        f"{len(compiled)} device functions of {kernels} kernels, {len(failures)} failures, {len(excess)} beyond their spill "
        f"allowance, in {time.monotonic() - began:.0f} s ({_versions()})"
    )
    left = [job for job in jobs if job not in whole]
    if left:
        print(f"Not compiled whole: {len(left)} of {len(jobs)} pairs of architecture and kernel.")
    if options.record:
        faulty = {(row.arch, row.kernel) for row in (*failures, *excess)}
        known = set(_kernels(""))
        kept = {(arch, kernel): found for (arch, kernel), found in recorded.items() if kernel in known}
        kept |= {(arch, kernel): digests[kernel] for arch, kernel in whole - faulty}
        compile_record.write(compile_record.RECORD, _compiler(), kept)
    nothing = not compiled and not whole
    return 1 if failures or excess or nothing else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", help=f"by default all of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--kernel", default="", help="kernels whose name this regular expression finds")
    parser.add_argument("--case", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--small", action="store_true", help="leave the large cases out")
    parser.add_argument("--every", action="store_true", help="print every configuration, not one line a function and architecture")
    parser.add_argument("--changed", action="store_true", help="compile recorded pairs that have changed")
    parser.add_argument("--unrecorded", action="store_true", help="compile pairs that ci/compiled.json does not list")
    parser.add_argument("--record", action="store_true", help="add what compiled whole, without a failure, to ci/compiled.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further compilation after this time")
    parser.add_argument("--json", type=Path, help="where to write every row")
    parser.add_argument("--dump", type=Path, help="a folder for the intermediate representations and the machine code")
    return parser.parse_args()


def _sources(kernel: str) -> list[Path]:
    """Returns the source files of a kernel: its launcher, its device code, the modules that these import, and the operator, which
    declares the cases."""
    from tokenspeed_kernel.workbench.tuned import source_files
    from tokenspeed_kernel_base.operator import get_operator
    from tokenspeed_kernel_base.registry import KernelRegistry

    registry = KernelRegistry.get()
    operator = get_operator(registry.get_by_name(kernel).operator)
    return [*source_files(registry.module_of(kernel)).values(), Path(inspect.getfile(operator.body))]


def _until(end: float, idle: threading.Semaphore, work: Iterator[_Work]) -> Iterator[_Work]:
    """Yields a work item each time a process is idle, until the time is up."""
    for item in work:
        idle.acquire()
        if time.monotonic() > end:
            return
        yield item


def _compiler() -> str:
    import triton

    return f"triton {triton.__version__}"


def _versions() -> str:
    import torch

    return f"{_compiler()}, torch {torch.__version__}"


def _kernels(pattern: str) -> list[str]:
    import tokenspeed_kernel  # noqa: F401  (declares the kernels)
    from tokenspeed_kernel_base.registry import KernelRegistry

    names = [
        spec.name for spec in KernelRegistry.get().list_kernels() if spec.solution == SOLUTION and re.search(pattern, spec.name)
    ]
    if not names:
        raise SystemExit(f"no {SOLUTION} kernel's name has {pattern!r} in it")
    return names


# -- one kernel on one architecture ------------------------------------------------------------------------------------------------


def _compile(work: _Work) -> tuple[Job, list[Compiled], list[Failure], bool]:
    """Compiles one kernel for one architecture. Returns this pair, the device functions, the failures, and whether all cases were
    compiled.
    """
    arch, kernel, small, dump, pattern, end = work
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the current default; Triton 3.9 warns that 3.10 will change it
    import tokenspeed_kernel  # noqa: F401  (declares the kernels)
    from tokenspeed_kernel.workbench.packing import device_of
    from tokenspeed_kernel_base.operator import get_operator
    from tokenspeed_kernel_base.platform import use_platform
    from tokenspeed_kernel_base.registry import KernelRegistry

    registry = KernelRegistry.get()
    spec = registry.get_by_name(kernel)
    platform = device_of(arch)
    if spec.capability.gap(platform) is not None:
        return (arch, kernel), [], [], True
    recorder = Recorder(arch, kernel, dump)
    failures = []
    with use_platform(platform), recorder.in_place_of_the_driver():
        op = get_operator(spec.operator)
        for case in op.all_cases():
            if (small and case.large) or not re.search(pattern, case.name):
                continue
            if time.monotonic() > end:
                return (arch, kernel), recorder.compiled, failures, False
            recorder.case = case.name
            try:
                _launch(op, spec, registry, case)
            except Exception as error:  # errors of the compiler are reported as failures
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
                failures.append(Failure(arch, kernel, case.name, text[-1500:]))
    return (arch, kernel), recorder.compiled, failures, True


def _launch(op: Any, spec: Any, registry: Any, case: Any) -> None:
    import torch

    from tokenspeed_kernel.workbench.numerics.verify import refusal
    from tokenspeed_kernel.workbench.packing import blank_draw
    from tokenspeed_kernel_base.ops.comm.pretended import as_rank_of

    with as_rank_of(case.world_size):
        drawn = op.complete(case.make(blank_draw()) if case.large else case.build("cpu"))
    if refusal(op, spec, drawn) is not None:
        return
    with torch.no_grad():
        registry.get_impl(spec.name)(**op.prepared(drawn, spec))


class Recorder:
    """Intercepts Triton's launches, compiles the kernels, and stores the results."""

    def __init__(self, arch: str, kernel: str, dump: Path | None) -> None:
        self.arch, self.kernel, self.dump = arch, kernel, dump
        self.case = ""
        self.compiled: list[Compiled] = []
        self._seen: set[str] = set()

    def in_place_of_the_driver(self) -> Any:
        import triton
        from triton.runtime.jit import JITFunction

        recorder, run = self, JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            """Returns no program, so that launchers remember none and launch none."""
            began = time.monotonic()
            compiled = run(function, *args, grid=grid, warmup=True, **kwargs)
            if compiled is None:
                raise RuntimeError(f"{function.__name__} was not compiled")
            recorder.note(compiled, time.monotonic() - began)
            limit = ARCHITECTURES.get(recorder.arch, math.inf)
            if compiled.metadata.shared > limit:
                raise RuntimeError(f"{function.__name__} wants {compiled.metadata.shared} bytes of shared memory, of {limit}")
            if _overtaken(compiled.asm.get("ttgir", "")):
                raise RuntimeError(f"{function.__name__} may overwrite operands in use: see wait_for_products in common_device.py")
            fault = _faults(compiled, recorder.arch)
            if fault:
                raise RuntimeError(f"{function.__name__}: {fault}")

        @contextlib.contextmanager
        def replaced() -> Iterator[None]:
            # The driver is not restored afterwards, because this process compiles one kernel for one architecture and then ends.
            triton.runtime.driver.set_active(_NoDevice(self.arch))
            JITFunction.run = compile_only
            # With a hook, as engines set it, Triton writes a kernel's constants as JSON, and fails if it cannot.
            triton.knobs.runtime.jit_post_compile_hook = lambda **compiled: None
            try:
                yield
            finally:
                JITFunction.run = run
                triton.knobs.runtime.jit_post_compile_hook = None

        return replaced()

    def note(self, compiled: Any, seconds: float) -> None:
        if compiled.hash in self._seen:
            return
        self._seen.add(compiled.hash)
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            for kind, content in compiled.asm.items():
                name = f"{self.kernel}.{compiled.name}.{self.arch}.{compiled.hash[:8]}.{kind}"
                (self.dump / name).write_bytes(content if isinstance(content, bytes) else str(content).encode())
        registers, spilled, sgpr_spills = _resources(compiled)
        names = compiled.src.fn.arg_names
        shown: dict[str, Any] = {}
        for (index, *inner), value in compiled.src.constants.items():
            if not inner and hasattr(value, "_asdict"):  # a struct of constants
                shown.update({f"{names[index]}.{field}": v for field, v in value._asdict().items() if isinstance(v, (int, str))})
            elif not inner and isinstance(value, int):
                shown[names[index]] = value
        meta = compiled.metadata
        self.compiled.append(
            Compiled(
                arch=self.arch,
                kernel=self.kernel,
                function=compiled.name,
                configuration=", ".join(f"{k}={v}" for k, v in shown.items() if k.partition(".")[0].isupper())
                + f" hash={compiled.hash[:8]}",
                case=self.case,
                warps=meta.num_warps,
                registers=registers,
                spilled_bytes=spilled,
                sgpr_spills=sgpr_spills,
                shared_bytes=meta.shared,
                seconds=round(seconds, 2),
            )
        )


class _NoDevice:
    """A Triton driver without a device, with only the functions that compilation needs."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        number = arch.removeprefix("sm_")
        self._target = GPUTarget("cuda", int(number), 32) if number != arch else GPUTarget("hip", arch, 64)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


def _overtaken(ttgir: str) -> bool:
    """Whether the next loop iteration may overwrite the left operand of a wgmma that is still in flight. This happens if the
    operand is in registers, and no instruction waits for the wgmma before the next iteration."""
    in_registers = re.search(r"warp_group_dot .*#ttg\.dot_op", ttgir)
    unfinished = re.search(r"warp_group_dot_wait.*pendings = [1-9]", ttgir)
    return bool(in_registers and unfinished) and "wgmma.wait_group" not in ttgir


def _faults(compiled: Any, arch: str) -> str:
    """Describes the first problem in the machine code of a kernel with wgmma; empty if there is none."""
    ptx = compiled.asm.get("ptx", "")
    if "wgmma.mma_async" not in ptx:
        return ""
    tolerated = arch in _allowances().get(compiled.name, {}).get("serialised", ())
    if not tolerated and machine_code.serialised(compiled.asm["cubin"], ptx):
        return "products are serialised by ptxas, which waits for each before the next: its -v says why"
    # nvdisasm cannot print life ranges of a kernel whose warps have different numbers of registers (setmaxnreg).
    ranges = _tool(compiled, "nvdisasm", "-c", "--print-life-ranges", "--life-range-mode", "narrow", may_fail=True)
    text = ranges or _tool(compiled, "nvdisasm", "-c")
    unwritten = machine_code.unwritten_uniform_registers(machine_code.instructions(text))
    unwritten += machine_code.unwritten_general_registers(ranges) if ranges else []
    return f"not compiled right, registers are read that nothing wrote: {unwritten[0]}" if unwritten else ""


def _tool(compiled: Any, name: str, *options: str, may_fail: bool = False) -> str:
    """Runs a CUDA tool of Triton's wheel on a kernel's machine code, and returns the output. With ``may_fail``, the output of a
    failed tool is empty."""
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        done = subprocess.run([tool, *options, cubin.name], capture_output=True, text=True, check=not may_fail)
        return done.stdout if done.returncode == 0 else ""


def _resources(compiled: Any) -> tuple[int, int, int]:
    """Returns registers per thread, bytes of local memory per thread, and the number of spilled scalar registers."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        found = {key: int(value) for key, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
        stack = found["private_segment_fixed_size"] + 4 * found["vgpr_spill_count"]
        return found["vgpr_count"], stack, found["sgpr_spill_count"]
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _tool(compiled, "cuobjdump", "-res-usage")))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), 0


# -- the report --------------------------------------------------------------------------------------------------------------------


def _print(compiled: Sequence[Compiled], *, every: bool) -> None:
    groups: dict[tuple[str, ...], list[Compiled]] = {}
    for row in compiled:
        key = (row.kernel, row.function, row.arch, row.configuration if every else "")
        groups.setdefault(key, []).append(row)
    print(f"{'kernel':<34} {'function':<34} {'arch':<7} {'configs':>7} {'regs':>5} {'spill B':>7} {'sgpr sp.':>8} {'shared B':>8}")
    for (kernel, function, arch, configuration), rows in groups.items():
        worst = max(rows, key=lambda r: (r.spilled_bytes, r.registers))
        print(
            f"{kernel:<34} {function:<34} {arch:<7} {len(rows):>7} {worst.registers:>5} {worst.spilled_bytes:>7} "
            f"{max(r.sgpr_spills for r in rows):>8} {max(r.shared_bytes for r in rows):>8}  {configuration}"
        )


def _beyond_allowance(compiled: Sequence[Compiled]) -> list[Compiled]:
    """Returns the functions that spill more bytes than ``ci/allowances.toml`` allows."""
    return [row for row in compiled if row.spilled_bytes > _allowances().get(row.function, {}).get(row.arch, 0)]


@functools.cache
def _allowances() -> dict[str, dict[str, Any]]:
    """Returns the tables of ``ci/allowances.toml`` by function."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    return tomllib.loads(ALLOWANCES.read_text())


if __name__ == "__main__":
    sys.exit(main())
