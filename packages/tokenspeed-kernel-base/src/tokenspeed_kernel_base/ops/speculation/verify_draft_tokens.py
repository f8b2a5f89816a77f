"""Verification of draft tokens against the target model's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.speculation.trees import absent_nodes, chain, check_drafts, draw_parents, made_paths
from tokenspeed_kernel_base.variation import Variation, Want


@operator(
    "speculation",
    "verify_draft_tokens",
    formats=("draft_tokens",),
    traits={"nodes": int, "tree": bool},
    outs=("out", "path_out", "counts_out"),
    exact=True,
    varying=("batch",),
)
def verify_draft_tokens(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    parents: Tensor | None = None,
    out: Tensor | None = None,
    path_out: Tensor | None = None,
    counts_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts the path of each draft tree that matches the target model's tokens.

    A walk starts at the root. At each node, the target's token is emitted. If a child of the node holds that token, the walk
    continues at the first such child. Otherwise the walk ends. So a sequence emits one token plus one for every accepted draft
    token.

    With the `argmax` of every node's logits, the operator performs greedy verification, and emits the same tokens as decoding one
    by one. With tokens of `sample_top_k_top_p`, drawn with separate random numbers for each node, the operator performs speculative
    sampling. The drafts must be deterministic, such as the most probable tokens, n-grams, or a tree of both. The emitted tokens
    then follow the target's distribution exactly, and no scheme accepts more deterministic drafts. Drafts that were drawn from a
    distribution are better verified by `verify_draft_probs`.

    Nodes form a tree. Node 0 is the root, which holds the last known token. Node i continues node ``parents[i] < i``. A node is
    absent if its parent is outside 0 to i - 1, for example -1, or if its draft token is negative.

    Args:
        target_tokens: draft_tokens' dtype ``[batch, nodes]``, the target's token after each node. May be strided.
        draft_tokens: int32 or int64 ``[batch, nodes]``, the token of each node; the token of node 0 is ignored. May be strided.
        parents: int32 ``[batch, nodes]``; None means a chain, in which each node continues the preceding one.
        out: receives the tokens.
        path_out: receives the path.
        counts_out: receives the counts.

    Returns:
        tokens: draft_tokens' dtype ``[batch, nodes]``: the emitted tokens, padded with -1.
        path: int32 ``[batch, nodes]``: the nodes after which the tokens are emitted, 0 first, padded with -1; an input of
            `compact_kv_cache`.
        counts: int32 ``[batch]``: the number of emitted tokens, at least 1.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        The root has children 1 and 2, and node 2 has child 3. The target emits 8 after the root, 9 after node 2, and 4 after node
        3. Node 2 holds token 8, and node 3 holds token 9.

        >>> import torch
        >>> from tokenspeed_kernel import verify_draft_tokens
        >>> target_tokens = torch.tensor([[8, 0, 9, 4]])
        >>> draft_tokens = torch.tensor([[5, 7, 8, 9]])
        >>> parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32)
        >>> tokens, path, counts = verify_draft_tokens(target_tokens, draft_tokens, parents)
        >>> tokens, path, counts
        (tensor([[ 8,  9,  4, -1]]), tensor([[ 0,  2,  3, -1]], dtype=torch.int32), tensor([3], dtype=torch.int32))

    Safe in CUDA graphs. Results are exactly the same with every backend.
    """
    batch, nodes = draft_tokens.shape
    tree = chain(batch, nodes, draft_tokens.device) if parents is None else parents
    at = torch.arange(nodes, device=draft_tokens.device)
    node = torch.zeros(batch, 1, dtype=torch.int64, device=draft_tokens.device)
    alive = torch.ones(batch, 1, dtype=torch.bool, device=draft_tokens.device)
    tokens, path = torch.full_like(draft_tokens, -1).contiguous(), torch.full_like(tree, -1).contiguous()
    for step in range(nodes):
        emitted = target_tokens.gather(1, node)
        tokens[:, step : step + 1] = torch.where(alive, emitted, -1)
        path[:, step : step + 1] = torch.where(alive, node, -1)
        continued = (tree == node) & (at > node) & (draft_tokens == emitted) & (draft_tokens >= 0)
        alive = alive & continued.any(1, keepdim=True)
        node = continued.int().argmax(1, keepdim=True)
    return tokens, path, (path >= 0).sum(1).int()


