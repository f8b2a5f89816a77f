"""Tests layers of a decode step in one persistent launch, on the emulator, against float64. Also tests the launcher's checks."""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.decoder.weights import REPLICATED, DecoderLayer
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_HEAD_BYTES
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    CHAIN,
    DENSE,
    EVENTS,
    EXCHANGES,
    HEAD_DIM,
    OTHER_BYTES,
    PART_BYTES,
    PARTIALS,
    PRODUCED,
    QKV,
    ROUTER_BYTES,
    TILE,
    Config,
    Dense,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.layers.variants import PersistentLayers
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import BUFFERS, GROUPS, SHARED_BYTES

from .experts import GPT_OSS, RandomLayer

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def values_of(layer: DecoderLayer, name: str) -> Tensor:
    """Returns a weight of qkv or of the projection in float64."""
    weight, scale = getattr(layer, name), getattr(layer, f"{name}_scale")
    return weight.double() if scale is None else weight.double() * scale.double()


class Model:
    """Some layers with random weights and caches, and a token of each sequence."""

    def __init__(
        self,
        tokens: int,
        layers: int,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        kv_heads: int,
        group: int,
        keys: int,
        page_size: int = 16,
        device: torch.device = CPU,
        dense: str = "bfloat16",
        seed: int = 0,
    ) -> None:
        """``keys``: the largest number of keys of a sequence; ``dense``: the format of the weights of qkv and of the projection.
        Layers alternate between a window and all keys."""
        self.random = torch.Generator(device).manual_seed(tokens + layers + hidden + seed)
        self.experts = [RandomLayer(device, experts, top_k, hidden, intermediate, **GPT_OSS) for _ in range(layers)]
        for index, layer in enumerate(self.experts):
            layer.given.w13_weight = layer.given.w13_weight.roll(index + seed, 0)  # the layers and ranks differ
            layer.prepare()
        self.tokens, self.kv_heads, self.heads = tokens, kv_heads, kv_heads * group
        rows, width = (self.heads + 2 * kv_heads) * HEAD_DIM, self.heads * HEAD_DIM
        self.weights = [
            DecoderLayer(
                input_norm=1 + self.normal(hidden) / 8,
                **self.projection("qkv", dense, rows, hidden, 2.0),
                qkv_bias=self.normal(rows) / 4,
                sinks=self.normal(self.heads).float(),
                window_left=-1 if index % 2 else max(keys // 3, 1) - 1,
                **self.projection("projection", dense, hidden, width),
                projection_bias=self.normal(hidden),
                norm=self.normal(hidden),
                router=2 * self.normal(experts, hidden) / hidden**0.5,
                router_bias=self.normal(experts),
                experts=layer.prepared,
            )
            for index, layer in enumerate(self.experts)
        ]
        self.plan = self.experts[0].plan
        self.x = self.normal(tokens, hidden)
        # Sequences from the longest to the shortest, some of which have a single split. Pages that no sequence has hold NaN.
        self.lengths = torch.tensor([max(keys // (1 + 3 * each), 1) for each in range(tokens)], dtype=torch.int32, device=device)
        each = -(-keys // page_size)
        count = tokens * each + 3
        order = torch.randperm(count, generator=self.random, device=device).int()
        self.pages = order[: tokens * each].view(tokens, each)
        self.caches = [(self.cache(count, page_size), self.cache(count, page_size)) for _ in range(layers)]
        newest = (self.lengths - 1).long()
        pages = self.pages.gather(1, (newest // page_size)[:, None])[:, 0]
        self.slots = pages.long() * page_size + newest % page_size
        angles = torch.rand(keys, HEAD_DIM // 2, generator=self.random, device=device) * 6
        self.table = torch.cat((angles.cos(), angles.sin()), 1)

    def cache(self, pages: int, page_size: int) -> Tensor:
        made = torch.full((pages, page_size, self.kv_heads, HEAD_DIM), torch.nan, dtype=BF16, device=self.x.device)
        for token, length in zip(range(self.tokens), self.lengths.tolist(), strict=True):
            for key in range(length - 1):
                made[self.pages[token, key // page_size], key % page_size] = self.normal(self.kv_heads, HEAD_DIM)
        return made

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.random.device).to(BF16)

    def projection(self, name: str, dense: str, rows: int, k: int, scale: float = 1.0) -> dict[str, Tensor]:
        """Returns a weight and, if it is fp8, its scales, which differ from row to row."""
        weight = scale * self.normal(rows, k) / k**0.5
        if dense == "bfloat16":
            return {name: weight}
        codes, scales = quantize_fp8(weight * (1 + torch.arange(rows, device=weight.device)[:, None] % 5))
        return {name: codes, f"{name}_scale": scales / 2}

    def run(self, ctas: int | None = None, launches: int = 1, **options: Any) -> tuple[Tensor, PersistentLayers]:
        """Launches the layers some times. Returns the outputs of all layers, and the launch object."""
        tokens, hidden = self.x.shape
        layers = PersistentLayers(self.weights, self.caches, tokens, self.table, self.plan, ctas=ctas, **options)
        out = torch.full((len(self.weights), tokens, hidden), torch.nan, dtype=BF16, device=self.x.device)
        for _ in range(launches):
            layers(self.x, out, self.lengths, self.pages, self.slots)
        return out, layers

    def attended(self, index: int, x: Tensor) -> Tensor:
        """Computes a layer's attention in float64, and compares the new keys and values with those in the cache."""
        weights, (k_cache, v_cache) = self.weights[index], self.caches[index]
        scale = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        normed = (x.double() * scale * weights.input_norm.double()).to(BF16)
        qkv = (normed.double() @ values_of(weights, "qkv").t() + weights.qkv_bias.double()).to(BF16).double()
        heads = qkv.view(self.tokens, -1, HEAD_DIM)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        cos, sin = self.table.double()[(self.lengths - 1).long()][:, None].chunk(2, -1)
        halves = ((q, q.roll(HEAD_DIM // 2, -1)), (k, k.roll(HEAD_DIM // 2, -1)))
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        q, k = ((x * cos + other * sin).to(BF16).double() for x, other in halves)
        page_size, group = k_cache.shape[1], self.heads // self.kv_heads
        found = []
        for token, length in enumerate(self.lengths.tolist()):
            slot = int(self.slots[token])
            if slot >= 0:
                for cache, new in ((k_cache, k), (v_cache, v)):
                    stored = cache[slot // page_size, slot % page_size].double()
                    assert (stored - new[token]).abs().max() <= 2 * torch.finfo(BF16).eps * new[token].abs().max()
            first = 0 if weights.window_left < 0 else max(length - 1 - weights.window_left, 0)
            at = torch.arange(first, length - 1, device=x.device)
            pages = self.pages[token].long()[at // page_size]
            keys, values = (
                torch.cat((cache[pages, at % page_size].double(), new[token : token + 1])).repeat_interleave(group, 1)
                for cache, new in ((k_cache, k), (v_cache, v))
            )
            scores = torch.einsum("hd,khd->hk", q[token], keys) * HEAD_DIM**-0.5
            sums = torch.cat((scores, weights.sinks.double()[:, None]), 1).softmax(-1)[:, :-1]
            found.append(torch.einsum("hk,khd->hd", sums, values).flatten())
        return torch.stack(found).to(BF16)

    def check(self, out: Tensor) -> None:
        """Compares each layer's output with a float64 computation that starts from the kernel's output of the preceding layer."""
        check([self], out)

    def projected(self, index: int, x: Tensor) -> Tensor:
        """Computes the output projection of a layer in float64."""
        weights, attended = self.weights[index], self.attended(index, x).double()
        return attended @ values_of(weights, "projection").t() + weights.projection_bias.double()


def check(ranks: list[Model], out: Tensor) -> None:
    """Like `Model.check`, for the outputs of layers that ranks share."""
    x, (first, plan) = ranks[0].x, (ranks[0], ranks[0].plan)
    compared: list[Tensor] = []
    for index, (weights, got) in enumerate(zip(first.weights, out, strict=True)):
        parts = [model.projected(index, x) for model in ranks]
        projected = parts[0].to(BF16).double() if len(parts) == 1 else torch.stack(parts).sum(0)
        total = (projected + x.double()).to(BF16)
        scale = (total.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        normed = (total.double() * scale * weights.norm.double()).to(BF16)
        logits = (normed.double() @ weights.router.double().t() + weights.router_bias.double()).to(BF16)
        # Among equal logits, the expert with the lower id comes first.
        ordered, experts = logits.double().sort(stable=True, descending=True)
        largest, ids = ordered[:, : plan.top_k], experts[:, : plan.top_k]
        # The kernel sums in another order. So logits differ by a rounding step, and a token at a near tie may have another expert.
        gaps = ordered[:, plan.top_k - 1] - ordered[:, plan.top_k]
        certain = gaps > 2 * torch.finfo(BF16).eps * ordered.abs().amax(-1)
        compared.append(certain)
        each = [
            moe_apply.operator.body(normed.double(), model.experts[index].given, largest.softmax(-1).float(), ids.int(), plan)
            for model in ranks
        ]
        expert = torch.stack(each).sum(0)
        error = (got.double() - total.double() - expert).abs()
        assert not error.isnan().any()
        # Activations, the experts' sum and the output are rounded to bfloat16. The emulated cases have only 64 to 160
        # intermediate features, so these rounding errors do not average out. The tolerances are therefore multiples of
        # bfloat16's eps.
        size, eps = torch.maximum(expert.abs(), total.double().abs()), torch.finfo(BF16).eps
        if certain.any():
            assert error[certain].max() <= 3 * eps * size[certain].max()
            assert error[certain].square().mean().sqrt() <= eps * size[certain].square().mean().sqrt()
        x = got
    assert torch.stack(compared).double().mean() >= 0.5, "too few tokens have certain experts"


def shared_model(count: int, *sizes: Any, **options: Any) -> list[Model]:
    """Returns the models of ranks that share layers: they have the same input, norms and routers, and different other weights."""
    ranks = [Model(*sizes, seed=rank, **options) for rank in range(count)]
    first = ranks[0]
    for model in ranks[1:]:
        model.x = first.x
        model.weights = [
            dataclasses.replace(
                mine, projection_bias=torch.zeros_like(its.projection_bias),
                **{name: getattr(its, name) for name in REPLICATED},
            )
            for mine, its in zip(model.weights, first.weights, strict=True)
        ]  # fmt: skip
    return ranks


@pytest.fixture
def hopper() -> Any:
    pytest.importorskip("cutlass")
    emulator = pytest.importorskip("sm90_emulator")
    if torch.cuda.is_available():
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    return emulator.emulated_sm90


# All cases have a seed. Without a seed, the emulator runs CTAs in order, and polls take millions of instructions.
@pytest.mark.parametrize(
    ("sizes", "ctas", "tiles", "dense"),
    [
        ((1, 2, 64, 96, 8, 2, 1, 2, 300), 5, 8, "bfloat16"),
        ((3, 2, 96, 64, 8, 4, 1, 3, 400), 7, 8, "bfloat16"),
        ((1, 2, 320, 320, 8, 2, 1, 2, 40), 7, 6, "bfloat16"),  # panels of two slabs, some of which are split
        # parts of several slabs for each warpgroup
        pytest.param((1, 1, 1536, 128, 4, 2, 1, 2, 20), 5, 40, "bfloat16", marks=pytest.mark.slow),
        pytest.param((2, 2, 192, 64, 16, 4, 2, 8, 100), 33, 5, "bfloat16", marks=pytest.mark.slow),
        ((1, 2, 64, 96, 8, 2, 1, 2, 40), 5, 8, "float8_e4m3fn"),
        ((3, 2, 128, 64, 8, 4, 1, 3, 100), 7, 8, "float8_e4m3fn"),
        # warps with three and with four chunks of a part, as in rows of 2880; one more chunk; parts of several slabs
        ((1, 1, 960, 64, 4, 2, 1, 4, 20), 21, 6, "float8_e4m3fn"),
        pytest.param((1, 1, 1152, 128, 4, 2, 1, 2, 20), 9, 16, "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param((1, 1, 2880, 64, 4, 2, 1, 2, 20), 73, 5, "float8_e4m3fn", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers(hopper: Any, sizes: tuple[int, ...], ctas: int, tiles: int, dense: Dense) -> None:
    """Runs warps and copies at random times, then copies as late as permitted. All results must be bitwise equal, also those of a
    second launch."""
    model = Model(*sizes, dense=dense)
    found = []
    for options, counted in (({"seed": 1}, EXCHANGES), ({"seed": 2}, ()), ({"seed": 3, "copies": "late"}, EXCHANGES)):
        with hopper(**options):
            out, launched = model.run(ctas, launches=2, config=config_of(sizes[0], tiles=tiles, counted=counted, dense=dense))
            assert not launched.failed
            assert launched.counters_are_zero
        found.append(out)
    model.check(found[0])
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_negative_slots_are_not_stored(hopper: Any, dtype: torch.dtype) -> None:
    """The lower halves of the int64 slots are 1, 0 and 5, which are slots of the cache."""
    model = Model(4, 1, 64, 64, 8, 2, 1, 2, 40)
    negative = [-(2**32) + 1, -(2**63), -(2**40) + 5] if dtype == torch.int64 else [-1, -(2**31), -7]
    model.slots = torch.tensor([*negative, int(model.slots[3])]).to(dtype)
    before = [[cache.clone() for cache in caches] for caches in model.caches]
    with hopper(seed=1):
        out, _ = model.run(5, config=config_of(4, tiles=8))
    model.check(out)
    page_size = before[0][0].shape[1]
    page, offset = divmod(int(model.slots[3]), page_size)
    for caches, others in zip(model.caches, before, strict=True):
        for cache, other in zip(caches, others, strict=True):
            assert not cache[page, offset].isnan().any()
            other[page, offset] = cache[page, offset]
            assert torch.equal(cache.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("power", [-60, 60])
def test_the_range_of_tokens_with_fp8_weights(hopper: Any, power: int) -> None:
    """Tokens are converted to float16, whose range is narrower than bfloat16's. A chunk has large and small elements, and values
    are much larger or much smaller than float16's."""
    model = Model(2, 1, 128, 64, 8, 2, 2, 2, 1, dense="float8_e4m3fn")
    (layer,) = model.weights
    sizes = torch.tensor([2.0**-30, 1.0, 2.0**20, 1.0]).repeat_interleave(32).to(BF16)
    qkv_scale, qkv_bias = layer.qkv_scale * 2.0**-20, layer.qkv_bias.clone()
    for head, factor in ((-1, 2.0**power), (-2, 2.0 ** (power - 8))):
        values = slice(len(qkv_bias) + head * HEAD_DIM, len(qkv_bias) + (head + 1) * HEAD_DIM)
        qkv_scale[values] *= factor
        qkv_bias[values] *= factor
    projection_scale = layer.projection_scale * 2.0**-power
    changes = {"input_norm": layer.input_norm * sizes, "qkv_scale": qkv_scale, "qkv_bias": qkv_bias}
    model.weights = [dataclasses.replace(layer, **changes, projection_scale=projection_scale)]
    with hopper(seed=1):
        out, launched = model.run(8, config=config_of(2, tiles=8, dense="float8_e4m3fn"))
        assert not launched.failed
    model.check(out)


def launch_each(launched: PersistentLayers, model: Model, out: Tensor) -> None:
    """Launches the layers once for each part of ``out``."""
    for each in out:
        launched(model.x, each, model.lengths, model.pages, model.slots)


def launched_by_ranks(ranks: list[Model], layers: int, ctas: int, config: Config) -> list[PersistentLayers]:
    """Returns the launch objects of ranks that share some layers."""
    launched = [
        PersistentLayers(
            model.weights[:layers],
            model.caches[:layers],
            model.tokens,
            model.table,
            model.plan,
            ctas=ctas,
            config=config,
            rank=rank,
        )
        for rank, model in enumerate(ranks)
    ]
    for each in launched:
        each._memory.share_memory_()  # on a CPU, a process of its own runs each rank
    for each in launched:
        each.connect([other.address for other in launched])
    return launched


@pytest.mark.parametrize(
    ("count", "sizes", "ctas", "tiles", "dense"),
    [
        (2, (1, 2, 64, 96, 8, 2, 1, 2, 300), 5, 8, "bfloat16"),
        pytest.param(2, (3, 2, 96, 64, 8, 4, 1, 3, 60), 7, 8, "bfloat16", marks=pytest.mark.slow),
        pytest.param(2, (1, 2, 64, 96, 8, 2, 1, 2, 40), 5, 8, "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param(3, (2, 2, 64, 96, 8, 2, 1, 2, 40), 6, 8, "bfloat16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_that_ranks_share(hopper: Any, count: int, sizes: tuple[int, ...], ctas: int, tiles: int, dense: Dense) -> None:
    """Each rank is a process, which emulates its GPU. The processes share the scratch memory. All ranks' results must be bitwise
    equal, in each of three launches, whichever rank is ahead."""
    ranks, found = shared_model(count, *sizes, dense=dense), []
    for cache in (cache for model in ranks for both in model.caches for cache in both):
        cache.share_memory_()
    layers, (tokens, hidden) = sizes[1], ranks[0].x.shape
    fork = multiprocessing.get_context("fork")
    for options, counted in (({"seed": 1}, EXCHANGES), ({"seed": 2}, ()), ({"seed": 3, "copies": "late"}, EXCHANGES)):
        outputs = []
        for first in range(1, layers + 1):  # only the last layer's output is stored
            with hopper(**options, patience=10**9):  # a process may start much later than another
                config = config_of(tokens, tiles=tiles, counted=counted, ranks=count, dense=dense)
                launched = launched_by_ranks(ranks, first, ctas, config)
                out = torch.full((count, 3, first, tokens, hidden), torch.nan, dtype=BF16).share_memory_()
                processes = [fork.Process(target=launch_each, args=each) for each in zip(launched, ranks, out, strict=True)]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join()
                assert [process.exitcode for process in processes] == [0] * count
                assert not any(each.failed for each in launched)
                assert all(each.counters_are_zero for each in launched)
            results = out[:, :, -1]
            assert (results == results[0, 0]).all()
            outputs.append(results[0, 0].clone())
        found.append(torch.stack(outputs))
    check(ranks, found[0])
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("options", [{}, {"counted": ()}, {"cooperative": True}], ids=str)
@pytest.mark.parametrize("dense", DENSE)
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1000), (3, 3000), (8, 777)])
def test_layers_on_the_device(sm90: torch.device, tokens: int, keys: int, dense: Dense, options: dict[str, Any]) -> None:
    """Asserts that launches and replays of a graph give bitwise equal results."""
    model = Model(tokens, 4, 2880, 2880, 32, 4, 8, 8, keys, 64, sm90, dense)
    out, launched = model.run(config=config_of(tokens, **options, dense=dense))
    assert not launched.failed
    model.check(out)
    again = torch.empty_like(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launched(model.x, again, model.lengths, model.pages, model.slots)
    for _ in range(20):
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again, out)
    assert not launched.failed
    assert launched.counters_are_zero


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1000), (4, 777)])
def test_ranks_on_one_device(sm90: torch.device, tokens: int, keys: int) -> None:
    """Each rank is a stream, with half of the SMs. All results must be bitwise equal, of both ranks and in every launch."""
    ranks = shared_model(2, tokens, 2, 2880, 1440, 32, 4, 4, 8, keys, 64, sm90)
    sms = torch.cuda.get_device_properties(sm90).multi_processor_count
    streams = [torch.cuda.Stream(sm90) for _ in ranks]
    outputs = []
    for layers in (1, 2):
        launched = launched_by_ranks(ranks, layers, sms // 2, config_of(tokens, ranks=2, tiles=6))
        out = torch.full((2, 20, layers, *ranks[0].x.shape), torch.nan, dtype=BF16, device=sm90)
        torch.cuda.synchronize(sm90)
        for launch in range(20):
            for rank, model in enumerate(ranks):
                with torch.cuda.stream(streams[(rank + launch) % 2]):
                    launched[rank](model.x, out[rank, launch], model.lengths, model.pages, model.slots)
            torch.cuda.synchronize(sm90)
        assert not any(each.failed for each in launched)
        results = out[:, :, -1]
        assert (results == results[0, 0]).all()
        outputs.append(results[0, 0])
    check(ranks, torch.stack(outputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"counted": ()}, {"counted": (QKV, PARTIALS)}, {"slab": 5}, {"most": 9}, {"cooperative": True}], ids=str
)
def test_variants(hopper: Any, options: dict[str, Any]) -> None:
    """Asserts that the variants which the benchmark measures give bitwise equal results."""
    model = Model(2, 2, 64, 96, 8, 2, 1, 2, 40)
    with hopper(seed=1):
        out, launched = model.run(7, config=config_of(2, **options))
        assert not launched.failed
        wanted, _ = model.run(7, config=config_of(2))
    model.check(out)
    assert torch.equal(out, wanted)


def test_trace(hopper: Any) -> None:
    """Asserts that each CTA stores all events of each layer in order, and that results are bitwise equal with and without the
    trace."""
    model = Model(1, 3, 96, 96, 8, 2, 1, 2, 50)
    with hopper(seed=1):
        out, launched = model.run(4, launches=2, config=config_of(1, trace=True, tiles=8))
        assert not launched.failed
        assert launched.counters_are_zero
        wanted, _ = model.run(4, config=config_of(1, tiles=8))
    assert torch.equal(out, wanted)
    events, (begin, timer, end, timer_at_end) = launched.trace[:, :-1], launched.trace[:, -1, :4].T
    assert (timer_at_end > timer).all()
    # A CTA lacks events: a layer with few keys has one split.
    for of_cta, first in zip(events[..., :CHAIN].flatten(1), begin, strict=True):
        present = of_cta[of_cta != 0]
        assert len(present) >= len(of_cta) - 4 * len(model.weights)
        assert (present.diff() > 0).all()
        assert present[0] > first
    producer, epilogue = events[..., CHAIN:].split((PRODUCED, len(EVENTS) - CHAIN - PRODUCED), dim=-1)
    assert (producer.flatten(1).diff(dim=1) > 0).all()
    assert (epilogue.flatten(1).diff(dim=1) > 0).all()
    assert (events.flatten(1) < end[:, None]).all()


def test_waits_give_up(hopper: Any) -> None:
    """Asserts that a launch whose waits may poll only once ends, is marked as failed, and has NaN as its result."""
    model = Model(1, 2, 64, 96, 8, 2, 1, 2, 20)
    with hopper(seed=1):
        out, launched = model.run(8, polls=1)
        assert launched.failed
        assert out[-1].isnan().all()
        launched.reset()
        assert not launched.failed


def test_shared_memory() -> None:
    for config in every_config():
        used = OTHER_BYTES + ROUTER_BYTES + config.rows_room + config.partials_bytes
        used += BUFFERS * (config.sums_bytes + PANEL_HEAD_BYTES)
        assert used + config.stages * config.stage_bytes <= SHARED_BYTES
        assert config.stages >= GROUPS
        assert config.stages % GROUPS == 0
        assert config.stage_bytes >= TILE * PART_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 9, "top_k": 2}, "tokens must be at most 8, got 9"),
        ({"top_k": 8, "tokens": 5}, "tokens \\* top_k must be at most 32, got 40"),
        ({"group": 9, "ctas": 33}, "heads of a key head must be at most 8, got 9"),
        ({"kv_heads": 9, "group": 8, "ctas": 200}, "heads \\* 64 must be at most 4096, got 4608"),
        ({"page_size": 24}, "pages must be a multiple of 16 by 64, got 24 by 64"),
        ({"ctas": 3}, "rows of qkv on a CTA must be at most 40, got 86"),
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
        "kv_heads": 1,
        "group": 2,
        "keys": 20,
        "ctas": 8,
        **change,
    }
    ctas = sizes.pop("ctas")
    with pytest.raises(ValueError, match=message):
        Model(**sizes).run(ctas)


def test_unsupported_tensors(hopper: Any) -> None:
    model = Model(1, 1, 64, 64, 8, 2, 1, 2, 20)
    with hopper(seed=1):
        model.lengths = model.lengths.long()
        with pytest.raises(ValueError, match=r"lengths must be torch\.int32"):
            model.run(8)
