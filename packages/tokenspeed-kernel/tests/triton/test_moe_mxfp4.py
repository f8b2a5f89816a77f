"""Tests the MoE kernel for prepared mxfp4 weights: the layout, the schedule of blocks, and every tile configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.triton.moe import _mxfp4_layout as layout
from tokenspeed_kernel.triton.moe import _routing as routing
from tokenspeed_kernel.triton.moe import moe_apply_mxfp4 as kernel
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.moe.moe_apply import _GPT_OSS, _inputs
from tokenspeed_kernel_base.ops.quantization.encodings import decode_mxfp4

DEVICE = default_device()
KERNEL = "triton_moe_apply_mxfp4"


def _draw(*sizes: int, seed: int = 0, **options: Any) -> tuple[dict[str, Any], tk.MoEPlan]:
    """Returns the arguments for the reference, and the plan of the kernel under test."""
    options = {"weight_format": "mxfp4", **options}
    arguments = _inputs(*sizes, **options)(Draw(DEVICE, seed))
    options = {name: value for name, value in options.items() if name not in ("of", "gain")}
    return arguments, tk.moe_apply.plan(*sizes[1:2], *sizes[2:], device=DEVICE, override=KERNEL, **options)


def _reference(arguments: dict[str, Any]) -> Tensor:
    return tk.moe_apply.operator.body(**arguments)


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def _unpacked(weight: Tensor, scale: Tensor, epilogue: Tensor, k: int) -> Tensor:
    """Returns the dequantised weights of a prepared projection: float32 ``[experts, 2, pairs, k]``."""
    bits = weight.int() & 0xFFFF
    tiles = []
    for i, (sign, low) in enumerate(zip((15, 12, 14, 13), (6, 3, 0, 9), strict=True)):
        number = (((bits >> sign) & 1) << 31 | ((bits >> low) & 7) << 22).view(torch.float32)
        tiles.append(number * (((scale >> 8 * i) & 0xFF) << 23).view(torch.float32).unsqueeze(-1))
    stacked = torch.stack(tiles, 1).unflatten(1, (2, 2))  # experts, row of the pair, block, chunks, pairs, 32
    rows = stacked.permute(0, 1, 4, 3, 2, 5).flatten(-3)[..., :k]
    return rows * epilogue[:, :2].unsqueeze(-1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(3, 64), (3, 96), (6, 64)], ids=["a part", "padded", "more than are arranged at once"])
def test_prepared_weights_are_the_weights(interleaved: bool, experts: int, k: int) -> None:
    arguments, plan = _draw(1, experts, 1, k, 32, w13_interleaved=interleaved, bias=True)
    given = arguments["weights"]
    prepared = tk.moe_apply.prepare(given, plan)
    assert prepared.layout == plan.weight_layout == layout.LAYOUT
    gate_up = decode_mxfp4(given.w13_weight, given.w13_weight_scale)
    gate, up = (gate_up[:, 0::2], gate_up[:, 1::2]) if interleaved else gate_up.chunk(2, 1)
    got = _unpacked(prepared.w13_weight, prepared.w13_weight_scale, prepared.w13_weight_bias, k)
    assert torch.equal(got, torch.stack((gate, up), 1))
    got = _unpacked(prepared.w2_weight, prepared.w2_weight_scale, prepared.w2_weight_bias, 32)
    assert torch.equal(got.flatten(1, 2), decode_mxfp4(given.w2_weight, given.w2_weight_scale))
    assert torch.equal(prepared.w2_weight_bias[:, 2:].flatten(1), given.w2_weight_bias)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block_rows"),
    [(1, 4, 128, 16), (5, 2, 4, 16), (300, 4, 7, 64), (3, 1, 5, 8), pytest.param(700, 4, 9, 128, id="several chunks")],
)
def test_schedule(tokens: int, top_k: int, experts: int, block_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, experts, (top_k, tokens), generator=generator).int().to(DEVICE).t()
    schedule = routing.block_schedule(ids, experts, block_rows)
    flat = ids.flatten().long().cpu()
    here = int((flat >= 0).sum())
    expected = torch.argsort(torch.where(flat < 0, experts, flat), stable=True)[:here]
    assert schedule.order[:here].tolist() == expected.tolist()
    counts = torch.bincount(flat[flat >= 0], minlength=experts).tolist()
    starts = [sum(counts[:i]) for i in range(experts + 1)]
    assert schedule.expert_start.tolist() == starts
    blocks = [(e, starts[e] + first) for e in range(experts) for first in range(0, counts[e], block_rows)]
    assert len(blocks) <= schedule.capacity
    assert schedule.block_expert.tolist() == [e for e, _ in blocks] + [-1] * (schedule.capacity - len(blocks))
    assert schedule.block_row[: len(blocks)].tolist() == [row for _, row in blocks]


_SMALL = [
    kernel.Tile(16, 16, 1, 2),
    kernel.Tile(32, 8, 2, 3, split_k=2),
    kernel.Tile(16, 16, 4, 2, separate=False, unroll=3),
    kernel.Tile(32, 32, 4, 2, separate=False, tail=16),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tile", _SMALL, ids=str)
@pytest.mark.parametrize("listed", [False, True], ids=["direct", "listed"])
def test_tiles_agree_with_the_reference(monkeypatch: pytest.MonkeyPatch, tile: Any, listed: bool) -> None:
    """Tests sizes that are no multiples of tiles or chunks, tokens with experts of other ranks, and an expert that a token selects
    twice."""
    if listed:
        monkeypatch.setattr(kernel, "_DIRECT_PAIRS", 0)
    elif tile.tail:
        pytest.skip("blocks without a schedule have one size")
    arguments, plan = _draw(9, 4, 4, 160, 96, of=6, dtype=torch.float16, **_GPT_OSS)
    arguments["topk_ids"][:5] = torch.where(arguments["topk_ids"][:5] < 0, -1, 1)
    weights = tk.moe_apply.prepare(arguments["weights"], plan)
    activations = (arguments["topk_weights"], arguments["topk_ids"], plan)
    got = kernel.moe_apply_as(kernel.Regime(0, tile, tile), arguments["x"], weights, *activations)
    assert _error(got, _reference(arguments)) < 1e-3


@pytest.mark.parametrize(("activation_dtype", "most"), [("none", 1e-3), ("fp8", 2e-2), ("mxfp4", 1e-1)])
def test_activations_beyond_float16(activation_dtype: str, most: float) -> None:
    """Activations exceed float16's range. Results must be correct for unquantised, fp8 and mxfp4 activations."""
    arguments, plan = _draw(4, 2, 1, 64, 32, dtype=torch.float16, gain=512.0, activation_dtype=activation_dtype)
    weights = tk.moe_apply.prepare(arguments["weights"], plan)
    what = (arguments["topk_weights"], arguments["topk_ids"], plan)
    got = kernel.moe_apply_as(kernel.Regime(0, _SMALL[0], _SMALL[0]), arguments["x"], weights, *what)
    assert _error(got, _reference(arguments)) < most


