"""Residual add, RMSNorm, router and top-k of up to 256 tokens, fused in one kernel on Hopper. See `kernel_device`.

Measured with GPT-OSS-120B's sizes (hidden size 2880, 128 experts, top-4), residual and bias, on an H200 with cold L2, in us per
call back to back. For 9, 16, 32, 64, 128 and 256 tokens: 4.9, 5.0, 5.1, 5.3, 5.4 and 7.4. The portable kernel takes 6.5 and 7.8 for
9 and 16 tokens. For more tokens, the separate kernels take 9.7, 9.9, 10.3 and 10.8. These figures are of a former version, whose
epilogue divided the logits by the root mean square. Since then the MMAs wait for the exchange of the sums of squares. This wait is
estimated at 0.7 us, not measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned, is_aligned
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, dtype_name, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_least, at_most, between, multiple_of
from tokenspeed_kernel_nvidia._machine import clusters_at_once
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.cutedsl.launch import vector_at
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import CLUSTER, SHARED_BYTES, THREADS
from tokenspeed_kernel_nvidia.sm90.moe.route.config import (
    MAX_EXPERTS,
    MAX_HIDDEN,
    MAX_TOKENS,
    MAX_TOP_K,
    RouteConfig,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.target import ARCH

# With fewer tokens, the portable kernel is at least as fast, and preferred: in another run, it took 4.9 us for 8 tokens and 4.3 us
# for one.
LEAST_TOKENS = 9


@program(arch=ARCH, configs=every_config)
def rmsnorm_moe_topk_program(config: RouteConfig) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe.route import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


@functools.cache
def _launch_of(dtype: torch.dtype, tokens: int, hidden: int, device: int) -> tuple[Callable[..., Any], int]:
    """Returns the compiled kernel for a call, and the number of clusters."""
    config = config_of(dtype_name(dtype), tokens, hidden, clusters_at_once(device, CLUSTER, THREADS, SHARED_BYTES))
    return rmsnorm_moe_topk_program(config), -(-tokens // config.tokens)


def rmsnorm_moe_topk(
    x: Tensor,
    norm_weight: Tensor,
    router_weight: Tensor,
    top_k: int,
    eps: float,
    residual: Tensor | None,
    router_bias: Tensor | None,
    out: Tensor | None,
    weights_out: Tensor | None,
    ids_out: Tensor | None,
    residual_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernel on arguments that the operator has checked. For arguments and results see
    `tokenspeed_kernel.rmsnorm_moe_topk`."""
    tokens, hidden = x.shape
    weights = x.new_empty(tokens, top_k, dtype=torch.float32) if weights_out is None else weights_out
    ids = x.new_empty(tokens, top_k, dtype=torch.int32) if ids_out is None else ids_out
    # The lane that reads a chunk of a token or of the residual also writes it. So results may alias x and the residual.
    normed = out if out is not None and is_aligned(out) else x.new_empty(tokens, hidden)
    total = None
    if residual is not None:
        total = residual_out if residual_out is not None and is_aligned(residual_out) else x.new_empty(tokens, hidden)
    if tokens:
        added = None if residual is None else aligned(residual)
        # Copies must live until the launch.
        _norm, *norm_at = vector_at(norm_weight)
        _bias, *bias_at = vector_at(router_bias)
        launch, clusters = _launch_of(x.dtype, tokens, hidden, x.get_device())
        launch(
            aligned(x),
            aligned(router_weight.mT),
            normed,
            *((0, 0) if added is None else (added.data_ptr(), added.stride(0))),
            *((0, 0) if total is None else (total.data_ptr(), total.stride(0))),
            *norm_at,
            *bias_at,
            weights.data_ptr(),
            *weights.stride(),
            ids.data_ptr(),
            *ids.stride(),
            top_k,
            float(eps),
            clusters,
        )
    if out is not None and out is not normed:
        normed = out.copy_(normed)
    if total is None:
        return normed, weights, ids
    if residual_out is not None and residual_out is not total:
        total = residual_out.copy_(total)
    return normed, weights, ids, total


_BF16 = dense_tensor_format(torch.bfloat16)
for _name, _tokens, _priority in (
    ("cutedsl_rmsnorm_moe_topk", between(LEAST_TOKENS, MAX_TOKENS), Priority.SPECIALIZED),
    ("cutedsl_rmsnorm_moe_topk_few", at_most(LEAST_TOKENS - 1), Priority.COMPOSED - 1),
):
    register_kernel(
        "moe",
        "rmsnorm_moe_topk",
        name=_name,
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures={format_signature(x=_BF16, router_weight=_BF16)},
        traits={
            "tokens": _tokens,
            "hidden": at_least(8) & at_most(MAX_HIDDEN) & multiple_of(8),
            "num_experts": at_most(MAX_EXPERTS),
            "top_k": at_most(MAX_TOP_K),
            "residual": any,
            "router_bias": any,
            "renormalize": True,
        },
        priority=_priority,
        tags={"determinism"},
    )(rmsnorm_moe_topk)
