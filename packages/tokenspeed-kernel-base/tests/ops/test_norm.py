"""Tests rmsnorm, layernorm and qk_rmsnorm against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tokenspeed_kernel_base.ops.norm.layernorm import layernorm
from tokenspeed_kernel_base.ops.norm.qk_rmsnorm import qk_rmsnorm
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.ops.norm.rmsnorm_gated import rmsnorm_gated

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double().numpy()
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight.double().numpy()
    return torch.from_numpy(normed)


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Asserts that the error is at most half a unit in the last place, plus a margin for the float32 computation before
    rounding."""
    unit = torch.finfo(got.dtype).eps
    slack = 0.501 * unit if got.dtype in (torch.float16, torch.bfloat16) else 8 * unit
    torch.testing.assert_close(got.double(), exact, rtol=slack, atol=1e-7 if got.dtype == torch.float16 else 1e-30)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (2, 5, 1001), (4, 2880), (7,)])
def test_rmsnorm_is_the_formula_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    got = rmsnorm(x, weight, eps=1e-5)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_rounded_once(got, formula(x, weight, 1e-5))


def test_rmsnorm_agrees_with_transformers() -> None:
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(512, eps=1e-6)
    theirs.weight.data.normal_()
    x = torch.randn(9, 512)
    torch.testing.assert_close(rmsnorm(x, theirs.weight.data, eps=1e-6), theirs(x).detach(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 5, 1001), (7,)])
@pytest.mark.parametrize("given", [(False, False), (True, False), (False, True), (True, True)])
def test_layernorm_is_the_formula_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, given: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape, dtype=dtype) + 3, torch.randn(shape[-1], dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    wide = x.double()
    normed = (wide - wide.mean(-1, keepdim=True)) / torch.sqrt(wide.var(-1, correction=0, keepdim=True) + 1e-5)
    scaled = normed * (weight.double() if given[0] else 1.0)
    exact = scaled + (bias.double() if given[1] else 0.0)
    got = layernorm(x, weight if given[0] else None, bias if given[1] else None, eps=1e-5)
    assert got.dtype == dtype
    assert got.is_contiguous()
    # Subtracting the mean and adding the bias may cancel. So the error of the arithmetic is relative to the terms, not to the
    # result.
    arithmetic = 16 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps * (scaled.abs() + exact.abs() + 1)
    assert ((got.double() - exact).abs() <= 0.501 * torch.finfo(dtype).eps * exact.abs() + arithmetic).all()


def test_layernorm_agrees_with_torch() -> None:
    torch.manual_seed(0)
    x, weight, bias, residual = torch.randn(9, 512), torch.randn(512), torch.randn(512), torch.randn(9, 512)
    normed, total = layernorm(x, weight, bias, eps=1e-6, residual=residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, torch.nn.functional.layer_norm(total, (512,), weight, bias, 1e-6), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_float32_residual_beside_16_bit_floats(dtype: torch.dtype) -> None:
    """Asserts that the residual stream stays float32: the sum of residual and x is normalised without being rounded to x's
    dtype."""
    x, residual, weight = torch.randn(6, 64, dtype=dtype), torch.randn(6, 64) * 100, torch.randn(64, dtype=dtype)
    normed, total = rmsnorm(x, weight, residual=residual)
    assert (normed.dtype, total.dtype) == (dtype, torch.float32)
    assert torch.equal(total, x.float() + residual)
    assert torch.equal(normed, rmsnorm(total, weight.float()).to(dtype))
    kept = residual.clone()
    results = rmsnorm(x, weight, residual=kept, residual_out=kept)
    assert results[1] is kept
    assert torch.equal(kept, total)
    assert rmsnorm.explain(x, weight, residual=residual).request.traits["wide_residual"] is True
    assert rmsnorm.explain(x, weight, residual=x).request.traits["wide_residual"] is False
    with pytest.raises(TypeError, match=r"residual .* b?float.* got float64"):
        rmsnorm(x, weight, residual=residual.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_rmsnorm_normalises_the_rounded_sum_with_the_residual(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(6, 64, dtype=dtype), torch.randn(6, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    normed, total = rmsnorm(x, weight, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rmsnorm(total, weight))
    assert total.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_rmsnorm_takes_the_weight_in_another_dtype(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, dtype=weight_dtype)
    assert_rounded_once(rmsnorm(x, weight), formula(x, weight, 1e-5))


def test_rmsnorm_of_zeros_and_of_huge_and_tiny_values() -> None:
    assert torch.equal(rmsnorm(torch.zeros(2, 8), torch.ones(8)), torch.zeros(2, 8))
    for scale in (1e-20, 1e15):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)) * scale
        torch.testing.assert_close(rmsnorm(x, torch.ones(8), eps=1e-30).double(), formula(x, torch.ones(8), 1e-30))
    assert rmsnorm(torch.tensor([[float("nan"), 1.0], [1.0, 1.0]]), torch.ones(2)).isnan().tolist() == [
        [True, True],
        [False, False],
    ]


def test_rmsnorm_reads_strided_inputs() -> None:
    wide = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(16)
    for x in (wide[:, 1], wide.transpose(0, 1), wide[..., ::2]):
        assert rmsnorm(x, weight[: x.shape[-1]]).is_contiguous()
        got = rmsnorm(x, weight[: x.shape[-1]], residual=x)
        assert all(t.is_contiguous() for t in got)
        copied = rmsnorm(x.clone(memory_format=torch.contiguous_format), weight[: x.shape[-1]], residual=x)
        assert all(map(torch.equal, got, copied))


def test_rmsnorm_writes_into_out_and_in_place() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    wanted, wanted_total = rmsnorm(x, weight, residual=residual)
    out = torch.empty(4, 8)
    normed, total = rmsnorm(x, weight, residual=residual, out=out)
    assert normed is out
    assert torch.equal(out, wanted)
    assert torch.equal(total, wanted_total)

    results = rmsnorm(x, weight, residual=residual, out=x, residual_out=residual)
    assert results[0] is x
    assert results[1] is residual
    assert torch.equal(x, wanted)
    assert torch.equal(residual, wanted_total)


X, W = torch.ones(2, 4), torch.ones(4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X.int()}, TypeError, "x must be a tensor of .*float16.*, got int32"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must be of shape \[..., hidden\], got \[\]"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must be of shape \[hidden\] where hidden is 4 in x, got \[3\]"),
        ({"weight": torch.ones(1, 4)}, ValueError, "weight must be of shape"),
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
        ({"eps": 0.0}, ValueError, "eps must be positive, got 0.0"),
        ({"eps": float("nan")}, ValueError, "eps must be positive, got nan"),
        ({"eps": "1e-5"}, TypeError, "eps must be float, got str"),
        ({"residual": torch.ones(1, 4)}, ValueError, r"residual must be of shape \[2, 4\] like x, got \[1, 4\]"),
        ({"residual": X.double()}, TypeError, "residual must be a tensor of float32, got float64"),
        ({"residual": X.bfloat16()}, TypeError, "residual must be a tensor of float32, got bfloat16"),
        ({"out": torch.ones(2, 3)}, ValueError, r"out must have shape \[2, 4\]"),
        ({"out": X.half()}, TypeError, "out must be float32, got a float16 tensor"),
        ({"residual_out": X.clone()}, ValueError, "residual_out must be None"),
    ],
)
def test_rmsnorm_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^rmsnorm: .*{message}"):
        rmsnorm(**{"x": X, "weight": W, **arguments})


