"""Device code of `merge_argmax`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import packed, sort_key, token_of


@triton.jit
def merge_argmax_kernel(
    values,
    values_part_stride,
    values_row_stride,
    tokens,
    tokens_part_stride,
    tokens_row_stride,
    out,
    out_stride,
    parts,
    rows,
    BLOCK: tl.constexpr,
):
    # Merges the results of several shards of the vocabulary for BLOCK rows: the token with the largest logit. Among equal logits,
    # the lowest token wins; NaN is above all.
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    for part in range(parts):
        part_offset = tl.cast(part, tl.int64)
        value = tl.load(values + part_offset * values_part_stride + row * values_row_stride, mask=live, other=0.0)
        token = tl.load(tokens + part_offset * tokens_part_stride + row * tokens_row_stride, mask=live, other=0)
        best = tl.maximum(best, packed(sort_key(value), token))
    tl.store(out + row * out_stride, token_of(best), mask=live)
