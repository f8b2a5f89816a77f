"""Measures several models with random weights in vLLM, with and without this plugin, on the H200s of one machine.

    python tools/vllm_plugin/benchmarks/h200_vllm_models.py --folder tools/vllm_plugin/benchmarks/models --seconds 540

An engine takes a minute or more to start, and about 20 s to measure. So the engines of a *round*, which fit on a GPU together,
start side by side. When all have started, they are measured one after another, alone on their GPU. Each GPU has its own CPU cores,
and goes on to its next round by itself. Models that need all GPUs (tensor parallelism) start one after another, before all others.

Engines of one model differ only in the plugin: they have the same settings of vLLM. Except for some variants of later rounds (see
`ROUNDS`), they run on the same GPU. Each model's file in ``--folder`` is written whenever one of its engines is done, so a run that
is cut off keeps what it has measured. A later run adds rows to the files of the folder. ``--show`` prints the rounds, and measures
nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[2] / "engine_benchmarks")])

import h200_vllm as one_model
from engine_figures import speed_ups
from engine_lease import Engines, Lease, Round, RunningEngine, add_arguments, metadata_of, selected, shares_of
from random_models import DEFAULT

# The engines of a round may take this much of a GPU's 139 GiB while they start.
MEMORY_GIB = 130.0


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
    f"{DEFAULT}-tp2": Case(DEFAULT, 90, 2),
    DEFAULT: Case(DEFAULT, 90),
    "gpt-oss-20b": Case("gpt-oss-20b", 21),
    "llama-3.1-8b": Case("llama-3.1-8b", 31),
    "llama-3.1-8b-fp8": Case("llama-3.1-8b-fp8", 23),
    "llama-3.1-8b-nvfp4": Case("llama-3.1-8b-nvfp4", 20),
    "qwen3-30b-a3b": Case("qwen3-30b-a3b", 69),
    "qwen3-30b-a3b-fp8": Case("qwen3-30b-a3b-fp8", 42),
    "qwen3-30b-a3b-mxfp4": Case("qwen3-30b-a3b-mxfp4", 28),
    # A prompt of 8,192 tokens is one step. Larger steps would only take memory.
    "deepseek-v3": Case("deepseek-v3", 45, words=("--max-num-batched-tokens", "8192")),
}


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
    Round(5, [], ([(DEFAULT, "vllm")], [(DEFAULT, "plugin")])),
)


class VllmLease(Lease):
    """Runs vLLM's engines."""

    def __init__(self, given: argparse.Namespace, temporary: Path, metadata: dict[str, Any]) -> None:
        super().__init__(given, temporary, metadata)
        site = one_model.entry_point(temporary / "site")
        self.path = os.pathsep.join([str(site), str(one_model.HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

    def launch(self, name: str, variant: str, gpus: Sequence[int], out: Path) -> RunningEngine:
        case, given = CASES[name], self.given
        words = [*one_model._SPEED, "--tasks", given.tasks, "--requests", str(given.requests), "--model", case.model, *case.words]
        words += ["--batches", *map(str, given.batches), "--decode", str(given.decode), "--repeats", str(given.repeats)]
        # Each captured batch size costs DeepSeek's engines about 10 s, because DeepGEMM compiles kernels for it.
        words += ["--graph-sizes", *map(str, given.batches)]
        words += ["--tensor-parallel", str(case.gpus), "--wait-file", str(out / "go"), "--wait-seconds", "900"]
        # Engines share the kernels that DeepGEMM compiles.
        deep_gemm = os.environ.get("DG_JIT_CACHE_DIR", str(self.temporary / "deep_gemm"))
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "DG_JIT_CACHE_DIR": deep_gemm}
        return one_model.Process(variant, words, out, self.path, self.cache(f"{name}-{variant}"), variables)

    def described(self, name: str) -> dict[str, Any]:
        return {"model": CASES[name].model, "layers": None, "gpus": CASES[name].gpus}

    def cache(self, engine: str) -> Path:
        """Makes an engine's folder of compiled code. Engines share what vLLM finds out about a model's class, which takes 20 s."""
        folder, shared = self.temporary / f"cache-{engine}", self.given.modelinfos or self.temporary / "modelinfos"
        folder.mkdir()
        shared.mkdir(exist_ok=True)
        (folder / "modelinfos").symlink_to(shared.absolute())
        return folder


def parser_of() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[each.number for each in ROUNDS])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="only these")
    parser.add_argument("--variants", nargs="+", choices=one_model.VARIANTS, default=list(one_model.VARIANTS), help="only these")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--decode", type=int, default=104)
    parser.add_argument("--tasks", default="describe,decode,prefill,random", help="of vllm_engine.py")
    parser.add_argument("--requests", type=int, default=300, help="random requests of each engine")
    parser.add_argument("--modelinfos", type=Path, help="what vLLM found out about models' classes before: its folder of this name")
    add_arguments(parser, [0, 1])
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Measures the cases, and prints the speed of the plugin beside vLLM's own."""
    words = sys.argv[1:] if words is None else list(words)
    given = parser_of().parse_args(words)
    if given.engines:
        rounds = [Round(0, [], shares_of(given.engines, list(CASES), list(one_model.VARIANTS)))]
    else:
        rounds = selected(ROUNDS, given.rounds, given.cases, given.variants)
    for each in rounds:
        print(f"round {each.number}:", each.wide, *each.shares, sep="\n  ")
    if given.show:
        return
    if any(each.wide for each in rounds[1:]):
        raise SystemExit("models on several GPUs must be in the first round")
    command = shlex.join(["python", "tools/vllm_plugin/benchmarks/h200_vllm_models.py", *words])
    with tempfile.TemporaryDirectory() as temporary:
        lease = VllmLease(given, Path(temporary), metadata_of(command, given.commit))
        lease.run(rounds)
    for name, made in lease.results.items():
        print(name, *speed_ups(made["rows"], "vllm"), sep="\n  ")


if __name__ == "__main__":
    main()
