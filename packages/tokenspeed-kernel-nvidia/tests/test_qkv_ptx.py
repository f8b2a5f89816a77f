"""Tests the kernel of `rmsnorm_qkv_rope` without a GPU: the emulator runs small calls with the PTX that a GPU would run."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")
pytest.importorskip("sm90_emulator")

from sm90_emulator.launching import launch
from sm90_emulator.memory import Memory
from sm90_emulator.programs import ptx
from tokenspeed_kernel_base.ops.attention.rmsnorm_qkv_rope import rmsnorm_qkv_rope as operator
from tokenspeed_kernel_base.ops.quantization.fp8 import quantize_fp8
from tokenspeed_kernel_base.ops.quantization.mx import quantize_mxfp4
from tokenspeed_kernel_nvidia.cutedsl.launch import KINDS
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import GROUP_PAIRS, QkvConfig, config_of, launch_parameters_of
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.launch import rmsnorm_qkv_rope_program

BF16 = torch.bfloat16
PAGES, PAGE_SIZE, POSITIONS = 3, 4, 32


@functools.cache
def text_of(config: QkvConfig) -> str:
    return ptx(rmsnorm_qkv_rope_program, config)


def bytes_of(x: Tensor) -> Any:
    return x.contiguous().view(torch.uint8).numpy().reshape(-1)


def close(got: Tensor, wanted: Tensor) -> None:
    off = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    assert off <= 8e-3, off


def run(
    tokens: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ctas: int,
    residual: bool = True,
    bias: bool = True,
    slots: Tensor | None = None,
    norm_dtype: torch.dtype = BF16,
    index_dtype: torch.dtype = torch.int64,
    seed: int = 0,
    scale: str | None = None,
) -> None:
    """``scale``: "tensor" or "channel" for fp8 weights with these scales, "mxfp4"; None for bfloat16 weights."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(dtype)

    columns = (heads + 2 * kv_heads) * head_dim
    x, added = normal(tokens, hidden), normal(tokens, hidden) if residual else None
    weight, norm = normal(columns, hidden, scale=hidden**-0.5), normal(hidden, dtype=norm_dtype)
    scales = None
    if scale == "mxfp4":
        weight, scales = quantize_mxfp4(weight)
    elif scale is not None:
        weight, scales = quantize_fp8(weight, "token" if scale == "channel" else scale)
    beside = normal(columns) if bias else None
    positions = torch.randint(POSITIONS, (tokens,), generator=draw).to(index_dtype)
    table = normal(POSITIONS, head_dim, dtype=torch.float32)
    caches = [normal(PAGES, PAGE_SIZE, kv_heads, head_dim) for _ in range(2)]
    memory = Memory(1 << 24)
    places = [memory.put(bytes_of(cache)) for cache in caches]
    out, total = (memory.put(np.full(2 * size, 0x44, np.uint8)) for size in (tokens * columns, tokens * hidden))
    stored = "dense" if scales is None else "mxfp4" if scale == "mxfp4" else "float8_e4m3fn"
    config = config_of("bfloat16", head_dim, stored, hidden)
    numbers = launch_parameters_of(config, tokens, columns, hidden, ctas)
    pairs = columns // 2
    wide = int(index_dtype == torch.int64)
    slots_at = 0 if slots is None else memory.put(bytes_of(slots.to(index_dtype)))
    arguments = [
        memory.put(bytes_of(weight)), weight.shape[1] * weight.element_size(), numbers.stages, numbers.ring,
        memory.put(bytes_of(x)), 2 * hidden, tokens,
        numbers.chunk_bytes, numbers.scales, numbers.activations, out, columns, 1,
        *([0, 0] if beside is None else [memory.put(bytes_of(beside)), KINDS[BF16]]),
        *([0, 0, 0] if scales is None else [memory.put(bytes_of(scales)), *(scales.t().stride() if scales.ndim == 2 else (0, 0))]),
        *([0, 0] if added is None else [memory.put(bytes_of(added)), 2 * hidden]), total if residual else 0, 2 * hidden,
        memory.put(bytes_of(norm)), KINDS[norm_dtype],
        1e-5, hidden, memory.put(bytes_of(positions)), wide, 1,
        memory.put(bytes_of(table)), head_dim, 1, *(number for cache, at in zip(caches, places, strict=True)
        for number in (at, *cache.stride())), slots_at, wide, 1, PAGE_SIZE, heads, kv_heads,
        numbers.row_shift, pairs // numbers.ctas, pairs % numbers.ctas,
    ]  # fmt: skip
    launch(text_of(config), arguments, config.gemm.threads + 32, (numbers.ctas,), memory, seed=seed + 1)
    given = {} if slots is None else {"k_cache": caches[0], "v_cache": caches[1], "slot_mapping": slots}
    found = operator.operator.reference(
        *operator.operator.complete(
            {
                "x": x, "norm_weight": norm, "qkv_weight": weight.t(), "positions": positions, "cos_sin_cache": table,
                "kv_heads": kv_heads, "head_dim": head_dim, "residual": added, "bias": beside,
                "qkv_weight_scale": scales if scales is None or scales.ndim < 2 else scales.t(), **given,
            }
        ).values()
    )  # fmt: skip

    def got(at: int, *shape: int) -> Tensor:
        return torch.from_numpy(memory.get(at, np.uint8, 2 * int(np.prod(shape)))).view(BF16).view(shape)

    if residual:
        found, sums = found
        assert torch.equal(got(total, tokens, hidden), sums)
    close(got(out, tokens, columns), found)
    for cache, at in zip(caches, places, strict=True):
        close(got(at, *cache.shape), cache)
        if slots is not None:  # all other slots are unchanged
            kept = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
            kept[slots[slots >= 0]] = False
            assert torch.equal(got(at, *cache.shape).flatten(0, 1)[kept], cache.flatten(0, 1)[kept])