@pytest.mark.parametrize("dtype", FLOATS)
def test_qk_rmsnorm_normalises_each_head(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(5, 6 + 2 * 2, 57, dtype=dtype)
    q, k = qkv[:, :6], qkv[:, 6:8]
    q_weight, k_weight = torch.randn(57, dtype=dtype), torch.randn(57, dtype=dtype)
    before = qkv.clone()
    q_normed, k_normed = qk_rmsnorm(q, k, q_weight, k_weight, eps=1e-3)
    assert torch.equal(qkv, before)
    for got, x, weight in ((q_normed, q, q_weight), (k_normed, k, k_weight)):
        assert got.is_contiguous()
        for head in range(x.shape[1]):
            assert_rounded_once(got[:, head], formula(x[:, head], weight, 1e-3))
            assert torch.equal(got[:, head], rmsnorm(x[:, head], weight, eps=1e-3))


def test_qk_rmsnorm_default_eps_is_1e_6() -> None:
    q = torch.full((1, 1, 4), 1e-3)
    got, _ = qk_rmsnorm(q, q, torch.ones(4), torch.ones(4))
    torch.testing.assert_close(got, torch.full((1, 1, 4), 0.5**0.5))


def test_qk_rmsnorm_writes_into_outs_and_in_place() -> None:
    torch.manual_seed(0)
    q, k, q_weight, k_weight = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(8), torch.randn(8)
    wanted_q, wanted_k = qk_rmsnorm(q, k, q_weight, k_weight)
    k_out = torch.empty(3, 2, 8)
    got_q, got_k = qk_rmsnorm(q, k, q_weight, k_weight, k_out=k_out)
    assert got_k is k_out
    assert torch.equal(got_k, wanted_k)
    assert torch.equal(got_q, wanted_q)
    got_q, got_k = qk_rmsnorm(q, k, q_weight, k_weight, q_out=q, k_out=k)
    assert got_q is q
    assert got_k is k
    assert torch.equal(q, wanted_q)
    assert torch.equal(k, wanted_k)


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8)])
def test_qk_rmsnorm_of_nothing(shape: tuple[int, ...]) -> None:
    q, k = qk_rmsnorm(torch.ones(shape), torch.ones(shape), torch.ones(8), torch.ones(8))
    assert q.shape == k.shape == shape


