"""Tests layers of a decode step in one persistent launch, on the emulator, against float64. Also tests the launcher's checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_HEAD_BYTES
from tokenspeed_kernel_nvidia.sm90.moe.persistent.config import (
    CHAIN,
    EVENTS,
    OTHER_BYTES,
    PART_PITCH,
    PRODUCED,
    ROUTER_BYTES,
    TILE,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.moe.persistent.launch import LayerWeights, PersistentLayers
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import BUFFERS, GROUPS, SHARED_BYTES

from .experts import GPT_OSS, RandomLayer

CPU, BF16 = torch.device("cpu"), torch.bfloat16


class Model:
    """Some layers with random weights."""

    def __init__(
        self,
        tokens: int,
        layers: int,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        width: int,
        device: torch.device = CPU,
    ) -> None:
        self.random = torch.Generator(device).manual_seed(tokens + layers + hidden)
        self.experts = [RandomLayer(device, experts, top_k, hidden, intermediate, **GPT_OSS) for _ in range(layers)]
        for index, layer in enumerate(self.experts):
            layer.given.w13_weight = layer.given.w13_weight.roll(index, 0)  # the layers differ
            layer.prepare()
        self.weights = [
            LayerWeights(
                self.normal(hidden, width) / width**0.5, self.normal(hidden), self.normal(hidden),
                2 * self.normal(experts, hidden) / hidden**0.5, self.normal(experts), layer.prepared,
            )
            for layer in self.experts
        ]  # fmt: skip
        self.plan = self.experts[0].plan
        self.attended, self.residual = self.normal(layers, tokens, width), self.normal(tokens, hidden)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.random.device).to(BF16)

    def run(self, ctas: int | None = None, launches: int = 1, **options: Any) -> tuple[Tensor, PersistentLayers]:
        """Launches the layers some times. Returns the outputs of all layers, and the launch object."""
        layers = PersistentLayers(self.weights, self.attended, self.plan, ctas=ctas, **options)
        out = torch.full((*self.attended.shape[:2], self.plan.hidden_size), torch.nan, dtype=BF16, device=self.attended.device)
        for _ in range(launches):
            layers(self.residual, out)
        return out, layers

    def check(self, out: Tensor) -> None:
        """Compares each layer's output with a float64 computation that starts from the kernel's output of the preceding layer."""
        residual = self.residual
        for weights, layer, attended, got in zip(self.weights, self.experts, self.attended, out, strict=True):
            projected = (attended.double() @ weights.projection.double().t() + weights.projection_bias.double()).to(BF16)
            total = (projected.double() + residual.double()).to(BF16)
            scale = (total.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            normed = (total.double() * scale * weights.norm.double()).to(BF16)
            logits = (normed.double() @ weights.router.double().t() + weights.router_bias.double()).to(BF16)
            # Among equal logits, the expert with the lower id comes first.
            largest, ids = (each[:, : self.plan.top_k] for each in logits.double().sort(stable=True, descending=True))
            expert = moe_apply.operator.body(normed.double(), layer.given, largest.softmax(-1).float(), ids.int(), self.plan)
            error = (got.double() - total.double() - expert).abs()
            assert not error.isnan().any()
            # Activations, the experts' sum and the output are rounded to bfloat16. The emulated cases have only 64 to 160
            # intermediate features, so these rounding errors do not average out. The tolerances are therefore multiples of
            # bfloat16's eps.
            size, eps = torch.maximum(expert.abs(), total.double().abs()), torch.finfo(BF16).eps
            assert error.max() <= 2 * eps * size.max()
            assert error.square().mean().sqrt() <= 0.8 * eps * size.square().mean().sqrt()
            residual = got


@pytest.fixture
def hopper() -> Any:
    pytest.importorskip("cutlass")
    emulator = pytest.importorskip("sm90_emulator")
    if torch.cuda.is_available():
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    return emulator.emulated_sm90


# All cases have a seed. Without a seed, the emulator runs CTAs in order, and polls take millions of instructions.
@pytest.mark.parametrize(
    ("sizes", "ctas", "room"),
    [
        ((1, 2, 64, 96, 8, 2, 512), 3, 1),
        ((3, 2, 96, 64, 8, 4, 1024), 4, 8),
        ((8, 1, 64, 64, 16, 4, 512), 5, 8),
        ((4, 1, 96, 64, 8, 2, 4096), 4, 8),  # the projection has more stages than the ring buffer
        pytest.param((8, 2, 192, 160, 128, 4, 1536), 11, 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers(hopper: Any, sizes: tuple[int, ...], ctas: int, room: int) -> None:
    """Runs warps and copies at random times, then copies as late as permitted. All results must be bitwise equal, also those of a
    second launch."""
    model = Model(*sizes)
    found = []
    for options in ({"seed": 1}, {"seed": 2}, {"seed": 3, "copies": "late"}):
        with hopper(**options):
            out, launched = model.run(ctas, launches=2, config=config_of(room), ahead=4096)
            assert not launched.failed
            assert launched.counters_are_zero
        found.append(out)
    model.check(found[0])
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("options", [{}, {"exchange": "counter"}, {"cooperative": True}], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_layers_on_the_device(sm90: torch.device, tokens: int, options: dict[str, Any]) -> None:
    """Asserts that launches and replays of a graph give bitwise equal results."""
    model = Model(tokens, 3, 2880, 2880, 32, 4, 4096, sm90)
    out, launched = model.run(config=config_of(tokens, **options), ahead=1 << 16)
    assert not launched.failed
    model.check(out)
    again = torch.empty_like(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launched(model.residual, again)
    for _ in range(20):
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again, out)
    assert not launched.failed
    assert launched.counters_are_zero


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"exchange": "counter"}, {"slab": 5}, {"most": 9}, {"cooperative": True}], ids=str)
def test_variants(hopper: Any, options: dict[str, Any]) -> None:
    """Asserts that the variants which the benchmark measures give bitwise equal results."""
    model = Model(2, 2, 64, 96, 8, 2, 512)
    with hopper(seed=1):
        out, launched = model.run(3, config=config_of(2, **options), ahead=4096)
        assert not launched.failed
        wanted, _ = model.run(3, config=config_of(2))
    model.check(out)
    assert torch.equal(out, wanted)


def test_trace(hopper: Any) -> None:
    """Asserts that each CTA stores all events of each layer in order, and that results are bitwise equal with and without the
    trace."""
    model = Model(1, 3, 96, 96, 8, 2, 512)
    with hopper(seed=1):
        out, launched = model.run(4, launches=2, config=config_of(1, trace=True))
        assert not launched.failed
        assert launched.counters_are_zero
        wanted, _ = model.run(4)
    assert torch.equal(out, wanted)
    events, (begin, timer, end, timer_at_end) = launched.trace[:, :-1], launched.trace[:, -1, :4].T
    assert (timer_at_end > timer).all()
    chain = events[..., :CHAIN].flatten(1)
    assert (chain.diff(dim=1) > 0).all()
    assert (chain[:, 0] > begin).all()
    producer, epilogue = events[..., CHAIN:].split((PRODUCED, len(EVENTS) - CHAIN - PRODUCED), dim=-1)
    assert (producer.flatten(1).diff(dim=1) > 0).all()
    assert (epilogue.flatten(1).diff(dim=1) > 0).all()
    assert (events.flatten(1) < end[:, None]).all()


def test_waits_give_up(hopper: Any) -> None:
    """Asserts that a launch whose waits may poll only once ends, and is marked as failed."""
    model = Model(1, 2, 64, 96, 8, 2, 512)
    with hopper(seed=1):
        _, launched = model.run(3, polls=1)
        assert launched.failed
        launched.reset()
        assert not launched.failed


def test_shared_memory() -> None:
    for config in every_config():
        used = OTHER_BYTES + ROUTER_BYTES + config.rows_room + config.partials_bytes
        used += BUFFERS * (config.sums_bytes + PANEL_HEAD_BYTES)
        assert used + config.stages * config.stage_bytes <= SHARED_BYTES
        assert config.stages >= GROUPS
        assert config.stages % GROUPS == 0
        assert config.stage_bytes >= TILE * PART_PITCH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 9, "top_k": 2}, "tokens must be at most 8, got 9"),
        ({"top_k": 8, "tokens": 5}, "tokens \\* top_k must be at most 32, got 40"),
        ({"width": 768}, "width must be a multiple of 512, got 768"),
        ({"hidden": 96, "ctas": 3}, "rows of the projection on a CTA must be at most 24, got 32"),
        ({"experts": 6}, "num_experts must be a multiple of 4, got 6"),
    ],
)
def test_unsupported_sizes(change: dict[str, Any], message: str) -> None:
    sizes = {
        "tokens": 1,
        "layers": 1,
        "hidden": 64,
        "intermediate": 64,
        "experts": 8,
        "top_k": 2,
        "width": 512,
        "ctas": 3,
        **change,
    }
    ctas = sizes.pop("ctas")
    with pytest.raises(ValueError, match=message):
        Model(**sizes).run(ctas)
