"""Builds the draft tree of a draft model's candidate tokens. The target model verifies this tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, absent_ids, nbytes, recipe
from tokenspeed_kernel_base.checks import INTS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.speculation.trees import tree_masks
from tokenspeed_kernel_base.variation import Variation, Want

MAX_NODES = 64
"""The largest number of nodes of a draft tree: one for each bit of a node's int64 mask."""


@operator(
    "speculation",
    "build_draft_tree",
    formats=("tokens",),
    traits={"candidates": int, "nodes": int},
    outs=("out", "parents_out", "tree_mask_out", "depths_out"),
    exact=True,
    varying=("batch",),
)
def build_draft_tree(
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    root_tokens: Tensor,
    nodes: int,
    out: Tensor | None = None,
    parents_out: Tensor | None = None,
    tree_mask_out: Tensor | None = None,
    depths_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Builds each sequence's draft tree from its most probable candidates, with parents, tree masks and depths.

    A draft model proposes candidates level by level: tokens that continue the last known token or an earlier candidate. The
    ``nodes - 1`` candidates with the highest scores are kept (Li et al., 2024, EAGLE-2, arXiv:2406.16858); among equal scores the
    earlier candidates win. The order of kept candidates does not change. If a score is the sum of log-probabilities along the path,
    no candidate scores higher than its parent. So the kept candidates form a tree.

    Node 0 is the root, which holds the last known token. If fewer than ``nodes - 1`` candidates have a score above -inf, the last
    nodes are absent. Absent nodes have parent -1 and see only themselves. Absent nodes hold the root's token, so that the target
    model can run on them. A kept candidate also has parent -1 if its parent was not kept, or is not an earlier candidate.

    Args:
        tokens: int32 or int64 ``[batch, candidates]``. May be strided.
        scores: float32 ``[batch, candidates]``, the logarithm of the probability of the path to each candidate; -inf or NaN for
            an absent candidate. May be strided.
        parents: int32 ``[batch, candidates]``: the earlier candidate that each candidate continues; negative if the candidate
            continues the root. May be strided.
        root_tokens: tokens' dtype ``[batch]``, the last known token of each sequence.
        nodes: nodes of a tree, root included, 1 to 64.
        out: receives the draft tokens.
        parents_out: receives the parents.
        tree_mask_out: receives the masks.
        depths_out: receives the depths.

    Returns:
        draft_tokens: tokens' dtype ``[batch, nodes]``.
        parents: int32 ``[batch, nodes]``, for `verify_draft_tokens` and `verify_draft_probs`: the node that each node continues; -1
            for the root and for absent nodes.
        tree_mask: int64 ``[batch, nodes]``: a node's mask has bit j set for itself and for each ancestor j, the nodes that it sees.
            Pass the flattened tensor as tree_mask to `mha_with_kvcache` and `mla_decode_with_kvcache`.
        depths: int32 ``[batch, nodes]``: the number of ancestors of each node. The position for RoPE is the root's position plus
            the depth.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        Two candidates continue the root, and a third continues the second one. The first candidate is the least probable.

        >>> import torch
        >>> from tokenspeed_kernel import build_draft_tree
        >>> tokens, scores = torch.tensor([[7, 8, 9]]), torch.tensor([[-3.0, -0.1, -0.5]])
        >>> parents = torch.tensor([[-1, -1, 1]], dtype=torch.int32)
        >>> build_draft_tree(tokens, scores, parents, torch.tensor([5]), nodes=3)[:3]
        (tensor([[5, 8, 9]]), tensor([[-1,  0,  1]], dtype=torch.int32), tensor([[1, 3, 7]]))

    Safe in CUDA graphs. Results are exactly the same with every backend.
    """
    batch, candidates = tokens.shape
    at = torch.arange(candidates, device=tokens.device)
    known = torch.where(scores.isnan(), -torch.inf, scores)
    order = known.sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, at.expand(batch, -1))
    kept = (rank < nodes - 1) & (known > -torch.inf)
    node = torch.where(kept, kept.cumsum(1), nodes)  # rejected candidates go to an extra column
    continued = parents.long().clamp(min=0, max=max(candidates - 1, 0))
    origin = torch.where(kept & (parents < at), node.gather(1, continued), nodes) if candidates else node
    stayed = torch.where(origin < nodes, origin, -1)
    origin = torch.where(parents < 0, 0, stayed)
    draft = root_tokens.unsqueeze(1).repeat(1, nodes + 1).scatter_(1, node, tokens)[:, :nodes].contiguous()
    tree = torch.full((batch, nodes + 1), -1, dtype=torch.int32, device=tokens.device)
    tree = tree.scatter_(1, node, origin.int())[:, :nodes].contiguous()
    masks = tree_masks(tree)
    depths = ((masks.unsqueeze(-1) >> torch.arange(nodes, device=tokens.device)) & 1).sum(-1).int() - 1
    return draft, tree, masks, depths


@build_draft_tree.traits
def _(tokens: Tensor, nodes: int) -> dict[str, object]:
    return {"candidates": tokens.shape[1], "nodes": nodes}


@build_draft_tree.check
def _(check: Checker, tokens: Tensor, scores: Tensor, parents: Tensor, root_tokens: Tensor, nodes: int) -> None:
    check.tensor("tokens", tokens, "batch candidates", INTS)
    check.tensor("scores", scores, "batch candidates", torch.float32)
    check.tensor("parents", parents, "batch candidates", torch.int32)
    check.tensor("root_tokens", root_tokens, "batch", tokens.dtype)
    check.require(1 <= nodes <= MAX_NODES, "nodes", f"1 to {MAX_NODES}", nodes)


@build_draft_tree.fake
def _(tokens: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    drafts = tokens.new_empty(tokens.shape[0], nodes)
    return (
        drafts,
        torch.empty_like(drafts, dtype=torch.int32),
        torch.empty_like(drafts, dtype=torch.int64),
        torch.empty_like(drafts, dtype=torch.int32),
    )


@recipe
def _inputs(
    batch: int, branching: int, depth: int, nodes: int, dtype: torch.dtype = torch.int64
) -> Callable[[Draw], dict[str, Any]]:
    """Draws candidates as in EAGLE-2: ``branching`` continuations of the root, then of each of the best ``branching`` candidates of
    a level."""

    def make(draw: Draw) -> dict[str, Any]:
        levels = [
            (draw.normal(batch, branching).abs().neg(), torch.full((batch, branching), -1, dtype=torch.int32, device=draw.device))
        ]
        first = 0
        for _ in range(1, depth):
            scores, _ = levels[-1]
            best = scores.topk(branching, dim=1).indices
            steps = draw.normal(batch, branching, branching).abs().neg()
            more = (scores.gather(1, best).unsqueeze(2) + steps).flatten(1)
            levels.append((more, (first + best).int().repeat_interleave(branching, dim=1)))
            first += scores.shape[1]
        count = sum(scores.shape[1] for scores, _ in levels)
        return {
            "tokens": draw.integers(0, 32000, batch, count, dtype=dtype),
            "scores": torch.cat([scores for scores, _ in levels], dim=1),
            "parents": torch.cat([parents for _, parents in levels], dim=1),
            "root_tokens": draw.integers(0, 32000, batch, dtype=dtype),
            "nodes": nodes,
        }

    return make


def _odd_values(draw: Draw) -> dict[str, Any]:
    """Draws candidates with equal or absent scores, and with unusual parents: the candidate itself, a later candidate, or a
    candidate that is not kept.
    """
    arguments = _inputs(16, 4, 4, 20)(draw)
    shape = arguments["scores"].shape
    scores = draw.integers(-3, 1, *shape).float()
    scores[::2, ::5] = float("-inf")
    scores[1::4, ::3] = float("nan")
    scores[2] = float("-inf")
    return {**arguments, "scores": scores, "parents": draw.integers(-2, shape[1] + 3, *shape).int()}


@build_draft_tree.cases
def _() -> list[Case]:
    return [
        Case("the root alone", _inputs(3, 2, 1, 1)),
        Case("two of three candidates, int32", _inputs(5, 3, 1, 3, torch.int32)),
        Case("more nodes than candidates", _inputs(4, 2, 2, 20)),
        Case("llama-3, eagle-2: 60 of 1 + 8 x 10 x 10", _inputs(4, 10, 8, 60)),
        Case("trees of 64 nodes", _inputs(6, 8, 6, 64)),
        Case("odd values", _odd_values),
        Case("no sequences", _inputs(0, 3, 2, 8)),
        Case("llama-3, eagle-2, 64 sequences", _inputs(64, 10, 8, 60), large=True),
        Case("gpt-oss-120b, eagle-3, 16 nodes, 256 sequences", _inputs(256, 4, 5, 16, torch.int32), large=True),
    ]


@build_draft_tree.vary
def _(variation: Variation, tokens: Tensor, parents: Tensor, nodes: int) -> dict[str, Any]:
    if variation.want is Want.UNUSED:
        return {"parents": absent_ids(parents, parents < 0)}
    (batch, count), draw = tokens.shape, variation.draw
    at = torch.arange(count, device=draw.device)
    parents = (draw.uniform(batch, count) * (at + 1)).floor().int() - 1  # from -1 to the preceding candidate
    steps = draw.normal(batch, count).abs().neg()
    scores = torch.empty(batch, count, device=draw.device)
    for candidate in range(count):
        origin = parents[:, candidate : candidate + 1].long()
        above = scores.gather(1, origin.clamp(min=0)).squeeze(1) if candidate else steps[:, 0] * 0
        scores[:, candidate] = torch.where(origin.squeeze(1) < 0, 0.0, above) + steps[:, candidate]
    return {
        "tokens": draw.integers(0, 32000, batch, count, dtype=tokens.dtype),
        "scores": scores,
        "parents": torch.minimum(parents, (at - 1).int()),
        "root_tokens": draw.integers(0, 32000, batch, dtype=tokens.dtype),
    }


@build_draft_tree.cost
def _(tokens: Tensor, scores: Tensor, parents: Tensor, root_tokens: Tensor, nodes: int) -> Cost:
    written = len(tokens) * nodes * (tokens.element_size() + 4 + 8 + 4)
    return Cost(flops=1.0 * scores.numel(), bytes=nbytes(tokens, scores, parents, root_tokens) + written)