@given(
    tokens=st.integers(1, 3), heads=st.integers(1, 4), kv_heads=st.integers(1, 4), head_dim=st.integers(1, 40),
    scale=st.floats(1e-3, 1e3), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_qk_rmsnorm_does_not_depend_on_scale(
    tokens: int, heads: int, kv_heads: int, head_dim: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, head_dim, dtype=torch.float64, generator=generator)
    k = torch.randn(tokens, kv_heads, head_dim, dtype=torch.float64, generator=generator)
    ones = torch.ones(head_dim)
    got = qk_rmsnorm(q, k, ones, ones, eps=1e-30)
    scaled = qk_rmsnorm(q * scale, k * scale, ones, ones, eps=1e-30)
    for one, other in zip(got, scaled, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one.square().mean(-1), torch.ones(one.shape[:2], dtype=torch.float64))


Q, K = torch.ones(2, 4, 8), torch.ones(2, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": Q.int()}, TypeError, "q must be a tensor of .*, got int32"),
        ({"q": Q[0]}, ValueError, r"q must be of shape \[tokens, heads, head_dim\], got \[4, 8\]"),
        ({"k": K.half()}, TypeError, "k must be a tensor of float32, got float16"),
        ({"k": K[:1]}, ValueError, "k must be of shape .* where tokens is 2 in q"),
        ({"k": K[..., :4]}, ValueError, "k must be of shape .* where head_dim is 8 in q"),
        ({"q_weight": torch.ones(4)}, ValueError, "q_weight must be of shape"),
        ({"k_weight": torch.ones(2, 8)}, ValueError, "k_weight must be of shape"),
        ({"k_weight": torch.ones(8).long()}, TypeError, "k_weight must be a tensor of"),
        ({"eps": -1.0}, ValueError, "eps must be positive"),
        ({"q_out": K.clone()}, ValueError, "q_out must have shape"),
        ({"k_out": K.double()}, TypeError, "k_out must be float32"),
    ],
)
def test_qk_rmsnorm_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^qk_rmsnorm: {message}"):
        qk_rmsnorm(**{"q": Q, "k": K, "q_weight": torch.ones(8), "k_weight": torch.ones(8), **arguments})


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    x, weight = torch.randn(3, 5, 8)[:, 1], torch.randn(8)
    check_custom_op(rmsnorm, {"x": x, "weight": weight})
    check_custom_op(rmsnorm, {"x": x.t().contiguous().t(), "weight": weight, "residual": x.t().contiguous().t()})
    check_custom_op(rmsnorm, {"x": x, "weight": weight, "residual": x, "residual_out": torch.empty(3, 8)})
    qkv = torch.randn(3, 8, 8)
    q, k = qkv[:, :4], qkv[:, 4:6]
    check_custom_op(qk_rmsnorm, {"q": q, "k": k, "q_weight": weight, "k_weight": weight})
    check_custom_op(qk_rmsnorm, {"q": q, "k": k, "q_weight": weight, "k_weight": weight, "q_out": torch.empty(3, 4, 8)})


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gated_rmsnorm_is_its_formula(activation: str, norm_before_gate: bool) -> None:
    x, gate = torch.randn(3, 2, 10, dtype=torch.float64), torch.randn(3, 2, 10, dtype=torch.float64)
    weight = torch.randn(10, dtype=torch.float64)
    factor = (gate if activation == "silu" else 1) / (1 + torch.exp(-gate))
    rows = x if norm_before_gate else x * factor
    expected = rows / torch.sqrt((rows * rows).sum(-1, keepdim=True) / 10 + 1e-5) * weight
    expected = expected * factor if norm_before_gate else expected
    got = rmsnorm_gated(x, gate, weight, activation=activation, norm_before_gate=norm_before_gate)
    torch.testing.assert_close(got, expected)


def test_gated_rmsnorm_is_that_of_qwen3_next_in_transformers() -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(7, 48), 3 * torch.randn(7, 48)
    norm = Qwen3NextRMSNormGated(48, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(rmsnorm_gated(x, gate, norm.weight.detach(), 1e-3), norm(x, gate).detach())


def test_gated_rmsnorm_of_groups_is_that_of_mamba2_in_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.24", reason="an older transformers may have no groups here")
    torch.manual_seed(0)
    x, gate = torch.randn(7, 48), 3 * torch.randn(7, 48)
    grouped = MambaRMSNormGated(48, group_size=12, eps=1e-3)
    got = rmsnorm_gated(x.view(7, 4, 12), gate.view(7, 4, 12), torch.ones(12), 1e-3, norm_before_gate=False)
    torch.testing.assert_close(got.view(7, 48), grouped(x, gate).detach())
