"""Calls moe_apply as vLLM's quantisation method for mxfp4 experts does, with the names and shapes of vLLM's parameters.

Names and shapes are those of vllm 0.26.0, model_executor/models/gpt_oss.py and model_executor/layers/fused_moe. vLLM itself is not
needed.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply

from .experts import relative_error

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 4, 96, 64


def readme_code() -> dict[str, Any]:
    """Returns the names that the README's code defines."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    section = readme.partition("### Experts in vLLM")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace


def layer_of(device: torch.device) -> SimpleNamespace:
    """Returns a RoutedExperts layer as vLLM's loader leaves it: gate and up rows are interleaved."""
    draw = torch.Generator().manual_seed(3)

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8).to(device)

    def scales(*shape: int) -> Tensor:
        return torch.randint(120, 124, shape, generator=draw, dtype=torch.uint8).to(device)

    def biases(*shape: int) -> Tensor:
        return (0.2 * torch.randn(shape, generator=draw)).bfloat16().to(device)

    return SimpleNamespace(
        w13_weight=codes(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2),
        w13_weight_scale=scales(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32),
        w13_bias=biases(EXPERTS, 2 * INTERMEDIATE),
        w2_weight=codes(EXPERTS, HIDDEN, INTERMEDIATE // 2),
        w2_weight_scale=scales(EXPERTS, HIDDEN, INTERMEDIATE // 32),
        w2_bias=biases(EXPERTS, HIDDEN),
        top_k=TOP_K,
    )


@pytest.mark.parametrize("activation_dtype", ["fp8", "none"])
@pytest.mark.parametrize("routed", [True, False])
def test_what_the_readme_shows(gfx950: torch.device, routed: bool, activation_dtype: str) -> None:
    """Weights are processed once after loading, and the layer is applied to routed tokens, or to router logits."""
    method = readme_code()["Mxfp4Experts"](activation_dtype)
    layer = layer_of(gfx950)
    given = {name: value.clone() for name, value in vars(layer).items() if isinstance(value, Tensor)}
    method.process_weights_after_loading(layer)
    assert not hasattr(layer, "w13_weight")  # the originals may be freed
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(5, HIDDEN, generator=draw).bfloat16().to(gfx950)
    router_logits = torch.randn(5, EXPERTS, generator=draw).bfloat16().to(gfx950)
    top = router_logits.float().topk(TOP_K)
    weights, ids = top.values.softmax(-1), top.indices
    if routed:
        out = method.apply(layer, x, weights, ids, None, None)
    else:
        out = method.apply_monolithic(layer, x, router_logits)
    renamed = SimpleNamespace(**{name.replace("_bias", "_weight_bias"): value for name, value in given.items()})
    wanted = moe_apply.operator.body(x.float(), renamed, weights, ids.int(), method.plan)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, wanted) < (0.03 if activation_dtype == "fp8" else 0.005)
