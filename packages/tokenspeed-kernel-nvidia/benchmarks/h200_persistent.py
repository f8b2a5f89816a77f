"""Measures layers of GPT-OSS-120B from the output projection to the experts, in one persistent launch and in today's launches.

    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_persistent.py --output persistent.json
    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_persistent.py --compile   # only fills the cache; needs no GPU

All variants run in one process on the same random values. Each variant is first compared with the public operators, layer by layer.
For each layer, the operators start from the residual stream that the variant has computed. Then several calls run in a CUDA graph.
The graph runs several times, with caches evicted in between. A call runs all layers. The layers' weights exceed the L2 cache, so
every layer reads cold weights. Today's launches are `mm`, `rmsnorm_moe_topk` and `moe_apply`, with PDL, as in the runtime
`tools/gpt_oss`. The output of a layer's experts is passed as the next layer's residual, because the runtime adds this output in the
next kernel.

A row is printed as soon as it is measured. If a variant fails, its row has the reason, and the other variants are still measured.
The kernel's waits end by themselves after about two seconds. The process ends after ``--seconds`` in any case.

``--trace`` adds tables of the steps of a layer after all rows, from a kernel that stores the times of events. One table is for
these weights. The other table is for two layers that are so small that their weights stay in L2, so it shows latencies alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from moe_shapes import GPT_OSS_120B, Layer, Shape
from persistent_timeline import EXPERT_BYTES, PROJECTION_BYTES, ROUTER_BYTES, Variant, predicted_us
from persistent_trace import gathered, table

import tokenspeed_kernel as ops
from tokenspeed_kernel.workbench.benchmark import write_result
from tokenspeed_kernel.workbench.benchmark.timing import sample_graph
from tokenspeed_kernel_nvidia import warmup
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import config_of as mm_config_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import mm_program
from tokenspeed_kernel_nvidia.sm90.layers.config import PART_BYTES, TILE, Config, config_of
from tokenspeed_kernel_nvidia.sm90.layers.launch import LayerWeights, PersistentLayers, persistent_program
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import config_of as stream_config_of
from tokenspeed_kernel_nvidia.sm90.moe.stream.launch import stream_program

SHAPE, WIDTH, EPS = Shape(GPT_OSS_120B, 1), 4096, 1e-5
SMALL, SMALL_WIDTH = Shape(replace(GPT_OSS_120B, name="small", intermediate=256), 1), 512
CALLS = 8  # number of calls in a graph
CLOSE = 0.02  # a token with a larger relative error has other experts than the reference
TODAY = "today's launches"


@dataclass(frozen=True)
class Choice:
    """A variant of the persistent kernel.

    Attributes:
        config: options of `config_of`.
        ahead: bytes of the next layer's projection that each CTA prefetches into L2.
        together: whether one launch runs all layers.
        every: whether the variant is measured for every number of tokens, not only for one token.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    ahead: int = 0
    together: bool = True
    every: bool = False

    def config_for(self, tokens: int) -> Config:
        return config_of(tokens, **self.config)

    def model(self, tokens: int, layers: int) -> Variant:
        config = self.config_for(tokens)
        return Variant(config.stages * TILE * PART_BYTES, config.exchange, self.ahead, layers if self.together else 1)


CHOICES = {
    "persistent": Choice(every=True),
    "ahead 64 KB": Choice(ahead=64 << 10),
    "ahead 128 KB": Choice(ahead=128 << 10),
    "ahead, all": Choice(ahead=1 << 20, every=True),
    "one layer a launch": Choice(together=False, every=True),
    "counters": Choice({"exchange": "counter"}, every=True),
    "slabs of 5 blocks": Choice({"slab": 5}),
    "9 stages": Choice({"most": 9}),
    "cooperative": Choice({"cooperative": True}),
}

TRACED = "with a trace"
TRACE = {TRACED: Choice({"trace": True})}


class Model:
    """The weights of some layers, shared by all variants."""

    def __init__(self, layers: int, device: torch.device, shape: Shape = SHAPE, width: int = WIDTH) -> None:
        self.device, self.random = device, torch.Generator(device).manual_seed(0)
        self.weights: list[LayerWeights] = []
        self.plan: Any = None
        for index in range(layers):
            drawn = Layer.drawn(shape, device, index)
            plan = drawn.plan
            self.plan = ops.moe_apply.plan(
                plan.num_experts, plan.top_k, plan.hidden_size, plan.intermediate_size, dtype=torch.bfloat16, device=device,
                weight_format="mxfp4", w13_interleaved=plan.w13_interleaved, bias=plan.bias, alpha=plan.alpha, limit=plan.limit,
                beta=plan.beta, override="cutedsl_moe_apply_mxfp4",
            )  # fmt: skip
            hidden, experts = plan.hidden_size, plan.num_experts
            of_layer = LayerWeights(
                projection=self.normal(hidden, width, scale=width**-0.5),
                projection_bias=self.normal(hidden, scale=0.1),
                norm=1 + self.normal(hidden, scale=0.1),
                router=self.normal(experts, hidden, scale=2 * hidden**-0.5),
                router_bias=self.normal(experts, scale=0.1),
                experts=ops.moe_apply.prepare(drawn.weights, self.plan),
            )
            self.weights.append(of_layer)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.random, device=self.device) * scale).bfloat16()


