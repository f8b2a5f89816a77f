"""Device code of `rmsnorm_gated`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import start
from tokenspeed_kernel.triton.norm.rmsnorm_device import inverse_rms


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_gated_kernel(
    x,
    gate,
    weight,
    out,
    rows,
    heads,
    hidden,
    eps,
    x_token,
    x_head,
    gate_token,
    gate_head,
    SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A few rows. A row is a head of a token."""
    start(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < hidden)
    token, head = (row // heads).to(tl.int64), row % heads
    wide = tl.load(x + token * x_token + head * x_head + column, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_token + head * gate_head + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gates)
    if SILU:
        factor *= gates
    if GATE_FIRST:
        wide *= factor
    normed = wide * inverse_rms(wide, hidden, eps) * scale
    if not GATE_FIRST:
        normed *= factor
    tl.store(out + row.to(tl.int64) * hidden + column, normed.to(out.dtype.element_ty), mask=inside)
