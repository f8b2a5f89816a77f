"""Online softmax over blocks of keys.

The scores of a row never exist all at once. Three values per row are kept for the key blocks so far: the largest score ``row_max``;
``row_sum``, the sum of the *weights* (unnormalised probabilities) ``exp(score - row_max)``; and ``acc``, the sum of V weighted by
them. If a block has a larger score, ``exp(old row_max - new row_max)`` rescales row_sum and acc ("online softmax",
https://arxiv.org/abs/1805.02867). The row max may be any value near the largest score, as long as no weight overflows. `weigh` does
not update ``row_max``, and `largest_sum` gives the row sum up to which the result is then valid.

All scores are multiplied by log2(e), because an exponential is then one instruction (exp2).
"""

from __future__ import annotations

import math

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.hip import libdevice

from tokenspeed_kernel_amd.gluon.layouts_device import lanes_of_row

LOG2_E = gl.constexpr(math.log2(math.e))
LN_2 = gl.constexpr(math.log(2))
# The initial row max. The value is finite, so that a row without visible keys has weights exp2(-inf - LOWEST) = 0, not NaN.
LOWEST = gl.constexpr(-1e30)


@gluon.aggregate
class Scaling:
    """The parameters that convert dot products of q and k to scores.

    Attributes:
        scale: factor of the dot products: ``softmax_scale * log2(e)``, or ``2 * log2(e) * softmax_scale / logit_cap`` if capped.
            One value, or float32 [rows] if rows of q are scaled.
        cap: ``logit_cap * log2(e)``; only if capped.
        capped: whether there is a logit cap.
    """

    scale: gl.tensor
    cap: gl.tensor
    capped: gl.constexpr


@gluon.aggregate
class SoftmaxState:
    """The online softmax's state for a tile's rows after some blocks of keys.

    Attributes:
        acc: float32 [rows, v_head_dim], the sum of V weighted by ``exp2(score - row_max)``.
        row_max: float32 [rows], the row max of the scores times log2(e).
        row_sum: float32, the sums of the weights per lane, see `lane_sums`; `summed` reduces them to [rows].
    """

    acc: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor


