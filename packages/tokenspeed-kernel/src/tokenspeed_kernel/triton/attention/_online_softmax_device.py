"""Device code of the online softmax of all attention kernels: scores, one step over a block of keys, and the epilogue.

Scores and LSEs are in base 2, because the hardware's exponential is. ``dots`` are the dot products q·k. With ``multiplier =
softmax_scale * log2(e)``, a score is ``dots * multiplier``. A key's *weight* is its unnormalised probability, ``exp2(score -
row_max)``. With a logit cap, ``multiplier`` is ``softmax_scale / cap``, ``cap_log2`` is ``cap * log2(e)``, and a score is
``cap_log2 * tanh(dots * multiplier)``.

A row that has seen no key has ``row_max = -inf`` and ``row_sum = 0``. No step makes such a row NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


class Scaling(NamedTuple):
    """The parameters that convert dot products q·k to scores, see the module's docstring. ``cap_log2`` is read only with a logit
    cap.
    """

    multiplier: Any
    cap_log2: Any


class Softmax(NamedTuple):
    """The online-softmax state of query rows, float32 [M] each.

    ``row_max``: the largest score so far. ``row_sum``: the sum of ``exp2(score - row_max)`` so far.
    """

    row_max: Any
    row_sum: Any


@triton.jit
def no_keys_yet(ROWS: tl.constexpr):
    """Returns the `Softmax` state of ROWS rows before the first block of keys."""
    return Softmax(tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32))


@triton.jit
def tanh(x):
    """Returns tanh(x) with an absolute error of about 1e-7, for any x, even where the exponential is 0 or infinite."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def scale_scores(dots, scaling, HAS_CAP: tl.constexpr):
    """Returns ``(scores, factor)``: the base-2 scores are ``scores * factor``, and factor is positive.

    Without a cap, scores remain unscaled dot products. Scaling and subtraction of the row max then become one FMA.
    """
    if HAS_CAP:
        scores = scaling.cap_log2 * tanh(dots * scaling.multiplier)
        factor = 1.0
    else:
        scores = dots
        factor = scaling.multiplier
    return scores, factor


@triton.jit
def softmax_step(state, scores, factor):
    """Performs one online-softmax step over a block of keys.

    Args:
        state: the state of the rows.
        scores, factor: the results of `scale_scores`. Scores are [M, N], and -inf where a key is not visible.

    Returns:
        ``(weights, decay, state)``: rescale the accumulator by ``decay`` [M] before adding ``weights @ v``.
    """
    row_max = tl.maximum(state.row_max, tl.max(scores, 1) * factor)
    shift = finite_or_zero(row_max)
    weights = tl.exp2(scores * factor - shift[:, None])
    decay = tl.exp2(state.row_max - shift)
    return weights, decay, Softmax(row_max, state.row_sum * decay + tl.sum(weights, 1))


@triton.jit
def join_sink(state, sink):
    """Adds one score per row, the attention sink, to the state. ``sink`` is [M], in base e. Returns ``(decay, state)``: multiply
    the accumulator by ``decay``."""
    sink = sink.to(tl.float32) * LOG2_E
    row_max = tl.maximum(state.row_max, sink)
    shift = finite_or_zero(row_max)
    decay = tl.exp2(state.row_max - shift)
    return decay, Softmax(row_max, state.row_sum * decay + tl.exp2(sink - shift))


@triton.jit
def finite_or_zero(row_max):
    """Returns the row max, or 0 for a row that has seen no key. ``score`` minus the result is therefore never NaN."""
    return tl.where(row_max == -float("inf"), 0.0, row_max)


@triton.jit
def log2_sum_exp(state):
    """Returns the rows' LSE in base 2; -inf for a row that has seen no key."""
    return finite_or_zero(state.row_max) + tl.log2(state.row_sum)


@triton.jit
def log_sum_exp(state):
    """Returns the rows' LSE in base e; -inf for a row that has seen no key."""
    return log2_sum_exp(state) * LN_2


@triton.jit
def reciprocal_of(row_sum):
    """Returns ``1 / row_sum``, or 1 for a row that has seen no key, whose accumulator is 0."""
    return 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
