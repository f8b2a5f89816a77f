"""Measures the engine in this folder with random weights: milliseconds per decode step, and tokens per second of prefill.

    python docs/examples/engine_benchmark.py --output engine.json
    python docs/examples/engine_benchmark.py --tiny --device cpu  # a dry run

The sizes are those of Llama 3.1 8B. Times are measured by the engine's caller: they include scheduling, and reading the tokens.
Requests sample with temperature 1. A model with random weights repeats itself, which does not affect the speed of a dense model.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine import Config, Engine, Model, Request
from torch import Tensor

from tokenspeed_kernel import watch_calls
from tokenspeed_kernel.workbench.benchmark import write_result

LLAMA = {"hidden": 4096, "inner": 14336, "heads": 32, "vocab": 128256}
TINY = {"hidden": 64, "inner": 96, "heads": 4, "vocab": 100}
CONFIGS = {"llama-3.1-8b": Config(layers=32, kv_heads=8), "tiny": Config(layers=2, kv_heads=2, head_dim=16)}
WARM_STEPS = 4


def random_weights(config: Config, sizes: dict[str, int], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    hidden, inner, vocab = sizes["hidden"], sizes["inner"], sizes["vocab"]
    rows = {"q": sizes["heads"] * config.head_dim, "k": config.kv_heads * config.head_dim, "v": config.kv_heads * config.head_dim}

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, shape[-1] ** -0.5, generator=generator)

    norm = torch.ones(hidden, dtype=dtype, device=device)
    made = {"model.embed_tokens.weight": draw(vocab, hidden), "model.norm.weight": norm, "lm_head.weight": draw(vocab, hidden)}
    for prefix in (f"model.layers.{layer}." for layer in range(config.layers)):
        made |= {prefix + f"{name}_layernorm.weight": norm for name in ("input", "post_attention")}
        made |= {prefix + f"self_attn.{name}_proj.weight": draw(count, hidden) for name, count in rows.items()}
        made[prefix + "self_attn.o_proj.weight"] = draw(hidden, rows["q"])
        made |= {prefix + f"mlp.{name}_proj.weight": draw(inner, hidden) for name in ("gate", "up")}
        made[prefix + "mlp.down_proj.weight"] = draw(hidden, inner)
    return made


def started(engine: Engine, batch: int, prompt: int, vocab: int, new: int) -> float:
    """Starts requests with random prompts, and returns the seconds until all requests have their first token."""
    prompts = torch.randint(vocab, (batch, prompt)).tolist()
    for seed, tokens in enumerate(prompts):
        engine.add(Request(tokens, new, temperature=1.0, seed=seed))
    begin = time.perf_counter()
    engine.start()
    while any(request.cached < prompt for request in engine.running):
        engine.prefill()
    return time.perf_counter() - begin


def measure(engine: Engine, batch: int, prompt: int, vocab: int, steps: int, repeats: int) -> dict[str, Any]:
    started(engine, batch, prompt, vocab, 1)
    prefill_s = [started(engine, batch, prompt, vocab, 1) for _ in range(repeats)]
    started(engine, batch, prompt, vocab, 1 + WARM_STEPS + steps)
    decode_ms = []
    while engine.running:
        begin = time.perf_counter()
        engine.decode()
        decode_ms.append((time.perf_counter() - begin) * 1e3)
    decode_ms = decode_ms[WARM_STEPS:]
    return {
        "batch": batch,
        "prompt": prompt,
        "ms_per_token": statistics.median_low(decode_ms),
        "prefill_tokens_per_s": batch * prompt / statistics.median(prefill_s),
        "decode_ms": decode_ms,
        "prefill_s": prefill_s,
    }


def kernels(engine: Engine, vocab: int, prompt: int) -> list[dict[str, str]]:
    """Returns the kernel of each operator in a prefill pass, and in a decode pass that runs without a graph."""
    seen: dict[tuple[str, str, str], None] = {}

    def watch(phase: str) -> Callable[[Any, Callable[..., Any]], Callable[..., Any]]:
        def watcher(call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
            seen[phase, f"{call.family}.{call.mode}", call.kernel] = None
            return run

        return watcher

    with watch_calls(watch("prefill")):
        started(engine, 1, prompt, vocab, 1)
    with watch_calls(watch("decode")):
        engine.decode_pass(1)
    return [{"pass": phase, "operator": operator, "kernel": kernel} for phase, operator, kernel in seen]


def main(given: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="timed decode steps")
    parser.add_argument("--repeats", type=int, default=5, help="timed prefills")
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="the most tokens of a prefill pass")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args(words)
    name, sizes = ("tiny", TINY) if options.tiny else ("llama-3.1-8b", LLAMA)
    longest = options.prompt + 1 + WARM_STEPS + options.steps
    config = replace(CONFIGS[name], max_positions=longest)
    model = Model(config, random_weights(config, sizes, getattr(torch, options.dtype), options.device))
    page_size = 64
    pages = max(options.batches) * -(-longest // page_size)
    engine = Engine(model, config, pages, page_size, max(options.batches), options.prefill_tokens)
    rows = []
    used = kernels(engine, sizes["vocab"], options.prompt)
    for batch in options.batches:
        rows.append(measure(engine, batch, options.prompt, sizes["vocab"], options.steps, options.repeats))
        print("batch {batch}: {ms_per_token:.3f} ms a token, prefill {prefill_tokens_per_s:,.0f} tokens/s".format(**rows[-1]))
    command = shlex.join(["python", "docs/examples/engine_benchmark.py", *words])
    write_result(options.output, options.device, command=command, model=name, dtype=options.dtype, kernels=used, rows=rows)


if __name__ == "__main__":
    main()