@gluon.jit
def larger(a, b):
    """Returns the maximum, or NaN if an operand is NaN. gfx950 has one instruction for the NaN-propagating maximum of three
    operands. That instruction does not need canonicalised operands."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def lane_sums(weights):
    """Returns each lane's partial sum of a row's elements, [rows, 4]; the reduction across lanes is deferred to `summed`.

    If only two lanes hold a row, their partial sums are reduced at once, [rows, 1]. A prefill of 1024 tokens took 10.0 us of the
    emulator's timing model, and 10.5 us with per-lane sums, which LLVM schedules worse.
    """
    rows: gl.constexpr = weights.shape[0]
    columns: gl.constexpr = weights.shape[1]
    lanes: gl.constexpr = lanes_of_row(weights.type.layout)
    if lanes == 2:
        sums = gl.sum(weights, 1)[:, None]
    else:
        sums = gl.sum(gl.sum(weights.reshape([rows, columns // (4 * lanes), lanes, 4]), 3), 1)
    return sums


@gluon.jit
def initial_state(rows: gl.constexpr, v_head_dim: gl.constexpr, block_n: gl.constexpr, layout: gl.constexpr):
    """Returns the state before the first key, with per-lane row sums."""
    return SoftmaxState(
        gl.zeros([rows, v_head_dim], gl.float32, layout),
        gl.full([rows], LOWEST, gl.float32, gl.SliceLayout(1, layout)),
        lane_sums(gl.zeros([rows, block_n], gl.float32, layout)),
    )


@gluon.jit
def nothing_seen(rows: gl.constexpr, v_head_dim: gl.constexpr, layout: gl.constexpr):
    """Returns the state before the first key, with row sums [rows] as after `summed`."""
    row: gl.constexpr = gl.SliceLayout(1, layout)
    return SoftmaxState(
        gl.zeros([rows, v_head_dim], gl.float32, layout),
        gl.full([rows], LOWEST, gl.float32, row),
        gl.zeros([rows], gl.float32, row),
    )


@gluon.jit
def scaled(dot_products, scaling):
    """Returns the dot products, [rows, keys], times ``scaling.scale``."""
    scale = scaling.scale
    if len(scale.shape) == 1:
        scale = scale[:, None]
    return dot_products * scale


@gluon.jit
def cap_scores(dot_products, scaling):
    """With a cap, returns ``logit_cap * tanh(score / logit_cap) * log2(e)``. Without a cap, returns the unscaled dot products,
    which are scaled later."""
    if scaling.capped:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)). This form is correct even if exp overflows to infinity or underflows to 0.
        # The division is v_rcp_f32, with an error of 1 ulp; an IEEE division would be ten instructions.
        dot_products = scaling.cap - libdevice.fast_dividef(2 * scaling.cap, 1 + gl.exp2(scaled(dot_products, scaling)))
    return dot_products


@gluon.jit
def softmax_step(scores, state, scaling, LIFT: gl.constexpr = 0):
    """Returns the weights of a block of scores (see `cap_scores`), and the rescaled state. The state's row sum includes these
    weights; its acc does not include their values yet.

    Args:
        LIFT: the row max is the largest score minus this number. Weights are then at most ``2**LIFT``, so that fewer underflow in
            fp8.
    """
    highest = gl.reduce(scores, 1, larger)
    if scaling.capped:
        row_max = larger(state.row_max, highest - LIFT if LIFT > 0 else highest)
        weights = gl.exp2(scores - row_max[:, None])
    else:
        highest *= scaling.scale
        row_max = larger(state.row_max, highest - LIFT if LIFT > 0 else highest)
        weights = gl.exp2(scaled(scores, scaling) - row_max[:, None])
    shrink = gl.exp2(state.row_max - row_max)
    sums = lane_sums(weights)
    acc = state.acc * shrink[:, None]
    row_sum = state.row_sum * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return weights, SoftmaxState(acc, row_max, row_sum)


@gluon.jit
def weigh(scores, state, scaling):
    """Does what `softmax_step` does, but does not update the row max, so weights may exceed 1. See `largest_sum`."""
    if scaling.capped:
        weights = gl.exp2(scores - state.row_max[:, None])
    else:
        weights = gl.exp2(scaled(scores, scaling) - state.row_max[:, None])
    return weights, SoftmaxState(state.acc, state.row_max, state.row_sum + lane_sums(weights))


@gluon.jit
def first_step(scores, v_head_dim: gl.constexpr, scaling):
    """Does what `softmax_step` does, for a row's first block. Returns the block's weights and the state, whose row sum includes
    these weights and whose acc is 0."""
    highest = gl.reduce(scores, 1, larger)
    if scaling.capped:
        row_max = larger(highest, LOWEST)
        weights = gl.exp2(scores - row_max[:, None])
    else:
        row_max = larger(highest * scaling.scale, LOWEST)
        weights = gl.exp2(scores * scaling.scale - row_max[:, None])
    acc = gl.zeros([scores.shape[0], v_head_dim], gl.float32, scores.type.layout)
    return weights, SoftmaxState(acc, row_max, lane_sums(weights))


@gluon.constexpr_function
def largest_sum(dtype):
    """Returns the row sum up to which `weigh` is valid: no weight became infinite when it was rounded to ``dtype``, and the PV
    accumulators are finite if V is at most 2**63."""
    return 2.0**15 if dtype == gl.float16 else 2.0**64


@gluon.jit
def bit_or(a, b):
    return a | b


@gluon.jit
def in_some_row(found):
    """Returns the bits that are set in some row of ``found``, int32 [rows], as one value of the workgroup."""
    # Every lane reads the same value from LDS. v_readfirstlane tells LLVM that the value is uniform.
    bits = gl.reduce(found, 0, bit_or)
    return gl.inline_asm_elementwise("v_readfirstlane_b32 $0, $1", "=s,v", [bits], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def summed(state):
    """Returns the state with its row sums reduced across lanes, [rows]."""
    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), state.row_max.type.layout)
    return SoftmaxState(state.acc, state.row_max, row_sum)


@gluon.jit
def normalise(state, sink):
    """Returns the normalised output and the base-2 LSE of a `summed` state.

    A row without visible keys has output 0 and, without a sink, LSE -inf.

    Args:
        state: the state after all keys.
        sink: the sink logits times log2(e), [rows] or one value for all rows; or None.
    """
    row_max = state.row_max
    row_sum = state.row_sum
    shrink = 1.0
    if sink is not None:
        row_max = larger(row_max, sink)
        shrink = gl.exp2(state.row_max - row_max)
        row_sum = row_sum * shrink + gl.exp2(sink - row_max)
    seen = row_sum > 0
    acc = state.acc * gl.where(seen, libdevice.fast_dividef(shrink, row_sum), 0.0)[:, None]
    return acc, gl.where(seen, row_max + gl.log2(row_sum), float("-inf"))
