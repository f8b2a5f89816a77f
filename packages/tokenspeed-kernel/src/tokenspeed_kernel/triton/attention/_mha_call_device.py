"""Device code of `_mha_call`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._fp8_device import widened


@triton.jit
def sequence_of(slot, cu_seqlens, batch, GROUP: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sequence that owns a slot of ROWS rows."""
    count = 0
    for start in range(0, batch, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        begins = tl.load(cu_seqlens + at, mask=at < batch, other=0)
        count += tl.sum(((begins * GROUP // ROWS + at <= slot) & (at < batch)).to(tl.int32))
    return count - 1


@triton.jit
def columns_of(rows, columns, stride, WIDTH: tl.constexpr, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Columns of the rows that begin at pointers ``rows``, in the dtype of the products; those from WIDTH on are 0."""
    if WIDTH is None:
        x = tl.load(rows[:, None] + columns[None, :] * stride)
    else:
        x = tl.load(rows[:, None] + columns[None, :] * stride, mask=(columns < WIDTH)[None, :], other=0.0)
    return widened(x, DTYPE, FP8)
