"""Measures layers of a decode step of GPT-OSS-120B in one persistent launch and in today's launches.

    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_persistent.py --output persistent.json
    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_persistent.py --compile   # only fills the cache; needs no GPU
    python packages/tokenspeed-kernel-nvidia/benchmarks/h200_persistent.py --dense bfloat16,float8_e4m3fn --tokens 1,2,4 \
        --variants persistent --in-flight 3,3,7,2 4,4,9,2

All variants run in one process on the same random values. Each variant is first compared with the public operators, layer by layer.
For each layer, the operators start from the residual stream that the variant has computed. Then several calls run in a CUDA graph.
The graph runs several times, with caches evicted in between. A call runs all layers. The layers' weights exceed the L2 cache, so
every layer reads cold weights. Today's launches are `rmsnorm_qkv_rope`, `mha_decode_with_kvcache`, `mm`, `rmsnorm_moe_topk` and
`moe_apply`, with PDL, as in the runtime `tools/gpt_oss`. Layers alternate between a window of 128 keys and all keys.

``--dense`` names formats of the weights of qkv and of the projection; fp8 weights are those in bfloat16, with a scale for each row.
``--in-flight`` adds variants with other numbers of stages in flight, see `Config.in_flight`.

A row is printed as soon as it is measured. If a variant fails, its row has the reason, and the other variants are still measured.
The kernel's waits end by themselves after about two seconds. The process ends after ``--seconds`` in any case.

``--trace`` adds tables of the steps of a layer after all rows, from a kernel that stores the times of events. One table is for
these weights. The other table is for two layers that are so small that their weights stay in L2, so it shows latencies alone.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import itertools
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
from persistent_timeline import STEPS, bytes_of
from persistent_timeline import TODAY as TODAY_STEPS
from persistent_trace import gathered, table

import tokenspeed_kernel as ops
from tokenspeed_kernel.workbench.benchmark import write_result
from tokenspeed_kernel.workbench.benchmark.timing import sample_graph
from tokenspeed_kernel_base.ops.decoder.weights import DecoderLayer
from tokenspeed_kernel_nvidia import warmup
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import config_of as mm_config_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import mm_program
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    ATTENDED,
    DENSE,
    EXCHANGES,
    HEAD_DIM,
    PARTIALS,
    QKV,
    TOTALS,
    Config,
    Dense,
    config_of,
)
from tokenspeed_kernel_nvidia.sm90.layers.launch import persistent_program
from tokenspeed_kernel_nvidia.sm90.layers.variants import PersistentLayers
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import config_of as stream_config_of
from tokenspeed_kernel_nvidia.sm90.moe.stream.launch import stream_program

SHAPE, EPS = Shape(GPT_OSS_120B, 1), 1e-5
SMALL = Shape(replace(GPT_OSS_120B, name="small", intermediate=256), 1)
CONTEXT, PAGE_SIZE, WINDOW = 1024, 64, 128
CALLS = 8  # number of calls in a graph
CLOSE = 0.02  # a token with a larger relative error has other experts than the reference
TODAY = "today's launches"


@dataclass(frozen=True)
class Choice:
    """A variant of the persistent kernel.

    Attributes:
        config: options of `config_of`.
        together: whether one launch runs all layers.
        every: whether the variant is measured for every number of tokens, not only for one token.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    together: bool = True
    every: bool = False

    def config_for(self, tokens: int, dense: Dense) -> Config:
        return config_of(tokens, **self.config, dense=dense)


def counted(*words: int) -> dict[str, Any]:
    """Returns the options of a configuration whose exchanges use counters, except for those given."""
    return {"counted": tuple(each for each in EXCHANGES if each not in words)}


CHOICES = {
    "persistent": Choice(every=True),
    "one layer a launch": Choice(together=False, every=True),
    "words": Choice({"counted": ()}, every=True),
    "counters": Choice({"counted": EXCHANGES}),
    "words of totals": Choice(counted(QKV, ATTENDED, TOTALS)),
    "words of qkv": Choice(counted(QKV), every=True),
    "words of attention": Choice(counted(QKV, ATTENDED), every=True),
    "words but partials": Choice({"counted": (PARTIALS,)}, every=True),
    "slabs of 5 blocks": Choice({"slab": 5}),
    "9 stages": Choice({"most": 9}),
    "cooperative": Choice({"cooperative": True}),
}

