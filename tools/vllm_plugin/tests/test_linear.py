"""Tests vLLM's linear layers whose ``quant_method`` is the plugin's `Linear`, which multiplies with the core's `mm`.

vLLM creates, loads and compiles the layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("tokenspeed_kernel", reason="products are the core's")

from vllm.model_executor import custom_op
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

import tokenspeed_kernel_vllm
from tokenspeed_kernel_vllm.experts import config as ours
from tokenspeed_kernel_vllm.linear import Linear, RouterLinear


def make_layer(bias: bool = True) -> Any:
    layer = ReplicatedLinear(48, 80, bias=bias, quant_config=ours.GptOssConfig(), prefix="model.layers.0.attn.o_proj")
    draw = torch.Generator().manual_seed(1)
    for name, parameter in layer.named_parameters():
        loaded = torch.randn(parameter.shape, generator=draw).bfloat16()
        parameter.weight_loader(parameter, loaded)
        assert torch.equal(parameter, loaded), name
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer(one_process: Any, monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setenv("TOKENSPEED_VLLM_LINEAR", "1")
    layer = make_layer(bias)
    assert isinstance(layer.quant_method, Linear)
    for tokens in (0, 1, 5):
        x = torch.randn(tokens, 48, dtype=torch.bfloat16)
        product = x.float() @ layer.weight.float().T + (layer.bias.float() if bias else 0.0)
        got, _ = layer(x)
        torch.testing.assert_close(got.float(), product, rtol=0.01, atol=0.02)
    assert layer(torch.ones(2, 3, 48, dtype=torch.bfloat16))[0].shape == (2, 3, 80)


def test_a_layer_is_compiled_whole_and_once(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles a layer as vLLM does: as one graph without breaks, for any number of tokens."""
    monkeypatch.setenv("TOKENSPEED_VLLM_LINEAR", "1")
    layer = make_layer()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: layer(x)[0], backend=backend, fullgraph=True)
    for tokens in (3, 7, 12):
        x = torch.randn(tokens, 48, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), layer(x)[0])
    assert len(graphs) == 1


def test_a_router(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM creates a router without a quantisation method. vLLM's own table replaces the router's class."""
    monkeypatch.setattr(custom_op, "op_registry_oot", table := {})
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.setenv("TOKENSPEED_VLLM_LINEAR", "1")
    for _ in range(2):
        tokenspeed_kernel_vllm.register()
    assert table == {"ReplicatedLinear": RouterLinear}
    layer = ReplicatedLinear(48, 8, bias=True, prefix="model.layers.0.mlp.router", return_bias=False)
    other = ReplicatedLinear(48, 8, bias=True, prefix="model.layers.0.mlp.gate", return_bias=False)
    assert type(layer.quant_method) is Linear
    assert type(other.quant_method) is UnquantizedLinearMethod
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(5, 48, dtype=torch.bfloat16)
    expected = x.float() @ layer.weight.float().T + layer.bias.float()
    torch.testing.assert_close(layer(x).float(), expected, rtol=0.01, atol=0.02)
    monkeypatch.setenv("TOKENSPEED_VLLM_LINEAR", "0")
    assert type(ReplicatedLinear(48, 8, prefix="model.layers.0.mlp.router").quant_method) is UnquantizedLinearMethod


def test_it_is_off_by_default(one_process: Any) -> None:
    assert type(make_layer().quant_method) is UnquantizedLinearMethod


def test_experts_may_be_off_where_products_are_on(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_VLLM_EXPERTS", "0")
    asked = []
    monkeypatch.setattr(ours, "plan_of", asked.append)
    monkeypatch.setattr(ours.GptOssMxfp4Config, "get_quant_method", lambda self, layer, prefix: "vLLM's own")
    experts = object.__new__(ours.RoutedExperts)
    assert ours.GptOssConfig().get_quant_method(experts, "model.layers.0.mlp.experts") == "vLLM's own"
    assert not asked
