"""moe_apply by ``aiter.fused_moe.fused_moe``. Not run on hardware."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd.aiter.masked_device import with_masked_slot
from tokenspeed_kernel_amd.aiter.package import load
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

_aiter = load("aiter")
_fused_moe = load("aiter.fused_moe").fused_moe
_shuffle_weight = load("aiter.ops.shuffle").shuffle_weight


def prepare_dense(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Copies the weights to the layout of ``fused_moe``: all gate rows before all up rows, shuffled in 16 x 16 tiles."""
    w13 = weights.w13_weight
    if plan.w13_interleaved:
        w13 = w13.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    w13, w2 = (_shuffle_weight(each.contiguous(), layout=(16, 16)) for each in (w13, weights.w2_weight))
    return MoEWeights(w13, None, None, w2, None, None, "aiter_dense")


def moe_apply(
    x: Tensor,
    weights: MoEWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    plan: MoEPlan,
    out: Tensor | None = None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_amd.moe_apply`. Supports no biases, no SwiGLU limit, alpha 1 and beta 0.

    The first call of a configuration takes minutes, because AITER compiles its kernel. Later calls do not synchronise with the
    device. The top-k slots of a token are accumulated with atomic additions, so results may differ in the last bits from run to
    run.
    """
    if not topk_ids.numel():  # AITER rejects an empty batch
        return x.new_empty(x.shape) if out is None else out
    factors, ids, mask = with_masked_slot(topk_weights, topk_ids, plan.num_experts)
    found: Tensor = _fused_moe(
        x.contiguous(),
        weights.w13_weight,
        weights.w2_weight,
        factors,
        ids,
        expert_mask=mask,
        activation=_aiter.ActivationType.Silu,
        quant_type=_aiter.QuantType.No,
    )
    return found if out is None else out.copy_(found)
