"""Experts for many tokens, executed without a GPU: small layers, by the instructions that a GPU would get."""

from __future__ import annotations

import functools
import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from tokenspeed_kernel_nvidia._programs import Program
from tokenspeed_kernel_nvidia.sm90.moe import grouped
from tokenspeed_kernel_nvidia.sm90.moe.grouped_config import FEW_COLUMNS, MANY_COLUMNS, Combine, Product, Schedule, most_tiles

from . import ptx
from .experts import GPT_OSS, RandomLayer, compare
from .ptx_values import Memory
from .test_grouped import tiles_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The PTX of a program, made once."""
    folder = tmp_path_factory.mktemp("ptx")

    @functools.cache
    def text_of(program: Program[Any], config: Any) -> str:
        Path(folder).mkdir(exist_ok=True)
        return str(program.compile(config, f"--keep-ptx --dump-dir {folder}").__ptx__)

    return text_of


def bytes_of(x: Tensor) -> Any:
    return x.contiguous().view(torch.uint8).numpy()


class Launches:
    """The launches of one call, on memory of their own."""

    def __init__(self, texts: Any, layer: RandomLayer, columns: int, call: tuple[Tensor, Tensor, Tensor], seed: int) -> None:
        self.texts, self.layer, self.plan, self.columns = texts, layer, layer.plan, columns
        self.x, self.weights, self.ids = call
        self.chance = random.Random(seed)
        self.memory = Memory(1 << 25, ptx.GLOBAL_BASE)
        tokens, pairs = len(self.x), self.ids.numel()
        tiles = most_tiles(pairs, self.plan.num_experts, columns)
        self.sources, self.positions, self.tiles, self.tile_count = (self.room(4 * n) for n in (pairs, pairs, 4 * tiles, 1))
        self.out = self.room(2 * tokens * self.plan.hidden_size)

    def room(self, size: int) -> int:
        return self.memory.put(np.full(size, 0xFF, np.uint8))

    def launch(self, program: Program[Any], config: Any, arguments: list[Any], threads: int, *grid: int) -> None:
        ptx.launch(self.texts(program, config), arguments, threads, grid, self.memory, self.chance)

    def schedule(self) -> None:
        top_k = self.plan.top_k
        ids = self.memory.put(bytes_of(self.ids))
        addresses = [self.sources, self.positions, self.tiles, self.tile_count]
        given = [ids, top_k, 1, self.ids.numel(), top_k, self.plan.num_experts, *addresses]
        self.launch(grouped.schedule_program, Schedule(self.columns), given, 1024, 1)

    def products(self, double: bool = True) -> int:
        """Returns where the results are."""
        plan, pairs = self.plan, self.ids.numel()
        rows, width = self.memory.put(bytes_of(self.x)), plan.hidden_size
        swiglu = [plan.alpha, math.inf if plan.limit is None else plan.limit, plan.beta]
        prepared = self.layer.prepared
        for gated, weight in ((True, prepared.w13_weight), (False, prepared.w2_weight)):
            features = plan.intermediate_size if gated else plan.hidden_size
            results = self.room(2 * pairs * features)
            strips = features // (8 if gated else 16)
            given = [self.memory.put(bytes_of(weight)), strips, width, rows, width, self.sources, self.tiles]
            config = Product("bfloat16" if plan.dtype == torch.bfloat16 else "float16", gated, self.columns, double)
            self.launch(grouped.product_program, config, [*given, self.tile_count, results, features, *swiglu], 512, 2)
            rows, width = results, features
        return rows

    def combine(self, results: int) -> Tensor:
        hidden, (tokens, top_k) = self.plan.hidden_size, self.ids.shape
        weights = self.memory.put(bytes_of(self.weights))
        config = Combine("bfloat16" if self.plan.dtype == torch.bfloat16 else "float16")
        given = [results, hidden, self.positions, weights, self.out, hidden, tokens, top_k, hidden]
        self.launch(grouped.combine_program, config, given, 256, tokens, -(-hidden // 2048))
        content = self.memory.get(self.out, np.uint8, 2 * tokens * hidden)
        return torch.from_numpy(content).view(self.plan.dtype).view(tokens, hidden)


def some_experts(ids: Tensor) -> Tensor:
    """All slots of a token, and a third of all, are skipped."""
    ids = torch.where(ids % 3 == 0, -1, ids)
    ids[1] = -5
    return ids


@pytest.mark.parametrize("columns", [FEW_COLUMNS, MANY_COLUMNS])
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(3, 1, 300), (33, 4, 50), (384, 8, 20), (2, 2, 1)])
def test_schedule(texts: Any, experts: int, top_k: int, tokens: int, columns: int) -> None:
    layer = RandomLayer(CPU, experts, top_k, 32, 32)
    x, weights, ids = layer.tokens(tokens)
    if tokens == 300:  # rests that are too short for tiles of their own, of both widths
        ids[:70], ids[70:235], ids[235:] = 0, 2, 1
    elif tokens > 1:
        ids = some_experts(ids)
    call = Launches(texts, layer, columns, (x, weights, ids), seed=tokens)
    call.schedule()

    flat = ids.flatten()
    order = [pair for expert in range(experts) for pair in (flat == expert).nonzero().flatten().tolist()]
    sources = call.memory.get(call.sources, np.int32, flat.numel())
    assert sources[: len(order)].tolist() == [pair // top_k for pair in order]
    positions = call.memory.get(call.positions, np.int32, flat.numel())
    assert positions[order].tolist() == [*range(len(order))]
    assert (positions[(flat < 0).numpy()] == -1).all()

    count = int(call.memory.get(call.tile_count, np.int32, 1)[0])
    tiles = call.memory.get(call.tiles, np.int32, count, 4)[:, :3].tolist()
    counts = [int((flat == expert).sum()) for expert in range(experts)]
    # Even parts of an expert's rest stand together, so the longest first may have one that is a little shorter between.
    assert sorted(size for _, _, size in tiles) == sorted(tiles_of(counts, Schedule(columns)))
    begins = np.cumsum([0, *counts])
    for expert in range(experts):
        at = begins[expert]
        for first, size in sorted((first, size) for of, first, size in tiles if of == expert):
            assert first == at
            at += size
        assert at == begins[expert + 1]
    assert all(size <= before + 15 for (_, _, before), (_, _, size) in itertools.pairwise(tiles))


@pytest.mark.parametrize(
    ("dtype", "columns", "experts", "top_k", "hidden", "intermediate", "tokens", "double"),
    [
        (torch.bfloat16, FEW_COLUMNS, 3, 2, 96, 64, 5, True),
        (torch.float16, FEW_COLUMNS, 4, 2, 32, 160, 33, True),
        (torch.bfloat16, MANY_COLUMNS, 3, 2, 192, 96, 170, True),
        pytest.param(torch.float16, MANY_COLUMNS, 4, 2, 128, 96, 170, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, MANY_COLUMNS, 1, 1, 64, 64, 400, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FEW_COLUMNS, 8, 4, 256, 192, 40, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FEW_COLUMNS, 5, 2, 704, 96, 20, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FEW_COLUMNS, 2, 2, 32, 1312, 9, True, marks=pytest.mark.slow),
    ],
)
def test_layers(
    texts: Any,
    dtype: torch.dtype,
    columns: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    tokens: int,
    double: bool,
) -> None:
    layer = RandomLayer(CPU, experts, top_k, hidden, intermediate, dtype=dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(tokens)
    ids = some_experts(ids) if experts > 1 else ids
    call = Launches(texts, layer, columns, (x, weights, ids), seed=hidden)
    call.schedule()
    compare(call.combine(call.products(double)), layer.wanted(x, weights, ids))
