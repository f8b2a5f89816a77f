"""The QK and PV MFMAs of attention.

The softmax's probabilities P (``weights`` here) stay in their lanes between the two MFMAs. The QK MFMA leaves the keys of a row in
a certain order (``k_width`` 4), and the PV MFMA sums over keys in that order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx942 import instructions_device as isa
from tokenspeed_kernel_amd.gluon.softmax_device import SoftmaxState


@gluon.jit
def qk_mma(q, keys):
    """Returns q @ keys, float32; ``keys``: [head_dim, keys]. fp8 keys are converted to q's dtype."""
    return isa.mfma(q, keys.to(q.dtype), gl.zeros([q.shape[0], keys.shape[1]], gl.float32, q.type.layout.parent))


@gluon.jit
def pv_mma(weights, values, acc, dtype: gl.constexpr):
    """Returns acc + weights @ values. The float32 probabilities ``weights`` are rounded to ``dtype``."""
    p = gl.convert_layout(rounded(weights, dtype), gl.DotOperandLayout(0, acc.type.layout, 4), assert_trivial=True)
    return isa.mfma(p, values, acc)


@gluon.jit
def permuted_columns(values):
    """Permutes the columns of values, [keys, columns]: column ``16 * j + i`` of the result is column ``columns / 16 * i + j``.

    A lane that loads ``columns / 16`` adjacent columns then holds one column of each of as many MFMAs.
    """
    keys: gl.constexpr = values.shape[0]
    each: gl.constexpr = values.shape[1] // 16
    return values.reshape([keys, 16, each]).permute([0, 2, 1]).reshape([keys, 16 * each])


@gluon.constexpr_function
def adjacent_first(layout):
    """Returns a layout with the same elements in each lane, in which adjacent columns are in adjacent registers. Only then are they
    stored together."""
    return gl.DistributedLinearLayout(
        sorted(layout.reg_bases), layout.lane_bases, layout.warp_bases, layout.block_bases, layout.shape
    )


@gluon.jit
def in_order(state):
    """Returns the softmax state with the columns of its accumulators in the order of V: the inverse of `permuted_columns`."""
    rows: gl.constexpr = state.acc.shape[0]
    each: gl.constexpr = state.acc.shape[1] // 16
    acc = state.acc.reshape([rows, each, 16]).permute([0, 2, 1]).reshape([rows, 16 * each])
    acc = gl.convert_layout(acc, adjacent_first(acc.type.layout), assert_trivial=True)
    row: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return SoftmaxState(acc, gl.convert_layout(state.row_max, row), gl.convert_layout(state.row_sum, row))


@gluon.jit
def rounded(weights, dtype: gl.constexpr):
    """Rounds float32 weights, which are not negative, to ``dtype``.

    gfx942 has no instruction that rounds to bf16. Rounding to nearest even takes four instructions per element. Here, ties are
    rounded up, which takes one instruction per element, and one per pair. Infinity and the NaNs that instructions return stay what
    they are.
    """
    if dtype == gl.bfloat16:
        bits = weights.to(gl.uint32, bitcast=True) + 0x8000
        narrow = (bits >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    else:
        narrow = weights.to(dtype)
    return narrow
