"""Measures an MoE layer from router logits to the combined output: this package against the best baselines, on one H200.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --output packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.json
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --site /path/with/vllm --baselines ours,triton_kernels,marlin
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --more --only qwen3 --only deepseek
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --quick --baselines ours,48,160,few --tiles 48 160 few
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --more --only '120b .* fp8' --baselines 48v,40c --tiles 48v 40c
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --quick --tokens 1 4 16 64 256 1024 8192 --baselines ours,triton
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --plot --readme  # plots h200_moe.json

All implementations run in one process on the same random inputs. Each implementation arranges the weights of several layers, and
the time of this preparation is reported. Calls rotate over the layers, each with its own tokens and router logits, so that the
weights that a call reads are not in the L2 cache. Routing is uniform and independent. Before timing, each output is compared with
the operator's definition in float64. The error of all rows together and the error of the worst row are limited. Baselines that are
not installed are reported as absent; ``--site`` names a folder with baselines that are installed elsewhere.
`tokenspeed_kernel.workbench.benchmark.runner` describes how times are measured. Other processes compile this package's kernels
ahead of the measurements. The floor is the roofline time: the time to read the selected experts' weights or the time of the
arithmetic, whichever is longer (``moe_shapes.py``).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from moe_baselines import Experts, implementations, programs_of, tiles
from moe_shapes import GPT_OSS_120B, SHAPES, Batch, Layer, Model, Shape, batches, expected, floor_us, quantization_error

from tokenspeed_kernel.workbench.benchmark import bars, runner
from tokenspeed_kernel.workbench.benchmark.figures import Figure, Marks, Panel, Report, measured, three_digits, us
from tokenspeed_kernel.workbench.benchmark.runner import (
    Benchmark,
    Call,
    Effort,
    Errors,
    Implementation,
    JsonRow,
    Limits,
    Measurement,
    Task,
    values_of,
)
from tokenspeed_kernel_base.cases import Cost, nbytes
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_nvidia._programs import cache_directory
from tokenspeed_kernel_nvidia.warmup import warm_up

# Between two calls on the same layer, three calls run on other layers. One token of GPT-OSS reads 53 MB of a layer, so these three
# calls read more than three times the size of the L2 cache.
_LAYERS = 4
# The most batches, and the most bytes of tokens, over which calls rotate. Several batches average over routings.
_BATCHES, _TOKEN_BYTES = 32, 1 << 30
# If the implementations together keep more bytes than this, the weights of the last implementation are freed, and its rows report
# the reason.
_MOST_BYTES = 100 << 30
# Largest allowed errors of an output against the float64 reference, by the dtype of activations. Rounding the activation function's
# result and each slot's output to bfloat16 causes an error of 3e-3. With fp8 activations, a slightly different value may round to
# the neighbouring fp8 value.
LIMITS = {"none": Limits(1e-2, 3e-2), "fp8": Limits(4e-2, 1e-1)}
# A baseline with larger errors does not compute the same operator. These limits are wider, because baselines choose their own
# scales for fp8 activations.
_BASELINE_LIMITS = {"none": Limits(2e-2, 8e-2), "fp8": Limits(8e-2, 2e-1)}


@dataclass
class Loaded:
    """The weights of the layers as an implementation has arranged them, for all shapes that differ only in their tokens.

    Attributes:
        implementation: the implementation.
        experts: one function per layer, see `moe_baselines`.
        failure: why the layers could not be arranged, or None.
        prepare_ms: milliseconds to arrange a layer, as a median. If there are several layers, the first is left out.
        extra_bytes: peak bytes of temporary device memory while a layer is arranged, without the kept bytes.
        kept_bytes: bytes of device memory that the implementation keeps for a layer.
    """

    implementation: Implementation
    experts: list[Experts] = field(default_factory=list)
    failure: Exception | None = None
    prepare_ms: float | None = None
    extra_bytes: int | None = None
    kept_bytes: int | None = None

    @classmethod
    def of(cls, implementation: Implementation, shape: Shape, layers: Sequence[Layer], device: torch.device) -> Loaded:
        """Arranges the layers for an implementation. Raises RuntimeError if the implementation modifies the layers' weights, which
        all implementations share.
        """
        sums = [layer.checksum() for layer in layers]
        loaded = cls._of(implementation, shape, layers, device)
        if sums != [layer.checksum() for layer in layers]:
            raise RuntimeError(f"{implementation.name} has changed the weights that all are given")
        return loaded

    @classmethod
    def _of(cls, implementation: Implementation, shape: Shape, layers: Sequence[Layer], device: torch.device) -> Loaded:
        loaded, took, most, kept = cls(implementation), [], [0], [0]
        on_gpu = device.type == "cuda"
        try:
            for layer in layers:
                before = torch.cuda.memory_allocated(device) if on_gpu else 0
                if on_gpu:
                    torch.cuda.synchronize(device)
                    torch.cuda.reset_peak_memory_stats(device)
                start = time.perf_counter()
                with torch.no_grad():
                    loaded.experts.append(implementation.setup(shape, layer))
                if on_gpu:
                    torch.cuda.synchronize(device)
                    kept.append(torch.cuda.memory_allocated(device) - before)
                    most.append(torch.cuda.max_memory_allocated(device) - before)
                took.append((time.perf_counter() - start) * 1e3)
        except Exception as error:
            # `call` raises the error again for each shape, so that each row has the reason.
            loaded.failure, loaded.experts = error.with_traceback(None), []
            return loaded
        loaded.prepare_ms = statistics.median(took[1:] or took)
        loaded.kept_bytes = kept[-1]
        loaded.extra_bytes = most[-1] - kept[-1]
        return loaded

    def call(self, batch: Batch) -> Call:
        if self.failure is not None:
            raise self.failure
        return self.experts[batch.layer](batch)


def _prepared(shape: Shape, who: Iterable[Implementation], layers: Sequence[Layer], device: torch.device) -> dict[str, Loaded]:
    """Arranges the layers for every implementation, and returns the results by name. Prints a line with the durations."""
    made, said = {}, []
    for each in who:
        made[each.name] = loaded = Loaded.of(each, shape, layers, device)
        torch.cuda.empty_cache()
        if device.type == "cuda" and torch.cuda.memory_allocated(device) > _MOST_BYTES:
            loaded.experts.clear()
            loaded.failure = MemoryError(f"all together would keep more than {_MOST_BYTES >> 30} GiB")
        if loaded.prepare_ms is not None:
            sizes = f" ({(loaded.kept_bytes or 0) / 1e9:.2f} GB kept, {(loaded.extra_bytes or 0) / 1e9:.2f} GB besides)"
            said.append(f"{each.name} {loaded.prepare_ms:.1f}{sizes}")
    print(f"{shape.group}: a layer arranged in ms: {', '.join(said) or 'none'}", flush=True)
    return made


def tasks(shapes: Sequence[Shape], who: Sequence[Implementation], device: torch.device, effort: Effort) -> Iterator[Task]:
    """Yields one measurement task for each shape, model by model."""
    if device.type == "cuda":
        compile_ahead(shapes, [each.name for each in who])
    for _, group in itertools.groupby(shapes, lambda shape: (shape.model, shape.activation_dtype)):
        of_group = list(group)
        layers = [Layer.drawn(of_group[0], device, seed) for seed in range(_LAYERS)]
        loaded = _prepared(of_group[0], who, layers, device)
        yield from (_task(shape, loaded, layers, device, effort) for shape in of_group)
        del layers, loaded  # frees their memory before the next model's layers are drawn


def compile_ahead(shapes: Sequence[Shape], names: Sequence[str]) -> None:
    """Compiles this package's programs for these shapes in other processes. ``names``: the implementations, ``"ours"`` or those of
    ``--tiles``. Programs with the widest tiles come first, because these take longest to compile. A call waits until its programs
    are compiled.
    """
    programs = dict.fromkeys(program for shape in shapes for name in names for program in programs_of(shape, name))
    ordered = sorted(programs, key=lambda each: -each[1].columns)
    jobs = max(1, len(os.sched_getaffinity(0)) // 2)  # the other cores launch kernels and compile Triton's kernels
    if cache_directory() is not None and jobs > 1:
        threading.Thread(target=lambda: [*warm_up(ordered, jobs)], name="compile_ahead").start()


def _task(shape: Shape, loaded: Mapping[str, Loaded], layers: Sequence[Layer], device: torch.device, effort: Effort) -> Task:
    in_graph, count = _calls_of(shape, layers[0]) if effort.rounds else (0, len(layers))
    of_shape = batches(shape, count, len(layers), device)
    op = get_operator(shape.operator)
    costs = [op.cost_of(batch.arguments(layers[batch.layer])) for batch in of_shape]
    # Each layer was arranged separately, so the first and the last layer are checked.
    checked = [(batch, errors_against(expected(batch, layers[batch.layer]))) for batch in (of_shape[0], of_shape[len(layers) - 1])]
    facts = {
        "tokens": shape.tokens,
        "experts": statistics.mean(batch.experts for batch in of_shape),
        "floor_us": statistics.mean(floor_us(each, shape.activation_dtype) for each in costs),
        "quantization_error": quantization_error(of_shape[0], layers[of_shape[0].layer]),
    }

    def checks(each: Implementation) -> Iterator[tuple[Callable[[], Call], Errors, Limits]]:
        limits = (LIMITS if each.ours else _BASELINE_LIMITS)[shape.activation_dtype]
        for batch, errors in checked[: len(layers)]:
            yield functools.partial(loaded[each.name].call, batch), errors, limits

    def more(measurement: Measurement) -> dict[str, Any]:
        of_one = loaded[measurement.implementation.name]
        return {**facts, **{name: getattr(of_one, name) for name in ("prepare_ms", "kept_bytes", "extra_bytes")}}

    cost = Cost(statistics.mean(each.flops for each in costs), statistics.mean(each.bytes for each in costs))
    return Task(shape, cost, checks, lambda each: [loaded[each.name].call(batch) for batch in of_shape], in_graph, more)


def errors_against(right: torch.Tensor) -> Errors:
    """Returns a function that computes two relative errors of an output: of all tokens together, and of the worst token.

    If all experts of a token are on other ranks, the token's output is zero and its relative error is undefined. Such a token
    counts only in the error of all tokens. If all tokens of a batch are of this kind, 1 is added to both outputs before the
    comparison.
    """
    some = right.abs().amax(-1) > 0
    if not bool(some.any()):
        return lambda got: runner.errors_against(right + 1)(got.float() + 1)
    return lambda got: (runner.relative_error(got, right), runner.worst_row_error(got[some], right[some]))


def _calls_of(shape: Shape, layer: Layer) -> tuple[int, int]:
    """Returns the number of calls in a graph, and the number of batches. Both numbers are multiples of the number of layers."""
    model, weights = shape.model, layer.weights
    tensors = (getattr(weights, f"{name}_weight{part}") for name in ("w13", "w2") for part in ("", "_scale"))
    pairs = shape.tokens * model.top_k * model.experts / model.routed
    cost = Cost(6.0 * pairs * model.hidden * model.intermediate, nbytes(*tensors) / model.experts * min(model.experts, pairs))
    in_graph = runner.in_graph_of(max(floor_us(cost, shape.activation_dtype), 1.0))
    count = min(in_graph, _BATCHES, max(1, _TOKEN_BYTES // (2 * shape.tokens * model.hidden)))
    return -(-in_graph // _LAYERS) * _LAYERS, -(-count // _LAYERS) * _LAYERS


# -- bars --------------------------------------------------------------------------------------------------------------------------

BASELINES = ("triton_kernels", "marlin", "humming")
# Bars in microseconds. A key is the end of a shape's name: the number of tokens and, if quantised, the activations' dtype.
_US = {"1": 18, "2": 32, "4": 54, "8": 95, "16": 165, "64": 350, "256": 430, "1024": 620, "8192": 2750}
_US |= {"1024 fp8": 560, "8192 fp8": 1750}
# Numbers of tokens at which fp8 activations must take no longer than bfloat16 activations.
_NO_SLOWER = (1, 4, 16, 64, 256)
_NAME = GPT_OSS_120B.name
_BF16 = tuple(shape.name for shape in SHAPES if shape.group == _NAME and not shape.more)
BARS = [
    *(bars.at_most(f"{_NAME} {tokens}", us) for tokens, us in _US.items()),
    bars.Bar(
        f"{_NAME}: fp8 over bfloat16 activations, worst number of tokens",
        1.0,
        True,
        tuple(f"{_NAME} {tokens}{dtype}" for tokens in _NO_SLOWER for dtype in ("", " fp8")),
        lambda times: max(times[f"{_NAME} {tokens} fp8"]["ours"] / times[f"{_NAME} {tokens}"]["ours"] for tokens in _NO_SLOWER),
    ),
    bars.against(f"{_NAME}: best baseline, geometric mean", 1.5, _BF16, BASELINES, mean=True),
    bars.against(f"{_NAME}: best baseline, worst number of tokens", 1.1, _BF16, BASELINES),
]


def judged(rows: Sequence[JsonRow]) -> list[dict[str, Any]]:
    """Compares the errors of our kernels, and their time to arrange a layer's weights, with the bars. Returns the outcomes."""
    took = [row["prepare_ms"] for row in rows if (row["group"], row["kernel"]) == (_NAME, "ours") and row["prepare_ms"] is not None]
    prepare = bars.outcome(f"{_NAME}: ms to arrange a layer's weights", 50.0, took[-1] if took else None)
    return [*bars.no_less_accurate(values_of(rows, "relative_error")), prepare]


