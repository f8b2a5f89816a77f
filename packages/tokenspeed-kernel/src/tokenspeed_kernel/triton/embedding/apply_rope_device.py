"""Device code of `apply_rope`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.kvcache._write_device import as_stored, locate_slots


@triton.jit
def _load_heads(
    base, inside,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads that begin at ``base``, ``[TILE, 1]``: the two elements of every pair, ``[TILE, PAIRS]`` each, and those that are in
    none, ``[TILE, TAIL]``."""
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
        tail = a  # there is none
    return a, b, tail


@triton.jit
def _store_heads(
    base, dim_stride, a, b, tail, inside,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Puts what `_load_heads` gives to where it finds it."""
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
def _turn(a, b, table, position, inside, table_stride, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs turned by the angles of their positions, ``[TILE, 1]`` or ``[1, 1]``, and rounded."""
    pair = tl.arange(0, PAIRS)[None, :]
    at = table + position.to(tl.int64) * table_stride + pair
    there = inside & (pair < ROTARY_DIM // 2)
    cos = tl.load(at, mask=there, other=0.0)
    sin = tl.load(at + ROTARY_DIM // 2, mask=there, other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * cos - wide_b * sin).to(a.dtype), (wide_b * cos + wide_a * sin).to(b.dtype)


@triton.jit
def _turn_queries(
    q, q_out, positions, table, program, tokens, token_stride, head_stride, out_token_stride, out_head_stride, positions_stride,
    table_stride, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = program * TILE + tl.arange(0, TILE)[:, None]
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    inside = token < tokens
    base = q + token * token_stride + head * head_stride
    a, b, tail = _load_heads(base, inside, HEAD_DIM, ROTARY_DIM, PAIRS, TAIL, INTERLEAVED)
    if HEADS % TILE == 0:  # The whole tile is of one token: angles are loaded once.
        at = (program * TILE // HEADS) * positions_stride + tl.zeros((1, 1), tl.int64)
        a, b = _turn(a, b, table, tl.load(positions + at), at >= 0, table_stride, ROTARY_DIM, PAIRS)
    else:
        position = tl.load(positions + token * positions_stride, mask=inside, other=0)
        a, b = _turn(a, b, table, position, inside, table_stride, ROTARY_DIM, PAIRS)
    out_base = q_out + token * out_token_stride + head * out_head_stride
    _store_heads(out_base, 1, a, b, tail, inside, HEAD_DIM, ROTARY_DIM, PAIRS, TAIL, INTERLEAVED)


@triton.jit
def _turn_keys(
    k, v, k_out, k_cache, v_cache, positions, table, slot_mapping, program, tokens, token_stride, head_stride, v_token_stride,
    v_head_stride, out_token_stride, out_head_stride, positions_stride, table_stride, slot_mapping_stride, k_page_stride,
    k_slot_stride, k_cache_head_stride, k_cache_dim_stride, v_page_stride, v_slot_stride, v_cache_head_stride, v_cache_dim_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WRITE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
    TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = program * TILE + tl.arange(0, TILE)[:, None]
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    inside = token < tokens
    position = tl.load(positions + token * positions_stride, mask=inside, other=0)
    base = k + token * token_stride + head * head_stride
    a, b, tail = _load_heads(base, inside, HEAD_DIM, ROTARY_DIM, PAIRS, TAIL, INTERLEAVED)
    if WRITE:  # all loads before the first store, which they could not be moved across
        slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=inside, other=-1)
        written = slot >= 0
        column = tl.arange(0, BLOCK)[None, :]
        v_base = v + token * v_token_stride + head * v_head_stride
        values = tl.load(v_base + column, mask=inside & (column < HEAD_DIM), other=0.0)
    a, b = _turn(a, b, table, position, inside, table_stride, ROTARY_DIM, PAIRS)
    out_base = k_out + token * out_token_stride + head * out_head_stride
    _store_heads(out_base, 1, a, b, tail, inside, HEAD_DIM, ROTARY_DIM, PAIRS, TAIL, INTERLEAVED)
    if WRITE:
        k_place = locate_slots(slot, PAGE_SIZE, k_page_stride, k_slot_stride) + head * k_cache_head_stride
        v_place = locate_slots(slot, PAGE_SIZE, v_page_stride, v_slot_stride) + head * v_cache_head_stride
        _store_heads(
            k_cache + k_place, k_cache_dim_stride, as_stored(a, FORMAT, NATIVE), as_stored(b, FORMAT, NATIVE),
            as_stored(tail, FORMAT, NATIVE), written, HEAD_DIM, ROTARY_DIM, PAIRS, TAIL, INTERLEAVED,
        )  # fmt: skip
        v_places = v_cache + v_place + column * v_cache_dim_stride
        tl.store(v_places, as_stored(values, FORMAT, NATIVE), mask=written & (column < HEAD_DIM))


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
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WRITE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < k_programs:
        _turn_keys(
            k, v, k_out, k_cache, v_cache, positions, table, slot_mapping, program, tokens, k_token_stride, k_head_stride,
            v_token_stride, v_head_stride, k_out_token_stride, k_out_head_stride, positions_stride, table_stride,
            slot_mapping_stride, k_page_stride, k_slot_stride, k_cache_head_stride, k_cache_dim_stride, v_page_stride,
            v_slot_stride, v_cache_head_stride, v_cache_dim_stride, K_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, WRITE, PAGE_SIZE,
            FORMAT, NATIVE, K_TILE, PAIRS, TAIL, BLOCK,
        )  # fmt: skip
    else:
        _turn_queries(
            q, q_out, positions, table, program - k_programs, tokens, q_token_stride, q_head_stride, q_out_token_stride,
            q_out_head_stride, positions_stride, table_stride, Q_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, Q_TILE, PAIRS, TAIL,
        )  # fmt: skip
