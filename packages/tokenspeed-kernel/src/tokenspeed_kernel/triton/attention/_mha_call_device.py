"""Device code of `_mha_call`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._fp8_device import widened
from tokenspeed_kernel.triton.attention._online_softmax_device import Scaling
from tokenspeed_kernel.triton.common_device import sequence_of


@triton.jit
def columns_of(rows, columns, stride, WIDTH: tl.constexpr, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Loads columns of the rows that begin at pointers ``rows``, in the MMA operands' dtype. Columns from WIDTH on are 0."""
    if WIDTH is None:
        x = tl.load(rows[:, None] + columns[None, :] * stride)
    else:
        x = tl.load(rows[:, None] + columns[None, :] * stride, mask=(columns < WIDTH)[None, :], other=0.0)
    return widened(x, DTYPE, FP8)


@triton.jit
def tile_of(slot, cu_seqlens, batch, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr):
    """Finds the tile of query rows that work item ``slot`` computes. `sequence_of` explains how work items belong to sequences.

    Returns ``(sequence, start, q_len, first_row)``: the sequence, the index of its first token, the number of its queries, and the
    tile's first row in the sequence.

    A sequence may have one work item more than it has tiles. The ``first_row`` of this work item is beyond the sequence's last row.
    """
    sequence = sequence_of(slot, cu_seqlens, batch, GROUP, BLOCK_M, AT_ONCE)
    start = tl.load(cu_seqlens + sequence)
    q_len = tl.load(cu_seqlens + sequence + 1) - start
    return sequence, start, q_len, (slot - sequence - start * GROUP // BLOCK_M) * BLOCK_M


@triton.jit
def scaling_of(multiplier, cap_log2, scales, head, SHAPE: tl.constexpr):
    """Returns the `Scaling` of a KV head's scores. Its multiplier includes the head's scales of q and k."""
    if scales.q is not None:
        multiplier *= tl.load(scales.q + head * SHAPE.q_scales)
    if scales.k is not None:
        multiplier *= tl.load(scales.k + head * SHAPE.k_scales)
    return Scaling(multiplier, cap_log2)
