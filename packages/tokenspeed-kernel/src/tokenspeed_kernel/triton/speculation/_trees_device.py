"""Device code that the kernels of speculative decoding share: trees of draft tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_parents(parents, sequence, stride_b, stride_n, nodes, NODES: tl.constexpr):
    """int32 [NODES]: the parent of each node, less than the node; -1 of those that are not there, and of the root.

    parents: a pointer, or None for a chain.
    """
    at = tl.arange(0, NODES)
    if parents is None:
        parent = at - 1
    else:
        parent = tl.load(parents + sequence * stride_b + at * stride_n, mask=at < nodes, other=-1)
    return tl.where((at > 0) & (at < nodes) & (parent >= 0) & (parent < at), parent, -1)
