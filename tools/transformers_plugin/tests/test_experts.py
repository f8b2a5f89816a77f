"""Compares logits and greedy tokens of transformers' own models with those of eager experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

from tiny_models import generate, make, prompts

import tokenspeed_kernel_transformers
from tokenspeed_kernel import dequantize_mxfp4, quantize_mxfp4
from tokenspeed_kernel_transformers.experts import arrange, experts_forward, is_experts
from tokenspeed_kernel_transformers.kernels import NotServedError

MODELS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")


@pytest.fixture(autouse=True)
def registered() -> None:
    tokenspeed_kernel_transformers.register()


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if is_experts(module)]


@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str) -> None:
    model, ids = make(name), prompts()
    expected = generate(model, ids)
    model.set_experts_implementation("tokenspeed")
    got = generate(model, ids)
    torch.testing.assert_close(got.logits, expected.logits, atol=5e-5, rtol=5e-5)
    assert torch.equal(got.tokens, expected.tokens)
    formats = {layer.tokenspeed_arranged.plan.weight_format for layer in experts_of(model)}
    assert formats == {"dense"}


def test_the_plan_is_made_once() -> None:
    model, ids = make("mixtral"), prompts()
    model.set_experts_implementation("tokenspeed")
    generate(model, ids, new=1)
    first = [layer.tokenspeed_arranged for layer in experts_of(model)]
    generate(model, ids, new=2)
    assert all(a is layer.tokenspeed_arranged for a, layer in zip(first, experts_of(model), strict=True))
    # Weights in the core's order are not copied.
    for arranged, layer in zip(first, experts_of(model), strict=True):
        assert arranged.weights.w13_weight.data_ptr() == layer.gate_up_proj.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_from_mxfp4_are_packed(dtype: torch.dtype) -> None:
    """Weights that were dequantised from MXFP4 must be packed as MXFP4 again without loss, including blocks of small values and of
    zeros."""
    model, ids = make("gpt_oss", dtype), prompts()
    for layer in experts_of(model):
        for weight in (layer.gate_up_proj, layer.down_proj):
            packed = quantize_mxfp4(weight.data.mT.contiguous())
            packed[1][0, :, 0] = 0  # 2^-127, the smallest scale
            packed[0][1, 0] = 0
            weight.data.copy_(dequantize_mxfp4(*packed, out_dtype=dtype).mT)
    expected = generate(model, ids, new=2)
    model.set_experts_implementation("tokenspeed")
    got = generate(model, ids, new=2)
    assert {layer.tokenspeed_arranged.plan.weight_format for layer in experts_of(model)} == {"mxfp4"}
    for layer in experts_of(model):
        weights = layer.tokenspeed_arranged.weights
        unpacked = dequantize_mxfp4(weights.w13_weight, weights.w13_weight_scale, out_dtype=dtype)
        assert torch.equal(unpacked, layer.gate_up_proj.data.mT)
    tolerance = 5e-5 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(got.logits[:, 0], expected.logits[:, 0], atol=tolerance, rtol=tolerance)


def test_gradients_run_transformers_own() -> None:
    model, ids = make("mixtral"), prompts()
    expected = model(ids).logits
    model.set_experts_implementation("tokenspeed")
    got = model(ids).logits
    got.sum().backward()
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_gate": False}, "without a gate"),
        ({"has_post_expert_norm": True}, "a norm after each expert"),
        ({"_is_expert_parallel": True}, "divided among ranks"),
        ({"_apply_gate": lambda x: x[..., ::2].relu()}, "no SwiGLU"),
    ],
)
def test_refused(change: dict[str, Any], reason: str) -> None:
    layer = experts_of(make("mixtral"))[0]
    for name, value in change.items():
        setattr(layer, name, value)
    with pytest.raises(NotServedError, match=reason):
        arrange(layer, 2)


def test_compiled_as_one_graph() -> None:
    layer = experts_of(make("gpt_oss"))[0]
    arrange(layer, 2)
    x, ids = torch.randn(5, 32), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]])
    weights = torch.rand(5, 2)
    with torch.inference_mode():
        expected = experts_forward(layer, x, ids, weights)
        compiled = torch.compile(experts_forward, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(layer, x, ids, weights), expected)
