"""What the gated delta rule takes from a chunk of tokens before states are known: one program a chunk and head.

Let ``G`` be the running sums of the log decays within a chunk, ``S`` the state in front of it. The values that its tokens write to
the state, the rows of ``U``, depend on each other by a unit triangular system:

    (I + A) U = beta * (V - (exp(G) * K) S)     A[i, j] = beta[i] * sum(K[i] * K[j] * exp(G[i] - G[j])) for j < i
    O = scale * ((exp(G) * Q) S + P U)          P[i, j] = sum(Q[i] * K[j] * exp(G[i] - G[j])) for j <= i
    S' = exp(G[last]) * S + (exp(G[last] - G) * K).T U

The kernel here, and those of `_channels_device` for gates of channels, compute ``(I + A)^-1 * beta`` and ``scale * P``;
`gated_delta_rule_prefill_device` does the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import sequence_of, wait_for_products
from tokenspeed_kernel.triton.linear_attention._gates_device import log_decay, strength


@triton.jit
def joined(inverse, a, FIRST: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr):
    """The inverse of I + a, for a strictly lower triangular tile of 2^LEVELS tokens, from the inverses of its diagonal blocks of
    2^FIRST tokens.

    Blocks of twice the side are inverted from step to step: for blocks X and Y with E below X and left of Y, the inverse of both
    together is that of X, that of Y, and -inv(Y) E inv(X) in the place of E. This is forward substitution in blocks, and as exact:
    no power of ``a`` is formed, whose entries grow large where keys are alike.
    """
    row, column = tl.arange(0, 1 << LEVELS)[:, None], tl.arange(0, 1 << LEVELS)[None, :]
    for level in range(FIRST, LEVELS):  # not unrolled: one step takes most registers there are
        wait_for_products()
        side = 1 << level
        between = (row // (2 * side) == column // (2 * side)) & (row // side != column // side)
        rounded = inverse.to(TILE.solver)
        product = tl.dot(tl.where(between, a, 0.0).to(TILE.solver), rounded, input_precision=TILE.precision)
        inverse -= tl.dot(rounded, product.to(TILE.solver), input_precision=TILE.precision)
    return inverse


@triton.jit
def inverse_of(a, LEVELS: tl.constexpr, TILE: tl.constexpr):
    """The inverse of I + a, for a strictly lower triangular tile of 2^LEVELS tokens."""
    row, column = tl.arange(0, 1 << LEVELS)[:, None], tl.arange(0, 1 << LEVELS)[None, :]
    pairs = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -a, 0.0))
    return joined(pairs, a, 1, LEVELS, TILE)


@triton.jit
def bounded(logs):
    """Log decays, at least -40. A decay of exp(-40), 4e-18, already leaves nothing of a state. A far larger one would swamp the
    running sums, whose differences would then lose the small decays. NaN stays NaN, which a maximum would not keep."""
    return tl.where(logs < -40.0, -40.0, logs)


@triton.jit
def _inverse_length(x, L2NORM: tl.constexpr, EPS: tl.constexpr):
    """1 over the length of each row; 1 if rows are not to be normalised."""
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
    """One chunk and value head, whose gates are one number a token.

    Queries and keys go into products as they are. What they are scaled by, lengths and decays, are factors of rows, float32. The
    products are computed again for each value head of a group: in a loop over the group, masks that do not change would be held
    in registers.
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
    products = tl.dot(queries, tl.trans(keys), input_precision=TILE.precision)
    tl.store(scores + at, (products * decay * q_factor[:, None]).to(TILE.dtype), mask=inside[:, None])
    products = tl.dot(keys, tl.trans(keys), input_precision=TILE.precision)
    system = tl.where(token[:, None] > token[None, :], products * decay * (part * k_factor)[:, None], 0.0)
    solution = inverse_of(system, TILE.levels, TILE) * part[None, :]
    tl.store(solve + at, solution.to(TILE.dtype), mask=inside[:, None])
