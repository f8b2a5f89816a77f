"""Expert-parallel combine: returns the experts' results to the ranks of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, poisoned, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.comm._inputs import own_values
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import VECTOR
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "comm",
    "moe_combine",
    formats=("x",),
    traits={**ProcessGroup.trait_kinds, "protocol": str, "hidden": int, "top_k": int},
    varying=("tokens",),
)
def moe_combine(x: Tensor, ids: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Tensor:
    """Expert-parallel combine: sends expert results back to their tokens' ranks and sums them over ranks for each token.

    The operator is the counterpart of `moe_dispatch`.

    All ranks of the group must make the same collective calls in the same order, with tensors of the same shapes and dtypes. With
    gloo or peer memory, the ranks compare their calls at the first call of each kind. This comparison waits for other ranks at most
    ``group.time_limit_s``. The ranks' results are added in rank order, in float32 (float64 for float64 inputs), and the sum is
    rounded once. A kernel that uses peer memory waits at most ``group.peer_time_limit_s`` seconds for the other ranks. Then its
    launch fails.

    Args:
        x: float16, bfloat16, float32 or float64 ``[world_size * tokens, hidden]``: a result for each row of `moe_dispatch`,
            already multiplied by the routing weights. Rows without experts may hold anything.
        ids: int32 ``[world_size * tokens, top_k]``, the ids that `moe_dispatch` returned; negative for slots whose expert is not
            on this rank.
        group: the ranks that take part. Made by `ProcessGroup.of`, or by `ProcessGroup.with_peer_memory` for kernels that access
            peer memory directly instead of calling a communication library.
        out: receives the sums.

    Returns:
        Like x, ``[tokens, hidden]``; zeros for tokens without experts.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank makes a different call.
        RuntimeError: at the first call, another rank did not make the call within the time limit. Also raised if the group was
            destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, moe_combine
        >>> moe_combine(torch.tensor([[3.0], [4.0]]), torch.tensor([[-1], [0]], dtype=torch.int32), ProcessGroup.of())
        tensor([[0.],
                [4.]])

    Not safe in CUDA graphs with gloo, which waits for the device. Otherwise safe after a first call outside of a graph.
    """
    size = group.world_size
    blocks = torch.where((ids >= 0).any(-1, keepdim=True), x, 0).reshape(size, len(x) // size, x.shape[1]).contiguous()
    if size > 1:
        group.check_agreement("moe_combine", x=x, ids=ids)
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group.group)
        blocks = received
    total = torch.zeros_like(blocks[0], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    for block in blocks:
        total += block
    return total.to(x.dtype)


@moe_combine.traits
def _(x: Tensor, ids: Tensor, group: ProcessGroup) -> dict[str, object]:
    rows, hidden = x.shape
    row = VECTOR + hidden * x.element_size()
    return {
        **group.traits,
        "protocol": group.direct(rows // group.world_size * row, row) if rows else "none: there are no rows",
        "hidden": hidden,
        "top_k": ids.shape[1],
    }


@moe_combine.check
def _(check: Checker, x: Tensor, ids: Tensor, group: ProcessGroup) -> None:
    check.tensor("x", x, "rows hidden", FLOATS)
    check.tensor("ids", ids, "rows top_k", torch.int32)
    check.require(x.shape[0] % group.world_size == 0, "x", f"of a multiple of {group.world_size} rows, as many for each rank", x)
    check.bind("tokens", x.shape[0] // group.world_size, "x")
    check.bind("world_size", group.world_size, "group")


@moe_combine.fake
def _(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.new_empty(x.shape[0] // group.world_size, x.shape[1])


def _held(draw: Draw, rows: int, top_k: int) -> Tensor:
    """Draws expert ids like those that `moe_dispatch` returns: most belong to experts of other ranks, and are negative."""
    return torch.where(draw.uniform(rows, top_k) < 0.4, draw.integers(0, 8, rows, top_k, dtype=torch.int32), -1)


@recipe
def _inputs(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16, top_k: int = 4) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        group = ProcessGroup.with_peer_memory()
        rows = group.world_size * tokens
        ids = torch.stack([_held(draw, rows, top_k) for _ in range(group.world_size)])[group.rank].clone()
        return {"x": own_values(draw, group, rows, hidden, dtype=dtype), "ids": ids, "group": group}

    return make


@moe_combine.cases
def _() -> list[Case]:
    return [
        Case("one rank, float32", _inputs(5, 7, torch.float32)),
        Case("one rank, one token", _inputs(1, 64)),
        Case("one rank, no tokens", _inputs(0, 64)),
        Case("2 ranks, float16", _inputs(17, 40, torch.float16), world_size=2),
        Case("2 ranks, rows of more than a unit", _inputs(5, 520, top_k=3), world_size=2),
        Case("gpt-oss-120b decode 64, 2 ranks", _inputs(64, 2880), large=True, world_size=2),
        Case("gpt-oss-120b decode 64, 4 ranks", _inputs(64, 2880), large=True, world_size=4),
        Case("gpt-oss-120b prefill 4096, 4 ranks", _inputs(1024, 2880), large=True, world_size=4),
    ]


@moe_combine.vary
def _(variation: Variation, x: Tensor, ids: Tensor) -> dict[str, Any]:
    if variation.want is Want.UNUSED:
        return {"x": poisoned(x, (ids < 0).all(-1)), "ids": absent_ids(ids, ids < 0)}
    rows, top_k = ids.shape
    made = {"ids": _held(variation.draw, rows, top_k)}
    return {"group": ProcessGroup.with_peer_memory(), **made} if variation.want is Want.CAPTURED else made


@moe_combine.cost
def _(x: Tensor, ids: Tensor, group: ProcessGroup) -> Cost:
    return Cost(flops=float(x.numel()), bytes=nbytes(x, ids) + nbytes(x) / group.world_size)
