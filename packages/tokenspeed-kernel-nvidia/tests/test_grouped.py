"""Tests MoE experts for many tokens against float32, and the limits of the schedule."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tokenspeed_kernel_nvidia.sm90.common.registers import REGISTERS
from tokenspeed_kernel_nvidia.sm90.moe import moe_apply
from tokenspeed_kernel_nvidia.sm90.moe.grouped import launch as grouped
from tokenspeed_kernel_nvidia.sm90.moe.grouped import paired
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import (
    CODES,
    PARTS,
    PLAIN,
    SPLIT_COLUMNS,
    SUPPORTED,
    VALUES,
    Gemm,
    columns_for,
    every_gemm,
    inputs_for,
    is_paired,
    least_columns,
    most_tiles,
)

from .experts import GPT_OSS, RandomLayer, compare

COLUMNS = SUPPORTED[PLAIN]


class Layer(RandomLayer):
    """A layer that calls the kernel for many tokens."""

    apply = staticmethod(grouped.moe_apply_many)


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
    """Tests two experts, one with ``count`` pairs and one with one pair fewer."""
    layer = Layer(sm90, 4, 1, 64, 192, **GPT_OSS)
    x, weights, ids = layer.tokens(2 * count - 1)
    ids[:count], ids[count:] = 2, 1
    layer.check(x, weights, ids, columns=columns)


@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "intermediate", "tokens"),
    [(16, 4, 256, 192, 2), (16, 4, 256, 192, 33), (128, 4, 2880, 352, 256), (5, 3, 160, 224, 700), (384, 8, 128, 128, 300)],
)
def test_split_elements(sm90: torch.device, experts: int, top_k: int, hidden: int, intermediate: int, tokens: int) -> None:
    """Tests elements that are split into two fp8 values each."""
    layer = Layer(sm90, experts, top_k, hidden, intermediate, **GPT_OSS)
    layer.spread_scales([1])
    call = layer.tokens(tokens)
    call[0][0] *= 2.0**60
    call[0][1] *= 2.0**-100
    layer.check(*call, columns=SPLIT_COLUMNS, inputs=(PARTS,))
    first = layer.run(*call, columns=SPLIT_COLUMNS, inputs=(PARTS,))
    for _ in range(20):
        assert torch.equal(layer.run(*call, columns=SPLIT_COLUMNS, inputs=(PARTS,)), first)


@pytest.mark.parametrize("count", range(1, 50))
def test_every_width_of_a_tile_of_split_elements(sm90: torch.device, count: int) -> None:
    layer = Layer(sm90, 4, 1, 64, 192, **GPT_OSS)
    x, weights, ids = layer.tokens(2 * count - 1)
    ids[:count], ids[count:] = 2, 1
    layer.check(x, weights, ids, columns=SPLIT_COLUMNS, inputs=(PARTS,))


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


@pytest.mark.parametrize("activation_dtype", ["none", "fp8"])
@pytest.mark.parametrize("tokens", [2, 33, 700, 2500])
def test_activations_beyond_float16(sm90: torch.device, tokens: int, activation_dtype: str) -> None:
    layer = Layer(sm90, 16, 4, 256, 192, dtype=torch.float16, activation_dtype=activation_dtype)
    call = layer.wide_tokens(tokens)
    if activation_dtype == "none":
        layer.check(*call)
    else:
        rounded = RoundedLayer(sm90, 16, 4, 256, 192, dtype=torch.float16, activation_dtype=activation_dtype)
        assert all(rounded.error(*call, codes=codes) <= 2e-2 for codes in (False, True))


def test_one_expert_for_all(sm90: torch.device) -> None:
    layer = Layer(sm90, 16, 2, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(3000)
    layer.check(x, weights, torch.full_like(ids, 5))  # each token has expert 5 in both slots


def test_no_tokens(sm90: torch.device) -> None:
    layer = Layer(sm90, 4, 2, 64, 64)
    assert layer.run(*layer.tokens(0)).shape == (0, 64)


def test_strides(sm90: torch.device) -> None:
    layer = Layer(sm90, 8, 2, 192, 160, **GPT_OSS)
    x, weights, ids = layer.tokens(200)
    wanted = layer.wanted(x, weights, ids)
    wide_x, wide_out = (torch.full((200, 400), 7.0, dtype=x.dtype, device=sm90) for _ in range(2))
    weights, ids = weights.t().contiguous().t(), ids.t().contiguous().t()
    for first in (8, 3):  # first aligned rows, then unaligned rows
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


def check_overlap(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, calls: int) -> None:
    """Asserts that calls in a graph, which overlap, return what calls that wait for one another return. Each call's output is the
    next call's tokens."""
    wanted = x
    for _ in range(calls):
        wanted = layer.run(wanted, weights, ids)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(calls):
            out = layer.run(out, weights, ids)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("tokens", [300, 60])
