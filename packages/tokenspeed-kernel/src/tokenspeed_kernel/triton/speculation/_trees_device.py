"""Trees of draft tokens: device code for all kernels of speculative decoding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_parents(parents, sequence, stride_b, stride_n, nodes, NODES: tl.constexpr):
    """Loads each node's parent, int32 [NODES], which has a smaller index than the node; -1 for the root, invalid parents and
    padding.

    parents: a pointer, or None if the draft is a chain.
    """
    at = tl.arange(0, NODES)
    if parents is None:
        parent = at - 1
    else:
        parent = tl.load(parents + sequence * stride_b + at * stride_n, mask=at < nodes, other=-1)
    return tl.where((at > 0) & (at < nodes) & (parent >= 0) & (parent < at), parent, -1)
