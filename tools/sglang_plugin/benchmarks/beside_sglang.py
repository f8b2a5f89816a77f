"""Measures SGLang's engine on GPT-OSS-120B with random weights on one GPU, with and without this plugin: decode steps and prefills.

Each variant runs in its own process, which starts an engine. Decode: prompts generate few tokens in one run, and many tokens in
another run. The time per token is the difference of the median times, divided by the number of additional tokens. Prefill: prompts
generate one token. ``--plan`` prints what would run, without a GPU and without SGLang.

    python tools/sglang_plugin/benchmarks/beside_sglang.py --output beside_sglang.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
# The configuration and the random weights are those of the vLLM plugin's benchmark.
WEIGHTS = HERE.parents[2] / "vllm_plugin" / "benchmarks" / "random_gpt_oss.py"
PLUGIN, DRAW = "tokenspeed_kernel", "random_gpt_oss"
# The parts of `VARIANTS`, which maps a variant's name to environment variables and options of the engine.
OWN: dict[str, Any] = {"attention_backend": "fa3", "moe_runner_backend": "triton_kernel"}
OURS: dict[str, Any] = {"attention_backend": "fa3", "page_size": 64, "moe_runner_backend": "triton"}
REPLACES = {"TOKENSPEED_SGLANG_ATTENTION_REPLACES": "fa3"}
LAYERS = {f"TOKENSPEED_SGLANG_{part}": "1" for part in ("NORMS", "ACTIVATIONS", "ROPE")}
VARIANTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "sglang": ({"SGLANG_PLUGINS": DRAW}, OWN),
    "plugin": ({"SGLANG_PLUGINS": f"{PLUGIN},{DRAW}", **REPLACES}, OURS),
    "plugin with layers": ({"SGLANG_PLUGINS": f"{PLUGIN},{DRAW}", **REPLACES, **LAYERS}, OURS),
    "plugin attention": (
        {"SGLANG_PLUGINS": f"{PLUGIN},{DRAW}", **REPLACES, "TOKENSPEED_SGLANG_EXPERTS": "0"},
        {**OURS, "moe_runner_backend": "triton_kernel"},
    ),
    "plugin experts": (
        {"SGLANG_PLUGINS": f"{PLUGIN},{DRAW}", "TOKENSPEED_SGLANG_ATTENTION": "0"},
        {**OWN, "moe_runner_backend": "triton"},
    ),
}
# The acceptance bars on one H200, for all 36 layers: the largest milliseconds per token, by batch size, and the smallest tokens per
# second of a prefill. None: at most the time of the variant "sglang".
DECODE_BARS: dict[int, float | None] = {1: 2.9, 4: None, 16: 8.0, 64: None}
PREFILL_BARS = {"4x8192": 47_000.0}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["sglang", "plugin"])
    parser.add_argument("--layers", type=int, default=36, help="fewer for a rehearsal; bars hold for 36")
    parser.add_argument("--batches", type=int, nargs="*", default=list(DECODE_BARS))
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt before decode steps")
    parser.add_argument("--tokens", type=int, nargs=2, default=(8, 128), help="generated tokens of the short and of the long run")
    parser.add_argument("--prefills", nargs="*", default=list(PREFILL_BARS), help="prompts x tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.9, help="SGLang's mem_fraction_static")
    parser.add_argument("--output", type=Path, help="a file for the results")
    parser.add_argument("--plan", action="store_true", help="prints what would run, and ends")
    parser.add_argument("--child", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    for text in parsed.prefills:
        if not all(part.isdigit() and int(part) for part in text.split("x")) or text.count("x") != 1:
            parser.error(f"--prefills must be prompts x tokens, such as 4x8192; got {text}")
    if not 0 < parsed.tokens[0] < parsed.tokens[1]:
        parser.error(f"--tokens must increase, got {parsed.tokens[0]} {parsed.tokens[1]}")
    return parsed


def engine_options(options: argparse.Namespace, variant: str, model: Path) -> dict[str, Any]:
    """Returns the arguments with which SGLang's engine is created for a variant."""
    lengths = [options.prompt + options.tokens[1], *(int(text.split("x")[1]) + 1 for text in options.prefills)]
    return {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "context_length": max(lengths) + 128,
        "mem_fraction_static": options.memory,
        "disable_radix_cache": True,
        "sampling_backend": "pytorch",
        "random_seed": 0,
        "cuda_graph_bs_decode": sorted({1, *options.batches}),
        **VARIANTS[variant][1],
    }


