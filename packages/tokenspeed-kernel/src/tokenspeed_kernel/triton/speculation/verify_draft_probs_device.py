"""Device code of `verify_draft_probs`.

The *residual* of a node is ``max(a * p - b * q, 0)`` per token. p are the target model's probabilities, q the draft model's.
Residuals are summed as integer multiples of 2^-40, so the order of addition does not change the sum.

Kernels are launched with ``enable_fp_fusion=False``: the definition rounds after every multiplication.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenspeed_kernel.triton.speculation._trees_device import load_parents
from tokenspeed_kernel_base.ops.speculation import verify_draft_probs as definition

_FIXED_ONE = tl.constexpr(2.0**definition.PROBABILITY_BITS)
_FIXED_STEP = tl.constexpr(2.0**-definition.PROBABILITY_BITS)
# Adding _ROUNDER to a value in [0, 2^51) rounds the value to an integer, which is then in the low bits.
_ROUNDER = tl.constexpr(2.0**52)
_ROUNDER_MASK = tl.constexpr((1 << 52) - 1)


class Rows(NamedTuple):
    """Pointers to the probabilities of the token that follows a node: the target model's row, and the draft model's row."""

    target: Any
    draft: Any


@triton.jit
def _uniform(seed, offset, draw):
    """Returns the random number in [0, 1) of a seed, an offset and the index ``draw``, as float64, as `philox.uniform_of` defines
    it."""
    zero = (offset * 0).to(tl.uint32)
    third = (draw + 1).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, offset.to(tl.uint32), (offset >> 32).to(tl.uint32), zero + third, zero)
    high = (first >> 5).to(tl.int32).to(tl.float64) * (1.0 / 134217728.0)
    return high + (second >> 6).to(tl.int32).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _rows_of(target_probs, draft_probs, target_stride_b, target_stride_n, draft_stride_b, draft_stride_n, inner, sequence, node):
    """Returns pointers to the target model's and the draft model's probabilities at a node. If the draft model has no row for the
    node, ``draft`` points to another node's row, which no kernel reads.
    """
    target = target_probs + sequence * target_stride_b + node.to(tl.int64) * target_stride_n
    draft = draft_probs + sequence * draft_stride_b + tl.minimum(node, tl.maximum(inner - 1, 0)).to(tl.int64) * draft_stride_n
    return Rows(target, draft)


@triton.jit
def _residual(rows, at, mask, a, b):
    """Returns the residual ``max(a * p - b * q, 0)`` of the tokens ``at`` in float64; 0 where the residual is not finite."""
    p = tl.load(rows.target + at, mask=mask, other=0.0).to(tl.float64)
    read = tl.where(b > 0.0, 0x7FFFFFFF, 0)  # a bound for ids: the interpreter cannot broadcast the scalar condition to a mask
    q = tl.load(rows.draft + at, mask=mask & (at < read), other=0.0).to(tl.float64)
    r = a * p - b * q
    return tl.where((r > 0.0) & (r < float("inf")), r, 0.0)


@triton.jit
def _fixed_point(r):
    """Converts residuals (float64) to int64 multiples of 2^-40."""
    return (r * _FIXED_ONE + _ROUNDER).to(tl.int64, bitcast=True) & _ROUNDER_MASK


@triton.jit
def _sum_residual(rows, begin, end, a, b, BLOCK: tl.constexpr):
    """Returns the sum of the residual over tokens [begin, end), in multiples of 2^-40."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += _fixed_point(_residual(rows, at, at < end, a, b))
    return tl.sum(sums, axis=0)


