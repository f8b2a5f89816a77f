"""Tests silu_and_mul, gelu_and_mul and swiglu against their formulas in float64, and against the layer of a published model."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tokenspeed_kernel_base.ops.activation.gelu_and_mul import gelu_and_mul
from tokenspeed_kernel_base.ops.activation.silu_and_mul import silu_and_mul
from tokenspeed_kernel_base.ops.activation.swiglu import swiglu

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def formula(
    gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.0, limit: float | None = None, beta: float = 0.0
) -> torch.Tensor:
    g, u = gate.double().numpy(), up.double().numpy()
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return torch.from_numpy((u + beta) * g / (1 + np.exp(-alpha * g)))


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Asserts that the error is at most half a unit in the last place, plus a margin for the float32 arithmetic before the result
    is rounded."""
    unit = torch.finfo(got.dtype).eps
    slack = 0.501 * unit if got.dtype in (torch.float16, torch.bfloat16) else 16 * unit
    torch.testing.assert_close(got.double(), exact, rtol=slack, atol=1e-7 if got.dtype == torch.float16 else 1e-30)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2,), (1, 2), (3, 4, 2 * 1001), (5, 2 * 2880)])
def test_silu_and_mul_is_the_formula_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(shape, dtype=dtype)
    got = silu_and_mul(x)
    d = shape[-1] // 2
    assert got.dtype == dtype
    assert got.shape == (*shape[:-1], d)
    assert_rounded_once(got, formula(x[..., :d], x[..., d:]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(2,), (3, 4, 2 * 1001)])
def test_gelu_and_mul_is_the_formula_rounded_once(shape: tuple[int, ...], approximate: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(shape, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    inner = torch.erf(gate / math.sqrt(2))
    if approximate == "tanh":
        inner = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    exact = gate / 2 * (1 + inner) * up
    got = gelu_and_mul(x, approximate)
    assert got.dtype == dtype
    unit = torch.finfo(dtype).eps
    # If the gate is far below 0, the sum 1 + inner cancels. The error is then relative to gate times up, not to the result.
    arithmetic = 4 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps * (gate * up).abs()
    assert ((got.double() - exact).abs() <= 0.501 * unit * exact.abs() + arithmetic + torch.finfo(dtype).tiny * unit).all()


def test_silu_and_mul_far_out() -> None:
    gate = torch.tensor([100.0, -100.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan")])
    got = silu_and_mul(torch.cat((gate, torch.ones(7))))
    assert got[:5].tolist() == [100.0, pytest.approx(0.0, abs=1e-40), pytest.approx(1e30), 0.0, float("inf")]
    assert got[5:].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("limit", [None, 7.0, 0.5])
@pytest.mark.parametrize(("alpha", "beta"), [(1.702, 1.0), (1.0, 0.0), (-0.5, 2.5)])
def test_swiglu_is_the_formula_rounded_once(
    dtype: torch.dtype, interleaved: bool, limit: float | None, alpha: float, beta: float
) -> None:
    torch.manual_seed(0)
    gate, up = 6 * torch.randn(3, 5, 57, dtype=dtype), 6 * torch.randn(3, 5, 57, dtype=dtype)
    x = torch.stack((gate, up), dim=-1).flatten(-2) if interleaved else torch.cat((gate, up), dim=-1)
    got = swiglu(x, alpha=alpha, limit=limit, beta=beta, interleaved=interleaved)
    assert got.dtype == dtype
    assert got.is_contiguous()
    exact = formula(gate, up, alpha, limit, beta)
    if dtype == torch.float32:  # if up is near -beta, up + beta cancels, so the error is relative to up
        torch.testing.assert_close(got.double(), exact, rtol=3e-6, atol=1e-5)
    else:
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), exact, rtol=(16 if dtype == torch.float64 else 0.502) * unit, atol=1e-5)


def test_swiglu_is_the_activation_of_gpt_oss() -> None:
    torch.manual_seed(0)
    x = 5 * torch.randn(11, 2 * 48)
    theirs = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), x)
    torch.testing.assert_close(swiglu(x, limit=7.0, interleaved=True), theirs, rtol=1e-6, atol=1e-6)


def test_swiglu_clamps_the_gate_above_only_and_up_on_both_sides() -> None:
    # A gate of 100 becomes 7. A gate of -100 is not clamped, and its sigmoid is 0. An up of 100 becomes 7, and -100 becomes -7.
    x = torch.tensor([[100.0, 0.0], [-100.0, 1.0], [7.0, 100.0], [7.0, -100.0]], dtype=torch.float64)
    got = swiglu(x, limit=7.0).squeeze(1)
    at_limit = 7.0 / (1 + np.exp(-1.702 * 7.0))
    torch.testing.assert_close(got, torch.tensor([at_limit, 0.0, 8 * at_limit, -6 * at_limit], dtype=torch.float64))