def test_a_token_in_the_cache() -> None:
    """Tests CTAs with different numbers of pairs of weight rows. Some heads are divided between two CTAs."""
    run(1, 288, 2, 1, 64, 3, slots=torch.tensor([7]))


def test_several_tokens() -> None:
    """Tests several tokens, which different warps process. One token is not written to the cache."""
    run(3, 96, 2, 1, 64, 5, slots=torch.tensor([5, -1, 0]), index_dtype=torch.int32, norm_dtype=torch.float32)
    run(8, 1056, 1, 1, 64, 4, residual=False, norm_dtype=torch.float16)


def test_several_groups() -> None:
    """Tests a CTA with more pairs of weight rows than its shared memory holds at once."""
    assert 2 * GROUP_PAIRS < 64 * 3 // 2
    run(2, 64, 1, 1, 64, 2, bias=False, slots=torch.tensor([1, 2]))


def test_wide_heads() -> None:
    run(2, 40, 2, 1, 128, 9, slots=torch.tensor([11, 3]))


def test_fp8_weights() -> None:
    """Tests rows of weights of several ring stages, and a row that ends within a stage's bytes."""
    run(1, 288, 2, 1, 64, 3, slots=torch.tensor([7]), scale="channel")
    run(3, 2880, 1, 1, 64, 7, slots=torch.tensor([5, -1, 0]), scale="channel")
    run(2, 48, 2, 1, 128, 9, bias=False, norm_dtype=torch.float32, scale="tensor")
    run(8, 1056, 1, 1, 64, 4, residual=False, scale="channel")


def test_mxfp4_weights() -> None:
    """Tests a row of 2880 weights, which ends within a stage's bytes, and a CTA with several groups of rows."""
    run(1, 288, 2, 1, 64, 3, slots=torch.tensor([7]), scale="mxfp4")
    run(3, 2880, 1, 1, 64, 7, slots=torch.tensor([5, -1, 0]), scale="mxfp4")
    run(2, 64, 1, 1, 64, 2, bias=False, slots=torch.tensor([1, 2]), scale="mxfp4")
    run(8, 96, 2, 1, 128, 9, bias=False, norm_dtype=torch.float32, scale="mxfp4")
