"""Experts for many tokens against float32, and what the schedule can need."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.platform import cpu_platform
from tokenspeed_kernel_nvidia.sm90.moe import grouped, mxfp4_layout
from tokenspeed_kernel_nvidia.sm90.moe.grouped_config import Schedule, every_schedule, most_tiles

GPT_OSS: dict[str, Any] = {"w13_interleaved": True, "bias": True, "alpha": 1.702, "limit": 7.0, "beta": 1.0}
COLUMNS = [schedule.columns for schedule in every_schedule()]


class Layer:
    """A layer with random weights, as it is given and as the kernels want it."""

    def __init__(self, device: torch.device, experts: int, top_k: int, hidden: int, intermediate: int, **options: Any) -> None:
        self.plan: MoEPlan = moe_apply.plan(
            experts, top_k, hidden, intermediate, weight_format="mxfp4", platform=cpu_platform(),
            override="reference_moe_apply", **options,
        )  # fmt: skip
        self.random = torch.Generator(device).manual_seed(hidden + intermediate + experts)
        self.device = device
        self.given = MoEWeights(*self._projection(2 * intermediate, hidden), *self._projection(hidden, intermediate))
        self.prepared = mxfp4_layout.prepare_weights(self.given, self.plan)

    def _projection(self, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
        experts, exponent = self.plan.num_experts, 127 + round(torch.tensor(k**-0.5 / 3).log2().item())
        codes = self._integers(0, 256, experts, rows, k // 2).to(torch.uint8)
        scale = self._integers(exponent - 2, exponent + 3, experts, rows, k // 32).to(torch.uint8)
        return codes, scale, self._normal(experts, rows) * 0.2 if self.plan.bias else None

    def _integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random, device=self.device)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.device)

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, weights of experts, and experts, no expert twice for a token."""
        chosen = torch.rand(count, self.plan.num_experts, generator=self.random, device=self.device).topk(self.plan.top_k).indices
        weights = torch.softmax(self._normal(count, self.plan.top_k), -1)
        return self._normal(count, self.plan.hidden_size).to(self.plan.dtype), weights, chosen.int()

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, out: Tensor | None = None, columns: int | None = None) -> Tensor:
        return grouped.moe_apply_many(x, self.prepared, weights, ids, self.plan, out, columns=columns)

    def wanted(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = moe_apply.operator.body(x.float(), self.given, weights, ids, self.plan)
        return result

    def check(self, x: Tensor, weights: Tensor, ids: Tensor, columns: int | None = None) -> None:
        compare(self.run(x, weights, ids, columns=columns), self.wanted(x, weights, ids))


def compare(got: Tensor, wanted: Tensor) -> None:
    """Errors as roundings of the activation, of each slot, and of the result make them."""
    assert got.shape == wanted.shape
    if not wanted.numel():
        return
    eps, error = torch.finfo(got.dtype).eps, (got.float() - wanted).abs()
    assert not error.isnan().any()
    assert error.max() <= 3 * eps * wanted.abs().max()
    assert error.square().mean().sqrt() <= 0.6 * eps * wanted.square().mean().sqrt()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 150, 700, 2500])
def test_tokens(sm90: torch.device, tokens: int, columns: int) -> None:
    layer = Layer(sm90, 16, 4, 256, 192, **GPT_OSS)
    layer.check(*layer.tokens(tokens), columns=columns)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(
    "count", [*range(1, 40), 41, 47, 48, 49, 56, 57, 63, 64, 65, 79, 80, 81, 96, 112, 127, 143, 159, 160, 161, 213, 320, 373]
)
def test_every_width_of_a_tile(sm90: torch.device, count: int, columns: int) -> None:
    """One expert has so many pairs, another one less."""
    layer = Layer(sm90, 4, 1, 64, 192, **GPT_OSS)
    x, weights, ids = layer.tokens(2 * count - 1)
    ids[:count], ids[count:] = 2, 1
    layer.check(x, weights, ids, columns=columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "intermediate"),
    [
        (8, 2, 32, 32),
        (8, 2, 96, 64),
        (5, 3, 160, 224),
        (4, 2, 2880, 96),
        (4, 2, 96, 2880),
        (384, 8, 128, 128),
        (3, 1, 704, 448),
        (33, 7, 64, 800),
    ],
)
@pytest.mark.parametrize("columns", COLUMNS)
def test_shapes(
    sm90: torch.device, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype, columns: int
) -> None:
    layer = Layer(sm90, experts, top_k, hidden, intermediate, dtype=dtype, **GPT_OSS)
    layer.check(*layer.tokens(300), columns=columns)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"limit": 0.5}, {"w13_interleaved": True, "beta": 0.5}], ids=str)
def test_options(sm90: torch.device, options: dict[str, Any]) -> None:
    layer = Layer(sm90, 8, 2, 192, 160, **options)
    layer.check(*layer.tokens(200))


