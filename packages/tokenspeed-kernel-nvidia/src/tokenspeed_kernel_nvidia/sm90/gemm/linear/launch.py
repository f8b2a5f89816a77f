"""`linear` with mxfp4 and nvfp4 weights on Hopper, for at most 16 tokens.

The kernel is memory-bound: reading the weights takes most of the time, so the weight stream never pauses. There is one persistent
CTA per SM. A producer warp streams weights through a ring buffer in shared memory by bulk copies. The producer warp starts before
the preceding kernel ends (PDL). This is safe, because that kernel does not write these prepared weights. The GEMM is swap-AB:
sixteen MMA warps dequantise weights to A fragments in registers. The B operand, the tokens, stays in shared memory throughout.

The eight CTAs of a cluster split k (split-K), so each CTA needs only a slice of the tokens' features. All eight CTAs work on the
same panels of 64 rows. Each CTA writes the results of eight rows of each panel. All CTAs of the cluster send this CTA their partial
sums of these rows through distributed shared memory. Two warps add the partial sums in a fixed order while the MMA warps work on
the next panels. So results are bitwise deterministic, and no partial sums pass through global memory. A CTA waits for CTAs of its
own cluster only, and the CTAs of a cluster always run at the same time.

More than 16 tokens need other kernels, which read the canonical layout. So only plans that declare at most 16 tokens are eligible.
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
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import panels_of
from tokenspeed_kernel_nvidia.sm90.gemm.linear.config import (
    CLUSTER,
    MAX_K,
    MAX_TOKENS,
    SHARED_BYTES,
    THREADS,
    Config,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.gemm.linear.layout import LAYOUTS, prepare_weights
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def linear_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm.linear import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


class _Launch(NamedTuple):
    """The memoised launch parameters of a call, which depend only on the layer and on the number of tokens.

    Attributes:
        program: the compiled kernel.
        ctas: the number of CTAs.
    """

    program: Callable[..., Any]
    ctas: int


@functools.cache
def _launch_of(tokens: int, plan: LinearPlan, device: int) -> _Launch:
    """Returns the launch parameters of a call. Raises ValueError if the kernel does not support its sizes."""
    # The traits of a kernel that is requested by name are not checked. So check the sizes here.
    if tokens > MAX_TOKENS or plan.in_features > MAX_K:
        most = f"at most {MAX_TOKENS} tokens of {MAX_K} features"
        raise ValueError(f"{plan.kernel} is for {most}, got {tokens} of {plan.in_features}")
    config = config_of(DTYPES[plan.dtype], plan.weight_format, tokens)
    # An H100 has SMs for 16 clusters but runs 15 at once, as the driver reports. A launch of 16 has a second wave and takes 42.1 us
    # instead of 21.8 us (8192 x 8192 in nvfp4, one token).
    clusters = clusters_at_once(device, CLUSTER, THREADS, SHARED_BYTES)
    return _Launch(linear_program(config), CLUSTER * min(clusters, panels_of(plan.out_features)))


def linear(x: Tensor, weights: LinearWeights, plan: LinearPlan, out: Tensor | None = None) -> Tensor:
    """Implements the operator `linear`. Weights must be in the layout that `prepare_weights` makes.

    Args:
        x: ``[tokens, in_features]`` in the plan's dtype, bfloat16 or float16; at most 16 tokens. Rows that are not aligned are
            copied.
        weights: the prepared weights, with row factors instead of scales.
        plan: the layer's sizes and options.
        out: ``[tokens, out_features]`` in x's dtype, receives the results, if given.

    Raises:
        ValueError: there are too many tokens or features, which is possible only if the kernel was requested by name.
    """
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
