"""`moe_topk_apply` with mxfp4 and fp8 block-scaled weights on CDNA4: routing and the GEMMs of `moe_apply`.

In the smallest batches, the launch of the gate/up projection also routes. In larger batches, the launch that sorts pairs by expert
also routes. With too many tokens for either launch to route, a separate launch routes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_amd._rows import rows
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.moe.encoding import ACCURACY
from tokenspeed_kernel_amd.gfx950.moe.few import few_enough, few_enough_to_choose, moe_topk_apply_few
from tokenspeed_kernel_amd.gfx950.moe.grouped import few_enough_to_route, moe_apply_many
from tokenspeed_kernel_amd.gfx950.moe.moe_apply import ROUNDED, WEIGHTS, moe_apply
from tokenspeed_kernel_amd.gluon.choose import MAX_EXPERTS, Router, choose, power_of_two, room_for_choice, routing_for
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

_ROUTING: dict[str, Any] = {"num_experts": at_most(MAX_EXPERTS), "renormalize": any, "scaled": any}
_LOGITS = (torch.bfloat16, torch.float16, torch.float32)


def _registered(name: str, weights: str, dtypes: set[torch.dtype], **traits: Any) -> Callable[[Any], Any]:
    projection = WEIGHTS[weights].format
    return register_kernel(
        "moe",
        "moe_topk_apply",
        name=f"gluon_moe_topk_apply_{weights}{name}",
        solution="gluon",
        capability=GLUON_CDNA4,
        signatures={
            format_signature(x=dense_tensor_format(dtype), logits=dense_tensor_format(logits), w13=projection, w2=projection)
            for dtype in dtypes
            for logits in _LOGITS
        },
        traits={**WEIGHTS[weights].traits, **_ROUTING, **traits},
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
        accuracy=ACCURACY,
        weight_preprocessor=WEIGHTS[weights].prepare,
    )


def moe_topk_apply(
    x: Tensor, logits: Tensor, weights: MoEWeights, plan: MoEPlan, renormalize: bool, scaling_factor: float, out: Tensor | None
) -> Tensor:
    """Implements the operator `tokenspeed_kernel_amd.moe_topk_apply`, which has checked the arguments. Weights are in the layout
    that ``prepare`` of `WEIGHTS` makes."""
    tokens = len(x)
    few = few_enough(tokens, plan, weights)
    if few and few_enough_to_choose(tokens, plan):
        return moe_topk_apply_few(x, logits, weights, plan, renormalize, scaling_factor, out)
    if not few and few_enough_to_route(tokens, plan):
        routing = routing_for(tokens, power_of_two(plan.top_k), plan.num_experts, plan.top_k, renormalize)
        router = Router(rows(logits), scaling_factor, routing)
        return moe_apply_many(x, weights, *room_for_choice(logits, plan.top_k), plan, out, router=router)
    return moe_apply(x, weights, *choose(logits, plan.top_k, renormalize, scaling_factor), plan, out)


for _weights in WEIGHTS:
    _registered("", _weights, {torch.bfloat16, torch.float16}, **dict.fromkeys(ROUNDED.values(), any))(moe_topk_apply)
    for _kind, _trait in ROUNDED.items():
        _registered(f"_float32_{_kind}", _weights, {torch.float32}, **{_trait: {True}})(moe_topk_apply)
