"""Checks that fresh processes select the same kernels for all cases of all operators, in any order of plugins and with any content
of the caches.

    python ci/same_selection.py --processes 100 --output ci/same_selection.json

Each process imports the wheels' packages and registers their plugins in another random order. The processes are forks of server
processes. Each server has another hash seed, and forks `_FORKS` processes. When a server forks its first process, it has imported
PyTorch and nothing of this project. For the other processes, it has imported the core without plugins and made the arguments of all
cases, because making them takes most of the time. Half of the processes have their own cache directories; the other half shares
one. The shared directory holds tuned results of another device, which selection must ignore. Each process selects for the CPU, and
for each platform of `PLATFORMS` as if the device were present. The exit status is 1 if the selections of two processes differ; the
first differing selections are printed.
"""

from __future__ import annotations

import argparse
import builtins
import hashlib
import importlib
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

PLATFORMS = ("h200", "gfx950")
_GROUP = "tokenspeed_kernel.plugins"
_PREFIX = "TOKENSPEED_KERNEL_"
_SHOWN = 10
_FORKS = 20  # 100 processes then have 5 hash seeds

_Arguments = dict[tuple[str, str], dict[str, Any]]  # by operator and case


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=3, help=f"number of processes; {_FORKS} of them share a server")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="servers at a time (default: the cores)")
    parser.add_argument("--operator", action="append", default=[], help="only this operator; several may be given")
    parser.add_argument("--seed", type=int, default=0, help="of the orders")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--caches", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        _serve(options.seed, options.serve, options.operator, options.caches)
        return 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder, "shared")
        _plant_results_of_another_device(shared)
        first: list[str] | None = None
        for number, lines in enumerate(_of_processes(options, Path(folder))):
            if first is None:
                first = lines
            elif lines != first:
                differing = sorted({*first} ^ {*lines})
                print(f"process {number} selects otherwise than process 0:", *differing[:_SHOWN], sep="\n  ")
                return 1
    lines = first or []
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    seconds = time.perf_counter() - started
    print(f"{options.processes} processes made the same {len(lines)} selections ({digest}) in {seconds:.0f} s")
    if options.output is not None:
        from tokenspeed_kernel.workbench.benchmark import write_result

        operators = len({line.partition(" | ")[0] for line in lines})
        command = shlex.join(["python", "ci/same_selection.py", *(sys.argv[1:] if arguments is None else arguments)])
        found = {"processes": options.processes, "operators": operators, "selections": len(lines), "digest": digest}
        write_result(options.output, "cpu", command=command, platforms=["cpu", *PLATFORMS], **found, seconds=round(seconds))
    return 0


