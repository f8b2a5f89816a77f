"""Measures how soon a fresh process answers, and whether a request ever waits for a compilation.

    tokenspeed-kernel pack build calls.capture --arch h200 --output packs/h200
    TOKENSPEED_KERNEL_PACKS=packs/h200 python tools/gpt_oss/benchmarks/first_requests.py --output first_requests.json

The process makes a model with random weights and a warm engine, under the compile policy ``forbid``. It measures the time from the
start of the process to the first token, without the time to make the random weights. It also measures the first batch of long
prompts. Then it runs random requests: groups of random size, prompts of random lengths, greedy and sampled, some of them cancelled.
The exit status is 1 if a measured value exceeds its limit. ``--capture FILE`` writes the calls from which the pack is built; use it
with ``--policy allow``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpt_oss import Engine, GptOss, PagedKVCache, RandomTensors, Request, Sampling
from gpt_oss.benchmark import Workload
from tokenspeed_kernel import compilations, compile_policy, shape_capture
from tokenspeed_kernel.workbench.benchmark import as_text, collect_metadata

# The largest acceptable value of each measurement, for GPT-OSS-120B on an H200.
BARS = {"first_token_s": 12.0, "first_batch_s": 0.5, "compilations": 0, "slow_steps": 0}
TIMEOUT_S = 1.0  # a step that takes longer is a slow step


class TimedWeights(RandomTensors):
    """Random tensors, and the seconds that it took to make them."""

    seconds = 0.0

    def get(self, name: str) -> torch.Tensor:
        started = time.perf_counter()
        tensor = super().get(name)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - started
        return tensor


def process_seconds() -> float:
    """Returns the number of seconds since this process started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def random_request(rng: random.Random, longest: int, vocab: int) -> Request:
    length = rng.choice((rng.randint(1, longest), rng.randint(1, min(longest, 64))))  # short prompts are as frequent as long ones
    prompt = [rng.randrange(vocab) for _ in range(length)]
    sampling = Sampling(rng.choice((0.0, 0.7, 1.0)), rng.choice((0, 1, 40)), rng.choice((1.0, 0.9)), rng.getrandbits(32))
    return Request(prompt, rng.randint(1, 32), sampling, stop_tokens={rng.randrange(vocab)})


def run_random(engine: Engine, count: int, at_once: int, longest: int, seed: int) -> list[float]:
    """Runs random requests, a tenth of which are cancelled. Returns the seconds of each step."""
    rng, steps, left = random.Random(seed), [], count
    while left or not engine.idle:
        if left and (engine.idle or rng.random() < 0.1):
            group = min(left, rng.randint(1, at_once))
            left -= group
            numbers = [engine.add(random_request(rng, longest, engine.model.config.vocab_size)) for _ in range(group)]
            cancelled = [number for number in numbers if rng.random() < 0.1]
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
        if cancelled and rng.random() < 0.5:
            engine.cancel(cancelled.pop())
    return steps


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = Workload(options.preset, options.layers, batches=(), contexts=(), prefills=()).config
    dtype = getattr(torch, options.dtype)
    longest = max(options.longest, options.batch_tokens) + 32
    weights = TimedWeights(config, 0, dtype, options.device)
    model = GptOss(config, weights, dtype, options.device, max_positions=longest)
    cache = PagedKVCache(config, options.pages, 64, dtype, options.device)
    engine = Engine(model, cache, options.prefill_tokens, options.max_sequences, warm="all", receipt=options.receipt)
    assert engine.warmed is not None
    engine.generate([Request([1] * min(128, options.longest), 1)])
    first_token = process_seconds() - weights.seconds
    prompts = [[number % config.vocab_size] * options.batch_tokens for number in range(options.batch)]
    started = time.perf_counter()
    engine.generate([Request(prompt, 1) for prompt in prompts])
    first_batch = time.perf_counter() - started
    steps = run_random(engine, options.requests, options.max_sequences, options.longest, options.seed)
    return {
        "first_token_s": first_token,
        "weights_s": weights.seconds,
        "warm_up": dataclasses.asdict(engine.warmed),
        "first_batch_s": first_batch,
        "requests": options.requests,
        "steps": len(steps),
        "slowest_step_s": max(steps),
        "slow_steps": sum(seconds > TIMEOUT_S for seconds in steps),
        "compilations": len(engine.compilations),
        "compilations_in_all": len(compilations()),
    }


def missed(found: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that exceeds its limit in `BARS`."""
    return [f"{name} is {found[name]:.3g}, must be at most {bar:g}" for name, bar in BARS.items() if found[name] > bar]


def main(given: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-oss-120b")
    parser.add_argument("--layers", type=int, help="the preset's if left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--policy", default="forbid", help="the compile policy")
    parser.add_argument("--pages", type=int, default=4096, help="pages of 64 tokens in the cache")
    parser.add_argument("--prefill-tokens", type=int, default=16384)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="prompts of the first batch")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="tokens of each")
    parser.add_argument("--requests", type=int, default=200, help="random requests")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest random prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capture", type=Path, help="write the calls to this file, for pack build")
    parser.add_argument("--receipt", type=Path, help="write a receipt of the kernels to this file")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    capture = contextlib.nullcontext() if options.capture is None else shape_capture(options.capture)
    with compile_policy(options.policy), capture:
        found = measure(options)
    metadata = collect_metadata(shlex.join(["python", "tools/gpt_oss/benchmarks/first_requests.py", *words]), options.device)
    found["metadata"] = {**dataclasses.asdict(metadata), **({"git_commit": options.commit} if options.commit else {})}
    print(
        f"first token {found['first_token_s']:.1f} s after the start, {found['weights_s']:.1f} s of random weights apart; "
        f"first batch of {options.batch} x {options.batch_tokens}: {found['first_batch_s']:.3f} s\n"
        f"{found['requests']} random requests: {found['steps']} steps, the slowest {found['slowest_step_s']:.3f} s, "
        f"{found['compilations']} compilations"
    )
    if options.output is not None:
        options.output.write_text(as_text(found))
    lines = missed(found)
    print(*(f"bar missed: {line}" for line in lines), sep="\n", end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
