"""Speculative sampling: verifies sampled drafts and preserves the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.sampling.philox import uniform_of
from tokenspeed_kernel_base.ops.speculation.trees import absent_nodes, chain, check_drafts, draw_parents, made_paths
from tokenspeed_kernel_base.variation import Variation, Want

PROBABILITY_BITS = 40
"""Residual probabilities are rounded to multiples of 2^-40 before summation, so the order of summation does not change the sum."""

MAX_VOCAB = 1 << 22


@operator(
    "speculation",
    "verify_draft_probs",
    formats=("target_probs", "draft_tokens"),
    traits={"nodes": int, "vocab": int, "tree": bool},
    outs=("out", "path_out", "counts_out"),
    exact=True,
    varying=("batch",),
)
def verify_draft_probs(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    seed: Tensor,
    offset: Tensor,
    parents: Tensor | None = None,
    out: Tensor | None = None,
    path_out: Tensor | None = None,
    counts_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative sampling: accepts or replaces draft tokens. Emitted tokens follow the target's distribution exactly.

    This is rejection sampling as in Leviathan, Kalman & Matias, 2023, arXiv:2211.17192, and Chen et al., 2023, arXiv:2302.01318;
    trees use the multi-round form of Miao et al., 2024 (SpecInfer), arXiv:2305.09781. Consider a node with target probabilities p
    and draft probabilities q, whose children were drawn from q independently. The residual r starts as p:

    1. A child with token x is accepted with probability ``min(1, r(x) / q(x))``. If the child is accepted, x is emitted, and the
       walk continues at the child.
    2. If the child is rejected, r becomes ``max(r - q, 0)`` divided by the sum of its elements, and the next child is tried.
    3. After the last child, a token drawn from r is emitted, and the walk ends. At a node without children, this token is a sample
       of p (the bonus token).

    If drafts were selected deterministically, for example as the most probable tokens, verify them with `verify_draft_tokens` on
    samples of the target. A greedy sequence (temperature 0) has target probabilities of 1 and 0.

    Every backend draws the same tokens from the same inputs. The exact definition follows. In float64, ``r = max(a * p - b * q,
    0)``, with a = 1 and b = 0 at first. ``a * p``, ``b * q`` and the difference are each rounded, and a NaN or infinite result
    counts as 0. Before summation, each r is rounded to a multiple of 2^-40, ties to even. Child i is accepted if ``u * q(x) <
    r(x)``, where u is the random number with index i of `tokenspeed_kernel_base.ops.sampling.philox.uniform_of` (seed, offset, i).
    At a rejection 1 is added to b. Before the next child is tried, a and b are divided by the sum of r over the vocabulary. The
    last token is the first token at which the cumulative sum of r exceeds ``floor(u * S)``. Here u is the random number with index
    0, and S is the sum of r over the vocabulary. r and S are counted in multiples of 2^-40. A sum over the vocabulary can be 0;
    after a rejection, only rounding or NaN can cause this. Then a and b are reset to 1 and 0. If S is still 0, the token is 0.

    So NaN and infinity count as probability 0. A token with a NaN or infinite target probability is neither accepted nor drawn at
    that node. A token with a NaN or infinite draft probability is not accepted, and not drawn after a rejection. If all draft
    probabilities are NaN, a sample of the target is emitted. If all target probabilities are NaN, token 0 is emitted.

    Nodes form a tree. Node 0 is the root, which holds the last known token. Node i continues node ``parents[i] < i``. A node is
    absent if its parent is outside 0 to i - 1, for example -1, or if its draft token is outside the vocabulary. Children of a
    node are tried in ascending order.

    Args:
        target_probs: float32 ``[batch, nodes, vocab]``, vocab in 1 to 2^22: the target's distribution after each node, with
            temperature, top-k and top-p applied, as `top_k_top_p_probs` returns it. Rows are not negative and sum to 1. Rows of
            nodes that the walk does not reach are not read. May be strided, with vocab of stride 1.
        draft_probs: float32 ``[batch, inner, vocab]``, inner at most nodes: the distribution from which the children of each node
            were drawn. Rows of nodes without children are ignored. Nodes from inner on have no children, so a chain needs only
            ``nodes - 1`` rows. May be strided like target_probs.
        draft_tokens: int32 or int64 ``[batch, nodes]``, the token of each node; the token of node 0 is ignored. May be strided.
        seed: int64 ``[batch]``, for example one for each request. Any value is valid.
        offset: int64 ``[batch]``, selects the seed's random numbers, for example by the position of the root. Any value is valid.
            The random numbers differ from those of `sample_top_k_top_p` for the same seed and offset.
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
        The draft model proposed token 1 with probability 1, but the target never emits it.

        >>> import torch
        >>> from tokenspeed_kernel import verify_draft_probs
        >>> target_probs = torch.tensor([[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]])
        >>> draft_probs = torch.tensor([[[0.0, 1.0, 0.0]]])
        >>> draft_tokens, seed = torch.tensor([[7, 1]]), torch.tensor([42])
        >>> tokens, path, counts = verify_draft_probs(target_probs, draft_probs, draft_tokens, seed, torch.tensor([0]))
        >>> tokens, counts
        (tensor([[ 2, -1]]), tensor([1], dtype=torch.int32))

    Safe in CUDA graphs: seed and offset are tensors, so update them before a replay to get new random numbers.
    """
    (batch, nodes, vocab), inner = target_probs.shape, draft_probs.shape[1]
    device = target_probs.device
    tree = chain(batch, nodes, device) if parents is None else parents
    at = torch.arange(nodes, device=device)
    there = (tree >= 0) & (tree < at) & (tree < inner) & (draft_tokens >= 0) & (draft_tokens < vocab)
    rows = torch.arange(batch, device=device)
    tokens, path = torch.full_like(draft_tokens, -1).contiguous(), torch.full_like(tree, -1).contiguous()
    path[:, :1] = 0
    node, length = torch.zeros_like(rows), torch.ones_like(rows)  # each walk's current node, and the number of nodes it has reached
    a, b = torch.ones(batch, dtype=torch.float64, device=device), torch.zeros(batch, dtype=torch.float64, device=device)
    # Whether the last draft of the node was rejected. After a rejection, r is divided by its sum before it is compared again.
    rejected = torch.zeros_like(rows, dtype=torch.bool)

    def left() -> Tensor:
        """Returns the residual r of every sequence."""
        q = draft_probs[rows, node.clamp(max=max(inner - 1, 0))] if inner else torch.zeros_like(target_probs[:, 0])
        subtracted = b.unsqueeze(1) * torch.where(b.unsqueeze(1) > 0, q.double(), 0.0)
        r = a.unsqueeze(1) * target_probs[rows, node].double() - subtracted
        return torch.where((r > 0) & r.isfinite(), r, 0.0)

    for child in range(1, nodes):
        tried = there[:, child] & (tree[:, child] == node)
        again = tried & rejected
        total = _fixed_point(left()).sum(1).double() * 2.0**-PROBABILITY_BITS
        divisor, lost = torch.where(again & (total > 0), total, 1.0), again & (total == 0)
        a, b = torch.where(lost, 1.0, a / divisor), torch.where(lost, 0.0, b / divisor)
        token = torch.where(tried, draft_tokens[:, child], 0).long()
        q = draft_probs[rows, node.clamp(max=max(inner - 1, 0)), token].double() if inner else torch.zeros_like(a)
        accepted = tried & (uniform_of(seed, offset, child) * q < left()[rows, token])
        rejected = (tried | rejected) & ~accepted
        a, b = torch.where(accepted, 1.0, a), torch.where(accepted, 0.0, torch.where(tried, b + 1, b))
        tokens[rows, length - 1] = torch.where(accepted, draft_tokens[:, child], tokens[rows, length - 1])
        node = torch.where(accepted, child, node)
        last = length.clamp(max=nodes - 1)
        path[rows, last] = torch.where(accepted, child, path[rows, last])
        length = length + accepted.long()
    lost = _fixed_point(left()).sum(1) == 0
    a, b = torch.where(lost, 1.0, a), torch.where(lost, 0.0, b)
    totals = _fixed_point(left()).cumsum(1)
    target = (uniform_of(seed, offset, 0) * totals[:, -1].double()).long()
    drawn = (totals <= target.unsqueeze(1)).sum(1)
    tokens[rows, length - 1] = torch.where(totals[:, -1] > 0, drawn, 0).to(tokens.dtype)
    return tokens, path, length.int()


