"""Measures vLLM with random weights, with and without this plugin, on one H200: ms per token, prefill, start-up.

    python tools/vllm_plugin/benchmarks/h200_vllm.py --output tools/vllm_plugin/benchmarks/h200_vllm.json
    python tools/vllm_plugin/benchmarks/h200_vllm.py --correctness --layers 2 --variants vllm plugin
    python tools/vllm_plugin/benchmarks/h200_vllm.py --float32 --layers 2 --variants vllm marlin plugin
    python tools/vllm_plugin/benchmarks/h200_vllm.py --profile --layers 2 --variants vllm marlin plugin plugin-linear
    python tools/vllm_plugin/benchmarks/h200_vllm.py --layers 12 --variants vllm marlin plugin
    python tools/vllm_plugin/benchmarks/h200_vllm.py --model deepseek-v3 --variants vllm plugin-mla plugin-mla-only
    python tools/vllm_plugin/benchmarks/h200_vllm.py --correctness --layers 2 --variants vllm marlin plugin \\
        -- --tensor-parallel 2 --no-inproc --eager --tasks describe,prompts,tokens --max-num-batched-tokens 8192

The model is GPT-OSS-120B, or one of ``random_models.py``.

Each variant is an engine in its own process (``vllm_engine.py``). Engines run one after another. With ``--starts 2`` each engine
starts twice, to measure start-up with cold and with warm caches. ``--correctness`` instead compares the engines' results
(``compare.py``): greedy tokens, logits, 1,000 random requests, and the kernels of a step. ``--float32`` compares logits with the
same model in float32 (``against_float32.py``). With these two options, engines run side by side, so their times are meaningless.
``--profile`` measures the kernels of a step and of a prefill.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[2] / "engine_benchmarks")])

from engine_figures import speed_ups, table
from engine_lease import RunningEngine, metadata_of
from random_models import DEFAULT, MODELS

HERE = Path(__file__).parent
# Bars: the largest milliseconds per token, by batch size; and the smallest number of prefill tokens per second.
DECODE_BARS = {1: 3.4, 4: 5.0, 16: 8.9, 64: 13.2}
PREFILL_BAR = 50_000
_ONLY_WEIGHTS = {"VLLM_PLUGINS": "random_gpt_oss,random_models"}


@dataclass(frozen=True)
class Variant:
    """The command-line arguments of ``vllm_engine.py`` and the environment variables with which an engine is started."""

    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


_LATENT = ("--attention", "CUSTOM", "--mla-prefill", "CUSTOM")
VARIANTS = {
    "vllm": Variant(variables=_ONLY_WEIGHTS),
    "marlin": Variant(("--moe-backend", "marlin"), _ONLY_WEIGHTS),
    # vLLM's other attention: how far its own kernels differ among themselves.
    "vllm-triton": Variant(("--attention", "TRITON_ATTN"), _ONLY_WEIGHTS),
    "vllm-triton-mla": Variant(("--attention", "TRITON_MLA"), _ONLY_WEIGHTS),
    # vLLM keeps the float32 block scales of the checkpoint. By default, it rounds the scales of weights and activations up to
    # powers of two in layers that DeepGEMM computes.
    "vllm-float-scales": Variant(variables={**_ONLY_WEIGHTS, "VLLM_USE_DEEP_GEMM_E8M0": "0"}),
    # The variants of the plugin leave the other switches unset. So MXFP4 experts and linear layers run on our kernels in all of
    # them, where this is the default.
    "plugin": Variant(("--attention", "CUSTOM")),
    "plugin-linear": Variant(("--attention", "CUSTOM"), {"TOKENSPEED_VLLM_LINEAR": "1"}),
    "plugin-norms": Variant(("--attention", "CUSTOM", "--norms")),
    "plugin-experts": Variant(("--attention", "CUSTOM"), {"TOKENSPEED_VLLM_OTHER_EXPERTS": "1"}),
    "plugin-experts-fp8": Variant(
        ("--attention", "CUSTOM"), {"TOKENSPEED_VLLM_OTHER_EXPERTS": "1", "TOKENSPEED_VLLM_ACTIVATIONS": "fp8"}
    ),
    "plugin-fp8-linear": Variant(("--attention", "CUSTOM"), {"TOKENSPEED_VLLM_FP8_LINEAR": "1"}),
    "plugin-fp4-linear": Variant(("--attention", "CUSTOM"), {"TOKENSPEED_VLLM_FP4_LINEAR": "1"}),
    "plugin-fp4": Variant(("--attention", "CUSTOM"), {"TOKENSPEED_VLLM_FP4_LINEAR": "1", "TOKENSPEED_VLLM_OTHER_EXPERTS": "1"}),
    "plugin-mla-only": Variant(_LATENT, {"TOKENSPEED_VLLM_MLA": "1"}),
    "plugin-mla": Variant(
        _LATENT, {"TOKENSPEED_VLLM_MLA": "1", "TOKENSPEED_VLLM_OTHER_EXPERTS": "1", "TOKENSPEED_VLLM_FP8_LINEAR": "1"}
    ),
    "plugin-portable": Variant(("--attention", "CUSTOM"), {"TOKENSPEED_KERNEL_OVERRIDE_MOE_MOE_APPLY": "triton_moe_apply_mxfp4"}),
}
OF_GPT_OSS = ("vllm", "marlin", "plugin", "plugin-linear", "plugin-norms", "plugin-portable")
# Options of correctness runs: chunked prefill, prefix caching, and a cache that is too small for all requests at once.
_CORRECTNESS = [
    *("--tasks", "describe,logits,tokens,random,kernels", "--inproc", "--prefix-caching", "--kv-gib", "0.3"),
    *("--max-num-batched-tokens", "2048", "--max-num-seqs", "128", "--graph-sizes", "1", "2", "4", "8", "16", "32", "64", "128"),
]
# Options of float32 runs. All prompts run in one step. Eager mode is needed because compiled routers call no hooks.
_FLOAT32 = [
    *("--tasks", "describe,float32", "--inproc", "--eager", "--kv-gib", "0.3"),
    *("--max-num-batched-tokens", "8192", "--max-num-seqs", "32"),
]
_PROFILE = [
    *("--tasks", "describe,kernels,prefill-kernels", "--inproc", "--kv-gib", "0.5"),
    *("--max-num-batched-tokens", "16384", "--max-num-seqs", "128"),
]
_SPEED = ["--tasks", "describe,decode,prefill", "--max-num-seqs", "256"]


def parser_of() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(OF_GPT_OSS))
    parser.add_argument("--model", choices=[DEFAULT, *MODELS], default=DEFAULT)
    parser.add_argument("--layers", type=int, help="the model's if left out")
    parser.add_argument("--starts", type=int, default=1, help="how often each starts: once with cold caches, then with warm ones")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--correctness", action="store_true", help="compare what engines generate, and measure nothing")
    what.add_argument("--float32", action="store_true", help="compare logits with those of the model in float32")
    what.add_argument("--profile", action="store_true", help="list the kernels of a step and of a prefill")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of an engine")
    parser.add_argument("--output", type=Path, help="a file for all results, JSON")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")
    parser.add_argument("words", nargs="*", help="behind --: for vllm_engine.py")
    return parser


def entry_point(folder: Path) -> Path:
    """Makes a folder for PYTHONPATH in which vLLM finds the loader of random weights like an installed plugin."""
    made = folder / "random_gpt_oss-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: random-gpt-oss\nVersion: 0\n")
    loaders = "".join(f"{name} = {name}:register\n" for name in ("random_gpt_oss", "random_models"))
    (made / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{loaders}")
    return folder


def run(name: str, given: argparse.Namespace, folder: Path, path: str, start: int) -> list[dict[str, Any]]:
    """Runs one engine to its end and returns its result lines. If the engine fails, prints the last lines of its log."""
    layers = ["--layers", str(given.layers)] if given.layers else []
    words = ["--model", given.model, *layers, *_tasks(given), *given.words]
    one = Process(name, words, folder / f"{name}-{start}", path, folder / f"cache-{name}")
    try:
        code: int | str = one.process.wait(given.timeout)
    except subprocess.TimeoutExpired:
        code = "it took too long"
    finally:
        one.end()
    if code:
        print(f"{name}: {code}; {one.log}:", *one.log.read_text(errors="replace").splitlines()[-12:], sep="\n  ")
    return [{**row, "start": start} for row in one.rows()]


class Process(RunningEngine):
    """One running engine, ``vllm_engine.py``, and its files."""

    def __init__(
        self, name: str, words: Sequence[str], out: Path, path: str, cache: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """Starts the engine.

        Args:
            name: the variant.
            words: further arguments of ``vllm_engine.py``.
            out: the folder of its results, which is made.
            path: PYTHONPATH.
            cache: vLLM's folder of compiled code.
            variables: further environment variables.
        """
        variant = VARIANTS[name]
        environment = {"PYTHONPATH": path, "VLLM_CACHE_ROOT": str(cache), **variant.variables, **(variables or {})}
        super().__init__(name, HERE / "vllm_engine.py", [*variant.words, *words], out, environment)


def _tasks(given: argparse.Namespace) -> list[str]:
    return _CORRECTNESS if given.correctness else _FLOAT32 if given.float32 else _PROFILE if given.profile else _SPEED


def judged(rows: Sequence[Mapping[str, Any]], layers: int) -> list[str]:
    """Returns the outcomes of the pass criteria of GPT-OSS-120B with 36 layers, applied to the best of the plugin's variants."""
    ours = [row for row in rows if row["engine"].startswith("plugin")]
    found = []
    for batch, bar in DECODE_BARS.items():
        times = [row["ms"] for row in ours if row["figure"] == "decode" and row["batch"] == batch]
        if times and layers == 36:
            found.append(f"{'holds' if min(times) <= bar else 'MISSED'} decode {batch}: {min(times):.2f} ms (<= {bar})")
    rates = [row["tokens_per_s"] for row in ours if row["figure"] == "prefill" and row["shape"] == "4x8192"]
    if rates and layers == 36:
        found.append(f"{'holds' if max(rates) >= PREFILL_BAR else 'MISSED'} prefill: {max(rates)} tokens/s (>= {PREFILL_BAR})")
    return found


