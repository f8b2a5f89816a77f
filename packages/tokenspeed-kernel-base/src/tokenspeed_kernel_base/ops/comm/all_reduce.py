"""All-reduce (sum) over the processes of a group."""

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


@operator(
    "comm",
    "all_reduce",
    formats=("x",),
    traits={**ProcessGroup.trait_kinds, "protocol": str},
    in_place={"out": ("x",)},
    varying=("elements",),
)
def all_reduce(x: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Tensor:
    """All-reduce: sums all ranks' x. Every rank gets the result.

    All ranks of the group must make the same collective calls in the same order, with x of the same shape and dtype. With gloo or
    peer memory, the ranks compare their calls at the first call of each shape and dtype. This comparison waits for other ranks at
    most ``group.time_limit_s``.

    float16 and bfloat16 are accumulated in float32 and rounded once. Kernels may also round partial sums to x's dtype, at most
    once for each rank. The order in which the ranks' values are added is unspecified, but all ranks get bitwise equal results.
    A kernel that uses peer memory waits at most ``group.peer_time_limit_s`` seconds for the other ranks. Then its launch fails.

    Args:
        x: float16, bfloat16, float32, float64, int32 or int64 ``[...]``. The operator does not write to x, unless x is also
            ``out``.
        group: the ranks that take part. Made by `ProcessGroup.of`, or by `ProcessGroup.with_peer_memory` for kernels that access
            peer memory directly instead of calling a communication library.
        out: receives the sum; may be x itself, and must not overlap it otherwise.

    Returns:
        Like x and contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank makes a different call.
        RuntimeError: at the first call, another rank did not make the call within the time limit. Also raised if the group was
            destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, all_reduce
        >>> all_reduce(torch.tensor([1.0, 2.0]), ProcessGroup.of())
        tensor([1., 2.])

    Not safe in CUDA graphs with gloo, which waits for the device. Safe with nccl after a first call outside of a graph.
    """
    halves = x.dtype in (torch.float16, torch.bfloat16)
    total = x.to(torch.float32 if halves else x.dtype, copy=True, memory_format=torch.contiguous_format)
    if group.world_size > 1:
        group.check_agreement("all_reduce", x=x)
        dist.all_reduce(total, group=group.group)
    return total.to(x.dtype)


@all_reduce.traits
def _(x: Tensor, group: ProcessGroup) -> dict[str, object]:
    return {**group.traits, "protocol": group.protocol(nbytes(x))}


@all_reduce.check
def _(check: Checker, x: Tensor, group: ProcessGroup) -> None:
    check.dtype("x", x, FLOATS | INTS)
    check.bind("elements", x.numel(), "x")
    check.bind("world_size", group.world_size, "group")


@all_reduce.fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@all_reduce.cases
def _() -> list[Case]:
    return [
        Case("one rank, float32", rank_inputs(5, 7, dtype=torch.float32)),
        Case("one rank, int32", rank_inputs(9, dtype=torch.int32)),
        Case("one rank, no elements", rank_inputs(0, 64)),
        Case("2 ranks, bfloat16", rank_inputs(33, 65), world_size=2),
        Case("2 ranks, float16, whole vectors", rank_inputs(3, 264, dtype=torch.float16), world_size=2),
        Case("gpt-oss-120b decode 64, 2 ranks", rank_inputs(64, 2880), large=True, world_size=2),
        Case("gpt-oss-120b prefill 4096, 2 ranks", rank_inputs(4096, 2880), large=True, world_size=2),
        Case("llama-3-70b decode 64, 8 ranks", rank_inputs(64, 8192), large=True, world_size=8),
    ]


@all_reduce.vary
def _(variation: Variation, x: Tensor) -> dict[str, Any]:
    return captured_inputs(variation, x)


@all_reduce.cost
def _(x: Tensor, group: ProcessGroup) -> Cost:
    return Cost(flops=float((group.world_size - 1) * x.numel()), bytes=2 * nbytes(x))
