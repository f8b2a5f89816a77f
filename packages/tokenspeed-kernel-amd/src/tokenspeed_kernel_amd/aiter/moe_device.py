"""moe_apply by ``aiter.fused_moe.fused_moe``. Not run on hardware."""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd.aiter.package import load
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

_aiter = load("aiter")
_fused_moe = load("aiter.fused_moe").fused_moe
_shuffle_weight = load("aiter.ops.shuffle").shuffle_weight


def prepare_dense(weights: MoEWeights, plan: MoEPlan) -> MoEWeights:
    """Weights as ``fused_moe`` wants them: all gates before all ups, and tiles of 16 x 16 shuffled."""
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
    """See `tokenspeed_kernel_amd.moe_apply`; there are no biases and no limits, and alpha is 1 and beta 0.

    The first call of a kind waits for minutes, while AITER compiles its kernel. Later ones do not wait for the device. Slots are
    summed up by atomic additions, so that equal calls may differ in the last bits.
    """
    if not topk_ids.numel():  # AITER refuses an empty batch
        return x.new_empty(x.shape) if out is None else out
    # Slots without an expert name one more expert, which the mask says is elsewhere.
    elsewhere = plan.num_experts
    mask = topk_ids.new_ones(plan.num_experts + 1)
    mask[elsewhere].zero_()
    found: Tensor = _fused_moe(
        x.contiguous(),
        weights.w13_weight,
        weights.w2_weight,
        topk_weights.contiguous(),
        topk_ids.where(topk_ids >= 0, elsewhere),
        expert_mask=mask,
        activation=_aiter.ActivationType.Silu,
        quant_type=_aiter.QuantType.No,
    )
    return found if out is None else out.copy_(found)
