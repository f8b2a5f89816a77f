"""Device code of `apply_rope`, and the parts that fused kernels call: loads, norm, rotation and stores of tiles of heads.

A tile of heads is three tensors: the first elements of all rotary pairs, their second elements, and the unrotated rest of the head.
In the interleaved layout a pair is two adjacent elements, otherwise elements ``i`` and ``i + rotary_dim / 2``. Rotation is in
float32 and rounds once. Offsets are 64-bit, because q, k and the cache may exceed 2^31 elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.kvcache._write_device import encoded, slot_of
from tokenspeed_kernel.triton.norm.rmsnorm_device import inverse_root
from tokenspeed_kernel.triton.quantization._encode_device import round_to
from tokenspeed_kernel.triton.views_device import Cache, Heads, row_of


class Angles(NamedTuple):
    """Pointers to the tokens' positions and to the table ``[positions, rotary_dim]`` of cosines and sines, with strides.

    ``stream_stride`` is the stride from a token's time position to its height and width positions (M-RoPE).
    """

    positions: Any
    positions_stride: Any
    table: Any
    table_stride: Any
    stream_stride: Any


class Norm(NamedTuple):
    """The RMSNorm weight ``[head_dim]`` with unit stride, or None; and the epsilon added to the mean square."""

    weight: Any
    eps: Any


class Slots(NamedTuple):
    """The slot mapping: the cache slot of each token."""

    first: Any
    stride: Any


@triton.jit
def load_heads(base, inside, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Loads heads of q or k that begin at the pointers ``base``, ``[HEADS, 1]``.

    Returns the first and the second elements of all pairs, ``[HEADS, pairs]`` each, and the unrotated rest, ``[HEADS, tail]``.
    """
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    ROTARY_DIM: tl.constexpr = SHAPE.rotary_dim
    INTERLEAVED: tl.constexpr = SHAPE.interleaved
    PAIRS: tl.constexpr = TILE.pairs
    TAIL: tl.constexpr = TILE.tail
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        loaded = tl.load(base + both, mask=inside & (both < ROTARY_DIM), other=0.0)
        a, b = tl.split(tl.reshape(loaded, (loaded.shape[0], PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        there = inside & (pair < ROTARY_DIM // 2)
        a = tl.load(base + pair, mask=there, other=0.0)
        b = tl.load(base + ROTARY_DIM // 2 + pair, mask=there, other=0.0)
    if HEAD_DIM > ROTARY_DIM:
        column = ROTARY_DIM + tl.arange(0, TAIL)[None, :]
        tail = tl.load(base + column, mask=inside & (column < HEAD_DIM), other=0.0)
    else:
        tail = a  # placeholder: the whole head is rotated
    return a, b, tail


@triton.jit
def store_heads(base, dim_stride, a, b, tail, inside, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Stores heads in the layout of `load_heads`: both elements of all pairs, and the unrotated rest."""
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    ROTARY_DIM: tl.constexpr = SHAPE.rotary_dim
    INTERLEAVED: tl.constexpr = SHAPE.interleaved
    PAIRS: tl.constexpr = TILE.pairs
    TAIL: tl.constexpr = TILE.tail
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        joined = tl.reshape(tl.join(a, b), (a.shape[0], 2 * PAIRS))
        tl.store(base + both * dim_stride, joined, mask=inside & (both < ROTARY_DIM))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        there = inside & (pair < ROTARY_DIM // 2)
        tl.store(base + pair * dim_stride, a, mask=there)
        tl.store(base + (ROTARY_DIM // 2 + pair) * dim_stride, b, mask=there)
    if HEAD_DIM > ROTARY_DIM:
        column = ROTARY_DIM + tl.arange(0, TAIL)[None, :]
        tl.store(base + column * dim_stride, tail, mask=inside & (column < HEAD_DIM))


@triton.jit
def normalise(a, b, tail, norm, SHAPE: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Applies RMSNorm to heads in the layout of `load_heads`, and rounds as `qk_rmsnorm` rounds."""
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    HAS_TAIL: tl.constexpr = SHAPE.head_dim > SHAPE.rotary_dim
    one = tl.zeros((1, 1), tl.int32)
    a_scale, b_scale, tail_scale = load_heads(norm.weight + one, one == 0, SHAPE, TILE)
    wide_a, wide_b, wide_tail = a.to(tl.float32), b.to(tl.float32), tail.to(tl.float32)
    squares = tl.sum(wide_a * wide_a + wide_b * wide_b, axis=1, keep_dims=True)
    if HAS_TAIL:
        squares += tl.sum(wide_tail * wide_tail, axis=1, keep_dims=True)
    inverse = inverse_root(squares, HEAD_DIM, norm.eps)
    a = round_to(wide_a * inverse * a_scale.to(tl.float32), a.dtype, INTERPRETED)
    b = round_to(wide_b * inverse * b_scale.to(tl.float32), b.dtype, INTERPRETED)
    if HAS_TAIL:
        tail = round_to(wide_tail * inverse * tail_scale.to(tl.float32), tail.dtype, INTERPRETED)
    return a, b, tail


@triton.jit
def positions_of(angles, token, inside, SHAPE: tl.constexpr, PAIRS: tl.constexpr):
    """Loads the positions of tokens, ``[HEADS, 1]``.

    With M-RoPE (three positions per token), returns the position that applies to each rotary pair, ``[HEADS, PAIRS]``.
    """
    at = angles.positions + token * angles.positions_stride
    position = tl.load(at, mask=inside, other=0)
    if SHAPE.streams is not None:
        pair = tl.arange(0, PAIRS)[None, :]
        if SHAPE.streams.interleaved:
            of_height = (pair % 3 == 1) & (pair < SHAPE.streams.height)
            of_width = (pair % 3 == 2) & (pair < SHAPE.streams.width)
        else:
            of_height = (pair >= SHAPE.streams.height) & (pair < SHAPE.streams.width)
            of_width = pair >= SHAPE.streams.width
        height = tl.load(at + angles.stream_stride, mask=inside, other=0)
        width = tl.load(at + 2 * angles.stream_stride, mask=inside, other=0)
        position = tl.where(of_height, height, tl.where(of_width, width, position))
    return position


@triton.jit
def rotate(a, b, angles, position, inside, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Rotates the pairs (a, b) by the angles of ``position``, and rounds them to their dtype.

    ``position``: the result of `positions_of`, for each head, or for one token that owns all heads.
    """
    pair = tl.arange(0, PAIRS)[None, :]
    at = angles.table + position.to(tl.int64) * angles.table_stride + pair
    there = inside & (pair < ROTARY_DIM // 2)
    cos = tl.load(at, mask=there, other=0.0)
    sin = tl.load(at + ROTARY_DIM // 2, mask=there, other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(b.dtype)


@triton.jit
def rotate_queries(q, q_out, norm, angles, program, tokens, SHAPE: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rotates a tile of heads of q. If ``norm`` has a weight, the heads are normalised first."""
    ROTARY_DIM: tl.constexpr = SHAPE.rotary_dim
    PAIRS: tl.constexpr = TILE.pairs
    HEADS: tl.constexpr = TILE.q_heads
    row = program * HEADS + tl.arange(0, HEADS)[:, None]
    token, head = (row // SHAPE.q_heads).to(tl.int64), (row % SHAPE.q_heads).to(tl.int64)
    inside = token < tokens
    a, b, tail = load_heads(row_of(q, token, head), inside, SHAPE, TILE)
    if norm.weight is not None:
        a, b, tail = normalise(a, b, tail, norm, SHAPE, TILE, INTERPRETED)
    if SHAPE.q_heads % HEADS == 0:  # all heads of the tile belong to one token: load its angles once
        one = program * HEADS // SHAPE.q_heads + tl.zeros((1, 1), tl.int64)
        a, b = rotate(a, b, angles, positions_of(angles, one, one >= 0, SHAPE, PAIRS), one >= 0, ROTARY_DIM, PAIRS)
    else:
        a, b = rotate(a, b, angles, positions_of(angles, token, inside, SHAPE, PAIRS), inside, ROTARY_DIM, PAIRS)
    store_heads(row_of(q_out, token, head), 1, a, b, tail, inside, SHAPE, TILE)


@triton.jit
def rotate_keys(
    k,
    v,
    k_out,
    k_cache,
    v_cache,
    slots,
    k_scale,
    v_scale,
    norm,
    angles,
    program,
    tokens,
    SHAPE: tl.constexpr,
    WRITE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rotates a tile of heads of k. If ``norm`` has a weight, the heads are normalised first.

    With ``WRITE.wanted``, the rotated k and v are stored to the cache. ``k_out`` may be None.
    """
    HEADS: tl.constexpr = TILE.k_heads
    ENCODING: tl.constexpr = WRITE.encoding
    row = program * HEADS + tl.arange(0, HEADS)[:, None]
    token, head = (row // SHAPE.k_heads).to(tl.int64), (row % SHAPE.k_heads).to(tl.int64)
    inside = token < tokens
    position = positions_of(angles, token, inside, SHAPE, TILE.pairs)
    a, b, tail = load_heads(row_of(k, token, head), inside, SHAPE, TILE)
    if WRITE.wanted:  # issue all loads before the first store: the compiler cannot move a load across a store
        slot = tl.load(slots.first + token * slots.stride, mask=inside, other=-1)
        written = slot >= 0
        column = tl.arange(0, TILE.v_block)[None, :]
        values = tl.load(row_of(v, token, head) + column, mask=inside & (column < WRITE.v_head_dim), other=0.0)
    if norm.weight is not None:
        a, b, tail = normalise(a, b, tail, norm, SHAPE, TILE, INTERPRETED)
    a, b = rotate(a, b, angles, position, inside, SHAPE.rotary_dim, TILE.pairs)
    if k_out is not None:
        store_heads(row_of(k_out, token, head), 1, a, b, tail, inside, SHAPE, TILE)
    if WRITE.wanted:
        k_at = slot_of(k_cache, slot, head, WRITE.page_size)
        v_at = slot_of(v_cache, slot, head, WRITE.page_size)
        a = encoded(a, k_scale, head, ENCODING.k_scales, ENCODING)
        b = encoded(b, k_scale, head, ENCODING.k_scales, ENCODING)
        tail = encoded(tail, k_scale, head, ENCODING.k_scales, ENCODING)
        store_heads(k_at, k_cache.dim_stride, a, b, tail, written, SHAPE, TILE)
        v_at += column * v_cache.dim_stride
        values = encoded(values, v_scale, head, ENCODING.v_scales, ENCODING)
        tl.store(v_at, values, mask=written & (column < WRITE.v_head_dim))


@triton.jit(do_not_specialize=["tokens", "k_programs"])
def apply_rope_kernel(
    q,
    k,
    v,
    positions,
    table,
    q_out,
    k_out,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    tokens,
    k_programs,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    q_out_token_stride,
    q_out_head_stride,
    k_out_token_stride,
    k_out_head_stride,
    positions_stride,
    stream_stride,
    table_stride,
    slot_mapping_stride,
    k_page_stride,
    k_slot_stride,
    k_cache_head_stride,
    k_cache_dim_stride,
    v_page_stride,
    v_slot_stride,
    v_cache_head_stride,
    v_cache_dim_stride,
    SHAPE: tl.constexpr,
    WRITE: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first ``k_programs`` programs rotate k, and store k and v to the cache if requested; all others rotate q."""
    start(EARLY)
    angles = Angles(positions, positions_stride, table, table_stride, stream_stride)
    plain = Norm(None, 0.0)
    program = tl.program_id(0)
    if program < k_programs:
        rotate_keys(
            Heads(k, k_token_stride, k_head_stride),
            Heads(v, v_token_stride, v_head_stride),
            Heads(k_out, k_out_token_stride, k_out_head_stride),
            Cache(k_cache, k_page_stride, k_slot_stride, k_cache_head_stride, k_cache_dim_stride),
            Cache(v_cache, v_page_stride, v_slot_stride, v_cache_head_stride, v_cache_dim_stride),
            Slots(slot_mapping, slot_mapping_stride),
            k_scale,
            v_scale,
            plain,
            angles,
            program,
            tokens,
            SHAPE,
            WRITE,
            TILE,
            False,
        )
    else:
        q_heads = Heads(q, q_token_stride, q_head_stride)
        q_out_heads = Heads(q_out, q_out_token_stride, q_out_head_stride)
        rotate_queries(q_heads, q_out_heads, plain, angles, program - k_programs, tokens, SHAPE, TILE, False)