# -- the figure --------------------------------------------------------------------------------------------------------------------

_WHAT = "per cent of the floor (more is better)"


def _panel(report: Report, model: Model) -> Panel:
    shapes = {shape.name: shape for shape in SHAPES if shape.model == model}
    found = measured(report, list(shapes))
    values = {name: {who: 100 * row["floor_us"] / us(row) for who, row in of_one.items()} for name, of_one in found.items()}
    ticks = [f"{shapes[name].tokens}\n{shapes[name].activation_dtype}".removesuffix("\nnone") for name in values]
    return Panel(f"{model.name} by tokens, {_WHAT}", values, ticks)


def panels(report: Report) -> list[Panel]:
    """Returns a panel for each measured model. The model that has bars always gets a panel."""
    times = values_of(report["rows"])
    models = dict.fromkeys([GPT_OSS_120B, *(shape.model for shape in SHAPES if shape.name in times)])
    return [_panel(report, model) for model in models]


FIGURE = Figure(
    title="Mixtures of experts, router to combined output,",
    heading="### Mixtures of experts",
    alt=f"A layer of a mixture of experts, {_WHAT}",
    baselines={
        "triton_kernels": ("triton_kernels", "#c2410c"),
        "marlin": ("Marlin", "#e0a458"),
        "humming": ("Humming", "#6b8f71"),
        "vllm_triton": ("vLLM's Triton", "#a34d68"),
        "flashinfer": ("FlashInfer", "#7e5aa8"),
    },
    shapes=[shape.name for shape in SHAPES],
    panels=panels,
    marks=Marks("<!-- measured moe -->", "<!-- end of measured moe -->"),
    readme=Path(__file__).parents[1] / "README.md",
    columns=lambda report: {
        "experts touched": lambda row: f"{row['experts']:.1f}",
        "floor": lambda row: three_digits(row["floor_us"]),
    },
)


