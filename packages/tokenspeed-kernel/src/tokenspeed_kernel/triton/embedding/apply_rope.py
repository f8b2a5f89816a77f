"""Rotary position embedding of q and k, with or without the write into the paged cache, in one launch.

A program takes a tile of heads, of q or of k; one of k takes v's heads along when there is a cache to write to.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_kernel.triton.kvcache._write import COPIED, as_storable, as_stored, cache_format, locate_slots
from tokenspeed_kernel.triton.quantization._encode import abilities


@dataclass(frozen=True)
class Tile:
    """What one program turns; all but warps are powers of two.

    Attributes:
        q_heads, k_heads: heads of q, or of k (and v).
        pairs: columns for the pairs' elements, twice.
        tail: columns for the elements that are in no pair.
        block: columns for a whole head.
        warps: of the program.
    """

    q_heads: int
    k_heads: int
    pairs: int
    tail: int
    block: int
    warps: int


# H200, 16384 tokens of 64 + 8 heads of 64, bf16: with 32 elements of q a thread 93 to 95% of what a copy moves, with the write or
# without; with 16 elements 90%, with 8 elements 86%. 64 tokens take 1.9 us; with four times the heads and warps 2.3.
_Q_ELEMENTS, _K_ELEMENTS, _WARPS = 2048, 1024, 2


@functools.cache
def tile_for(head_dim: int, rotary_dim: int) -> Tile:
    """The tile for heads of this size."""
    pairs, tail, block = (triton.next_power_of_2(max(n, 1)) for n in (rotary_dim // 2, head_dim - rotary_dim, head_dim))
    warps = max(_WARPS, block // 1024)  # of a very long head no more than 32 elements a thread
    return Tile(max(1, _Q_ELEMENTS // block), max(1, _K_ELEMENTS // block), pairs, tail, block, warps)


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


def apply_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool = False,
    v: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `tokenspeed_kernel.apply_rope`."""
    (tokens, q_heads, head_dim), k_heads, rotary_dim = q.shape, k.shape[1], cos_sin_cache.shape[1]
    new_q = q_out if q_out is not None and q_out.stride(2) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    new_k = k_out if k_out is not None and k_out.stride(2) == 1 else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q, k, table = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos_sin_cache))
    write, form, native, page_size, slots_stride, v_strides = False, COPIED, False, 1, 1, (1, 1)
    cache_strides: tuple[int, ...] = (1,) * 8
    if v is not None and k_cache is not None and v_cache is not None and slot_mapping is not None and k_cache.numel():
        write, form = True, cache_format(k.dtype, k_cache.dtype)
        page_size, slots_stride, cache_strides = k_cache.shape[1], slot_mapping.stride(0), (*k_cache.stride(), *v_cache.stride())
        v = v if v.stride(2) == 1 else v.contiguous()
        v_strides = (v.stride(0), v.stride(1))
        if form != COPIED:
            native = abilities(q.device).native
            k_cache, v_cache = as_storable(k_cache), as_storable(v_cache)
    tile = tile_for(head_dim, rotary_dim)
    k_programs, q_programs = -(-tokens * k_heads // tile.k_heads), -(-tokens * q_heads // tile.q_heads)
    if head_dim and k_programs + q_programs:
        apply_rope_kernel[(k_programs + q_programs,)](
            q,
            k,
            v,
            positions,
            table,
            new_q,
            new_k,
            k_cache,
            v_cache,
            slot_mapping,
            tokens,
            k_programs,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            *v_strides,
            new_q.stride(0),
            new_q.stride(1),
            new_k.stride(0),
            new_k.stride(1),
            positions.stride(0),
            table.stride(0),
            slots_stride,
            *cache_strides,
            Q_HEADS=max(q_heads, 1),
            K_HEADS=max(k_heads, 1),
            HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim,
            INTERLEAVED=interleaved,
            WRITE=write,
            PAGE_SIZE=page_size,
            FORMAT=form,
            NATIVE=native,
            Q_TILE=tile.q_heads,
            K_TILE=tile.k_heads,
            PAIRS=tile.pairs,
            TAIL=tile.tail,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )
    if q_out is not None and q_out is not new_q:
        new_q = q_out.copy_(new_q)
    if k_out is not None and k_out is not new_k:
        new_k = k_out.copy_(new_k)
    return new_q, new_k
