"""Device code of `attn_merge_state`: the weighted mean of two attention outputs, with ``exp(lse - max)`` as weights."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._online_softmax_device import LN_2, LOG2_E


@triton.jit
def merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    a_stride_t,
    a_stride_h,
    a_stride_d,
    lse_a_stride_t,
    lse_a_stride_h,
    b_stride_t,
    b_stride_h,
    b_stride_d,
    lse_b_stride_t,
    lse_b_stride_h,
    out_stride_t,
    out_stride_h,
    out_stride_d,
    lse_stride_t,
    lse_stride_h,
    rows,
    heads,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Merges the partial outputs a and b of ROWS (token, head) rows.

    A program loads all its inputs before it stores, because outputs may alias an input.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    token, head = row // heads, row % heads
    column = tl.arange(0, BLOCK_W)
    held = real[:, None] & (column < WIDTH)[None, :]
    to_a = out_a + (token * a_stride_t + head * a_stride_h)[:, None] + column[None, :] * a_stride_d
    to_b = out_b + (token * b_stride_t + head * b_stride_h)[:, None] + column[None, :] * b_stride_d
    a = tl.load(lse_a + token * lse_a_stride_t + head * lse_a_stride_h, mask=real, other=0.0)
    b = tl.load(lse_b + token * lse_b_stride_t + head * lse_b_stride_h, mask=real, other=0.0)
    part_a = tl.load(to_a, mask=held, other=0.0).to(tl.float32)
    part_b = tl.load(to_b, mask=held, other=0.0).to(tl.float32)
    largest = tl.maximum(a, b)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    weight_a = tl.exp2((a - shift) * LOG2_E)
    weight_b = tl.exp2((b - shift) * LOG2_E)
    total = weight_a + weight_b
    # A partial output with weight 0 may hold any value, NaN included.
    part_a = tl.where(weight_a[:, None] == 0.0, 0.0, part_a * weight_a[:, None])
    part_b = tl.where(weight_b[:, None] == 0.0, 0.0, part_b * weight_b[:, None])
    merged = (part_a + part_b) * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.debug_barrier()  # several warps may hold one row: all must have loaded before any stores
    to = out + (token * out_stride_t + head * out_stride_h)[:, None] + column[None, :] * out_stride_d
    tl.store(to, merged.to(out.dtype.element_ty), mask=held)
    tl.store(lse + token * lse_stride_t + head * lse_stride_h, shift + tl.log2(total) * LN_2, mask=real)
