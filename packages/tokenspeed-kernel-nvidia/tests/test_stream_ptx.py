"""Tests MoE experts for few tokens without a GPU: the emulator runs small layers with the PTX that a GPU would run."""

from __future__ import annotations

import dataclasses
import functools
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
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import PANEL_STRIPS, STRIP, blocks_of, panel_bytes, panels_of
from tokenspeed_kernel_nvidia.sm90.moe.stream import launch as stream
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import COUNTERS, THREADS, Config, config_of, entries_of

from .experts import GPT_OSS, RandomLayer, compare

CPU = torch.device("cpu")


@functools.cache
def text_of(config: Config) -> str:
    return ptx(stream.stream_program, config)


def bytes_of(x: Tensor) -> Any:
    return x.contiguous().view(torch.uint8).numpy()


def config_for(layer: RandomLayer, pairs: int) -> Config:
    plan = layer.plan
    k, rounded = max(plan.hidden_size, plan.intermediate_size), plan.activation_dtype == "fp8"
    return config_of(DTYPES[plan.dtype], k, pairs / plan.num_experts, rounded)


def executed(
    layer: RandomLayer,
    call: tuple[Tensor, Tensor, Tensor],
    ctas: int,
    turns: int,
    resident: int = 132,
    seed: int = 0,
    config: Config | None = None,
) -> Tensor:
    """Runs a launch, and returns its output. The launch must leave its counters at zero."""
    x, weights, ids = call
    plan, pairs, memory = layer.plan, ids.numel(), Memory(1 << 24)
    config = config or config_for(layer, pairs)
    counts = COUNTERS + entries_of(config, pairs, plan.num_experts)
    counters = memory.put(np.zeros(4 * counts, np.uint8))
    ids_at, weights_at, x_at = (memory.put(bytes_of(each)) for each in (ids, weights, x))
    out, activated, slots = (
        memory.put(np.full(size, 0xFF, np.uint8))
        for size in (2 * x.numel(), (4 if config.wide else 2) * pairs * plan.intermediate_size, 4 * pairs * plan.hidden_size)
    )
    sizes = [(2 * plan.intermediate_size, plan.hidden_size), (plan.hidden_size, plan.intermediate_size)]
    layers = [
        *(memory.put(bytes_of(each)) for each in (layer.prepared.w13_weight, layer.prepared.w2_weight)),
        *(rows // STRIP for rows, _ in sizes),
        *(panel_bytes(k) for _, k in sizes),
        *(blocks_of(k) for _, k in sizes),
        *(panels_of(rows) for rows, _ in sizes),
    ]
    assert all(-(-rows // STRIP // PANEL_STRIPS) == panels_of(rows) for rows, _ in sizes)
    limit = math.inf if plan.limit is None else plan.limit
    options = [turns, plan.num_experts, plan.hidden_size, plan.intermediate_size, plan.top_k, plan.alpha, limit, plan.beta]
    given = [x_at, plan.hidden_size, ids_at, weights_at, out, plan.hidden_size, len(x), activated, slots, counters]
    arguments = [*layers, *options, *given]
    launch(text_of(config), arguments, THREADS, (ctas,), memory, resident=resident, seed=seed + 1)
    assert not memory.get(counters, np.int32, counts).any()
    return torch.from_numpy(memory.get(out, np.uint8, 2 * x.numel())).view(plan.dtype).view(x.shape)


def some_experts(ids: Tensor) -> Tensor:
    """Returns ids in which all slots of a third of the experts, and all slots of one token, are negative."""
    ids = torch.where(ids % 3 == 2, -1, ids)
    ids[len(ids) // 2] = -5
    return ids


@pytest.mark.parametrize(
    ("dtype", "experts", "top_k", "hidden", "intermediate", "tokens", "ctas", "turns"),
    [
        (torch.bfloat16, 4, 2, 96, 64, 1, 2, 1),
        (torch.float16, 4, 2, 64, 96, 5, 2, 1),
        (torch.bfloat16, 8, 4, 96, 64, 10, 2, 2),  # more pairs than one warp sorts
        pytest.param(torch.bfloat16, 16, 4, 192, 160, 20, 3, 2, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 4, 2, 1024, 320, 3, 2, 1, marks=pytest.mark.slow),  # stages are reused
    ],
)
def test_layers(
    dtype: torch.dtype,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    tokens: int,
    ctas: int,
    turns: int,
) -> None:
    layer = RandomLayer(CPU, experts, top_k, hidden, intermediate, dtype=dtype, **GPT_OSS)
    x, weights, ids = layer.tokens(tokens)
    if tokens > 1:
        ids = some_experts(ids)
    got = executed(layer, (x, weights, ids), ctas, turns, seed=tokens)
    compare(got, layer.wanted(x, weights, ids))


_FEW = [[3, 0], [3, 1], [3, 0], [0, 3], [2, 3], [0, 3]]  # expert 3 has 6 pairs, the others at most 4
_MANY = [[3, 0 if each < 8 else 1] for each in range(18)]  # expert 3 has 16 pairs and 2, the others 8 and 10


@pytest.mark.parametrize(
    ("experts", "pairs", "hidden", "intermediate"),
    [
        (_FEW, 8, 768, 480),  # slabs of 4 blocks
        (_FEW, 8, 960, 256),  # slabs of 5 blocks
        (_MANY, 16, 192, 96),
        pytest.param(_MANY, 16, 960, 64, marks=pytest.mark.slow),
    ],
)
def test_entries_of_few_pairs(experts: list[list[int]], pairs: int, hidden: int, intermediate: int) -> None:
    """Tests entries with at most half of the pairs, which use half of the MMA columns, beside entries with more. The order of
    additions does not depend on the number of columns."""
    layer = RandomLayer(CPU, 4, 2, hidden, intermediate, **GPT_OSS)
    x, weights, _ = layer.tokens(len(experts))
    ids = torch.tensor(experts, dtype=torch.int32)
    config = config_for(layer, ids.numel())
    assert config.narrow
    assert config.pairs == pairs
    got = executed(layer, (x, weights, ids), 2, 1)
    compare(got, layer.wanted(x, weights, ids))
    wide = dataclasses.replace(config, narrow=False)
    assert torch.equal(got, executed(layer, (x, weights, ids), 2, 1, config=wide))


@pytest.mark.parametrize(
    ("tokens_by", "w13_by", "w2_by", "activation_dtype"),
    [(80, -80, 0, "none"), (-80, 80, 0, "none"), (0, 55, -100, "none"), (-120, 110, 0, "fp8"), (0, 55, -100, "fp8")],
)
def test_very_large_and_small_values(tokens_by: int, w13_by: int, w2_by: int, activation_dtype: str) -> None:
    """Tests tokens and weights that are multiplied by powers of 2. The projections and gate * up do not overflow float32. The
    smallest tokens have the smallest scale of fp8 activations.
    """
    layer = RandomLayer(CPU, 4, 2, 96, 64, activation_dtype=activation_dtype)
    given = layer.given
    assert given.w13_weight_scale is not None
    assert given.w2_weight_scale is not None
    given.w13_weight_scale += w13_by
    given.w2_weight_scale += w2_by
    layer.prepare()
    x, weights, ids = layer.tokens(3)
    x = x * 2.0**tokens_by
    compare(executed(layer, (x, weights, ids), 2, 1), layer.wanted(x, weights, ids))


def test_activations_beyond_float16() -> None:
    """Asserts that the result of a token with infinity is NaN, and that no other token's result is."""
    layer = RandomLayer(CPU, 4, 2, 64, 96, dtype=torch.float16)
    x, weights, ids = layer.wide_tokens(5)
    wanted = layer.wanted(x, weights, ids)
    assert layer.plan.wide_activations
    x[3, 9] = torch.inf
    got = executed(layer, (x, weights, ids), 2, 1)
    assert got[3].isnan().all()
    compare(got[[0, 1, 2, 4]], wanted[[0, 1, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_elements_beside_outliers(dtype: torch.dtype) -> None:
    """Tests outliers in some tokens and in all activations. The weights of the outliers are zero."""
    layer = RandomLayer(CPU, 3, 2, 64, 96, dtype=dtype, bias=True)
    assert layer.given.w13_weight_bias is not None
    layer.given.w13_weight_bias[:, [0, 96]] = 2.0**15
    layer.given.w2_weight[..., 0] &= 0xF0
    x, weights, ids = layer.outlier_tokens(5, 2.0**20 if dtype == torch.bfloat16 else 2.0**15)
    x[:2] = x[:2].clamp(max=2.0)
    compare(executed(layer, (x, weights, ids), 2, 1), layer.wanted(x, weights, ids))


def test_a_pair_twice_and_ctas_that_come_late() -> None:
    """Tests tokens that choose an expert twice, on a device that runs only one CTA at a time."""
    layer = RandomLayer(CPU, 4, 4, 64, 32, **GPT_OSS)
    x, weights, _ = layer.tokens(3)
    ids = torch.tensor([[3, 3, 3, 3], [3, -1, 3, 0], [2, 3, 1, 0]], dtype=torch.int32)
    compare(executed(layer, (x, weights, ids), 2, 1, resident=1), layer.wanted(x, weights, ids))


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 5), (torch.float16, 5), (torch.bfloat16, 21)], ids=str)
def test_fp8_activations(dtype: torch.dtype, tokens: int) -> None:
    """Asserts that results are exact except for the rounding of the output. Both quantisations are those of the operator.
    float8_e5m2 does not represent the weights of one expert exactly. With many tokens, this expert has more pairs than one entry
    holds.
    """
    layer = RandomLayer(CPU, 4, 2, 96, 64, dtype=dtype, activation_dtype="fp8", **GPT_OSS)
    layer.spread_scales([1])
    x, weights, ids = layer.tokens(tokens)
    ids[5:, 0] = 1
    ids[0, 0] = -1
    x[1] *= 2.0**-12
    x[2] = 0
    wanted = layer.wanted(x, weights, ids)
    x[3, 9], x[4, 8] = torch.inf, torch.nan
    got = executed(layer, (x, weights, ids), 2, 1, seed=tokens)
    assert got[3:5].isnan().all()
    finite = [0, 1, 2, *range(5, tokens)]
    compare(got[finite], wanted[finite])
