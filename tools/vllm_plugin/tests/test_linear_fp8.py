"""Tests fp8 linear layers of vLLM with our method: scales per tensor, channel and block, loaded by vLLM's loader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("tokenspeed_kernel", reason="GEMMs are the core's")
arguments = pytest.importorskip("compressed_tensors.quantization", reason="vLLM reads compressed-tensors checkpoints with it")

from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors import schemes
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm_linear import check_compiled_whole

import tokenspeed_kernel_vllm
from tokenspeed_kernel_vllm import linear_planned
from tokenspeed_kernel_vllm.linear_fp8 import Fp8Linear

IN, PARTS = 256, (128, 256)
E4M3 = torch.float8_e4m3fn
INPUT_SCALE = 3 / 256  # exact in bf16, the default dtype of vLLM models


@pytest.fixture
def fp8(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Enables this part of the plugin. vLLM's tables are restored after the test."""
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    monkeypatch.setattr(one_process, "model_config", SimpleNamespace(dtype=torch.bfloat16))
    monkeypatch.setenv("TOKENSPEED_VLLM_FP8_LINEAR", "1")
    tokenspeed_kernel_vllm.register()
    return one_process


def config_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns vLLM's configuration of a checkpoint, from the registry that our configurations are in."""
    if not kind.startswith("channel"):
        given: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if kind.endswith("static") else "dynamic"}
        if kind == "block":
            given["weight_block_size"] = [128, 128]
        return quantization.get_quantization_config("fp8").from_config(given)
    weights = arguments.QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    scheme = schemes.CompressedTensorsW8A8Fp8(weights, is_static_input_scheme=kind.endswith("static"))
    cls = quantization.get_quantization_config("compressed-tensors")
    # vLLM chooses the scheme by the GPU.
    monkeypatch.setattr(cls, "get_scheme", lambda self, layer, layer_name: scheme)
    return cls({}, [], "float-quantized")


def make_layer(kind: str, monkeypatch: pytest.MonkeyPatch, prefix: str = "model.layers.0.mlp.gate_up_proj", **options: Any) -> Any:
    config = config_of(kind, monkeypatch)
    return MergedColumnParallelLinear(IN, list(PARTS), bias=False, quant_config=config, prefix=prefix, **options)


def checkpoint(kind: str) -> list[tuple[Tensor, Tensor]]:
    """Returns the weight and the scale of each part of a fused layer."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for rows in PARTS:
        weight = (torch.randn(rows, IN, generator=draw) * 60).to(E4M3)
        shape = {"block": (rows // 128, IN // 128), "channel": (rows, 1)}.get(kind.partition("_")[0], ())
        made.append((weight, torch.rand(shape, generator=draw) * 1e-3 + 1e-3))
    return made


def load(layer: Any, parts: list[tuple[Tensor, Tensor]]) -> None:
    for part, (weight, scale) in enumerate(parts):
        layer.weight.weight_loader(layer.weight, weight, part)
        scales = layer.weight_scale_inv if hasattr(layer, "weight_scale_inv") else layer.weight_scale
        scales.weight_loader(scales, scale, part)
        if hasattr(layer, "input_scale"):
            layer.input_scale.weight_loader(layer.input_scale, torch.tensor(INPUT_SCALE * (0.5 + 0.5 * part)), part)
    layer.quant_method.process_weights_after_loading(layer)


def expected(kind: str, parts: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """Returns the layer's output in float32, with activations rounded as vLLM's own kernels round them."""
    x = x.float()
    if kind.endswith("static"):
        x = (x / INPUT_SCALE).clamp(-448, 448).to(E4M3).float() * INPUT_SCALE
    else:
        groups = x.view(*x.shape[:-1], -1, 128 if kind == "block" else IN)
        scale = groups.abs().amax(-1, keepdim=True) / 448
        x = ((groups / scale).to(E4M3).float() * scale).view(x.shape)
    rows = []
    for weight, scale in parts:
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if kind == "block" else scale
        rows.append(weight.float() * wide)
    return x @ torch.cat(rows).t()


KINDS = ["tensor", "tensor_static", "channel", "channel_static", "block"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer(fp8: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    layer, parts = make_layer(kind, monkeypatch), checkpoint(kind)
    assert type(layer.quant_method) is Fp8Linear
    load(layer, parts)
    for tokens in (1, 5):
        x = torch.randn(tokens, IN, dtype=torch.bfloat16)
        got, _ = layer(x)
        wanted = expected(kind, parts, x)
        assert ((got.float() - wanted).norm(dim=-1) <= 0.01 * wanted.norm(dim=-1)).all()
    assert layer(torch.ones(2, 3, IN, dtype=torch.bfloat16))[0].shape == (2, 3, sum(PARTS))


def test_a_fused_checkpoint_has_one_scale(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, parts = make_layer("tensor", monkeypatch), checkpoint("tensor")
    for part, (weight, _) in enumerate(parts):
        layer.weight.weight_loader(layer.weight, weight, part)
    layer.weight_scale.data[0] = 2e-3
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, IN, dtype=torch.bfloat16)
    wanted = expected("tensor", [(weight, torch.tensor(2e-3)) for weight, _ in parts], x)
    assert ((layer(x)[0].float() - wanted).norm(dim=-1) <= 0.01 * wanted.norm(dim=-1)).all()


@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_a_layer_is_compiled_whole_and_once(fp8: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    layer = make_layer(kind, monkeypatch)
    load(layer, checkpoint(kind))
    check_compiled_whole(layer, IN)


# -- fallback to vLLM -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the log lines about layers that fall back to vLLM. vLLM's own method is kept from selecting a kernel, which needs a
    GPU."""
    said: list[str] = []
    monkeypatch.setattr(linear_planned.logger, "warning_once", lambda text, *args: said.append(text % args))
    monkeypatch.setattr("vllm.model_executor.layers.quantization.fp8.init_fp8_linear_kernel", lambda **_: None)
    return said


def test_it_is_off_by_default(fp8: Any, own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENSPEED_VLLM_FP8_LINEAR")
    assert type(make_layer("block", monkeypatch).quant_method) is Fp8LinearMethod
    assert not own


def test_the_expansion_of_latents_is_vllms(fp8: Any, own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("block", monkeypatch, prefix="model.layers.0.self_attn.kv_b_proj")
    assert type(layer.quant_method) is Fp8LinearMethod


def test_other_blocks_are_vllms(fp8: Any, own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cls = quantization.get_quantization_config("fp8")
    given = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]}
    layer = MergedColumnParallelLinear(IN, list(PARTS), bias=False, quant_config=cls.from_config(given), prefix="model.layers.0.up")
    assert type(layer.quant_method) is Fp8LinearMethod
    assert "it serves float32 scales of blocks of 128 x 128, not [64, 128]" in own[0]


def test_vllm_serves_what_no_kernel_does(fp8: Any, own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_planned, "core_is_there", lambda: False)
    layer = make_layer("block", monkeypatch)
    assert layer.quant_method.plan is None
    assert layer.quant_method.own.fp8_linear is None  # set by `create_weights` of vLLM's method
    assert len(own) == 1
    assert own[0].startswith("tokenspeed_kernel_vllm: vLLM's own fp8 linear layers, because tokenspeed-kernel, which chooses")


def test_unquantised_layers_are_vllms(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = quantization.get_quantization_config("fp8").from_config(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["model.layers.0.mlp.gate"]}
    )
    layer = MergedColumnParallelLinear(IN, list(PARTS), bias=False, quant_config=config, prefix="model.layers.0.mlp.gate")
    assert type(layer.quant_method) is UnquantizedLinearMethod