def _fixed_point(r: Tensor) -> Tensor:
    """Returns the residual probabilities r as int64 multiples of 2^-40."""
    return (r * 2.0**PROBABILITY_BITS).round().long()


@verify_draft_probs.traits
def _(target_probs: Tensor, parents: Tensor | None) -> dict[str, object]:
    return {"nodes": target_probs.shape[1], "vocab": target_probs.shape[2], "tree": parents is not None}


@verify_draft_probs.check
def _(
    check: Checker,
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    seed: Tensor,
    offset: Tensor,
    parents: Tensor | None,
) -> None:
    check_drafts(check, draft_tokens, parents)
    check.tensor("target_probs", target_probs, "batch nodes vocab", torch.float32)
    shape = str(list(target_probs.shape))
    check.require(0 < check["vocab"] <= MAX_VOCAB, "target_probs", f"of a vocab in 1 to {MAX_VOCAB}", shape)
    check.tensor("draft_probs", draft_probs, "batch inner vocab", torch.float32)
    shape = str(list(draft_probs.shape))
    check.require(check["inner"] <= check["nodes"], "draft_probs", f"of at most {check['nodes']} rows, one for each node", shape)
    check.tensor("seed", seed, "batch", torch.int64)
    check.tensor("offset", offset, "batch", torch.int64)


