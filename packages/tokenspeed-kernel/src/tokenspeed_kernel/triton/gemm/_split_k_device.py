"""Device code of `_split_k`: the second launch of a GEMM with split-K."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.gemm._split_k import COLUMNS, ROWS
from tokenspeed_kernel.triton.gemm._tiles_device import Output, store_tile

_ROWS, _COLUMNS = tl.constexpr(ROWS), tl.constexpr(COLUMNS)


@triton.jit
def sum_splits_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    elements: tl.int64,
    stride_batch,
    stride_m,
    stride_n,
    SPLITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Adds the float32 partial sums ``[SPLITS, batch, M, N]`` of one tile in the order of splits, and runs the epilogue: bias,
    # rounding, store. ``elements``: number of elements of one split, ``batch * M * N``.
    start(EARLY)
    down, across = tl.cdiv(M, _ROWS), tl.cdiv(N, _COLUMNS)
    batch, index = (tl.program_id(0) // (down * across)).to(tl.int64), tl.program_id(0) % (down * across)
    m = (index // across * _ROWS + tl.arange(0, _ROWS))[:, None]
    n = (index % across * _COLUMNS + tl.arange(0, _COLUMNS))[None, :]
    inside = (m < M) & (n < N)
    at = (batch * M + m) * N + n
    acc = tl.zeros([_ROWS, _COLUMNS], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + split * elements + at, mask=inside, other=0.0)
    store_tile(acc, Output(out_ptr + batch * stride_batch, stride_m, stride_n, bias_ptr), m, n, M, N, INTERPRETED)
