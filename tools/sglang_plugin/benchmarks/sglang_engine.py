"""Runs one SGLang engine, with or without this plugin, on GPT-OSS with random weights, and the engine's tasks.

See ``h200_sglang.py``. The script needs one GPU, and the entry point of ``sglang_hooks.py``. Result lines (JSON) go to
``<out>/<name>.jsonl``; tokens and logits for comparisons between engines go to ``<out>/<name>.pt``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parents[2] / name) for name in ("engine_benchmarks", "vllm_plugin/benchmarks")])

from engine_figures import is_disturbed
from engine_process import Results, run_task, wait
from engine_requests import Request, bursts
from random_models import DEFAULT, MODELS, write_model
from sglang_hooks import BAD, KEEP, OUT, SERVING, STEPS, WATCH

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # No network is available, and a single process needs no communication.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
TASKS = ("describe", "decode", "prefill", "sampled", "logits", "tokens", "random")
# Fields of SGLang's ServerArgs that are reported as they were resolved.
_RESOLVED = [
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "sampling_backend", "moe_runner_backend"),
    *("page_size", "chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "mem_fraction_static", "kv_cache_dtype"),
    *("disable_overlap_schedule", "disable_radix_cache", "max_total_num_tokens"),
]
# Prompts whose logits are compared, by length, and the number of tokens that each generates.
LENGTHS, STEPS_OF_LOGITS = (5, 64, 127, 128, 129, 700, 2048, 3000), 8


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--name", required=True, help="of the engine in the results")
    p.add_argument("--out", type=Path, required=True, help="folder of the results")
    p.add_argument("--tasks", default=",".join(TASKS), help="in the order that is given")
    p.add_argument("--model", choices=[DEFAULT, *(model for model in MODELS if model.startswith("gpt-oss"))], default=DEFAULT)
    p.add_argument("--layers", type=int, help="the model's if left out")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    p.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt, for decode")
    p.add_argument("--decode", type=int, default=104, help="tokens that each request generates")
    p.add_argument("--short", type=int, default=8, help="steps of the whole batch before decode is measured")
    p.add_argument("--prefill", default="4x8192", help="prompts and their tokens")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--requests", type=int, default=1000, help="for random")
    p.add_argument("--memory", type=float, default=0.85, help="SGLang's mem_fraction_static")
    p.add_argument("--cache-tokens", type=int, help="the largest number of tokens in the cache; by default, what fits")
    p.add_argument("--port", type=int, default=31000, help="SGLang uses this port and some after it")
    p.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a field of SGLang's ServerArgs")
    p.add_argument("--wait-file", type=Path, help="wait for this file before the tasks, so that others are quiet")
    p.add_argument("--wait-seconds", type=float, default=300, help="the longest wait for the file")
    p.add_argument("--dry", action="store_true", help="stop when the arguments are resolved")
    return p.parse_args(words)


def engine_arguments(a: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Returns the arguments of SGLang's `Engine`."""
    count, length = map(int, a.prefill.split("x"))
    made: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "context_length": max(length, 4096) + 256,
        "mem_fraction_static": a.memory,
        # All decode batches are captured, or padded to a captured one.
        "max_running_requests": max(*a.batches, count),
        "cuda_graph_bs_decode": sorted({1, *a.batches}),
        "cuda_graph_bs_prefill": [256, 512, 1024, 2048, 4096, 8192],
        "random_seed": 0,
        # A step may compile kernels.
        "watchdog_timeout": 600,
        "port": a.port,
        "nccl_port": a.port + 1,
    }
    if a.cache_tokens:
        made["max_total_tokens"] = a.cache_tokens
    for item in a.set:
        name, _, value = item.partition("=")
        made[name] = json.loads(value)
    return made


