"""The experts' results on their way back to the processes of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.comm._inputs import own_values
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.variation import Variation, Want


@operator("comm", "moe_combine", formats=("x",), varying=("tokens",))
def moe_combine(x: Tensor, slots: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Tensor:
    """The sum, for each of this rank's tokens, of what the ranks that `moe_dispatch` sent it to made of it.

    Every rank of the group must call this in the same order, with tensors of the same shapes and dtypes. On gloo, and with peer
    memory, that is made sure of at the first call of each kind, within ``group.time_limit_s``. Ranks are added in their order, in
    float32 (float64 for float64), and the sum is rounded once.

    Args:
        x: float16, bfloat16, float32 or float64 ``[world_size * tokens, hidden]``: a result for each row that `moe_dispatch`
            received, weights of its experts included. Rows that were not used may hold anything.
        slots: int32 ``[tokens, world_size]``, of `moe_dispatch`.
        group: the ranks: `ProcessGroup.of`.
        out: receives the sums.

    Returns:
        Like x, ``[tokens, hidden]``; zeros for tokens that went nowhere.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank calls something else.
        RuntimeError: at the first call, not every rank called in time; or the group was destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, moe_combine
        >>> moe_combine(torch.tensor([[3.0], [4.0]]), torch.tensor([[-1], [0]], dtype=torch.int32), ProcessGroup.of())
        tensor([[0.],
                [3.]])

    Slots are not checked. Not safe in CUDA graphs on gloo, which waits for the device; on nccl it is once there was a call outside
    of a graph.
    """
    tokens, size = slots.shape
    blocks = x.reshape(size, tokens, x.shape[1]).contiguous()
    if size > 1:
        group.check_agreement("moe_combine", x=x)
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group.group)
        blocks = received
    total = torch.zeros(tokens, x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    for rank in range(size):
        slot = slots[:, rank, None].long()
        rows = blocks[rank].gather(0, slot.clamp(min=0).expand(-1, x.shape[1]))
        total += torch.where(slot >= 0, rows, 0)
    return total.to(x.dtype)


@moe_combine.traits
def _(group: ProcessGroup) -> dict[str, object]:
    return {"world_size": group.world_size, "backend": group.backend}


@moe_combine.check
def _(check: Checker, x: Tensor, slots: Tensor, group: ProcessGroup) -> None:
    check.bind("world_size", group.world_size, "group")
    check.tensor("slots", slots, "tokens world_size", torch.int32)
    check.tensor("x", x, "rows hidden", FLOATS)
    rows = slots.shape[0] * group.world_size
    check.require(x.shape[0] == rows, "x", f"of {rows} rows, one for each token that slots has, from each rank", x)


@moe_combine.fake
def _(x: Tensor, slots: Tensor) -> Tensor:
    return x.new_empty(slots.shape[0], x.shape[1])


def _slots(draw: Draw, ranks: int, tokens: int) -> Tensor:
    """Slots as `moe_dispatch` gives them, of tokens that go to a rank or not by chance."""
    goes = draw.uniform(tokens, ranks) < 0.6
    return torch.where(goes, goes.cumsum(0) - 1, -1).to(torch.int32)


@recipe
def _inputs(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        group = ProcessGroup.with_peer_memory()
        slots = torch.stack([_slots(draw, group.world_size, tokens) for _ in range(group.world_size)])
        return {
            "x": own_values(draw, group, group.world_size * tokens, hidden, dtype=dtype),
            "slots": slots[group.rank].clone(),
            "group": group,
        }

    return make


@moe_combine.cases
def _() -> list[Case]:
    return [
        Case("one rank, float32", _inputs(5, 7, torch.float32)),
        Case("one rank, one token", _inputs(1, 64)),
        Case("one rank, no tokens", _inputs(0, 64)),
        Case("2 ranks, float16", _inputs(17, 40, torch.float16), world_size=2),
        Case("gpt-oss-120b decode 64, 2 ranks", _inputs(64, 2880), large=True, world_size=2),
        Case("gpt-oss-120b decode 64, 4 ranks", _inputs(64, 2880), large=True, world_size=4),
        Case("gpt-oss-120b prefill 4096, 4 ranks", _inputs(1024, 2880), large=True, world_size=4),
    ]


@moe_combine.vary
def _(variation: Variation, slots: Tensor) -> dict[str, Any]:
    tokens, ranks = slots.shape
    if variation.want is Want.OTHER:
        return {"slots": _slots(variation.draw, ranks, tokens)}
    if variation.want is not Want.CAPTURED:
        return {}
    return {"group": ProcessGroup.with_peer_memory(), "slots": _slots(variation.draw, ranks, tokens)}


@moe_combine.cost
def _(x: Tensor, slots: Tensor) -> Cost:
    return Cost(flops=float(x.numel()), bytes=nbytes(x, slots) + nbytes(x) / slots.shape[1])
