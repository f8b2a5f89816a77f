"""Draft trees, as all operators of speculative decoding represent them.

The target model runs on ``nodes`` tokens of each sequence. Node 0 is the root: the last known token. Every other node i is a
draft token, which continues node ``parents[i] < i``. A node is absent if its parent is outside 0 to i - 1, for example -1. So trees
of a batch may have different sizes. Without ``parents``, the nodes form a chain, in which each node continues the preceding one.

The target model's output for a node predicts the token after the node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw, absent_ids
from tokenspeed_kernel_base.checks import INTS, Checker


def chain(batch: int, nodes: int, device: torch.device) -> Tensor:
    """Returns the parents of a chain: int32 ``[batch, nodes]``."""
    return torch.arange(-1, nodes - 1, dtype=torch.int32, device=device).expand(batch, nodes)


def tree_masks(parents: Tensor) -> Tensor:
    """Returns the masks of draft trees, int64 ``[batch, nodes]``. Bit j of a node's mask is set for the node itself and for its
    ancestors.

    The mask of an absent node has only the node's own bit. A tree has at most 64 nodes.
    """
    batch, nodes = parents.shape
    masks = torch.empty(batch, nodes, dtype=torch.int64, device=parents.device)
    for node in range(nodes):
        parent = parents[:, node].long()
        there = (parent >= 0) & (parent < node)
        earlier = masks.gather(1, torch.where(there, parent, 0).unsqueeze(1)).squeeze(1) if node else masks[:, 0]
        own = 1 << node if node < 63 else -(1 << 63)
        masks[:, node] = torch.where(there, earlier, 0) | own
    return masks


def draw_parents(draw: Draw, batch: int, nodes: int) -> Tensor:
    """Draws the parents of random trees, int32 ``[batch, nodes]``. In every third tree, the last third of the nodes is absent."""
    at = torch.arange(nodes, device=draw.device)
    parents = (draw.uniform(batch, nodes) * at).floor().int().clamp(min=0)
    parents = torch.minimum(parents, (at - 1).clamp(min=0).int())
    parents[:, 0] = -1
    parents[::3, nodes - nodes // 3 :] = -1
    return parents


def absent_nodes(draft_tokens: Tensor, parents: Tensor | None, vocab: int | None = None) -> dict[str, Tensor]:
    """For ``vary`` hooks: changes the tokens and parents of absent nodes and of the root, which are ignored.

    If ``vocab`` is given, nodes whose token is at least ``vocab`` are also absent.
    """
    nodes = draft_tokens.shape[1]
    at = torch.arange(nodes, device=draft_tokens.device)
    absent = (draft_tokens < 0) | (at == 0)
    if vocab is not None:
        absent = absent | (draft_tokens >= vocab)
    if parents is None:
        return {"draft_tokens": absent_ids(draft_tokens, absent, vocab)}
    without = (parents < 0) | (parents >= at)
    return {"draft_tokens": absent_ids(draft_tokens, absent | without, vocab), "parents": absent_ids(parents, without, nodes)}


def check_drafts(check: Checker, draft_tokens: Tensor, parents: Tensor | None) -> None:
    """Checks the dtypes and shapes of draft tokens and of the parents of their nodes."""
    check.tensor("draft_tokens", draft_tokens, "batch nodes", INTS)
    check.require(check["nodes"] > 0, "draft_tokens", "of shape [batch, nodes] with nodes > 0", str(list(draft_tokens.shape)))
    check.tensor("parents", parents, "batch nodes", torch.int32)


def made_paths(draft_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns uninitialised outputs of a verification: tokens, path, counts."""
    batch, nodes = draft_tokens.shape
    integers = draft_tokens.new_empty(batch, nodes, dtype=torch.int32)
    return draft_tokens.new_empty(batch, nodes), integers, integers.new_empty(batch)