@pytest.mark.parametrize("columns", COLUMNS)
def test_skipped_slots_and_empty_experts(sm90: torch.device, columns: int) -> None:
    layer = Layer(sm90, 16, 4, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(500)
    ids[ids % 3 == 0] = -1
    ids[17] = -7
    weights[ids < 0] = torch.nan
    got = layer.run(x, weights, ids, columns=columns)
    compare(got, layer.wanted(x, weights, ids))
    assert (got[17] == 0).all()
    assert (layer.run(x, weights, torch.full_like(ids, -1), columns=columns) == 0).all()


def test_one_expert_for_all(sm90: torch.device) -> None:
    layer = Layer(sm90, 16, 2, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(3000)
    layer.check(x, weights, torch.full_like(ids, 5))  # twice by each token


def test_no_tokens(sm90: torch.device) -> None:
    layer = Layer(sm90, 4, 2, 64, 64)
    assert layer.run(*layer.tokens(0)).shape == (0, 64)


def test_strides(sm90: torch.device) -> None:
    layer = Layer(sm90, 8, 2, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(200)
    wanted = layer.wanted(x, weights, ids)
    wide_x, wide_out = (torch.full((200, 400), 7.0, dtype=x.dtype, device=sm90) for _ in range(2))
    weights, ids = weights.t().contiguous().t(), ids.t().contiguous().t()
    for first in (8, 3):  # rows at multiples of 16 bytes, and not
        wide_x[:, first : first + 192] = x
        out = wide_out[:, first : first + 192]
        assert layer.run(wide_x[:, first : first + 192], weights, ids, out) is out
        compare(out, wanted)
    assert (wide_out[:, :3] == 7).all()
    assert (wide_out[:, 200:] == 7).all()


def test_nan_stays_in_its_token(sm90: torch.device) -> None:
    layer = Layer(sm90, 8, 2, 96, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(200)
    x[77, 40] = torch.nan
    got, wanted = layer.run(x, weights, ids), layer.wanted(x, weights, ids)
    assert got[77].isnan().all()
    others = torch.arange(200, device=sm90) != 77
    compare(got[others], wanted[others])


@pytest.mark.parametrize("columns", COLUMNS)
def test_same_bits_every_time(sm90: torch.device, columns: int) -> None:
    layer = Layer(sm90, 32, 4, 960, 640, **GPT_OSS)
    call = layer.tokens(900)
    first = layer.run(*call, columns=columns)
    for _ in range(20):
        assert torch.equal(layer.run(*call, columns=columns), first)


def test_graph_replay_with_other_experts(sm90: torch.device) -> None:
    layer = Layer(sm90, 16, 4, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(400)
    layer.run(x, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run(x, weights, ids)
    for _ in range(3):
        graph.replay()
        compare(out, layer.wanted(x, weights, ids))
        _, _, others = layer.tokens(400)
        ids.copy_(torch.where(others > 3, others, -1))


def test_kernels_that_overlap(sm90: torch.device) -> None:
    """In a graph, kernels begin while the ones before end: each output is the next call's tokens."""
    layer = Layer(sm90, 16, 4, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(300)
    wanted = x
    for _ in range(8):
        wanted = layer.run(wanted, weights, ids)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(8):
            out = layer.run(out, weights, ids)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.slow
def test_random_layers(sm90: torch.device) -> None:
    draw = random.Random(3)
    for _ in range(40):
        experts = draw.randrange(1, 60)
        layer = Layer(
            sm90, experts, draw.randrange(1, min(experts, 8) + 1), 32 * draw.randrange(1, 20), 32 * draw.randrange(1, 20),
            dtype=draw.choice((torch.bfloat16, torch.float16)), bias=draw.random() < 0.5, w13_interleaved=draw.random() < 0.5,
        )  # fmt: skip
        x, weights, ids = layer.tokens(draw.choice((1, 5, draw.randrange(100), draw.randrange(2000))))
        if draw.random() < 0.5:
            ids[ids % 4 == 1] = -1
        layer.check(x, weights, ids, columns=draw.choice(COLUMNS))


def tiles_of(counts: list[int], schedule: Schedule) -> list[int]:
    """Pairs of each tile, as the schedule cuts them."""
    tiles = []
    for count in counts:
        many, left = divmod(count, schedule.columns)
        if left and many and left < schedule.least:
            rest = (left + schedule.columns + 15) // 16 * 8
            tiles += [schedule.columns] * (many - 1) + [rest, left + schedule.columns - rest]
        else:
            tiles += [schedule.columns] * many + [left] * (left > 0)
    return tiles


@pytest.mark.parametrize("schedule", every_schedule(), ids=str)
def test_room_for_all_tiles(schedule: Schedule) -> None:
    draw = random.Random(1)
    for _ in range(500):
        counts = [draw.choice((0, 1, schedule.columns, draw.randrange(1000))) for _ in range(draw.randrange(1, 40))]
        tiles = tiles_of(counts, schedule)
        assert sum(tiles) == sum(counts)
        assert all(0 < tile <= schedule.columns for tile in tiles)
        assert len(tiles) <= most_tiles(sum(counts), len(counts), schedule.columns)