@verify_draft_tokens.traits
def _(draft_tokens: Tensor, parents: Tensor | None) -> dict[str, object]:
    return {"nodes": draft_tokens.shape[1], "tree": parents is not None}


@verify_draft_tokens.check
def _(check: Checker, target_tokens: Tensor, draft_tokens: Tensor, parents: Tensor | None) -> None:
    check_drafts(check, draft_tokens, parents)
    check.tensor("target_tokens", target_tokens, "batch nodes", draft_tokens.dtype)


verify_draft_tokens.fake(made_paths)


@recipe
def _inputs(
    batch: int, nodes: int, vocab: int = 3, tree: bool = True, dtype: torch.dtype = torch.int64
) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments with a small vocabulary, so that many drafts are right: about three quarters in a chain."""

    def make(draw: Draw) -> dict[str, Any]:
        target = draw.integers(0, vocab, batch, nodes, dtype=dtype)
        drafts = draw.integers(0, vocab, batch, nodes, dtype=dtype)
        if tree:
            return {"target_tokens": target, "draft_tokens": drafts, "parents": draw_parents(draw, batch, nodes)}
        drafts[:, 1:] = torch.where(draw.uniform(batch, nodes - 1) < 0.6, target[:, :-1], drafts[:, 1:])
        return {"target_tokens": target, "draft_tokens": drafts}

    return make


def _odd_values(draw: Draw) -> dict[str, Any]:
    arguments = _inputs(12, 9)(draw)
    parents = draw.integers(-3, 12, 12, 9).int()  # many nodes continue themselves or later nodes, so they are absent
    tokens = draw.integers(-2, 2, 12, 9)
    return {**arguments, "parents": parents, "draft_tokens": tokens, "target_tokens": draw.integers(-2, 2, 12, 9)}


@verify_draft_tokens.cases
def _() -> list[Case]:
    return [
        Case("one node", _inputs(2, 1, tree=False)),
        Case("deepseek-v3, one draft, 33 sequences", _inputs(33, 2, tree=False)),
        Case("gpt-oss-120b, a chain of 5, int32", _inputs(16, 6, tree=False, dtype=torch.int32)),
        Case("a tree of 8 nodes", _inputs(16, 8)),
        Case("llama-3, a tree of 60 nodes, two words", _inputs(5, 60, vocab=2)),
        Case("nodes that are not there", _odd_values),
        Case("no sequences", _inputs(0, 4)),
        Case("deepseek-v3, one draft, 256 sequences", _inputs(256, 2, tree=False), large=True),
        Case("gpt-oss-120b, a chain of 5, 64 sequences", _inputs(64, 6, tree=False, dtype=torch.int32), large=True),
        Case("llama-3, a tree of 64 nodes, 64 sequences", _inputs(64, 64, vocab=2), large=True),
    ]


@verify_draft_tokens.vary
def _(variation: Variation, draft_tokens: Tensor, parents: Tensor | None) -> dict[str, Tensor]:
    if variation.want is Want.UNUSED:
        return absent_nodes(draft_tokens, parents)
    batch, nodes = draft_tokens.shape
    return _inputs(batch, nodes, tree=parents is not None, dtype=draft_tokens.dtype)(variation.draw)


@verify_draft_tokens.cost
def _(target_tokens: Tensor, draft_tokens: Tensor, parents: Tensor | None) -> Cost:
    written = nbytes(draft_tokens) + 4 * (draft_tokens.numel() + len(draft_tokens))
    return Cost(flops=1.0 * draft_tokens.numel(), bytes=nbytes(target_tokens, draft_tokens, parents) + written)
