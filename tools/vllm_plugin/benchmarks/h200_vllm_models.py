"""Measures several models with random weights in vLLM, with and without this plugin, on the H200s of one machine.

    python tools/vllm_plugin/benchmarks/h200_vllm_models.py --folder tools/vllm_plugin/benchmarks/models --seconds 540

An engine takes a minute or more to start, and about 20 s to measure. So the engines of a *round*, which fit on a GPU together,
start side by side. When all have started, they are measured one after another, alone on their GPU. Each GPU has its own CPU cores,
and goes on to its next round by itself. Models that need all GPUs (tensor parallelism) start one after another, before all others.

Engines of one model differ only in the plugin: they have the same settings of vLLM, and run on the same GPU. Each model's file in
``--folder`` is written whenever one of its engines is done, so a run that is cut off keeps what it has measured. A later run adds
rows to the files of the folder. ``--show`` prints the rounds, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import h200_vllm as one_model
from random_models import DEFAULT

# A row says how many other engines were still starting on the GPU when this one was measured; usually none.
BESIDE = "engines_starting"
# The engines of a round may take this much of a GPU's 139 GiB while they start.
MEMORY_GIB = 130.0
_SHARE_S = 30.0  # a round starts only if this much time is left for each of its engines


@dataclass(frozen=True)
class Case:
    """A model, as it is measured.

    Args:
        model: a name of ``random_models.py``.
        gib: device memory of one engine on each of its GPUs while it starts, estimated: weights, cache, activations of 16,384
            tokens. vLLM's MXFP4 experts take twice their size while they are rearranged.
        gpus: number of GPUs; more than one: tensor parallelism.
        words: arguments of ``vllm_engine.py``.
    """

    model: str
    gib: float
    gpus: int = 1
    words: tuple[str, ...] = ()


# The keys name the files of results.
CASES = {
    f"{DEFAULT}-tp2": Case(DEFAULT, 90, 2, ("--tasks", "describe,decode,prefill,random", "--requests", "200")),
    "gpt-oss-20b": Case("gpt-oss-20b", 21),
    "llama-3.1-8b": Case("llama-3.1-8b", 31),
    "llama-3.1-8b-fp8": Case("llama-3.1-8b-fp8", 23),
    "llama-3.1-8b-nvfp4": Case("llama-3.1-8b-nvfp4", 20),
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", 69),
    "qwen3-30b-a3b-fp8": Case("qwen3-30b-a3b-fp8", 42),
    "qwen3-30b-a3b-mxfp4": Case("qwen3-30b-a3b-mxfp4", 28),
    "deepseek-v3": Case("deepseek-v3", 58),
}
Engines = list[tuple[str, str]]  # cases and variants


@dataclass(frozen=True)
class Round:
    """Engines that start together: those that need all GPUs, and those of each GPU. Engines are measured in this order."""

    number: int
    wide: Engines
    shares: tuple[Engines, ...]


def _all(case: str, *variants: str) -> Engines:
    return [(case, variant) for variant in ("vllm", *variants)]


# The rounds in order of their value: a run that is cut off has measured the first ones. A case's engines share a GPU, except for
# some variants of a later round.
ROUNDS = (
    Round(
        0,
        [],
        (
            [*_all("gpt-oss-20b", "plugin"), *_all("llama-3.1-8b-nvfp4", "plugin-fp4-linear")],
            _all("qwen3-30b-a3b-fp8", "plugin", "plugin-experts"),
        ),
    ),
    Round(
        1,
        [],
        (
            _all("deepseek-v3", "plugin-mla-only"),
            [("qwen3-30b-a3b", "vllm"), *_all("qwen3-30b-a3b-mxfp4", "plugin-fp4")],
        ),
    ),
    Round(2, _all(f"{DEFAULT}-tp2", "plugin"), ([], [])),
    Round(
        3,
        [],
        (
            [("deepseek-v3", "plugin-mla"), ("qwen3-30b-a3b", "plugin-experts")],
            [("qwen3-30b-a3b", "plugin"), *_all("llama-3.1-8b-fp8", "plugin")],
        ),
    ),
    Round(4, [], (_all("llama-3.1-8b", "plugin"), [("llama-3.1-8b-fp8", "plugin-fp8-linear")])),
)


class Lease:
    """Runs the engines of all cases, until the time is up."""

    def __init__(self, given: argparse.Namespace, temporary: Path, command: str) -> None:
        self.given, self.temporary, self.command = given, temporary, command
        self.end = time.monotonic() + given.seconds
        site = one_model.entry_point(temporary / "site")
        self.path = os.pathsep.join([str(site), str(one_model.HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.files = threading.Lock()
        self.results: dict[str, dict[str, Any]] = {}
        self.number = 0
        self.metadata = one_model.measured_on(given, [])
        self.metadata["command"] = command

    def start(self, name: str, variant: str, gpus: Sequence[int]) -> one_model.Process:
        """Starts an engine, which waits before it measures."""
        case, given = CASES[name], self.given
        with self.files:
            self.number += 1
            out = self.temporary / f"{self.number}-{name}-{variant}"
        words = [*one_model._SPEED, "--model", case.model, *case.words, "--wait-file", str(out / "go"), "--wait-seconds", "900"]
        words += ["--batches", *map(str, given.batches), "--decode", str(given.decode), "--repeats", str(given.repeats)]
        words += ["--tensor-parallel", str(case.gpus)]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        made = one_model.Process(variant, words, out, self.path, self.cache(f"{name}-{variant}"), variables)
        _pin(made.process.pid, gpus, self.given.gpus)
        self.say(f"GPU {gpus}: {name} {variant} starts")
        return made

    def cache(self, engine: str) -> Path:
        """Makes an engine's folder of compiled code. Engines share what vLLM finds out about a model's class, which takes 20 s."""
        folder, shared = self.temporary / f"cache-{engine}", self.temporary / "modelinfos"
        folder.mkdir()
        shared.mkdir(exist_ok=True)
        (folder / "modelinfos").symlink_to(shared)
        return folder

    def ready(self, engine: one_model.Process) -> bool:
        return (engine.out / f"{engine.name}.ready").exists()

    def wait_until_ready(self, engines: Sequence[one_model.Process]) -> None:
        """Waits until all engines are ready or have ended, at most ``--start-seconds``."""
        end = min(time.monotonic() + self.given.start_seconds, self.end)
        while time.monotonic() < end and not all(self.ready(one) or one.process.poll() is not None for one in engines):
            time.sleep(0.2)

    def measure(self, name: str, engine: one_model.Process, starting: int) -> None:
        """Lets a ready engine measure, waits for its end, and writes the case's file."""
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
            rows.append({"engine": engine.name, "figure": "failed", "task": "start", "error": engine.log.read_text()[-1500:]})
        case = CASES[name]
        with self.files:
            if name not in self.results:
                self.results[name] = self.earlier(name) or {
                    "metadata": self.metadata,
                    "model": case.model,
                    "layers": None,
                    "gpus": case.gpus,
                    "rows": [],
                }
            made = self.results[name]
            made["rows"] += rows
            self.given.folder.mkdir(parents=True, exist_ok=True)
            (self.given.folder / f"{name}.json").write_text(_as_text(made))
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
        found["metadata"]["command"] += f"; {self.command}"
        return found

    def measure_all(self, engines: Sequence[tuple[str, one_model.Process]]) -> None:
        """Measures the engines of a round: the ready ones in order, then those that become ready later."""
        waiting = list(engines)
        while waiting:
            able = [pair for pair in waiting if self.ready(pair[1]) or pair[1].process.poll() is not None]
            if not able and time.monotonic() < self.end:
                time.sleep(0.2)
                continue
            name, engine = able[0] if able else waiting[0]
            waiting.remove((name, engine))
            starting = sum(not self.ready(other) and other.process.poll() is None for _, other in waiting)
            self.measure(name, engine, starting)

    def on_gpu(self, gpu: int, begun: list[tuple[str, one_model.Process]], later: Sequence[Engines]) -> None:
        """Measures engines that have been started, and then starts and measures the later engines of a GPU."""
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
        for name, variant in rounds[0].wide:  # one after another, because of the memory
            wide.append((name, self.start(name, variant, gpus[: CASES[name].gpus])))
            self.wait_until_ready([wide[-1][1]])
        # With fewer GPUs than a round has shares, a GPU takes several shares, one after another.
        shares = [[share for each in rounds for share in each.shares[at :: len(gpus)] if share] for at in range(len(gpus))]
        begun = [
            [(name, self.start(name, variant, [gpu])) for name, variant in own[0]] if own else []
            for gpu, own in zip(gpus, shares, strict=True)
        ]
        self.wait_until_ready([engine for engines in begun for _, engine in engines])
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


