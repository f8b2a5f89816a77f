"""Builds and loads GPT-OSS's layer of experts as vLLM does, and computes the layer's result in plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from tokenspeed_kernel_vllm.experts import config as ours

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 3, 64, 11
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make_layer(intermediate: int, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "renormalize": True,
        "quant_config": ours.GptOssConfig(),
        "prefix": "model.layers.0.mlp.experts",
        "has_bias": True,
        "activation": "swigluoai",
    }
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE  # the newer name, and the older
    return make(**arguments | options)


def checkpoint(intermediate: int) -> dict[str, Tensor]:
    """Returns the tensors of a layer in GPT-OSS's format: rows of w13 are gate 0, up 0, gate 1, up 1, ..."""
    draw = torch.Generator().manual_seed(3)
    shapes = {"w13": (2 * intermediate, HIDDEN), "w2": (HIDDEN, intermediate)}
    tensors = {}
    for name, (rows, columns) in shapes.items():
        tensors[f"{name}_weight"] = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, generator=draw)
        tensors[f"{name}_weight_scale"] = torch.randint(121, 126, (EXPERTS, rows, columns // 32), dtype=torch.uint8, generator=draw)
        tensors[f"{name}_bias"] = torch.randn(EXPERTS, rows, generator=draw).bfloat16()
    return tensors


def load(
    layer: Any, tensors: dict[str, Tensor], shard: slice = slice(None), experts: slice = slice(None), first: bool = True
) -> None:
    """Loads a rank's shard of the intermediate features, or the rank's experts, as vLLM's GPT-OSS loader does. Then prepares the
    weights."""
    begin, end, _ = shard.indices(tensors["w2_weight"].shape[2] * 2)
    part = {
        "w13_weight": tensors["w13_weight"][experts, 2 * begin : 2 * end],
        "w13_weight_scale": tensors["w13_weight_scale"][experts, 2 * begin : 2 * end],
        "w13_bias": tensors["w13_bias"][experts, 2 * begin : 2 * end],
        "w2_weight": tensors["w2_weight"][experts, :, begin // 2 : end // 2],
        "w2_weight_scale": tensors["w2_weight_scale"][experts, :, begin // 32 : end // 32],
        "w2_bias": tensors["w2_bias"][experts] * first,
    }
    for name, value in part.items():
        parameter = getattr(layer.routed_experts, name)
        parameter.weight_loader(parameter, value, weight_name=name, shard_id=None, expert_id=None)
    model = SimpleNamespace(dtype=torch.bfloat16, quantization="gpt_oss_mxfp4", word_embeddings_untied_by_checkpoint=False)
    process_weights_after_loading(layer, model, torch.device("cpu"))


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16(), torch.randn(TOKENS, EXPERTS, generator=draw).bfloat16()


def run(config: Any, layer: Any, x: Tensor, logits: Tensor) -> Tensor:
    with set_forward_context(None, config, num_tokens=len(x)):
        out: Tensor = layer(hidden_states=x.clone(), router_logits=logits)
    return out


def expected(tensors: dict[str, Tensor], x: Tensor, logits: Tensor) -> Tensor:
    def decoded(name: str) -> Tensor:
        packed, scale = tensors[f"{name}_weight"], tensors[f"{name}_weight_scale"]
        values = CODES[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]
        return values * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)

    w13, w2 = decoded("w13").float(), decoded("w2").float()
    chosen, ids = logits.float().topk(TOP_K)
    result = torch.zeros(x.shape, dtype=torch.float32)
    for token, (weights, experts) in enumerate(zip(chosen.softmax(-1), ids, strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            gate_up = w13[expert] @ x[token].float() + tensors["w13_bias"][expert].float()
            gate, up = gate_up[::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
            hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            result[token] += weight * (w2[expert] @ hidden + tensors["w2_bias"][expert].float())
    return result


def check(got: Tensor, wanted: Tensor, error: float = 0.01) -> None:
    assert got.shape == wanted.shape
    assert ((got.float() - wanted).norm(dim=-1) <= error * wanted.norm(dim=-1)).all()
