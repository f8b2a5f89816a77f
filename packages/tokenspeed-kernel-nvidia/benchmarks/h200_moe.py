"""An MoE layer, this package against the best baselines, on one H200: from router logits to the combined output.

python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --output packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.json
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --quick --tokens 1 4 16 --contestants ours,triton
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --site /path/with/vllm --contestants ours,triton_kernels,marlin
python packages/tokenspeed-kernel-nvidia/benchmarks/h200_moe.py --more --only qwen3 --only deepseek

All implementations run in one process on the same random inputs. Each arranges the weights of several layers, and the time for that
is reported. Calls rotate over the layers, each with its own tokens and router logits, so that the experts that a call reads are not
in cache. Routing is uniform and independent. Each output is checked first against the operator's definition in float32: all rows
together, and the worst row. Baselines that are not installed are reported as absent; those installed elsewhere are found with
``--site``. ``measuring.py`` describes how times are taken. The floor is the roofline time of the touched experts' weights or of the
arithmetic (``moe_shapes.py``).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import measuring
from measuring import Between, Call, Effort, Measurement, errors_of, relative_error, times_of, worst_row_error
from moe_bars import BASELINE_LIMITS, LIMITS, judge
from moe_baselines import Experts, Implementation, implementations
from moe_shapes import GPT_OSS_120B, SHAPES, Batch, Layer, Shape, batches, expected, floor_us

from tokenspeed_kernel.workbench.benchmark import Report
from tokenspeed_kernel.workbench.benchmark.machine import gpu_monitor
from tokenspeed_kernel_base.cases import Cost, nbytes
from tokenspeed_kernel_base.operator import get_operator

# Between two calls on the same layer there are three on other layers. One token of GPT-OSS reads 53 MB of a layer, so those three
# read more than three times the L2 cache's size.
_LAYERS = 4
# The largest number of batches to rotate over, which averages the routing, and bytes of tokens in all.
_BATCHES, _TOKEN_BYTES = 32, 1 << 30
# Memory is freed between implementations if all together need more than this.
_MOST_BYTES = 100 << 30


@dataclass
class Loaded:
    """An implementation's arrangement of all layers, for shapes that differ only in their tokens.

    Attributes:
        prepare_ms: time to arrange a layer; without the first layer if there are several.
        extra_bytes: peak temporary device memory of arranging a layer, without what it keeps.
        kept_bytes: memory that it keeps for a layer.
    """

    implementation: Implementation
    experts: list[Experts] = field(default_factory=list)
    failure: Exception | None = None
    prepare_ms: float | None = None
    extra_bytes: int | None = None
    kept_bytes: int | None = None

    @classmethod
    def of(cls, implementation: Implementation, shape: Shape, layers: Sequence[Layer], device: torch.device) -> Loaded:
        """Arranges the layers for an implementation. Raises RuntimeError if it modifies the weights, which all implementations
        share."""
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
            # Raised again at each shape, so that each row has the reason.
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


def measure_shape(
    shape: Shape, wanted: Iterable[Loaded], layers: Sequence[Layer], device: torch.device, effort: Effort
) -> list[dict[str, Any]]:
    """Measures implementations at one shape, in alternating rounds. Returns their rows."""
    in_graph, count = _calls_of(shape, layers[0]) if effort.rounds else (0, len(layers))
    of_shape = batches(shape, count, len(layers), device)
    op = get_operator(shape.operator)
    costs = [op.cost_of(batch.arguments(layers[batch.layer])) for batch in of_shape]
    cost = Cost(statistics.mean(each.flops for each in costs), statistics.mean(each.bytes for each in costs))
    measurements = [(loaded, Measurement(loaded.implementation, shape)) for loaded in wanted]
    # Each layer was arranged separately, so the first and the last are checked.
    for batch in (of_shape[0], of_shape[len(layers) - 1])[: len(layers)]:
        right = expected(batch, layers[batch.layer])

        for loaded, measurement in measurements:
            limits = (LIMITS if loaded.implementation.ours else BASELINE_LIMITS)[shape.activation_dtype]
            make = functools.partial(loaded.call, batch)
            measurement.guarded(functools.partial(measurement.check, make, functools.partial(errors_against, right), limits))
    if effort.rounds:
        monitor, between = gpu_monitor(device), Between(device, effort.fewest, effort.back_to_back)
        for _ in range(effort.rounds):
            for loaded, measurement in measurements:
                calls = functools.partial(_calls, loaded, of_shape)
                measurement.guarded(functools.partial(measurement.time, calls, in_graph, device, between, monitor, effort))
    more = {
        "tokens": shape.tokens,
        "experts": statistics.mean(batch.experts for batch in of_shape),
        "floor_us": statistics.mean(floor_us(each, shape.activation_dtype) for each in costs),
    }
    rows = []
    for loaded, measurement in measurements:
        prepared = {name: getattr(loaded, name) for name in ("prepare_ms", "kept_bytes", "extra_bytes")}
        rows.append({**measurement.row(cost), **more, **prepared})
    return rows


def errors_against(right: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """The error of all tokens together and of the worst token.

    A token whose experts are all on other ranks is zero, so its relative error is undefined: it counts in the total only. If all
    tokens are such, 1 is added to both outputs before the comparison.
    """
    some = right.abs().amax(-1) > 0
    if not bool(some.any()):
        return relative_error(got.float() + 1, right + 1), worst_row_error(got.float() + 1, right + 1)
    return relative_error(got, right), worst_row_error(got[some], right[some])


def _calls(loaded: Loaded, of_shape: Sequence[Batch]) -> list[Call]:
    return [loaded.call(batch) for batch in of_shape]


def _calls_of(shape: Shape, layer: Layer) -> tuple[int, int]:
    """The number of calls in a graph, and of batches to rotate over: whole rotations over the layers."""
    model, weights = shape.model, layer.weights
    tensors = (getattr(weights, f"{name}_weight{part}") for name in ("w13", "w2") for part in ("", "_scale"))
    touched = min(model.experts, shape.tokens * model.top_k * model.experts / model.routed)
    pairs = shape.tokens * model.top_k * model.experts / model.routed
    cost = Cost(6.0 * pairs * model.hidden * model.intermediate, nbytes(*tensors) / model.experts * touched)
    least_us = max(floor_us(cost, shape.activation_dtype), 1.0)
    in_graph = max(1, min(measuring.IN_GRAPH, math.ceil(measuring.GRAPH_US / least_us)))
    fit = max(1, _TOKEN_BYTES // (2 * shape.tokens * model.hidden))
    count = min(in_graph, _BATCHES, fit)
    return tuple(-(-number // _LAYERS) * _LAYERS for number in (in_graph, count))  # type: ignore[return-value]


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars, checked against rows."""
    took = {row["kernel"]: row["prepare_ms"] for row in rows if row["group"] == GPT_OSS_120B.name and row["prepare_ms"] is not None}
    return judge(times_of(rows), errors_of(rows), took, measuring.absent_of(rows))


