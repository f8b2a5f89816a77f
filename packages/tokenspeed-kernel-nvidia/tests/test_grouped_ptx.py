"""Tests MoE experts for many tokens without a GPU: the emulator runs small layers with the PTX that a GPU would run."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("sm90_emulator")

from sm90_emulator.launching import launch
from sm90_emulator.memory import Memory
from sm90_emulator.programs import ptx
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8
from tokenspeed_kernel_nvidia._programs import Program
from tokenspeed_kernel_nvidia.sm90.moe.grouped import launch as grouped
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import (
    CODES,
    EXACT_FROM,
    FEW_COLUMNS,
    FEW_ROUNDED_COLUMNS,
    FEWEST_COLUMNS,
    FITTED,
    GROUP,
    MANY_COLUMNS,
    MOST_COLUMNS,
    PARTS,
    PLAIN,
    REST,
    ROUNDED_COLUMNS,
    SMALL_DIVISOR,
    SORTING_CTAS,
    SPLIT_COLUMNS,
    VALUES,
    Combine,
    Gemm,
    Rounding,
    Schedule,
    most_tiles,
)
from tokenspeed_kernel_nvidia.sm90.moe.grouped.paired import rows_of

from .experts import GPT_OSS, RandomLayer, compare
from .test_grouped import COLUMNS, tiles_of

CPU = torch.device("cpu")


text_of = functools.cache(ptx)


def bytes_of(x: Tensor) -> Any:
    return x.contiguous().view(torch.uint8).numpy()


class Launches:
    """Runs the launches of one call, in an emulated memory of its own."""

    def __init__(
        self,
        layer: RandomLayer,
        columns: int,
        call: tuple[Tensor, Tensor, Tensor],
        seed: int,
        **options: Any,
    ) -> None:
        self.options = options  # the emulator's options
        self.layer, self.plan, self.columns = layer, layer.plan, columns
        self.x, self.weights, self.ids = call
        self.seed = seed + 1
        self.group = 1  # each expert's pairs begin at a multiple of this number
        self.memory = Memory(1 << 25)
        tokens, pairs = len(self.x), self.ids.numel()
        tiles = most_tiles(pairs, self.plan.num_experts, columns)
        self.sources, self.positions, self.tiles, self.tile_count = (self.room(4 * n) for n in (pairs, pairs, 4 * tiles, 1))
        self.out = self.room(2 * tokens * self.plan.hidden_size)

    def room(self, size: int) -> int:
        return self.memory.put(np.full(size, 0xFF, np.uint8))

    def launch(self, program: Program[Any], config: Any, arguments: list[Any], threads: int, *grid: int, cluster: int = 1) -> None:
        text, options = text_of(program, config), self.options
        launch(text, arguments, threads, grid, self.memory, cluster=cluster, seed=self.seed, **options)

    def schedule(self, ctas: int = 1) -> None:
        top_k = self.plan.top_k
        ids = self.memory.put(bytes_of(self.ids))
        addresses = [self.sources, self.positions, self.tiles, self.tile_count]
        given = [ids, top_k, 1, self.ids.numel(), top_k, self.plan.num_experts, self.columns, self.group, *addresses]
        self.launch(grouped.schedule_program, Schedule(ctas), given, 1024, ctas, cluster=ctas)

    def gemms(self, *inputs: str) -> int:
        """Launches both GEMMs, and returns the address of the results. ``inputs`` names the formats of the rows. If there are two
        formats, each is for some of the experts."""
        plan, pairs = self.plan, self.ids.numel()
        rows, width = self.x, plan.hidden_size
        swiglu = [plan.alpha, math.inf if plan.limit is None else plan.limit, plan.beta]
        prepared: Any = self.layer.prepared
        exact = self.memory.put(bytes_of(prepared.exact)) if len(inputs) > 1 else 0
        for gated, weight in ((True, prepared.w13_weight), (False, prepared.w2_weight)):
            features = plan.intermediate_size if gated else plan.hidden_size
            wide = plan.wide_activations if gated else plan.dtype == torch.float16
            results_as = torch.float32 if wide else plan.dtype
            results = self.room(results_as.itemsize * pairs * features)
            strips, weight_at = features // (8 if gated else 16), self.memory.put(bytes_of(weight))
            for kind in inputs:
                config = Gemm("bfloat16" if plan.dtype == torch.bfloat16 else "float16", gated, self.columns, kind, wide)
                rows_at, scales = self.given(rows, kind)
                given = [
                    weight_at,
                    strips,
                    width,
                    rows_at,
                    width,
                    len(rows),
                    scales,
                    exact,
                    self.sources,
                    self.tiles,
                    self.tile_count,
                ]
                self.launch(grouped.gemm_program, config, [*given, results, features, *swiglu], config.threads, 2)
            content = self.memory.get(results, np.uint8, results_as.itemsize * pairs * features)
            rows = torch.from_numpy(content).view(results_as)
            rows, width = rows.view(pairs, features), features
        return results

    def given(self, rows: Tensor, inputs: str) -> tuple[int, int]:
        """Stores the rows of a GEMM and their scales in memory. Returns both addresses."""
        if inputs == PLAIN:
            return self.memory.put(bytes_of(rows)), 0
        values, scales = rounded(rows, inputs, self.plan.dtype)
        return self.memory.put(bytes_of(values)), self.memory.put(bytes_of(scales))

    def combine(self, results: int) -> Tensor:
        hidden, (tokens, top_k) = self.plan.hidden_size, self.ids.shape
        weights = self.memory.put(bytes_of(self.weights))
        config = Combine("bfloat16" if self.plan.dtype == torch.bfloat16 else "float16")
        given = [results, hidden, self.positions, weights, self.out, hidden, tokens, top_k, hidden]
        self.launch(grouped.combine_program, config, given, 256, tokens, -(-hidden // 2048))
        content = self.memory.get(self.out, np.uint8, 2 * tokens * hidden)
        return torch.from_numpy(content).view(self.plan.dtype).view(tokens, hidden)


def rounded(rows: Tensor, inputs: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Computes the expected results of a rounding kernel: fp8 values in the order of `decode_e5m2` or values of ``dtype``, and the
    scales."""
    if inputs == FITTED:
        scales = torch.exp2(rows.abs().amax(-1, keepdim=True).log2().floor() - 14)
        return (rows / scales).to(dtype), scales
    if inputs == PARTS:
        scales = torch.exp2(rows.float().abs().amax(-1, keepdim=True).log2().floor() - 7)
        numbers = rows.float() / scales
        near = numbers.to(torch.float8_e4m3fn)
        rest = ((numbers - near.float()) * REST).to(torch.float8_e4m3fn)
        small = ((numbers != 0) & (numbers.abs() < EXACT_FROM)).sum(-1, keepdim=True)
        scales = torch.where(small * SMALL_DIVISOR > numbers.shape[-1], -scales, scales)
        return torch.stack([in_order(near), in_order(rest)], 1).flatten(0, 1), scales
    codes, scales = quantize_fp8.operator.body(rows, "token")
    if inputs == VALUES:
        return codes.float().to(dtype), scales
    return in_order(codes), scales


