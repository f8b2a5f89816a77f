"""Predicts the times of GPT-OSS-120B's MoE layer (mxfp4 weights, fp8 activations) with one model. **For ratios only.**

The model predicts the times of our kernels, of the published wheel's kernels, and of the portable kernel.

    python packages/tokenspeed-kernel-amd/benchmarks/timing_model_moe.py --peer peer --output timing_model_moe.json --readme

The baseline is the published wheel tokenspeed-kernel-amd, which has the same name as this package but other kernels. ``--peer`` is
the folder into which this wheel was installed. Without ``--peer`` only our kernels and the portable kernel are measured. All sides
get the same tokens, routing and weights. The baseline and our kernels use static activation scales. The portable kernel uses
per-token scales, so our kernels are measured with per-token scales as well. The baseline takes router logits, as our kernels do
through `moe_topk_apply`. The portable kernel takes top-k ids, so the time of the core's portable `moe_topk` is added to its time.

A second table has further configurations: our kernels with bf16 or mxfp4 activations, and layers with other weight formats. These
layers are measured with the portable kernel and, if our kernels support the format, with our kernels.

Up to 16 tokens the whole layer is executed. For more tokens, two slices with all experts and tokens are executed. The slice with
256 intermediate features gives the first GEMM, the launches before it, and the launches after the second GEMM. The slice with 256
hidden features gives the second GEMM and the launches between the GEMMs. The full GEMM has 2880 / 256 times as many workgroups, and
its time is scaled by this factor. With fp8 weights and with activations that are not rounded, slices have 384 intermediate and 768
hidden features, and workgroups then have as many blocks of strips as in the full GEMM. For 8192 tokens, both slices have an eighth
of the tokens and of the experts, and all launches are scaled to eight times as many workgroups.

ASSUMPTIONS lists the model's assumptions, which are printed with the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing_model import README, metadata_of, parser_of, prepare_peer, publish
from torch import Tensor

MARKS = ("<!-- predicted times of experts -->", "<!-- end of experts -->")
EXPERTS, TOP_K, SIZE, DISTINCT = 128, 4, 2880, 4
TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
WHOLE = 16  # for at most this many tokens, the whole layer is executed
MANY, PART = 1024, 8  # for more than MANY tokens, 1 / PART of the tokens and of the experts is executed
LAUNCH_US = 2.3
ACTIVATIONS = {
    "ours": "fp8_static",
    "by_token": "fp8",
    "portable": "fp8",
    "peer": "fp8_static",
    "unrounded": "none",
    "mxfp4": "mxfp4",
    "dense": "none",
    "dense_ours": "none",
    "fp8_block": "fp8",
    "fp8_block_ours": "fp8",
    "qwen_ours": "fp8",
}
# Largest relative error of the output. If bf16 rounding changes a quantised value to the adjacent one, the error is larger in
# smaller formats.
ERRORS = {**dict.fromkeys(ACTIVATIONS, 0.02), "mxfp4": 0.08, "unrounded": 0.005, "dense": 0.01, "dense_ours": 0.01}
LARGEST = {"w13_input_scale": 5.0, "w2_input_scale": 56.0}  # amax values from which the static scales are computed
SWIGLU = {"alpha": 1.702, "limit": 7.0, "beta": 1.0}

ASSUMPTIONS = (
    "Only ratios are meaningful. The model has not been compared with an MI355X: no time below is a claim about an MI355X.",
    "All sides get the same inputs, and run with the same compiler (stock Triton), emulator and timing model, which the "
    "emulator's timing.py describes. Routing is uniform, and tokens are independent.",
    "The time of a call is the sum of the times of its launches. One column adds 2.3 us per launch: published measurements of "
    "short kernels on MI355X suggest this value.",
    "The baseline and our kernels round activations to fp8 with static scales. The portable kernel computes a scale per token. "
    "It is compared with our kernels with a scale per token.",
    "The baseline and our kernels route tokens themselves. For the portable kernel, the time and the launch of moe_topk are added.",
    "From 64 tokens on, each GEMM is executed with 256 of its output features (768 with fp8 weights or unrounded activations). "
    "Its work and its bytes, without those of its input activations, are then scaled up in proportion. The scaled work is divided "
    "evenly among the CUs.",
    "From 2048 tokens on, an eighth of the tokens and of the experts is executed, and all launches are counted with eight times "
    "as many workgroups. So the time to sort tokens by expert is underestimated, on all sides.",
    "Caches are ideal: no line is loaded from HBM twice in a launch.",
)


@dataclass(frozen=True)
class Layer:
    """The sizes and inputs of a layer, or of a slice of a layer. The weights of four experts are repeated for all experts. Only
    layers with mxfp4 weights have biases and limits."""

    tokens: int
    hidden: int
    features: int
    experts: int
    top_k: int = TOP_K
    weight_format: str = "mxfp4"

    def inputs(self) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(self.tokens)
        logits = torch.randn(self.tokens, self.experts, generator=draw).bfloat16()  # drawn first: slices get the same routing
        return {"x": torch.randn(self.tokens, self.hidden, generator=draw).bfloat16(), "logits": logits}

    def weights(self, activation_dtype: str) -> Any:
        from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

        draw = torch.Generator().manual_seed(7)

        def projection(rows: int, k: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
            if self.weight_format == "dense":
                return (torch.randn(DISTINCT, rows, k, generator=draw) * k**-0.5).bfloat16(), None, None
            if self.weight_format == "fp8_block":
                plain = torch.randn(DISTINCT, rows, k, generator=draw).to(torch.float8_e4m3fn)
                return plain, torch.rand(DISTINCT, -(-rows // 128), -(-k // 128), generator=draw) * k**-0.5, None
            codes = torch.randint(0, 256, (DISTINCT, rows, k // 2), generator=draw, dtype=torch.uint8)
            exponent = 127 + round(math.log2(k**-0.5 / 3))
            scale = torch.randint(exponent - 1, exponent + 2, (DISTINCT, rows, k // 32), generator=draw, dtype=torch.uint8)
            return codes, scale, 0.2 * torch.randn(DISTINCT, rows, generator=draw)

        both = (*projection(2 * self.features, self.hidden), *projection(self.hidden, self.features))
        static = activation_dtype == "fp8_static"
        scales = {name: torch.tensor([largest / 448]) for name, largest in LARGEST.items()} if static else {}
        return MoEWeights(*both, **scales)

    def plan(self, activation_dtype: str, kernel: str, layout: str) -> Any:
        from tokenspeed_kernel_base.ops.moe.plan import MoEPlan

        gpt_oss = self.weight_format == "mxfp4"
        swiglu: dict[str, Any] = SWIGLU if gpt_oss else {"alpha": 1.0, "limit": None, "beta": 0.0}
        return MoEPlan(
            self.experts, self.top_k, self.hidden, self.features, torch.bfloat16, self.weight_format, activation_dtype,
            w13_interleaved=gpt_oss, bias=gpt_oss, activation="swiglu", kernel=kernel, weight_layout=layout, **swiglu,
        )  # fmt: skip

    def floor_us(self, activation_dtype: str) -> float:
        """Returns the roofline time: the larger of the time to read the routed experts' weights at 8 TB/s, and `mfma_us`."""
        experts = len(set(self.inputs()["logits"].topk(self.top_k).indices.flatten().tolist()))
        element = {"mxfp4": 0.5 + 1 / 32, "fp8_block": 1 + 4 / 128**2, "dense": 2}[self.weight_format]
        memory_us = experts * 3 * self.hidden * self.features * element / 8e12 * 1e6
        return max(memory_us, self.mfma_us(activation_dtype))

    def slices(self, activation_dtype: str) -> tuple[int, int]:
        """Returns the intermediate features and the hidden features of the two slices that are executed."""
        unrounded = self.weight_format == "mxfp4" and activation_dtype == "none"
        return (384, 768) if self.weight_format == "fp8_block" or unrounded else (256, 256)

    def activation_bytes(self, activation_dtype: str) -> float:
        """Returns the bytes of an element of the GEMMs' input activations. Activations that are not rounded are two planes of fp8
        with block scales, or bf16 with bf16 weights."""
        if activation_dtype == "none":
            return 2 if self.weight_format == "dense" else 2 * (1 + 1 / 32)
        return 0.5 + 1 / 32 if activation_dtype == "mxfp4" else 1

    def mfma_us(self, activation_dtype: str) -> float:
        """Returns the least time of the MFMAs, see `floor_us`."""
        flops = 6 * self.tokens * self.top_k * self.hidden * self.features
        return flops / mfma_rate(activation_dtype) * 1e6


