"""Measures tokens per second of `generate` with Llama-3.1-8B and random weights on one H200. The baselines are sdpa and eager
attention, and FlashAttention by name.

    python tools/transformers_plugin/benchmarks/h200_transformers.py --output h200_transformers.json
    python tools/transformers_plugin/benchmarks/h200_transformers.py --device cpu --tiny --tokens 4 --prompts 24 --batches 1 2

Each variant generates greedily with each batch size and each prompt length. The first call, which compiles kernels, is not
measured. ``prefill`` is in prompt tokens per second, from a call that generates one token. ``decode`` is in new tokens per
second, from the difference between a call that generates ``--tokens`` tokens and a call that generates one token. Times are the
medians of ``--repeats`` calls. On a GPU, ``graph`` is the same for decode steps with a static cache that are replayed as a CUDA
graph, so that Python takes no time: it shows what a step takes on the device. Before a variant is measured, its first logits
are compared with those of sdpa. If the logits differ, the variant's row says so. A variant that runs out of memory has no
figures, nor has one whose package is missing. ``--output`` is written after each row, so a run that is cut off keeps its rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.masking_utils import create_masks_for_generate

import tokenspeed_kernel_transformers
from tokenspeed_kernel.workbench.benchmark.runner import metadata_of

SIZES: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
TINY: dict[str, Any] = {
    **SIZES,
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Variant name -> the model's attention implementation, and the arguments of `enable`; None if `enable` is not called.
VARIANTS: dict[str, tuple[str, dict[str, bool] | None]] = {
    "eager": ("eager", None),
    "sdpa": ("sdpa", None),
    "tokenspeed attention": ("sdpa", {"attention": True, "norms": False, "gated_mlps": False}),
    "tokenspeed norms and MLPs": ("sdpa", {"attention": False}),
    "tokenspeed": ("sdpa", {}),
    # `flash_attention_3` needs a GPU and the distribution flash-attn-3. `flash_attention_4` needs a GPU and flash-attn-4.
    "flash_attention_3": ("flash_attention_3", None),
    "flash_attention_4": ("flash_attention_4", None),
}
USUAL = [name for name in VARIANTS if not name.startswith("flash")]
# The largest allowed difference between a variant's first logits and sdpa's: a root mean square, in standard deviations of the
# logits.
_TOLERANCE = 0.05


def parser_of() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=USUAL)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompts", nargs="+", type=int, default=[1024, 8192], help="tokens of each prompt")
    parser.add_argument("--caches", nargs="+", choices=["dynamic", "static"], default=["dynamic"])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the program")
    parser.add_argument("--output", type=Path, help="a file for the results, JSON")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")
    return parser


def build(given: argparse.Namespace, attention: str) -> Any:
    """Makes the model with random weights, which are the same for every variant."""
    sizes = dict(TINY if given.tiny else SIZES)
    if given.layers:
        sizes["num_hidden_layers"] = given.layers
    config = transformers.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(1)
    with torch.device(given.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    return model.eval()


def caller(model: Any, ids: torch.Tensor, cache: str) -> Callable[[int], Any]:
    """Returns a function that generates a given number of tokens and returns the first logits."""
    # All variants run without torch.compile.
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}

    def call(tokens: int) -> Any:
        with torch.inference_mode():
            done = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        return done.logits[0].float()

    return call


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Returns the median time of a call in seconds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(given: argparse.Namespace, call: Callable[[int], Any], batch: int, prompt: int) -> dict[str, float]:
    """Returns the tokens per second of the prefill and of the decode steps."""
    call(given.tokens)
    first = seconds(lambda: call(1), given.device, given.repeats)
    whole = seconds(lambda: call(given.tokens), given.device, given.repeats)
    return {"prefill": batch * prompt / first, "decode": batch * (given.tokens - 1) / max(whole - first, 1e-9)}


def of_graph(model: Any, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """Returns the new tokens per second of decode steps that are replayed as a CUDA graph, or the reason why there is no figure.

    The mask of the graph is that of its first step, so all steps attend to the same number of tokens.
    """
    rows, tokens = ids.shape
    # transformers 5.23 has renamed this argument.
    name = "cache" if "cache" in inspect.signature(create_masks_for_generate).parameters else "past_key_values"
    cache = {name: transformers.StaticCache(config=model.config, max_cache_len=tokens + steps + 8)}
    token = torch.ones(rows, 1, dtype=ids.dtype, device=ids.device)
    with torch.inference_mode():
        model(ids, **cache, logits_to_keep=1)
        embedded = torch.empty(rows, 1, model.config.hidden_size, dtype=model.dtype, device=ids.device)
        mask = create_masks_for_generate(model.config, embedded, None, **cache)
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):  # compiles kernels, which a capture cannot
                model(token, mask, **cache)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                model(token, mask, **cache)
        except RuntimeError as error:
            return {"graph_problem": str(error).splitlines()[0]}
        graph.replay()
        taken = seconds(lambda: [graph.replay() for _ in range(steps)], "cuda", 1)
    return {"graph": rows * steps / taken}


def main(words: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the variants, prints their figures, and returns them."""
    given = parser_of().parse_args(words)
    if given.tokens < 2:
        raise SystemExit("--tokens must be at least 2, because decode steps are measured")
    rows: list[dict[str, Any]] = []
    command = shlex.join(["python", "tools/transformers_plugin/benchmarks/h200_transformers.py", *words])
    measured_on = dataclasses.asdict(metadata_of(given, command, torch.device(given.device)))
    measured_on["transformers"] = transformers.__version__
    for variant in given.variants:
        attention, parts = VARIANTS[variant]
        try:
            model = build(given, attention)
        except ImportError as error:
            rows.append({"variant": variant, "problem": str(error).splitlines()[0]})
            print(*rows[-1].values(), sep="  ", flush=True)
            continue
        if parts is not None:
            print(tokenspeed_kernel_transformers.enable(model, **parts))
        for batch in given.batches:
            for prompt in given.prompts:
                draw = torch.Generator().manual_seed(batch + prompt)
                ids = torch.randint(1, model.config.vocab_size, (batch, prompt), generator=draw).to(given.device)
                for cache in given.caches:
                    row = {"variant": variant, "batch": batch, "prompt": prompt, "cache": cache}
                    row |= figures(given, model, ids, cache)
                    print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="  ", flush=True)
                    rows.append(row)
                    if given.output:
                        given.output.write_text(json.dumps({"measured_on": measured_on, "rows": rows}, indent=1) + "\n")
        del model
    return rows


def figures(given: argparse.Namespace, model: Any, ids: torch.Tensor, cache: str) -> dict[str, Any]:
    """Returns the figures of a row: the error of the first logits, and tokens per second; or the reason why there are no
    figures."""
    try:
        call = caller(model, ids, cache)
        error = difference(model, call, ids)
        found: dict[str, Any] = {"error": error, **measure(given, call, *ids.shape)}
        if given.device != "cpu" and cache == "dynamic":
            found |= of_graph(model, ids, given.tokens)
        if error > _TOLERANCE:
            found["problem"] = f"logits differ from sdpa's by more than {_TOLERANCE} standard deviations"
        return found
    except torch.OutOfMemoryError:
        return {"problem": "out of memory"}


def difference(model: Any, call: Callable[[int], Any], ids: torch.Tensor) -> float:
    """Returns the root mean square of the difference between the first logits and sdpa's, in standard deviations of the logits."""
    got = call(1)
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    expected = caller(model, ids, "dynamic")(1)
    model.set_attn_implementation(own)
    return float((got - expected).square().mean().sqrt() / expected.std())


if __name__ == "__main__":
    main(sys.argv[1:])
