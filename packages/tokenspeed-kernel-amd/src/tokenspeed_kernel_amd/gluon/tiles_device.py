"""Tiles of query rows of one sequence.

A row is one query head of one new token. All rows of a tile use the same KV head, so that each key is loaded once for all of them.
Row ``r`` is new token number ``r // gqa_ratio`` of the sequence, and query head number ``r % gqa_ratio`` of the KV head's group.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

from tokenspeed_kernel_amd.gluon.mask_device import Visible
from tokenspeed_kernel_amd.gluon.softmax_device import LN_2, LOG2_E, normalise


@gluon.aggregate
class QueryTile:
    """The query rows that a workgroup computes.

    Attributes:
        first_query: the index in q of the sequence's first new token.
        q_len: number of new tokens of the sequence.
        first_row: the index of the tile's first row among the sequence's rows.
        kv_head: the KV head.
        gqa_ratio: query heads per KV head.
        m: rows of the tile. Rows of tokens at or after ``q_len`` are padding.
    """

    first_query: gl.tensor
    q_len: gl.tensor
    first_row: gl.tensor
    kv_head: gl.tensor
    gqa_ratio: gl.constexpr
    m: gl.constexpr


@gluon.jit
def new_tokens(cu_seqlens_q, sequence, q_len):
    """Returns the index in q of a sequence's first new token, and the sequence's number of new tokens. If cu_seqlens_q is None,
    every sequence has q_len new tokens.
    """
    first = sequence * q_len
    new = q_len
    if cu_seqlens_q is not None:
        first = gl.load(cu_seqlens_q + sequence)
        new = gl.load(cu_seqlens_q + sequence + 1) - first
    return first, new


@gluon.jit
def rows_of(tile, layout: gl.constexpr):
    """Returns the indices of the tile's rows among the sequence's rows, int32 [m], along the first axis of ``layout``."""
    return tile.first_row + gl.arange(0, tile.m, gl.SliceLayout(1, layout))


@gluon.jit
def visible_positions(tile, length, window_left: gl.constexpr, ends_differ: gl.constexpr, layout: gl.constexpr):
    """Returns the key positions that each row of a tile sees. The sequence has ``length`` tokens, the new tokens included."""
    end = length - tile.q_len + rows_of(tile, layout) // tile.gqa_ratio + 1
    all_end = length - tile.q_len + 1 + tile.first_row // tile.gqa_ratio
    return Visible(end - 1 - window_left, end, all_end, ends_differ, window_left >= 0)


@gluon.jit
def load_queries(q, tile, strides, head_dim: gl.constexpr, layout: gl.constexpr):
    """Loads the tile's rows of q, [m, head_dim]. Padding rows load the last valid row instead, so the load needs no mask, and no
    instruction waits for q before the first MFMA."""
    row = gl.minimum(rows_of(tile, layout), tile.q_len * tile.gqa_ratio - 1)
    at = gl.arange(0, head_dim, gl.SliceLayout(0, layout))
    first_token = tile.first_row // tile.gqa_ratio  # buffer offsets have 32 bits, so they are relative to the tile
    q += (tile.first_query + first_token).to(gl.int64) * strides.q_token + tile.kv_head * tile.gqa_ratio * strides.q_head
    offsets = (row // tile.gqa_ratio - first_token) * strides.q_token + row % tile.gqa_ratio * strides.q_head
    return cdna3.buffer_load(q, offsets[:, None] + at[None, :])


@gluon.jit
def store_rows(out, rows, tile, first, token_stride, head_stride):
    """Writes a tile's rows, [m] or [m, v_head_dim], to a tensor [tokens, query heads] or [tokens, query heads, v_head_dim].

    Args:
        out: pointer to the tensor.
        rows: the rows to write.
        tile: the rows' `QueryTile`.
        first: the index along the tensor's first axis of the sequence's first new token.
        token_stride, head_stride: the tensor's strides, in elements.
    """
    row_layout: gl.constexpr = rows.type.layout if len(rows.shape) == 1 else gl.SliceLayout(1, rows.type.layout)
    row = tile.first_row + gl.arange(0, tile.m, row_layout)
    inside = row < tile.q_len * tile.gqa_ratio
    first_token = tile.first_row // tile.gqa_ratio  # buffer offsets have 32 bits, so they are relative to the tile
    offsets = (row // tile.gqa_ratio - first_token) * token_stride + row % tile.gqa_ratio * head_stride
    out += gl.to_tensor(first + first_token).to(gl.int64) * token_stride + tile.kv_head * tile.gqa_ratio * head_stride
    if len(rows.shape) == 1:
        cdna3.buffer_store(rows, out, offsets, mask=inside)
    else:
        at = gl.arange(0, rows.shape[1], gl.SliceLayout(0, rows.type.layout))
        cdna3.buffer_store(rows.to(out.dtype.element_ty), out, offsets[:, None] + at[None, :], mask=inside[:, None])


@gluon.jit
def scaled(x, scale, kv_head, head_stride):
    """Returns x times the K or V scale of one KV head; x itself if ``scale`` is None."""
    if scale is not None:
        x *= gl.load(scale + kv_head * head_stride)
    return x


@gluon.jit
def store_output(operands, shape, strides, variant, tile, state):
    """Normalises a tile's rows, sinks included, and writes the output and the LSE."""
    heads: gl.constexpr = shape.kv_heads * shape.gqa_ratio
    sink = None
    if variant.sinks:
        head = tile.kv_head * shape.gqa_ratio + rows_of(tile, state.acc.type.layout) % shape.gqa_ratio
        sink = gl.load(operands.sinks + head).to(gl.float32) * LOG2_E
    result, log_sum = normalise(state, sink)
    store_rows(operands.out, result, tile, tile.first_query, strides.out_token, strides.out_head)
    if variant.lse:
        store_rows(operands.lse, log_sum * LN_2, tile, tile.first_query, heads, 1)