def _of_processes(options: argparse.Namespace, caches: Path) -> Iterator[list[str]]:
    """Yields the selections of each process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX) and name != "PYTHONHASHSEED"}
    environment[_PREFIX + "DISABLE_PLUGINS"] = "*"
    named = [word for operator in options.operator for word in ("--operator", operator)]

    def serve(numbers: range) -> range:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(len(numbers)), "--seed", str(numbers[0]), *named]
        subprocess.run([*command, "--caches", str(caches)], env=environment, check=True)
        return numbers

    processes = range(options.seed, options.seed + options.processes)
    with ThreadPoolExecutor(options.jobs) as servers:
        for numbers in servers.map(serve, [processes[first : first + _FORKS] for first in range(0, len(processes), _FORKS)]):
            for number in numbers:
                yield (caches / f"{number}.selections").read_text().splitlines()


def _serve(seed: int, count: int, operators: list[str], caches: Path) -> None:
    """Imports PyTorch, and forks the processes one after the other. Each process writes its selections to a file."""
    importlib.import_module("torch").set_num_threads(1)  # threads do not survive a fork
    assert not [name for name in sys.modules if name.startswith("tokenspeed_kernel")]
    made: _Arguments = {}
    for number in range(seed, seed + count):
        if number == seed + 1:
            made = _arguments_of_cases(operators)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ["XDG_CACHE_HOME"] = str(caches / ("shared" if number % 2 else str(number)))
                (caches / f"{number}.selections").write_text("\n".join(selections(number, operators, made)))
                status = 0
            except BaseException:  # the error must not unwind the server's frames in the forked process
                traceback.print_exc()
            finally:
                os._exit(status)
        if ended := os.waitpid(child, 0)[1]:
            raise RuntimeError(f"process {number} failed: exit status or signal {os.waitstatus_to_exitcode(ended)}")


def _arguments_of_cases(only: list[str]) -> _Arguments:
    """Returns the arguments of all cases of the named operators, or of all operators if none is named."""
    importlib.import_module("tokenspeed_kernel")  # declares the operators
    from tokenspeed_kernel_base.operator import operators

    found = [op for op in operators() if not only or op.mode in only]
    return {(str(op), case.name): _arguments_of(op, case) for op in found for case in op.all_cases()}


def _arguments_of(op: Any, case: Any) -> dict[str, Any]:
    from tokenspeed_kernel.workbench.numerics.recipes import asked, request_without_values

    _, arguments = request_without_values(op, case) or asked(op, case)
    return arguments


def _plant_results_of_another_device(cache: Path) -> None:
    """Writes a table with tuned results of another CPU, as if the cache directory had been copied from another machine."""
    from tokenspeed_kernel.workbench.tuned import Device, Entry, Result
    from tokenspeed_kernel.workbench.tuned.store import format_table
    from tokenspeed_kernel_base.operator import get_operator
    from tokenspeed_kernel_base.platform import cpu_platform

    op = get_operator("rmsnorm")
    other = Device("another CPU", "cpu", 1)
    entries = []
    for case in op.all_cases():
        if not case.large:
            request = op.request(op.complete(case.build()))
            results = (Result("reference_rmsnorm", {}, 1.0, None, ""),)
            entries.append(Entry(str(op), str(request.signature), request.traits, request.buckets, other, results))
    table = cache / "tokenspeed_kernel" / "tuned" / Device.of(cpu_platform()).file_name
    table.parent.mkdir(parents=True)
    table.write_text(format_table(entries))


# -- in a forked process --------------------------------------------------------------------------------------------------------


def selections(seed: int, only: list[str], made: _Arguments) -> list[str]:
    """Returns one line per operator, case and platform: the eligible kernels by rank, and the configuration of the best kernel.

    Args:
        seed: of the random orders.
        only: the modes of the operators; empty for all operators.
        made: arguments that the server has made. The arguments of all other cases are made here.
    """
    shuffled = random.Random(seed).sample
    packages = sorted({entry.module.partition(".")[0] for entry in metadata.entry_points(group=_GROUP)})
    for package in shuffled(packages, len(packages)):
        importlib.import_module(package)
    from tokenspeed_kernel import discover_plugins, plugins, reload_settings
    from tokenspeed_kernel_base.operator import operators

    del os.environ[_PREFIX + "DISABLE_PLUGINS"]
    reload_settings()
    # Discovery sorts the entry points. Here their order is random, because the test must show that selection does not depend on it.
    vars(plugins)["sorted"] = lambda values, **_: shuffled(listed := builtins.sorted(values, key=str), len(listed))
    discover_plugins(force=True)
    del vars(plugins)["sorted"]
    found = [op for op in operators() if not only or op.mode in only]
    return builtins.sorted(line for op in shuffled(found, len(found)) for line in _selections_of(op, made))


def _selections_of(op: Any, made: _Arguments) -> Iterator[str]:
    from dataclasses import replace

    from tokenspeed_kernel_base.platform import cpu_platform, named_platform

    platforms = [cpu_platform(), *map(named_platform, PLATFORMS)]
    for case in op.all_cases():
        arguments = made.get((str(op), case.name)) or _arguments_of(op, case)
        request = op.request(arguments)
        for platform in platforms:
            explanation = op.consider_prepared(replace(request, platform=platform), arguments, None)
            accepted = [verdict for verdict in explanation.verdicts if verdict.accepted]
            order = " > ".join(verdict.spec.name for verdict in accepted) or "none"
            config = json.dumps(dict(accepted[0].config), sort_keys=True) if accepted else ""
            yield f"{op} | {case.name} | {platform.arch} | {order} | {config}"


if __name__ == "__main__":
    sys.exit(main())
