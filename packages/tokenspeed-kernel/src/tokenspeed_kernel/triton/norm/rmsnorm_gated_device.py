"""Device code of `rmsnorm_gated`: RMSNorm and a sigmoid or SiLU gate, in float32, rounded once. The gate comes before or after the
norm (GATE_FIRST).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.norm.rmsnorm_device import inverse_rms

_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def _sigmoid(x):
    # Returns ``1 / (1 + exp(-x))``, float32.
    # A squared reciprocal square root is as accurate as a division, and takes three fewer instructions.
    root = tl.rsqrt(1.0 + tl.exp2(x * _MINUS_LOG2_E))
    return root * root


@triton.jit(do_not_specialize=["tokens"])
def rmsnorm_gated_kernel(
    x,
    gate,
    weight,
    out,
    tokens,
    heads,
    hidden,
    eps,
    x_token,
    x_head,
    gate_token,
    gate_head,
    SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Normalises and gates a tile of rows. With ``HEADS``, the rows are heads of one token; otherwise each token has one head, and
    the rows are tokens.
    """
    start(EARLY)
    if HEADS:
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = head < heads
        x += token * x_token
        gate += token * gate_token
        out += token * heads * hidden
        x_row, gate_row = x_head, gate_head
    else:
        head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = head < tokens
        x_row, gate_row = x_token, gate_token
    row = head.to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside &= column < hidden
    wide = tl.load(x + row * x_row + column, mask=inside, other=0.0)
    gates = tl.load(gate + row * gate_row + column, mask=inside, other=0.0)
    # Load the weight as a full tile in the layout of x. Each thread then loads the elements that it needs, without a conversion in
    # shared memory.
    scale = tl.load(weight + (row * 0 + column), mask=column < hidden, other=0.0)
    wide = wide.to(tl.float32)
    gates = gates.to(tl.float32)
    factor = _sigmoid(gates)
    if SILU:
        factor *= gates
    if GATE_FIRST:
        wide *= factor
    normed = wide * inverse_rms(wide, hidden, eps) * scale.to(tl.float32)
    if not GATE_FIRST:
        normed *= factor
    tl.store(out + row * hidden + column, normed.to(out.dtype.element_ty), mask=inside)
