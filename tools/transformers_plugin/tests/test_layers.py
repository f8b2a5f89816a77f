"""Tests the norms and gated MLPs that replace a model's own modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

from tiny_models import make
from torch.nn import functional
from transformers.activations import ACT2FN

from tokenspeed_kernel_transformers import layers
from tokenspeed_kernel_transformers.kernels import OPS, NotServedError
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


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_few_rows_outside_of_graphs_call_no_kernel_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call runs the kernel too, so that it is compiled before a graph is captured."""
    called: list[str] = []

    class Counted:
        def __getattr__(self, operator: str) -> Any:
            def run(*args: Any, **options: Any) -> Any:
                called.append(operator)
                return getattr(OPS, operator)(*args, **options)

            return run

    monkeypatch.setattr(layers, "OPS", Counted())
    monkeypatch.setattr(layers, "_compiled", set())
    norm = RMSNorm(modules_of(name, is_norm, torch.bfloat16)[0])
    mlp = GatedMLP(modules_of(name, is_gated_mlp, torch.bfloat16)[0])
    with torch.inference_mode():
        for module, operator, width in ((norm, "rmsnorm", len(norm.weight)), (mlp, mlp.operator, 32)):
            x = torch.randn(2, 3, width, dtype=torch.bfloat16)
            expected = module(x)
            called.clear()
            monkeypatch.setattr(layers, "few_rows", lambda given: True)
            for _ in range(2):
                torch.testing.assert_close(module(x), expected, atol=2e-2, rtol=1.6e-2)
            module(x[:1])
            always = name == "gemma3" and operator == "rmsnorm"  # its norm multiplies by 1 + weight
            assert called == [operator] * (3 if always else 2)
            monkeypatch.undo()
            monkeypatch.setattr(layers, "OPS", Counted())


def test_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not layers.few_rows(torch.zeros(1, 8))
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def on_gpu(rows: int) -> Any:
        return SimpleNamespace(is_cuda=True, numel=lambda: rows * 8, shape=(rows, 8))

    assert layers.few_rows(on_gpu(layers.FEW_ROWS))
    assert not layers.few_rows(on_gpu(layers.FEW_ROWS + 1))
    capturing = True
    assert not layers.few_rows(on_gpu(1))
    capturing = False
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not layers.few_rows(on_gpu(1))


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
