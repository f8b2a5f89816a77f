"""Compiles programs ahead of time: ``python -m tokenspeed_kernel_nvidia.warmup``.

No GPU is needed. The compiled programs are written to the cache that kernel calls read; ``TOKENSPEED_KERNEL_PROGRAMS`` selects
another directory for the cache, for instance in a container's image.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import tokenspeed_kernel_nvidia
from tokenspeed_kernel_base.compilation import compile_policy
from tokenspeed_kernel_nvidia._programs import Program, cache_directory, toolchain

INTERRUPTED = 130  # exit code after Ctrl-C


@dataclass(frozen=True)
class Warmed:
    """The outcome of compiling one configuration of a program.

    Attributes:
        program, config: the program and the configuration that were compiled.
        seconds: compile time in seconds; 0 if the program was in a pack or in the cache.
        error: why the compilation failed; empty on success.
    """

    program: Program[Any]
    config: Any
    seconds: float
    error: str

    def __str__(self) -> str:
        state = "failed" if self.error else f"{self.seconds:5.1f} s" if self.seconds else "kept"
        return f"{state:>8}  {describe(self.program, self.config)}" + (f"\n{self.error}" if self.error else "")


def programs() -> list[Program[Any]]:
    """Returns all programs of this package, sorted by name."""
    found = {}
    for info in pkgutil.walk_packages(tokenspeed_kernel_nvidia.__path__, "tokenspeed_kernel_nvidia."):
        # Import only modules that declare programs: modules of device code would import the compiler.
        spec = info.module_finder.find_spec(info.name, None)
        source = getattr(spec.loader, "get_source", None) if spec is not None else None
        if source is not None and "\n@program(" in (source(info.name) or ""):
            declared = vars(importlib.import_module(info.name)).values()
            found.update({value.name: value for value in declared if isinstance(value, Program)})
    return [found[name] for name in sorted(found)]


def describe(program: Program[Any], config: Any) -> str:
    """Returns the line that describes a program's configuration in listings: program, architecture, configuration. `select` looks
    for words in this line."""
    return f"{program.name} {program.arch} {config}"


def select(words: Sequence[str] = (), *, every: bool = False) -> list[tuple[Program[Any], Any]]:
    """Returns programs, each with one of its configurations.

    Args:
        words: only configurations for which the result of `describe` contains all of these words.
        every: whether to include configurations that are used only if the caller names a kernel.
    """
    found = [(program, config) for program in programs() for config in (program.configs() if every else program.usual())]
    return [(program, config) for program, config in found if all(word in describe(program, config) for word in words)]


def count_lines(selection: Iterable[tuple[Program[Any], Any]]) -> Iterator[str]:
    """Yields one line per program, starting with the program that has the most configurations. A line has the program's number of
    configurations. Then it names each field of the configuration that has several values, with the number of values, because these
    numbers multiply the number of programs. The last line is the total."""
    configs: dict[Program[Any], list[Any]] = {}
    for program, config in selection:
        configs.setdefault(program, []).append(config)
    for program, found in sorted(configs.items(), key=lambda item: -len(item[1])):
        names = [field.name for field in dataclasses.fields(found[0])] if dataclasses.is_dataclass(found[0]) else []
        values = {name: len({repr(getattr(config, name)) for config in found}) for name in names}
        fields = sorted(((count, name) for name, count in values.items() if count > 1), reverse=True)
        yield f"{len(found):>6}  {program.name}: {', '.join(f'{name} {count}' for count, name in fields) or 'one of each'}"
    yield f"{sum(map(len, configs.values())):>6}  in all"


def warm_up(selection: Sequence[tuple[Program[Any], Any]], jobs: int = 1) -> Generator[Warmed, None, None]:
    """Compiles the programs of a selection that are neither in a pack nor in the cache. Yields the outcome of each configuration
    when it is complete. Closing the generator early ends the worker processes.

    Args:
        selection: see `select`.
        jobs: the number of worker processes.

    Raises:
        RuntimeError: there is no cache, because it is switched off or there is no home directory.
    """
    if cache_directory() is None:
        raise RuntimeError("compiled programs are not kept here: set TOKENSPEED_KERNEL_PROGRAMS to a directory")
    if jobs == 1:
        yield from (_warm(program, config) for program, config in selection)
        return
    started_before = {*multiprocessing.active_children()}
    # Worker processes are spawned, because the compiler's threads do not survive a fork. Each worker gets its own process group,
    # which includes the linker processes that the worker starts.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=os.setpgid, initargs=(0, 0)) as pool:
        try:
            with _interrupts_ignored():
                running = [pool.submit(_warm, program, config) for program, config in selection]
            yield from (done.result() for done in as_completed(running))
        except BaseException:  # the generator was interrupted or closed early
            pool.shutdown(wait=False, cancel_futures=True)
            _end({*multiprocessing.active_children()} - started_before)
            raise


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Context manager: processes that start inside the ``with`` block ignore Ctrl-C. The parent process handles Ctrl-C and ends
    them."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(workers: Iterable[BaseProcess]) -> None:
    """Kills worker processes and their children, and removes the partial files that they left in the cache."""
    for worker in workers:
        worker.kill()
        with contextlib.suppress(OSError):  # its process group may not exist yet
            os.killpg(worker.pid or 0, signal.SIGKILL)
    directory = cache_directory()
    for worker in workers:
        worker.join()
        for part in directory.glob(f".*.{worker.pid}-*") if directory is not None else ():
            part.unlink(missing_ok=True)


def _warm(program: Program[Any], config: Any) -> Warmed:
    if program.is_kept(config):
        return Warmed(program, config, 0.0, "")
    begun = time.perf_counter()
    try:
        with compile_policy("allow"):  # a warm-up compiles even if the policy forbids compilation
            program(config)
    except Exception as error:  # a failed compilation is yielded as an outcome too
        return Warmed(program, config, 0.0, f"{type(error).__name__}: {error}")
    kept = program.is_kept(config)
    return Warmed(program, config, time.perf_counter() - begun, "" if kept else f"{cache_directory()} cannot be written")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns its exit code: 1 if a compilation failed, 130 if it was interrupted (Ctrl-C), 0 otherwise."""
    parser = argparse.ArgumentParser("python -m tokenspeed_kernel_nvidia.warmup", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only configurations whose line in --list has all these words")
    parser.add_argument("--arch", help="only for this architecture, for example sm_90a")
    parser.add_argument(
        "--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), help="number of processes (default: number of cores)"
    )
    parser.add_argument("--every", action="store_true", help="also kernels that calls use only by name")
    parser.add_argument(
        "--list", action="store_true", help="list configurations, and whether each is in a pack or cached; compile nothing"
    )
    parser.add_argument("--count", action="store_true", help="count each program's configurations; compile nothing")
    options = parser.parse_args(arguments)
    selection = [
        (program, config) for program, config in select(options.words, every=options.every) if options.arch in (None, program.arch)
    ]
    if not selection:
        parser.error("no configuration has all these words; --list shows them")
    if options.count:
        print(*count_lines(selection), sep="\n")
        return 0
    if options.list:
        for program, config in selection:
            print(f"{'kept' if program.is_kept(config) else 'to do':>8}  {describe(program, config)}")
        return 0
    begun, done, compiled, failed = time.perf_counter(), 0, 0, 0
    try:
        with contextlib.closing(warm_up(selection, options.jobs)) as outcomes:
            for done, outcome in enumerate(outcomes, 1):
                print(f"{done:>{len(str(len(selection)))}} of {len(selection)} {outcome}", flush=True)
                compiled += outcome.seconds > 0
                failed += bool(outcome.error)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {done} of {len(selection)}, which are kept; the same command goes on with the rest")
        return INTERRUPTED
    kept, seconds = len(selection) - compiled - failed, time.perf_counter() - begun
    print(
        f"{compiled} compiled, {kept} kept before, {failed} failed in {seconds:.1f} s; they are in {cache_directory()} or in packs"
    )
    print(f"for {', '.join(toolchain())}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