def in_order(codes: Tensor) -> Tensor:
    """Returns the fp8 values of rows as bytes. Every 16 values are in the order of `decode_e5m2`."""
    return codes.view(torch.uint8).view(len(codes), -1, 2, 4, 2).permute(0, 1, 3, 4, 2).reshape(codes.shape)


def some_experts(ids: Tensor) -> Tensor:
    """Returns ids in which all slots of one token, and all slots of a third of the experts, are negative."""
    ids = torch.where(ids % 3 == 0, -1, ids)
    ids[1] = -5
    return ids


@pytest.mark.parametrize(("columns", "ctas"), [*((columns, 1) for columns in COLUMNS), (FEWEST_COLUMNS, SORTING_CTAS)])
@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(3, 1, 300), (33, 4, 50), (384, 8, 20), (2, 2, 1), (33, 4, 700)])
@pytest.mark.parametrize("group", [1, GROUP])
def test_schedule(experts: int, top_k: int, tokens: int, columns: int, ctas: int, group: int) -> None:
    layer = RandomLayer(CPU, experts, top_k, 32, 32)
    x, weights, ids = layer.tokens(tokens)
    if tokens == 300:  # at both tile widths, the last pairs of some experts are too few for a separate tile
        ids[:70], ids[70:235], ids[235:] = 0, 2, 1
    elif tokens > 1:
        ids = some_experts(ids)
    call = Launches(layer, columns, (x, weights, ids), seed=tokens)
    call.group, call.sources = group, call.room(4 * rows_of(ids.numel(), experts))
    call.schedule(ctas)

    flat = ids.flatten()
    counts = [int((flat == expert).sum()) for expert in range(experts)]
    begins = np.cumsum([0, *(-(-count // group) * group for count in counts)])
    sources = call.memory.get(call.sources, np.int32, int(begins[-1]))
    positions = call.memory.get(call.positions, np.int32, flat.numel())
    for expert, begin, size in zip(range(experts), begins, counts, strict=False):
        of_expert = (flat == expert).nonzero().flatten().tolist()
        assert sources[begin : begin + size].tolist() == [pair // top_k for pair in of_expert]
        assert positions[of_expert].tolist() == [*range(begin, begin + size)]
    assert (positions[(flat < 0).numpy()] == -1).all()

    count = int(call.memory.get(call.tile_count, np.int32, 1)[0])
    tiles = call.memory.get(call.tiles, np.int32, count, 4)[:, :3].tolist()
    # An expert's last two tiles share their pairs evenly and are adjacent. So a slightly shorter tile may precede a longer tile.
    assert sorted(size for _, _, size in tiles) == sorted(tiles_of(counts, columns))
    for expert in range(experts):
        at = begins[expert]
        for first, size in sorted((first, size) for of, first, size in tiles if of == expert):
            assert first == at
            at += size
        assert at == begins[expert] + counts[expert]
    assert all(size <= before + 15 for (_, _, before), (_, _, size) in itertools.pairwise(tiles))


@pytest.mark.parametrize(
    ("dtype", "columns", "experts", "top_k", "hidden", "intermediate", "tokens"),
    [
        (torch.bfloat16, FEWEST_COLUMNS, 3, 2, 96, 64, 5),
        (torch.float16, FEW_COLUMNS, 3, 2, 96, 64, 5),
        pytest.param(torch.float16, FEWEST_COLUMNS, 4, 2, 32, 160, 33, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FEW_COLUMNS, 3, 2, 96, 64, 5, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, MANY_COLUMNS, 3, 2, 192, 96, 170, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, MOST_COLUMNS, 2, 1, 96, 96, 500, marks=pytest.mark.slow),
        pytest.param(torch.float16, MANY_COLUMNS, 4, 2, 128, 96, 170, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, MANY_COLUMNS, 1, 1, 64, 64, 400, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FEW_COLUMNS, 8, 4, 256, 192, 40, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FEWEST_COLUMNS, 5, 2, 704, 96, 20, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FEWEST_COLUMNS, 2, 2, 32, 1312, 9, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, FEW_COLUMNS, 2, 2, 32, 1312, 9, marks=pytest.mark.slow),
    ],
)
def test_layers(
    dtype: torch.dtype,
    columns: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    tokens: int,
) -> None:
    layer = RandomLayer(CPU, experts, top_k, hidden, intermediate, dtype=dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(tokens)
    ids = some_experts(ids) if experts > 1 else ids
    call = Launches(layer, columns, (x, weights, ids), seed=hidden)
    call.schedule()
    compare(call.combine(call.gemms(PLAIN)), layer.wanted(x, weights, ids))


@pytest.mark.parametrize(
    ("inputs", "dtype", "columns", "experts", "top_k", "hidden", "intermediate", "tokens"),
    [
        ((CODES,), torch.bfloat16, ROUNDED_COLUMNS, 3, 2, 160, 96, 9),
        pytest.param((CODES,), torch.bfloat16, FEW_ROUNDED_COLUMNS, 3, 2, 160, 96, 20, marks=pytest.mark.slow),
        pytest.param((CODES,), torch.float16, FEW_ROUNDED_COLUMNS, 2, 2, 320, 704, 70, marks=pytest.mark.slow),
        ((VALUES,), torch.float16, FEWEST_COLUMNS, 3, 2, 96, 64, 9),
        pytest.param((VALUES,), torch.bfloat16, FEWEST_COLUMNS, 2, 2, 160, 96, 60, marks=pytest.mark.slow),
        pytest.param((CODES, VALUES), torch.bfloat16, ROUNDED_COLUMNS, 4, 2, 96, 64, 9, marks=pytest.mark.slow),
        ((CODES,), torch.bfloat16, ROUNDED_COLUMNS, 2, 2, 32, 1312, 9),
        pytest.param((CODES,), torch.float16, ROUNDED_COLUMNS, 3, 2, 256, 320, 170, marks=pytest.mark.slow),
        pytest.param((CODES,), torch.bfloat16, ROUNDED_COLUMNS, 2, 1, 160, 96, 300, marks=pytest.mark.slow),
    ],
)
def test_rounded_layers(
    inputs: tuple[str, ...],
    dtype: torch.dtype,
    columns: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    tokens: int,
) -> None:
    layer = RandomLayer(CPU, experts, top_k, hidden, intermediate, dtype=dtype, activation_dtype="fp8", **GPT_OSS)
    if len(inputs) > 1 or columns == FEW_ROUNDED_COLUMNS:
        layer.spread_scales(range(1, experts - 1))
    x, weights, ids = layer.tokens(tokens)
    ids = some_experts(ids)
    call = Launches(layer, columns, (x, weights, ids), seed=hidden)
    call.schedule()
    got, wanted = call.combine(call.gemms(*inputs)).float(), layer.wanted(x, weights, ids)
    # Intermediate values are rounded before they are quantised, so some quantised values are adjacent fp8 values.
    assert (got - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "intermediate", "tokens"),
    [
        (3, 2, 160, 96, 30),
        pytest.param(2, 1, 96, 64, 60, marks=pytest.mark.slow),
        pytest.param(5, 2, 704, 96, 20, marks=pytest.mark.slow),
        pytest.param(2, 2, 32, 1312, 9, marks=pytest.mark.slow),
    ],
)
def test_split_layers(experts: int, top_k: int, hidden: int, intermediate: int, tokens: int) -> None:
    """Asserts that results are correct if each element is split into two fp8 values."""
    layer = RandomLayer(CPU, experts, top_k, hidden, intermediate, **GPT_OSS)
    layer.spread_scales([1])
    x, weights, ids = layer.tokens(tokens)
    ids = some_experts(ids)
    # Shared memory may hold values that an earlier kernel left, such as an infinite scale.
    call = Launches(layer, SPLIT_COLUMNS, (x, weights, ids), seed=hidden, shared_byte=0x3F)
    call.schedule()
    compare(call.combine(call.gemms(PARTS)), layer.wanted(x, weights, ids))


@pytest.mark.parametrize(
    ("inputs", "dtype", "k"),
    [
        *itertools.product((CODES, VALUES), (torch.bfloat16,), (96, 4512)),
        *itertools.product((CODES, VALUES), (torch.float16,), (2880,)),
        *itertools.product((PARTS,), (torch.bfloat16,), (96, 2880, 4512)),
        *itertools.product((FITTED,), (torch.float32,), (96, 2880, 4512)),
        (VALUES, torch.float32, 96),
    ],
)
def test_rounding(inputs: str, dtype: torch.dtype, k: int) -> None:
    """Tests the rounding kernels. Rows are float32 if tokens are float16."""
    rows = torch.randn(3, k, generator=torch.Generator().manual_seed(k)) * torch.tensor([[1.0], [300.0], [1e-3]])
    rows[2, 7] = 0.0
    if inputs == PARTS:  # row 1 has an outlier; row 0 has almost only zeros beside an outlier
        rows[1, 5] = 1e8
        rows[0, 3:] = 0.0
        rows[0, 1] = 1e8
    given = rows.to(dtype)
    memory, size = Memory(1 << 20), 1 if inputs == CODES else 2
    result, scales = memory.put(np.full(3 * k * size, 0xFF, np.uint8)), memory.put(np.full(12, 0xFF, np.uint8))
    wide = dtype == torch.float32
    config = Rounding("bfloat16" if dtype == torch.bfloat16 else "float16", inputs, k == 96 and not wide, wide)
    arguments = [memory.put(bytes_of(given)), k, result, k, scales, k]
    launch(text_of(grouped.rounding_program, config), arguments, 128, (3,), memory, seed=k)
    wanted, wanted_scales = rounded(given, inputs, torch.float16 if wide else dtype)
    assert (wanted_scales < 0).flatten().tolist() == [False, inputs == PARTS, False]
    assert torch.equal(torch.from_numpy(memory.get(scales, np.float32, 3)), wanted_scales.flatten())
    assert (memory.get(result, np.uint8, 3 * k * size) == bytes_of(wanted).flatten()).all()
