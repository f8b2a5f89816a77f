"""Builds and runs vLLM's layers of routed experts, and computes their results in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import fused_moe

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 4, 2, 256, 128, 9


def route(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool, **_: Any) -> tuple[Tensor, Tensor]:
    """Routes tokens in place of vLLM's own routing kernel, which needs a GPU."""
    chosen, ids = gating_output.float().sigmoid().topk(topk)
    return chosen, ids.int()


def layer_of(config: Any, **options: Any) -> Any:
    """Returns a layer of experts with a checkpoint's configuration."""
    arguments: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "renormalize": False,
        "quant_config": config,
        "prefix": "model.layers.0.mlp.experts",
        "custom_routing_function": route,
    }
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE  # the newer name, and the older
    return make(**arguments | options)


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16(), torch.randn(TOKENS, EXPERTS, generator=draw).bfloat16()


def run(config: Any, layer: Any, x: Tensor, logits: Tensor) -> Tensor:
    with set_forward_context(None, config, num_tokens=len(x)):
        out: Tensor = layer(hidden_states=x.clone(), router_logits=logits)
    return out


def weighted(gate: Tensor, up: Tensor, down: Tensor, x: Tensor, logits: Tensor) -> Tensor:
    """Returns the weighted sum over each token's experts, with float32 weights ``[experts, out, in]``."""
    shares, ids = route(x, logits, TOP_K, False)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token, row in enumerate(x.float()):
        for share, expert in zip(shares[token], ids[token].tolist(), strict=True):
            hidden = torch.nn.functional.silu(gate[expert] @ row) * (up[expert] @ row)
            out[token] += share * (down[expert] @ hidden)
    return out


def check(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert wanted.norm() > 1
    assert ((got.float() - wanted).norm(dim=-1) <= 0.01 * wanted.norm(dim=-1)).all()
