"""Device code of `verify_draft_tokens`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.speculation._trees_device import load_parents


@triton.jit
def verify_draft_tokens_kernel(
    target_tokens,
    draft_tokens,
    parents,
    tokens,
    path,
    counts,
    target_stride_b,
    target_stride_n,
    draft_stride_b,
    draft_stride_n,
    parents_stride_b,
    parents_stride_n,
    tokens_stride_b,
    tokens_stride_n,
    path_stride_b,
    path_stride_n,
    counts_stride,
    nodes,
    NODES: tl.constexpr,
):
    """Walks down the draft tree of one sequence. Each step goes to the child whose token is the target model's, until no child
    matches."""
    sequence = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, NODES)
    drafted = tl.load(draft_tokens + sequence * draft_stride_b + at * draft_stride_n, mask=at < nodes, other=-1)
    parent = load_parents(parents, sequence, parents_stride_b, parents_stride_n, nodes, NODES)
    parent = tl.where(drafted >= 0, parent, -1)
    count = 0
    node = 0
    while node < NODES:  # NODES: no child matches
        emitted = tl.load(target_tokens + sequence * target_stride_b + node * target_stride_n)
        tl.store(tokens + sequence * tokens_stride_b + count * tokens_stride_n, emitted)
        tl.store(path + sequence * path_stride_b + count * path_stride_n, node)
        count += 1
        node = tl.min(tl.where((parent == node) & (drafted == emitted), at, NODES), axis=0)
    unused = (at >= count) & (at < nodes)
    tl.store(tokens + sequence * tokens_stride_b + at * tokens_stride_n, tl.full([NODES], -1, drafted.dtype), mask=unused)
    tl.store(path + sequence * path_stride_b + at * path_stride_n, tl.full([NODES], -1, tl.int32), mask=unused)
    tl.store(counts + sequence * counts_stride, count)