class Batch:
    """The inputs for one number of tokens, and the calls on these inputs."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.tokens, self.layers = model, tokens, len(model.weights)
        self.attended = model.normal(self.layers, tokens, model.weights[0].projection.shape[1])
        self.residual = model.normal(tokens, model.plan.hidden_size)
        self.out = torch.empty(self.layers, tokens, model.plan.hidden_size, dtype=torch.bfloat16, device=model.device)
        _, ids = self.composed([self.residual] * self.layers)
        self.experts = statistics.mean(len(of_layer.unique()) for of_layer in ids)

    @property
    def bytes(self) -> float:
        """The bytes of a layer's weights that these tokens need."""
        return PROJECTION_BYTES + ROUTER_BYTES + self.experts * EXPERT_BYTES

    def layer(self, index: int, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs one layer with the public operators. Returns the sum over the experts, the residual stream to which it is added, and
        the expert ids."""
        of_layer = self.model.weights[index]
        projected = ops.mm(self.attended[index], of_layer.projection.t(), bias=of_layer.projection_bias)
        normed, weights, ids, total = ops.rmsnorm_moe_topk(
            projected, of_layer.norm, of_layer.router.t(), self.model.plan.top_k, eps=EPS, residual=residual,
            router_bias=of_layer.router_bias,
        )  # fmt: skip
        return ops.moe_apply(normed, of_layer.experts, weights, ids, self.model.plan), total, ids

    def composed(self, residuals: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Runs each layer with the public operators, from the given residuals. Returns each layer's output and expert ids."""
        found = [self.layer(index, residual) for index, residual in enumerate(residuals)]
        return [expert + total for expert, total, _ in found], [ids for *_, ids in found]

    def today(self) -> None:
        residual = self.residual
        for index in range(self.layers):
            residual, *_ = self.layer(index, residual)

    def errors(self) -> Tensor:
        """Returns the relative errors of the last call for each layer and token, ``[layers, tokens]``."""
        wanted, _ = self.composed([self.residual, *self.out[:-1]])
        both = torch.stack(wanted).double()
        return (self.out.double() - both).norm(dim=-1) / both.norm(dim=-1)

    def launches(self, choice: Choice) -> list[PersistentLayers]:
        """Returns the launch objects of a variant. A call launches them one after the other."""
        weights, plan, config = self.model.weights, self.model.plan, choice.config_for(self.tokens)
        ranges = [slice(None)] if choice.together else [slice(index, index + 1) for index in range(self.layers)]
        return [PersistentLayers(weights[some], self.attended[some], plan, EPS, config, ahead=choice.ahead) for some in ranges]

    def call(self, launched: Sequence[PersistentLayers]) -> Callable[[], None]:
        """Returns a function that runs all layers with these launch objects."""
        outs = self.out.chunk(len(launched))
        residuals = [self.residual, *(out[-1] for out in outs[:-1])]

        def run() -> None:
            for each, residual, out in zip(launched, residuals, outs, strict=True):
                each(residual, out)

        return run


def check(batch: Batch, launched: Sequence[PersistentLayers]) -> str:
    """Runs a variant several times, and compares the results with one another and with the public operators. Returns a description
    of the errors. Raises RuntimeError if results are wrong."""
    run = batch.call(launched)
    first = None
    for _ in range(5):
        batch.out.fill_(torch.nan)
        run()
        if any(each.failed for each in launched):
            raise RuntimeError("a wait has given up")
        if first is not None and not torch.equal(first, batch.out):
            raise RuntimeError("results differ between runs")
        first = batch.out.clone()
    errors = batch.errors()
    others = int((errors > CLOSE).sum())
    said = f"error {float(errors.median()):.1e}" + (f", {others} of {errors.numel()} tokens have other experts" if others else "")
    if bool(errors.isnan().any()) or others > errors.numel() // 4:
        raise RuntimeError(f"results are wrong: {said}, largest {float(errors.max()):.1e}")
    return said


def rows(batch: Batch, wanted: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Measures the variants, and yields a row for each."""
    for name in (TODAY, *wanted):
        choice = {**CHOICES, **TRACE}.get(name)
        row: dict[str, Any] = {"tokens": batch.tokens, "variant": name, "experts": batch.experts, "bytes": batch.bytes}
        row["predicted_us"] = None
        if choice is not None:
            row["predicted_us"] = predicted_us(batch.tokens, batch.experts, choice.model(batch.tokens, batch.layers))
        elif batch.tokens == 1:
            row["predicted_us"] = predicted_us(1, batch.experts)
        try:
            launched = [] if choice is None else batch.launches(choice)
            row["note"] = "" if choice is None else check(batch, launched)
            run = batch.today if choice is None else batch.call(launched)
            times = sample_graph([run] * CALLS, batch.model.device, budget_s=0.0, fewest=rounds, most=rounds)
            row["us"] = statistics.median(times) / batch.layers
            row["spread"] = [min(times) / batch.layers, max(times) / batch.layers]
            if any(each.failed for each in launched):
                row["note"] = "a wait has given up"
        except Exception as error:  # the other variants are still measured
            row["us"], row["note"] = None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield row


def trace(batch: Batch, name: str, rounds: int) -> Iterator[str]:
    """Yields the lines of a table of a layer's steps."""
    (launched,) = found = batch.launches(TRACE[TRACED])
    said = check(batch, found)
    yield f"\nsteps of a layer, {batch.tokens} tokens, {name}; {said}"
    yield from table(gathered(launched, batch.call(found), rounds))


def line(row: Mapping[str, Any]) -> str:
    """Formats a row of results as text."""
    predicted = "" if row["predicted_us"] is None else f"{row['predicted_us']:.1f}"
    found = "-" if row["us"] is None else f"{row['us']:.2f}"
    rate = "" if row["us"] is None else f"{row['bytes'] / row['us'] / 1e3:.0f}"
    return f"{row['tokens']:>6}  {row['variant']:20} {found:>8} {rate:>6} {predicted:>10}  {row['note']}"


def compile_all(tokens: Sequence[int], choices: Mapping[int, Mapping[str, Choice]], jobs: int) -> None:
    """Compiles all programs in several processes, because each takes seconds."""
    configs = {(persistent_program, choice.config_for(each)) for each in tokens for choice in choices[each].values()}
    configs |= {(mm_program, mm_config_of("bfloat16", "dense", "none", "bfloat16", each)) for each in tokens}
    configs |= {(stream_program, stream_config_of("bfloat16", 2880, each * 4 / 128)) for each in tokens}
    try:
        for warmed in warmup.warm_up([*configs], jobs):
            if warmed.error:
                print(warmed, flush=True)
    except RuntimeError as error:  # then each program is compiled at its first use
        print(error, flush=True)


def choices_for(tokens: int, wanted: Sequence[str], traced: bool) -> dict[str, Choice]:
    """Returns the variants to measure for a number of tokens."""
    chosen = {name: choice for name, choice in CHOICES.items() if name in wanted and (tokens == 1 or choice.every)}
    return {**chosen, **(TRACE if traced else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", default="1,4,8", help="numbers of tokens")
    parser.add_argument("--layers", type=int, default=4, help="layers of a call")
    parser.add_argument("--variants", default=",".join(CHOICES), help="a list of: " + "; ".join(CHOICES))
    parser.add_argument("--rounds", type=int, default=30, help="how often a graph runs")
    parser.add_argument("--trace", action="store_true", help="also print the steps of a layer")
    parser.add_argument("--seconds", type=float, default=115.0, help="after this time the process ends")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--output", type=Path, help="write a JSON file")
    given = parser.parse_args()
    tokens = [int(each) for each in given.tokens.split(",")]
    wanted = [name for name in CHOICES if name in given.variants.split(",") or given.variants == ",".join(CHOICES)]
    faulthandler.dump_traceback_later(given.seconds, exit=True)
    begun = time.monotonic()
    choices = {each: choices_for(each, wanted, given.trace) for each in tokens}
    compile_all(tokens, choices, given.jobs)
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    if given.compile:
        return
    model = Model(given.layers, torch.device("cuda"))
    print(f"{given.layers} layers of weights after {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{'tokens':>6}  {'variant':20} {'us/layer':>8} {'GB/s':>6} {'predicted':>10}", flush=True)
    found = []
    for each in tokens:
        for row in rows(Batch(model, each), [*choices[each]], given.rounds):
            print(line(row), flush=True)
            found.append(row)
            if given.output:
                write_result(given.output, "cuda", layers=given.layers, rows=found)
    if given.trace:
        small = Model(2, model.device, SMALL, SMALL_WIDTH)
        for of_model, name in ((model, "cold weights"), (small, "two small layers, warm")):
            for each in tokens:
                for said in trace(Batch(of_model, each), name, given.rounds):
                    print(said, flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
