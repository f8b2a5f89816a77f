"""Runs many engines in a given time on the GPUs of one machine. Engines start side by side, and are measured alone on their GPU.

The plugins' benchmarks share this module. Engines are processes. An engine writes result lines (JSON) to ``NAME.jsonl``, makes the
file ``NAME.ready`` when it has started, and waits for the file ``go`` before it measures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A row says how many other engines were still starting on the GPU when this one was measured; usually none.
BESIDE = "engines_starting"
_SHARE_S = 30.0  # a round starts only if this much time is left for each of its engines
Engines = list[tuple[str, str]]  # cases and variants


@dataclass(frozen=True)
class Round:
    """Engines that start together: those that need all GPUs, and those of each GPU. Engines are measured in this order."""

    number: int
    wide: Engines
    shares: tuple[Engines, ...]


class RunningEngine:
    """One running engine, and its files."""

    def __init__(self, name: str, program: Path, words: Sequence[str], out: Path, variables: Mapping[str, str]) -> None:
        """Starts the engine.

        Args:
            name: the variant.
            program: the script of the engine, which takes ``--name`` and ``--out``.
            words: further arguments of the script.
            out: the folder of its results, which is made.
            variables: environment variables, in addition to those of this process.
        """
        out.mkdir(parents=True)
        self.name, self.out, self.log = name, out, out / "log"
        command = [sys.executable, str(program), "--name", name, "--out", str(out), *words]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **variables}, start_new_session=True
            )

    def rows(self) -> list[dict[str, Any]]:
        """Returns the result lines that the engine has written so far."""
        lines = self.out / f"{self.name}.jsonl"
        return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []

    def ready(self) -> bool:
        """Returns whether the engine has started."""
        return (self.out / f"{self.name}.ready").exists()

    def waiting(self) -> bool:
        """Returns whether the engine is still starting."""
        return not self.ready() and self.process.poll() is None

    def end(self) -> None:
        """Ends the engine, and the processes that it has started, because these hold device memory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Lease(ABC):
    """Runs the engines of all cases, until the time is up."""

    def __init__(self, given: argparse.Namespace, temporary: Path, metadata: dict[str, Any]) -> None:
        """
        Args:
            given: the arguments of `add_arguments`.
            temporary: a folder for the engines' files.
            metadata: of the results; has ``command``.
        """
        self.given, self.temporary, self.metadata = given, temporary, metadata
        self.end = time.monotonic() + given.seconds
        self.files = threading.Lock()
        self.results: dict[str, dict[str, Any]] = {}
        self.number = 0

    @abstractmethod
    def launch(self, name: str, variant: str, gpus: Sequence[int], out: Path) -> RunningEngine:
        """Starts an engine of a case, which waits for ``go`` in its folder ``out`` before it measures."""

    @abstractmethod
    def described(self, name: str) -> dict[str, Any]:
        """Returns the fields of a case's file that say what is measured: ``model``, ``layers``, ``gpus``."""

    def compared(self, name: str, engine: RunningEngine) -> dict[str, Any]:
        """Returns further fields of a case's file, after an engine has been measured."""
        return {}

    def start(self, name: str, variant: str, gpus: Sequence[int]) -> RunningEngine:
        """Starts an engine, which waits before it measures."""
        with self.files:
            self.number += 1
            out = self.temporary / f"{self.number}-{name}-{variant}"
        made = self.launch(name, variant, gpus, out)
        _pin(made.process.pid, gpus, self.given.gpus)
        self.say(f"GPU {gpus}: {name} {variant} starts")
        return made

    def wait_until_ready(self, engines: Sequence[RunningEngine]) -> None:
        """Waits until all engines are ready or have ended, at most ``--start-seconds``."""
        end = min(time.monotonic() + self.given.start_seconds, self.end)
        while time.monotonic() < end and any(one.waiting() for one in engines):
            time.sleep(0.2)

    def measure(self, name: str, engine: RunningEngine, starting: int) -> None:
        """Lets a ready engine measure, waits for its end, and writes the case's file."""
        from tokenspeed_kernel.workbench.benchmark import as_text

        began = time.monotonic()
        (engine.out / "go").touch()
        end = min(began + self.given.engine_seconds, self.end)
        while time.monotonic() < end and engine.process.poll() is None:
            time.sleep(0.1)
        done = engine.process.poll() is not None
        engine.end()
        rows = [{**row, BESIDE: starting} for row in engine.rows()]
        if not done:
            rows.append({"engine": engine.name, "figure": "failed", "task": "time", "error": "the time was up"})
        elif not any(row["figure"] == "end" for row in rows):
            rows.append(
                {
                    "engine": engine.name,
                    "figure": "failed",
                    "task": "start",
                    "error": engine.log.read_text(errors="replace")[-1500:],
                }
            )
        with self.files:
            if name not in self.results:
                self.results[name] = self.earlier(name) or {"metadata": dict(self.metadata), **self.described(name), "rows": []}
            made = self.results[name]
            made["rows"] += rows
            made |= self.compared(name, engine)
            self.given.folder.mkdir(parents=True, exist_ok=True)
            (self.given.folder / f"{name}.json").write_text(as_text(made))
            (self.given.folder / f"{name}-{engine.name}.log").write_text(engine.log.read_text(errors="replace")[-60000:])
        found = "; ".join(
            str(row.get("ms", row.get("error", ""))) for row in rows if row["figure"] in ("decode", "prefill", "failed")
        )
        self.say(f"{name} {engine.name}: {time.monotonic() - began:.0f} s: {found[:300]}")

    def earlier(self, name: str) -> dict[str, Any] | None:
        """Returns the content of a case's file, with this run's command added; None if there is no file."""
        file = self.given.folder / f"{name}.json"
        if not file.exists():
            return None
        found: dict[str, Any] = json.loads(file.read_text())
        found["metadata"]["command"] += f"; {self.metadata['command']}"
        return found

    def wait_for_others(self) -> None:
        """Waits for the file ``--measure-after``: until then, another program uses the GPUs."""
        file = self.given.measure_after
        while file is not None and not file.exists() and time.monotonic() < self.end:
            time.sleep(0.2)

    def measure_all(self, engines: Sequence[tuple[str, RunningEngine]]) -> None:
        """Measures the engines of a round: the ready ones in order, then those that become ready later. With ``--together``, all
        run their tasks as soon as they are ready, and only their results are awaited in this order.
        """
        self.wait_for_others()
        waiting = list(engines)
        for _, engine in engines if self.given.together else ():
            (engine.out / "go").touch()
        while waiting:
            able = [pair for pair in waiting if not pair[1].waiting()]
            if not able and time.monotonic() < self.end:
                time.sleep(0.2)
                continue
            name, engine = able[0] if able else waiting[0]
            waiting.remove((name, engine))
            starting = sum(other.waiting() for _, other in waiting)
            self.measure(name, engine, starting)

    def on_gpu(self, gpu: int, begun: list[tuple[str, RunningEngine]], later: Sequence[Engines]) -> None:
        """Measures engines that have been started, and then starts and measures the later engines of a GPU."""
        self.wait_until_ready([engine for _, engine in begun])
        self.measure_all(begun)
        for engines in later:
            left, wanted = self.end - time.monotonic(), self.given.start_estimate + _SHARE_S * len(engines)
            if left < wanted:
                self.say(f"GPU {gpu}: {left:.0f} s left, {wanted:.0f} s needed, so not measured: {engines}")
                return
            begun = [(name, self.start(name, variant, [gpu])) for name, variant in engines]
            self.wait_until_ready([engine for _, engine in begun])
            self.measure_all(begun)

    def run(self, rounds: Sequence[Round]) -> None:
        """Runs the rounds. Each GPU goes on with its next engines by itself."""
        gpus, wide = self.given.gpus, []
        for name, variant in rounds[0].wide:
            wide.append((name, self.start(name, variant, gpus[: self.described(name)["gpus"]])))
            if not self.given.wide_together:
                self.wait_until_ready([wide[-1][1]])
        # With fewer GPUs than a round has shares, a GPU takes several shares, one after another.
        shares = [[share for each in rounds for share in each.shares[at :: len(gpus)] if share] for at in range(len(gpus))]
        begun = [
            [(name, self.start(name, variant, [gpu])) for name, variant in own[0]] if own else []
            for gpu, own in zip(gpus, shares, strict=True)
        ]
        if wide:
            self.wait_until_ready([engine for engines in (wide, *begun) for _, engine in engines])
            self.measure_all(wide)
        threads = [
            threading.Thread(target=self.on_gpu, args=(gpu, engines, own[1:]))
            for gpu, engines, own in zip(gpus, begun, shares, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def say(self, text: str) -> None:
        print(f"[{self.given.seconds - (self.end - time.monotonic()):.0f} s] {text}", flush=True)


def metadata_of(command: str, commit: str) -> dict[str, Any]:
    """Returns the metadata of the results: the device, versions, the commit and the command.

    Args:
        command: the command line.
        commit: the commit of this code, where it is a copy whose checkout says another; empty if the checkout is right.
    """
    from tokenspeed_kernel.workbench.benchmark.metadata import collect_metadata

    found = collect_metadata(command)
    return dataclasses.asdict(dataclasses.replace(found, git_commit=commit) if commit else found)


def add_arguments(parser: argparse.ArgumentParser, gpus: Sequence[int]) -> None:
    """Adds the options of a `Lease` to a parser. ``gpus`` is the default of the option of that name."""
    parser.add_argument("--gpus", nargs="+", type=int, default=list(gpus))
    parser.add_argument(
        "--engines",
        nargs="+",
        metavar="CASE:VARIANT,...",
        help="instead of the rounds; engines joined by commas start together, and GPUs take the words in turn",
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the results")
    parser.add_argument("--seconds", type=float, default=540.0, help="when everything must be done")
    parser.add_argument("--start-seconds", type=float, default=170.0, help="how long a round waits for its slowest engine")
    parser.add_argument("--start-estimate", type=float, default=80.0, help="seconds that a start takes at least")
    parser.add_argument("--engine-seconds", type=float, default=90.0, help="the longest measurement of one engine")
    parser.add_argument("--together", action="store_true", help="engines run their tasks side by side, so no time is meaningful")
    parser.add_argument(
        "--wide-together",
        action="store_true",
        help="engines that need all GPUs start together; by default one after another, because of the memory",
    )
    parser.add_argument("--measure-after", type=Path, metavar="FILE", help="measure nothing before this file exists")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="print the engines of each round, and stop")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")


def selected(rounds: Sequence[Round], numbers: Sequence[int], cases: Sequence[str], variants: Sequence[str]) -> list[Round]:
    """Returns the rounds of these numbers, with the engines of these cases and variants only."""

    def kept(engines: Engines) -> Engines:
        return [(name, variant) for name, variant in engines if name in cases and variant in variants]

    return [Round(each.number, kept(each.wide), tuple(map(kept, each.shares))) for each in rounds if each.number in numbers]


def shares_of(words: Sequence[str], cases: Sequence[str], variants: Sequence[str]) -> tuple[Engines, ...]:
    """Returns the engines that ``--engines`` names. A word names engines that start together on one GPU, such as
    ``CASE:VARIANT,CASE:VARIANT``. GPUs take the words in turn. Exits if a case or a variant is unknown.
    """

    def engine(text: str) -> tuple[str, str]:
        case, _, variant = text.partition(":")
        if case not in cases or variant not in variants:
            raise SystemExit(f"--engines takes CASE:VARIANT of {', '.join(cases)} and {', '.join(variants)}; got {text!r}")
        return case, variant

    return tuple([engine(text) for text in word.split(",")] for word in words)


def _pin(pid: int, gpus: Sequence[int], every: Sequence[int]) -> None:
    """Gives an engine the CPU cores of its GPUs, so that engines that start on one GPU do not slow down those of another."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(every)
    if share:
        os.sched_setaffinity(
            pid, [core for gpu in gpus for core in cores[every.index(gpu) * share : (every.index(gpu) + 1) * share]]
        )
