"""`linear` with weights in mxfp4 and nvfp4 on Hopper, for at most 16 tokens.

Reading weights takes most of the time, so nothing may interrupt it. There is one CTA on each multiprocessor. A warp of it streams
weights through a ring in shared memory by bulk copies, and begins before the kernel in front has ended: weights in a layout of this
kernel's own are not what that one writes. Sixteen warps decode weights and multiply them, as left operands, with tokens, which lie
in shared memory from the beginning to the end.

The eight CTAs of a cluster share k, so that each needs few of the tokens' features. All work on the same panels of 64 rows. Each
sends its sums of a panel to the CTA that finishes the rows: eight rows of each panel are one CTA's. Two warps add them up in a
fixed order, while the others multiply the next panels. So results are the same bits in every run, no sums pass through global
memory, and nobody waits for CTAs that may not run yet.

More tokens need other kernels and the canonical layout, so this one serves only plans that say that there are few.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.ops.gemm.linear_plan import LinearPlan
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format, nvfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most
from tokenspeed_kernel_nvidia._machine import clusters_at_once
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.gemm.linear_config import (
    CLUSTER,
    MAX_K,
    MAX_TOKENS,
    SHARED_BYTES,
    THREADS,
    Config,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.gemm.linear_layout import LAYOUTS, prepare_weights
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import panels_of


@program(arch="sm_90a", configs=every_config)
def linear_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm import linear_device

    return linear_device.host(config), linear_device.fake_arguments(config)


class _Launch(NamedTuple):
    """The parts of a call that depend on the layer and the number of tokens alone.

    Attributes:
        program: the compiled function.
        ctas: the number of CTAs.
    """

    program: Callable[..., Any]
    ctas: int


@functools.cache
def _launch_of(tokens: int, plan: LinearPlan, device: int) -> _Launch:
    # Who names the kernel gets past its traits.
    if tokens > MAX_TOKENS or plan.in_features > MAX_K:
        most = f"at most {MAX_TOKENS} tokens of {MAX_K} features"
        raise ValueError(f"{plan.kernel} is for {most}, got {tokens} of {plan.in_features}")
    config = config_of(DTYPES[plan.dtype], plan.weight_format, tokens)
    # An H100 has multiprocessors for 16 clusters, and runs 15 at once, as the driver says. A launch of 16 has a second wave, and
    # takes 42.1 us in place of 21.8: 8192 x 8192 in nvfp4, one token.
    clusters = clusters_at_once(device, CLUSTER, THREADS, SHARED_BYTES)
    return _Launch(linear_program(config), CLUSTER * min(clusters, panels_of(plan.out_features)))


def linear(x: Tensor, weights: LinearWeights, plan: LinearPlan, out: Tensor | None = None) -> Tensor:
    """See the operator. Weights are in the layout that `prepare_weights` makes."""
    count = x.shape[0]
    written = x.new_empty(count, plan.out_features) if out is None else out
    if count == 0:
        return written
    launch, ctas = _launch_of(count, plan, x.get_device())
    assert weights.weight_scale is not None
    bias_at = 0 if weights.bias is None else weights.bias.data_ptr()
    launch(aligned(x), written, weights.weight.data_ptr(), weights.weight_scale.data_ptr(), bias_at, ctas)
    return written


for _format, _made in (("mxfp4", mxfp4_format()), ("nvfp4", nvfp4_format())):
    register_kernel(
        "gemm",
        "linear",
        name=f"cutedsl_linear_{_format}",
        solution="cutedsl",
        capability=CUTEDSL_HOPPER,
        signatures={format_signature(x=dense_tensor_format(dtype), weight=_made) for dtype in DTYPES},
        traits={
            "weight_layout": LAYOUTS[_format],
            "processed_weights": True,
            "bias": any,
            "max_tokens": at_most(MAX_TOKENS),
            "in_features": at_most(MAX_K),
        },
        priority=Priority.PERFORMANT,
        tags={"determinism"},
        weight_preprocessor=prepare_weights,
    )(linear)