def document(
    rows: Sequence[dict[str, Any]], who: Iterable[Implementation], report: Report, *, back_to_back: bool = False
) -> dict[str, Any]:
    """The document that is written; see `measuring.document`. Each row also has the shape's tokens, the mean number of experts that
    a batch touches, the floor, and the time to arrange a layer's weights.
    """
    return measuring.document(rows, who, report, SHAPES, judged(rows), back_to_back=back_to_back)


def line_of(shape: Shape, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for a shape: the floor, and microseconds and rate of each implementation."""

    def rate(row: Mapping[str, Any]) -> str:
        return f"{row['floor_us'] / row['timing']['median_us']:.0%} of floor"

    said = f"{shape.name} ({rows[0]['experts']:.1f} experts, floor {rows[0]['floor_us']:.1f} us): "
    return said + " | ".join(measuring.cells(rows, rate))


def short_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds, one line a shape, for printing last."""
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    lines = [f"{'us':28}{'experts':>8}{'floor':>9}" + "".join(f"{name:>15}" for name in names)]
    for shape, found in itertools.groupby(rows, lambda row: row["case"]):
        of_one = {row["kernel"]: row for row in found}
        first = next(iter(of_one.values()))
        cells = []
        for name in names:
            row = of_one.get(name)
            timing = None if row is None else row["timing"]
            cells.append("-" if row is None else row["status"] if timing is None else f"{timing['median_us']:.1f}")
        lines.append(f"{shape:28}{first['experts']:8.1f}{first['floor_us']:9.1f}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def _chosen(given: Any) -> list[Shape]:
    shapes = measuring.named(SHAPES, given.only)
    if given.tokens:
        shapes = [shape for shape in shapes if shape.tokens in given.tokens]
    return [shape for shape in shapes if given.more or not shape.more]


def _parser() -> Any:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[], metavar="M", help="only these numbers of tokens")
    parser.add_argument("--more", action="store_true", help="the models that have no bar, too")
    parser.add_argument("--solution", default="cutedsl", help="what this package's kernels are made with (default: %(default)s)")
    parser.add_argument("--site", type=Path, action="append", default=[], help="a folder with further packages; repeatable")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    parser = _parser()
    given = parser.parse_args(words)
    shapes, everyone = _chosen(given), implementations(given.solution)
    names = [name for name in given.contestants.split(",") if name] or [each.name for each in everyone if not each.on_demand]
    unknown = {*names} - {each.name for each in everyone}
    if unknown or not shapes:
        parser.error(f"no contestant {', '.join(sorted(unknown))}" if unknown else "no shape has such a name and number of tokens")
    if given.list:
        print("\n".join(shape.name for shape in shapes))
        return
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    for site in given.site:
        # Last in the path, so that packages beside a baseline do not replace those that this package uses.
        sys.path.append(str(site))
        if not site.is_dir():
            print(f"there is no {site}")
    device = torch.device("cuda", torch.cuda.current_device())
    effort = measuring.effort_of(given)
    report = measuring.empty_report(given, effort, sys.argv if words is None else ["h200_moe.py", *words], _LAYERS, device)
    made = measure(shapes, [each for each in everyone if each.name in names], device, effort, report, given.output)
    for row in {row["kernel"]: row for row in made["rows"] if row["status"] in ("error", "failed", "skipped")}.values():
        print(f"{row['status']}: {row['kernel']} at {row['case']}: {row['reason']}")
    measuring.print_outcome(made)
    print(short_table(made["rows"]))


def measure(
    shapes: Sequence[Shape],
    who: Sequence[Implementation],
    device: torch.device,
    effort: Effort,
    report: Report,
    output: Path | None,
) -> dict[str, Any]:
    """Measures implementations at all shapes, model by model. Returns the document, which is written after each shape."""

    def measured() -> Iterator[tuple[Shape, list[dict[str, Any]]]]:
        for _, group in itertools.groupby(shapes, lambda shape: (shape.model, shape.activation_dtype)):
            of_group = list(group)
            layers = [Layer.drawn(of_group[0], device, seed) for seed in range(_LAYERS)]
            loaded = []
            for each in who:
                loaded.append(Loaded.of(each, of_group[0], layers, device))
                torch.cuda.empty_cache()
                if device.type == "cuda" and torch.cuda.memory_allocated(device) > _MOST_BYTES:
                    loaded[-1].experts.clear()
                    loaded[-1].failure = MemoryError(f"all together would keep more than {_MOST_BYTES >> 30} GiB")
            print(f"{of_group[0].group}: a layer arranged in ms: " + _prepared(loaded), flush=True)
            for shape in of_group:
                yield shape, measure_shape(shape, loaded, layers, device, effort)
            # Before the next model's layers are generated.
            del layers, loaded

    document_of = functools.partial(document, who=who, report=report, back_to_back=effort.back_to_back)
    return measuring.collect(measured(), line_of, document_of, output, device)


def _prepared(loaded: Iterable[Loaded]) -> str:
    said = []
    for each in loaded:
        if each.prepare_ms is not None:
            sizes = f" ({(each.kept_bytes or 0) / 1e9:.2f} GB kept, {(each.extra_bytes or 0) / 1e9:.2f} GB besides)"
            said.append(f"{each.implementation.name} {each.prepare_ms:.1f}{sizes}")
    return ", ".join(said) or "none"


if __name__ == "__main__":
    main()
