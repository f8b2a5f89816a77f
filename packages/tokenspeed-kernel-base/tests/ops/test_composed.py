"""Tests composed operators against the formulas that they implement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.attention.qk_rmsnorm_rope_store_kv_cache import qk_rmsnorm_rope_store_kv_cache
from tokenspeed_kernel_base.ops.attention.rmsnorm_qkv_rope import rmsnorm_qkv_rope
from tokenspeed_kernel_base.ops.gemm.mm_add import mm_add
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.moe.moe_apply_add import moe_apply_add
from tokenspeed_kernel_base.ops.moe.moe_topk import moe_topk
from tokenspeed_kernel_base.ops.moe.moe_topk_apply import moe_topk_apply
from tokenspeed_kernel_base.ops.moe.rmsnorm_moe_topk import rmsnorm_moe_topk
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

SOLUTIONS = pytest.mark.parametrize("solution", ["composed", "reference"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


@SOLUTIONS
def test_mm_add(solution: str) -> None:
    a, b, residual, bias = draw(3, 5), draw(5, 7), draw(3, 7), draw(7)
    torch.testing.assert_close(mm_add(a, b, residual, solution=solution), a @ b + residual)
    wanted = a @ b + bias + residual
    torch.testing.assert_close(mm_add(a, b, residual, bias, solution=solution), wanted)
    assert mm_add(a, b, residual, bias, out=residual, solution=solution) is residual
    torch.testing.assert_close(residual, wanted)


@SOLUTIONS
def test_moe_apply_add(solution: str) -> None:
    plan = moe_apply.plan(4, 2, 8, 6, dtype=torch.float32, device="cpu")
    weights = MoEWeights(draw(4, 12, 8).float(), None, None, draw(4, 8, 6).float(), None, None)
    x, residual, ids = draw(3, 8).float(), draw(3, 8, seed=1).float(), torch.tensor([[0, 1], [2, 3], [1, -1]], dtype=torch.int32)
    arguments: tuple[Any, ...] = (x, weights, torch.rand(3, 2), ids, plan)
    wanted = moe_apply(*arguments) + residual
    torch.testing.assert_close(moe_apply_add(*arguments, residual, solution=solution), wanted)
    assert moe_apply_add(*arguments, residual, out=residual, solution=solution) is residual
    torch.testing.assert_close(residual, wanted)


@SOLUTIONS
@pytest.mark.parametrize("options", [{}, {"scoring": "sigmoid", "num_groups": 2, "scaling_factor": 3.0}], ids=str)
def test_moe_topk_apply(options: dict[str, Any], solution: str) -> None:
    plan = moe_apply.plan(4, 2, 8, 6, dtype=torch.float32, device="cpu")
    weights = MoEWeights(draw(4, 12, 8).float(), None, None, draw(4, 8, 6).float(), None, None)
    x, logits = draw(3, 8).float(), draw(3, 4)
    wanted = moe_apply(x, weights, *moe_topk(logits, 2, **options), plan)
    out = torch.empty_like(x)
    assert moe_topk_apply(x, logits, weights, plan, **options, out=out, solution=solution) is out
    torch.testing.assert_close(out, wanted)


@SOLUTIONS
@pytest.mark.parametrize("with_residual", [False, True])
def test_rmsnorm_moe_topk(with_residual: bool, solution: str) -> None:
    x, weight, router, bias = draw(5, 9), draw(9), draw(9, 6), draw(6)
    residual = draw(5, 9, seed=1) if with_residual else None
    found = rmsnorm_moe_topk(x, weight, router, 2, 1e-3, residual, bias, solution=solution)
    total = x if residual is None else x + residual
    tokens = normed(total, weight, 1e-3)
    best = (tokens @ router + bias).topk(2)
    torch.testing.assert_close(found[0], tokens)
    torch.testing.assert_close(found[1], best.values.softmax(-1).float())
    assert torch.equal(found[2].long(), best.indices)
    assert len(found) == 3 + with_residual
    if with_residual:
        torch.testing.assert_close(found[3], total)


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """Rotates pairs of elements by multiplying complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


