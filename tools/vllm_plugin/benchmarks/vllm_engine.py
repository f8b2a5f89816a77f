"""Runs one vLLM engine, with or without this plugin, on a model with random weights, and the engine's tasks. See ``h200_vllm.py``.

    python vllm_engine.py --name plugin --attention CUSTOM --layers 12 --out results
    VLLM_PLUGINS=random_gpt_oss python vllm_engine.py --name vllm --layers 12 --out results

The script needs one GPU, and the entry points of ``random_gpt_oss.py`` and ``random_models.py``. Result lines (JSON) go to
``<out>/<name>.jsonl``; tokens and logits for comparisons between engines go to ``<out>/<name>.pt``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[2] / "engine_benchmarks")])

from engine_figures import is_disturbed, steady
from engine_process import Results, run_task, wait
from engine_requests import bursts
from random_gpt_oss import EXPERT_SIZES, draw_experts, drawn
from random_models import DEFAULT, MODELS, PREFILLS, cache_gib, load_format, write_model
from watched import Watched, record, write_recorded

# No network is available, and a single process needs no communication.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Without NVLink multicast, which the measured machine lacks, vLLM would not use symmetric memory anyway.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    # Otherwise DeepGEMM compiles kernels for about a thousand batch sizes. Those that are measured are compiled before that.
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    # `apply_model` needs this variable to accept a function.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}

# Maps a family of kernels to lower-case words in the kernels' names. A kernel belongs to the first family with a matching word.
_FAMILIES = {
    "attention": ("flash", "attention"),
    "cache": ("cache",),
    "routing": ("topk", "routing", "bitmatrix", "schedule", "sort", "histogram", "moe_align", "permute"),
    "experts": ("matmul_ogs", "moe", "grouped", "marlin", "reduce_grouped", "combine"),
    "norms": ("norm",),
    "rotary": ("rotary", "rope"),
    "products": ("nvjet", "gemm", "cublas", "splitk", "cutlass"),
    "copies": ("memcpy", "memset"),
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--name", required=True, help="of the engine in the results")
    p.add_argument("--out", type=Path, required=True, help="folder of the results")
    p.add_argument(
        "--tasks",
        default="describe,decode,prefill",
        help="of describe, logits, prompts, tokens, random, float32, decode, prefill, kernels, prefill-kernels; in this order",
    )
    p.add_argument("--model", choices=[DEFAULT, *MODELS], default=DEFAULT)
    p.add_argument("--layers", type=int, help="the model's if left out")
    p.add_argument("--mla-prefill", help="CUSTOM for this plugin's prefill of latent attention")
    p.add_argument("--attention", help="CUSTOM for this plugin's backend; vLLM chooses without")
    p.add_argument("--moe-backend", help="triton, marlin, ...; vLLM or the plugin chooses without")
    p.add_argument("--tensor-parallel", type=int, default=1, help="number of GPUs")
    p.add_argument("--norms", action="store_true", help="norms by this plugin's provider of vLLM's IR")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    p.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt, for decode")
    p.add_argument("--decode", type=int, default=136, help="tokens that each request generates")
    p.add_argument("--short", type=int, default=8, help="tokens that each request has generated before decode is measured")
    p.add_argument("--prefill", help="prompts and their tokens, like 4x8192")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--requests", type=int, default=1000, help="for random")
    p.add_argument("--max-num-batched-tokens", type=int)
    p.add_argument("--max-num-seqs", type=int)
    p.add_argument("--prefix-caching", action="store_true")
    p.add_argument("--graph-sizes", type=int, nargs="+", help="batch sizes that are captured; those measured by default")
    p.add_argument("--kv-gib", type=float, help="size of the cache; by default, all requests of a measured batch fit")
    inproc = "the engine in this process, for logits, float32 and kernels"
    p.add_argument("--inproc", action=argparse.BooleanOptionalAction, default=False, help=inproc)
    p.add_argument("--eager", action="store_true", help="no compilation and no graphs; float32 then sees which experts are chosen")
    p.add_argument("--start-file", type=Path, help="wait for this file before the engine is made")
    p.add_argument("--wait-seconds", type=float, default=300, help="the longest wait for a file")
    p.add_argument("--wait-file", type=Path, help="wait for this file before decode and prefill, so that others are quiet")
    p.add_argument("--dry", action="store_true", help="stop when the engine's configuration is made")
    a = p.parse_args(words)
    a.prefill = a.prefill or PREFILLS.get(a.model, "4x8192")
    if a.kv_gib is None:
        prompts, length = map(int, a.prefill.split("x"))
        # Each request may fill its last block partly, and vLLM keeps a block for itself.
        tokens = max(max(a.batches) * (a.prompt + a.decode + 64), prompts * (length + 64))
        a.kv_gib = 0.5 + cache_gib(a.model, a.layers, tokens) / a.tensor_parallel
    return a


def engine_arguments(a: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Returns the arguments of vLLM's `LLM`."""
    made: dict[str, Any] = {
        "model": str(model),
        "load_format": load_format(a.model),
        "skip_tokenizer_init": True,
        "max_model_len": 8448,
        "kv_cache_memory_bytes": int(a.kv_gib * 2**30),
        # The cache's size is set above; this value is only compared with the free memory.
        "gpu_memory_utilization": 0.05,
        "enable_prefix_caching": a.prefix_caching,
        "seed": 0,
        "dtype": "bfloat16",
        "compilation_config": {"cudagraph_capture_sizes": a.graph_sizes or sorted({1, 2, 4, 8, *a.batches})},
    }
    if a.tensor_parallel > 1:
        made["tensor_parallel_size"] = a.tensor_parallel
    for name in ("max_num_batched_tokens", "max_num_seqs", "moe_backend"):
        if getattr(a, name):
            made[name] = getattr(a, name)
    if a.norms:
        made["ir_op_priority"] = {"rms_norm": ["tokenspeed_kernel"], "fused_add_rms_norm": ["tokenspeed_kernel"]}
    if a.eager:
        made["enforce_eager"] = True
    if a.attention:
        made["attention_config"] = {"backend": a.attention}
    if a.mla_prefill:
        made.setdefault("attention_config", {})["mla_prefill_backend"] = a.mla_prefill
    return made


