"""Computes the part of the gated delta rule that needs no state: two matrices per chunk of tokens. One program computes one chunk
of one head.

Let ``G`` be the running sums of the log decays within a chunk, and ``S`` the state before the chunk. The rows of ``U`` are the
values that the chunk's tokens write to the state. ``U`` solves a unit lower triangular system:

    (I + A) U = beta * (V - (exp(G) * K) S)     A[i, j] = beta[i] * sum(K[i] * K[j] * exp(G[i] - G[j])) for j < i
    O = scale * ((exp(G) * Q) S + P U)          P[i, j] = sum(Q[i] * K[j] * exp(G[i] - G[j])) for j <= i
    S' = exp(G[last]) * S + (exp(G[last] - G) * K).T U

The kernel here, and the kernels of `_channels_device` for per-channel gates, compute ``(I + A)^-1 * beta`` and ``scale * P``.
`gated_delta_rule_prefill_device` computes ``U``, ``O`` and ``S'``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import sequence_of, wait_for_products
from tokenspeed_kernel.triton.linear_attention._gates_device import log_decay, strength


@triton.jit
def joined(inverse, a, FIRST: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr):
    """Inverts I + a for a strictly lower triangular tile ``a`` of 2^LEVELS tokens, given the inverses of its diagonal blocks of
    2^FIRST tokens.

    Each step doubles the side of the inverted diagonal blocks. For diagonal blocks X and Y, with block E below X and left of Y, the
    joint inverse has inv(X), inv(Y), and -inv(Y) E inv(X) at the position of E. This method is blocked forward substitution, and as
    accurate as forward substitution. No power of ``a`` is formed, because its entries would grow large where keys are alike.
    """
    row, column = tl.arange(0, 1 << LEVELS)[:, None], tl.arange(0, 1 << LEVELS)[None, :]
    for level in range(FIRST, LEVELS):  # not unrolled: one step uses almost all registers
        wait_for_products()
        side = 1 << level
        between = (row // (2 * side) == column // (2 * side)) & (row // side != column // side)
        rounded = inverse.to(TILE.solver)
        e_inverse = tl.dot(tl.where(between, a, 0.0).to(TILE.solver), rounded, input_precision=TILE.precision)
        inverse -= tl.dot(rounded, e_inverse.to(TILE.solver), input_precision=TILE.precision)
    return inverse


@triton.jit
def inverse_of(a, LEVELS: tl.constexpr, TILE: tl.constexpr):
    """Inverts I + a for a strictly lower triangular tile ``a`` of 2^LEVELS tokens."""
    row, column = tl.arange(0, 1 << LEVELS)[:, None], tl.arange(0, 1 << LEVELS)[None, :]
    pairs = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -a, 0.0))
    return joined(pairs, a, 1, LEVELS, TILE)


@triton.jit
def bounded(logs):
    """Clamps log decays to at least -40.

    A decay of exp(-40) = 4e-18 already erases the state. A far more negative log decay would swamp the running sums, and their
    differences would lose the small decays. A comparison keeps NaN, unlike a maximum.
    """
    return tl.where(logs < -40.0, -40.0, logs)


@triton.jit
def _inverse_length(x, L2NORM: tl.constexpr, EPS: tl.constexpr):
    """Returns 1 / (L2 norm) of each row, or 1 if rows are not normalised."""
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, axis=1)
    return tl.rsqrt(squares + EPS) if L2NORM else tl.full(squares.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=["batch", "tokens"])
def head_gates_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    solve,
    scores,
    factors,
    decays,
    scale,
    batch,
    tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Computes (I + A)^-1 * beta and scale * P for one chunk and one value head, with one gate per token.

    Queries and keys enter the MMAs unscaled. L2 norms and decays are applied to the MMAs' results, as float32 factors of rows and
    columns. The MMAs are repeated for each value head of a GQA group, because a loop over the group would hold the loop-invariant
    masks in registers.
    """
    chunk = tl.program_id(0)
    sequence = sequence_of(chunk, cu_seqlens, batch, 1, TILE.chunk, TILE.at_once)
    first = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    start = first + (chunk - first // TILE.chunk - sequence) * TILE.chunk
    if start >= end:
        return
    head, v_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    source = head // SHAPE.group
    token = tl.arange(0, TILE.chunk)
    row = (start + token).to(tl.int64)
    inside = start + token < end
    channel = tl.arange(0, TILE.k)
    there = inside[:, None] & (channel < SHAPE.width)[None, :]
    queries = tl.load(q + row[:, None] * q_token + source * q_head + channel[None, :], mask=there, other=0.0).to(TILE.dtype)
    keys = tl.load(k + row[:, None] * k_token + source * k_head + channel[None, :], mask=there, other=0.0).to(TILE.dtype)
    q_factor = _inverse_length(queries, SHAPE.l2norm, SHAPE.eps) * scale
    k_factor = _inverse_length(keys, SHAPE.l2norm, SHAPE.eps)
    bias = 0.0
    if SHAPE.gates == 2:
        bias = tl.load(dt_bias + head).to(tl.float32)
    raw = tl.load(g + row * g_token + head * g_head, mask=inside, other=0.0).to(tl.float32)
    logs = tl.where(inside, bounded(log_decay(raw, bias, A_log, head, SHAPE.gates)), 0.0)
    part = tl.load(beta + row * beta_token + head * beta_head, mask=inside, other=0.0).to(tl.float32)
    part = strength(part, SHAPE.gates)
    sums = tl.cumsum(logs, axis=0)
    total = tl.sum(logs, axis=0)
    at_row = row * v_heads + head
    size = tokens.to(tl.int64) * v_heads
    kept = tl.exp(sums)
    tl.store(factors + at_row, kept * k_factor, mask=inside)
    tl.store(factors + size + at_row, kept * q_factor, mask=inside)
    tl.store(factors + 2 * size + at_row, tl.exp(total - sums) * k_factor, mask=inside)
    tl.store(decays + chunk.to(tl.int64) * v_heads + head, tl.exp(total))
    at = at_row[:, None] * TILE.chunk + token[None, :]
    decay = tl.where(token[:, None] >= token[None, :], sums[:, None] - sums[None, :], float("-inf"))
    decay = tl.exp(decay) * k_factor[None, :]
    dot_products = tl.dot(queries, tl.trans(keys), input_precision=TILE.precision)
    tl.store(scores + at, (dot_products * decay * q_factor[:, None]).to(TILE.dtype), mask=inside[:, None])
    dot_products = tl.dot(keys, tl.trans(keys), input_precision=TILE.precision)
    system = tl.where(token[:, None] > token[None, :], dot_products * decay * (part * k_factor)[:, None], 0.0)
    solution = inverse_of(system, TILE.levels, TILE) * part[None, :]
    tl.store(solve + at, solution.to(TILE.dtype), mask=inside[:, None])
