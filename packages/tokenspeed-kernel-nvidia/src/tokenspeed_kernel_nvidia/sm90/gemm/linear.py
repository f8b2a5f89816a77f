"""`linear` with weights in mxfp4 and nvfp4 on Hopper, for few tokens: weights are read once for up to 64 of them.

Reading weights takes most of the time, so nothing may interrupt it. There is one CTA on each multiprocessor. A warp of it streams
weights through a ring in shared memory by bulk copies, and begins before the kernel in front has ended: weights in a layout of this
kernel's own are not what that one writes. Sixteen warps decode weights and multiply them, as left operands, with tokens, which lie
in shared memory from the beginning to the end.

The eight CTAs of a cluster share k, so that each needs few of the tokens' features. All work on the same panels of 64 rows. Each
sends its sums of a panel to the CTA that finishes the rows: eight rows of each panel are one CTA's. Two warps add them up in a
fixed order, while the others multiply the next panels. So results are the same bits in every run, no sums pass through global
memory, and nobody waits for CTAs that may not run yet.

More than 64 tokens are done in several launches, each of which reads weights anew. Where there is no room for all features of so
many tokens, each launch has some of k, and adds its sums to those of the launches before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.gemm.linear_plan import LinearPlan
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_base.ops.quantization.formats import mxfp4_format, nvfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.workspace import keeper
from tokenspeed_kernel_nvidia._machine import clusters_at_once
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import aligned
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.gemm.linear_config import (
    CLUSTER,
    MAX_TOKENS,
    SHARED_BYTES,
    THREADS,
    Config,
    blocks_of_launches,
    config_of,
    every_config,
)
from tokenspeed_kernel_nvidia.sm90.gemm.linear_layout import LAYOUTS, prepare_weights
from tokenspeed_kernel_nvidia.sm90.moe.mxfp4_layout import PANEL, panels_of


@program(arch="sm_90a", configs=every_config)
def linear_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.gemm import linear_device

    return linear_device.host(config), linear_device.fake_arguments(config)


class _Launch(NamedTuple):
    """The parts of a call that depend on the layer and the number of tokens alone.

    Attributes:
        program: the compiled function.
        tokens: the most tokens of a launch.
        blocks: the first block of k, and the number of blocks, of each launch.
        ctas: the number of CTAs.
        nbytes: the bytes of sums that pass from a launch to the next.
    """

    program: Callable[..., Any]
    tokens: int
    blocks: list[tuple[int, int]]
    ctas: int
    nbytes: int


@functools.cache
def _launch_of(tokens: int, plan: LinearPlan, device: int) -> _Launch:
    config = config_of(DTYPES[plan.dtype], plan.weight_format, tokens)
    panels = panels_of(plan.out_features)
    ctas = CLUSTER * min(clusters_at_once(device, CLUSTER, THREADS, SHARED_BYTES), panels)
    blocks = blocks_of_launches(config, plan.in_features)
    nbytes = 0 if len(blocks) == 1 else panels * PANEL * config.tokens * 4
    return _Launch(linear_program(config), config.tokens, blocks, ctas, nbytes)


def linear(x: Tensor, weights: LinearWeights, plan: LinearPlan, out: Tensor | None = None) -> Tensor:
    """See the operator. Weights are in the layout that `prepare_weights` makes."""
    count, device = x.shape[0], x.get_device()
    launch, most, blocks, ctas, nbytes = _launch_of(min(count, MAX_TOKENS), plan, device)
    written = x.new_empty(count, plan.out_features) if out is None else out
    rows = aligned(x)
    partial = keeper.get(device, torch._C._cuda_getCurrentRawStream(device), nbytes, 0).memory_at if nbytes else 0
    assert weights.weight_scale is not None
    weights_at, factors_at = weights.weight.data_ptr(), weights.weight_scale.data_ptr()
    bias_at = 0 if weights.bias is None else weights.bias.data_ptr()
    for first in range(0, count, most):
        some = slice(first, first + most)
        for begin, number in blocks:
            launch(rows[some], written[some], weights_at, factors_at, bias_at, partial, begin, number, ctas)
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
        },
        priority=Priority.PERFORMANT,
        tags={"determinism"},
        weight_preprocessor=prepare_weights,
    )(linear)
