"""Device code of `_mha_call`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._fp8_device import widened


@triton.jit
def columns_of(rows, columns, stride, WIDTH: tl.constexpr, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Loads columns of the rows that begin at pointers ``rows``, in the dtype of the dots. Columns from WIDTH on are 0."""
    if WIDTH is None:
        x = tl.load(rows[:, None] + columns[None, :] * stride)
    else:
        x = tl.load(rows[:, None] + columns[None, :] * stride, mask=(columns < WIDTH)[None, :], other=0.0)
    return widened(x, DTYPE, FP8)
