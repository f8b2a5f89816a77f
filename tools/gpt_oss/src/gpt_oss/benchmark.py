"""Measures the runtime end to end: decode steps of the engine, and prefills, with random weights.

A decode step is timed as a caller of the engine sees it. The bare pass (the same pass without the engine, replayed on the device)
is timed as well. The floor of a step is the time to read its data: weights of attention and of the routed experts, keys and values,
and the output matrix. `breakdown` measures the operators of a pass.

A result is also a benchmark report: `tokenspeed-kernel report` shows its kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpt_oss.batch import Phase, Piece, make_batch
from gpt_oss.breakdown import break_down, by_family
from gpt_oss.cache import PagedKVCache
from gpt_oss.config import PRESETS, Config, preset
from gpt_oss.divergence import Probed, divergence_of, probe
from gpt_oss.engine import Engine
from gpt_oss.fields import BOOL, COUNT, INT, Field, check_fields, describe, dtype_name, is_int, number, one_of, optional
from gpt_oss.kernels import Heard, listen, portable_only, preferring
from gpt_oss.loader import RandomTensors
from gpt_oss.model import GptOss
from gpt_oss.request import Request
from gpt_oss.sampling import Sampling
from tokenspeed_kernel import watch_calls
from tokenspeed_kernel.workbench.benchmark import Roofline, Row, collect_metadata, measure_roofline


@dataclass(frozen=True)
class Variant:
    """A way to run the model.

    Attributes:
        kernels: returns a context manager inside which only some registered kernels are eligible; by default all kernels.
        cache_dtype: dtype of keys and values; None for the model's dtype.
        activation_dtype: the format to which experts quantise their inputs; see `moe_apply.plan`.
        dense_weights: the format of the weights of attention and of the output matrix; see `GptOss`.
    """

    kernels: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # by default all installed kernels are eligible
    cache_dtype: torch.dtype | None = None
    activation_dtype: str = "none"
    dense_weights: str = "none"


VARIANTS = {
    "optimised": Variant(),
    "portable": Variant(portable_only),  # only the core's kernels
    "fp8-cache": Variant(cache_dtype=torch.float8_e4m3fn),
    "fp8-activations": Variant(activation_dtype="fp8"),
    "fp8-dense": Variant(dense_weights="fp8"),
    "mxfp4-dense": Variant(dense_weights="mxfp4"),
}

_WARM_STEPS = 4
_REPLAYS = 30  # replays of the pass without the engine; each advances the position by one
_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
_PREFILL_TOKENS = 65536  # tokens per prefill pass before decode steps; limits the memory of a pass's activations
# Number of layers whose operators are timed for a prefill: one with a window and one without. The tensors of all layers would not
# fit in memory.
_PREFILL_LAYERS = 2
# Number of sequences, and of tokens of each, with which variants are compared. The first half of each sequence is in the cache, and
# the logits of the second half are compared.
_PROBES, _PROBE_TOKENS = 4, 256


def _are_ints(value: object) -> bool:
    return isinstance(value, Sequence) and all(map(is_int, value))


def _are_positive(values: Sequence[int]) -> bool:
    return all(value >= 1 for value in values)


_COUNTS = Field("a sequence of ints of at least 1", _are_ints, _are_positive)
_NAMES = Field(
    "a sequence of names",
    lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value),
)
_SHAPES = Field(
    "a sequence of pairs of ints of at least 1",
    lambda value: isinstance(value, Sequence) and all(_are_ints(pair) and len(pair) == 2 for pair in value),
    lambda value: all(map(_are_positive, value)),
)


@dataclass(frozen=True)
class Workload:
    """The measurements to make.

    Attributes:
        preset: the configuration; the weights are random.
        layers: number of layers; None for the preset's number. Every pass includes the embedding and the output matrix.
        batches: batch sizes of the decode measurements, in sequences.
        contexts: numbers of tokens per sequence before the timed steps. Every batch size is measured with every context.
        decode_steps: number of timed steps of each measurement.
        prefills: pairs (prompts, tokens per prompt); each pair is prefilled in one pass.
        repeats: number of timed runs of each prefill, after a warm-up run.
        page_size: number of tokens per page of the cache.
        seed: seed of weights, prompts and sampling; any int.
        prefer: names of kernels that are selected whenever they are eligible, whatever their priority.
        temperature: sampling temperature of decode steps. 0 is greedy; with random weights, greedy texts soon repeat themselves.
        bias: standard deviation of the random biases. All tokens have the same biases, so large biases make tokens select similar
            experts. The floor counts the experts that were selected.
        penalties: whether requests of decode measurements have repetition, frequency and presence penalties. Bare passes have none.

    Raises:
        TypeError, ValueError: a field is not as stated; the message names it.
    """

    preset: str = "gpt-oss-120b"
    layers: int | None = None
    batches: Sequence[int] = (1, 4, 16, 64)
    contexts: Sequence[int] = (1024,)
    decode_steps: int = 64
    prefills: Sequence[tuple[int, int]] = ((1, 1024), (8, 1024))
    repeats: int = 5
    page_size: int = 64
    seed: int = 0
    prefer: Sequence[str] = ()
    temperature: float = 1.0
    bias: float = 0.5
    penalties: bool = False

    def __post_init__(self) -> None:
        counts = ("decode_steps", "repeats", "page_size")
        fields = {
            "preset": one_of(*PRESETS),
            "layers": optional(COUNT),
            "batches": _COUNTS,
            "contexts": _COUNTS,
            "prefills": _SHAPES,
            **dict.fromkeys(counts, COUNT),
            "seed": INT,
            "prefer": _NAMES,
            "temperature": number(0),
            "bias": number(0),
            "penalties": BOOL,
        }
        check_fields(fields, self)

    @property
    def config(self) -> Config:
        """The configuration. Raises ConfigError if the number of layers is invalid."""
        return preset(self.preset) if self.layers is None else preset(self.preset).with_layers(self.layers)

    @property
    def longest(self) -> int:
        """The largest number of positions of a sequence in any measurement."""
        decoded = [self.length(context) for context in self.contexts if self.batches]
        return max([1, *decoded, *(tokens + 1 for _, tokens in self.prefills)])

    def length(self, context: int) -> int:
        """Returns the number of positions of a sequence at the end of a decode measurement that starts with ``context`` tokens."""
        return context + _WARM_STEPS + self.decode_steps + _REPLAYS + 3 + self.prefill_passes(context)

    def prefill_passes(self, context: int) -> int:
        """Returns the number of passes that prefill the largest batch. Sequences whose prefill is finished decode in the remaining
        passes.
        """
        return -(-max(self.batches, default=1) * context // _PREFILL_TOKENS)


def run(
    workload: Workload,
    dtype: torch.dtype,
    device: str,
    variants: Sequence[str] = ("optimised",),
    command: str = "",
    console: Console | None = None,
    commit: str = "",
    keep: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Measures a workload with each variant, one after the other. The result holds plain values, for JSON.

    Args:
        workload: the measurements to make.
        dtype, device: dtype and device of the model.
        variants: names from `VARIANTS`.
        command: the command line of this measurement, for the report.
        console: shows the progress; None shows none.
        commit: the commit of this code, if this is a copy without its own checkout; empty for the checkout's commit.
        keep: called with the partial result after each measurement.

    Raises:
        ConfigError: the number of layers is invalid.
        ValueError: the model's context is too short for the workload, or a variant or a preferred kernel does not exist.
    """
    config = workload.config
    for name in variants:
        one_of(*VARIANTS).check("variant", name)
    if workload.longest > config.max_position_embeddings:
        raise ValueError(
            f"contexts, decode_steps and prefills must fit the model's context of {config.max_position_embeddings} tokens, got "
            f"{describe(list(workload.contexts))}, {workload.decode_steps} and {describe(list(workload.prefills))}"
        )
    on_gpu = torch.device(device).type == "cuda"
    roofline = measure_roofline(device) if on_gpu else None
    total = len(workload.batches) * len(workload.contexts) + len(workload.prefills) + 2
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    metadata = dataclasses.asdict(collect_metadata(command, device))
    result: dict[str, Any] = {
        "format": 2,  # the report format of `tokenspeed_kernel.workbench.benchmark`, which reads rows, metadata and roofline
        "rows": [],
        "roofline": None if roofline is None else dataclasses.asdict(roofline),
        "workload": asdict(workload),
        "metadata": {
            **metadata,
            "git_commit": commit or metadata["git_commit"],
            "dtype": dtype_name(dtype),
            "threads": torch.get_num_threads(),
            "runtime": torch.version.cuda or torch.version.hip or "cpu",
        },
        "variants": {},
    }
    first: Probed | None = None
    with Progress(*columns, console=console, disable=console is None) as progress:
        for name in variants:
            task = progress.add_task(name, total=total)
            variant = VARIANTS[name]
            with preferring(workload.prefer), variant.kernels():
                measuring = _Measuring(workload, config, dtype, device, name, variant, roofline, progress, task)
                probed, divergence = measuring.probed(first)
                first = first or probed
                before = result["rows"]
                for measured in measuring.measured():
                    result["variants"][name] = {**measured, "divergence": divergence}
                    result["rows"] = before + [dataclasses.asdict(row) for row in measuring.rows]
                    if keep is not None:
                        keep(result)
                del measuring, probed
            _free(on_gpu)
    taken = {served["kernel"] for measured in result["variants"].values() for served in measured["kernels"]}
    for name in workload.prefer:
        if name not in taken:
            warnings.warn(f"the preferred kernel {name} served no call of this benchmark", stacklevel=2)
    return result


