"""Measures how soon a fresh process answers, and whether a request ever waits for a compilation.

    tokenspeed-kernel pack build calls.capture --arch h200 --output packs/h200
    TOKENSPEED_KERNEL_PACKS=packs/h200 python tools/gpt_oss/benchmarks/first_requests.py --output first_requests.json

The process makes a model with random weights and a warm engine, under the compile policy ``forbid``. It measures the time from the
start of the process to the first token, without the time to make the random weights. It also measures the first batch of long
prompts. Then it runs random requests: groups of random size, prompts of random lengths, greedy and sampled, some of them cancelled.
The exit status is 1 if a measured value exceeds its limit. ``--capture FILE`` writes the calls from which the pack is built; use it
with ``--policy allow``.

If a call needs a program that the policy forbids to compile, the script notes the call and repeats it with the policy ``warn``. So
one run finds all missing programs. The output file is written after each stage, so that a later failure loses no measured value.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpt_oss import Engine, GptOss, PagedKVCache, RandomTensors, Request, Sampling
from gpt_oss.config import preset
from tokenspeed_kernel import CompilationForbiddenError, compilations, compile_policy, shape_capture

# The largest acceptable value of each measurement, for GPT-OSS-120B on an H200.
BARS = {"first_token_s": 12.0, "first_batch_s": 0.5, "compilations": 0, "slow_steps": 0, "requests_left": 0}
TIMEOUT_S = 1.0  # a step that takes longer is a slow step

Result = TypeVar("Result")


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


class Measurement:
    """Measured values, which are written to a file after each stage.

    Args:
        output: the file; None to write nothing.
    """

    def __init__(self, output: Path | None) -> None:
        self._output, self._before = output, len(compilations())
        self.found: dict[str, Any] = {"refused": []}

    def note(self, **values: Any) -> None:
        """Adds measured values, and the programs that were compiled so far, and writes the file."""
        compiled = [str(each) for each in compilations(self._before)]
        self.found |= {"process_s": process_seconds(), **values, "compilations": len(compiled), "compiled": compiled}
        if self._output is not None:
            self._output.write_text(json.dumps(self.found, indent=1) + "\n")

    def repeated(self, action: Callable[[], Result]) -> Result:
        """Runs an action. If the policy forbids a compilation that the action needs, notes this and runs the action again with the
        policy ``warn``."""
        try:
            return action()
        except CompilationForbiddenError as error:
            print(f"refused: {error}", file=sys.stderr)
            self.found["refused"].append(str(error))
        with compile_policy("warn"):
            return action()


def run_random(engine: Engine, measurement: Measurement, options: argparse.Namespace) -> None:
    """Runs random requests, a tenth of which are cancelled, and measures the seconds of each step. No request starts after the time
    limit of the process."""
    rng, steps, left = random.Random(options.seed), [], options.requests
    cancelled: list[int] = []
    while (left and process_seconds() < options.seconds) or not engine.idle:
        if left and (engine.idle or rng.random() < 0.1):
            group = min(left, rng.randint(1, options.max_sequences))
            left -= group
            vocab = engine.model.config.vocab_size
            numbers = [engine.add(random_request(rng, options.longest, vocab)) for _ in range(group)]
            cancelled = [number for number in numbers if rng.random() < 0.1]
        started = time.perf_counter()
        measurement.repeated(engine.step)
        steps.append(time.perf_counter() - started)
        if cancelled and rng.random() < 0.5:
            engine.cancel(cancelled.pop())
    slow = [seconds for seconds in steps if seconds > TIMEOUT_S]
    measurement.note(
        requests=options.requests,
        requests_left=left,
        steps=len(steps),
        slowest_step_s=max(steps, default=0.0),
        slow_steps=len(slow),
        seconds_of_slow_steps=slow,
    )


def measure(options: argparse.Namespace, measurement: Measurement) -> None:
    config = preset(options.preset) if options.layers is None else preset(options.preset).with_layers(options.layers)
    dtype = getattr(torch, options.dtype)
    longest = max(options.longest, options.batch_tokens) + 32
    imported = process_seconds()
    weights = TimedWeights(config, 0, dtype, options.device)
    model = GptOss(config, weights, dtype, options.device, max_positions=longest)
    measurement.note(imported_s=imported, weights_s=weights.seconds, model_s=process_seconds() - weights.seconds)

    def ready() -> Engine:
        cache = PagedKVCache(config, options.pages, 64, dtype, options.device)
        return Engine(model, cache, options.prefill_tokens, options.max_sequences, warm="all", receipt=options.receipt)

    engine = measurement.repeated(ready)
    assert engine.warmed is not None
    measurement.note(warm_up=dataclasses.asdict(engine.warmed), engine_s=process_seconds() - weights.seconds)
    measurement.repeated(lambda: engine.generate([Request([1] * min(128, options.longest), 1)]))
    measurement.note(first_token_s=process_seconds() - weights.seconds)
    measurement.note(metadata=metadata_of(options))  # after the first token, because this starts programs
    prompts = [[number % config.vocab_size] * options.batch_tokens for number in range(options.batch)]
    started = time.perf_counter()
    measurement.repeated(lambda: engine.generate([Request(prompt, 1) for prompt in prompts]))
    measurement.note(first_batch_s=time.perf_counter() - started)
    run_random(engine, measurement, options)


def metadata_of(options: argparse.Namespace) -> dict[str, Any]:
    # Imported here, because a server does not import the workbench before its first token.
    from tokenspeed_kernel.workbench.benchmark import collect_metadata

    metadata = dataclasses.asdict(collect_metadata(options.command, options.device))
    return {**metadata, **({"git_commit": options.commit} if options.commit else {})}


def missed(found: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that exceeds its limit in `BARS`, or was not measured."""
    measured = {name: found.get(name, math.inf) for name in BARS}
    return [f"{name} is {measured[name]:.3g}, must be at most {bar:g}" for name, bar in BARS.items() if measured[name] > bar]


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
    parser.add_argument("--seconds", type=float, default=math.inf, help="no random request starts later after the process's start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capture", type=Path, help="write the calls to this file, for pack build")
    parser.add_argument("--receipt", type=Path, help="write a receipt of the kernels to this file")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    capture = contextlib.nullcontext() if options.capture is None else shape_capture(options.capture)
    options.command = shlex.join(["python", "tools/gpt_oss/benchmarks/first_requests.py", *words])
    measurement = Measurement(options.output)
    found = measurement.found
    try:
        with compile_policy(options.policy), capture:
            measure(options, measurement)
    except BaseException as error:
        measurement.note(error=f"{type(error).__name__}: {error}", metadata=metadata_of(options))
        raise
    finally:
        show(found, options)
    return int(bool(missed(found)))


def show(found: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Prints the measured values, and the limits that they exceed."""
    values = dict.fromkeys(("first_token_s", "weights_s", "first_batch_s", "steps", "slowest_step_s"), math.nan) | {**found}
    print(
        f"first token {values['first_token_s']:.1f} s after the start, {values['weights_s']:.1f} s of random weights apart; "
        f"first batch of {options.batch} x {options.batch_tokens}: {values['first_batch_s']:.3f} s\n"
        f"{options.requests} random requests: {values['steps']} steps, the slowest {values['slowest_step_s']:.3f} s, "
        f"{found.get('compilations', 0)} compilations"
    )
    for line in missed(found):
        print(f"bar missed: {line}")


if __name__ == "__main__":
    sys.exit(main())
