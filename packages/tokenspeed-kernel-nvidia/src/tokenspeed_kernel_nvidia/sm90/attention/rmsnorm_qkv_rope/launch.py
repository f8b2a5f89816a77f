"""Residual add, RMSNorm, QKV projection, RoPE and KV-cache write of few tokens, fused into one kernel on Hopper.

The kernel is the GEMM of `gemm.mm` with a fused prologue and epilogue. See `tokenspeed_kernel.rmsnorm_qkv_rope`. In a decode step
of GPT-OSS-120B on an H200, the kernel takes 9.8 us for one token, from the end of the preceding kernel to its own end. The separate
kernels take 11.3 us: `rmsnorm` 1.5, `mm` 8.7, `apply_rope` 1.1.

With more than `SERVED_TOKENS` tokens, separate kernels run. A fused kernel for more tokens, with k split over a cluster as in
`gemm.split_k`, was no faster and was removed. Calls back to back, of GPT-OSS-120B's sizes with cold weights on an H200, took 13.9,
13.6, 15.3 and 20.5 us for 9, 16, 32 and 64 tokens; the separate kernels took 13.6, 14.3, 14.5 and 14.9 us.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format, dtype_name, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_least, at_most, multiple_of
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import vector_at
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import (
    HEAD_DIMS,
    MOST_HIDDEN,
    SERVED_TOKENS,
    QkvConfig,
    config_of,
    every_config,
    launch_parameters_of,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import Weights
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import kinds_of, table_of
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def rmsnorm_qkv_rope_program(config: QkvConfig) -> tuple[Any, tuple[Any, ...]]:
    """The fused kernel of `kernel_device`, compiled once for each configuration."""
    from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@functools.cache
def _launch_of(
    dtype: torch.dtype, weights: Weights, head_dim: int, tokens: int, columns: int, hidden: int, device: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the compiled kernel for a call, and the launch parameters that depend on the call's sizes alone."""
    config = config_of(dtype_name(dtype), head_dim, weights, hidden)
    return rmsnorm_qkv_rope_program(config), astuple(launch_parameters_of(config, tokens, columns, hidden, sm_count_of(device)))


def _indices(x: Tensor | None) -> tuple[int, int, int]:
    """Returns the address of a vector of integers, 1 for int64 or 0 for int32, and the stride in elements; three zeros for None."""
    return (0, 0, 0) if x is None else (x.data_ptr(), int(x.dtype == torch.int64), x.stride(0))


def rmsnorm_qkv_rope(
    x: Tensor,
    norm_weight: Tensor,
    qkv_weight: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_heads: int,
    head_dim: int,
    eps: float,
    residual: Tensor | None,
    bias: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    qkv_weight_scale: Tensor | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Launches the kernel on arguments that the operator has checked; see `tokenspeed_kernel.rmsnorm_qkv_rope`.

    The sum of token and residual is rounded, multiplied by the norm's weights, and rounded again. The GEMM's result is divided by
    the root mean square. fp8 weights are multiplied unscaled, and their scales multiply the result. mxfp4 weights are scaled
    before the MMAs.
    """
    tokens, hidden = x.shape
    columns = qkv_weight.shape[1]
    qkv = out if out is not None and out.stride(1) == 1 else x.new_empty(tokens, columns)
    # Some CTAs write x plus residual while other CTAs still read both. So the sum must alias neither.
    total = None if residual is None else x.new_empty(tokens, hidden)
    if tokens:
        rows, weight = aligned(x), aligned(qkv_weight.mT).mT
        added = None if residual is None else aligned(residual)
        table = cos_sin_cache if cos_sin_cache.stride(1) == 1 else cos_sin_cache.contiguous()
        # The kernel gets addresses, so copies must live until the launch.
        _norm, *norm_at = vector_at(norm_weight)
        _bias, *bias_at = vector_at(bias)
        caches: tuple[int, ...] = (0,) * 10
        written, page_size = None, 1
        if k_cache is not None and v_cache is not None and k_cache.numel():
            written, page_size = slot_mapping, k_cache.shape[1]
            caches = k_cache.data_ptr(), *k_cache.stride(), v_cache.data_ptr(), *v_cache.stride()
        weights, _ = kinds_of(qkv_weight, qkv_weight_scale)
        if weights != "dense":
            weight = weight.view(torch.uint8)  # every version of PyTorch can pass uint8
        launch, numbers = _launch_of(x.dtype, weights, head_dim, tokens, columns, hidden, x.get_device())
        launch(
            rows,
            weight,
            qkv,
            *((0, 0) if added is None else (added.data_ptr(), added.stride(0))),
            0 if total is None else total.data_ptr(),
            *norm_at,
            *bias_at,
            *table_of(qkv_weight_scale),
            *_indices(positions),
            table.data_ptr(),
            table.stride(0),
            *caches,
            *_indices(written),
            page_size,
            columns // head_dim - 2 * kv_heads,
            kv_heads,
            float(eps),
            *numbers,
        )
    if out is not None and out is not qkv:
        qkv = out.copy_(qkv)
    if total is None:
        return qkv
    return qkv, total if residual_out is None else residual_out.copy_(total)


_BF16 = dense_tensor_format(torch.bfloat16)
# The formats of the weights, and the divisor of ``hidden`` that bulk copies of 16 bytes of a row require.
_FORMATS: tuple[tuple[str, tuple[TensorFormat, ...], int], ...] = (
    ("", (_BF16,), 8),
    ("fp8_weights_", tuple(fp8_format(torch.float8_e4m3fn, granularity) for granularity in ("tensor", "channel")), 16),
    ("mxfp4_weights_", (mxfp4_format((32, 1)),), 32),
)
for _head_dim, (_name, _weights, _step) in itertools.product(HEAD_DIMS, _FORMATS):
    register_kernel(
        "attention",
        "rmsnorm_qkv_rope",
        name=f"cutedsl_rmsnorm_qkv_rope_{_name}{_head_dim}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures={
            format_signature(x=_BF16, qkv_weight=weight, **cache) for weight in _weights for cache in ({}, {"k_cache": _BF16})
        },
        traits={
            "tokens": at_most(SERVED_TOKENS),
            "hidden": at_least(_step) & at_most(MOST_HIDDEN) & multiple_of(_step),
            "head_dim": _head_dim,
            "rotary_dim": _head_dim,
            "residual": any,
            "bias": any,
            "cache_write": any,
        },
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
    )(rmsnorm_qkv_rope)