class Engine:
    """An engine and its tasks. Each task is a method, and writes lines of results."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.results = a, Results(a.name, a.out)
        self.saved: dict[str, Any] = {}
        self.random = random.Random(0)
        self.highest_token = 199000  # tokens above this one are special, or not in the vocabulary
        self.engine: Any = None

    def start(self) -> None:
        """Starts SGLang's engine."""
        import sglang
        import torch

        self.results.report("imported", sglang=sglang.__version__, torch=torch.__version__)
        model = write_model(self.a.out / "model", self.a.model, self.a.layers)
        self.a.layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        given = engine_arguments(self.a, model)
        begun = time.time()
        if self.a.dry:
            from sglang.srt.plugins import load_plugins
            from sglang.srt.server_args import ServerArgs

            load_plugins()
            resolved = vars(ServerArgs(**given))
        else:
            self.engine = sglang.Engine(**given)
            resolved = self.engine.get_server_info()
        known = {name: resolved[name] for name in _RESOLVED if isinstance(resolved.get(name), (str, int, float, bool))}
        self.results.report(
            "started",
            seconds=round(time.time() - begun, 1),
            layers=self.a.layers,
            plugins=os.environ.get("SGLANG_PLUGINS"),
            **known,
        )

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self.random.randrange(100, self.highest_token) for _ in range(length)] for _ in range(count)]

    def generate(self, prompts: list[list[int]], tokens: int, **sampling: Any) -> tuple[float, list[list[int]]]:
        """Generates tokens, by default the most likely ones. Returns the duration in seconds, and the tokens of each prompt."""
        options = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        begun = time.perf_counter()
        outputs = self.engine.generate(input_ids=prompts, sampling_params=options)
        seconds = time.perf_counter() - begun
        ids = [list(output["output_ids"]) for output in outputs]
        if any(len(row) != tokens for row in ids):
            raise RuntimeError(f"asked for {tokens} tokens, got {[len(row) for row in ids]}")
        return seconds, ids

    def task(self, name: str) -> bool:
        """Runs a task by its name. Returns whether it succeeded. Each task has its own random prompts, which do not depend on the
        tasks before it: engines that run different tasks are compared by their results for the same prompts.
        """
        tasks: dict[str, Callable[[], None]] = {
            "describe": self.describe,
            "decode": self.decode,
            "prefill": self.prefill,
            "sampled": self.sampled,
            "logits": self.logits,
            "tokens": self.tokens,
            "random": self.requests,
        }
        self.random.seed(name)
        return run_task(self.results, name, tasks[name])

    # -- tasks ---------------------------------------------------------------------------------------------------------------------

    def describe(self) -> None:
        """Reports what serves the model, after a first request."""
        self.generate(self.prompts(1, 64), 4)
        self.results.report("serving", **json.loads((self.a.out / SERVING).read_text()))

    def decode(self) -> None:
        """Measures milliseconds per token of steps in which all requests of a batch generate a token. The first run compiles the
        kernels for this batch size, and is not counted.
        """
        for batch in self.a.batches:
            self.measure_decode("decode", batch)

    def sampled(self) -> None:
        """Like `decode`, for the largest batch, with tokens that are drawn by temperature, top-k and top-p."""
        self.measure_decode("sampled decode", max(self.a.batches), temperature=0.8, top_k=50, top_p=0.95)

    def measure_decode(self, figure: str, batch: int, **sampling: Any) -> None:
        """Measures and reports the decode steps of a batch."""
        runs = [self.steps(batch, **sampling) for _ in range(self.a.repeats + 1)][1:]
        times = sorted(1e3 * seconds for seconds, _ in runs)
        self.results.report(
            figure,
            batch=batch,
            layers=self.a.layers,
            ms=round(statistics.median(times), 4),
            all_ms=[round(each, 4) for each in times],
            steps=min(steps for _, steps in runs),
            disturbed=is_disturbed(times),
        )

    def steps(self, batch: int, **sampling: Any) -> tuple[float, int]:
        """Generates ``--decode`` tokens for each of a batch of prompts. Returns the seconds per step, and the number of steps."""
        file = self.a.out / STEPS
        before = file.stat().st_size if file.exists() else 0
        self.generate(self.prompts(batch, self.a.prompt), self.a.decode, **sampling)
        with file.open() as lines:
            lines.seek(before)
            return step_time(lines.read().splitlines(), batch, self.a.short)

    def prefill(self) -> None:
        """Measures prefill tokens per second; each prompt generates one token. All runs have new prompts, so none is cached."""
        count, length = (int(number) for number in self.a.prefill.split("x"))
        first, *times = [self.generate(self.prompts(count, length), 1)[0] for _ in range(self.a.repeats + 2)]
        middle = statistics.median(times)
        self.results.report(
            "prefill",
            shape=self.a.prefill,
            layers=self.a.layers,
            tokens_per_s=round(count * length / middle),
            ms=round(1e3 * middle, 2),
            first_s=round(first, 2),
            all_ms=[round(1e3 * each, 2) for each in times],
            disturbed=is_disturbed(times),
        )

    def logits(self) -> None:
        """Stores the logits of the next tokens of prompts that run one after another, and, without graphs, the last token's
        experts.
        """
        import torch

        rows, ids, experts = [], [], []
        for prompt in (self.prompts(1, length)[0] for length in LENGTHS):
            (self.a.out / KEEP).touch()
            tokens = self.generate([prompt], STEPS_OF_LOGITS)[1][0]
            time.sleep(0.3)  # SGLang may run a step more, whose token it drops
            (self.a.out / KEEP).unlink()
            files = sorted(self.a.out.glob("logits-*.pt"))
            steps = [torch.load(file) for file in files[:STEPS_OF_LOGITS]]
            made = torch.cat([step["logits"] for step in steps])
            experts += [step["experts"] for step in steps if "experts" in step]
            for file in files:
                file.unlink()
            chosen = made.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
            if not torch.equal(chosen, made.amax(1)):
                raise RuntimeError(f"tokens {tokens} are not those of the logits, {made.argmax(-1).tolist()}")
            rows.append(made)
            ids.append(tokens)
        self.saved["prompts"] = {"rows": torch.stack(rows), "ids": ids}
        if len(experts) == len(rows) * STEPS_OF_LOGITS:
            self.saved["prompts"]["experts"] = torch.cat(experts)
        self.results.report("logits", prompts=len(rows), bad=int((~self.saved["prompts"]["rows"].isfinite()).sum()))

    def tokens(self) -> None:
        """Generates 32 greedy tokens for each of 128 prompts. The prompts have 16 to 1,200 tokens."""
        prompts = [self.prompts(1, self.random.randrange(16, 1200))[0] for _ in range(128)]
        seconds, self.saved["tokens"] = self.generate(prompts, 32)
        distinct = len({token for row in self.saved["tokens"] for token in row})
        self.results.report("tokens", seconds=round(seconds, 2), distinct=distinct)

    def requests(self) -> None:
        """Runs random requests that arrive over time, with shared prefixes and mixed lengths. Some requests are aborted; all others
        must complete. Logits that are not finite are counted.
        """
        (self.a.out / WATCH).touch()
        begun = time.perf_counter()
        every = list(bursts(self.a.requests, self.highest_token))
        outputs = self.engine.loop.run_until_complete(self.arrive(every))
        (self.a.out / WATCH).unlink()
        asked = {request.name: request for burst in every for request in burst}
        lost = [name for name, request in asked.items() if not request.aborted and len(outputs[name][0]) != request.tokens]
        self.saved["requests"] = {name: ids for name, (ids, _) in outputs.items() if not asked[name].aborted}
        bad = self.a.out / BAD
        self.results.report(
            "requests",
            asked=len(asked),
            aborted=sum(request.aborted for request in asked.values()),
            lost=len(lost),
            cached_tokens=sum(cached for _, cached in outputs.values()),
            seconds=round(time.perf_counter() - begun, 1),
            bad=int(bad.read_text()) if bad.exists() else 0,
            first_lost=[[name, str(outputs[name])[:200]] for name in lost[:3]],
        )

    async def arrive(self, every: Sequence[Sequence[Request]]) -> dict[str, tuple[list[int], int]]:
        """Sends bursts of requests. Returns the tokens and the number of cached tokens of each request."""
        running: dict[str, asyncio.Task[Any]] = {}
        for burst in every:
            for request in burst:
                running[request.name] = asyncio.create_task(self.run(request))
            await asyncio.sleep(0.02)
            for request in burst:
                if request.aborted:
                    self.engine.tokenizer_manager.abort_request(_id(request))
        # An aborted request may end with an error.
        made = await asyncio.gather(*running.values(), return_exceptions=True)
        return {
            name: ([], 0) if isinstance(output, BaseException) else tokens_of(output)
            for name, output in zip(running, made, strict=True)
        }

    async def run(self, request: Request) -> dict[str, Any]:
        """Generates the tokens of one request."""
        sampling = {"temperature": 0.0, "max_new_tokens": request.tokens, "ignore_eos": True}
        output = await self.engine.async_generate(input_ids=request.prompt, sampling_params=sampling, rid=_id(request))
        return dict(output)

    def save(self) -> None:
        """Writes the data for comparisons between engines."""
        import torch

        if self.saved:
            torch.save(self.saved, self.a.out / f"{self.a.name}.pt")


