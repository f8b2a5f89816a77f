"""Device code of `apply_rope_mla`: rows of latents followed by their rotary part, for the cache and for absorbed queries."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.embedding.apply_rope_device import Angles, load_heads, rotate, store_heads
from tokenspeed_kernel.triton.kvcache._write_device import encoded, slot_of
from tokenspeed_kernel.triton.views_device import Cache, Heads, row_of


@triton.jit
def _join(
    values,
    rope_at,
    at,
    dim_stride,
    angles,
    token,
    inside,
    written,
    scale,
    SHAPE: tl.constexpr,
    ENCODING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores rows of latents (of keys or queries), each followed by its rotary part, which is rotated here.

    values: the latents, ``[ROWS, TILE.rank]``; rope_at: pointers to the rotary parts; at: pointers to the output rows; written: the
    store mask of the rows.
    """
    position = tl.load(angles.positions + token * angles.positions_stride, mask=inside, other=0)
    a, b, tail = load_heads(rope_at, inside, SHAPE, TILE)
    a, b = rotate(a, b, angles, position, inside, SHAPE.rotary_dim, TILE.pairs)
    none = tl.zeros_like(token)  # at most one scale, so the head index is 0
    a = encoded(a, scale, none, ENCODING.k_scales, ENCODING)
    b = encoded(b, scale, none, ENCODING.k_scales, ENCODING)
    column = tl.arange(0, TILE.rank)[None, :]
    values = encoded(values, scale, none, ENCODING.k_scales, ENCODING)
    tl.store(at + column * dim_stride, values, mask=written & (column < SHAPE.rank))
    store_heads(at + SHAPE.rank * dim_stride, dim_stride, a, b, tail, written, SHAPE, TILE)


@triton.jit
def _write_latents(
    latent,
    latent_stride,
    k_rope,
    k_rope_stride,
    cache,
    slot_mapping,
    slot_mapping_stride,
    angles,
    program,
    tokens,
    scale,
    SHAPE: tl.constexpr,
    ENCODING: tl.constexpr,
    TILE: tl.constexpr,
):
    # Writes the latents and rotated rotary parts of TILE.tokens tokens to their cache slots. Tokens with a negative slot are
    # skipped.
    column = tl.arange(0, TILE.rank)[None, :]
    token = (program * TILE.tokens + tl.arange(0, TILE.tokens)[:, None]).to(tl.int64)
    inside = token < tokens
    slot = tl.load(slot_mapping + token * slot_mapping_stride, mask=inside, other=-1)
    values = tl.load(latent + token * latent_stride + column, mask=inside & (column < SHAPE.rank), other=0.0)
    at = slot_of(cache, slot, 0, SHAPE.page_size)
    rope_at = k_rope + token * k_rope_stride
    _join(values, rope_at, at, cache.dim_stride, angles, token, inside, slot >= 0, scale, SHAPE, ENCODING, TILE)


@triton.jit
def _make_queries(
    q_latent, q_rope, q, angles, program, tokens, scale, SHAPE: tl.constexpr, ENCODING: tl.constexpr, TILE: tl.constexpr
):
    # Writes TILE.q_heads heads of q: the absorbed queries, followed by the rotated rotary parts.
    column = tl.arange(0, TILE.rank)[None, :]
    row = program * TILE.q_heads + tl.arange(0, TILE.q_heads)[:, None]
    token, head = (row // SHAPE.heads).to(tl.int64), (row % SHAPE.heads).to(tl.int64)
    inside = token < tokens
    values = tl.load(row_of(q_latent, token, head) + column, mask=inside & (column < SHAPE.rank), other=0.0)
    rope_at, at = row_of(q_rope, token, head), row_of(q, token, head)
    _join(values, rope_at, at, 1, angles, token, inside, inside, scale, SHAPE, ENCODING, TILE)


@triton.jit(do_not_specialize=["tokens", "kv_programs"])
def apply_rope_mla_kernel(
    q_latent,
    q_rope,
    latent,
    k_rope,
    positions,
    table,
    q,
    kv_cache,
    slot_mapping,
    q_scale,
    kv_scale,
    tokens,
    kv_programs,
    q_latent_token_stride,
    q_latent_head_stride,
    q_rope_token_stride,
    q_rope_head_stride,
    latent_stride,
    k_rope_stride,
    positions_stride,
    table_stride,
    q_token_stride,
    q_head_stride,
    slot_mapping_stride,
    page_stride,
    slot_stride,
    dim_stride,
    SHAPE: tl.constexpr,
    Q_ENCODING: tl.constexpr,
    KV_ENCODING: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first ``kv_programs`` programs write keys (latent and rotary part) to the cache; all others assemble queries."""
    start(EARLY)
    angles = Angles(positions, positions_stride, table, table_stride, 0)
    program = tl.program_id(0)
    if program < kv_programs:
        _write_latents(
            latent,
            latent_stride,
            k_rope,
            k_rope_stride,
            Cache(kv_cache, page_stride, slot_stride, 0, dim_stride),
            slot_mapping,
            slot_mapping_stride,
            angles,
            program,
            tokens,
            kv_scale,
            SHAPE,
            KV_ENCODING,
            TILE,
        )
    else:
        _make_queries(
            Heads(q_latent, q_latent_token_stride, q_latent_head_stride),
            Heads(q_rope, q_rope_token_stride, q_rope_head_stride),
            Heads(q, q_token_stride, q_head_stride),
            angles,
            program - kv_programs,
            tokens,
            q_scale,
            SHAPE,
            Q_ENCODING,
            TILE,
        )
