"""Tests the norms and gated MLPs that replace a model's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

from tiny_models import make
from torch.nn import functional
from transformers.activations import ACT2FN

from tokenspeed_kernel_transformers.kernels import NotServedError
from tokenspeed_kernel_transformers.layers import GatedMLP, RMSNorm, is_gated_mlp, is_norm


def modules_of(name: str, recognised: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [module for module in make(name, dtype).modules() if recognised(module)]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3", "qwen3_next"])
def test_norms(name: str) -> None:
    x = torch.randn(2, 3, 64)
    served = 0
    for own in modules_of(name, is_norm):
        if "Gated" in type(own).__name__:
            with pytest.raises(NotServedError, match="takes more than one tensor"):
                RMSNorm(own)
            continue
        norm = RMSNorm(own)
        of_size = x[..., : len(own.weight)].contiguous()
        with torch.inference_mode():
            torch.testing.assert_close(norm(of_size), own(of_size), atol=1e-6, rtol=1e-6)
        assert norm(of_size).requires_grad  # the model's own norm computes the gradients
        assert list(norm.state_dict()) == list(own.state_dict())
        served += 1
    assert served


def test_a_norm_rounds_once() -> None:
    """In bf16, 10% to 40% of the elements must differ from transformers' norm. Each result must be at least as close to the exact
    result as transformers'."""
    own = modules_of("llama", is_norm, torch.bfloat16)[0]
    norm, x = RMSNorm(own), torch.randn(512, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        got, twice = norm(x).double(), own(x).double()
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + own.variance_epsilon) * own.weight.double()
    different = got != twice
    assert 0.1 < different.double().mean() < 0.4
    assert ((got - exact).abs() <= (twice - exact).abs() * 1.001).all()


def test_other_norms_are_refused() -> None:
    class PlusOneRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.rms_norm(x, (8,), self.weight, self.eps) + 1

    with pytest.raises(NotServedError, match="something else than an RMS norm"):
        RMSNorm(PlusOneRMSNorm())
    moved: Any = PlusOneRMSNorm()
    moved._hf_hook = object()
    with pytest.raises(NotServedError, match="accelerate"):
        RMSNorm(moved)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_mlps(activation: str, bias: bool) -> None:
    own = modules_of("llama", is_gated_mlp)[0]
    own.act_fn = ACT2FN[activation]
    if bias:
        for name in ("gate_proj", "up_proj"):
            getattr(own, name).bias = torch.nn.Parameter(torch.randn(64))
    mlp, x = GatedMLP(own), torch.randn(2, 3, 32)
    assert mlp.operator == ("silu_and_mul" if activation == "silu" else "gelu_and_mul")
    with torch.inference_mode():
        torch.testing.assert_close(mlp(x), own(x), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="eager")(x), own(x))
    assert mlp(x).requires_grad
    assert list(mlp.state_dict()) == list(own.state_dict())


def test_other_mlps_are_refused() -> None:
    own = modules_of("llama", is_gated_mlp)[0]
    own.act_fn = ACT2FN["relu"]
    with pytest.raises(NotServedError, match="activation"):
        GatedMLP(own)
    own.act_fn = ACT2FN["silu"]
    own.forward = lambda x: x
    with pytest.raises(NotServedError, match="something else than a gated MLP"):
        GatedMLP(own)
    own.gate_proj = torch.nn.Identity()
    with pytest.raises(NotServedError, match="Identity"):
        GatedMLP(own)