def _id(request: Request) -> str:
    # SGLang aborts all requests whose id starts with the given one.
    return f"{request.name}-"


def tokens_of(output: Mapping[str, Any]) -> tuple[list[int], int]:
    """Returns the generated tokens of a request and its number of cached tokens. A request that is aborted before it begins has
    neither.
    """
    return list(output.get("output_ids") or []), output["meta_info"].get("cached_tokens", 0)


def step_time(lines: Sequence[str], batch: int, short: int) -> tuple[float, int]:
    """Returns the seconds per step of decode steps of a whole batch, and the number of steps that this is measured over.

    Args:
        lines: of ``sglang_hooks.Steps``.
        batch: number of requests.
        short: number of steps of the whole batch before the measurement begins.
    """
    times = [float(now) for now, mode, size in map(str.split, lines) if mode == "DECODE" and int(size) == batch][short:-1]
    if len(times) < 2:
        raise ValueError(f"{len(times)} decode steps of {batch} requests among {len(lines)} steps, after {short} steps")
    return (times[-1] - times[0]) / (len(times) - 1), len(times) - 1


def main(words: Sequence[str] | None = None) -> int:
    """Starts the engine, waits for its turn, and runs the tasks. Returns the number of failed tasks."""
    a = arguments(words)
    a.out.mkdir(parents=True, exist_ok=True)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ[OUT] = str(a.out.resolve())
    engine = Engine(a)
    if not run_task(engine.results, "start", engine.start):
        return 1
    if a.dry:
        return 0
    (a.out / f"{a.name}.ready").touch()
    wait(a.wait_file, a.wait_seconds)
    failed = 0
    for name in a.tasks.split(","):
        failed += not engine.task(name)
        engine.save()
    engine.results.report("end")
    return failed


if __name__ == "__main__":
    # The process exits without waiting for the engine's other processes, because all results are on disk.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
