"""Expert-parallel dispatch: sends tokens to the ranks that hold their experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.comm._inputs import own_values
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import VECTOR
from tokenspeed_kernel_base.variation import Variation, Want


def row_bytes(hidden: int, top_k: int, itemsize: int) -> int:
    """Returns the bytes sent for one token: the token's expert ids and weights, padded to 16-byte vectors, and its hidden
    vector."""
    return -(-8 * top_k // VECTOR) * VECTOR + hidden * itemsize


@operator(
    "comm",
    "moe_dispatch",
    formats=("x",),
    traits={**ProcessGroup.trait_kinds, "protocol": str, "hidden": int, "top_k": int},
    outs=("out", "weights_out", "ids_out"),
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Expert-parallel dispatch: sends each token once to every rank that holds one of its experts.

    Rank r holds ``num_experts / world_size`` experts, from ``r * num_experts / world_size`` on. Each rank's result has a row for
    each token of each rank, in rank order. A rank receives the rows of those tokens that are routed to its experts. All other rows
    are zero and have no experts. So shapes do not depend on the routing. `moe_apply` on these rows, weights and ids, followed by
    `moe_combine`, equals `moe_apply` with all experts, except for the order of summation.

    All ranks of the group must make the same collective calls in the same order, with tensors of the same shapes and dtypes. A rank
    with fewer tokens adds padding tokens, whose ids are all negative. With gloo or peer memory, the ranks compare their calls at
    the first call of each kind. This comparison waits for other ranks at most ``group.time_limit_s``.

    The bits of x are copied, with one exception: kernels that use peer memory may return 0.0 for a -0.0 of a float16 or bfloat16 x.
    A kernel that uses peer memory waits at most ``group.peer_time_limit_s`` seconds for the other ranks. Then its launch fails.

    Args:
        x: float16, bfloat16, float32 or float64 ``[tokens, hidden]``.
        topk_weights: float32 ``[tokens, top_k]``.
        topk_ids: int32 ``[tokens, top_k]``, from 0 to ``num_experts - 1``; a negative id skips the slot.
        num_experts: experts of all ranks together; a multiple of the number of ranks, below 2^31, and the same on every rank.
        group: the ranks that take part. Made by `ProcessGroup.of`, or by `ProcessGroup.with_peer_memory` for kernels that access
            peer memory directly instead of calling a communication library.
        out: receives the tokens.
        weights_out: receives the received tokens' routing weights.
        ids_out: receives the received tokens' expert ids.

    Returns:
        The received tokens, like x ``[world_size * tokens, hidden]``; rank r's tokens begin at row ``r * tokens``. Rows of tokens
        without experts on this rank are zero. Also the tokens' routing weights, float32 ``[world_size * tokens, top_k]``, 0 for
        experts of other ranks. Also their expert ids relative to this rank's first expert, int32 ``[world_size * tokens, top_k]``,
        -1 for experts of other ranks.

    Raises:
        TypeError, ValueError: an argument is not as stated above, or (at the first call) another rank makes a different call.
        RuntimeError: at the first call, another rank did not make the call within the time limit. Also raised if the group was
            destroyed.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import ProcessGroup, moe_dispatch
        >>> ids = torch.tensor([[1, 0], [-1, -1]], dtype=torch.int32)
        >>> rows, weights, local = moe_dispatch(torch.tensor([[3.0], [4.0]]), torch.ones(2, 2), ids, 2, ProcessGroup.of())
        >>> rows.tolist(), local.tolist()
        ([[3.0], [0.0]], [[1, 0], [-1, -1]])

    Ids are checked if they lie in host memory. Not safe in CUDA graphs with gloo, which waits for the device. Otherwise safe
    after a first call outside of a graph.
    """
    size = group.world_size
    experts_per_rank = num_experts // size
    if size > 1:
        group.check_agreement("moe_dispatch", x=x, topk_ids=topk_ids, num_experts=num_experts)
    ranks = torch.arange(size, dtype=torch.int32, device=x.device)[:, None, None]
    held = torch.where(topk_ids >= 0, topk_ids // experts_per_rank, -1) == ranks  # [rank, tokens, top_k]
    return (
        _exchanged(torch.where(held.any(-1, keepdim=True), x, 0), group),
        _exchanged(torch.where(held, topk_weights, 0), group),
        _exchanged(torch.where(held, topk_ids - ranks * experts_per_rank, -1), group),
    )


def _exchanged(blocks: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all: sends block r to rank r and receives a block from each rank. ``[rank, tokens, ...]`` becomes
    ``[rank * tokens, ...]``."""
    sent = blocks.contiguous()
    if group.world_size == 1:
        return sent.flatten(0, 1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.group)
    return received.flatten(0, 1)


@moe_dispatch.traits
def _(x: Tensor, topk_ids: Tensor, group: ProcessGroup) -> dict[str, object]:
    (tokens, hidden), top_k = x.shape, topk_ids.shape[1]
    row = row_bytes(hidden, top_k, x.element_size())
    return {
        **group.traits,
        "protocol": group.direct(tokens * row, row) if tokens else "none: there are no rows",
        "hidden": hidden,
        "top_k": top_k,
    }


@moe_dispatch.check
def _(check: Checker, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_experts: int, group: ProcessGroup) -> None:
    check.tensor("x", x, "tokens hidden", FLOATS)
    check.tensor("topk_weights", topk_weights, "tokens top_k", torch.float32)
    check.tensor("topk_ids", topk_ids, "tokens top_k", torch.int32)
    check.bind("world_size", group.world_size, "group")
    whole = 0 < num_experts < 1 << 31 and num_experts % group.world_size == 0
    expected = f"a positive multiple of {group.world_size}, the number of ranks, below 2^31"
    check.require(whole, "num_experts", expected, num_experts)


@moe_dispatch.check_values(host=("topk_ids",))
def _(check: Checker, topk_ids: Tensor | None, num_experts: int) -> None:
    if topk_ids is None or not topk_ids.numel():
        return
    highest = int(topk_ids.max())
    check.require(highest < num_experts, "topk_ids", f"below num_experts = {num_experts}", f"an id {highest}")


@moe_dispatch.fake
def _(x: Tensor, topk_ids: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    tokens, top_k = topk_ids.shape
    rows = group.world_size * tokens
    weights = x.new_empty(rows, top_k, dtype=torch.float32)
    return x.new_empty(rows, x.shape[1]), weights, torch.empty_like(weights, dtype=torch.int32)


def _chosen(draw: Draw, tokens: int, top_k: int, num_experts: int, rank: int, ranks: int) -> Tensor:
    """Draws distinct experts for each token, with about 10% of the slots skipped. Draws the ids of all ranks and returns those of
    ``rank``."""
    scores = draw.uniform(ranks, tokens, num_experts)[rank]
    ids = scores.topk(top_k, -1).indices.to(torch.int32)
    return torch.where(draw.uniform(ranks, tokens, top_k)[rank] < 0.1, -1, ids)


@recipe
def _inputs(
    tokens: int, hidden: int, num_experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16, empty: bool = False
) -> Callable[[Draw], dict[str, Any]]:
    """Draws the arguments of `moe_dispatch`. With ``empty``, the last rank has no tokens, and no token is routed to its experts."""

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
        Case("2 ranks, rows of more than a unit", _inputs(5, 520, 8, 3, torch.float16), world_size=2),
        Case("2 ranks, one of them empty", _inputs(9, 24, 8, 2, torch.float16, empty=True), world_size=2),
        Case("gpt-oss-120b decode 64, 2 ranks", _inputs(64, 2880, 128, 4), large=True, world_size=2),
        Case("gpt-oss-120b decode 64, 4 ranks", _inputs(64, 2880, 128, 4), large=True, world_size=4),
        Case("gpt-oss-120b prefill 4096, 4 ranks", _inputs(1024, 2880, 128, 4), large=True, world_size=4),
    ]


@moe_dispatch.vary
def _(variation: Variation, topk_ids: Tensor, num_experts: int) -> dict[str, Any]:
    if variation.want is Want.OTHER:
        return {"topk_ids": torch.where(topk_ids >= 0, num_experts - 1 - topk_ids, topk_ids)}
    if variation.want is Want.UNUSED:
        return {"topk_ids": absent_ids(topk_ids, topk_ids < 0)}
    tokens, top_k = topk_ids.shape
    return {"group": ProcessGroup.with_peer_memory(), "topk_ids": _chosen(variation.draw, tokens, top_k, num_experts, 0, 1)}


@moe_dispatch.cost
def _(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, group: ProcessGroup) -> Cost:
    return Cost(flops=0.0, bytes=(1 + group.world_size) * nbytes(x, topk_weights, topk_ids))
