"""Tokens on their way to the processes that hold their experts."""

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


@operator(
    "comm",
    "moe_dispatch",
    formats=("x",),
    outs=("out", "weights_out", "ids_out", "slots_out"),
    exact=True,
    varying=("tokens",),
)
def moe_dispatch(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    group: ProcessGroup,
    out: Tensor | None = None,
    weights_out: Tensor | None = None,
    ids_out: Tensor | None = None,
    slots_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sends each token to every rank that holds one of its experts (expert parallelism), once.

    Rank r holds the experts from ``r * num_experts / world_size``. It receives a block of ``tokens`` rows from each rank, by rank:
    those of that rank's tokens that go to an expert of r, in their order, then rows that are not used. So shapes are the same
    whatever the router chose, and `moe_apply` on the received rows with the received weights and ids, followed by `moe_combine`,
    is `moe_apply` with all experts, but for the order of sums.

    Every rank of the group must call this in the same order, with tensors of the same shapes and dtypes. A rank with fewer tokens
    fills up with tokens without experts. On gloo, and with peer memory, shapes are made sure of at the first call of each kind,
    within ``group.time_limit_s``.

    Args:
        x: float16, bfloat16, float32 or float64 ``[tokens, hidden]``.
        topk_weights: float32 ``[tokens, top_k]``.
        topk_ids: int32 ``[tokens, top_k]``, from 0 to ``num_experts - 1``; negative for a slot that no expert sees.
        num_experts: of all ranks; a multiple of the number of ranks, the same for each.
        group: the ranks: `ProcessGroup.of`.
        out: receives the tokens.
        weights_out: receives their weights.
        ids_out: receives their ids.
        slots_out: receives the slots.

    Returns:
        The received tokens, like x ``[world_size * tokens, hidden]``, zeros in rows that are not used; their weights, float32
        ``[world_size * tokens, top_k]``, zero where the expert is another rank's; their ids among the experts of this rank, int32
        ``[world_size * tokens, top_k]``, -1 where the expert is another rank's; and for `moe_combine` where this rank's tokens
        went, int32 ``[tokens, world_size]``: which row of its block on that rank, or -1.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank calls something else.
        RuntimeError: at the first call, not every rank called in time; or the group was destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, moe_dispatch
        >>> ids = torch.tensor([[1, 0], [-1, -1]], dtype=torch.int32)
        >>> rows, weights, local, slots = moe_dispatch(torch.tensor([[3.0], [4.0]]), torch.ones(2, 2), ids, 2, ProcessGroup.of())
        >>> rows.tolist(), local.tolist(), slots.tolist()
        ([[3.0], [0.0]], [[1, 0], [-1, -1]], [[0], [-1]])

    Ids are not checked. Not safe in CUDA graphs on gloo, which waits for the device; on nccl it is once there was a call outside
    of a graph.
    """
    tokens, top_k = topk_ids.shape
    size = group.world_size
    share = num_experts // size
    if size > 1:
        group.check_agreement("moe_dispatch", x=x, topk_ids=topk_ids, num_experts=num_experts)
    ranks = torch.arange(size, device=x.device)
    holds = torch.where(topk_ids >= 0, topk_ids // share, -1)[:, None, :] == ranks[:, None]  # [tokens, rank, top_k]
    goes = holds.any(-1)
    slots = torch.where(goes, goes.cumsum(0) - 1, -1).to(torch.int32)
    # Tokens that stay are written to one row too many of each block, which is cut off.
    rows = torch.where(goes, slots, tokens).t().long()

    def blocks(values: Tensor, unused: int) -> Tensor:
        """``[rank, tokens, ...]`` in the order of the slots, from the same in the order of tokens."""
        made = values.new_full((size, tokens + 1, *values.shape[2:]), unused)
        made[ranks[:, None], rows] = values
        return _exchanged(made[:, :tokens].contiguous(), group)

    local = torch.where(holds, topk_ids[:, None, :] - ranks[:, None].to(torch.int32) * share, -1).to(torch.int32)
    kept = torch.where(holds, topk_weights[:, None, :], 0.0)
    return (
        blocks(x.expand(size, *x.shape), 0).view(size * tokens, x.shape[1]),
        blocks(kept.transpose(0, 1), 0).view(size * tokens, top_k),
        blocks(local.transpose(0, 1), -1).view(size * tokens, top_k),
        slots,
    )


def _exchanged(blocks: Tensor, group: ProcessGroup) -> Tensor:
    """A block to each rank for a block from each rank."""
    if group.world_size == 1:
        return blocks
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group.group)
    return received


@moe_dispatch.traits
def _(topk_ids: Tensor, group: ProcessGroup) -> dict[str, object]:
    return {"world_size": group.world_size, "backend": group.backend, "top_k": topk_ids.shape[1]}


@moe_dispatch.check
def _(check: Checker, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, group: ProcessGroup) -> None:
    check.tensor("x", x, "tokens hidden", FLOATS)
    check.tensor("topk_weights", topk_weights, "tokens top_k", torch.float32)
    check.tensor("topk_ids", topk_ids, "tokens top_k", torch.int32)
    check.bind("world_size", group.world_size, "group")
    whole = num_experts > 0 and num_experts % group.world_size == 0
    check.require(whole, "num_experts", f"a positive multiple of {group.world_size}, the number of ranks", num_experts)


@moe_dispatch.fake
def _(x: Tensor, topk_ids: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, top_k = topk_ids.shape
    rows = group.world_size * tokens
    return (
        x.new_empty(rows, x.shape[1]),
        x.new_empty(rows, top_k, dtype=torch.float32),
        x.new_empty(rows, top_k, dtype=torch.int32),
        x.new_empty(tokens, group.world_size, dtype=torch.int32),
    )


def _chosen(draw: Draw, tokens: int, top_k: int, num_experts: int, rank: int, ranks: int) -> Tensor:
    """Different experts for each token, and now and then none; of all ranks' tokens, those of one."""
    scores = draw.uniform(ranks, tokens, num_experts)[rank]
    ids = scores.topk(top_k, -1).indices.to(torch.int32)
    return torch.where(draw.uniform(ranks, tokens, top_k)[rank] < 0.1, -1, ids)


@recipe
def _inputs(
    tokens: int, hidden: int, num_experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16, empty: bool = False
) -> Callable[[Draw], dict[str, Any]]:
    """``empty``: the last rank has no tokens, and no experts that any token goes to."""

    def make(draw: Draw) -> dict[str, Any]:
        group = ProcessGroup.with_peer_memory()
        last = group.world_size - 1
        used = num_experts // group.world_size * last if empty and last else num_experts
        ids = _chosen(draw, tokens, top_k, used, group.rank, group.world_size)
        return {
            "x": own_values(draw, group, tokens, hidden, dtype=dtype),
            "topk_weights": draw.uniform(group.world_size, tokens, top_k)[group.rank].clone(),
            "topk_ids": torch.full_like(ids, -1) if empty and last and group.rank == last else ids,
            "num_experts": num_experts,
            "group": group,
        }

    return make


@moe_dispatch.cases
def _() -> list[Case]:
    return [
        Case("one rank, float32", _inputs(5, 7, 6, 3, torch.float32)),
        Case("one rank, one token", _inputs(1, 64, 8, 4)),
        Case("one rank, no tokens", _inputs(0, 64, 8, 2)),
        Case("2 ranks, float16", _inputs(17, 40, 10, 3, torch.float16), world_size=2),
        Case("2 ranks, one of them empty", _inputs(9, 24, 8, 2, torch.float32, empty=True), world_size=2),
        Case("gpt-oss-120b decode 64, 2 ranks", _inputs(64, 2880, 128, 4), large=True, world_size=2),
        Case("gpt-oss-120b decode 64, 4 ranks", _inputs(64, 2880, 128, 4), large=True, world_size=4),
        Case("gpt-oss-120b prefill 4096, 4 ranks", _inputs(1024, 2880, 128, 4), large=True, world_size=4),
    ]


@moe_dispatch.vary
def _(variation: Variation, topk_ids: Tensor, num_experts: int) -> dict[str, Any]:
    if variation.want is Want.OTHER:
        return {"topk_ids": torch.where(topk_ids >= 0, num_experts - 1 - topk_ids, topk_ids)}
    if variation.want is not Want.CAPTURED:
        return {}
    tokens, top_k = topk_ids.shape
    return {"group": ProcessGroup.with_peer_memory(), "topk_ids": _chosen(variation.draw, tokens, top_k, num_experts, 0, 1)}


@moe_dispatch.cost
def _(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, group: ProcessGroup) -> Cost:
    return Cost(flops=0.0, bytes=(1 + group.world_size) * nbytes(x, topk_weights, topk_ids) + 4 * len(x) * group.world_size)
