"""Tests the normalisation kernels beyond the shared cases: in-place outputs, strides, very long rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel import layernorm, qk_rmsnorm, rmsnorm
from tokenspeed_kernel.triton.common import as_rows, has_rows
from tokenspeed_kernel.workbench.numerics.verify import default_device

DEVICE = default_device()
# The kernel reads the longest row in two passes.
HIDDEN = [1, 7, 48, 2880, 20000, 33000]


def _draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def _rmsnorm(x: Tensor, weight: Tensor, **options: Tensor | None) -> list[Tensor]:
    results = rmsnorm(x, weight, **options, override="triton_rmsnorm")
    return list(results) if isinstance(results, tuple) else [results]


def _expected(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> list[Tensor]:
    results = rmsnorm(x, weight, residual=residual, override="reference_rmsnorm")
    return list(results) if isinstance(results, tuple) else [results]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_outputs_over_inputs(hidden: int) -> None:
    weight = _draw(hidden, seed=3)

    def inputs() -> tuple[Tensor, Tensor]:
        return _draw(5, hidden, seed=1), _draw(5, hidden, seed=2)

    alone, added = _expected(inputs()[0], weight), _expected(inputs()[0], weight, inputs()[1])
    x, _ = inputs()
    torch.testing.assert_close(_rmsnorm(x, weight, out=x), alone)
    for swapped in (False, True):
        x, residual = inputs()
        out, residual_out = (residual, x) if swapped else (x, residual)
        got = _rmsnorm(x, weight, residual=residual, out=out, residual_out=residual_out)
        assert got[0] is out
        assert got[1] is residual_out
        torch.testing.assert_close(got, added)
    x, residual = inputs()
    torch.testing.assert_close(_rmsnorm(x, weight, residual=residual, residual_out=x), added)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_strides(hidden: int) -> None:
    wide, weights = _draw(3, 4, 2 * hidden + 1), _draw(hidden, 2)
    x, residual, weight = wide[..., :hidden], wide[..., hidden + 1 :], weights[:, 1]
    expected = _expected(x, weight, residual)
    torch.testing.assert_close(_rmsnorm(x, weight, residual=residual), expected)
    torch.testing.assert_close(_rmsnorm(x[1], weight, residual=residual[1]), [e[1] for e in expected])
    across = wide.mT.contiguous().mT  # the last axis is not contiguous
    torch.testing.assert_close(_rmsnorm(across[..., :hidden], weight, residual=across[..., hidden + 1 :]), expected)
    for outs in (torch.zeros(2, 3, 4, hidden + 5), torch.zeros(2, 4, hidden, 3).permute(0, 3, 1, 2)):
        out, residual_out = (o[..., :hidden] for o in outs.to(DEVICE))
        got = _rmsnorm(x, weight, residual=residual, out=out, residual_out=residual_out)
        assert got[0] is out
        assert got[1] is residual_out
        torch.testing.assert_close(got, expected)
    matrix = torch.zeros(4, hidden + 3, device=DEVICE)
    torch.testing.assert_close(_rmsnorm(x[0], weight, out=matrix[:, :hidden]), _expected(x[0], weight))
    assert not matrix[:, hidden:].any()


@pytest.mark.parametrize("hidden", [1, 48, 33000])
def test_layernorm_of_strided_rows_over_its_inputs(hidden: int) -> None:
    wide, vectors = _draw(3, 2 * hidden + 1), _draw(hidden, 2, 2, seed=1)
    x, residual = wide[:, :hidden], wide[:, hidden + 1 :]
    weight, bias = vectors[:, 1, 0], vectors[:, 0, 1]
    wanted, total = layernorm(x, weight, bias, residual=residual, solution="reference")
    normed, kept = layernorm(x, weight, bias, residual=residual, out=x, residual_out=residual, solution="triton")
    assert normed is x
    assert kept is residual
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(normed, wanted, atol=1e-5, rtol=1e-5)
    wanted = layernorm(residual, solution="reference")
    torch.testing.assert_close(layernorm(residual, out=residual, solution="triton"), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_weight_of_another_dtype(dtype: torch.dtype) -> None:
    x, weight = _draw(3, 100), _draw(100, seed=1).to(dtype)
    torch.testing.assert_close(_rmsnorm(x, weight), _expected(x, weight))


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    x, residual, weight = (_draw(4, 64, seed=seed, dtype=torch.float16) for seed in (0, 1, 2))
    normed, total = _rmsnorm(x, weight[0], residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, _rmsnorm(total, weight[0])[0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 1), (3, 5, 57), (64, 4, 128), (2, 1, 3000), (4, 0, 64), (0, 3, 64)]
)
def test_heads_in_place_and_strided(heads: int, kv_heads: int, head_dim: int) -> None:
    qkv, weights = _draw(5, heads + 2 * kv_heads, head_dim), _draw(head_dim, 2)
    q_weight, k_weight = weights.unbind(1)

    def split(fused: Tensor) -> tuple[Tensor, Tensor]:
        return fused[:, :heads], fused[:, heads : heads + kv_heads]

    expected = list(qk_rmsnorm(*split(qkv), q_weight, k_weight, override="reference_qk_rmsnorm"))
    torch.testing.assert_close(list(qk_rmsnorm(*split(qkv), q_weight, k_weight, override="triton_qk_rmsnorm")), expected)
    across = qkv.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    torch.testing.assert_close(list(qk_rmsnorm(*split(across), q_weight, k_weight, override="triton_qk_rmsnorm")), expected)
    for fused in (qkv.clone(), across):
        q, k = split(fused)
        got = list(qk_rmsnorm(q, k, q_weight, k_weight, q_out=q, k_out=k, override="triton_qk_rmsnorm"))
        assert got[0] is q
        assert got[1] is k
        torch.testing.assert_close(got, expected)
        assert torch.equal(fused[:, heads + kv_heads :], qkv[:, heads + kv_heads :]), "v is left alone"


def test_rows_are_views_where_strides_allow() -> None:
    wide = torch.zeros(3, 4, 10)
    assert as_rows(wide).data_ptr() == wide.data_ptr()
    assert as_rows(wide[..., :7]).data_ptr() == wide.data_ptr()
    assert as_rows(wide[0, :, 2:7]).stride() == (10, 1)
    assert as_rows(wide[:, :2, :7]).data_ptr() != wide.data_ptr()
    assert as_rows(wide[0].T).stride() == (4, 1)
    assert has_rows(wide)
    assert has_rows(wide[0, :, :7])
    assert not has_rows(wide[:, :2, :7])
    assert not has_rows(wide[0].T)