def plan(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Describes what would run: for each variant, the environment, the engine's arguments, and the figures to measure."""
    figures = [f"decode {batch}" for batch in options.batches] + [f"prefill {text}" for text in options.prefills]
    return [
        {
            "variant": variant,
            "environment": VARIANTS[variant][0],
            "engine": engine_options(options, variant, Path("MODEL")),
            "figures": figures,
        }
        for variant in options.variants
    ]


def write_entry_point(folder: Path) -> None:
    """Writes a module and an entry point of SGLang, which calls `register_weights` in SGLang's processes."""
    (folder / f"{DRAW}_sglang.py").write_text(
        f"import importlib.util\n"
        f"def register():\n"
        f"    spec = importlib.util.spec_from_file_location('beside_sglang', {str(HERE)!r})\n"
        f"    module = importlib.util.module_from_spec(spec)\n"
        f"    spec.loader.exec_module(module)\n"
        f"    module.register_weights()\n"
    )
    info = folder / f"{DRAW}_sglang-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DRAW}_sglang\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{DRAW} = {DRAW}_sglang:register\n")


def weights_module() -> Any:
    """Returns the module that makes the random weights."""
    spec = importlib.util.spec_from_file_location(DRAW, WEIGHTS)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(WEIGHTS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def register_weights() -> None:
    """Makes SGLang use our random weights instead of its dummy weights. Runs in SGLang's processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def fill(model: Any, *_: Any, **__: Any) -> None:
        import torch

        module = weights_module()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                module.draw(name.replace("_weight_bias", "_bias"), parameter.data)

    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", fill, HookType.REPLACE)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs one variant, and returns its figures. Needs a GPU."""
    import sglang
    import torch

    started = time.perf_counter()
    engine = sglang.Engine(**engine_options(options, options.child, options.model))
    found: dict[str, Any] = {"variant": options.child, "start_s": round(time.perf_counter() - started, 1)}
    found |= {"sglang": sglang.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    generator = random.Random(0)

    def seconds(count: int, length: int, tokens: int) -> float:
        # Every run has new prompts, so no run finds its prefix in a cache.
        prompts = [[generator.randrange(100, 120_000) for _ in range(length)] for _ in range(count)]
        begun = time.perf_counter()
        outputs = engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        )
        taken = time.perf_counter() - begun
        lost = [output["meta_info"] for output in outputs if output["meta_info"]["completion_tokens"] != tokens]
        if lost:
            raise RuntimeError(f"expected {tokens} tokens for each of {count} prompts, got {lost}")
        return taken

    short, long = options.tokens
    for batch in options.batches:
        seconds(batch, options.prompt, short)  # compiles the kernels that this batch needs
        medians = [
            statistics.median(seconds(batch, options.prompt, tokens) for _ in range(options.repeats)) for tokens in (short, long)
        ]
        found[f"decode {batch}"] = round(1e3 * (medians[1] - medians[0]) / (long - short), 3)
    for text in options.prefills:
        count, length = map(int, text.split("x"))
        seconds(count, length, 1)
        taken = statistics.median(seconds(count, length, 1) for _ in range(options.repeats))
        found[f"prefill {text}"] = round(count * length / taken, 1)
    engine.shutdown()
    return found


def judge(results: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the figures of the variant "plugin" that miss their bars."""
    plugin, own, missed = results.get("plugin", {}), results.get("sglang", {}), []
    for batch, bar in DECODE_BARS.items():
        figure = f"decode {batch}"
        most = own.get(figure) if bar is None else bar
        if figure in plugin and most is not None and plugin[figure] > most:
            missed.append(f"{figure}: {plugin[figure]} ms a token, the bar is {most}")
    for text, least in PREFILL_BARS.items():
        figure = f"prefill {text}"
        if figure in plugin and plugin[figure] < least:
            missed.append(f"{figure}: {plugin[figure]} tokens/s, the bar is {least}")
    return missed


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs the variants one after the other, and returns their figures."""
    options = parse(arguments)
    if options.child:
        print(json.dumps(measure(options)))
        return {}
    if options.plan:
        print(json.dumps(plan(options), indent=2))
        return {}
    results: dict[str, dict[str, Any]] = {}
    given = list(sys.argv[1:] if arguments is None else arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_entry_point(Path(folder))
        model = weights_module().write_model(Path(folder) / "model", options.layers)
        for variant in options.variants:
            environment = {**os.environ, **VARIANTS[variant][0], "HF_HUB_OFFLINE": "1"}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
            child = [sys.executable, str(HERE), *given, "--child", variant, "--model", str(model)]
            done = subprocess.run(child, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results[variant] = json.loads(done.stdout.splitlines()[-1])
            print(json.dumps(results[variant]), flush=True)
            if options.output:
                options.output.write_text(json.dumps(results, indent=2) + "\n")
    print("\n".join(judge(results)) or "every measured bar is met")
    return results


if __name__ == "__main__":
    main()
