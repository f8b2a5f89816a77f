"""Measures SGLang's engine on GPT-OSS with random weights, with and without this plugin, on H200s.

    python tools/sglang_plugin/benchmarks/h200_sglang.py --folder tools/sglang_plugin/benchmarks/models --gpus 0 1 2 3
    python tools/sglang_plugin/benchmarks/h200_sglang.py --folder results --gpus 0 --rounds 0 --cases gpt-oss-20b
    python tools/sglang_plugin/benchmarks/h200_sglang.py --folder results --show
    python tools/sglang_plugin/benchmarks/h200_sglang.py --folder correct --layers 2 --eager --tasks describe,logits,tokens \
        --gpus 0 1 2 3 --engines gpt-oss-120b:{sglang,plugin,plugin-all,sglang-triton}
    python tools/sglang_plugin/benchmarks/h200_sglang.py --folder correct --layers 2 --eager --tasks describe,logits,tokens \
        --memory 0.6 --cache-tokens 98304 --together --engine-seconds 120 \
        --engines gpt-oss-120b:sglang,gpt-oss-120b:plugin,gpt-oss-120b:plugin-all,gpt-oss-120b:sglang-triton

Each variant is an engine in its own process (``sglang_engine.py``). Each GPU has its own engines and CPU cores. Engines on one GPU
start side by side, and are then measured one after another. Each model's file in ``--folder`` is written whenever one of its
engines is done, so a run that is cut off keeps what it has measured. Its field ``compared`` has the differences of logits and of
greedy tokens between SGLang's own kernels and each other variant. ``--show`` prints the rounds without a GPU.

The logits of all layers do not show whether kernels are correct, because random weights make routing chaotic: two roundings of one
model diverge as far as the engines do (``rounding_by_depth.py``). So correctness is measured with two layers, as in the last
two commands: on four GPUs, and side by side on one. Without graphs, rows whose tokens have the same experts in both engines are
compared separately.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parents[2] / name) for name in ("engine_benchmarks", "vllm_plugin/benchmarks")])

from engine_figures import speed_ups
from engine_lease import Lease, Round, RunningEngine, add_arguments, metadata_of, selected, shares_of

HERE = Path(__file__).parent
PLUGIN, HOOKS = "tokenspeed_kernel", "sglang_hooks"
OWN = "sglang"
# Bars of GPT-OSS-120B on one H200: the largest milliseconds per token, by batch size, and the smallest number of prefill tokens per
# second. None: at most the time of SGLang's own kernels.
DECODE_BARS: dict[int, float | None] = {1: 2.9, 4: None, 16: 8.0, 64: None}
PREFILL_BAR = 47_000


@dataclass(frozen=True)
class Variant:
    """An engine's options, and the environment variables with which it is started.

    Attributes:
        options: fields of SGLang's ServerArgs.
        variables: environment variables.
        words: further arguments of ``sglang_engine.py``.
    """

    options: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Returns the arguments of ``sglang_engine.py``."""
        return [*self.words, *(word for name, value in self.options.items() for word in ("--set", f"{name}={json.dumps(value)}"))]


_BOTH = {"SGLANG_PLUGINS": f"{PLUGIN},{HOOKS}"}
_REPLACES = {"TOKENSPEED_SGLANG_ATTENTION_REPLACES": "fa3"}
_LAYERS = {f"TOKENSPEED_SGLANG_{part}": "1" for part in ("NORMS", "ACTIVATIONS", "ROPE", "SAMPLING")}
_COMPARED = ("--tasks", "describe,logits,tokens")
# SGLang's best backends on an H200, and those with which its results are compared too.
_BEST = {"attention_backend": "fa3", "moe_runner_backend": "triton_kernel"}
_OURS = {"attention_backend": "fa3", "moe_runner_backend": "triton", "page_size": 64}
VARIANTS = {
    OWN: Variant(_BEST, {"SGLANG_PLUGINS": HOOKS}),
    "sglang-triton": Variant({**_BEST, "attention_backend": "triton"}, {"SGLANG_PLUGINS": HOOKS}, _COMPARED),
    "plugin": Variant(_OURS, {**_BOTH, **_REPLACES}),
    "plugin-all": Variant(_OURS, {**_BOTH, **_REPLACES, **_LAYERS}),
    "plugin-attention": Variant(
        {**_OURS, "moe_runner_backend": "triton_kernel"}, {**_BOTH, **_REPLACES, "TOKENSPEED_SGLANG_EXPERTS": "0"}
    ),
    "plugin-experts": Variant({**_BEST, "moe_runner_backend": "triton"}, {**_BOTH, "TOKENSPEED_SGLANG_ATTENTION": "0"}),
}
BIG, SMALL = "gpt-oss-120b", "gpt-oss-20b"
# Case -> arguments of ``sglang_engine.py``. Engines of the small model share a GPU, so none may take all free memory.
CASES: dict[str, tuple[str, ...]] = {BIG: (), SMALL: ("--memory", "0.6", "--cache-tokens", "98304")}
# The rounds in order of their value. A run that is cut off has measured the first ones.
ROUNDS = (
    Round(
        0,
        [],
        ([(BIG, OWN)], [(BIG, "plugin")], [(BIG, "plugin-all")], [(SMALL, OWN), (SMALL, "plugin"), (SMALL, "sglang-triton")]),
    ),
    Round(1, [], ([(BIG, "sglang-triton")], [(BIG, "plugin-attention")], [(BIG, "plugin-experts")], [(SMALL, "plugin-all")])),
)