TRACE = {"with a trace": Choice({"trace": True}), "words of qkv, with a trace": Choice({"trace": True, **counted(QKV)})}


class Model:
    """The weights of some layers, shared by all variants."""

    def __init__(
        self, layers: int, device: torch.device, shape: Shape = SHAPE, kv_heads: int = 8, group: int = 8, seed: int = 0
    ) -> None:
        self.device, self.random = device, torch.Generator(device).manual_seed(seed)
        self.weights: list[DecoderLayer] = []
        self.plan: Any = None
        self.dense: Dense = "bfloat16"
        self.kv_heads, self.heads = kv_heads, kv_heads * group
        rows, width = (self.heads + 2 * kv_heads) * HEAD_DIM, self.heads * HEAD_DIM
        for index in range(layers):
            drawn = Layer.drawn(shape, device, seed + index)
            plan = drawn.plan
            self.plan = ops.moe_apply.plan(
                plan.num_experts, plan.top_k, plan.hidden_size, plan.intermediate_size, dtype=torch.bfloat16, device=device,
                weight_format="mxfp4", w13_interleaved=plan.w13_interleaved, bias=plan.bias, alpha=plan.alpha, limit=plan.limit,
                beta=plan.beta, override="cutedsl_moe_apply_mxfp4",
            )  # fmt: skip
            hidden, experts = plan.hidden_size, plan.num_experts
            of_layer = DecoderLayer(
                input_norm=1 + self.normal(hidden, scale=0.1),
                qkv=self.normal(rows, hidden, scale=hidden**-0.5),
                qkv_bias=self.normal(rows, scale=0.1),
                sinks=self.normal(self.heads).float(),
                window_left=-1 if index % 2 else WINDOW - 1,
                projection=self.normal(hidden, width, scale=width**-0.5),
                projection_bias=self.normal(hidden, scale=0.1),
                norm=1 + self.normal(hidden, scale=0.1),
                router=self.normal(experts, hidden, scale=2 * hidden**-0.5),
                router_bias=self.normal(experts, scale=0.1),
                experts=ops.moe_apply.prepare(drawn.weights, self.plan),
            )
            self.weights.append(of_layer)

    def quantised(self) -> Model:
        """Returns a model with the weights of qkv and of the projection in fp8. All other weights are shared."""
        made = copy.copy(self)
        made.dense, made.weights = "float8_e4m3fn", []
        for layer in self.weights:
            both = {name: ops.quantize_fp8(getattr(layer, name)) for name in ("qkv", "projection")}
            weights = {name: weight for name, (weight, _) in both.items()}
            scales = {f"{name}_scale": scale for name, (_, scale) in both.items()}
            made.weights.append(replace(layer, **weights, **scales))
        return made

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.random, device=self.device) * scale).bfloat16()