def measured_on(given: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Returns the metadata of the results: the device, versions, the commit and the command."""
    return metadata_of(shlex.join(["python", "tools/vllm_plugin/benchmarks/h200_vllm.py", *words]), given.commit)


def main(words: Sequence[str] | None = None) -> None:
    """Runs all variants, and prints a table. Whenever an engine has ended, writes all results so far."""
    words = sys.argv[1:] if words is None else list(words)
    given = parser_of().parse_args(words)
    results: dict[str, Any] = {"metadata": measured_on(given, words), "model": given.model, "layers": given.layers}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = os.pathsep.join([str(entry_point(folder / "site")), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        each = [(name, given, folder, path, start) for name in given.variants for start in range(given.starts)]
        # Timed engines run alone; compared engines may run on the device together.
        beside = given.correctness or given.float32
        found: list[list[dict[str, Any]]] = [[] for _ in each]
        rows: list[dict[str, Any]] = []
        with ThreadPoolExecutor(len(each) if beside else 1) as pool:
            places = {pool.submit(run, *one): place for place, one in enumerate(each)}
            for done in as_completed(places):
                found[places[done]] = done.result()
                rows = [*itertools.chain.from_iterable(found)]
                save(given.output, results, rows)
        if beside:
            results["compared"] = compare_variants(given.variants, folder)
        else:
            bars = judged(rows, given.layers or 36) if given.model == DEFAULT else speed_ups(rows, "vllm")
            print(table(rows, given.variants), *bars, sep="\n")
    save(given.output, results, rows)


def save(output: Path | None, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the results, and the rows of the engines that have ended, to a file. Writes nothing if ``output`` is None."""
    from tokenspeed_kernel.workbench.benchmark import as_text

    if output is not None:
        output.write_text(as_text({**results, "rows": rows}))


def compare_variants(names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Compares the first variant with each of the others; prints and returns the results."""
    import torch
    from compare import compared, report

    saved = {name: folder / f"{name}-0" / f"{name}.pt" for name in names}
    if not saved[names[0]].exists():
        return {}
    found = {}
    for other in (name for name in names[1:] if saved[name].exists()):
        found[f"{names[0]} : {other}"] = compared(torch.load(saved[names[0]]), torch.load(saved[other]))
        print(report(names[0], other, found[f"{names[0]} : {other}"]))
    return found


if __name__ == "__main__":
    main()
