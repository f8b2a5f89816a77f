"""Reduce-scatter (sum) over the processes of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, nbytes
from tokenspeed_kernel_base.checks import FLOATS, INTS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.comm._inputs import captured_inputs, rank_inputs
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.variation import Variation

# Newer releases of PyTorch renamed this function and deprecate the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@operator("comm", "reduce_scatter", formats=("x",), traits={**ProcessGroup.trait_kinds, "protocol": str}, varying=("rows",))
def reduce_scatter(x: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Tensor:
    """Reduce-scatter: sums all ranks' x, and returns this rank's rows of the sum.

    All ranks of the group must make the same collective calls in the same order, with x of the same shape and dtype. With gloo or
    peer memory, the ranks compare their calls at the first call of each shape and dtype. This comparison waits for other ranks at
    most ``group.time_limit_s``.

    float16 and bfloat16 are accumulated in float32 and rounded once. Kernels may also round partial sums to x's dtype, at most
    once for each rank. The order in which the ranks' values are added is unspecified. A kernel that uses peer memory waits at
    most ``group.peer_time_limit_s`` seconds for the other ranks. Then its launch fails.

    Args:
        x: float16, bfloat16, float32, float64, int32 or int64 ``[world_size * rows, ...]``. The operator does not write to x.
        group: the ranks that take part. Made by `ProcessGroup.of`, or by `ProcessGroup.with_peer_memory` for kernels that access
            peer memory directly instead of calling a communication library.
        out: receives the result.

    Returns:
        Like x, ``[rows, ...]`` and contiguous: on rank r, rows ``r * rows`` to ``(r + 1) * rows - 1`` of the sum.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank makes a different call.
        RuntimeError: at the first call, another rank did not make the call within the time limit. Also raised if the group was
            destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, reduce_scatter
        >>> reduce_scatter(torch.tensor([1.0, 2.0]), ProcessGroup.of())
        tensor([1., 2.])

    Not safe in CUDA graphs with gloo, which waits for the device. Safe with nccl after a first call outside of a graph.
    """
    halves = x.dtype in (torch.float16, torch.bfloat16)
    parts = x.to(torch.float32 if halves else x.dtype, copy=True, memory_format=torch.contiguous_format)
    if group.world_size == 1:
        return parts.to(x.dtype)
    group.check_agreement("reduce_scatter", x=x)
    total = parts.new_empty(x.shape[0] // group.world_size, *x.shape[1:])
    _reduce_scatter(total, parts, group=group.group)
    return total.to(x.dtype)


@reduce_scatter.traits
def _(x: Tensor, group: ProcessGroup) -> dict[str, object]:
    protocol = group.direct(nbytes(x) // group.world_size) if x.numel() else "none: there are no rows"
    return {**group.traits, "protocol": protocol}


@reduce_scatter.check
def _(check: Checker, x: Tensor, group: ProcessGroup) -> None:
    check.dtype("x", x, FLOATS | INTS)
    check.require(x.dim() > 0, "x", "a tensor of one axis or more", x)
    check.require(x.shape[0] % group.world_size == 0, "x", f"of a multiple of {group.world_size} rows, one share for each rank", x)
    check.bind("rows", x.shape[0] // group.world_size, "x")
    check.bind("world_size", group.world_size, "group")


@reduce_scatter.fake
def _(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.new_empty(x.shape[0] // group.world_size, *x.shape[1:])


@reduce_scatter.cases
def _() -> list[Case]:
    return [
        Case("one rank, float32", rank_inputs(5, 7, dtype=torch.float32, for_each_rank=True)),
        Case("one rank, int32, one axis", rank_inputs(9, dtype=torch.int32, for_each_rank=True)),
        Case("one rank, no rows", rank_inputs(0, 64, for_each_rank=True)),
        Case("2 ranks, bfloat16", rank_inputs(33, 65, for_each_rank=True), world_size=2),
        Case("2 ranks, float16, whole vectors", rank_inputs(3, 2056, dtype=torch.float16, for_each_rank=True), world_size=2),
        Case("gpt-oss-120b prefill 4096, 2 ranks", rank_inputs(2048, 2880, for_each_rank=True), large=True, world_size=2),
        Case("gpt-oss-120b prefill 4096, 4 ranks", rank_inputs(1024, 2880, for_each_rank=True), large=True, world_size=4),
    ]


@reduce_scatter.vary
def _(variation: Variation, x: Tensor) -> dict[str, Any]:
    return captured_inputs(variation, x)


@reduce_scatter.cost
def _(x: Tensor, group: ProcessGroup) -> Cost:
    return Cost(flops=x.numel() * (group.world_size - 1) / group.world_size, bytes=nbytes(x) * (1 + 1 / group.world_size))
