"""Tests the kernel of `rmsnorm_qkv_rope` against float64, with calls beyond the operator's cases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.embedding.apply_rope import apply_rope
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp4
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import (
    HEAD_DIMS,
    MOST_HIDDEN,
    MOST_TOKENS,
    SQUARES,
    WEIGHTS,
    QkvConfig,
    config_of,
    every_config,
    launch_parameters_of,
)
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.launch import rmsnorm_qkv_rope as launcher_of_rmsnorm_qkv_rope
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import HEAD_BYTES, SHARED_BYTES, STAGES

from .launched import as_operator

rmsnorm_qkv_rope = as_operator(launcher_of_rmsnorm_qkv_rope)

BF16 = torch.bfloat16
EPS = 1e-5


class Call:
    """A call with random arguments."""

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        hidden: int = 2880,
        heads: int = 64,
        kv_heads: int = 8,
        head_dim: int = 64,
        residual: bool = True,
        bias: bool = True,
        page_size: int = 16,
        norm_dtype: torch.dtype = BF16,
        index_dtype: torch.dtype = torch.int64,
        seed: int = 0,
        scale: str | None = None,
    ) -> None:
        """``scale``: "token" or "tensor" for fp8 weights with these scales, "mxfp4"; None for bfloat16 weights."""
        draw = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=draw, device=device) * scale).to(dtype)

        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        columns = (heads + 2 * kv_heads) * head_dim
        pages = tokens + 3
        self.given: dict[str, Any] = {
            "x": normal(tokens, hidden),
            "norm_weight": normal(hidden, dtype=norm_dtype),
            "qkv_weight": normal(columns, hidden, scale=hidden**-0.5).t(),
            "positions": torch.randint(500, (tokens,), generator=draw, device=device).to(index_dtype),
            "cos_sin_cache": normal(500, head_dim, dtype=torch.float32),
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "eps": EPS,
            "residual": normal(tokens, hidden) if residual else None,
            "bias": normal(columns) if bias else None,
            "k_cache": normal(pages, page_size, kv_heads, head_dim),
            "v_cache": normal(pages, page_size, kv_heads, head_dim),
            "qkv_weight_scale": None,
            "slot_mapping": torch.randperm(pages * page_size, generator=draw, device=device)[:tokens].to(index_dtype),
        }

        self.weight = self.given["qkv_weight"].double()
        if scale is not None:
            rows = self.given["qkv_weight"].t()
            values, scales = quantize_mxfp4(rows) if scale == "mxfp4" else quantize_fp8(rows, scale)
            self.given["qkv_weight"], self.given["qkv_weight_scale"] = values.t(), scales.t() if scales.ndim == 2 else scales
            scaled = self.given["qkv_weight"], None, self.given["qkv_weight_scale"]
            self.weight = decode_operands("mm", self.given["x"], *scaled)[1].double()

    def wanted(self) -> tuple[Tensor, Tensor]:
        """Returns queries, keys and values in float64, and the sum of x and the residual."""
        given = self.given
        total = given["x"] if given["residual"] is None else (given["x"].float() + given["residual"].float()).to(BF16)
        wide = total.double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * given["norm_weight"].double()
        qkv = normed @ self.weight + (0 if given["bias"] is None else given["bias"].double())
        every = qkv.unflatten(1, (-1, self.head_dim))
        turned = self.heads + self.kv_heads
        q, k = apply_rope.operator.body(
            every[:, : self.heads], every[:, self.heads : turned], given["positions"], given["cos_sin_cache"]
        )
        return torch.cat([q, k, every[:, turned:]], 1).flatten(1), total

    def check(self, **changes: Any) -> None:
        """Runs the call, and compares its results and the memory that it may write."""
        given = {**self.given, **changes}
        wanted, total = self.wanted()
        before = [given[name].clone() for name in ("k_cache", "v_cache")]
        found = rmsnorm_qkv_rope(**given)
        if given["residual"] is None:
            assert isinstance(found, Tensor)
            got = found
        else:
            got, sums = found
            assert torch.equal(sums, total)
        off = got.double() - wanted
        assert got.isfinite().all()
        assert float(off.norm() / wanted.norm()) <= 6e-3
        assert float(off.abs().max()) <= 0.03 * float(wanted.abs().max())
        every = got.unflatten(1, (-1, self.head_dim))
        written = every[:, self.heads : self.heads + self.kv_heads], every[:, self.heads + self.kv_heads :]
        for name, old, new in zip(("k_cache", "v_cache"), before, written, strict=True):
            flat, slots = old.flatten(0, 1), given["slot_mapping"].long()
            flat[slots[slots >= 0]] = new[slots >= 0]
            assert torch.equal(given[name], flat.view_as(old))


@pytest.mark.parametrize("tokens", range(1, MOST_TOKENS + 1))
def test_tokens(sm90: torch.device, tokens: int) -> None:
    Call(sm90, tokens).check()
    Call(sm90, tokens, residual=False, bias=False, index_dtype=torch.int32).check()


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim"),
    [(8, 1, 1, 64), (4096, 32, 8, 128), (MOST_HIDDEN, 64, 8, 128), (1000, 3, 1, 64), (2048, 100, 10, 128), (7168, 9, 3, 64)],
)
def test_shapes(sm90: torch.device, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """Tests shapes of models, heads that share no CTA, and many groups of pairs."""
    for tokens in (1, 3, 8):
        Call(sm90, tokens, hidden, heads, kv_heads, head_dim, page_size=5, seed=tokens).check()


@pytest.mark.parametrize("scale", ["token", "tensor", "mxfp4"])
def test_quantized_weights(sm90: torch.device, scale: str) -> None:
    for tokens in (1, 2, 4, 8):
        Call(sm90, tokens, scale=scale, seed=tokens).check()
    for hidden, heads, kv_heads, head_dim in ((32, 1, 1, 64), (4096, 32, 8, 128), (MOST_HIDDEN, 64, 8, 128), (1056, 3, 1, 64)):
        Call(sm90, 3, hidden, heads, kv_heads, head_dim, bias=False, scale=scale).check()


@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_weights_of_the_norm(sm90: torch.device, norm_dtype: torch.dtype) -> None:
    Call(sm90, 2, norm_dtype=norm_dtype).check()


@pytest.mark.parametrize(
    ("index_dtype", "slots"),
    [(torch.int32, [-1, -7, -(2**31)]), (torch.int64, [-(2**32) + 1, -(2**63), -(2**31) - 1, -(2**31)])],
    ids=str,
)
def test_tokens_that_are_not_written(sm90: torch.device, index_dtype: torch.dtype, slots: list[int]) -> None:
    """Asserts that tokens with negative slots are not written. The low 32 bits of some of these slots are valid slots of the
    cache."""
    call = Call(sm90, 6, index_dtype=index_dtype)
    call.given["slot_mapping"][1 : 1 + len(slots)] = torch.tensor(slots, dtype=index_dtype, device=sm90)
    call.check()


def test_strides(sm90: torch.device) -> None:
    """Tests tensors that are interleaved in memory or have unaligned rows, and caches with gaps between elements."""
    for target in ("x", "residual"):
        call = Call(sm90, 4)
        call.check(residual_out=call.given[target])
    call = Call(sm90, 4)
    wide = torch.empty(4, 3000, dtype=BF16, device=sm90)
    for name, begin in (("x", 8), ("residual", 3)):
        call.given[name] = wide.clone()[:, begin : begin + 2880].copy_(call.given[name])
    for name in ("k_cache", "v_cache"):
        cache = call.given[name]
        apart = torch.zeros(*cache.shape[:3], 2 * cache.shape[3], dtype=BF16, device=sm90)[..., ::2]
        call.given[name] = apart.transpose(1, 2).contiguous().transpose(1, 2).copy_(cache)
    call.given["positions"] = torch.stack([call.given["positions"]] * 2, 1)[:, 0]
    call.given["norm_weight"] = torch.stack([call.given["norm_weight"]] * 2, 1)[:, 0]
    call.given["qkv_weight"] = call.given["qkv_weight"].contiguous()
    call.check(out=torch.empty(4, 6000, dtype=BF16, device=sm90)[:, :5120])
    call.check(out=torch.empty(5120, 4, dtype=BF16, device=sm90).t())


def test_the_same_alone_and_with_others(sm90: torch.device) -> None:
    call = Call(sm90, 8)
    every, _ = rmsnorm_qkv_rope(**call.given)
    each = ("x", "residual", "positions", "slot_mapping")
    for token in range(8):
        one, _ = rmsnorm_qkv_rope(**{**call.given, **{name: call.given[name][token : token + 1] for name in each}})
        torch.testing.assert_close(one[0], every[token], rtol=0.02, atol=0.02)


def test_every_size_has_room() -> None:
    """Asserts that the tokens, a ring buffer of several stages, the barriers and the sums of squares fit into shared memory."""
    assert {(config.head_dim, config.weights) for config in every_config()} == {*itertools.product(HEAD_DIMS, WEIGHTS)}
    for tokens, hidden, weights in itertools.product((1, MOST_TOKENS), (32, 2880, MOST_HIDDEN), WEIGHTS):
        config = config_of("bfloat16", 64, weights, hidden)
        assert config in every_config()
        numbers = launch_parameters_of(config, tokens, 5120, hidden, 132)
        assert numbers.size <= SHARED_BYTES
        assert numbers.stages >= min(4, -(-config.row_bytes(hidden) // config.gemm.part_bytes) * 5)
        assert numbers.row_shift >= 0
    with pytest.raises(ValueError, match="do not fit into shared memory"):
        launch_parameters_of(QkvConfig("bfloat16", 64), MOST_TOKENS, 5120, 16384, 132)
    assert 8 * (2 * STAGES + 3) <= SQUARES <= HEAD_BYTES - 16 - 4 * QkvConfig("bfloat16", 64).gemm.warps
