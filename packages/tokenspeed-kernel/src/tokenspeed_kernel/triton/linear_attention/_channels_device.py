"""Computes the matrices of `_chunks_device` for per-channel gates: one gate per token and channel.

``exp(G[i] - G[j])`` (see `_chunks_device`) then differs by channel. The decay cannot be split into ``exp(G[i])`` and
``exp(-G[j])``, because ``exp(-G[j])`` overflows. Instead, choose a boundary between token j and the later token i, and let R be the
running sum at the boundary. ``exp(G[i] - R)`` and ``exp(R - G[j])`` are both at most 1. So pairs of tokens are grouped by a
boundary between them: first pairs within a block of 16 tokens, then pairs of different blocks. Decays are powers of two here, and
running sums are sums of log2 decays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import sequence_of, wait_for_products
from tokenspeed_kernel.triton.linear_attention._chunks_device import bounded, inverse_of, joined
from tokenspeed_kernel.triton.linear_attention._gates_device import log_decay, strength

_LOG2_E = tl.constexpr(1.4426950408889634)
# Limit of the magnitude of a channel's log2 decay over half a block. `_within` computes the decay of a token pair (i, j) from two
# factors, 2^d[i] and 2^-d[j], where d is the running log2 decay relative to the block's middle. Within the limit, |d| is at most 60
# and each factor at most 2^60. So even the largest decay, 2^120, is finite in float32. It occurs only above the diagonal of the
# block, which is masked.
_STEEPEST = tl.constexpr(60.0)


@triton.jit
def _one_by_one(system, weights, keys, queries, sums, TILE: tl.constexpr):
    """Adds the contribution of TILE.k channels to K K^T and Q K^T of a block of tokens, with one decay per token pair and channel.

    This is the fallback for gates that decay too fast for MMAs with split decays.
    """
    token = tl.arange(0, TILE.block)
    for j in range(TILE.block):
        chosen = (token == j)[:, None]
        key = tl.sum(tl.where(chosen, keys, 0.0), axis=0)
        reference = tl.sum(tl.where(chosen, sums, 0.0), axis=0)
        decayed = tl.exp2(tl.minimum(sums - reference[None, :], 0.0)) * key[None, :]
        column = (token == j)[None, :]
        weights += tl.where(column, tl.sum(queries * decayed, axis=1)[:, None], 0.0)
        system += tl.where(column, tl.sum(keys * decayed, axis=1)[:, None], 0.0)
    return system, weights


@triton.jit
def _log2_decays(raw, A_log, dt_bias, head, channel, channel_inside, SHAPE: tl.constexpr):
    """Converts the raw gates of tokens and channels to log2 decays."""
    bias = 0.0
    if SHAPE.gates == 2:
        bias = tl.load(dt_bias + head * SHAPE.k_dim + channel, mask=channel_inside, other=0.0).to(tl.float32)[None, :]
    return bounded(log_decay(raw.to(tl.float32), bias, A_log, head, SHAPE.gates)) * _LOG2_E


@triton.jit
def _within(system, weights, keys, queries, running, lower, upper, TILE: tl.constexpr):
    """Adds the contribution of TILE.k channels to K K^T (``system``) and Q K^T (``weights``) of a block of tokens.

    ``running``: the running sums of log2 decays; ``lower``, ``upper``: the sums over the block's first and second half.
    """
    if tl.min(tl.minimum(lower, upper), axis=0) >= -_STEEPEST:
        distance = running - lower[None, :]
        after = tl.exp2(distance)
        columns = tl.trans((keys * tl.exp2(-distance)).to(TILE.pairs))
        weights = tl.dot((queries * after).to(TILE.pairs), columns, weights, input_precision=TILE.precision)
        system = tl.dot((keys * after).to(TILE.pairs), columns, system, input_precision=TILE.precision)
    else:
        system, weights = _one_by_one(system, weights, keys, queries, running, TILE)
    return system, weights


@triton.jit
def _causal(weights, own, q_factor, k_factor, token):
    """Computes scale * P (the causal, decayed Q K^T, see `_chunks_device`) of a block of tokens, from its decayed Q K^T. ``own``
    replaces the diagonal."""
    weights = tl.where(token[:, None] == token[None, :], own[:, None], weights) * q_factor[:, None] * k_factor[None, :]
    return tl.where(token[:, None] >= token[None, :], weights, 0.0)


@triton.jit
def _inverse(system, part, k_factor, token, TILE: tl.constexpr):
    """Computes the inverse of I + A for a block of tokens. ``system`` is the block's K K^T, with decays."""
    system *= (part * k_factor)[:, None] * k_factor[None, :]
    system = tl.where(token[:, None] > token[None, :], system, 0.0)
    return inverse_of(system, TILE.block_levels, TILE)


