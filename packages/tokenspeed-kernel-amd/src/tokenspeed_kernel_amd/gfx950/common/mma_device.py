"""The QK and PV MFMAs of attention, and the loads of their operands from LDS.

The softmax's probabilities P (``weights`` here) stay in their lanes between the two MFMAs. The QK MFMA leaves the keys of a row in
a certain order (``k_width`` 4), and the PV MFMA sums over keys in that order. The transposing LDS reads load V in the same order.
The result of a sum over keys does not depend on their order, except for rounding.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenspeed_kernel_amd.gfx950 import instructions_device as isa
from tokenspeed_kernel_amd.gfx950.instructions_device import copies
from tokenspeed_kernel_amd.gluon.layouts_device import key_width


@gluon.jit
def load_keys(q, keys):
    """Loads keys, [keys, head_dim] in LDS, and transposes them into the layout of `qk_mma`'s right operand."""
    layout: gl.constexpr = q.type.layout.parent
    return copies.load_shared_relaxed(keys.permute([1, 0]), gl.DotOperandLayout(1, layout, key_width(keys.dtype)))


@gluon.jit
def load_values(q, values):
    """Loads values from LDS, [keys, v_head_dim], in the layout of `pv_mma`'s right operand."""
    return copies.load_shared_relaxed(values, gl.DotOperandLayout(1, q.type.layout.parent, 4))


@gluon.jit
def qk_mma(q, k):
    """Returns q @ keys^T, float32. fp8 keys are converted to q's dtype."""
    return isa.mfma(q, k.to(q.dtype), gl.zeros([q.shape[0], k.shape[1]], gl.float32, q.type.layout.parent))


@gluon.jit
def pv_mma(weights, v, acc, dtype: gl.constexpr):
    """Returns acc + weights @ V. The float32 probabilities ``weights`` are rounded to ``dtype``; fp8 V is converted to
    ``dtype``."""
    p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 4), assert_trivial=True)
    return isa.mfma(p, v.to(dtype), acc)
