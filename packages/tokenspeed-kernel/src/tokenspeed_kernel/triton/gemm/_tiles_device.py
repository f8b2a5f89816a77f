"""Device code that the Triton products share: which tile a program computes, and how sums become a tile of the result."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The row and column of a tile. ``GROUP`` rows of tiles are done column by column, so that b's tiles are found in the cache."""
    in_group = GROUP * tiles_n
    first = index // in_group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + index % in_group % size, index % in_group // size


@triton.jit
def scale_of_lines(scale_ptr, line, inside, line_stride, SCALING: tl.constexpr):
    """Scales that apply to whole sums: one a line, or one for all."""
    if SCALING == "line":
        scale = tl.load(scale_ptr + line.to(tl.int64) * line_stride, mask=inside, other=0.0)
    else:
        scale = tl.load(scale_ptr)
    return scale


@triton.jit
def store_tile(
    acc,
    out_ptr,
    bias_ptr,
    m,
    n,
    M,
    N,
    stride_m,
    stride_n,
    INTERPRETED: tl.constexpr,
):
    """Adds the bias, rounds, stores. ``m`` and ``n`` are its rows and columns, which broadcast to acc's shape."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    value = round_to(acc, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + m.to(tl.int64) * stride_m + n.to(tl.int64) * stride_n, value, mask=(m < M) & (n < N))