@triton.jit(do_not_specialize=["batch", "tokens", "channels"])
def channel_blocks_kernel(
    q,
    k,
    g,
    beta,
    A_log, dt_bias,
    cu_seqlens,
    sums, totals, inverses, scores, factors,
    scale,
    batch, tokens, channels,
    q_token, q_head,
    k_token, k_head,
    g_token, g_head, g_channel,
    beta_token, beta_head,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes one diagonal block of both matrices, (I + A)^-1 and scale * P, for one block of a chunk and one value head.

    If no channel decays too much within half a block, the decays of all pairs are split at the block's middle. Then one of the two
    factors may be above 1. Matrix elements whose decay would be above 1 lie above the diagonal and are masked.

    Args:
        sums: output, the running sums of log2 decays within the block.
        totals: output, the block's total log2 decay per channel.
        inverses: output, the inverse of the diagonal block of I + A.
        scores: output, the diagonal block of scale * P.
        factors: output, the row factors (L2 norm and scale): of the keys that read the state, of the queries, and of the keys that
            are written to the state.
    """
    BLOCKS: tl.constexpr = TILE.chunk // TILE.block
    BLOCK: tl.constexpr = TILE.block
    number = tl.program_id(0)
    chunk = number // BLOCKS
    sequence = sequence_of(chunk, cu_seqlens, batch, 1, TILE.chunk, TILE.at_once)
    first = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    start = first + (chunk - first // TILE.chunk - sequence) * TILE.chunk + number % BLOCKS * BLOCK
    if start >= end:
        return
    head, v_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    source = head // SHAPE.group
    token = tl.arange(0, BLOCK)
    row = (start + token).to(tl.int64)
    inside = start + token < end
    at_row = row * v_heads + head
    system, weights = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    own, q_squares, k_squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, channels, TILE.k, disable_licm=True):
        # Give a thread 4 adjacent channels (16 bytes of float32). With 8 channels (16 bytes of a 16-bit float), the reductions
        # would use two layouts.
        channel = tl.max_contiguous(begin + tl.arange(0, TILE.k), 4)
        channel_inside = channel < SHAPE.k_dim
        there = inside[:, None] & channel_inside[None, :]
        queries = tl.load(q + row[:, None] * q_token + source * q_head + channel[None, :], mask=there, other=0.0).to(tl.float32)
        keys = tl.load(k + row[:, None] * k_token + source * k_head + channel[None, :], mask=there, other=0.0).to(tl.float32)
        raw = tl.load(g + row[:, None] * g_token + head * g_head + channel[None, :] * g_channel, mask=there, other=0.0)
        logs = tl.where(there, _log2_decays(raw, A_log, dt_bias, head, channel, channel_inside, SHAPE), 0.0)
        q_squares += tl.sum(queries * queries, axis=1)
        k_squares += tl.sum(keys * keys, axis=1)
        own += tl.sum(queries * keys, axis=1)
        running = tl.cumsum(logs, axis=0)
        lower = tl.sum(tl.where((token < BLOCK // 2)[:, None], logs, 0.0), axis=0)
        upper = tl.sum(tl.where((token < BLOCK // 2)[:, None], 0.0, logs), axis=0)
        tl.store(sums + at_row[:, None] * SHAPE.k_dim + channel[None, :], running, mask=there)
        at_total = (number.to(tl.int64) * v_heads + head) * SHAPE.k_dim + channel
        tl.store(totals + at_total, lower + upper, mask=channel_inside)
        system, weights = _within(system, weights, keys, queries, running, lower, upper, TILE)
    one = tl.full([BLOCK], 1.0, tl.float32)
    q_factor = (tl.rsqrt(q_squares + SHAPE.eps) if SHAPE.l2norm else one) * scale
    k_factor = tl.rsqrt(k_squares + SHAPE.eps) if SHAPE.l2norm else one
    size = tokens.to(tl.int64) * v_heads
    tl.store(factors + at_row, k_factor, mask=inside)
    tl.store(factors + size + at_row, q_factor, mask=inside)
    tl.store(factors + 2 * size + at_row, k_factor, mask=inside)
    at = at_row[:, None] * TILE.chunk + number % BLOCKS * BLOCK + token[None, :]
    weights = _causal(weights, own, q_factor, k_factor, token)
    tl.store(scores + at, weights.to(TILE.dtype), mask=inside[:, None])
    part = strength(tl.load(beta + row * beta_token + head * beta_head, mask=inside, other=0.0).to(tl.float32), SHAPE.gates)
    inverse = _inverse(system, part, k_factor, token, TILE)
    tl.store(inverses + at_row[:, None] * BLOCK + token[None, :], inverse.to(TILE.solver), mask=inside[:, None])


@triton.jit
def _across(system, weights, keys, queries, distance, NUMBER: tl.constexpr, TILE: tl.constexpr):
    """Adds the contribution of TILE.k channels to K K^T and Q K^T, for pairs of a token before the boundary and a later token.

    The boundary is the start of block NUMBER. Only tokens within N blocks of the boundary count, where N is the largest power of
    two that divides NUMBER. ``distance``: running sums of log2 decays minus the running sum at the boundary.
    """
    token = tl.arange(0, TILE.chunk)
    boundary: tl.constexpr = NUMBER * TILE.block
    side: tl.constexpr = (NUMBER & -NUMBER) * TILE.block
    behind = (token >= boundary) & (token < boundary + side)
    ahead = (token < boundary) & (token >= boundary - side)
    decay = tl.exp2(tl.where(behind[:, None], distance, tl.where(ahead[:, None], -distance, float("-inf"))))
    decayed = (keys * decay).to(TILE.dtype)
    rows = tl.where(behind[:, None], decayed, 0.0)
    columns = tl.trans(tl.where(ahead[:, None], decayed, 0.0))
    decayed_queries = (queries * tl.where(behind[:, None], decay, 0.0)).to(TILE.dtype)
    weights = tl.dot(decayed_queries, columns, weights, input_precision=TILE.precision)
    system = tl.dot(rows, columns, system, input_precision=TILE.precision)
    return system, weights


@triton.jit
def _over_chunk(running, of_block, start, end, v_heads, channel, token, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Returns the running sums of log2 decays over a chunk, computed from the running sums over each block, and the chunk's total.

    ``of_block``: pointers to the total log2 decays of the chunk's first block.
    """
    BLOCKS: tl.constexpr = TILE.chunk // TILE.block
    K: tl.constexpr = TILE.k
    total = tl.zeros([K], tl.float32)
    for block in tl.static_range(BLOCKS):
        present = channel < tl.where(start + block * TILE.block < end, SHAPE.k_dim, 0)
        total += tl.load(of_block + block * v_heads * SHAPE.k_dim, mask=present, other=0.0)
        if block + 1 < BLOCKS:
            running = tl.where((token // TILE.block == block + 1)[:, None], running + total[None, :], running)
    return running, total


@triton.jit(do_not_specialize=["batch", "tokens", "channels"])
def channel_chunks_kernel(
    q,
    k,
    beta,
    cu_seqlens,
    sums, totals, inverses,
    solve,
    scores,
    factors,
    decays,
    scaled,
    batch, tokens, channels,
    q_token, q_head,
    k_token, k_head,
    beta_token, beta_head,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes the off-diagonal blocks of K K^T and scale * P for one chunk and one value head, then solves the chunk's system.

    Token pairs are grouped by a boundary between two blocks. Token i lies within some number of blocks after the boundary, and
    token j within the same number of blocks before the boundary.

    The kernel also writes queries and keys multiplied by their decays, because per-channel decays are not row factors.
    """
    BLOCKS: tl.constexpr = TILE.chunk // TILE.block
    CHUNK: tl.constexpr = TILE.chunk
    K: tl.constexpr = TILE.k
    chunk = tl.program_id(0)
    sequence = sequence_of(chunk, cu_seqlens, batch, 1, TILE.chunk, TILE.at_once)
    first = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    start = first + (chunk - first // TILE.chunk - sequence) * TILE.chunk
    if start >= end:
        return
    head, v_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    source = head // SHAPE.group
    token = tl.arange(0, CHUNK)
    row = (start + token).to(tl.int64)
    inside = start + token < end
    at_row = row * v_heads + head
    size = tokens.to(tl.int64) * v_heads
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    weights = tl.zeros([CHUNK, CHUNK], tl.float32)
    for begin in range(0, channels, TILE.k):
        channel = begin + tl.arange(0, TILE.k)
        channel_inside = channel < SHAPE.k_dim
        there = inside[:, None] & channel_inside[None, :]
        queries = tl.load(q + row[:, None] * q_token + source * q_head + channel[None, :], mask=there, other=0.0)
        keys = tl.load(k + row[:, None] * k_token + source * k_head + channel[None, :], mask=there, other=0.0)
        running = tl.load(sums + at_row[:, None] * SHAPE.k_dim + channel[None, :], mask=there, other=0.0)
        of_block = totals + (chunk.to(tl.int64) * BLOCKS * v_heads + head) * SHAPE.k_dim + channel
        running, total = _over_chunk(running, of_block, start, end, v_heads, channel, token, SHAPE, TILE)
        wide_keys, wide_queries = keys.to(tl.float32), queries.to(tl.float32)
        kept = tl.exp2(running)
        at = at_row[:, None] * SHAPE.width + channel[None, :]
        written = inside[:, None] & (channel < SHAPE.width)[None, :]
        tl.store(scaled + at, (wide_keys * kept).to(TILE.dtype), mask=written)
        tl.store(scaled + size * SHAPE.width + at, (wide_queries * kept).to(TILE.dtype), mask=written)
        lasting = wide_keys * tl.exp2(total[None, :] - running)
        tl.store(scaled + 2 * size * SHAPE.width + at, lasting.to(TILE.dtype), mask=written)
        tl.store(decays + (chunk.to(tl.int64) * v_heads + head) * SHAPE.k_dim + channel, tl.exp2(total), mask=channel_inside)
        reference = tl.zeros([K], tl.float32)
        for block in tl.static_range(1, BLOCKS):
            wait_for_products()
            present = channel < tl.where(start + (block - 1) * TILE.block < end, SHAPE.k_dim, 0)
            reference += tl.load(of_block + (block - 1) * v_heads * SHAPE.k_dim, mask=present, other=0.0)
            system, weights = _across(system, weights, wide_keys, wide_queries, running - reference[None, :], block, TILE)
    k_factor = tl.load(factors + at_row, mask=inside, other=0.0)
    q_factor = tl.load(factors + size + at_row, mask=inside, other=0.0)
    part = strength(tl.load(beta + row * beta_token + head * beta_head, mask=inside, other=0.0).to(tl.float32), SHAPE.gates)
    same = token[:, None] // TILE.block == token[None, :] // TILE.block
    at = at_row[:, None] * CHUNK + token[None, :]
    weights *= q_factor[:, None] * k_factor[None, :]
    tl.store(scores + at, weights.to(TILE.dtype), mask=inside[:, None] & (same == 0))
    system *= (part * k_factor)[:, None] * k_factor[None, :]
    at_inverse = at_row[:, None] * TILE.block + token[None, :] % TILE.block
    inverse = tl.load(inverses + at_inverse, mask=inside[:, None] & same, other=0.0).to(tl.float32)
    solution = joined(inverse, system, TILE.block_levels, TILE.levels, TILE) * part[None, :]
    tl.store(solve + at, solution.to(TILE.dtype), mask=inside[:, None])
