"""Device code of `expand_page_table`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand_page_table_kernel(
    page_table, out, table_stride_b, table_stride_p, out_stride_b, out_stride_p, entries, FACTOR: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes a block of one sequence's entries of the expanded page table."""
    blocks = tl.cdiv(entries, BLOCK)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    page = tl.load(page_table + sequence * table_stride_b + at // FACTOR * table_stride_p, mask=inside, other=-1)
    small = tl.where(page >= 0, page * FACTOR + (at % FACTOR).to(tl.int32), -1)
    tl.store(out + sequence * out_stride_b + at * out_stride_p, small, mask=inside)
