"""Device code of `qk_rmsnorm`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.norm.rmsnorm_device import inverse_rms


@triton.jit
def _normalise_heads(
    x, weight, out, first, tokens, eps, token_stride, head_stride, weight_stride, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalises heads ``first`` to ``first + TILE - 1`` of the tokens' heads in a row."""
    head = first + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    token, head = (head // HEADS).to(tl.int64), (head % HEADS).to(tl.int64)
    inside = (token < tokens) & (column < HEAD_DIM)
    loaded = tl.load(x + token * token_stride + head * head_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column * weight_stride, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    normed = loaded * inverse_rms(loaded, HEAD_DIM, eps) * scale
    tl.store(out + token * out_token_stride + head * out_head_stride + column, normed.to(out.dtype.element_ty), mask=inside)


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
    program = tl.program_id(0)
    if program < q_programs:
        _normalise_heads(
            q, q_weight, q_out, program * TILE, tokens, eps, q_token_stride, q_head_stride, q_weight_stride,
            q_out_token_stride, q_out_head_stride, Q_HEADS, HEAD_DIM, TILE, BLOCK,
        )  # fmt: skip
    else:
        _normalise_heads(
            k, k_weight, k_out, (program - q_programs) * TILE, tokens, eps, k_token_stride, k_head_stride, k_weight_stride,
            k_out_token_stride, k_out_head_stride, K_HEADS, HEAD_DIM, TILE, BLOCK,
        )  # fmt: skip