def test_every_regime_is_reached() -> None:
    """Runs with numbers of tokens that select each of the kernel's regimes in turn, in bfloat16."""
    for tokens in (1, 3, 5, 20, 40, 130) if DEVICE.type == "cuda" else (1, 20):
        arguments, plan = _draw(tokens, 2, 2, 128, 64, seed=tokens, w13_interleaved=True)
        weights = tk.moe_apply.prepare(arguments["weights"], plan)
        got = tk.moe_apply(**{**arguments, "weights": weights, "plan": plan}, override=KERNEL)
        # The interpreter truncates to bfloat16; a device rounds.
        assert _error(got, _reference(arguments)) < (5e-3 if DEVICE.type == "cuda" else 2e-2)


def test_strided_arguments() -> None:
    arguments, plan = _draw(6, 4, 2, 64, 64, dtype=torch.float16)
    weights = tk.moe_apply.prepare(arguments["weights"], plan)
    expected = _reference(arguments)
    strided = {name: torch.stack((value, value), -1)[..., 0] for name, value in arguments.items() if isinstance(value, Tensor)}
    out = torch.empty(64, 6, dtype=torch.float16, device=DEVICE).t()
    got = tk.moe_apply(**strided, weights=weights, plan=plan, out=out, override=KERNEL)
    assert got is out
    assert _error(out, expected) < 1e-3


@pytest.mark.parametrize(
    ("name", "tokens_by", "w13_by", "w2_by"),
    [(KERNEL, 80, -80, 0), ("triton_moe_apply", 80, -80, 0), ("triton_moe_apply", -80, 80, 0), ("triton_moe_apply", 0, 55, -100)],
)
def test_very_large_and_small_values(name: str, tokens_by: int, w13_by: int, w2_by: int) -> None:
    """Tokens and weights are multiplied by powers of 2. Neither a projection's result nor gate times up may overflow float32."""
    arguments, _ = _draw(2, 2, 2, 64, 64)
    given = arguments["weights"]
    given.w13_weight_scale += w13_by
    given.w2_weight_scale += w2_by
    arguments["x"] = arguments["x"] * 2.0**tokens_by
    plan = tk.moe_apply.plan(2, 2, 64, 64, device=DEVICE, weight_format="mxfp4", override=name)
    got = tk.moe_apply(**{**arguments, "weights": tk.moe_apply.prepare(given, plan), "plan": plan}, override=name)
    assert _error(got, _reference(arguments)) < 2e-2


def test_scales_far_apart_and_nan() -> None:
    """Rows have scales over the whole range. One scale is NaN, and only the feature with this scale may become NaN."""
    arguments, plan = _draw(3, 2, 2, 64, 64)
    given = arguments["weights"]
    given.w2_weight_scale[0, :, 0] = torch.arange(64) * 3
    given.w2_weight_scale[1, 5, 1] = 255
    given.w2_weight_scale[1, 6, :] = 0
    got = tk.moe_apply(**{**arguments, "weights": tk.moe_apply.prepare(given, plan), "plan": plan}, override=KERNEL).float()
    expected = _reference(arguments).float()
    assert torch.equal(got.isnan(), expected.isnan())
    assert bool(expected[:, 5].isnan().all())
    bound = 3e-2 * expected.nan_to_num().abs().amax(0) + 1e-3  # a feature's scales determine its magnitude
    assert bool(((got - expected).nan_to_num().abs() <= bound).all())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are captured on a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 100, 600])
def test_graph_replays_with_other_routing(tokens: int) -> None:
    arguments, plan = _draw(tokens, 16, 4, 128, 96, **_GPT_OSS)
    weights = tk.moe_apply.prepare(arguments["weights"], plan)
    call = {**arguments, "weights": weights, "plan": plan, "override": KERNEL}
    tk.moe_apply(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.moe_apply(**call)
    for shift in (0, 3):
        arguments["topk_ids"].copy_((arguments["topk_ids"] + shift) % 16)
        graph.replay()
        assert torch.equal(out, tk.moe_apply(**call))
        assert _error(out, _reference(arguments)) < 5e-3
