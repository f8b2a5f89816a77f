"""Tests the kernels of routing and of the MoE beyond the shared cases: non-finite values, odd strides, graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tokenspeed_kernel import MoEPlan, MoEWeights, moe_apply, moe_topk
from tokenspeed_kernel.workbench.numerics.compare import compare_tensors
from tokenspeed_kernel.workbench.numerics.tolerance import tolerance_for
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.platform import named_platform

DEVICE = default_device()
ODD_VALUES = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, 1e-30, -1e30]


def _topk_agrees(logits: torch.Tensor, **options: Any) -> None:
    got = moe_topk(logits, **options, override="triton_moe_topk")
    # The reference runs on the CPU, because PyTorch's sort on a GPU ranks a NaN with a set sign bit lowest.
    on_cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    expected = moe_topk(logits.cpu(), **on_cpu, override="reference_moe_topk")
    assert torch.equal(got[1].cpu(), expected[1])
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_odd_values_rank_as_the_reference_ranks_them(dtype: torch.dtype, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, len(ODD_VALUES), (64, 12), generator=generator)
    logits = torch.tensor(ODD_VALUES)[chosen].to(dtype).to(DEVICE)
    for renormalize, scoring in itertools.product((True, False), ("softmax", "sigmoid", "sqrtsoftplus")):
        _topk_agrees(
            logits, top_k=5, scoring=scoring, renormalize=renormalize, num_groups=groups, top_groups=2 if groups > 1 else 1
        )


def test_scores_of_logits_of_all_sizes() -> None:
    """The relative error of the scores must be at most 3e-7 for logits of all magnitudes. The kernel computes the square root of
    softplus by a series for logits below 0, and from the logit itself above."""
    logits = torch.cat([torch.linspace(-90, 90, 4001), torch.logspace(-30, 38, 2000), -torch.logspace(-30, 1.9, 2000)])
    for scoring in ("sigmoid", "sqrtsoftplus"):
        got, _ = moe_topk(logits[:, None].to(DEVICE), 1, scoring, renormalize=False, override="triton_moe_topk")
        expected, _ = moe_topk(logits[:, None].double(), 1, scoring, renormalize=False, override="reference_moe_topk")
        torch.testing.assert_close(got.cpu(), expected, rtol=3e-7, atol=1e-19)


def test_odd_values_with_a_correction_bias() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor(ODD_VALUES)[torch.randint(0, len(ODD_VALUES), (64, 12), generator=generator)].to(DEVICE)
    bias = torch.randint(-1, 2, (12,), generator=generator).float().to(DEVICE)
    bias[3] = float("inf")
    for groups, top_groups in ((1, 1), (4, 2), (6, 3), (12, 6)):
        _topk_agrees(
            logits, top_k=5, scoring="sigmoid", correction_bias=bias, num_groups=groups, top_groups=top_groups, scaling_factor=2.0
        )


@pytest.mark.parametrize("biased", [False, True])
def test_closed_groups_are_closed_even_beside_experts_at_minus_infinity(biased: bool) -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 5.0, 4.0, 4.0 if biased else -torch.inf]], device=DEVICE)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -torch.inf], device=DEVICE) if biased else None
    options: dict[str, Any] = {"num_groups": 2, "top_groups": 1, "correction_bias": bias}
    assert moe_topk(logits, 3, override="triton_moe_topk", **options)[1].tolist() == [[3, 4, 5]]
    _topk_agrees(logits, top_k=3, **options)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 2), (97, 33), (513, 9), (2048, 4)])
def test_any_count_of_experts(experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    for dtype in (torch.float32, torch.bfloat16):
        _topk_agrees(torch.randn(5, experts, generator=generator).to(dtype).to(DEVICE), top_k=top_k)


def test_strided_logits_bias_and_outputs() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(48, 7, generator=generator).to(DEVICE).t()
    bias = torch.randn(96, generator=generator).to(DEVICE)[::2]
    weights_out = torch.zeros(7, 8, device=DEVICE)[:, ::2]
    ids_out = torch.zeros(4, 7, dtype=torch.int32, device=DEVICE).t()
    expected = moe_topk(logits, 4, "sigmoid", correction_bias=bias, override="reference_moe_topk")
    got = moe_topk(logits, 4, "sigmoid", correction_bias=bias, weights_out=weights_out, ids_out=ids_out, override="triton_moe_topk")
    assert got[0].data_ptr() == weights_out.data_ptr()
    assert got[1].data_ptr() == ids_out.data_ptr()
    assert torch.equal(ids_out, expected[1])
    torch.testing.assert_close(weights_out, expected[0])


# -- moe_apply, dense ----------------------------------------------------------------------------------------------------------


def _layer(
    tokens: int, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    plan = moe_apply.plan(experts, top_k, hidden, intermediate, dtype=dtype, device=DEVICE, override="triton_moe_apply", **options)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)

    bias = (normal(experts, 2 * intermediate), normal(experts, hidden)) if plan.bias else (None, None)
    w13 = normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
    w2 = normal(experts, hidden, intermediate, scale=intermediate**-0.5)
    return {
        "x": normal(tokens, hidden),
        "weights": MoEWeights(w13, None, bias[0], w2, None, bias[1]),
        "topk_weights": torch.rand(tokens, top_k, generator=generator).to(DEVICE),
        "topk_ids": torch.randint(0, experts, (tokens, top_k), generator=generator, dtype=torch.int32).to(DEVICE),
        "plan": plan,
    }


def _apply_agrees(layer: dict[str, Any], got: torch.Tensor | None = None) -> None:
    got = moe_apply(**layer, override="triton_moe_apply") if got is None else got
    expected = moe_apply(**layer, override="reference_moe_apply")
    compared = compare_tensors("output", got, expected, tolerance_for(expected.dtype))
    assert compared.passed, compared.fault


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [1, 24, 60, 100, 200, 300])
def test_blocks_of_all_lengths(tokens: int) -> None:
    """The tile depends on the number of tokens per expert, so experts have few or many. Some tokens select the same expert
    twice."""
    layer = _layer(tokens, 3, 2, 48, 40, torch.float16, bias=True, limit=2.0, beta=1.0)
    _apply_agrees(layer)
    layer["topk_ids"] = torch.where(torch.rand(tokens, 2) < 0.3, -1, layer["topk_ids"].cpu()).int().to(DEVICE)
    layer["topk_ids"][:, 1] = layer["topk_ids"][:, 0]
    _apply_agrees(layer)


@pytest.mark.parametrize("interleaved", [False, True])
def test_all_parts_of_a_block_of_tokens(monkeypatch: pytest.MonkeyPatch, interleaved: bool) -> None:
    """With small tiles, the call has full blocks, extra rows and short tails. Weights are loaded with and without TMA
    descriptors."""
    from tokenspeed_kernel.triton.moe import moe_apply as module

    tile = module.Tile(32, 32, 4, 2)
    for descriptors in (False, True):
        blocks = module.Blocks(32, 16, 16, tile, tile, descriptors)
        monkeypatch.setattr(module, "_blocks_for", lambda *_, blocks=blocks: blocks)
        layer = _layer(70, 4, 2, 64, 40, torch.float16, bias=True, w13_interleaved=interleaved)
        layer["topk_ids"][:20, 0] = 1
        _apply_agrees(layer)
        weights = layer["weights"]
        layer["weights"] = replace(weights, w13_weight=torch.cat([weights.w13_weight] * 2, dim=1)[:, :80])
        _apply_agrees(layer)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("k", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp8_blocks_in_steps(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, k: int) -> None:
    """A block of 128 along k takes one or several steps of ``k``, and the last step may be partial. There are also extra rows and
    tails."""
    from tokenspeed_kernel.triton.moe import moe_apply as module

    tile = module.Tile(64, k, 4, 2)
    monkeypatch.setattr(module, "_blocks_for", lambda *_: module.Blocks(32, 16, 16, tile, tile))
    layer = _layer(70, 4, 2, 208, 144, dtype)
    layer["topk_ids"][:20, 0] = 1
    weights, generator = layer["weights"], torch.Generator().manual_seed(3)
    scales = [(torch.rand(4, *shape, generator=generator) + 0.5).to(DEVICE) for shape in ((3, 2), (2, 2))]
    w13, w2 = (weight.to(torch.float8_e4m3fn) for weight in (weights.w13_weight, weights.w2_weight))
    layer["weights"] = MoEWeights(w13, scales[0], None, w2, scales[1], None)
    layer["plan"] = replace(layer["plan"], weight_format="fp8_block")
    _apply_agrees(layer)


@pytest.mark.parametrize("activation_dtype", ["none", "fp8", "mxfp4"])
def test_activations_beyond_float16(activation_dtype: str) -> None:
    """Activations and the outputs of slots exceed 65,504, the largest float16, but the weighted results do not. One token is
    NaN."""
    layer = _layer(5, 2, 1, 32, 32, torch.float16, activation_dtype=activation_dtype)
    weights = layer["weights"]
    layer["x"][:], weights.w13_weight[:], weights.w2_weight[:] = 264.0, 2.0**-5, 1.0
    layer["topk_weights"][:] = 2.0**-17
    layer["x"][2] = torch.nan
    got = moe_apply(**layer, override="triton_moe_apply")
    expected = moe_apply(**layer, override="reference_moe_apply")
    assert 15 < float(expected[0, 0]) < 18
    assert bool(expected[2].isnan().all())
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=2e-3, atol=0)


def test_all_tokens_to_one_expert() -> None:
    layer = _layer(300, 16, 1, 32, 32)
    layer["topk_ids"].fill_(11)
    _apply_agrees(layer)


def test_rows_of_skipped_slots_are_not_read() -> None:
    """A slot with expert id -1 must not affect the sum, even if its routing weight is NaN."""
    layer = _layer(9, 4, 3, 32, 32)
    layer["topk_ids"][::2, 1] = -1
    layer["topk_weights"][::2, 1] = torch.nan
    got = moe_apply(**layer, override="triton_moe_apply")
    layer["topk_weights"][::2, 1] = 0.0
    _apply_agrees(layer, got)


def test_strides() -> None:
    """Tests transposed weights, as in some checkpoints, and strided tokens, routing weights and ids."""
    layer = _layer(10, 4, 2, 32, 48, bias=True, w13_interleaved=True)
    weights = layer["weights"]
    layer["weights"] = replace(
        weights,
        w13_weight=weights.w13_weight.mT.contiguous().mT,
        w2_weight=weights.w2_weight.mT.contiguous().mT,
        w2_weight_bias=weights.w2_weight_bias.t().contiguous().t(),
    )
    layer["x"] = torch.cat([layer["x"], layer["x"]], dim=1).t().contiguous().t()[:, ::2]
    layer["topk_weights"] = layer["topk_weights"].t().contiguous().t()
    layer["topk_ids"] = layer["topk_ids"].t().contiguous().t()
    out = torch.full((10, 96), 7.0, device=DEVICE)
    returned = moe_apply(**layer, out=out[:, 5:69:2], override="triton_moe_apply")
    assert returned.data_ptr() == out[:, 5:].data_ptr()
    _apply_agrees(layer, returned)
    assert bool((out[:, 4::2] == 7.0).all())
    assert bool((out[:, :5] == 7.0).all())


@pytest.mark.parametrize("weight_format", ["dense", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("platform", ["sm_90", "sm_100", "gfx942"])
def test_static_activations_are_supported_on_gpus(weight_format: str, platform: str) -> None:
    options: dict[str, Any] = {"activation_dtype": "fp8_static", "weight_format": weight_format}
    assert moe_apply.plan(8, 2, 128, 128, platform=named_platform(platform), **options).kernel.startswith("triton_moe_apply")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_static_activations_saturate(dtype: torch.dtype) -> None:
    layer = _layer(3, 4, 2, 48, 40, dtype)
    layer["x"][1, :5] = torch.tensor([1e3, -1e3, 1e-6, 2.0, -2.0])
    scales = torch.tensor([0.01, 0.0025], device=DEVICE)  # amax 4.48 and 1.12: some values are larger and saturate
    layer["weights"] = replace(layer["weights"], w13_input_scale=scales[:1], w2_input_scale=scales[1:])
    layer["plan"] = replace(layer["plan"], activation_dtype="fp8_static")
    _apply_agrees(layer)
    layer["x"][2, 0] = torch.nan
    got = moe_apply(**layer, override="triton_moe_apply")
    assert got.isnan().any(1).tolist() == [False, False, True]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="graphs are captured on a GPU")
@pytest.mark.parametrize(
    "options", [{}, {"weight_format": "fp8_block", "activation_dtype": "fp8"}, {"activation_dtype": "mxfp4"}], ids=str
)
def test_a_graph_follows_the_routing(options: dict[str, str]) -> None:
    layer = _layer(64, 8, 4, 256, 128, torch.bfloat16)
    if "weight_format" in options:
        weights = layer["weights"]
        layer["weights"] = MoEWeights(
            weights.w13_weight.to(torch.float8_e4m3fn),
            torch.rand(8, 2, 2, device=DEVICE),
            None,
            weights.w2_weight.to(torch.float8_e4m3fn),
            torch.rand(8, 2, 1, device=DEVICE),
            None,
        )
    plan: MoEPlan = layer["plan"]
    layer["plan"] = replace(plan, **options)
    moe_apply(**layer, override="triton_moe_apply")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe_apply(**layer, override="triton_moe_apply")
    for experts in (8, 1, 3):
        layer["topk_ids"].copy_(torch.randint(-1, experts, (64, 4), dtype=torch.int32))
        graph.replay()
        assert torch.equal(captured, moe_apply(**layer, override="triton_moe_apply"))