@triton.jit
def walk_kernel(
    target_probs,
    draft_probs,
    target_stride_b,
    target_stride_n,
    draft_stride_b,
    draft_stride_n,
    inner,
    vocab,
    draft_tokens,
    tokens_in_stride_b,
    tokens_in_stride_n,
    parents,
    parents_stride_b,
    parents_stride_n,
    seed,
    offset,
    tokens,
    tokens_stride_b,
    tokens_stride_n,
    path,
    path_stride_b,
    path_stride_n,
    counts,
    counts_stride,
    factors,  # float64 [batch, 2]: a and b of the last node's residual
    nodes,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walks down the draft tree of one sequence, accepting or rejecting each child, and writes all outputs but the last token."""
    sequence = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, NODES)
    drafted = tl.load(draft_tokens + sequence * tokens_in_stride_b + at * tokens_in_stride_n, mask=at < nodes, other=-1)
    # Check the range before narrowing: the low 32 bits of an int64 that is out of range may be a valid token.
    drafted = tl.where((drafted >= 0) & (drafted < vocab), drafted, -1).to(tl.int32)
    parent = load_parents(parents, sequence, parents_stride_b, parents_stride_n, nodes, NODES)
    parent = tl.where((drafted >= 0) & (parent < inner), parent, -1)
    key, position = tl.load(seed + sequence), tl.load(offset + sequence)
    tl.store(path + sequence * path_stride_b, 0)
    length = at.to(tl.int32) * 0
    length = tl.max(length, axis=0) + 1
    node = length - 1
    a = node.to(tl.float64) + 1.0
    b = a - 1.0
    rejected = node  # 1 if a child of this node was rejected, so that the residual must be renormalised before the next child
    child = tl.min(tl.where(parent == node, at, NODES), axis=0)
    while child < NODES:
        rows = _rows_of(
            target_probs, draft_probs, target_stride_b, target_stride_n, draft_stride_b, draft_stride_n, inner, sequence, node
        )
        if rejected != 0:
            total = _sum_residual(rows, 0, vocab, a, b, BLOCK).to(tl.float64) * _FIXED_STEP
            if total > 0.0:
                a = a / total
                b = b / total
            else:
                a = a * 0.0 + 1.0
                b = b * 0.0
        token = tl.sum(tl.where(at == child, drafted, 0), axis=0)
        r = _residual(rows, token, token >= 0, a, b)
        q = tl.load(rows.draft + token).to(tl.float64)
        if _uniform(key, position, child) * q < r:
            tl.store(tokens + sequence * tokens_stride_b + (length - 1) * tokens_stride_n, token)
            tl.store(path + sequence * path_stride_b + length * path_stride_n, child)
            length += 1
            node = child
            a = a * 0.0 + 1.0
            b = b * 0.0
            rejected = rejected * 0
        else:
            b += 1.0
            rejected = rejected * 0 + 1
        child = tl.min(tl.where((parent == node) & (at > child), at, NODES), axis=0)
    unused = (at >= length) & (at < nodes)
    tl.store(tokens + sequence * tokens_stride_b + at * tokens_stride_n, tl.full([NODES], -1, tl.int32), mask=unused)
    tl.store(path + sequence * path_stride_b + at * path_stride_n, tl.full([NODES], -1, tl.int32), mask=unused)
    tl.store(counts + sequence * counts_stride, length)
    tl.store(factors + sequence * 2, a)
    tl.store(factors + sequence * 2 + 1, b)


@triton.jit
def sum_spans_kernel(
    target_probs,
    draft_probs,
    target_stride_b,
    target_stride_n,
    draft_stride_b,
    draft_stride_n,
    inner,
    vocab,
    path,
    path_stride_b,
    path_stride_n,
    counts,
    counts_stride,
    factors,
    sums,  # int64 [batch, spans]
    spans,
    length,
    BLOCK: tl.constexpr,
):
    """Sums the residual over one span of the vocabulary, for the last node on a sequence's accepted path."""
    sequence = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    last = tl.load(counts + sequence * counts_stride) - 1
    node = tl.load(path + sequence * path_stride_b + last * path_stride_n)
    rows = _rows_of(
        target_probs, draft_probs, target_stride_b, target_stride_n, draft_stride_b, draft_stride_n, inner, sequence, node
    )
    a, b = tl.load(factors + sequence * 2), tl.load(factors + sequence * 2 + 1)
    begin = span * length
    total = _sum_residual(rows, begin, tl.minimum(begin + length, vocab), a, b, BLOCK)
    tl.store(sums + sequence * spans + span, total)


@triton.jit
def draw_kernel(
    target_probs,
    draft_probs,
    target_stride_b,
    target_stride_n,
    draft_stride_b,
    draft_stride_n,
    inner,
    vocab,
    path,
    path_stride_b,
    path_stride_n,
    counts,
    counts_stride,
    factors,
    sums,
    spans,
    length,
    seed,
    offset,
    tokens,
    tokens_stride_b,
    tokens_stride_n,
    SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draws the last token of a sequence from the residual of the last node on its accepted path."""
    sequence = tl.program_id(0).to(tl.int64)
    last = tl.load(counts + sequence * counts_stride) - 1
    node = tl.load(path + sequence * path_stride_b + last * path_stride_n)
    rows = _rows_of(
        target_probs, draft_probs, target_stride_b, target_stride_n, draft_stride_b, draft_stride_n, inner, sequence, node
    )
    a, b = tl.load(factors + sequence * 2), tl.load(factors + sequence * 2 + 1)
    step = tl.arange(0, SPANS)
    parts = tl.load(sums + sequence * spans + step, mask=step < spans, other=0)
    ends = tl.cumsum(parts, 0)
    total = tl.sum(parts, axis=0)
    if total == 0:  # the residual is empty: draw from the target's row instead, which this program sums by itself
        a = a * 0.0 + 1.0
        b = b * 0.0
        total = _sum_residual(rows, 0, vocab, a, b, BLOCK)
        ends = ends * 0 + total
        length = length * 0 + vocab
    number = _uniform(tl.load(seed + sequence), tl.load(offset + sequence), node * 0)
    target = (number * total.to(tl.float64)).to(tl.int64)
    # Find the first span whose running sum exceeds the target, then the block within the span.
    span = tl.sum(((ends <= target) & (step < spans)).to(tl.int32), axis=0)
    before = tl.sum(tl.where(step < span, parts, 0), axis=0)
    begin = span * length
    end = tl.minimum(begin + length, vocab)
    token = tl.minimum(begin, vocab - 1) * 0
    if total > 0:
        found = token
        while (found == 0) & (begin < end):
            at = begin + tl.arange(0, BLOCK)
            weights = _fixed_point(_residual(rows, at, at < end, a, b))
            here = tl.sum(weights, axis=0)
            if before + here > target:
                passed = (before + tl.cumsum(weights, 0) <= target) & (at < end)
                token = begin + tl.sum(passed.to(tl.int32), axis=0)
                found = token * 0 + 1
            before += here
            begin += BLOCK
    tl.store(tokens + sequence * tokens_stride_b + last * tokens_stride_n, token)