class SglangLease(Lease):
    """Runs SGLang's engines."""

    def __init__(self, given: argparse.Namespace, temporary: Path, metadata: dict[str, Any]) -> None:
        super().__init__(given, temporary, metadata)
        path = [str(entry_point(temporary / "site")), str(HERE), os.environ.get("PYTHONPATH", "")]
        self.path = os.pathsep.join(path).rstrip(os.pathsep)
        # Case and variant -> the tokens and logits of the engine.
        self.saved: dict[tuple[str, str], Path] = {}

    def launch(self, name: str, variant: str, gpus: Sequence[int], out: Path) -> RunningEngine:
        given = self.given
        words = ["--model", name, *CASES[name], *VARIANTS[variant].arguments(), "--wait-file", str(out / "go")]
        words += ["--wait-seconds", "900", "--repeats", str(given.repeats), "--requests", str(given.requests)]
        words += ["--batches", *map(str, given.batches), "--decode", str(given.decode), "--port", str(31000 + 20 * self.number)]
        if given.layers:
            words += ["--layers", str(given.layers)]
        if given.tasks:
            words += ["--tasks", given.tasks]
        if given.memory:
            words += ["--memory", str(given.memory)]
        if given.cache_tokens:
            words += ["--cache-tokens", str(given.cache_tokens)]
        if given.eager:
            words += ["--set", "disable_cuda_graph=true"]
        variables = {"PYTHONPATH": self.path, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), **VARIANTS[variant].variables}
        return RunningEngine(variant, HERE / "sglang_engine.py", words, out, variables)

    def described(self, name: str) -> dict[str, Any]:
        return {"model": name, "layers": self.given.layers, "gpus": 1}

    def compared(self, name: str, engine: RunningEngine) -> dict[str, Any]:
        """Returns the differences between SGLang's own kernels and all other variants that have run."""
        file = engine.out / f"{engine.name}.pt"
        if file.exists():
            self.saved[name, engine.name] = file
        own = self.saved.get((name, OWN))
        others = {variant: other for (case, variant), other in self.saved.items() if case == name and variant != OWN}
        if own is None or not others:
            return {}
        found = dict(self.results[name].get("compared", {}))
        for variant, other in others.items():
            key = f"{OWN} : {variant}"
            if key not in found:
                found[key] = compared(own, other)
                self.say(f"{name} {key}: {found[key]}")
        return {"compared": found}


def compared(first: Path, second: Path) -> dict[str, Any]:
    """Compares the logits and tokens of two engines. If this fails, returns the reason, because other results are still needed."""
    import compare
    import torch

    try:
        return compare.compared(torch.load(first), torch.load(second))
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        traceback.print_exc()
        return {"failed": repr(error)[:600]}


def entry_point(folder: Path) -> Path:
    """Makes a folder for PYTHONPATH in which SGLang finds ``sglang_hooks.py`` like an installed plugin."""
    made = folder / f"{HOOKS}-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {HOOKS}\nVersion: 0\n")
    (made / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{HOOKS} = {HOOKS}:register\n")
    return folder


def judged(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the outcomes of the bars of GPT-OSS-120B for the plugin's variants. Disturbed rows do not count."""
    kept = [row for row in rows if not row.get("disturbed")]
    decode = {(row["engine"], row["batch"]): row["ms"] for row in kept if row["figure"] == "decode"}
    found = []
    for (engine, batch), ms in decode.items():
        bar = DECODE_BARS.get(batch) or decode.get((OWN, batch))
        if engine.startswith("plugin") and bar is not None:
            found.append(f"{'holds' if ms <= bar else 'MISSED'} {engine} decode {batch}: {ms:.2f} ms (<= {bar:.2f})")
    for row in kept:
        if row["engine"].startswith("plugin") and row["figure"] == "prefill":
            rate = row["tokens_per_s"]
            verdict = "holds" if rate >= PREFILL_BAR else "MISSED"
            found.append(f"{verdict} {row['engine']} prefill: {rate} tokens/s (>= {PREFILL_BAR})")
    return found


def parser_of() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs="+", default=[each.number for each in ROUNDS])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="only these")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="only these")
    parser.add_argument("--layers", type=int, help="fewer for a rehearsal; the bars are those of all layers")
    parser.add_argument("--batches", type=int, nargs="+", default=list(DECODE_BARS))
    parser.add_argument("--decode", type=int, default=104, help="tokens that each request generates")
    parser.add_argument("--requests", type=int, default=1000, help="random requests of each engine")
    parser.add_argument("--eager", action="store_true", help="no graphs; the experts of tokens are then compared too")
    parser.add_argument("--tasks", help="of sglang_engine.py; all if left out")
    parser.add_argument("--memory", type=float, help="of sglang_engine.py; less if engines share a GPU")
    parser.add_argument("--cache-tokens", type=int, help="of sglang_engine.py")
    add_arguments(parser, [0])
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Measures the cases, and prints the speed of the plugin beside SGLang's own kernels."""
    words = sys.argv[1:] if words is None else list(words)
    given = parser_of().parse_args(words)
    if given.engines:
        rounds = [Round(0, [], shares_of(given.engines, list(CASES), list(VARIANTS)))]
    else:
        rounds = selected(ROUNDS, given.rounds, given.cases, given.variants)
    for each in rounds:
        print(f"round {each.number}:", *each.shares, sep="\n  ")
    if given.show:
        return
    command = shlex.join(["python", "tools/sglang_plugin/benchmarks/h200_sglang.py", *words])
    with tempfile.TemporaryDirectory() as temporary:
        lease = SglangLease(given, Path(temporary), metadata_of(command, given.commit))
        lease.run(rounds)
    for name, made in lease.results.items():
        bars = judged(made["rows"]) if name == BIG and not given.layers else []
        print(name, *speed_ups(made["rows"], OWN), *bars, sep="\n  ")


if __name__ == "__main__":
    main()