class Batch:
    """The inputs for one number of tokens, and the calls on these inputs."""

    def __init__(self, model: Model, tokens: int, context: int = CONTEXT) -> None:
        self.model, self.tokens, self.layers, self.context = model, tokens, len(model.weights), context
        device = model.device
        self.x = model.normal(tokens, model.plan.hidden_size)
        self.out = torch.empty(self.layers, tokens, model.plan.hidden_size, dtype=torch.bfloat16, device=device)
        each = -(-context // PAGE_SIZE)
        pages = torch.randperm(tokens * each, generator=self.model.random, device=device).int()
        self.pages = pages.view(tokens, each)
        self.lengths = torch.full((tokens,), context, dtype=torch.int32, device=device)
        self.positions = (self.lengths - 1).long()
        newest = context - 1
        self.slots = self.pages[:, newest // PAGE_SIZE].long() * PAGE_SIZE + newest % PAGE_SIZE
        shape = tokens * each, PAGE_SIZE, model.kv_heads, HEAD_DIM
        self.caches = [(model.normal(*shape), model.normal(*shape)) for _ in range(self.layers)]
        angles = torch.rand(context, HEAD_DIM // 2, generator=model.random, device=device) * 6
        self.table = torch.cat((angles.cos(), angles.sin()), 1)
        _, ids = self.composed([self.x] * self.layers)
        self.experts = statistics.mean(len(of_layer.unique()) for of_layer in ids)

    @property
    def bytes(self) -> float:
        """The bytes of a layer's weights that these tokens need."""
        return bytes_of(self.experts, 2 if self.model.dense == "bfloat16" else 1)

    def layer(self, index: int, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Runs one layer with the public operators, on the preceding layer's experts and residual stream. Returns the sum over the
        experts, the residual stream to which it is to be added, and the expert ids."""
        of_layer, model = self.model.weights[index], self.model
        k_cache, v_cache = self.caches[index]
        found = ops.rmsnorm_qkv_rope(
            x, of_layer.input_norm, of_layer.qkv.t(), self.positions, self.table, model.kv_heads, HEAD_DIM, eps=EPS,
            residual=residual, bias=of_layer.qkv_bias, k_cache=k_cache, v_cache=v_cache, slot_mapping=self.slots,
            qkv_weight_scale=None if of_layer.qkv_scale is None else of_layer.qkv_scale.t(),
        )  # fmt: skip
        qkv, stream = (found, x) if residual is None else found
        q = qkv.view(self.tokens, -1, HEAD_DIM)[:, : model.heads]
        attended = ops.mha_decode_with_kvcache(
            q, k_cache, v_cache, self.pages, self.lengths, self.context, softmax_scale=HEAD_DIM**-0.5,
            window_left=of_layer.window_left, sinks=of_layer.sinks,
        )  # fmt: skip
        scale = None if of_layer.projection_scale is None else of_layer.projection_scale.t()
        projected = ops.mm(attended.flatten(1), of_layer.projection.t(), b_scale=scale, bias=of_layer.projection_bias)
        normed, weights, ids, total = ops.rmsnorm_moe_topk(
            projected, of_layer.norm, of_layer.router.t(), model.plan.top_k, eps=EPS, residual=stream,
            router_bias=of_layer.router_bias,
        )  # fmt: skip
        return ops.moe_apply(normed, of_layer.experts, weights, ids, model.plan), total, ids

    def composed(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Runs each layer with the public operators, from the given inputs. Returns each layer's output and expert ids."""
        found = [self.layer(index, x, None) for index, x in enumerate(inputs)]
        return [expert + total for expert, total, _ in found], [ids for *_, ids in found]

    def today(self) -> None:
        x, residual = self.x, None
        for index in range(self.layers):
            x, residual, _ = self.layer(index, x, residual)

    def errors(self) -> Tensor:
        """Returns the relative errors of the last call for each layer and token, ``[layers, tokens]``."""
        wanted, _ = self.composed([self.x, *self.out[:-1]])
        both = torch.stack(wanted).double()
        return (self.out.double() - both).norm(dim=-1) / both.norm(dim=-1)

    def launches(self, choice: Choice) -> list[PersistentLayers]:
        """Returns the launch objects of a variant. A call launches them one after the other."""
        config = choice.config_for(self.tokens, self.model.dense)
        ranges = [slice(None)] if choice.together else [slice(index, index + 1) for index in range(self.layers)]
        return [
            PersistentLayers(
                self.model.weights[some], self.caches[some], self.tokens, self.table, self.model.plan, eps=EPS, config=config,
            )
            for some in ranges
        ]  # fmt: skip

    def call(self, launched: Sequence[PersistentLayers]) -> Callable[[], None]:
        """Returns a function that runs all layers with these launch objects."""
        outs = self.out.chunk(len(launched))
        inputs = [self.x, *(out[-1] for out in outs[:-1])]

        def run() -> None:
            for each, x, out in zip(launched, inputs, outs, strict=True):
                each(x, out, self.lengths, self.pages, self.slots)

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
        row["dense"] = batch.model.dense
        modelled = batch.tokens == 1 and batch.model.dense == "bfloat16"
        row["predicted_us"] = sum((TODAY_STEPS if choice is None else STEPS).values()) if modelled else None
        row["context"] = batch.context
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


def trace(batch: Batch, variant: str, name: str, rounds: int) -> Iterator[str]:
    """Yields the lines of a table of a layer's steps. ``variant``: a name of TRACE; ``name``: of the layers."""
    (launched,) = found = batch.launches(TRACE[variant])
    said = check(batch, found)
    yield f"\nsteps of a layer, {batch.tokens} tokens, {name}, {variant}; {said}"
    yield from table(gathered(launched, batch.call(found), rounds))


def line(row: Mapping[str, Any]) -> str:
    """Formats a row of results as text."""
    predicted = "" if row["predicted_us"] is None else f"{row['predicted_us']:.1f}"
    found = "-" if row["us"] is None else f"{row['us']:.2f}"
    rate = "" if row["us"] is None else f"{row['bytes'] / row['us'] / 1e3:.0f}"
    return f"{row['tokens']:>6}  {row['dense']:13} {row['variant']:20} {found:>8} {rate:>6} {predicted:>10}  {row['note']}"


def compile_all(tokens: Sequence[int], formats: Sequence[Dense], choices: Mapping[int, Mapping[str, Choice]], jobs: int) -> None:
    """Compiles all programs in several processes, because each takes seconds."""
    pairs = [(each, dense) for each in tokens for dense in formats]
    configs = {(persistent_program, choice.config_for(*pair)) for pair in pairs for choice in choices[pair[0]].values()}
    for each, dense in pairs:
        scaled = ("float8_e4m3fn", "row") if dense == "float8_e4m3fn" else ("dense", "none")
        configs.add((mm_program, mm_config_of("bfloat16", *scaled, "bfloat16", each)))
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
    parser.add_argument("--context", type=int, default=CONTEXT, help="keys of each sequence")
    parser.add_argument("--variants", default=",".join(CHOICES), help="a list of: " + "; ".join(CHOICES))
    parser.add_argument("--dense", default=DENSE[0], help="formats of dense weights: " + ", ".join(DENSE))
    parser.add_argument("--in-flight", nargs="*", default=[], help="more variants: stages of qkv, projection, w13 and w2")
    parser.add_argument("--rounds", type=int, default=30, help="how often a graph runs")
    parser.add_argument("--trace", action="store_true", help="also print the steps of a layer")
    parser.add_argument("--seconds", type=float, default=115.0, help="after this time the process ends")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--output", type=Path, help="write a JSON file")
    given = parser.parse_args()
    tokens = [int(each) for each in given.tokens.split(",")]
    formats = [dense for dense in DENSE if dense in given.dense.split(",")]
    for stages in given.in_flight:
        CHOICES[f"in flight {stages}"] = Choice({"in_flight": tuple(map(int, stages.split(",")))}, every=True)
    named = (*given.variants.split(","), *(f"in flight {stages}" for stages in given.in_flight))
    wanted = [name for name in CHOICES if name in named]
    faulthandler.dump_traceback_later(given.seconds, exit=True)
    begun = time.monotonic()
    choices = {each: choices_for(each, wanted, given.trace) for each in tokens}
    compile_all(tokens, formats, choices, given.jobs)
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    if given.compile:
        return
    model = Model(given.layers, torch.device("cuda"))
    models = [model if dense == model.dense else model.quantised() for dense in formats]
    print(f"{given.layers} layers of weights after {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{'tokens':>6}  {'dense':13} {'variant':20} {'us/layer':>8} {'GB/s':>6} {'predicted':>10}", flush=True)
    found = []
    for each, of_model in itertools.product(tokens, models):
        for row in rows(Batch(of_model, each, given.context), [*choices[each]], given.rounds):
            print(line(row), flush=True)
            found.append(row)
            if given.output:
                write_result(given.output, "cuda", layers=given.layers, rows=found)
    if given.trace:
        small = Model(2, model.device, SMALL)
        cold = [(of_model, f"cold weights, {of_model.dense}") for of_model in models]
        for of_model, name in (*cold, (small, "two small layers, warm")):
            for each in tokens:
                for variant in TRACE:
                    for said in trace(Batch(of_model, each, given.context), variant, name, given.rounds):
                        print(said, flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
