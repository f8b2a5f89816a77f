"""Device code of `build_draft_tree`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import bits_of, start
from tokenspeed_kernel.triton.sampling._rows_device import at_index, largest_pairs, packed, sort_key

_NO_KEY = tl.constexpr(-0x7F800001)  # the sort key of -inf


@triton.jit
def _of(values, node, NODES: tl.constexpr):
    """Gathers ``values[node]``; 0 where ``node`` is -1. ``values`` and ``node`` are [NODES]."""
    at = tl.arange(0, NODES)
    return tl.sum(tl.where(node[:, None] == at[None, :], values[None, :], 0), axis=1)


@triton.jit
def build_draft_tree_kernel(
    tokens,
    scores,
    parents,
    root_tokens,
    draft,
    tree,
    masks,
    depths,
    scratch,  # int32 [batch, CANDIDATES + nodes]: the node of each candidate, -1 for dropped candidates; then the tree's parents
    tokens_stride_b,
    tokens_stride_c,
    scores_stride_b,
    scores_stride_c,
    parents_stride_b,
    parents_stride_c,
    root_stride,
    draft_stride_b,
    draft_stride_n,
    tree_stride_b,
    tree_stride_n,
    masks_stride_b,
    masks_stride_n,
    depths_stride_b,
    depths_stride_n,
    candidates,
    nodes,
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Builds the draft tree of one sequence: its tokens, parents, masks and depths."""
    start(EARLY)
    sequence = tl.program_id(0).to(tl.int64)
    scores += sequence * scores_stride_b
    scratch += sequence * (CANDIDATES + nodes)
    at = tl.arange(0, CANDIDATES)
    score = tl.load(scores + at * scores_stride_c, mask=at < candidates, other=float("-inf"))
    key = tl.where(score == score, sort_key(score), _NO_KEY)
    # Each pair contains the candidate's index. So all pairs differ, and the earlier of two equal scores wins.
    pair = packed(key, at)
    kept = key > _NO_KEY
    if NODES == 1:
        kept = kept & (at < 0)
    elif NODES <= CANDIDATES:  # otherwise all candidates fit in the tree
        kept = kept & (pair >= at_index(largest_pairs(pair, NODES), nodes - 2))
    node = tl.cumsum(kept.to(tl.int32), 0)
    tl.store(scratch + at, tl.where(kept, node, -1))
    step = tl.arange(0, NODES)
    inside = step < nodes
    tl.store(scratch + CANDIDATES + step, tl.full([NODES], -1, tl.int32), mask=inside)
    count = tl.sum(kept.to(tl.int32), axis=0)
    root = tl.load(root_tokens + sequence * root_stride)
    draft += sequence * draft_stride_b
    tl.store(draft + step * draft_stride_n, tl.zeros([NODES], root.dtype) + root, mask=inside & ((step == 0) | (step > count)))
    token = tl.load(tokens + sequence * tokens_stride_b + at * tokens_stride_c, mask=kept, other=0)
    tl.store(draft + node * draft_stride_n, token, mask=kept)

    tl.debug_barrier()  # other threads have written to scratch
    parent = tl.load(parents + sequence * parents_stride_b + at * parents_stride_c, mask=kept, other=-1)
    origin = tl.load(scratch + tl.maximum(parent, 0), mask=kept & (parent >= 0) & (parent < at), other=-1)
    tl.store(scratch + CANDIDATES + node, tl.where(parent < 0, 0, origin), mask=kept)
    tl.debug_barrier()

    # Pointer jumping: each round doubles the known part of the path to the root. 6 rounds suffice for 64 nodes.
    above = tl.load(scratch + CANDIDATES + step, mask=inside, other=-1)
    tl.store(tree + sequence * tree_stride_b + step * tree_stride_n, above, mask=inside)
    path = tl.full([NODES], 1, tl.int64) << step.to(tl.int64)
    for _ in tl.static_range(6):
        path |= _of(path, above, NODES)
        above = tl.where(above >= 0, _of(above, above, NODES), -1)
    tl.store(masks + sequence * masks_stride_b + step * masks_stride_n, path, mask=inside)
    tl.store(depths + sequence * depths_stride_b + step * depths_stride_n, bits_of(path) - 1, mask=inside)
