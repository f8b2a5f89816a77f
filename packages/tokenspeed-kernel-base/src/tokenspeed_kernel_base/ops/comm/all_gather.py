"""All-gather over the processes of a group."""

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
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@operator("comm", "all_gather", formats=("x",), traits={**ProcessGroup.trait_kinds, "protocol": str}, exact=True, varying=("rows",))
def all_gather(x: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Tensor:
    """All-gather: concatenates all ranks' x, in rank order. Every rank gets the result.

    All ranks of the group must make the same collective calls in the same order, with x of the same shape and dtype. With gloo or
    peer memory, the ranks compare their calls at the first call of each shape and dtype. This comparison waits for other ranks at
    most ``group.time_limit_s``.

    The bits of x are copied, with one exception: kernels that use peer memory may return 0.0 for a -0.0 of a float16 or bfloat16 x.
    A kernel that uses peer memory waits at most ``group.peer_time_limit_s`` seconds for the other ranks. Then its launch fails.

    Args:
        x: float16, bfloat16, float32, float64, int32 or int64 ``[rows, ...]``. The operator does not write to x.
        group: the ranks that take part. Made by `ProcessGroup.of`, or by `ProcessGroup.with_peer_memory` for kernels that access
            peer memory directly instead of calling a communication library.
        out: receives the result.

    Returns:
        Like x, ``[world_size * rows, ...]`` and contiguous. Rank r's rows begin at ``r * rows``.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank makes a different call.
        RuntimeError: at the first call, another rank did not make the call within the time limit. Also raised if the group was
            destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, all_gather
        >>> all_gather(torch.tensor([1.0, 2.0]), ProcessGroup.of())
        tensor([1., 2.])

    Not safe in CUDA graphs with gloo, which waits for the device. Safe with nccl after a first call outside of a graph.
    """
    if group.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format)
    group.check_agreement("all_gather", x=x)
    gathered = x.new_empty(group.world_size * x.shape[0], *x.shape[1:])
    _gather(gathered, x.contiguous(), group=group.group)
    return gathered


@all_gather.traits
def _(x: Tensor, group: ProcessGroup) -> dict[str, object]:
    protocol = group.direct(nbytes(x)) if x.numel() else "none: there are no rows"
    return {**group.traits, "protocol": protocol}


@all_gather.check
def _(check: Checker, x: Tensor, group: ProcessGroup) -> None:
    check.dtype("x", x, FLOATS | INTS)
    check.require(x.dim() > 0, "x", "a tensor of one axis or more", x)
    check.bind("rows", x.shape[0], "x")
    check.bind("world_size", group.world_size, "group")


@all_gather.fake
def _(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.new_empty(group.world_size * x.shape[0], *x.shape[1:])


@all_gather.cases
def _() -> list[Case]:
    return [
        Case("one rank, float32", rank_inputs(5, 7, dtype=torch.float32)),
        Case("one rank, int32, one axis", rank_inputs(9, dtype=torch.int32)),
        Case("one rank, no rows", rank_inputs(0, 64)),
        Case("2 ranks, bfloat16", rank_inputs(33, 65), world_size=2),
        Case("2 ranks, float16, whole vectors", rank_inputs(3, 2056, dtype=torch.float16), world_size=2),
        Case("gpt-oss-120b logits of 64, 2 ranks", rank_inputs(64, 100544), large=True, world_size=2),
        Case("gpt-oss-120b prefill 4096, 4 ranks", rank_inputs(1024, 2880), large=True, world_size=4),
    ]


@all_gather.vary
def _(variation: Variation, x: Tensor) -> dict[str, Any]:
    return captured_inputs(variation, x)


@all_gather.cost
def _(x: Tensor, group: ProcessGroup) -> Cost:
    return Cost(flops=0.0, bytes=(1 + group.world_size) * nbytes(x))