def describe(model: Any) -> dict[str, Any]:
    """Returns the quantisation methods and attention backends of the first two layers. Runs in the model's process."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        backend, impl = getattr(module, "attn_backend", None), getattr(module, "impl", None)
        if backend is not None and impl is not None and len(found) < 2:
            serving = getattr(impl, "serving", None)
            found[name] = {"backend": backend.get_name(), "impl": type(impl).__module__ + "." + type(impl).__name__}
            if serving is not None:
                found[name]["kernels"] = getattr(serving, "kernels", None) or getattr(serving, "package", "")
        method = getattr(module, "quant_method", None)
        if "xpert" in type(method).__name__ or hasattr(method, "mxfp4_backend"):
            plan = getattr(method, "plan", None)
            found.setdefault("experts", f"{type(method).__module__}.{type(method).__name__} " + str(
                plan.kernel if plan is not None else getattr(method, "mxfp4_backend", "")
            ))  # fmt: skip
    return found


def weights_and_rotary(model: Any) -> tuple[dict[str, Any], Any]:
    """Returns all current parameters, and the table of the rotary embedding in float32. Runs in the model's process."""
    tables = (module.cos_sin_cache for module in model.modules() if hasattr(module, "cos_sin_cache"))
    return {name: parameter.data for name, parameter in model.named_parameters()}, next(tables).float()


