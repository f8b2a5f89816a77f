"""MoE experts for few tokens, with mxfp4 weights, on Hopper: one kernel for both GEMMs, the activation and the sum over slots.

The kernel is memory-bound: reading weights takes most of the time. The pairs of an expert are divided into *entries* of up to 4, 8
or 16 (token, slot) pairs, and the expert's weights are read once for each entry. There is one persistent CTA per SM. The panels (64
rows of weights) of all entries are divided into ranges of equal size, first those of w13, then those of w2. CTAs take ranges from a
global counter.

In a CTA, a producer warp streams the panels into a ring buffer in shared memory by bulk copies. The producer never waits for
results. So panels of w2 arrive while the last panels of w13 are computed. Twelve MMA warps use swap-AB: weights are the A operand,
and pairs are the columns. Panels of w2 are computed only when all panels of w13 for the same entry are done. A global counter per
entry signals this. At the end, each CTA sums over slots for its part of the output.

The MMAs are fp8. Each 16-bit activation is split into two or three fp8 parts, which have an MMA column each (`rows_device`). The
MMAs multiply weights without their scales, and block scales multiply the partial sums in float32. So the conversion of weights to
fp8 is exact. Kernels for entries of up to 8 or 16 pairs also have narrow MMAs with half of the columns, for entries of at most half
of the pairs (`Config.narrow`). With fp8 activations, the warps that prepare rows quantise them, and a pair has one MMA column.

A CTA waits only for CTAs that have taken an earlier range, so the CTAs need not all run at once. Results are deterministic, because
the terms of every sum have a fixed order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.workspace import keeper
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia._rows import deliver, to_write
from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import panels_of
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import (
    COUNTERS,
    MAX_PAIRS,
    Config,
    config_of,
    entries_of,
    every_config,
    turns_of,
    wanted_experts,
)
from tokenspeed_kernel_nvidia.sm90.target import ARCH


@program(arch=ARCH, configs=every_config)
def stream_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.moe.stream import kernel_device

    return kernel_device.host(config), kernel_device.fake_arguments(config)


class _Launch(NamedTuple):
    """The parts of a launch that depend only on the layer and the number of pairs.

    Attributes:
        program: the compiled kernel.
        ctas: the number of CTAs.
        turns: average number of ranges of each GEMM that a CTA computes.
        slots_at: offset in bytes of the second GEMM's results in the workspace's memory. The first GEMM's results are at offset 0.
        nbytes: bytes of the workspace's memory.
        counters: the number of counters in global memory.
    """

    program: Callable[..., Any]
    ctas: int
    turns: int
    slots_at: int
    nbytes: int
    counters: int


@functools.cache
def _program_of(dtype: torch.dtype, plan: MoEPlan, pairs: int, device: int, changes: tuple[tuple[str, Any], ...] = ()) -> _Launch:
    """Returns the memoised part of a launch with this number of pairs. ``changes``: see `moe_apply_few`."""
    k = max(plan.hidden_size, plan.intermediate_size)
    config = config_of(DTYPES[dtype], k, pairs / plan.num_experts, plan.activation_dtype == "fp8")
    config = dataclasses.replace(config, **dict(changes))
    ctas = sm_count_of(device)
    slots_at = -(-pairs * plan.intermediate_size * (4 if config.wide else 2) // 256) * 256
    nbytes = slots_at + pairs * plan.hidden_size * 4
    turns = turns_of(wanted_experts(pairs, plan.num_experts) * panels_of(2 * plan.intermediate_size) / ctas)
    counters = COUNTERS + entries_of(config, pairs, plan.num_experts)
    return _Launch(stream_program(config), ctas, turns, slots_at, nbytes, counters)


def moe_apply_few(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None,
    changes: tuple[tuple[str, Any], ...] = (),
) -> Tensor:
    """Computes `moe_apply` of arguments that the operator has checked. Returns the output: ``out``, or a new tensor like ``x``.

    More than `MAX_PAIRS` pairs need several launches, and each launch reads the weights again.

    Args:
        x: bfloat16 or float16 ``[tokens, hidden]``. Rows that are not aligned are copied.
        weights: the experts' weights in the layout of `mxfp4.layout`.
        topk_weights, topk_ids: float32 and int32 ``[tokens, top_k]``. A negative id skips the slot.
        plan: the layer's sizes and options.
        out: receives the output, if given.
        changes: attributes of `Config` that replace those of `config_of`, for measurements.
    """
    rows, written = aligned(x), to_write(out, x, x.shape)
    topk_weights, topk_ids = topk_weights.contiguous(), topk_ids.contiguous()
    most = MAX_PAIRS // plan.top_k
    for first in range(0, len(x), most):
        some = slice(first, first + most)
        _launch(rows[some], weights, topk_weights[some], topk_ids[some], plan, written[some], changes)
    return deliver(written, out)


def _launch(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor,
    changes: tuple[tuple[str, Any], ...],
) -> None:
    """Launches the kernel for at most `MAX_PAIRS` pairs on the current stream. ``out`` receives the output. Launches that
    may run at the same time have different workspaces, see `keeper`."""
    device, pairs = x.get_device(), topk_ids.numel()
    launch, ctas, turns, slots_at, nbytes, counters = _program_of(x.dtype, plan, pairs, device, changes)
    workspace = keeper.get(device, torch._C._cuda_getCurrentRawStream(device), nbytes, counters)
    memory_at = workspace.memory_at
    limit = math.inf if plan.limit is None else plan.limit
    launch(
        x, out, weights.w13_weight.data_ptr(), weights.w2_weight.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(),
        memory_at, memory_at + slots_at, workspace.counters_at, plan.num_experts, plan.intermediate_size, plan.top_k, ctas,
        turns, plan.alpha, limit, plan.beta,
    )  # fmt: skip