def _free(on_gpu: bool) -> None:
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


class _Measuring:
    """All measurements of one variant."""

    def __init__(
        self,
        workload: Workload,
        config: Config,
        dtype: torch.dtype,
        device: str,
        name: str,
        variant: Variant,
        roofline: Roofline | None,
        progress: Progress,
        task: TaskID,
    ) -> None:
        self.workload, self.config, self.dtype, self.device = workload, config, dtype, device
        self.name, self.variant, self.roofline, self._progress, self._task = name, variant, roofline, progress, task
        self.rows: list[Row] = []
        self.on_gpu = torch.device(device).type == "cuda"
        self.heard: dict[tuple[str, str], Heard] = {}
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        source = RandomTensors(config, workload.seed, dtype, device, bias=workload.bias)
        longest = max(workload.longest, min(_PROBE_TOKENS, config.max_position_embeddings))
        quantized, dense = variant.activation_dtype, variant.dense_weights
        self.model = GptOss(config, source, dtype, device, longest, activation_dtype=quantized, dense_weights=dense)
        self._wait()
        self.seconds = time.perf_counter() - started
        self.gigabytes = torch.cuda.max_memory_allocated(device) / 1e9 if self.on_gpu else None
        progress.advance(task)

    def measured(self) -> Iterator[dict[str, Any]]:
        """Makes one measurement after another, and yields all results so far; `rows` holds the kernels of all passes."""
        found: dict[str, Any] = {
            "weights": {"seconds": self.seconds, "most_gigabytes": self.gigabytes},
            "decode": [],
            "prefill": [],
            "kernels": [],
        }
        work: list[tuple[str, Callable[[int, int], dict[str, Any]], int, int]]
        work = [("decode", self._decode, batch, context) for context in self.workload.contexts for batch in self.workload.batches]
        work += [("prefill", self._prefill, batch, tokens) for batch, tokens in self.workload.prefills]
        yield found
        for kind, measure, batch, tokens in work:
            found[kind].append(measure(batch, tokens))
            found["kernels"] = [self.heard[key].to_dict() for key in sorted(self.heard)]
            yield found

    def probed(self, first: Probed | None) -> tuple[Probed, dict[str, float]]:
        """Returns the variant's logits for a fixed set of tokens, and their divergence from the first variant's logits. The
        divergence is measured twice: with the experts that the variant selects, and with the experts that the first variant
        selects. The first variant is compared with itself in chunks of half the length; the results differ by rounding.
        """
        half = min(_PROBE_TOKENS, self.model.max_positions) // 4 * 2
        run = functools.partial(probe, self.model, self._cache(_PROBES, 2 * half), self._prompts(_PROBES, 2 * half))
        found = run(half)
        wanted, experts = first or found
        length = half // 2 if first is None else half
        divergence = divergence_of(found[0] if first else run(length)[0], wanted)
        forced = divergence_of(run(length, experts)[0], wanted)
        self._progress.advance(self._task)
        return found, {**divergence, "mean_kl_with_the_same_experts": forced["mean_kl"]}

    def _decode(self, batch: int, context: int) -> dict[str, Any]:
        """Measures an engine's steps in which a whole batch decodes."""
        steps = self.workload.decode_steps
        with self._listening():
            prefill_tokens = min(context * batch, _PREFILL_TOKENS)
            engine = self._engine(batch, self.workload.length(context), prefill_tokens, "graphs" if self.on_gpu else "static")
            engine.generate([Request(prompt, 2) for prompt in self._prompts(batch, 1)])
        penalties = _PENALTIES if self.workload.penalties else {}
        for index, prompt in enumerate(self._prompts(batch, context)):
            # Request more tokens than are timed, so that the replayed passes have valid pages.
            tokens = self.workload.length(context) - context
            engine.add(Request(prompt, tokens, Sampling(self.workload.temperature, seed=self.workload.seed + index, **penalties)))
        before = engine.steps[Phase.DECODE]
        while engine.steps[Phase.DECODE] < before + _WARM_STEPS:
            engine.step()
        seconds = [_seconds(engine.step) for _ in range(steps - 1)]
        step = statistics.fmean(seconds)  # the mean, not the median: a step may return early, and the next step then waits for both
        experts = self._experts(engine, batch)
        bare = self._bare(engine, batch)
        floor = self._floor(batch, context + steps // 2, experts)
        families = self._families(functools.partial(self._forward, engine, batch), f"decode {batch} x {context}")
        self._progress.advance(self._task)
        return {
            "batch": batch,
            "context": context,
            "milliseconds_a_step": 1e3 * step,
            "milliseconds_median": 1e3 * statistics.median(seconds),
            "milliseconds_p90": 1e3 * sorted(seconds)[int(0.9 * (len(seconds) - 1))],
            "tokens_per_second": batch / step,
            "milliseconds_bare": bare,
            "over_bare": 1e3 * step / bare,
            "experts_a_layer": statistics.fmean(experts),
            "bytes_floor": floor,
            "milliseconds_floor": None if self.roofline is None else floor / self.roofline.memory_gb_per_s / 1e6,
            "families": families,
        }

    def _prefill(self, batch: int, tokens: int) -> dict[str, Any]:
        """Measures a pass over whole prompts, from queueing the requests to the first token of each."""
        engine = self._engine(batch, tokens, tokens * batch, "eager")
        requests = [Request(prompt, 1) for prompt in self._prompts(batch, tokens)]
        with self._listening():
            engine.generate(requests)
        engine.generate(requests)
        seconds = [_seconds(functools.partial(engine.generate, requests)) for _ in range(self.workload.repeats)]
        median = statistics.median(seconds)
        layers = min(_PREFILL_LAYERS, self.config.num_hidden_layers)
        host = [self._launching(engine, batch, tokens) for _ in range(self.workload.repeats)]
        prefill = functools.partial(self._some_layers, engine, batch, tokens, layers)
        families = self._families(prefill, f"prefill {batch} x {tokens}, {layers} layers")
        self._progress.advance(self._task)
        return {
            "batch": batch,
            "tokens": tokens,
            "families": families,
            "seconds": median,
            "tokens_per_second": batch * tokens / median,
            "all_seconds": seconds,
            "milliseconds_host": 1e3 * min(host),
        }

    # -- building blocks -------------------------------------------------------------------------------------------------------

    def _engine(self, batch: int, length: int, prefill_tokens: int, decode: str) -> Engine:
        """Creates an engine for a batch of sequences of this length."""
        return Engine(self.model, self._cache(batch, length), prefill_tokens, batch, decode, decode_sizes=(batch,))

    def _cache(self, batch: int, length: int) -> PagedKVCache:
        """Creates a cache for a batch of sequences of this length."""
        page_size = self.workload.page_size
        dtype = self.variant.cache_dtype or self.dtype
        return PagedKVCache(self.config, batch * -(-length // page_size), page_size, dtype, self.device)

    def _prompts(self, batch: int, tokens: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.workload.seed)
        prompts: list[list[int]] = torch.randint(self.config.vocab_size, (batch, tokens), generator=generator).tolist()
        return prompts

    def _bare(self, engine: Engine, batch: int) -> float:
        """Measures the milliseconds of a pass without the engine. The pass is launched repeatedly; on a GPU it is replayed, and
        timed with device events."""
        decoder = engine.decoder
        assert decoder is not None
        sampled = self.workload.temperature > 0

        def replays() -> None:
            for _ in range(_REPLAYS):
                decoder.replay(batch, sampled)

        decoder.replay(batch, sampled)
        if not self.on_gpu:
            return 1e3 * _seconds(replays) / _REPLAYS
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replays()
        end.record()
        self._wait()
        milliseconds: float = begin.elapsed_time(end) / _REPLAYS
        return milliseconds

    def _experts(self, engine: Engine, batch: int) -> list[int]:
        """Returns, for each layer, the number of experts whose weights the engine's next pass reads."""
        chosen: list[torch.Tensor] = []

        def watcher(call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
            if call.mode == "moe_apply":
                chosen.append(call.arguments["topk_ids"].clone())
            return run

        one_call = self.model.one_call
        try:
            self.model.one_call = False  # the experts' operator is called for each layer
            with watch_calls(watcher):
                self._forward(engine, batch)
        finally:
            self.model.one_call = one_call
        return [len(ids.unique()) for ids in chosen]

    def _forward(self, engine: Engine, batch: int) -> None:
        """Launches the model's part of a decode pass (all but sampling) from Python."""
        assert engine.decoder is not None
        engine.decoder.forward(batch)

    def _some_layers(self, engine: Engine, batch: int, tokens: int, layers: int) -> None:
        """Runs a prefill pass through the first ``layers`` layers only, logits included."""
        whole = self.model.layers
        try:
            self.model.layers = whole[:layers]
            with self._prefilling(engine, batch, tokens) as forward:
                forward()
        finally:
            self.model.layers = whole

    def _launching(self, engine: Engine, batch: int, tokens: int) -> float:
        """Returns the seconds in which the host launches a prefill pass that an idle device runs. If the pass itself takes no
        longer, the device waits for the host. On a CPU these are the seconds of the pass."""
        with self._prefilling(engine, batch, tokens) as forward:
            self._wait()
            seconds = _seconds(forward)
            self._wait()
        return seconds

    @contextlib.contextmanager
    def _prefilling(self, engine: Engine, batch: int, tokens: int) -> Iterator[Callable[[], object]]:
        """Allocates pages for prompts, and yields a function that launches their prefill pass."""
        cache = engine.cache
        held = [cache.allocator.allocate(cache.allocator.pages_for(tokens)) for _ in range(batch)]
        try:
            pieces = [Piece(p, 0, pages) for p, pages in zip(self._prompts(batch, tokens), held, strict=True)]
            made = make_batch(pieces, cache, self.device, logits_of=range(batch))
            yield functools.partial(self.model.forward, made, cache)
        finally:
            for pages in held:
                cache.allocator.free(pages)

    def _families(self, forward: Callable[[], object], name: str) -> list[dict[str, Any]]:
        """Times the kernels of a pass, stores them for the report, and returns a row per family of operators."""
        parts = break_down(forward, name, torch.device(self.device), self.roofline)
        # The name of a variant other than `optimised` is appended to its kernels' names, so that a report distinguishes the
        # variants.
        suffix = "" if self.name == "optimised" else f" ({self.name})"
        self.rows += [dataclasses.replace(part.row, kernel=part.row.kernel + suffix) for part in parts]
        return by_family(parts)

    def _floor(self, batch: int, context: int, experts: Sequence[int]) -> float:
        """Returns the number of bytes that a decode step must read. The step's floor is the time to read these bytes."""
        config, size = self.config, self.dtype.itemsize
        weights = config.num_local_experts, config.hidden_size, config.intermediate_size
        expert = 3 * weights[1] * weights[2] * (17 / 32 if config.quantization == "mxfp4" else size)  # 4 bits, and 8 per 32 values
        expert += size * (2 * weights[2] + weights[1])  # biases of both projections
        layer = self.model.layers[0]
        dense = sum(projection.nbytes for projection in (layer.qkv, layer.output, layer.router))
        visible = [context if left < 0 else min(context, left + 1) for left in map(config.window_left, range(len(experts)))]
        cached = 2 * batch * sum(visible) * config.kv_size * (self.variant.cache_dtype or self.dtype).itemsize
        return dense * len(experts) + expert * sum(experts) + cached + self.model.unembedding.nbytes

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        with listen() as listener:
            yield
        for heard in listener.heard():
            self.heard.setdefault((heard.operator, heard.kernel), heard)

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a result as tables."""
    decode = Table(title="Decode", title_justify="left")
    for heading in (
        "variant",
        "batch",
        "context",
        "ms a step",
        "tokens/s",
        "ms bare",
        "engine/bare",
        "experts a layer",
        "ms floor",
    ):
        decode.add_column(heading, justify="left" if heading == "variant" else "right")
    prefill = Table("variant", "prompts", "tokens", "ms", "ms host", "tokens/s", title="Prefill", title_justify="left")
    for variant, measured in result["variants"].items():
        for row in measured["decode"]:
            decode.add_row(
                variant,
                str(row["batch"]),
                str(row["context"]),
                f"{row['milliseconds_a_step']:.3f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['milliseconds_bare']:.3f}",
                f"{row['over_bare']:.3f}",
                f"{row['experts_a_layer']:.1f}",
                "" if row["milliseconds_floor"] is None else f"{row['milliseconds_floor']:.2f}",
            )
        for row in measured["prefill"]:
            prefill.add_row(
                variant,
                str(row["batch"]),
                str(row["tokens"]),
                f"{1e3 * row['seconds']:.2f}",
                f"{row['milliseconds_host']:.2f}",
                f"{row['tokens_per_second']:.0f}",
            )
    families = Table(
        "variant",
        "pass",
        "family",
        "calls",
        "us",
        "of the time",
        "of the roofline",
        title="Operators, by themselves",
        title_justify="left",
    )
    for variant, measured in result["variants"].items():
        passes = [(f"decode {row['batch']} x {row['context']}", row) for row in measured["decode"]]
        passes += [(f"prefill {row['batch']} x {row['tokens']}, two layers", row) for row in measured["prefill"]]
        for name, row in passes:
            for of_one in row["families"]:
                roofline = of_one["share_of_roofline"]
                families.add_row(
                    variant,
                    name,
                    of_one["family"],
                    str(of_one["calls"]),
                    f"{of_one['microseconds']:.0f}",
                    f"{of_one['share_of_time']:.0%}",
                    "" if roofline is None else f"{roofline:.0%}",
                )
    for table in (decode, prefill, families):
        if table.row_count:
            console.print(table)
    first = next(iter(result["variants"]))
    for variant, measured in result["variants"].items():
        found = measured["divergence"]
        whose = "its own in shorter chunks" if variant == first else f"{first}'s"
        console.print(
            f"{variant}: next tokens' distributions diverge from {whose} by {found['mean_kl']:.2g} nats on average, at most "
            f"{found['largest_kl']:.2g}, and by {found['mean_kl_with_the_same_experts']:.2g} with the same experts; "
            f"{found['same_most_likely']:.0%} of the most likely tokens are the same"
        )
    workload = result["workload"]
    layers = "all" if workload["layers"] is None else workload["layers"]
    made_on = ", ".join(f"{key} {value}" for key, value in result["metadata"].items() if value)
    console.print(f"{workload['preset']}, {layers} layers; {made_on}")
