"""Residual add, RMSNorm, QKV projection, RoPE and KV-cache write of few tokens, fused in one kernel on Hopper.

The kernel for up to 8 tokens is the GEMM of `gemm.mm` with a fused prologue and epilogue; for up to 64 tokens it is the GEMM of
`gemm.split_k`, see `split_k_device`. See `tokenspeed_kernel.rmsnorm_qkv_rope`. In a decode step
of GPT-OSS-120B on an H200, the kernel takes 9.8 us for one token, from the end of the preceding kernel to its own end. The separate
kernels take 11.3 us: `rmsnorm` 1.5, `mm` 8.7, `apply_rope` 1.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple, fields
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format, dtype_name, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import Constraint, at_least, at_most, multiple_of
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import vector_at
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import (
    HEAD_DIMS,
    MOST_HIDDEN,
    MOST_TOKENS,
    SERVED_TOKENS,
    LaunchParameters,
    QkvConfig,
    config_of,
    every_config,
    launch_parameters_of,
)
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.split_k_config import (
    SplitKConfig,
    every_split_k_config,
    split_k_config_of,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import Weights
from tokenspeed_kernel_nvidia.sm90.gemm.mm.launch import kinds_of, table_of
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import CLUSTER, MAX_TOKENS
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.launch import clusters_of
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def rmsnorm_qkv_rope_program(config: QkvConfig) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


# Priority of the kernel for more than 8 tokens, below the operator's composition of separate kernels: it has not been measured yet.
# `Priority.SPECIALIZED` prefers it.
SPLIT_K_PRIORITY = Priority.COMPOSED - 1


def usual_split_k_configs() -> list[SplitKConfig]:
    """Returns the configurations that calls use which name no kernel: none while other kernels are preferred."""
    return every_split_k_config() if SPLIT_K_PRIORITY >= Priority.PERFORMANT else []


@program(arch=ARCH, configs=every_split_k_config, usual=usual_split_k_configs)
def rmsnorm_qkv_rope_split_k_program(config: SplitKConfig) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope import split_k_device

    return split_k_device.host(config), split_k_device.fake_arguments(config)


@functools.cache
def _launch_of(
    dtype: torch.dtype, weights: Weights, head_dim: int, tokens: int, columns: int, hidden: int, device: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the compiled kernel for a call, and the launch parameters that depend on the call's sizes alone."""
    if tokens > MOST_TOKENS:
        split = split_k_config_of(dtype_name(dtype), head_dim, tokens, hidden)
        ctas = CLUSTER * clusters_of(split, columns, device)
        # The other parameters are sizes in shared memory, which are constants of this configuration.
        return rmsnorm_qkv_rope_split_k_program(split), (ctas, *(0,) * (len(fields(LaunchParameters)) - 1))
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
    the root mean square. fp8 weights are multiplied unscaled; their scales multiply the result. mxfp4 weights are scaled first.
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
        # Copies must live until the launch.
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


def _declare(name: str, weights: tuple[TensorFormat, ...], step: int, head_dim: int, tokens: Constraint, priority: int) -> None:
    """Registers the launcher for calls of some formats and numbers of tokens.

    Args:
        step: the divisor of ``hidden``.
    """
    register_kernel(
        "attention",
        "rmsnorm_qkv_rope",
        name=f"cutedsl_rmsnorm_qkv_rope_{name}{head_dim}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures={
            format_signature(x=_BF16, qkv_weight=weight, **cache) for weight in weights for cache in ({}, {"k_cache": _BF16})
        },
        traits={
            "tokens": tokens,
            "hidden": at_least(step) & at_most(MOST_HIDDEN) & multiple_of(step),
            "head_dim": head_dim,
            "rotary_dim": head_dim,
            "residual": any,
            "bias": any,
            "cache_write": any,
        },
        priority=priority,
        tags={"determinism"},
    )(rmsnorm_qkv_rope)


for _head_dim in HEAD_DIMS:
    for _name, _weights, _step in _FORMATS:
        _declare(_name, _weights, _step, _head_dim, at_most(SERVED_TOKENS), Priority.SPECIALIZED)
    _more = at_least(MOST_TOKENS + 1) & at_most(MAX_TOKENS)
    _declare("split_k_", (_BF16,), 8, _head_dim, _more, SPLIT_K_PRIORITY)
