"""Device code for attention with draft trees. A node sees the tree's prefix, its own ancestors and itself.

The reference is `tree_visible` of `tokenspeed_kernel_base.ops.attention._softmax`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import bits_of


@triton.jit
def placed(masks, position, first):
    """Returns ``(position, last)`` of queries: the position, and the last key of the prefix that the query sees whole.

    Queries with a nonzero mask are tree nodes. A node's position follows from its depth. A window may hide some of the keys up to
    ``last``. ``first``: the position of the sequence's first new token.
    """
    is_node = masks != 0
    return tl.where(is_node, first + bits_of(masks) - 1, position), tl.where(is_node, first - 1, position)


@triton.jit
def continued(masks, key, first, length):
    """Returns the mask [queries, keys]: which keys are new tokens that the query, a tree node, sees.

    ``first``: the position of the sequence's first new token. ``length``: the number of the sequence's keys.
    """
    new = key - first
    there = (new >= 0) & (new < 64) & (key < length)
    bit = tl.where(there, new, 0)
    # 32-bit words take half the registers of 64-bit words.
    low, high = masks.to(tl.int32), (masks >> 32).to(tl.int32)
    word = tl.where((bit < 32)[None, :], low[:, None], high[:, None])
    return there[None, :] & (((word >> (bit & 31)[None, :]) & 1) != 0)