@SOLUTIONS
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_cache", [False, True])
def test_rmsnorm_qkv_rope(with_residual: bool, with_cache: bool, solution: str) -> None:
    heads, kv_heads, head_dim = 4, 2, 8
    x, weight, qkv_weight, bias = draw(3, 9), draw(9), draw(9, 64), draw(64)
    residual = draw(3, 9, seed=1) if with_residual else None
    positions = torch.tensor([4, 0, 2])
    angles = draw(6, head_dim // 2).float()
    table = torch.cat((angles.cos(), angles.sin()), -1)
    caches = [torch.full((2, 3, kv_heads, head_dim), 7.0, dtype=torch.float64) for _ in range(2)]
    slots = torch.tensor([5, -1, 0])
    written = {"k_cache": caches[0], "v_cache": caches[1], "slot_mapping": slots} if with_cache else {}
    found = rmsnorm_qkv_rope(
        x, weight, qkv_weight, positions, table, kv_heads, head_dim, 1e-3, residual, bias, **written, solution=solution
    )
    total = x if residual is None else x + residual
    every = (normed(total, weight, 1e-3) @ qkv_weight + bias).view(3, heads + 2 * kv_heads, head_dim)
    turn = angles[positions].double()
    q, k, v = rotated(every[:, :heads], turn), rotated(every[:, heads:-kv_heads], turn), every[:, -kv_heads:]
    qkv = found[0] if with_residual else found
    torch.testing.assert_close(qkv.view_as(every), torch.cat((q, k, v), 1), rtol=1e-6, atol=1e-6)  # cos_sin_cache is float32
    if with_residual:
        torch.testing.assert_close(found[1], total)
    if with_cache:
        for cache, values in zip(caches, (k, v), strict=True):
            flat = cache.view(6, kv_heads, head_dim)
            torch.testing.assert_close(flat[[5, 0]], values[[0, 2]], rtol=1e-6, atol=1e-6)
            assert (flat[1:5] == 7).all()


@SOLUTIONS
@pytest.mark.parametrize("with_norm", [False, True])
def test_qk_rmsnorm_rope_store_kv_cache(with_norm: bool, solution: str) -> None:
    heads, kv_heads, head_dim, v_head_dim = 4, 2, 8, 6
    qkv = draw(3, heads * head_dim + kv_heads * (head_dim + v_head_dim))
    before = qkv.clone()
    weights = {"q_weight": draw(head_dim), "k_weight": draw(head_dim, seed=1), "eps": 1e-3} if with_norm else {}
    positions, slots = torch.tensor([4, 0, 2]), torch.tensor([5, -1, 0])
    angles = draw(6, head_dim // 2).float()
    table = torch.cat((angles.cos(), angles.sin()), -1)
    caches = [torch.full((2, 3, kv_heads, width), 7.0, dtype=torch.float64) for width in (head_dim, v_head_dim)]
    out = torch.empty(3, heads, head_dim, dtype=torch.float64)
    got = qk_rmsnorm_rope_store_kv_cache(qkv, positions, table, *caches, slots, **weights, out=out, solution=solution)
    assert got is out
    assert torch.equal(qkv, before)
    q, k, v = qkv.split((heads * head_dim, kv_heads * head_dim, kv_heads * v_head_dim), 1)
    q, k, v = q.view(3, heads, head_dim), k.view(3, kv_heads, head_dim), v.view(3, kv_heads, v_head_dim)
    if with_norm:
        q, k = normed(q, weights["q_weight"], 1e-3), normed(k, weights["k_weight"], 1e-3)
    turn = angles[positions].double()
    torch.testing.assert_close(got, rotated(q, turn), rtol=1e-6, atol=1e-6)  # cos_sin_cache is float32
    for cache, values in zip(caches, (rotated(k, turn), v), strict=True):
        flat = cache.flatten(0, 1)
        torch.testing.assert_close(flat[[5, 0]], values[[0, 2]], rtol=1e-6, atol=1e-6)
        assert (flat[1:5] == 7).all()