class Engine:
    """An engine and its tasks. Each task is a method, and writes lines of results."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.results = a, Results(a.name, a.out)
        self.saved: dict[str, Any] = {}
        self.random = random.Random(0)
        self.highest_token = 199000  # tokens above this one are special, or not in the vocabulary
        self.asked = 0  # number of calls of `steps`
        self.llm: Any = None
        self.watched: Any = None

    def report(self, figure: str, **values: Any) -> None:
        """Writes a line of results."""
        self.results.report(figure, **values)

    def start(self) -> None:
        """Starts vLLM's engine."""
        import torch
        import vllm

        self.report("imported", vllm=vllm.__version__, torch=torch.__version__)
        model = write_model(Path(f"/tmp/random-{self.a.model}-{self.a.layers}"), self.a.model, self.a.layers)
        fields = json.loads((model / "config.json").read_text())
        self.a.layers = fields["num_hidden_layers"]
        self.highest_token = min(199000, fields["vocab_size"])
        given = engine_arguments(self.a, model)
        if self.a.dry:
            from vllm.engine.arg_utils import EngineArgs

            print(EngineArgs(**given).create_engine_config())
            return
        wait(self.a.start_file, self.a.wait_seconds)
        begun = time.time()
        self.llm = vllm.LLM(**given)
        made = self.llm.llm_engine.vllm_config
        self.report(
            "started",
            seconds=round(time.time() - begun, 1),
            layers=self.a.layers,
            graphs=str(made.compilation_config.cudagraph_mode),
            compilation=str(made.compilation_config.mode),
            compile_s=round(made.compilation_config.compilation_time, 1),
            max_num_batched_tokens=made.scheduler_config.max_num_batched_tokens,
            max_num_seqs=made.scheduler_config.max_num_seqs,
            asynchronous=made.scheduler_config.async_scheduling,
            block_size=made.cache_config.block_size,
            plugins=os.environ.get("VLLM_PLUGINS"),
        )
        if self.a.inproc:
            (self.watched,) = self.llm.apply_model(Watched)
            if self.a.eager:
                self.llm.apply_model(self.watched.watch_routers)

    def prompts(self, count: int, length: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [self.random.randrange(100, self.highest_token) for _ in range(length)]} for _ in range(count)]

    def generate(self, prompts: Any, tokens: int) -> tuple[float, list[list[int]]]:
        """Generates tokens. Returns the duration in seconds, and the tokens of each prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        if any(len(row) != tokens for row in ids):
            raise RuntimeError(f"asked for {tokens} tokens, got {[len(row) for row in ids]}")
        return seconds, ids

    # -- tasks ---------------------------------------------------------------------------------------------------------------------

    def describe(self) -> None:
        """Reports the layers' quantisation methods and attention backends."""
        found, *_ = self.llm.apply_model(describe)  # one for each rank
        self.report("serving", **found)

    def logits(self) -> None:
        """Stores all logits of the next 8 tokens of 8 prompts. The prompts have 5 to 3,000 tokens."""
        prompts = [self.prompts(1, length)[0] for length in (5, 64, 127, 128, 129, 700, 2048, 3000)]
        self.watched.keep = True
        _, ids = self.generate(prompts, 8)
        self.watched.keep = False
        self.saved["logits"], self.saved["logits_ids"] = self.watched.logits, ids
        self.watched.logits = []
        self.report("logits", steps=len(self.saved["logits"]), bad=int(self.watched.bad))

    def next_tokens(self) -> None:
        """Stores the logits of prompts' next tokens; with ``--eager``, also the experts of the last token of each step. The prompts
        run one after another, so the model may be in other processes, on several ranks. A prompt must be one step.
        """
        import against_float32 as exact
        import float32
        import torch

        fields = json.loads((Path(self.llm.llm_engine.vllm_config.model_config.model) / "config.json").read_text())
        rows, every, experts = [], [], []
        for prompt in [self.prompts(1, length)[0] for length in exact.LENGTHS]:
            self.llm.apply_model(functools.partial(record, routers=self.a.eager))
            _, ids = self.generate([prompt], exact.GENERATED)
            self.llm.apply_model(functools.partial(write_recorded, folder=self.a.out.resolve()))
            found = torch.load(self.a.out / "recorded.pt")
            rows.append(exact.rows_of(found["logits"], ids)[0])
            every += ids
            layers = [steps for _, steps in sorted(found["routing"].items(), key=lambda item: int(item[0].split(".")[2]))]
            top_k = fields["num_experts_per_tok"] if layers else 0
            experts += [torch.cat([float32.best(step[-1:], top_k) for step in steps]) for steps in zip(*layers, strict=True)]
        (self.a.out / "recorded.pt").unlink()
        self.saved["prompts"] = {"rows": torch.stack(rows), "ids": every}
        if experts:
            self.saved["prompts"]["experts"] = torch.stack(experts)
        bad = int((~self.saved["prompts"]["rows"].isfinite()).sum())
        self.report("prompts", prompts=len(rows), layers_with_experts=len(experts[0]) if experts else 0, bad=bad)

    def float32(self) -> None:
        """Compares logits of prompts and their next tokens with the float32 model; with ``--eager``, also with the engine's
        experts.
        """
        import against_float32 as exact
        import float32
        import torch

        prompts = [self.prompts(1, length)[0] for length in exact.LENGTHS]
        self.watched.keep = True
        _, ids = self.generate(prompts, exact.GENERATED)
        self.watched.keep = False
        rows = exact.rows_of(self.watched.logits, ids)
        self.watched.logits = []
        made = self.llm.llm_engine.vllm_config
        fields = json.loads((Path(made.model_config.model) / "config.json").read_text())
        ((parameters, rotary),) = self.llm.apply_model(weights_and_rotary)
        names = {name.replace(".routed_experts.", "."): name for name in drawn}

        def weight(name: str) -> Any:
            if name.rpartition(".")[2] in EXPERT_SIZES:
                return draw_experts(names[name], fields["num_local_experts"], rotary.device)
            return parameters[name]

        routing = [steps for _, steps in sorted(self.watched.routing.items(), key=lambda item: int(item[0].split(".")[2]))]
        torch.set_float32_matmul_precision("highest")
        with torch.inference_mode():
            model = float32.Model(fields, weight, rotary)
            given = [prompt["prompt_token_ids"] for prompt in prompts]
            found, saved = exact.compare(model, given, ids, rows, routing if self.a.eager else [])
        self.saved["float32"] = {"rows": rows, "ids": ids, **saved}
        self.report("float32", layers=self.a.layers, eager=self.a.eager, **found)

    def tokens(self) -> None:
        """Generates 32 greedy tokens for each of 128 prompts. The prompts have 16 to 1,200 tokens."""
        prompts = [self.prompts(1, self.random.randrange(16, 1200))[0] for _ in range(128)]
        seconds, self.saved["tokens"] = self.generate(prompts, 32)
        distinct = len({token for row in self.saved["tokens"] for token in row})
        bad = None if self.watched is None else int(self.watched.bad)
        self.report("tokens", seconds=round(seconds, 2), distinct=distinct, bad=bad)

    def requests(self) -> None:
        """Runs random requests that arrive over time, with shared prefixes and mixed lengths. Some requests are aborted; all others
        must complete."""
        from vllm import SamplingParams

        engine, arriving = self.llm.llm_engine, bursts(self.a.requests, self.highest_token)
        # If the model is in another process, non-finite logits are detected in the tokens' probabilities.
        logprobs, bad = (0, 0) if self.watched is None else (None, 0)
        asked: dict[str, int] = {}
        aborted: set[str] = set()
        got: dict[str, list[int]] = {}
        cached = steps = 0
        begun = time.perf_counter()
        while (burst := next(arriving, None)) is not None or engine.has_unfinished_requests():
            for request in burst or ():
                asked[request.name] = request.tokens
                sampling = SamplingParams(
                    temperature=0.0, max_tokens=request.tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
                )
                engine.add_request(request.name, {"prompt_token_ids": request.prompt}, sampling)
                if request.aborted:
                    aborted.add(request.name)
            running = [name for name in asked if name in aborted and name not in got]
            if running and steps % 7 == 3:
                engine.abort_request(running[:3])
                got.update({name: [] for name in running[:3]})
            for output in engine.step():
                if output.finished and output.request_id not in aborted:
                    got[output.request_id] = list(output.outputs[0].token_ids)
                    cached += output.num_cached_tokens or 0
                    found = output.outputs[0].logprobs or []
                    bad += sum(not math.isfinite(one.logprob) for ids in found for one in ids.values())
            steps += 1
            if steps > 50 * self.a.requests:
                raise RuntimeError(f"{len(asked) - len(got)} requests never end")
        lost = [name for name, tokens in asked.items() if name not in aborted and len(got.get(name, [])) != tokens]
        self.saved["requests"] = got
        self.report(
            "requests",
            asked=len(asked),
            aborted=len(aborted),
            lost=len(lost),
            steps=steps,
            cached_tokens=cached,
            seconds=round(time.perf_counter() - begun, 1),
            bad=bad if self.watched is None else int(self.watched.bad),
            first_lost=lost[:3],
        )

    def decode(self) -> None:
        """Measures milliseconds per token of steps in which all requests of a batch generate a token: see `steady`. The first run
        compiles the kernels for this batch size, and is not counted.
        """
        for batch in self.a.batches:
            runs = [steady(self.steps(self.prompts(batch, self.a.prompt)), self.a.short) for _ in range(self.a.repeats + 1)][1:]
            times = sorted(1e3 * seconds for seconds, _ in runs)
            self.report(
                "decode",
                batch=batch,
                layers=self.a.layers,
                ms=round(statistics.median(times), 4),
                all_ms=[round(each, 4) for each in times],
                steps=min(steps for _, steps in runs),
                disturbed=is_disturbed(times),
            )

    def steps(self, prompts: Any) -> list[tuple[float, list[int]]]:
        """Generates ``--decode`` tokens for each prompt. Returns, for each step of the engine, the time in seconds at which its
        tokens had arrived, and the number of tokens that each request has so far.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        options = {"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        sampling = SamplingParams(temperature=0.0, max_tokens=self.a.decode, **options)
        self.asked += 1
        names = [f"d{self.asked}-{row}" for row in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, prompt, sampling)
        counts, found = dict.fromkeys(names, 0), []
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] += len(output.outputs[0].token_ids)
            found.append((time.perf_counter(), list(counts.values())))
        if any(count != self.a.decode for count in counts.values()):
            raise RuntimeError(f"asked for {self.a.decode} tokens, got {counts}")
        return found

    def prefill(self) -> None:
        """Measures prefill tokens per second; each prompt generates one token. All runs have new prompts, so none is cached."""
        count, length = (int(number) for number in self.a.prefill.split("x"))
        first, *times = [self.generate(self.prompts(count, length), 1)[0] for _ in range(self.a.repeats + 1)]
        middle = statistics.median(times)
        self.report(
            "prefill",
            shape=self.a.prefill,
            layers=self.a.layers,
            tokens_per_s=round(count * length / middle),
            ms=round(1e3 * middle, 2),
            first_s=round(first, 2),
            all_ms=[round(1e3 * each, 2) for each in times],
            disturbed=is_disturbed(times),
        )

    def kernels(self) -> None:
        """Reports the kernels of a decode step of one request, with their times. The first 4 steps are left out; the times are
        averages over 16 steps.
        """
        prompts = self.prompts(1, 64)
        self.generate(prompts, 20)
        found = self.profiled(prompts, 20)
        steps = kernels_of_steps([(name, micros) for name, _, micros in found])[4:-1]
        if not steps:
            raise RuntimeError(f"no steps among {len(found)} kernels")
        total: dict[str, list[float]] = {}
        for name, micros in itertools.chain(*steps):
            total.setdefault(name, []).append(micros)
        rows = sorted(total.items(), key=lambda item: -sum(item[1]))
        self.report(
            "kernels",
            layers=self.a.layers,
            of_a_step=round(sum(map(len, steps)) / len(steps), 1),
            busy_us=round(sum(map(sum, total.values())) / len(steps), 1),
            kernels=[[name[:120], round(len(each) / len(steps), 2), round(sum(each) / len(steps), 2)] for name, each in rows],
        )

    def prefill_kernels(self) -> None:
        """Reports the kernels of a prefill by family, and the device's idle time."""
        count, length = (int(number) for number in self.a.prefill.split("x"))
        prompts = self.prompts(count, length)
        self.generate(prompts, 1)
        seconds = statistics.median(self.generate(prompts, 1)[0] for _ in range(self.a.repeats))
        found = self.profiled(prompts, 1)
        total: dict[str, list[float]] = {}
        for name, _, micros in found:
            total.setdefault(name, []).append(micros)
        rows = sorted(total.items(), key=lambda item: -sum(item[1]))
        families: dict[str, float] = {}
        for name, each in rows:
            families[family_of(name)] = families.get(family_of(name), 0.0) + sum(each)
        self.report(
            "prefill kernels",
            shape=self.a.prefill,
            layers=self.a.layers,
            ms=round(1e3 * seconds, 2),
            busy_ms=round(sum(families.values()) / 1e3, 2),
            first_to_last_ms=round((found[-1][1] + found[-1][2] - found[0][1]) / 1e3, 2) if found else None,
            families={name: round(micros / 1e3, 3) for name, micros in sorted(families.items(), key=lambda item: -item[1])},
            kernels=[[name[:120], len(each), round(sum(each), 1)] for name, each in rows[:40]],
            gaps=[[before[:80], after[:80], number, round(micros, 1)] for (before, after), (number, micros) in gaps_of(found)[:12]],
        )

    def profiled(self, prompts: Any, tokens: int) -> list[tuple[str, float, float]]:
        """Returns the kernels and copies that run while tokens are generated: name, start and duration in us, in order of their
        start.
        """
        import torch
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.generate(prompts, tokens)
            torch.cuda.synchronize()
        of_device = (
            event for event in profiler.events() if event.device_time > 0 and not getattr(event, "is_user_annotation", False)
        )
        return sorted(((event.name, event.time_range.start, event.device_time) for event in of_device), key=lambda one: one[1])

    def save(self) -> None:
        """Writes the data for comparisons between engines."""
        import torch

        if self.saved:
            torch.save(self.saved, self.a.out / f"{self.a.name}.pt")


