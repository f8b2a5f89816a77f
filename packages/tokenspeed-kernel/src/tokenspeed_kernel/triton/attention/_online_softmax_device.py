"""Device code of `_online_softmax`."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def tanh(x):
    """Good to about 1e-7 absolutely, for any x: the exponential may be 0 or infinite."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def scored(products, multiplier, cap_log2, HAS_CAP: tl.constexpr):
    """``(scores, factor)``: the scores in base 2 are ``scores * factor``, factor positive.

    Without a cap those are the arguments, so that scaling and shifting become one instruction in `step_scored`.
    """
    if HAS_CAP:
        scores = cap_log2 * tanh(products * multiplier)
        factor = 1.0
    else:
        scores = products
        factor = multiplier
    return scores, factor


@triton.jit
def step_scored(largest, total, scores, factor):
    """`step` for scores of `scored`, -inf where a key is not visible."""
    raised = tl.maximum(largest, tl.max(scores, 1) * factor)
    shift = tl.where(raised == -float("inf"), 0.0, raised)
    weights = tl.exp2(scores * factor - shift[:, None])
    decay = tl.exp2(largest - shift)
    return weights, decay, raised, total * decay + tl.sum(weights, 1)


@triton.jit
def step(largest, total, products, multiplier, cap_log2, visible, HAS_CAP: tl.constexpr, MASKED: tl.constexpr):
    """One block of keys.

    Args:
        largest, total: float32 [M], the state.
        products: float32 [M, N], q . k.
        visible: bool, broadcastable to [M, N]; looked at where MASKED.

    Returns:
        ``(weights, decay, largest, total)``: what has been accumulated is to be multiplied by ``decay`` [M] before
        ``weights @ v`` is added.
    """
    scores, factor = scored(products, multiplier, cap_log2, HAS_CAP)
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    return step_scored(largest, total, scores, factor)


@triton.jit
def join_sink(largest, total, sink):
    """The state with one more score, ``sink`` [M] in natural units. Returns ``(decay, largest, total)``."""
    sink = sink.to(tl.float32) * LOG2_E
    raised = tl.maximum(largest, sink)
    shift = tl.where(raised == -float("inf"), 0.0, raised)
    decay = tl.exp2(largest - shift)
    return decay, raised, total * decay + tl.exp2(sink - shift)


@triton.jit
def log_sum_exp(largest, total):
    """The natural logarithm of the softmax's denominator; -inf of a row that has seen nothing."""
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    return (shift + tl.log2(total)) * LN_2


@triton.jit
def reciprocal_of(total):
    """``1 / total``, and 1 for a row that has seen nothing: its accumulated values are 0."""
    return 1.0 / tl.where(total == 0.0, 1.0, total)
