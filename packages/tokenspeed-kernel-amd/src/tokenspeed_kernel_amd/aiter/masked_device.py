"""How ``aiter.fused_moe.fused_moe`` is told of top-k slots without an expert."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def with_masked_slot(topk_weights: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces negative ids by the id of an extra expert, which the mask marks as on another rank.

    Every row gets one more top-k slot with that id. AITER's convention for calls with a mask is that the last slot never has an
    expert: AITER looks up its tuned kernels under the number of the other slots. Without the extra slot, a call with top-k 4 would
    run the kernels that were tuned for top-k 3.

    Args:
        topk_weights: float32 [tokens, top_k].
        topk_ids: int32 [tokens, top_k]; negative ids have no expert.
        num_experts: the number of experts.

    Returns:
        float32 weights and int32 ids [tokens, top_k + 1], and the int32 mask [num_experts + 1].
    """
    mask = topk_ids.new_ones(num_experts + 1)
    mask[num_experts].zero_()
    ids = pad(topk_ids.where(topk_ids >= 0, num_experts), (0, 1), value=num_experts)
    return pad(topk_weights, (0, 1)), ids, mask
