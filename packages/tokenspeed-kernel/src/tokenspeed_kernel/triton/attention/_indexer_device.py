"""Device code of `_indexer`: the scores by which sparse attention chooses its keys.

The score of a key for a token is ``sum over heads h of weights[h] * relu(q[h] . k)``, times the key's scale if it has one. All
heads share the key.

Grid: one axis of (slot, part of the keys), the part varying fastest. A slot has TOKENS tokens of one sequence. The MMA computes
[BLOCK_N keys, TOKENS * HEADS], with keys as the first operand, so that one block of keys serves all heads of all tokens of the
slot. Key blocks that no token of the slot sees are not loaded; their scores are stored as -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.attention._fp8_device import widened
from tokenspeed_kernel.triton.common_device import sequence_of
from tokenspeed_kernel.triton.views_device import Rows, row_of


@triton.jit
def _tokens_of(slot, cu_seqlens_q, batch, q_len, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Finds the tokens of work item ``slot``, which has TOKENS tokens of one sequence.

    Returns ``(sequence, first_token, q_len, start)``: the sequence, the row of its first new token in q, the number of its new
    tokens, and the work item's first token, relative to the sequence's first new token.
    """
    if cu_seqlens_q is None:
        tiles = (q_len + TOKENS - 1) // TOKENS
        sequence = slot // tiles
        first_token = sequence.to(tl.int64) * q_len
        start = slot % tiles * TOKENS
    else:
        sequence = sequence_of(slot, cu_seqlens_q, batch, 1, TOKENS, AT_ONCE)
        begin = tl.load(cu_seqlens_q + sequence)
        q_len = tl.load(cu_seqlens_q + sequence + 1) - begin
        first_token = begin.to(tl.int64)
        start = (slot - (begin // TOKENS + sequence)) * TOKENS
    return sequence, first_token, q_len, start


@triton.jit
def _load_queries(q_rows, token, head, real, c, SHAPE: tl.constexpr, FORMATS: tl.constexpr):
    """Loads the queries of the given tokens and heads, transposed, in the MMA operands' dtype."""
    DTYPE: tl.constexpr = FORMATS.dtype
    Q_FP8: tl.constexpr = FORMATS.q_fp8
    at = row_of(q_rows, token, head)[:, None] + c[None, :] * q_rows.dim_stride
    queries = tl.load(at, mask=real[:, None] & (c < SHAPE.head_dim)[None, :], other=0.0)
    return tl.trans(widened(queries, DTYPE, Q_FP8))


@triton.jit
def _keys_of(seqlens_k, sequence, most, PAGE_SIZE: tl.constexpr):
    """Returns ``(first_key, length)`` of a sequence: the row of its first key, and its number of keys, at most ``most``.

    With a paged cache, ``first_key`` has no meaning and is not read.
    """
    length = tl.load(seqlens_k + sequence)
    first_key = length.to(tl.int64)
    if PAGE_SIZE == 0:
        length = tl.load(seqlens_k + sequence + 1) - length
    return first_key, tl.minimum(tl.maximum(length, 0), most)


@triton.jit
def _place_of(block, key, stored, first_key, pages, page_stride, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns ``(page, offset)``: the page of each key of a block, and the key's slot in that page.

    For contiguous keys, ``page`` is ``first_key``, and ``offset`` is relative to it.
    """
    if PAGE_SIZE == 0:
        page = first_key
        offset = key.to(tl.int64)
    elif PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(pages + block // (PAGE_SIZE // BLOCK_N) * page_stride).to(tl.int64)
        offset = block % (PAGE_SIZE // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        page = tl.load(pages + key // PAGE_SIZE * page_stride, mask=stored, other=0).to(tl.int64)
        offset = key % PAGE_SIZE
    return page, offset


@triton.jit
def _scores_of(keys, queries, weights, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Returns the indexer's scores of a block of keys, ``[BLOCK_N, TOKENS]``: ``relu(q·k)``, weighted and summed over the heads."""
    dots = tl.dot(keys, queries, input_precision="ieee")
    weighted = tl.maximum(dots, 0.0) * weights[None, :]
    return tl.sum(tl.reshape(weighted, [BLOCK_N, TOKENS, HEADS]), 2)


@triton.jit
def _hide(to_token, key_stride, real, begin, end, keys, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores -inf as the scores of the blocks of keys from ``begin`` to ``end`` (exclusive), which no token of this program
    sees.
    """
    for block in range(begin, end):
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        to = to_token[:, None] + key.to(tl.int64)[None, :] * key_stride
        hidden = tl.full([TOKENS, BLOCK_N], -float("inf"), tl.float32)
        tl.store(to, hidden, mask=real[:, None] & (key < keys)[None, :])


@triton.jit(do_not_specialize=["batch", "q_len", "keys"])
def indexer_scores_kernel(
    q,  # [tokens, heads, head_dim]
    k_cache,  # [pages, page_size, head_dim], or [keys, head_dim]
    weights,  # [tokens, heads]
    page_table,  # [batch, max_pages]
    seqlens_k,  # paged: keys of each sequence; else cumulative lengths
    cu_seqlens_q,  # None if every sequence has q_len new tokens
    k_scale_cache,  # [pages, page_size], or [keys], or None
    scores,  # [tokens, keys]
    lengths,  # [tokens]
    q_stride_t, q_stride_h, q_stride_d,
    k_stride_p, k_stride_s, k_stride_d,
    weights_stride_t, weights_stride_h,
    table_stride_b, table_stride_p,
    scale_stride_p, scale_stride_s,
    scores_stride_t, scores_stride_k,
    lengths_stride,
    batch, q_len, keys,
    SHAPE: tl.constexpr, FORMATS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scores TILE.tokens tokens of a sequence against TILE.blocks blocks of the sequence's keys."""
    TOKENS: tl.constexpr = TILE.tokens
    HEADS: tl.constexpr = TILE.heads
    BLOCK_N: tl.constexpr = TILE.block_n
    PAGE_SIZE: tl.constexpr = SHAPE.page_size
    DTYPE: tl.constexpr = FORMATS.dtype
    K_FP8: tl.constexpr = FORMATS.kv_fp8
    parts = tl.maximum((keys + BLOCK_N * TILE.blocks - 1) // (BLOCK_N * TILE.blocks), 1)
    part = tl.program_id(0) % parts
    slot = tl.program_id(0) // parts
    sequence, first_token, q_len, start = _tokens_of(slot, cu_seqlens_q, batch, q_len, TOKENS, TILE.at_once)
    if cu_seqlens_q is not None:  # noqa: SIM102 (this is known at compile time)
        if start >= q_len:
            return
    first_key, length = _keys_of(seqlens_k, sequence, keys, PAGE_SIZE)
    tokens = start + tl.arange(0, TOKENS)
    seen = tl.maximum(length - q_len + tokens + 1, 0)
    at_token = first_token + tokens
    if part == 0:
        tl.store(lengths + at_token * lengths_stride, seen, mask=tokens < q_len)
    most = tl.maximum(length - q_len + tl.minimum(start + TOKENS, q_len), 0)  # number of keys that the last of these tokens sees

    n = tl.arange(0, BLOCK_N)
    first = part * TILE.blocks
    last = tl.minimum(first + TILE.blocks, (keys + BLOCK_N - 1) // BLOCK_N)
    seen_blocks = tl.minimum(last, (most + BLOCK_N - 1) // BLOCK_N)
    to_token = scores + at_token * scores_stride_t
    if first < seen_blocks:
        row = tl.arange(0, TOKENS * HEADS)
        q_token = start + row // HEADS
        real = (q_token < q_len) & (row % HEADS < SHAPE.heads)
        c = tl.arange(0, TILE.columns)
        head = (row % HEADS).to(tl.int64)
        queries = _load_queries(Rows(q, q_stride_t, q_stride_h, q_stride_d), first_token + q_token, head, real, c, SHAPE, FORMATS)
        weights_at = weights + (first_token + q_token) * weights_stride_t + head * weights_stride_h
        of_heads = tl.load(weights_at, mask=real, other=0.0)
        pages = page_table
        if PAGE_SIZE > 0:
            pages += sequence.to(tl.int64) * table_stride_b
        for block in tl.range(first, seen_blocks, num_stages=TILE.stages):
            key = block * BLOCK_N + n
            stored = key < most
            page, offset = _place_of(block, key, stored, first_key, pages, table_stride_p, PAGE_SIZE, BLOCK_N)
            k_at = k_cache + (page * k_stride_p + offset * k_stride_s)
            block_keys = tl.load(
                k_at[:, None] + c[None, :] * k_stride_d, mask=stored[:, None] & (c < SHAPE.head_dim)[None, :], other=0.0
            )
            sums = _scores_of(widened(block_keys, DTYPE, K_FP8), queries, of_heads, BLOCK_N, TOKENS, HEADS)
            if k_scale_cache is not None:
                scale_at = k_scale_cache + (page * scale_stride_p + offset * scale_stride_s)
                sums *= tl.load(scale_at, mask=stored, other=0.0)[:, None]
            visible = key[:, None] < seen[None, :]
            written = (key < keys)[:, None] & (tokens < q_len)[None, :]
            to = to_token[None, :] + key.to(tl.int64)[:, None] * scores_stride_k
            tl.store(to, tl.where(visible, sums, -float("inf")), mask=written)
    _hide(to_token, scores_stride_k, tokens < q_len, tl.maximum(first, seen_blocks), last, keys, TOKENS, BLOCK_N)
