"""Device code of `rmsnorm_moe_topk`. The last program of a token to arrive routes the token, so that one launch suffices."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.common_device import prefetch_rows, start
from tokenspeed_kernel.triton.moe.moe_topk_device import route
from tokenspeed_kernel.triton.norm.rmsnorm_device import inverse_rms
from tokenspeed_kernel.triton.quantization._encode_device import round_to


@triton.jit
def rmsnorm_moe_topk_kernel(
    x,
    residual,
    norm_weight,
    router_weight,
    router_bias,
    correction_bias,
    out,
    residual_out,
    logits,
    arrived,
    weights,
    ids,
    hidden,
    eps,
    x_stride, residual_stride, norm_stride,
    router_expert, router_column, router_bias_stride,
    out_stride, residual_out_stride,
    correction_stride,
    weights_row, weights_column,
    ids_row, ids_column,
    scaling_factor,
    HAS_RESIDUAL: tl.constexpr,
    ROUTER_BIAS: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP_PADDED: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Normalises one token and computes its router logits of ``BLOCK`` experts. The token's last program to finish routes the
    token.
    """
    block, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, HIDDEN_PADDED)[None, :]
    inside = column < hidden
    expert = block * BLOCK + tl.arange(0, BLOCK)
    real = expert < EXPERTS
    # Issue the largest independent loads first.
    rows = router_weight + expert[:, None].to(tl.int64) * router_expert
    if EARLY:  # prefetch only: the preceding kernel may still run, and may write the weights
        prefetch_rows(rows, real[:, None], hidden, router_column, router_weight, HIDDEN_PADDED)
    start(EARLY)
    router = tl.load(rows + column * router_column, mask=real[:, None] & inside, other=0.0)
    total = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + token * residual_stride + column, mask=inside, other=0.0)
        total = round_to(total.to(tl.float32) + added.to(tl.float32), added.dtype, INTERPRETED)
    scale = tl.load(norm_weight + column * norm_stride, mask=inside, other=0.0).to(tl.float32)
    wide = total.to(tl.float32)
    normed = round_to(wide * inverse_rms(wide, hidden, eps) * scale, out.dtype.element_ty, INTERPRETED)
    if block == 0:
        tl.store(out + token * out_stride + column, normed, mask=inside)
        if HAS_RESIDUAL:
            tl.store(residual_out + token * residual_out_stride + column, total, mask=inside)
    logit = tl.sum(router.to(tl.float32) * normed.to(tl.float32), axis=1)
    if ROUTER_BIAS:
        logit += tl.load(router_bias + expert * router_bias_stride, mask=real, other=0.0).to(tl.float32)
    tl.store(logits + token * EXPERTS + expert, round_to(logit, logits.dtype.element_ty, INTERPRETED), mask=real)

    # The last program of a token sees all of the token's logits, and routes the token. The barrier orders all threads' stores
    # before the increment of the counter.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + token, 1, sem="acq_rel", scope="gpu")
    if before == BLOCKS - 1:
        tl.store(arrived + token, 0)
        route(
            logits, correction_bias, weights, ids, token + tl.arange(0, 1), token + 1, EXPERTS, 1, correction_stride,
            weights_row, weights_column, ids_row, ids_column, scaling_factor, EXPERTS, TOP_K, TOP_K_PADDED,
            GROUPS, GROUPS_PADDED, GROUP_PADDED, TOP_GROUPS, SCORING, RENORMALIZE, BIAS, PACKED,
        )  # fmt: skip
