"""Products with few tiles: several programs share one, each with a range of k, and a second launch adds up what they have.

The sums are added in a fixed order, so that the result does not depend on who finishes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.common import multiprocessors
from tokenspeed_kernel.triton.gemm._tiles import store_tile

# A split of less than this is mostly latency: filling the pipeline, writing partial sums and reading them back.
_SHORTEST = 512
_MOST = 8
_ROWS, _COLUMNS = tl.constexpr(4), tl.constexpr(256)


def choose_splits(tiles: int, k: int, multiple: int, device: torch.device, programs_each: int = 1) -> tuple[int, int]:
    """How many ranges to cut k into so that ``programs_each`` programs a multiprocessor find work, and how long they are."""
    wanted = min(multiprocessors(device) * programs_each // max(tiles, 1), _MOST, k // _SHORTEST)
    splits = max(wanted, 1)
    length = triton.cdiv(triton.cdiv(k, splits), multiple) * multiple
    return max(triton.cdiv(k, max(length, 1)), 1), max(length, 1)


def split_target(out: Tensor, splits: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Where the programs write, and its strides: batch, rows, columns. One batch's partial sums follow the other's."""
    if splits == 1:
        return out, (out.stride(0) if out.ndim == 3 else 0, out.stride(-2), out.stride(-1))
    m, n = out.shape[-2:]
    return out.new_empty((splits, out.numel()), dtype=torch.float32), (m * n, n, 1)


@triton.jit
def _sum_splits(
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
):
    down, across = tl.cdiv(M, _ROWS), tl.cdiv(N, _COLUMNS)
    batch, index = (tl.program_id(0) // (down * across)).to(tl.int64), tl.program_id(0) % (down * across)
    m = (index // across * _ROWS + tl.arange(0, _ROWS))[:, None]
    n = (index % across * _COLUMNS + tl.arange(0, _COLUMNS))[None, :]
    inside = (m < M) & (n < N)
    at = (batch * M + m) * N + n
    acc = tl.zeros([_ROWS, _COLUMNS], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + split * elements + at, mask=inside, other=0.0)
    store_tile(acc, out_ptr + batch * stride_batch, bias_ptr, m, n, M, N, stride_m, stride_n, INTERPRETED)


def sum_splits(partial: Tensor, bias: Tensor | None, out: Tensor, splits: int, interpreted: bool) -> None:
    """Adds up what `split_target` gave, and the bias; nothing is left to do where there is one split."""
    if splits == 1:
        return
    m, n = out.shape[-2:]
    batch = out.shape[0] if out.ndim == 3 else 1
    _sum_splits[(triton.cdiv(m, _ROWS.value) * triton.cdiv(n, _COLUMNS.value) * batch,)](
        partial,
        bias,
        out,
        m,
        n,
        out.numel(),
        out.stride(0) if out.ndim == 3 else 0,
        out.stride(-2),
        out.stride(-1),
        SPLITS=splits,
        INTERPRETED=interpreted,
        num_warps=4,
    )
