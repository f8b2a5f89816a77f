"""Tests draft trees: building them from candidates, masked attention of each node, and all steps of speculation in sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.attention.mha_prefill import mha_prefill
from tokenspeed_kernel_base.ops.attention.mha_with_kvcache import mha_with_kvcache
from tokenspeed_kernel_base.ops.attention.mla_decode_with_kvcache import mla_decode_with_kvcache
from tokenspeed_kernel_base.ops.kvcache.compact_kv_cache import compact_kv_cache
from tokenspeed_kernel_base.ops.kvcache.store_kv_cache import store_kv_cache
from tokenspeed_kernel_base.ops.speculation.build_draft_tree import build_draft_tree
from tokenspeed_kernel_base.ops.speculation.trees import draw_parents, tree_masks
from tokenspeed_kernel_base.ops.speculation.verify_draft_tokens import verify_draft_tokens


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def path_to(parents: list[int], node: int) -> list[int]:
    """Returns the nodes on the path from the root to a node. If a node on the way up is absent, the path starts there."""
    path = [node]
    while node > 0 and 0 <= parents[node] < node:
        node = parents[node]
        path.insert(0, node)
    return path


@given(st.integers(1, 64), st.integers(0, 999))
def test_masks_are_paths(nodes: int, seed: int) -> None:
    parents = draw_parents(Draw(seed=seed), 4, nodes)
    for row, masks in zip(parents.tolist(), tree_masks(parents).tolist(), strict=True):
        for node, mask in enumerate(masks):
            assert mask & (2**64 - 1) == sum(1 << step for step in path_to(row, node))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 30), st.integers(1, 12))
def test_the_most_probable_candidates_stay(data: st.DataObject, candidates: int, nodes: int) -> None:
    parents = [data.draw(st.integers(-1, at - 1)) for at in range(candidates)]
    steps = [data.draw(st.sampled_from([0.0, -0.25, -1.0, -math.inf])) for _ in range(candidates)]
    scores: list[float] = []
    for parent, step in zip(parents, steps, strict=True):
        scores.append((scores[parent] if parent >= 0 else 0.0) + step)
    order = sorted((at for at in range(candidates) if scores[at] > -math.inf), key=lambda at: (-scores[at], at))
    kept = sorted(order[: nodes - 1])
    arguments = (torch.arange(100, 100 + candidates).view(1, -1), torch.tensor([scores]), ints(*parents).view(1, -1))
    tokens, tree, masks, depths = build_draft_tree(*arguments, torch.tensor([7]), nodes)
    missing = nodes - 1 - len(kept)
    assert tokens[0].tolist() == [7, *(100 + at for at in kept), *[7] * missing]
    wanted = [-1, *(0 if parents[at] < 0 else 1 + kept.index(parents[at]) for at in kept), *[-1] * missing]
    assert tree[0].tolist() == wanted, "every parent of one that stays has stayed"
    assert torch.equal(masks, tree_masks(tree))
    assert depths[0].tolist() == [len(path_to(wanted, node)) - 1 for node in range(nodes)]


class Tree:
    """A sequence of ``before`` tokens, followed by a draft tree. Each node of the tree has its own key and value."""

    def __init__(self, before: int, parents: list[int], seed: int = 0, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.before, self.parents, self.nodes = before, parents, len(parents)
        count = before + self.nodes
        self.q = torch.randn(self.nodes, heads, dim, generator=generator)
        self.k, self.v = torch.randn(2, count, kv_heads, dim, generator=generator)
        self.mask = tree_masks(ints(*parents).view(1, -1))[0]

    def wanted(self, node: int, **options: Any) -> Tensor:
        """Computes the expected result of a node's query, which attends to the tokens before the tree and to the node's path."""
        seen = [*range(self.before), *(self.before + step for step in path_to(self.parents, node))]
        q = torch.zeros(len(seen), *self.q.shape[1:])
        q[-1] = self.q[node]
        return torch.as_tensor(mha_prefill(q, self.k[seen], self.v[seen], ints(0, len(seen)), **options))[-1]

    def cached(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        pages = -(-len(self.k) // page_size)
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()
        caches = torch.full((2, pages, page_size, *self.k.shape[1:]), math.nan)
        position = torch.arange(len(self.k))
        slots = table[position // page_size] * page_size + position % page_size
        store_kv_cache(self.k, self.v, caches[0], caches[1], slots)
        return caches[0], caches[1], table.unsqueeze(0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 90), st.integers(1, 64), st.integers(1, 20), st.booleans(), st.integers(0, 99))
def test_a_node_sees_its_path_and_nothing_else(before: int, nodes: int, page_size: int, window: bool, seed: int) -> None:
    tree = Tree(before, draw_parents(Draw(seed=seed), 2, nodes)[1].tolist(), seed)
    k_cache, v_cache, table = tree.cached(page_size)
    options: dict[str, Any] = {"window_left": 63} if window else {}
    lengths = ints(before + nodes)
    rest = (nodes, table.shape[1] * page_size)
    got = mha_with_kvcache(tree.q, ints(0, nodes), k_cache, v_cache, table, lengths, *rest, **options, tree_mask=tree.mask)
    wanted = torch.stack([tree.wanted(node, **options) for node in range(nodes)])
    torch.testing.assert_close(torch.as_tensor(got), wanted)
    causal = mha_with_kvcache(tree.q, ints(0, nodes), k_cache, v_cache, table, lengths, *rest, **options)
    masked = mha_with_kvcache(
        tree.q, ints(0, nodes), k_cache, v_cache, table, lengths, *rest, **options, tree_mask=torch.zeros_like(tree.mask)
    )
    torch.testing.assert_close(torch.as_tensor(masked), torch.as_tensor(causal))


def test_latent_attention_shows_the_same() -> None:
    parents = [-1, 0, 0, 1, 2, 1, 4]
    tree = Tree(9, parents, heads=4, kv_heads=1, dim=8)
    k_cache, _, table = tree.cached(4)
    tree.v = tree.k[..., :6]
    room = table.shape[1] * 4
    out = mla_decode_with_kvcache(tree.q, k_cache.squeeze(2), table, ints(16), room, 6, 8**-0.5, 7, tree_mask=tree.mask)
    torch.testing.assert_close(torch.as_tensor(out), torch.stack([tree.wanted(node) for node in range(7)]))


def test_from_candidates_to_a_cache_without_gaps() -> None:
    """Runs one step of speculation: build, attend, verify, compact. The next token must then see the same tokens as without
    drafts."""
    tokens, scores = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[-0.1, -0.2, -9.0, -0.3, -0.4, -0.5]])
    drafts, parents, masks, _ = build_draft_tree(tokens, scores, ints(-1, -1, -1, 0, 1, 4).view(1, -1), torch.tensor([0]), 6)
    assert drafts.tolist() == [[0, 1, 2, 4, 5, 6]]
    assert parents.tolist() == [[-1, 0, 0, 1, 2, 4]]
    tree = Tree(5, parents[0].tolist())
    assert torch.equal(tree.mask, masks[0])
    k_cache, v_cache, table = tree.cached(4)
    target = torch.tensor([[2, 0, 5, 0, 9, 0]])  # the target emits 2 after the root, then 5, then 9, which is no draft token
    emitted, path, counts = verify_draft_tokens(target, drafts, parents)
    assert emitted.tolist() == [[2, 5, 9, -1, -1, -1]]
    compact_kv_cache(k_cache, v_cache, table, ints(11), path, counts)
    seen = [*range(5), *(5 + node for node in path[0, : int(counts)].tolist())]
    q = torch.randn(1, 4, 8)
    got = mha_with_kvcache(q, ints(0, 1), k_cache, v_cache, table, ints(5 + int(counts)), 1, 12)
    last = torch.cat((torch.zeros(len(seen) - 1, 4, 8), q))
    wanted = mha_prefill(last, tree.k[seen], tree.v[seen], ints(0, len(seen)))
    torch.testing.assert_close(torch.as_tensor(got)[0], torch.as_tensor(wanted)[-1])


def test_wrong_masks_and_trees_are_refused() -> None:
    tree = Tree(5, [-1, 0, 0])
    k_cache, v_cache, table = tree.cached(4)
    call = (tree.q, ints(0, 3), k_cache, v_cache, table, ints(8), 3, 8)
    with pytest.raises(TypeError, match=r"^mha_with_kvcache: tree_mask .* int64, got int32"):
        mha_with_kvcache(*call, tree_mask=tree.mask.int())
    with pytest.raises(ValueError, match=r"^mha_with_kvcache: tree_mask .* tokens is 3 in q"):
        mha_with_kvcache(*call, tree_mask=tree.mask[:2])
    with pytest.raises(ValueError, match=r"^mha_with_kvcache: window_left .* -1 or .* 63"):
        mha_with_kvcache(*call, tree_mask=tree.mask, window_left=62)
    arguments = (torch.tensor([[1]]), torch.tensor([[-1.0]]), ints(-1).view(1, 1), torch.tensor([0]))
    for nodes in (0, 65):
        with pytest.raises(ValueError, match=rf"^build_draft_tree: nodes must be 1 to 64, got {nodes}"):
            build_draft_tree(*arguments, nodes)
    with pytest.raises(TypeError, match=r"^build_draft_tree: root_tokens .*64, got int32"):
        build_draft_tree(*arguments[:3], ints(0), 2)


def test_it_is_a_proper_custom_operator(check_custom_op: Callable[[Any, dict[str, Any]], None]) -> None:
    arguments = {"tokens": torch.tensor([[1, 2]]), "scores": torch.tensor([[-1.0, -2.0]]), "parents": ints(-1, 0).view(1, 2)}
    check_custom_op(build_draft_tree, {**arguments, "root_tokens": torch.tensor([0]), "nodes": 3})
