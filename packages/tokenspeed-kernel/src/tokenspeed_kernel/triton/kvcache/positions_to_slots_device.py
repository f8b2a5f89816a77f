"""Device code of `positions_to_slots`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slot_of(position, sequence, page_table, table_stride_b, table_stride_p, max_pages, PAGE_SIZE: tl.constexpr):
    """Returns the cache slots of positions in sequences; -1 for a position without a page."""
    held = (position >= 0) & (position // PAGE_SIZE < max_pages)
    page = tl.load(page_table + sequence * table_stride_b + position // PAGE_SIZE * table_stride_p, mask=held, other=-1)
    return tl.where(page >= 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)


# top_k is specialised: if it is a multiple of 16, Triton loads and stores four positions at once.
@triton.jit(do_not_specialize=["table_stride_b", "batch", "q_len", "max_pages"])
def positions_to_slots_kernel(
    positions,
    page_table,
    cu_seqlens_q,
    out,
    positions_stride_t,
    positions_stride_k,
    table_stride_b,
    table_stride_p,
    out_stride_t,
    out_stride_k,
    batch,
    q_len,
    max_pages,
    top_k,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Maps a block of one token's positions to slots."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Issue these loads first: they are in flight while the search below finds the token's sequence.
    position = tl.load(positions + token * positions_stride_t + k * positions_stride_k, mask=k < top_k, other=-1)
    sequence = token // q_len
    if cu_seqlens_q is not None:  # count the sequences that end at or before the token
        sequence = token * 0
        for start in range(0, batch, AT_ONCE):
            at = start + tl.arange(0, AT_ONCE)
            ends = tl.load(cu_seqlens_q + at + 1, mask=at < batch, other=0x7FFFFFFF)
            sequence += tl.sum((ends <= token).to(tl.int32))
    slot = _slot_of(position, sequence, page_table, table_stride_b, table_stride_p, max_pages, PAGE_SIZE)
    tl.store(out + token * out_stride_t + k * out_stride_k, slot, mask=k < top_k)


@triton.jit(do_not_specialize=["table_stride_b", "batch", "q_len", "max_pages", "tokens"])
def one_position_kernel(
    positions,
    page_table,
    cu_seqlens_q,
    out,
    positions_stride,
    table_stride_b,
    table_stride_p,
    out_stride,
    batch,
    q_len,
    max_pages,
    tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Maps positions to slots for a block of tokens with one position each."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + token * positions_stride, mask=token < tokens, other=-1)
    sequence = token // q_len
    if cu_seqlens_q is not None:  # count the sequences that end at or before the token
        sequence = token * 0
        for start in range(0, batch, AT_ONCE):
            at = start + tl.arange(0, AT_ONCE)
            ends = tl.load(cu_seqlens_q + at + 1, mask=at < batch, other=0x7FFFFFFF)
            sequence += tl.sum((ends[:, None] <= token[None, :]).to(tl.int32), axis=0)
    slot = _slot_of(position, sequence, page_table, table_stride_b, table_stride_p, max_pages, PAGE_SIZE)
    tl.store(out + token * out_stride, slot, mask=token < tokens)