def family_of(kernel: str) -> str:
    """Returns the family of a kernel, from the words in the kernel's name."""
    lower = kernel.lower()
    return next((family for family, words in _FAMILIES.items() if any(word in lower for word in words)), "other")


def kernels_of_steps(found: Sequence[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """Splits a list of kernels, in order of their start, into steps. The last kernel of a step is the argmax of the logits."""
    steps: list[list[tuple[str, float]]] = [[]]
    for name, micros in found:
        steps[-1].append((name, micros))
        if "argmax" in name.lower():
            steps.append([])
    return [step for step in steps if step]


def gaps_of(found: Sequence[tuple[str, float, float]]) -> list[tuple[tuple[str, str], tuple[int, float]]]:
    """Returns the idle gaps of the device. A gap is named by the kernels before and after it. The result has the number of gaps
    with this name, and their total microseconds; the name with the longest total comes first.

    Args:
        found: kernels in order of their start: name, start and time in microseconds.
    """
    gaps: dict[tuple[str, str], tuple[int, float]] = {}
    last, busy_until = "", math.inf
    for name, start, micros in found:
        if start > busy_until:
            number, idle = gaps.get((last, name), (0, 0.0))
            gaps[last, name] = (number + 1, idle + start - busy_until)
        if not last or start + micros > busy_until:
            last, busy_until = name, start + micros
    return sorted(gaps.items(), key=lambda gap: -gap[1][1])


def main(words: Sequence[str] | None = None) -> int:
    a = arguments(words)
    a.out.mkdir(parents=True, exist_ok=True)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if a.inproc else "1"
    engine = Engine(a)
    tasks: dict[str, Callable[[], None]] = {
        "describe": engine.describe,
        "logits": engine.logits,
        "prompts": engine.next_tokens,
        "tokens": engine.tokens,
        "random": engine.requests,
        "decode": engine.decode,
        "prefill": engine.prefill,
        "float32": engine.float32,
        "kernels": engine.kernels,
        "prefill-kernels": engine.prefill_kernels,
    }
    wanted = a.tasks.split(",")
    failed = 0
    if not run_task(engine.results, "start", engine.start):
        return 1
    if a.dry:
        return 0
    waited = False
    for name in wanted:
        if name in ("decode", "prefill", "kernels", "prefill-kernels") and not waited:
            waited = True
            (a.out / f"{a.name}.ready").touch()
            wait(a.wait_file, a.wait_seconds)

        def task(run: Callable[[], None] = tasks[name]) -> None:
            run()
            engine.save()

        failed += not run_task(engine.results, name, task)
    engine.report("end")
    return failed


if __name__ == "__main__":
    # The engine's processes import this module by its name to unpickle its functions.
    import vllm_engine

    # The process exits without waiting for the engine's other processes, because all results are on disk.
    code = vllm_engine.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