def test_swiglu_defaults_are_concatenated_and_unclamped() -> None:
    x = torch.tensor([[9.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(swiglu(x), formula(x[:, :1], x[:, 1:], 1.702, None, 1.0))
    x = torch.tensor([[-3.0, 20.0]], dtype=torch.float64)
    torch.testing.assert_close(swiglu(x), formula(x[:, :1], x[:, 1:], 1.702, None, 1.0))


@pytest.mark.parametrize("place", [0, 1])
def test_swiglu_keeps_nan(place: int) -> None:
    x = torch.ones(1, 2)
    x[0, place] = float("nan")
    assert swiglu(x, limit=7.0).isnan().all()


@given(rows=st.integers(0, 4), d=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_swiglu_without_its_options_is_silu_and_mul(rows: int, d: int, seed: int) -> None:
    x = torch.randn(rows, 2 * d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(swiglu(x, alpha=1.0, beta=0.0), silu_and_mul(x))


@given(rows=st.integers(0, 4), d=st.integers(1, 20), limit=st.none() | st.floats(0.1, 10), seed=st.integers(0, 2**31))
def test_interleaving_only_moves_elements(rows: int, d: int, limit: float | None, seed: int) -> None:
    x = 4 * torch.randn(rows, 2 * d, generator=torch.Generator().manual_seed(seed))
    shuffled = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
    got, wanted = swiglu(shuffled, limit=limit, interleaved=True), swiglu(x, limit=limit)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [silu_and_mul, swiglu])
def test_strided_input_and_out(function: Any) -> None:
    torch.manual_seed(0)
    wide = torch.randn(6, 3, 16)
    for x in (wide[:, 1], wide.transpose(0, 1), wide[..., ::2]):
        wanted = function(x.clone(memory_format=torch.contiguous_format))
        got = function(x)
        assert got.is_contiguous()
        assert torch.equal(got, wanted)
        out = torch.full(wanted.shape, float("nan"))
        assert function(x, out=out) is out
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("function", [silu_and_mul, swiglu])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 5, 8)])
def test_of_nothing(function: Any, shape: tuple[int, ...]) -> None:
    assert function(torch.ones(shape)).shape == (*shape[:-1], shape[-1] // 2)


X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (silu_and_mul, {"x": X.int()}, TypeError, "x must be a tensor of .*, got int32"),
        (silu_and_mul, {"x": torch.tensor(1.0)}, ValueError, "x must be of shape"),
        (silu_and_mul, {"x": torch.ones(2, 7)}, ValueError, r"x must be of shape \[..., 2 \* d\], .* got \[2, 7\]"),
        (silu_and_mul, {"out": torch.ones(2, 8)}, ValueError, r"out must have shape \[2, 4\]"),
        (silu_and_mul, {"out": torch.ones(2, 4).half()}, TypeError, "out must be float32"),
        (swiglu, {"x": X.to(torch.float8_e4m3fn)}, TypeError, "x must be a tensor of .*, got float8_e4m3fn"),
        (swiglu, {"x": torch.ones(3)}, ValueError, "x must be of shape .* got \\[3\\]"),
        (swiglu, {"limit": 0.0}, ValueError, "limit must be positive or None, got 0.0"),
        (swiglu, {"limit": -7.0}, ValueError, "limit must be positive or None, got -7.0"),
        (swiglu, {"limit": float("nan")}, ValueError, "limit must be positive or None, got nan"),
        (swiglu, {"alpha": float("inf")}, ValueError, "alpha must be finite, got inf"),
        (swiglu, {"beta": float("nan")}, ValueError, "beta must be finite, got nan"),
        (swiglu, {"alpha": None}, TypeError, "alpha must be float, got NoneType"),
        (swiglu, {"interleaved": 1}, TypeError, "interleaved must be bool, got int"),
        (swiglu, {"out": torch.ones(4)}, ValueError, "out must have shape"),
    ],
)
def test_refuses(function: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{function.__name__}: {message}"):
        function(**{"x": X, **arguments})


def test_they_are_proper_custom_operators(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    x = torch.randn(3, 2, 8)
    check_custom_op(silu_and_mul, {"x": x[:, 1]})
    check_custom_op(silu_and_mul, {"x": x.transpose(0, 1), "out": torch.empty(2, 3, 4)})
    check_custom_op(swiglu, {"x": x, "limit": 7.0, "interleaved": True})
    check_custom_op(swiglu, {"x": x, "out": torch.empty(3, 2, 4)})
