"""Device code of `qk_rmsnorm`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.norm.rmsnorm_device import inverse_rms
from tokenspeed_kernel.triton.views_device import Heads, row_of


@triton.jit
def _normalise_heads(
    x,
    weight,
    weight_stride,
    out,
    first,
    tokens,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalises heads ``first`` to ``first + TILE - 1``. Heads are numbered across all tokens, token by token."""
    head = first + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    token, head = (head // HEADS).to(tl.int64), (head % HEADS).to(tl.int64)
    inside = (token < tokens) & (column < HEAD_DIM)
    loaded = tl.load(row_of(x, token, head) + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column * weight_stride, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    normed = loaded * inverse_rms(loaded, HEAD_DIM, eps) * scale
    tl.store(row_of(out, token, head) + column, normed.to(out.first.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "q_programs"])
def qk_rmsnorm_kernel(
    q,
    k,
    q_weight,
    k_weight,
    q_out,
    k_out,
    tokens,
    q_programs,
    eps,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    q_weight_stride,
    k_weight_stride,
    q_out_token_stride,
    q_out_head_stride,
    k_out_token_stride,
    k_out_head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The first ``q_programs`` programs normalise TILE heads of q each, all others TILE heads of k each. Sums are float32.
    program = tl.program_id(0)
    if program < q_programs:
        x = Heads(q, q_token_stride, q_head_stride)
        out = Heads(q_out, q_out_token_stride, q_out_head_stride)
        _normalise_heads(x, q_weight, q_weight_stride, out, program * TILE, tokens, eps, Q_HEADS, HEAD_DIM, TILE, BLOCK)
    else:
        x = Heads(k, k_token_stride, k_head_stride)
        out = Heads(k_out, k_out_token_stride, k_out_head_stride)
        first = (program - q_programs) * TILE
        _normalise_heads(x, k_weight, k_weight_stride, out, first, tokens, eps, K_HEADS, HEAD_DIM, TILE, BLOCK)