@verify_draft_probs.fake
def _(draft_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return made_paths(draft_tokens)


def _distributions(draw: Draw, *shape: int, warmth: float) -> Tensor:
    return torch.softmax(draw.normal(*shape, scale=1.0 / warmth), dim=-1)


@recipe
def _inputs(
    batch: int,
    nodes: int,
    vocab: int,
    tree: bool = True,
    warmth: float = 0.5,
    inner: int | None = None,
    dtype: torch.dtype = torch.int64,
    restricted: bool = False,
) -> Callable[[Draw], dict[str, Any]]:
    """Draws arguments with a draft model whose probabilities are similar to the target's. With ``restricted``, nine of ten tokens
    have a target probability of 0.
    """

    def make(draw: Draw) -> dict[str, Any]:
        target = _distributions(draw, batch, nodes, vocab, warmth=warmth)
        other = _distributions(draw, batch, nodes, vocab, warmth=warmth)
        drafts = 0.7 * target + 0.3 * other
        if restricted:
            target = torch.where(target >= target.topk(max(1, vocab // 10), dim=-1).values[..., -1:], target, 0.0)
            target = target / target.sum(-1, keepdim=True)
        parents = draw_parents(draw, batch, nodes) if tree else None
        origin = (chain(batch, nodes, draw.device) if parents is None else parents).clamp(min=0).long()
        sums = drafts.cumsum(-1).gather(1, origin.unsqueeze(-1).expand(-1, -1, vocab))
        tokens = (sums < draw.uniform(batch, nodes, 1) * sums[..., -1:]).sum(-1).clamp(max=vocab - 1)
        arguments = {
            "target_probs": target,
            "draft_probs": drafts[:, : nodes if inner is None else inner],
            "draft_tokens": tokens.to(dtype),
            "seed": draw.integers(-(2**62), 2**62, batch),
            "offset": draw.integers(0, 131072, batch),
        }
        return arguments if parents is None else {**arguments, "parents": parents}

    return make


def _equal(draw: Draw) -> dict[str, Any]:
    """Draws arguments whose draft probabilities equal the target's, so every draft is accepted."""
    arguments = _inputs(8, 5, 100, tree=False)(draw)
    return {**arguments, "draft_probs": arguments["target_probs"].clone()}


def _sure(draw: Draw) -> dict[str, Any]:
    """Draws probabilities of 1 and 0, as with temperature 0, for target and drafts. Half of the drafts are wrong."""
    arguments = _inputs(32, 6, 4)(draw)
    eye = torch.eye(4, device=draw.device)
    arguments["target_probs"] = eye[draw.integers(0, 2, 32, 6)]
    drafted = draw.integers(0, 2, 32, 6)
    arguments["draft_probs"] = eye[drafted]
    arguments["draft_tokens"] = drafted.gather(1, arguments["parents"].clamp(min=0).long())
    return arguments


def _nothing_left(draw: Draw) -> dict[str, Any]:
    """Draws draft tokens that the target cannot emit. For all other tokens, the draft model's probabilities equal the target's."""
    arguments = _inputs(16, 5, 3000)(draw)
    arguments["target_probs"][..., 7] = 0
    arguments["draft_probs"] = arguments["target_probs"].clone()
    arguments["draft_probs"][..., 7] = 1e-12
    arguments["draft_tokens"][::2] = 7
    return arguments


def _not_finite(draw: Draw) -> dict[str, Any]:
    """Draws probabilities with NaN and infinity among them, also those of drafted tokens. In some sequences, all probabilities of
    one node or of all nodes are NaN."""
    arguments = _inputs(24, 5, 50, inner=4)(draw)
    target, drafts = arguments["target_probs"], arguments["draft_probs"]
    drafted = arguments["draft_tokens"][:, 1:2]
    target[:6, 0, 3::7], drafts[:6, 0, 5::7] = torch.nan, torch.nan
    target[6:9, 0], drafts[9:12, 0] = torch.nan, torch.nan
    target[12:14, 0].scatter_(1, drafted[12:14], torch.nan)
    drafts[14:16, 0].scatter_(1, drafted[14:16], torch.nan)
    target[16:18, 0].scatter_(1, drafted[16:18], torch.inf)
    drafts[18:20, 0].scatter_(1, drafted[18:20], torch.inf)
    target[20:22], drafts[20:22] = torch.nan, torch.nan
    target[22:, :, ::2] = -torch.inf
    return arguments


@verify_draft_probs.cases
def _() -> list[Case]:
    return [
        Case("one node: a sample of the target", _inputs(7, 1, 50, tree=False)),
        Case("deepseek-v3, one draft", _inputs(33, 2, 300, tree=False, inner=1)),
        Case("a chain of 5, vocab 1001, int32", _inputs(16, 6, 1001, tree=False, inner=5, dtype=torch.int32)),
        Case("a tree of 9 nodes", _inputs(24, 9, 40, warmth=2.0)),
        Case("a tree of 30 nodes, target restricted to few tokens", _inputs(6, 30, 70, warmth=1.0, restricted=True)),
        Case("the draft model is the target", _equal),
        Case("probabilities of 1 and 0", _sure),
        Case("a rejection leaves nothing", _nothing_left),
        Case("several spans of vocabulary", _inputs(3, 4, 9001, tree=False)),
        Case("a tree, several spans of vocabulary", _inputs(4, 12, 6007, warmth=1.0)),
        Case("probabilities that are not finite", _not_finite),
        Case("no sequences", _inputs(0, 3, 10)),
        Case("deepseek-v3, one draft, 64 sequences", _inputs(64, 2, 129280, tree=False, inner=1), large=True),
        Case("gpt-oss-120b, a chain of 4, 16 sequences", _inputs(16, 5, 201088, tree=False, inner=4), large=True),
        Case("llama-3, a chain of 5, 64 sequences", _inputs(64, 6, 128256, tree=False, inner=5), large=True),
        Case("llama-3, a tree of 16 nodes, 16 sequences", _inputs(16, 16, 128256, warmth=1.0), large=True),
    ]


@verify_draft_probs.vary
def _(variation: Variation, target_probs: Tensor, draft_probs: Tensor, draft_tokens: Tensor, parents: Tensor | None) -> Any:
    batch, nodes, vocab = target_probs.shape
    if variation.want is Want.UNUSED:
        return absent_nodes(draft_tokens, parents, vocab)
    tree, inner = parents is not None, draft_probs.shape[1]
    return _inputs(batch, nodes, vocab, tree, inner=inner, dtype=draft_tokens.dtype)(variation.draw)


@verify_draft_probs.cost
def _(
    target_probs: Tensor, draft_probs: Tensor, draft_tokens: Tensor, seed: Tensor, offset: Tensor, parents: Tensor | None
) -> Cost:
    # A sequence needs at least one row of the target and, if a draft is rejected, one row of the draft model.
    batch, _, vocab = target_probs.shape
    written = nbytes(draft_tokens) + 4 * (draft_tokens.numel() + batch)
    rows = batch * vocab * (8 if draft_probs.shape[1] else 4)
    return Cost(flops=3.0 * batch * vocab, bytes=rows + nbytes(draft_tokens, seed, offset, parents) + written)
