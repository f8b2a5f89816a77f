"""Compares SGLang's norms, activations and rope with our hooks with SGLang's own PyTorch code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")

from sglang.srt import runtime_context
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tokenspeed_kernel_sglang import receipt
from tokenspeed_kernel_sglang.layers import HOOKS

DTYPE = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def _hooked() -> Any:
    """Makes SGLang apply our hooks to its classes, and restores the classes after the module's tests."""
    own = {kind: kind.forward_cuda for kind in (RMSNorm, SiluAndMul, GeluAndMul, RotaryEmbedding)}
    if not hasattr(runtime_context, "publish"):  # 0.5.15; the layers of newer releases need no server arguments
        runtime_context.get_context().set_server_args(SimpleNamespace(rl_on_policy_target=None))
    for hooks in HOOKS.values():
        for target, hook in hooks.items():
            HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    yield
    HookRegistry.reset()
    for kind, method in own.items():
        kind.forward_cuda = method


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def make_norm(**options: Any) -> Any:
    norm = RMSNorm(64, eps=1e-5, **options).to(DTYPE)
    norm.weight.data = draw(64, seed=3)
    return norm


def make_rope(rotary_dim: int = 32, neox: bool = True) -> Any:
    rotary = RotaryEmbedding(32, rotary_dim, 50, 10000, neox, DTYPE)
    rotary.cos_sin_cache = rotary._compute_cos_sin_cache().float()
    return rotary


def reasons() -> str:
    return " ".join(row.reason for row in receipt().rows)


@pytest.mark.parametrize("shape", [(7, 64), (2, 3, 64)])
@torch.inference_mode()
def test_norm(shape: tuple[int, ...]) -> None:
    norm, x = make_norm(), draw(*shape)
    torch.testing.assert_close(norm.forward_cuda(x), norm.forward_native(x.clone()))
    assert receipt().served("norms")


@pytest.mark.parametrize("more", [False, True])
@torch.inference_mode()
def test_norm_with_a_residual_works_in_place(more: bool) -> None:
    norm, x, residual = make_norm(), draw(7, 64), draw(7, 64, seed=1)
    added = (draw(7, 64, seed=2),) if more else ()
    expected, total = norm.forward_native(x.clone(), residual.clone(), *added)
    pointer = x.data_ptr()
    out, carried = norm.forward_cuda(x, residual, *added)
    assert out.data_ptr() == pointer
    torch.testing.assert_close(carried, total, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert receipt().served("norms")


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"var_hidden_size": 32}, "a variance of other rows"),
        ({"cast_x_before_out_mul": True}, "rounding before the weight"),
        ({"override_orig_dtype": torch.float32}, "another result dtype"),
    ],
)
def test_refused_norms_run_sglangs_own(options: dict[str, Any], feature: str) -> None:
    calls: list[Any] = []
    hook = HOOKS["norms"]["sglang.srt.layers.layernorm.RMSNorm.forward_cuda"]
    norm = make_norm(**options)
    assert hook(lambda *arguments: calls.append(arguments), norm, draw(7, 64)) is None
    assert len(calls) == 1
    assert feature in reasons()
    assert not receipt().served("norms")


def test_a_norm_that_quantises_runs_sglangs_own() -> None:
    hook = HOOKS["norms"]["sglang.srt.layers.layernorm.RMSNorm.forward_cuda"]
    assert hook(lambda *_, **options: options, make_norm(), draw(7, 64), quant_linear="a layer") == {"quant_linear": "a layer"}
    assert "a norm that also quantises" in reasons()


@pytest.mark.parametrize("activation", [SiluAndMul, GeluAndMul])
@torch.inference_mode()
def test_activations(activation: Any) -> None:
    module, x = activation(), draw(5, 96)
    out = module.forward_cuda(x)
    torch.testing.assert_close(out, module.forward_native(x), rtol=2e-2, atol=2e-2)
    assert out.shape == (5, 48)
    assert receipt().served("activations")


@pytest.mark.parametrize(("rotary_dim", "neox"), [(32, True), (32, False), (16, True)])
@torch.inference_mode()
def test_rope_works_in_place_on_slices_of_qkv(rotary_dim: int, neox: bool) -> None:
    rotary, positions = make_rope(rotary_dim, neox), torch.tensor([3, 0, 49, 7, 7])
    qkv = draw(5, 6 * 32)
    q, k, _ = qkv.split([4 * 32, 32, 32], 1)
    expected = rotary.forward_native(positions, q.clone().contiguous(), k.clone().contiguous())
    before = qkv[:, -32:].clone()
    out = rotary.forward_cuda(positions, q, k)
    assert out[0] is q
    for got, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(qkv[:, -32:], before)
    assert receipt().served("rope")


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"offsets": torch.ones(5)}, "further arguments"),
        ({"fused_set_kv_buffer_arg": object()}, "a cache to write"),
        ({"table": torch.bfloat16}, "a table of torch.bfloat16"),
        ({"positions": torch.zeros(3, 5, dtype=torch.int64)}, "positions of several axes"),
    ],
)
def test_refused_rope_runs_sglangs_own(arguments: dict[str, Any], feature: str) -> None:
    hook = HOOKS["rope"]["sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda"]
    rotary = make_rope()
    if "table" in arguments:
        rotary.cos_sin_cache = rotary.cos_sin_cache.to(arguments.pop("table"))
    positions = arguments.pop("positions", torch.arange(5))
    assert hook(lambda *_, **__: "own", rotary, positions, draw(5, 128), draw(5, 32), **arguments) == "own"
    assert feature in reasons()


def test_an_unsupported_dtype_runs_sglangs_own() -> None:
    hook = HOOKS["activations"]["sglang.srt.layers.activation.SiluAndMul.forward_cuda"]
    assert hook(lambda *_: "own", SiluAndMul(), torch.zeros(2, 8, dtype=torch.int32)) == "own"
    assert "SGLang's own, because silu_and_mul" in str(receipt())