def mfma_rate(activation_dtype: str) -> float:
    """Returns the peak rate of the MFMAs in FLOP/s. 16-bit activations are split into two e4m3 values, which halves the rate."""
    return {"mxfp4": 10.06e15, "none": 2.5e15}.get(activation_dtype, 5.03e15)


def repeated(tensor: Tensor | None, layer: Layer) -> Tensor | None:
    return None if tensor is None else tensor.repeat(layer.experts // DISTINCT, *(1 for _ in tensor.shape[1:]))


# -- the sides -----------------------------------------------------------------------------------------------------------------

# A side is an implementation: a function of a layer that returns a function without parameters, which runs the layer.
Side = Callable[[Layer], Callable[[], Tensor]]


def prepared(layer: Layer, activation_dtype: str, kernel: str, layout: str) -> tuple[Any, Any]:
    """Returns the plan for the `moe_apply` kernel ``kernel``, and the weights that are prepared for it."""
    import tokenspeed_kernel as core
    from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

    plan = layer.plan(activation_dtype, kernel, layout)
    few = core.moe_apply.prepare(layer.weights(activation_dtype), dataclasses.replace(plan, num_experts=DISTINCT))
    parts = (getattr(few, f"{w}_weight{part}") for w in ("w13", "w2") for part in ("", "_scale", "_bias"))
    scales = {name: getattr(few, name) for name in LARGEST}
    return plan, MoEWeights(*(repeated(part, layer) for part in parts), layout, **scales)  # type: ignore[arg-type]


def _operator(layer: Layer, activation_dtype: str, kernel: str, layout: str, fused: str | None = None) -> Callable[[], Tensor]:
    """Returns a call of the `moe_apply` kernel ``kernel``, or of the `moe_topk_apply` kernel ``fused`` on the same weights."""
    import tokenspeed_kernel as core

    (plan, weights), inputs = prepared(layer, activation_dtype, kernel, layout), layer.inputs()

    def call() -> Tensor:
        if fused is not None:
            return core.moe_topk_apply(inputs["x"], inputs["logits"], weights, plan, override=fused)
        topk_weights, topk_ids = core.moe_topk(inputs["logits"], layer.top_k, solution="triton")
        return core.moe_apply(inputs["x"], weights, topk_weights, topk_ids, plan, override=kernel)

    return call


def ours(layer: Layer) -> Callable[[], Tensor]:
    return _ours(layer, ACTIVATIONS["ours"])


def by_token(layer: Layer) -> Callable[[], Tensor]:
    """Returns a call of our kernels, with per-token scales."""
    return _ours(layer, ACTIVATIONS["by_token"])


def _ours(layer: Layer, activation_dtype: str) -> Callable[[], Tensor]:
    return _operator(layer, activation_dtype, "gluon_moe_apply_mxfp4", "gfx950_mxfp4", "gluon_moe_topk_apply_mxfp4")


def unrounded(layer: Layer) -> Callable[[], Tensor]:
    """Returns a call of our kernels, with bf16 activations."""
    return _ours(layer, ACTIVATIONS["unrounded"])


def mxfp4(layer: Layer) -> Callable[[], Tensor]:
    """Returns a call of our kernels, with mxfp4 activations."""
    return _ours(layer, ACTIVATIONS["mxfp4"])


def portable(layer: Layer) -> Callable[[], Tensor]:
    return _operator(layer, ACTIVATIONS["portable"], "triton_moe_apply_mxfp4", "triton_mxfp4")


def dense(layer: Layer) -> Callable[[], Tensor]:
    """Returns a call of the portable kernel, with bf16 weights."""
    return _operator(layer, ACTIVATIONS["dense"], "triton_moe_apply", "canonical")


def dense_ours(layer: Layer) -> Callable[[], Tensor]:
    """Returns a call of our kernels, with bf16 weights."""
    return _operator(layer, ACTIVATIONS["dense_ours"], "gluon_moe_apply_dense", "canonical")


def fp8_block(layer: Layer) -> Callable[[], Tensor]:
    """Returns a call of the portable kernel, with fp8 block-scaled weights."""
    return _operator(layer, ACTIVATIONS["fp8_block"], "triton_moe_apply", "canonical")


def qwen_ours(layer: Layer) -> Callable[[], Tensor]:
    return fp8_block_ours(layer)


def fp8_block_ours(layer: Layer) -> Callable[[], Tensor]:
    """Returns a call of our kernels, with fp8 block-scaled weights."""
    kernels = ("gluon_moe_apply_fp8_block", "gfx950_fp8_block", "gluon_moe_topk_apply_fp8_block")
    return _operator(layer, ACTIVATIONS["fp8_block_ours"], *kernels)


def peer(layer: Layer) -> Callable[[], Tensor]:
    """Prepares the weights with the baseline's public function, and returns a call of its fused MoE function."""
    package = "tokenspeed_kernel_amd.ops.gfx950.moe.mxfp4"
    prepare = importlib.import_module(f"{package}.weight_preprocess").preprocess_gluon_mxfp4_gfx950_moe_weights
    function = importlib.import_module(f"{package}.fused").gluon_mxfp_fused_moe
    module, weights, inputs = torch.nn.Module(), layer.weights(ACTIVATIONS["peer"]), layer.inputs()
    for name in ("w13_weight", "w2_weight"):
        for part in ("", "_scale", "_bias"):
            module.register_parameter(name + part, torch.nn.Parameter(getattr(weights, name + part), requires_grad=False))
    for name in LARGEST:
        scale = getattr(weights, name).repeat(DISTINCT)
        module.register_parameter(name, torch.nn.Parameter(scale, requires_grad=False))
    module.w13_input_layout = "interleaved"  # type: ignore[assignment]
    plan = {"num_experts": DISTINCT, "top_k": TOP_K, "hidden_size": layer.hidden, "intermediate_size": layer.features}
    prepare(plan, module)
    made: dict[str, Any] = {}
    for name in ("w13", "w2"):
        made[f"{name}_weight"] = repeated_view(getattr(module, f"{name}_weight_triton_tensor"), layer)
        made[f"{name}_mx_scale"] = repeated_view(getattr(module, f"{name}_precision_config").b_mx_scale, layer)
        made[f"{name}_act_scale"] = getattr(module, f"{name}_act_scale")
        made[f"{name}_bias"] = repeated(getattr(weights, f"{name}_weight_bias"), layer)
    return lambda: function(
        inputs["x"], inputs["logits"], **made, top_k=TOP_K, **{f"swiglu_{name}": value for name, value in SWIGLU.items()}
    )


def repeated_view(tensor: Tensor, layer: Layer) -> Tensor:
    """Repeats a tensor's experts, and keeps the order of its axes in memory."""
    order = sorted(range(tensor.dim()), key=lambda axis: (axis != 0, -tensor.stride(axis)))
    back = [order.index(axis) for axis in range(tensor.dim())]
    plain = tensor.permute(order).contiguous()
    made = plain.repeat(layer.experts // DISTINCT, *(1 for _ in plain.shape[1:])).permute(back)
    made.__dict__.update(tensor.__dict__)  # the baseline stores sizes as attributes
    return made


# -- measuring -----------------------------------------------------------------------------------------------------------------


def check(side: str, layer: Layer, out: Tensor) -> float:
    """Returns the relative error of the first tokens. Raises RuntimeError if the error is too large."""
    from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply

    inputs, some, dtype = layer.inputs(), slice(0, 4), ACTIVATIONS[side]
    chosen = inputs["logits"][some].float().sort(dim=-1, descending=True, stable=True)
    weights, ids = chosen.values[:, : layer.top_k].softmax(-1), chosen.indices[:, : layer.top_k].int() % DISTINCT
    wanted = moe_apply.operator.body(inputs["x"][some].float(), layer.weights(dtype), weights, ids, layer.plan(dtype, "", ""))
    error = float((out[some, : layer.hidden].float() - wanted).norm() / wanted.norm())
    if not error <= ERRORS[side]:
        raise RuntimeError(f"{side}, {layer}: relative error {error:.1e}")
    return error


@dataclass(frozen=True)
class Launch:
    """The predicted time of a launch in microseconds. ``mfma``: total cycles of the launch's MFMA instructions."""

    kernel: str
    mfma: float
    us: float
    compute_us: float
    memory_us: float
    bound_by: str

    def row(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "mfma"}


def predicted(report: Any, scale: float = 1.0, fixed_bytes: float = 0.0, parts: int = 1) -> Launch:
    """Predicts the time of a launch with more workgroups and bytes than the emulator has executed.

    Args:
        report: the emulator's report of the executed launch.
        scale: factor by which the numbers of workgroups and of bytes grow, except ``fixed_bytes``.
        fixed_bytes: bytes that do not grow with ``scale``.
        parts: a further factor by which all workgroups and bytes grow.
    """
    from gfx950_emulator import hardware as hw
    from gfx950_emulator import timing

    counters = report.counters
    costs = timing.instruction_costs(counters)
    mfma = sum(cost.mfma * int(count) for cost, count in zip(costs, counters.executions(), strict=True))
    found = timing.predict(report, max_instructions=2_000_000)
    compute, memory, full = found.compute_seconds, found.memory_seconds, found.full
    whole = scale * parts == 1.0
    if not whole:
        traces = timing.instructions_of(counters, found.workgroup)
        full = timing.simulate(costs, [traces] * found.occupancy.workgroups, max_instructions=2_000_000)
        spans = report.program.blocks.items()
        work = counters.trace.work({start: sum(costs[i].weight for i in range(start, block.end)) for start, block in spans})
        share = parts * scale * sum(work.values()) / work[found.workgroup] / hw.MI355X.compute_units
        compute = max(found.alone.cycles, share * full.cycles / full.workgroups) / hw.MI355X.clock_hz
        memory = parts * (scale * (counters.memory_bytes - fixed_bytes) + fixed_bytes) / hw.MI355X.hbm_bytes_per_second
    unit = max(full.busy, key=lambda name: full.busy[name])
    bound = found.bound_by if whole else f"{unit} throughput" if full.busy[unit] > 0.5 else "latency"
    bound = "HBM bandwidth" if memory >= compute else bound
    return Launch(report.kernel, mfma, max(compute, memory) * 1e6, compute * 1e6, memory * 1e6, bound)


def _products(reports: list[Any]) -> list[int]:
    """Returns the indices of the layer's two GEMM launches, in order. These launches have the most MFMA cycles."""
    return sorted(sorted(range(len(reports)), key=lambda i: -predicted(reports[i]).mfma)[:2])


def _run(name: str, side: Side, layer: Layer) -> tuple[list[Any], float]:
    from gfx950_emulator import emulated_gfx950

    # The baseline's routing kernel writes past the end of its tensors, into padding of their storage.
    with emulated_gfx950(counters=True, sanitize=False, bounds="storage") as emulator:
        call = side(layer)
        del emulator.launches[:]
        out = call()
    return list(emulator.launches), check(name, layer, out)


def layer_of(name: str, tokens: int) -> Layer:
    """Returns the whole layer that a side computes: its sizes and its weight format."""
    if name.startswith("dense"):
        return Layer(tokens, 2048, 768, 128, 8, "dense")
    if name.startswith("fp8_block"):
        return Layer(tokens, 7168, 2048, 32, 1, "fp8_block")
    if name.startswith("qwen"):
        return Layer(tokens, 4096, 1536, 32, 1, "fp8_block")
    return Layer(tokens, SIZE, SIZE, EXPERTS)


def measure(name: str, side: Side, tokens: int) -> dict[str, Any]:
    """Runs the layer on one side, and returns its launches with their predicted times."""
    if tokens <= WHOLE:
        reports, error = _run(name, side, layer_of(name, tokens))
        launches = [predicted(report) for report in reports]
    else:
        parts = 1 if tokens <= MANY else PART
        whole = layer_of(name, tokens)
        part = dataclasses.replace(whole, tokens=tokens // parts, experts=whole.experts // parts)
        features, hidden = whole.slices(ACTIVATIONS[name])
        element = whole.activation_bytes(ACTIVATIONS[name])
        first, error = _run(name, side, dataclasses.replace(part, features=features))
        one, two = _products(first)
        launches = [predicted(report, parts=parts) for report in first[:one]]
        launches.append(predicted(first[one], whole.features / features, element * part.tokens * whole.hidden, parts))
        after = [predicted(report, parts=parts) for report in first[two + 1 :]]
        del first
        second, other = _run(name, side, dataclasses.replace(part, hidden=hidden))
        one, two = _products(second)
        launches += [predicted(report, parts=parts) for report in second[one + 1 : two]]
        inputs = element * part.tokens * whole.top_k * whole.features
        launches.append(predicted(second[two], whole.hidden / hidden, inputs, parts))
        launches += after
        error = max(error, other)
    us = sum(launch.us for launch in launches)
    gemms = sorted(launch.us for launch in launches if launch.mfma)[-2:]
    return {
        "us": us,
        "floor_us": layer_of(name, tokens).floor_us(ACTIVATIONS[name]),
        "mfma_us": layer_of(name, tokens).mfma_us(ACTIVATIONS[name]),
        "gemms_us": sum(gemms),
        "with_launches_us": us + LAUNCH_US * len(launches),
        "relative_error": error,
        "launches": [launch.row() for launch in launches],
    }


def measure_all(name: str, side: Side, tokens: list[int], kept: Path | None = None) -> dict[str, Any]:
    """Returns the results of `measure` for each number of tokens. Results of the same commit in the folder ``kept`` are reused."""
    torch.set_num_threads(1)
    commit = metadata_of(Path(__file__), None)["git_commit"]
    rows: dict[str, Any] = {}
    for count in tokens:
        file = None if kept is None else kept / f"{name}_{count}_{commit}.json"
        if file is not None and file.exists():
            rows[str(count)] = json.loads(file.read_text())
            continue
        start = time.perf_counter()
        row = rows[str(count)] = measure(name, side, count)
        if file is not None:
            file.write_text(json.dumps(row))
        print(f"{name}: {count}: {row['us']:.1f} us ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return rows


def measure_sides(counts: dict[str, list[int]], folder: Path | None, kept: Path | None, jobs: int) -> dict[str, Any]:
    """Returns the results of `measure_all` for each side. Each side runs in its own process, because the baseline's package has the
    same name as ours. At most ``jobs`` processes run at a time."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)

    def run(side: str) -> Any:
        command = [sys.executable, str(Path(__file__).resolve()), "--side", side, "--tokens", *map(str, counts[side])]
        command += ["--peer", str(folder)] if side == "peer" else []
        command += ["--keep", str(kept)] if kept is not None else []
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

    sides = [side for side, tokens in counts.items() if tokens]
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(sides, pool.map(run, sides), strict=True))


@dataclass(frozen=True)
class Other:
    """A row group of the second table: one implementation of another configuration.

    Attributes:
        described: the layer, the kernel and the activation format, as the table shows them.
        tokens: the numbers of tokens to measure.
    """

    described: tuple[str, str, str]
    tokens: tuple[int, ...]


OTHERS = {
    "unrounded": Other(("GPT-OSS-120B, mxfp4", "ours", "bfloat16"), (1, 16, 256, 1024, 8192)),
    "mxfp4": Other(("GPT-OSS-120B, mxfp4", "ours", "mxfp4"), (1, 16)),
    "dense_ours": Other(("Qwen3-30B-A3B, bfloat16", "ours", "bfloat16"), (1, 16, 1024, 8192)),
    "dense": Other(("Qwen3-30B-A3B, bfloat16", "portable", "bfloat16"), (1, 16, 1024)),
    "fp8_block_ours": Other(("DeepSeek-V3, fp8 blocks, an eighth of its experts", "ours", "fp8, a scale per token"), (1, 16, 8192)),
    "qwen_ours": Other(("Qwen3-235B-A22B, fp8 blocks, a quarter of its experts", "ours", "fp8, a scale per token"), (8192,)),
    "fp8_block": Other(("DeepSeek-V3, fp8 blocks, an eighth of its experts", "portable", "fp8, a scale per token"), (1, 16)),
}


# -- showing -------------------------------------------------------------------------------------------------------------------


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the geometric means of the ratios to the baseline, without and with launch overhead."""
    rated = [row for row in rows if "peer" in row]
    if not rated:
        return {}
    return {
        "geometric_mean": _mean([row["ours"]["us"] / row["peer"]["us"] for row in rated]),
        "geometric_mean_with_launches": _mean([row["ours"]["with_launches_us"] / row["peer"]["with_launches_us"] for row in rated]),
    }


def table(report: dict[str, Any]) -> str:
    """Formats the report as Markdown: a row per number of tokens."""
    lines = [
        "| tokens | floor, µs | ours, µs (launches) | baseline, µs (launches) | ours / baseline | with 2.3 µs per launch "
        "| ours, a scale per token | portable, a scale per token | portable / ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        mine, cells = row["ours"], [str(row["tokens"]), f"{row['floor_us']:.1f}"]
        cells.append(f"{mine['us']:.1f} ({len(mine['launches'])})")
        if "peer" in row:
            other = row["peer"]
            cells.append(f"{other['us']:.1f} ({len(other['launches'])})")
            cells.append(f"{mine['us'] / other['us']:.3f}")
            cells.append(f"{mine['with_launches_us'] / other['with_launches_us']:.3f}")
        else:
            cells += ["", "", ""]
        dynamic, slow = row.get("by_token"), row.get("portable")
        cells.append(f"{dynamic['us']:.1f} ({len(dynamic['launches'])})" if dynamic else "")
        cells += [f"{slow['us']:.1f}", f"{slow['us'] / dynamic['us']:.2f}"] if slow and dynamic else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    if report.get("others"):
        lines += [
            "",
            "| layer | by | activations | tokens | floor, µs | µs (launches) | of the floor | GEMMs, of the MFMAs' peak |",
            "|---|---|---|---|---|---|---|---|",
        ]
    for row in report.get("others", ()):
        layer, kernel, activations = OTHERS[row["side"]].described
        cells = [layer, kernel, activations, str(row["tokens"]), f"{row['floor_us']:.1f}"]
        cells += [f"{row['us']:.1f} ({len(row['launches'])})", f"{row['us'] / row['floor_us']:.2f}"]
        # With few tokens, the rate of the MFMAs says nothing.
        cells.append(f"{row['mfma_us'] / row['gemms_us']:.0%}" if row["tokens"] > WHOLE else "")
        lines.append(f"| {' | '.join(cells)} |")
    if "renewed" in report:
        lines += ["", f"Rows of this table were renewed by `{report['renewed']['command']}`."]
    found = report["summary"]
    if found:
        lines += [
            "",
            f"The geometric mean of ours / baseline is {found['geometric_mean']:.3f}, with 2.3 µs per launch "
            f"{found['geometric_mean_with_launches']:.3f}.",
        ]
    return "\n".join(lines)


def renew(options: argparse.Namespace) -> None:
    """Measures the sides ``options.others``, and replaces their rows in the report ``options.output``. The report then lists this
    command line as well."""
    report = json.loads(options.output.read_text())
    counts = {side: list(OTHERS[side].tokens) for side in options.others}
    found = measure_sides(counts, None, options.keep, options.jobs)
    kept = {side: {row["tokens"]: row for row in report["others"] if row["side"] == side} for side in OTHERS}
    kept |= {side: {int(n): {"side": side, "tokens": int(n), **row} for n, row in rows.items()} for side, rows in found.items()}
    renewed = metadata_of(Path(__file__), None)
    report["renewed"] = {name: renewed[name] for name in ("command", "git_commit", "date")}
    report["assumptions"] = ASSUMPTIONS
    report["others"] = [row for side in OTHERS for row in kept[side].values()]
    publish(report, table(report), options, README, MARKS)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--portable-up-to", type=int, default=16, help="tokens up to which the portable kernel is measured")
    parser.add_argument("--by-token-up-to", type=int, default=TOKENS[-1], help="the same for ours with a scale a token")
    parser.add_argument("--others-up-to", type=int, default=TOKENS[-1], help="the same for what the second table has")
    parser.add_argument("--others", nargs="*", choices=list(OTHERS), help="measure only these; --output has all other rows already")
    parser.add_argument("--keep", type=Path, help="a folder for what is measured, from which an interrupted run goes on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--side", choices=sorted(ACTIVATIONS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side is not None:
        if options.side == "peer":
            prepare_peer(options.peer)
        print(json.dumps(measure_all(options.side, globals()[options.side], options.tokens, options.keep)))
        return
    if options.others is not None:
        if options.output is None or not options.output.exists():
            parser.error("--others renews rows of a report, so --output must be a report that exists")
        renew(options)
        return
    most = {"ours": TOKENS[-1], "by_token": options.by_token_up_to, "portable": options.portable_up_to}
    if options.peer is not None:
        most = {"peer": TOKENS[-1], **most}
    counts = {side: [count for count in options.tokens if count <= limit] for side, limit in most.items()}
    for side, other in OTHERS.items():
        counts[side] = [count for count in other.tokens if count <= options.others_up_to]
    found = measure_sides(counts, options.peer, options.keep, options.jobs)
    rows: list[dict[str, Any]] = []
    for count in options.tokens:
        row: dict[str, Any] = {"tokens": count, "floor_us": layer_of("ours", count).floor_us(ACTIVATIONS["ours"])}
        rows.append(row | {side: found[side][str(count)] for side in most if str(count) in found.get(side, {})})
    others = [{"side": side, "tokens": int(n), **row} for side in OTHERS for n, row in found.get(side, {}).items()]
    metadata = metadata_of(Path(__file__), options.peer)
    report = {"metadata": metadata, "assumptions": ASSUMPTIONS, "summary": summary(rows), "rows": rows, "others": others}
    publish(report, table(report), options, README, MARKS)


if __name__ == "__main__":
    main()