# -- the program -------------------------------------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[], metavar="M", help="only these numbers of tokens")
    parser.add_argument("--more", action="store_true", help="the models that have no bar, too")
    parser.add_argument("--solution", default="cutedsl", help="the backend of this package's entry (default: %(default)s)")
    parser.add_argument(
        "--tiles", nargs="+", default=[], metavar="WIDTH", help="tile widths of our kernel, such as few 24s 48 160v"
    )
    parser.add_argument("--site", type=Path, action="append", default=[], help="a folder with further packages; repeatable")


def found(given: argparse.Namespace) -> list[Implementation]:
    for site in given.site:
        # The folder comes last in the path, so that other packages in this folder do not replace packages that this project uses.
        sys.path.append(str(site))
        if not site.is_dir():
            print(f"there is no {site}")
    return [
        *implementations(given.solution),
        *(Implementation(name, functools.partial(tiles, name), "", ours=True) for name in given.tiles),
    ]


BENCHMARK = Benchmark(
    file=__file__,
    description=__doc__,
    shapes=SHAPES,
    implementations=found,
    tasks=tasks,
    bars=BARS,
    judged=judged,
    rate=lambda row: f"{row['floor_us'] / row['timing']['median_us']:.0%} of floor",
    figure=FIGURE,
    about=lambda row: (
        f" ({row['experts']:.1f} experts, floor {row['floor_us']:.1f} us, error of quantised activations"
        f" {row['quantization_error']:.1e})"
    ),
    copies=_LAYERS,
    options=options,
    chosen=lambda given, shape: (not given.tokens or shape.tokens in given.tokens) and (given.more or not shape.more),
)

if __name__ == "__main__":
    BENCHMARK.main()