def test_kernels_that_overlap(sm90: torch.device, tokens: int) -> None:
    """Tests kernels that overlap in a graph (PDL). The output of each call is the next call's tokens."""
    layer = Layer(sm90, 16, 4, 192, 160, **GPT_OSS)
    check_overlap(layer, *layer.tokens(tokens), calls=8)


class LayerWithErrors(RandomLayer):
    """A layer whose relative error of all rows together is computed."""

    def error(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any) -> float:
        wanted = self.wanted(x, weights, ids)
        return float((self.run(x, weights, ids, **options).float() - wanted).norm() / wanted.norm())


class RoundedLayer(LayerWithErrors):
    """A layer with fp8 activations, which calls the kernel for many tokens."""

    apply = staticmethod(grouped.moe_apply_rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inexact", [[], [1, 4], range(8)], ids=["all exact", "some not", "none exact"])
@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(30, 192, 160), (700, 2880, 288), (700, 96, 1440)])
def test_fp8_activations(sm90: torch.device, tokens: int, hidden: int, intermediate: int, inexact: Any, dtype: torch.dtype) -> None:
    layer = RoundedLayer(sm90, 8, 2, hidden, intermediate, dtype=dtype, activation_dtype="fp8", **GPT_OSS)
    layer.spread_scales(inexact)
    call = layer.tokens(tokens)
    error = layer.error(*call)
    # Intermediate values are rounded before they are quantised, so some quantised values are adjacent fp8 values.
    assert error <= 2e-2
    assert layer.error(*call, codes=True) <= 1.2 * error
    for codes in (False, True):
        first = layer.run(*call, codes=codes)
        assert all(torch.equal(layer.run(*call, codes=codes), first) for _ in range(20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_zeros_with_any_scale(sm90: torch.device, dtype: torch.dtype) -> None:
    layer = RoundedLayer(sm90, 8, 2, 192, 160, dtype=dtype, activation_dtype="fp8", **GPT_OSS)
    layer.pad_rows(range(0, 8, 2))
    call = layer.tokens(300)
    for codes in (False, True):
        assert layer.error(*call, codes=codes) <= 2e-2


@pytest.mark.parametrize("columns", SUPPORTED[CODES])
@pytest.mark.parametrize("count", [1, 9, 31, 33, 64, 79, 100, 128, 129, 144, 145, 300])
def test_every_width_of_codes(sm90: torch.device, count: int, columns: int) -> None:
    layer = RoundedLayer(sm90, 4, 1, 160, 192, activation_dtype="fp8", **GPT_OSS)
    layer.spread_scales([1])
    x, weights, ids = layer.tokens(2 * count - 1)
    ids[:count], ids[count:] = 2, 1
    for codes in (False, True):
        assert layer.error(x, weights, ids, codes=codes, columns=columns) <= 2e-2


class PairedLayer(LayerWithErrors):
    """A layer that calls the kernel whose CTAs share columns."""

    apply = staticmethod(paired.moe_apply_paired)


@pytest.mark.parametrize(("activation_dtype", "hidden"), [("none", 192), ("fp8", 160)])
@pytest.mark.parametrize("count", [1, 9, 31, 33, 64, 100, 143, 144, 145, 287, 288, 289, 400])
def test_every_width_that_ctas_share(sm90: torch.device, count: int, activation_dtype: str, hidden: int) -> None:
    layer = PairedLayer(sm90, 4, 1, hidden, 192, activation_dtype=activation_dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(2 * count - 1)
    ids[:count], ids[count:] = 2, 1
    if activation_dtype == "none":
        layer.check(x, weights, ids)
    assert layer.error(x, weights, ids) <= 2e-2


@pytest.mark.parametrize("activation_dtype", ["none", "fp8"])
def test_overlapping_kernels_whose_ctas_share_columns(sm90: torch.device, activation_dtype: str) -> None:
    """Tests kernels that overlap in a graph (PDL). The output of each call is the next call's tokens."""
    layer = PairedLayer(sm90, 16, 4, 256, 192, activation_dtype=activation_dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(700)
    ids[::5] = -1
    check_overlap(layer, x, weights, ids, calls=4)


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


def tiles_of(counts: list[int], columns: int) -> list[int]:
    """Returns the number of pairs of each tile, given the number of pairs of each expert, by the rule of `schedule_device` (see
    `least_columns`)."""
    tiles = []
    for count in counts:
        many, left = divmod(count, columns)
        if left and many and left < least_columns(columns):
            rest = (left + columns + 15) // 16 * 8
            tiles += [columns] * (many - 1) + [rest, left + columns - rest]
        else:
            tiles += [columns] * many + [left] * (left > 0)
    return tiles


@pytest.mark.parametrize("columns", sorted({gemm.columns for gemm in every_gemm()}))
def test_room_for_all_tiles(columns: int) -> None:
    draw = random.Random(1)
    for _ in range(500):
        counts = [draw.choice((0, 1, columns, draw.randrange(1000))) for _ in range(draw.randrange(1, 40))]
        tiles = tiles_of(counts, columns)
        assert sum(tiles) == sum(counts)
        assert all(0 < tile <= columns for tile in tiles)
        assert len(tiles) <= most_tiles(sum(counts), len(counts), columns)


@pytest.mark.parametrize("gemm", every_gemm(), ids=str)
def test_registers_of_a_launch_are_enough(gemm: Gemm) -> None:
    """Asserts that the warpgroups request no more registers than the launch allocates. Otherwise a warpgroup would wait forever."""
    given = REGISTERS // gemm.threads // 8 * 8 * gemm.threads
    tile = gemm.tile
    assert 128 * (tile.warpgroups * tile.registers + gemm.producer_registers) <= given
    assert tile.registers % 8 == gemm.producer_registers % 8 == 0
    assert 24 <= gemm.producer_registers < given // gemm.threads < tile.registers <= 256


@pytest.mark.parametrize(
    ("inputs", "columns"),
    [((PLAIN,), (48, 96, 160, 288)), ((VALUES,), (48, 96, 160, 160)), ((CODES, VALUES), (144, 144, 144, 144))],
)
def test_tiles_by_the_number_of_pairs(inputs: tuple[str, ...], columns: tuple[int, ...]) -> None:
    chosen = tuple(columns_for(pairs * 128, 128, inputs) for pairs in (32, 56, 128, 256))
    assert chosen == columns
    assert columns_for(1024, 128, (PARTS,)) == SPLIT_COLUMNS
    assert all(width in SUPPORTED[kind] for width in chosen for kind in inputs)


def test_ctas_share_columns_if_there_are_many_pairs() -> None:
    def shared(pairs: int, hidden: int, rounded: bool, dtype: str = "bfloat16") -> bool:
        return is_paired(dtype, pairs * 128, 128, hidden, 2880, rounded)

    assert [shared(pairs, 2880, False) for pairs in (128, 140, 141, 256)] == [False, False, True, True]
    assert [shared(pairs, 2880, True) for pairs in (32, 128, 129, 256)] == [False, False, True, True]
    assert [shared(256, 2880, rounded, "float16") for rounded in (False, True)] == [False, False]
    assert [shared(256, 2912, rounded) for rounded in (False, True)] == [False, True]  # 2912 is a multiple of 32, but not of 64


def test_elements_are_split_if_there_are_few_pairs() -> None:
    assert [inputs_for("bfloat16", pairs * 128, 128) for pairs in (1, 8, 16, 17)] == [(PARTS,), (PARTS,), (PARTS,), (PLAIN,)]
    assert inputs_for("float16", 128, 128) == (PLAIN,)


@pytest.mark.parametrize(
    ("dtype", "experts", "most", "rounded"),
    [
        ("bfloat16", 128, 384, False),
        ("bfloat16", 384, 1024, False),
        ("bfloat16", 32, 384, False),
        ("bfloat16", 8, 128, False),
        ("float16", 128, 1024, False),
        ("bfloat16", 128, 512, True),
        ("float16", 32, 128, True),
    ],
)
def test_few_pairs_are_streamed(dtype: str, experts: int, most: int, rounded: bool) -> None:
    assert [moe_apply.is_streamed(dtype, pairs, experts, rounded) for pairs in (1, most, most + 1)] == [True, True, False]