def _pin(pid: int, gpus: Sequence[int], every: Sequence[int]) -> None:
    """Gives an engine the CPU cores of its GPUs, so that engines that start on one GPU do not slow down those of another."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(every)
    if share:
        os.sched_setaffinity(
            pid, [core for gpu in gpus for core in cores[every.index(gpu) * share : (every.index(gpu) + 1) * share]]
        )


def _as_text(report: dict[str, Any]) -> str:
    from tokenspeed_kernel.workbench.benchmark import as_text

    return as_text(report)


def parser_of() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[each.number for each in ROUNDS])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="only these")
    parser.add_argument("--variants", nargs="+", choices=one_model.VARIANTS, default=list(one_model.VARIANTS), help="only these")
    parser.add_argument("--gpus", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--folder", type=Path, required=True, help="of the results")
    parser.add_argument("--seconds", type=float, default=540.0, help="when everything must be done")
    parser.add_argument("--start-seconds", type=float, default=170.0, help="how long a round waits for its slowest engine")
    parser.add_argument("--start-estimate", type=float, default=80.0, help="seconds that a start takes at least")
    parser.add_argument("--engine-seconds", type=float, default=90.0, help="the longest measurement of one engine")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--decode", type=int, default=104)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="print the engines of each round, and stop")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Measures the cases, and prints the speed of the plugin beside vLLM's own."""
    words = sys.argv[1:] if words is None else list(words)
    given = parser_of().parse_args(words)

    def kept(engines: Engines) -> Engines:
        return [(name, variant) for name, variant in engines if name in given.cases and variant in given.variants]

    rounds = [Round(each.number, kept(each.wide), tuple(map(kept, each.shares))) for each in ROUNDS if each.number in given.rounds]
    for each in rounds:
        print(f"round {each.number}:", each.wide, *each.shares, sep="\n  ")
    if given.show:
        return
    if any(each.wide for each in rounds[1:]):
        raise SystemExit("models on several GPUs must be in the first round")
    command = shlex.join(["python", "tools/vllm_plugin/benchmarks/h200_vllm_models.py", *words])
    with tempfile.TemporaryDirectory() as temporary:
        lease = Lease(given, Path(temporary), command)
        lease.run(rounds)
    for name, made in lease.results.items():
        print(name, *one_model.speed_ups(made["rows"]), sep="\n  ")


if __name__ == "__main__":
    main()
